"""Checks before anything is written: packages, and the splits that a run opens."""

import errno
import importlib.util
import pathlib
import re
import shlex
import tempfile

import jax
import numpy as np
import pytest
from asked import prepare
from at_fault import at_fault
from etils import epath
from opened import config_json, evaluate_run, open_all
from read_settings import data_and_evals, decided, settings_of, splits_of

from vit_jax import create_model, data, save_pretrained
from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, fewshot, train_split, with_values
from vit_jax.config.stored import StoredConfig
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.images.files import describe_contents
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.data.sources import arrays
from vit_jax.experiment.model_name import describe_model
from vit_jax.models.variants import Variant
from vit_jax.run.build import compare_value_ranges, describe
from vit_jax.run.setup.changes import check_unchanged
from vit_jax.run.setup.sources import (
    check_evaluated_images,
    check_images,
    data_fingerprint,
    open_evaluated,
)
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.setup.workdir import read_run
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.pretrained import Pretrained, Spec

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def make_config(num_classes=10, **evals):
    c = base_config()
    c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", num_classes, 64
    c.data.image_size = 8
    for name, entry in evals.items():
        c.evals[name] = entry
    return c


def make_small(batch_size=8, duration="1 steps"):
    """A config that trains, of a tiny model."""
    c = make_config()
    c.global_batch_size, c.duration = batch_size, duration
    c.model.name, c.optimizer.peak_lr = "ViT-mu/4", 1e-3
    return c


def few(**fields):
    return fewshot(train_split="train", test_split="test", every="1 epochs", **fields)


def check(**fields):
    return classification(split="test", every="1 epochs", **fields)


def test_another_data_set_may_have_other_classes_where_these_are_learnt():
    config = make_config(num_classes=3, few=few(data_name="digits"), own=few(), test=check())
    config, sources = open_all(config)
    found = {(key.data_name, key.split): s.num_classes for key, s in sources.items()}
    assert found == {
        ("synthetic", "train"): 3,
        ("synthetic", "test"): 3,
        ("digits", "train"): 10,
        ("digits", "test"): 10,
    }
    assert (
        sources[train_split(settings_of(config).data)].num_examples
        == config.data.num_examples
        == 64
    )
    assert sources[splits_of(config, "few")["test_split"]].num_examples == 360
    check_images(*data_and_evals(config), parse_preprocessing(settings_of(config)), sources)


@pytest.mark.parametrize("first", ["few", "test"])
def test_another_data_set_must_have_the_classes_of_the_model(first):
    entries = {"few": few(data_name="digits"), "test": check(data_name="digits")}
    ordered = {name: entries[name] for name in sorted(entries, key=lambda name: name != first)}
    with at_fault("evals.test.split"):
        open_all(make_config(num_classes=3, **ordered))


@pytest.fixture
def flags_for(caplog):
    """flags_for(config, spec): the flags that give the value range of a source, as is warned."""

    def flags_for(config, spec):
        caplog.clear()
        source = Pretrained("w.safetensors", None, {}, spec)
        compare_value_ranges(settings_of(config).data, source, "w.safetensors")
        return {*re.findall(r"set (--config\.data\.[\w.=,]+)", caplog.text)}

    return flags_for


def test_another_value_range_than_the_source_s_is_said(flags_for, caplog):
    config = base_config()
    config.init_from, config.data.mean = "w.safetensors", (0.5, 0.4, 0.5)
    spec = Spec((8, 8), "antialiased", std=(0.5, 0.5, 0.25))
    of_range = {"--config.data.mean=0.5,0.5,0.5", "--config.data.std=0.5,0.5,0.25"}
    assert flags_for(config, spec) == of_range
    assert "data.mean=(0.5, 0.4, 0.5), but init_from=w.safetensors was trained" in caplog.text
    config.data.mean, config.data.std = spec.mean, spec.std
    assert flags_for(config, spec) == set() and not caplog.records
    spec = spec._replace(exif=False, pixel_range=(0, 4095))
    of_files = {"--config.data.exif=false", "--config.data.pixel_range=0,4095"}
    assert flags_for(config, spec) == of_files


def test_the_value_range_of_other_channels_is_said(flags_for, caplog):
    config = base_config()
    config.data.channels = 4
    spec = Spec((8, 8), "antialiased", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert flags_for(config, spec) == {"--config.data.std=0.3"}
    config.data.std = (0.2, 0.3, 0.4, 0.5)  # chosen for each channel
    assert flags_for(config, spec) == set() and not caplog.records


def test_sizes_that_stay_although_the_model_is_named_are_said(tmp_path, caplog):
    config = load_config("configs/quickstart.py:debug")
    config.model.name, config.model.width = "ViT-B/4", None
    for by_user in (
        {"model.name"},
        {"model.name", *(f"model.{key}" for key in Variant._fields)},
        (),
    ):
        describe(prepare(config, tmp_path / "run", by_user=by_user))
    said = [record.message for record in caplog.records if "model.name" in record.message]
    assert len(said) == 1
    assert "--config.model.depth=None" in said[0] and "width" not in said[0]


@pytest.mark.usefixtures("without_checks")
def test_classes_of_a_mixture_are_balanced_by_how_often_they_are_drawn(
    tmp_path, monkeypatch, caplog
):
    counts = {"digits test": [300, 60], "digits train": [0, 1437]}
    counted = []

    def count_labels(source):
        counted.append(f"{source.name} {source.split}")
        return np.array([*counts[counted[-1]], *[0] * 8])

    monkeypatch.setattr(data, "count_labels", count_labels)
    config = make_config()
    config.data.name, config.data.split, config.data.num_examples = "digits", "test", None
    config.data.mix, config.loss.class_weights = "digits@train=0.4", "balanced"
    found = open_all(config)[0]
    assert sorted(counted) == ["digits test", "digits train"]
    first, second = (float(w) for w in found.loss.class_weights.split(",")[:2])
    assert first == pytest.approx(0.1 / (0.6 * 300 / 360), rel=1e-5)
    assert second == pytest.approx(0.1 / (0.6 * 60 / 360 + 0.4), rel=1e-5)


def make_images(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return str(root)


def test_other_classes_than_the_models_are_told_once_by_the_key_that_was_typed(tmp_path):
    config = make_config(2, val=check(), test=check(), own=check(data_dir=str(tmp_path / "own")))
    names = [f"{split}/{c}/1.png" for split in ("train", "val", "test") for c in ("cat", "eel")]
    config.data.name, config.data.data_dir = "folder", make_images(tmp_path / "other", *names)
    config.evals.val.split = "val"
    make_images(tmp_path / "own", *names, "train/ant/1.png")
    with pytest.raises(InputError) as error:
        open_evaluated(*data_and_evals(config), ("cat", "dog"))
    own, others = sorted(error.value.faults)
    assert f"data.data_dir='{tmp_path}/other': the classes 'eel' are none of the" in others
    assert f"evals.own.data_dir='{tmp_path}/own': the classes 'ant', 'eel' are" in own


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["set/train/cat/1.png", "set/train/dog/1.png"],
         "has 1 class, ('set',); needed: at least 2; give the folder that holds"),
        (["1.png", "2.JPG", "notes.txt"],
         "has 0 class folders: found 1 .png, 1 .jpg, 1 .txt"),
        ([".hidden"], "has 0 class folders: found nothing in it; needed"),
        (["cat/notes.txt", "dog/notes.txt"],
         "holds no images in folders of classes: found 2 folders; add some"),
        (["set/train/cat/notes.txt"], "found set/ with train/ in it; set data_dir to ROOT/set"),
    ],
)  # fmt: skip
def test_a_folder_of_another_form_is_described(tmp_path, names, said):
    config = make_config(None)
    config.data.name, config.data.num_examples = "folder", None
    config.data.data_dir = make_images(tmp_path, *names)
    with pytest.raises(InputError) as error:
        open_all(config)
    assert said.replace("ROOT", str(tmp_path)) in str(error.value)
    assert ("add some" in str(error.value)) == ("add some" in said)


def test_given_images_of_one_class_are_named_by_their_source():
    config = make_config(None)
    config.data.name, config.data.num_examples = "arrays", None
    zeros = np.zeros((6, 8, 8, 3), np.uint8), np.zeros(6, int)
    with arrays.give({"train": zeros, "test": zeros}), at_fault("data.name"):
        open_all(config)


def test_a_folder_that_cannot_be_listed_does_not_hide_the_fault(tmp_path, monkeypatch):
    make_images(tmp_path, "cat/notes.txt", "lost+found/1.png", "set/train/cat/1.png")
    list_folder = pathlib.Path.iterdir

    def refuse(path):
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return list_folder(path)

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    assert describe_contents(tmp_path) == (
        f"found set/ with train/ in it; set data_dir to {tmp_path}/set"
    )


def test_all_faulty_splits_are_named():
    faulty = few(data_name="digits")
    faulty.train_split, faulty.test_split = "trian", "tset"
    with at_fault("evals.few.test_split", "evals.few.train_split"):
        open_evaluated(*data_and_evals(make_config(few=faulty)))


def test_images_of_another_data_set_are_checked():
    config = make_config(few=few(data_name="digits", ops="resize(9)"))
    with at_fault("evals.few.ops"):
        sources = open_evaluated(*data_and_evals(config))
        check_evaluated_images(
            *data_and_evals(config), parse_preprocessing(settings_of(config)), sources
        )


def test_crops_larger_than_their_images_are_refused_before_anything_is_compiled():
    config = make_config(test=check(ops="resize_small(7)|central_crop"), few=few())
    config.data.ops = "resize(9)|random_crop(10)|resize"
    config, sources = open_all(config)
    config.evals.few.ops = "resize(9)"
    with at_fault("data.ops", "evals.few.ops", "evals.test.ops"):
        check_images(*data_and_evals(config), parse_preprocessing(settings_of(config)), sources)


def test_the_fingerprint_changes_with_what_decides_the_bytes_of_a_batch():
    config = make_config()
    config.data.ops, config.global_batch_size = "resize(9)|random_crop(10)|resize", 8
    config, sources = open_all(config)
    source = sources[train_split(settings_of(config).data)]
    before = data_fingerprint(settings_of(config), source)
    config.data.ops = "resize(9)|random_crop(10, pad=True)|resize"
    assert data_fingerprint(settings_of(config), source) != before


def test_the_folders_of_a_mixture_may_move_while_a_run_is_stopped(tmp_path):
    def mixed(**part):
        part = {"name": "digits", "weight": 0.25, "split": "test"} | part
        mix = {"data.mix": str([part]), "data.num_examples": None}
        return decided(with_values(make_config(), mix))

    (tmp_path / "config.json").write_text(config_json(config := mixed(data_dir="old")))
    run, moved = read_run(epath.Path(tmp_path)), mixed(data_dir="new")
    check_unchanged(settings_of(moved), run, tmp_path)
    source = data.make_source("digits", split="train", image_size=(8, 8))
    both = settings_of(moved), settings_of(config)
    assert data_fingerprint(both[0], source) == data_fingerprint(both[1], source)
    with at_fault("data.mix"):
        check_unchanged(settings_of(mixed(weight=0.5)), run, tmp_path)


def test_a_run_of_another_config_names_the_flags_that_keep_it(tmp_path, caplog):
    config = decided(make_config(test=check(ops="resize"), other=check()))
    (tmp_path / "config.json").write_text(config_json(config))
    run = read_run(epath.Path(tmp_path))
    check_unchanged(settings_of(config), run, tmp_path)
    assert not caplog.records

    changed = decided(make_config(test=check(ops="resize(8)"), new=check()))
    changed.evals.test.every, changed.log.every = "2 epochs", "7 steps"
    check_unchanged(settings_of(changed), run, tmp_path)
    (record,) = caplog.records
    assert (
        "evals.test.ops: was 'resize', now 'resize(8)'; keep the old value with "
        "--config.evals.test.ops=resize" in record.getMessage()
    )
    assert "every" not in record.getMessage()

    changed.data.split, changed.data.ops, changed.model.hidden_head = "train[:99%]", "flip", True
    changed.data.mean = (0.0, 0.0, 0.0)
    with pytest.raises(InputError) as error:
        check_unchanged(settings_of(changed), run, tmp_path)
    flags = [fault.partition("; keep the old value with ")[2] for fault in error.value.faults]
    words = [word.removeprefix("--config.").split("=", 1) for flag in flags
             for word in shlex.split(flag)]  # fmt: skip
    assert apply_overrides(changed, words) == [] and len(words) == 4
    check_unchanged(settings_of(changed), run, tmp_path)


@pytest.mark.usefixtures("without_checks")
def test_a_run_keeps_its_number_of_microbatches_or_what_its_devices_allow(tmp_path):
    config = make_small(16)
    recorded = prepare(config, tmp_path / "new").resolved.config
    assert recorded.optimizer.accum_steps == 1  # of small activations
    for number, kept in ((2, 2), (8, 2)):  # each of 8 devices has 2 rows
        recorded.optimizer.accum_steps = number
        (tmp_path / "config.json").write_text(StoredConfig(config, recorded, {}).to_json())
        assert prepare(config, tmp_path).resolved.config.optimizer.accum_steps == kept
    (tmp_path / "classes.json").write_text("null")
    with at_fault("--workdir"):
        evaluate_run(recorded, tmp_path)  # 8 parts of 2 rows are none of its concern
    config.optimizer.accum_steps = 1
    with at_fault("optimizer.accum_steps"):
        prepare(config, tmp_path)


@pytest.mark.usefixtures("without_checks")
def test_without_wandb_a_run_that_asks_for_it_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_small()
    prepare(config, tmp_path / "workdir")
    config.log.wandb = "digits"
    with at_fault("log.wandb"):
        prepare(config, tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()


@pytest.mark.usefixtures("without_checks")
def test_only_what_trains_needs_a_workdir_to_write_to(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    config = make_small()
    with at_fault("--workdir"):
        prepare(config, tmp_path)
    (tmp_path / "classes.json").write_text("null")
    (tmp_path / "config.json").write_text(config_json(config))
    with at_fault("--workdir"):
        evaluate_run(decided(config), tmp_path)


@pytest.mark.usefixtures("without_checks")
def test_streams_that_do_not_pair_are_refused_once_the_order_is_known(tmp_path):
    config = make_small(24)
    config.data.ops, config.data.streams = "mixup(0.2)", 3
    config.data.num_examples = 10**8
    assert find_faults(config) == []
    with at_fault("data.streams"):
        prepare(config, tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()
    config.data.num_examples = 64
    assert prepare(config, tmp_path / "workdir").resolved.config.data.streams is None


def test_a_model_is_called_by_its_own_sizes():
    def called(name, **fields):
        config = base_config()
        config.model.update({"name": name} | fields)
        return describe_model(settings_of(config).model)

    assert called("ViT-B/16") == "ViT-B/16" and called("R50+ViT-B/16") == "R50+ViT-B/16"
    assert called("ViT-B/16", patch_size=8) == "ViT-B/8"
    assert called("ViT-B/16", patch_size=(8, 4)) == "ViT-B/8x4"
    small = called("ViT-B/16", patch_size=(8, 8), width=32)
    assert small == "ViT/8 (width 32, depth 12, mlp_dim 3072, num_heads 12)"


@pytest.mark.usefixtures("without_checks")
def test_with_auto_a_run_gets_the_mesh_of_its_chosen_layout(tmp_path):
    config = make_small()
    config.init_from = "scratch"

    def choose(settings, mesh):
        return settings.with_values({"mesh.fsdp": mesh.shape["data"] // 2})

    run = prepare(config, tmp_path / "new", choose)
    assert (run.mesh.shape["data"], run.mesh.shape["fsdp"]) == (2, 4)
    assert run.resolved.config.mesh.fsdp == 4 and config.mesh.fsdp is None
    config.auto = False
    assert prepare(config, tmp_path / "new", choose).mesh.shape["fsdp"] == 1


def test_a_kept_head_follows_the_names_of_the_classes(tmp_path, caplog):
    model = create_model("ViT-mu/4", 10, 8)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))
    head = variables["params"]["head"]
    head["kernel"] += np.arange(10.0)[None]
    head["bias"] += np.arange(10.0)
    names = tuple("9876543210")

    def run_with(names):
        spec = Spec((8, 8), "antialiased", class_names=names)
        caplog.clear()
        save_pretrained(tmp_path / "weights", model, variables, "hf", spec)
        return prepare(config, tmp_path / "run").initial_params

    config = make_small()
    config.data.name, config.data.num_examples, config.data.num_classes = "digits", None, None
    config.init_from, config.init_head = str(tmp_path / "weights"), "kept"
    found = run_with(names)
    np.testing.assert_array_equal(found["head/kernel"], head["kernel"][:, ::-1])
    np.testing.assert_array_equal(found["head/bias"], head["bias"][::-1])
    assert not caplog.text
    found = run_with(None)
    np.testing.assert_array_equal(found["head/bias"], head["bias"])
    assert "gives no names of its classes" in caplog.text
    with at_fault("init_head"):
        run_with(("nine", *names[1:]))
    with at_fault("init_head"):
        run_with(("8", *names[1:]))


@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("mode", ["soft", pytest.param("hard", marks=pytest.mark.slow)])
def test_unlabelled_images_get_the_classes_of_the_teacher(golden, tmp_path, mode):
    config = load_config(f"{CONFIGS / 'folder.py'}:debug")
    config.data.name, config.global_batch_size = "unlabelled", 8
    config.data.data_dir = make_images(tmp_path / "own", *(f"{i}.png" for i in range(9)))
    config.objective.name, config.objective.teacher = "distillation", str(golden / "hf_vit")
    config.objective.mode, config.objective.weight = mode, 1.0
    for name in ("val", "test"):
        del config.evals[name]
    run = prepare(config, tmp_path / "run")
    teacher = read_pretrained(golden / "hf_vit")
    assert run.resolved.config.data.num_classes == teacher.model.num_classes > 1
    assert (
        run.sources[train_split(settings_of(run.resolved.config).data)].class_names
        == teacher.spec.class_names
    )
    config.data.num_classes = 7
    with at_fault("data.num_classes"):
        prepare(config, tmp_path / "run")
    config.objective.mode, config.data.num_classes = "features", None
    assert prepare(config, tmp_path / "run").resolved.config.data.num_classes == 1


@pytest.mark.usefixtures("without_checks")
def test_a_falling_rate_is_said_where_the_optimizer_averages_instead(tmp_path, caplog):
    said = {}
    for name, cooldown in (("cosine", 0), ("constant", 2), ("constant", 0)):
        config = make_small(duration="10 steps")
        config.optimizer.name, config.schedule.name = "schedule_free", name
        config.schedule.warmup, config.schedule.cooldown = "5 steps", f"{cooldown} steps"
        describe(prepare(config, tmp_path))
        said[name, cooldown] = [m for m in caplog.messages if "learning rate falls" in m]
        caplog.clear()
    assert [len(lines) for lines in said.values()] == [1, 1, 0]
    assert said["constant", 2][0].endswith("name=constant and --config.schedule.cooldown='0 steps'")
