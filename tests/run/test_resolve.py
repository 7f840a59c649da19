"""What the source of the weights and the size of the data decide: finetune:MODEL,folder."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import count_steps, evaluate_model, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath
from images import write_images
from opened import evaluate_run
from PIL import Image
from read_settings import model_fields

import vit_jax
from vit_jax import create_model, load_pretrained, save_pretrained
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings, flatten, with_values
from vit_jax.config.stored import read_config, read_stored
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.images.given import find_images, image_files
from vit_jax.inference.predict import classify
from vit_jax.run import loop
from vit_jax.run.setup import workdir as workdir_module
from vit_jax.run.setup.resolve import Opener, freeze_layers, resolve, take_fields
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.setup.workdir import StoredRun, write_workdir
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.export import export
from vit_jax.transfer.pretrained import Pretrained, Spec

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

FIELDS = {"pool": "gap", "gelu": "exact", "norm_eps": 1e-5, "layer_scale": 0.1}
SPEC = Spec((16, 16), "antialiased", mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))


def randomise(variables):
    """`variables` with no leaf of zeros."""
    leaves, structure = jax.tree.flatten(variables)
    rng = np.random.default_rng(0)
    drawn = [(x + 0.1 * rng.normal(size=x.shape)).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(structure, drawn)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A ViT-mu/8 with three classes, in timm's names."""
    path = tmp_path_factory.mktemp("source") / "vit"
    model = create_model("ViT-mu/8", 3, 16, **FIELDS)
    variables = randomise(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3))))
    save_pretrained(path, model, variables, format="timm", spec=SPEC)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with 40 images of two classes."""
    path, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(40):
        file = path / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(file)
    return path


def make(folder, source, words="ViT-mu/8,folder", **overrides):
    config = load_config(f"finetune:{words}")
    values = {"data.data_dir": folder, "init_from": source, "model.dtype": "float32"}
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    assert apply_overrides(config, [(key, str(value)) for key, value in values.items()]) == []
    assert find_faults(config) == []
    return config


@pytest.mark.slow
def test_one_command_takes_everything_from_the_source(folder, source, tmp_path):
    run = prepare(make(folder, source), tmp_path / "run")
    config = run.resolved.config
    model = {key: value for key, value in config.model.items() if value is not None}
    assert model == {"name": "ViT-mu/8", "dtype": "float32", "kernels": "auto", **FIELDS}
    assert config.data.image_size == 16
    assert (config.data.mean, config.data.std) == (SPEC.mean, SPEC.std)
    assert (config.duration, config.global_batch_size) == ("500 steps", 64)
    assert (config.schedule.warmup, config.optimizer.peak_lr) == ("100 steps", 0.003)
    assert run.experiment.num_trained == run.experiment.num_params
    expected = read_pretrained(source)
    assert run.initial_params.keys() == {n for n in expected.params if not n.startswith("head/")}
    assert not (tmp_path / "run").exists()


def test_the_user_decides_what_he_sets(folder, source, tmp_path):
    """Also where that is the default."""
    given = make(folder, source, schedule__warmup="0 steps")
    by_user = ("schedule.warmup", "data.mean")
    config = prepare(given, tmp_path, by_user=by_user).resolved.config
    assert config.schedule.warmup == "0 steps" and config.data.mean == given.data.mean
    keys = {"data__image_size": 24, "duration": "3 epochs", "optimizer__peak_lr": 0.1}
    keys |= {"data__mean": "0.1,0.2,0.3"}
    config = prepare(make(folder, source, **keys), tmp_path).resolved.config
    assert (config.data.image_size, config.data.mean) == (24, (0.1, 0.2, 0.3))
    assert (config.duration, config.optimizer.peak_lr) == ("3 epochs", 0.1)
    assert config.schedule.warmup == "0 steps"  # a fifth of 2 steps


@pytest.mark.parametrize("name", ["ViT-S/8", "ViT-mu/16", "DeiT-Ti/8"])
def test_another_model_than_the_sources_is_refused(folder, source, tmp_path, name):
    with at_fault("model.name") as error:
        prepare(make(folder, source, f"{name},folder"), tmp_path)
    assert "finetune:ViT-mu/8,folder" in str(error.value)


NAMES = {
    "bit.npz": "BiT-R50x1", "hf_deit": "DeiT-mu/8", "hybrid_resnet.npz": "R26+ViT-S/32",
    "t2t_performer.safetensors": "T2T-ViT-7", "timm_efficientnet.safetensors": "EfficientNet-B0",
}  # fmt: skip


@pytest.mark.parametrize(("file", "name"), NAMES.items())
def test_without_a_name_the_source_gives_the_model(file, name, golden):
    """Of every family, with sizes that no name has."""
    config, pretrained = load_config("finetune:folder"), read_pretrained(golden / file)
    config.init_from, config.init_head, config.model.dtype = str(golden / file), "kept", "float32"
    size = pretrained.spec.image_size
    config.data.image_size = None if size else 64
    config = with_values(config, take_fields(config, pretrained))
    fields, classes = model_fields(config), pretrained.model.num_classes
    model = create_model(config.model.name, classes, config.data.image_size, **fields)
    assert model == pretrained.model.clone(image_size=size or (64, 64))
    assert config.model.name == name and find_faults(config) == []


def test_a_run_without_a_name_resumes_without_its_source(folder, source, tmp_path, caplog):
    caplog.set_level("INFO", logger="vit_jax")
    asked = make(folder, source, "folder", duration="3 steps", global_batch_size=8)
    run = prepare(asked, tmp_path)
    assert f"taken from init_from={source}: model.name=ViT-mu/8, model.gelu=exact" in caplog.text
    write_workdir(tmp_path, run.resolved, run.train_source, run.division)
    asked.init_from, stored = "gone", read_stored(tmp_path)
    stored.asked.init_from = stored.resolved.init_from = "gone"
    before = StoredRun(stored=stored, saved_steps=(1,))
    resumed = prepare(asked, tmp_path, before=before).resolved.config
    assert resumed.to_dict() == stored.resolved.to_dict()


def test_what_the_sources_model_lacks_is_refused(folder, golden, tmp_path):
    with at_fault("model.lora_rank"):
        asked = make(folder, golden / "bit.npz", "folder,lora", data__image_size=32)
        prepare(asked, tmp_path)


def test_sizes_that_no_name_has_are_set_by_flags(folder, golden, tmp_path):
    with pytest.raises(InputError) as error:
        prepare(make(folder, golden / "hf_vit"), tmp_path)
    sizes = {"depth": 2, "mlp_dim": 64, "num_heads": 4}
    for field, size in sizes.items():
        assert f"--config.model.{field}={size}" in str(error.value)
    sizes = {f"model__{field}": size for field, size in sizes.items()}
    config = prepare(make(folder, golden / "hf_vit", **sizes), tmp_path).resolved.config
    assert (config.model.gelu, config.model.norm_eps) == ("exact", 1e-12)
    assert config.data.image_size == 32


def test_a_source_of_any_image_size_needs_one():
    model = create_model("ViT-mu/8", 3, None, pos_embed="sincos_2d")
    config = load_config("finetune:ViT-mu/8,folder")
    pretrained = Pretrained("any.npz", model, {}, Spec(None, "antialiased"))
    with at_fault("data.image_size"):
        take_fields(config, pretrained)
    config.data.image_size = 32
    assert take_fields(config, pretrained)["model.pos_embed"] == "sincos_2d"
    config.model.pos_embed = "none"  # what the user sets stays
    assert "model.pos_embed" not in take_fields(config, pretrained)


def test_a_run_of_the_same_name_gives_its_sizes():
    model = create_model("ViT-Ti/8", 3, 32, width=96, depth=4, mlp_dim=64)
    run = {"config": {"model": {"name": "ViT-Ti/8"}}}
    pretrained = Pretrained("run", model, {}, Spec((32, 32), "antialiased"), run)
    changes = take_fields(load_config("finetune:ViT-Ti/8,folder"), pretrained)
    sizes = {"model.width": 96, "model.depth": 4, "model.mlp_dim": 64}
    assert changes.items() >= sizes.items()
    assert "model.num_heads" not in changes  # the variant's own


def test_a_grey_source_gives_its_channels_and_value_range(caplog):
    """And how it reads files; unless the user sets them, also to the default."""
    caplog.set_level("INFO", logger="vit_jax")
    model = create_model("ViT-mu/8", 3, 16, channels=1)
    spec = Spec((16, 16), "", (0.5,), (0.25,), channels=1, pixel_range=(0, 4095), exif=False)
    pretrained = Pretrained("run", model, {}, spec)
    asked = load_config("finetune:folder")
    asked.init_from, asked.data.data_dir, asked.data.num_examples = "run", "IMAGES", 500

    class Grey(Opener):
        def weights(self, config):
            return take_fields(config, pretrained)

    keys = ("data.channels", "data.mean", "data.std", "data.pixel_range", "data.exif")
    for by_user, decided in (
        ((), (1, (0.5,), (0.25,), (0, 4095), False)),
        (("data.channels",), (3, (0.5,), (0.25,), (0, 4095), False)),
        (("data.std", "data.exif"), (1, (0.5,), (0.5, 0.5, 0.5), (0, 4095), True)),
    ):
        caplog.clear()
        found = resolve(Settings.of(asked), Grey(), by_user=by_user)
        assert [key for key in keys if f"{key}=" not in caplog.text] == [*by_user]
        assert tuple(flatten(found.config)[key] for key in keys) == decided
        by = {key: "user" if key in by_user else "source" for key in keys}
        assert {key: found.decided_by[key] for key in keys} == by
        assert find_faults(found.config) == []
    asked.data.ops += "|greyscale(0.2)"
    with at_fault("data.channels"):
        resolve(Settings.of(asked), Grey())


@pytest.mark.slow
def test_grey_images_are_pretrained_and_tuned_by_two_commands(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32), np.uint8)
    images = {f"{'ab'[i % 2]}/{i}.png": image for i, image in enumerate(pixels)}
    write_images(tmp_path / "images", images)
    keys = {"data.data_dir": tmp_path / "images", "duration": "2 steps", "global_batch_size": 8}
    grey = {"data.channels": 1, "data.mean": (0.5,), "data.std": (0.25,)}
    vit_jax.train(
        "mae:folder,debug", tmp_path / "mae", keys | grey | {"schedule.warmup": "0 steps"}
    )
    vit_jax.train("finetune:folder", tmp_path / "tuned", keys | {"init_from": tmp_path / "mae"})
    stored = read_stored(tmp_path / "tuned")
    assert flatten(stored.resolved).items() >= grey.items()
    assert {stored.decided_by[key] for key in grey} == {"source"}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("last", "trained"),
    [(1, ("encoder/layer_2/",)), (3, tuple(f"encoder/layer_{i}/" for i in range(3)))],
)
def test_last_layers(last, trained, scan):
    config = load_config(f"finetune:ViT-mu/8,folder,last{last}")
    config.model.depth, config.data.image_size, config.model.scan = 3, 16, scan
    config.data.num_examples = 100
    freeze = freeze_layers(config)["optimizer.freeze"]
    model = create_model("ViT-mu/8", 2, 16, depth=3)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    frozen = tree.flatten_names(tree.mask(params, freeze))
    layers = [f"encoder/layer_{i}/" for i in range(3 - last, 3)]
    learning = (*layers, "encoder/norm/", "head/")
    assert {n for n, is_frozen in frozen.items() if not is_frozen} == {
        name for name in frozen if name.startswith(learning)
    }
    with at_fault("optimizer.last_layers"):
        config.optimizer.last_layers = 4
        freeze_layers(config)


def test_two_ways_to_freeze_are_refused():
    config = load_config("finetune:ViT-mu/8,folder,last1")
    config.data.image_size, config.data.num_examples = 16, 100
    config.optimizer.freeze = "head/.*"
    with at_fault("optimizer.freeze"):
        freeze_layers(config)


@pytest.mark.parametrize("words", ["lora,last2", "head_only,lora8", "lastN"])
def test_one_part_at_a_time(words):
    with at_fault("--config"):
        load_config(f"finetune:ViT-B/16,folder,{words}")


@pytest.mark.slow
def test_lora_from_start_to_export(folder, source, tmp_path):
    """Trains, resumes without its source, and is evaluated, predicted, merged and exported."""
    own, workdir = tmp_path / "vit", tmp_path / "run"
    shutil.copytree(source, own)
    keys = {"duration": "3 steps", "model__scan": "true", "global_batch_size": 8}
    keys |= {"evals__val__every": "3 steps", "schedule__warmup": "1 steps"}
    config = make(folder, own, "ViT-mu/8,folder,lora4", **keys)

    run = prepare(config, workdir)
    before = read_pretrained(own)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    with jax.set_mesh(run.mesh):
        state = run.experiment.init()
    named = tree.flatten_names(state.params) | run.initial_params
    assert {n.rpartition("/")[2] for n in named.keys() - run.initial_params.keys()} == {
        "lora_a", "lora_b", "kernel", "bias",
    }  # fmt: skip
    named = {name: np.asarray(leaf) for name, leaf in named.items()}  # some are read only now
    model = create_model("ViT-mu/8", 2, 16, **FIELDS, lora_rank=4, scan=True)
    features = model.apply({"params": tree.unflatten_names(named)}, images, method="features")
    params = {"params": tree.unflatten_names(before.params)}
    expected = before.model.apply(params, images, method="features")
    np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-5)
    adapters = 2 * (32 * 4 + 4 * 32)  # query and value
    assert run.experiment.num_trained == adapters + 2 * (32 + 1)
    moments = tree.flatten_names(state.opt_state)
    assert {n.rpartition("/")[2] for n in moments if "/mu/" in n} == {
        "lora_a", "lora_b", "kernel", "bias",
    }  # fmt: skip
    assert not any("mlp" in name or "key" in name for name in moments)

    summary = train_and_evaluate(config, workdir)
    shutil.rmtree(own)
    assert train_and_evaluate(config, workdir) == summary  # what was taken is in config.json
    stored = read_config(workdir)
    assert (stored.model.pool, stored.data.mean) == ("gap", SPEC.mean)

    after = read_pretrained(workdir)
    assert after.model.lora_rank is None and not any("lora" in name for name in after.params)
    moved = {
        name
        for name, leaf in before.params.items()
        if not name.startswith("head/") and not np.array_equal(leaf, after.params[name])
    }
    assert moved == {f"encoder/layer_0/attention/{name}/kernel" for name in ("query", "value")}
    found = evaluate_run(stored, workdir)
    assert found["val/top1"] == summary["val/top1"]
    entry = load_config("evaluate:classification,folder")
    apply_overrides(entry, [("data.data_dir", str(folder)), ("global_batch_size", "8")])
    for name in entry.evals:
        entry.evals[name].split = "val"
    merged = evaluate_model(entry, after)
    assert merged["classification/loss"] == pytest.approx(found["val/loss"], abs=1e-5)
    files = find_images([str(folder / "cat")])
    rows = list(classify(after, image_files(files), top=1, batch_size=8))
    assert {row["classes"][0]["name"] for row in rows} <= {"cat", "dog"}
    export(after, tmp_path / "exported", "timm")
    model, variables = load_pretrained(tmp_path / "exported")
    expected = after.model.apply({"params": tree.unflatten_names(after.params)}, images)
    np.testing.assert_allclose(model.apply(variables, images), expected, atol=1e-5)
    assert json.loads((workdir / "classes.json").read_text()) == ["cat", "dog"]


def test_a_resumed_run_compares_what_was_decided(folder, source, tmp_path):
    keys = {"duration": "3 steps", "global_batch_size": 8}
    run = prepare(make(folder, source, **keys), tmp_path)
    write_workdir(tmp_path, run.resolved, run.train_source, run.division)
    again = prepare(make(folder, source, **keys), tmp_path).resolved.config
    assert again.to_dict() == run.resolved.config.to_dict()
    said = make(folder, source, **keys, optimizer__peak_lr=run.resolved.config.optimizer.peak_lr)
    assert prepare(said, tmp_path).resolved.config.to_dict() == run.resolved.config.to_dict()
    with at_fault("optimizer.peak_lr"):
        prepare(make(folder, source, **keys, optimizer__peak_lr=0.1), tmp_path)
    with at_fault("model.pool"):
        prepare(make(folder, source, **keys, model__pool="token"), tmp_path)


def test_config_json_says_who_decided_each_key(folder, source, tmp_path):
    keys = {"duration": "3 steps", "data__order": "record"}
    asked = make(folder, source, words="ViT-mu/8,folder,last1", **keys)
    run = prepare(asked, tmp_path, by_user=("duration", "init_from", "data.order"))
    write_workdir(tmp_path, run.resolved, run.train_source, run.division)
    stored = read_stored(epath.Path(tmp_path))
    assert stored.asked == asked and stored.resolved == run.resolved.config
    assert stored.decided_by.keys() == flatten(run.resolved.config).keys()
    expected = {
        "duration": "user", "init_from": "user", "data.name": "recipe", "seed": "default",
        "model.pool": "source", "data.mean": "source", "data.num_classes": "data",
        "data.order": "user", "optimizer.freeze": "rule", "optimizer.peak_lr": "rule",
        "optimizer.accum_steps": "devices",
    }  # fmt: skip
    assert {key: stored.decided_by[key] for key in expected} == expected
    asked = make(folder, source, words="ViT-mu/8,folder,last1", **keys, log__every="2 steps")
    again = prepare(asked, tmp_path, by_user=("log.every",))
    changed = {"log.every": "user"}
    assert again.resolved.decided_by == stored.decided_by | changed
    asked.auto, asked.mesh.fsdp = True, 1
    run = prepare(
        asked,
        tmp_path / "new",
        lambda settings, mesh: settings.with_values({"model.remat": "full"}),
        by_user=("mesh.fsdp",),
    )
    chosen = run.resolved.decided_by
    assert (chosen["model.remat"], chosen["mesh.fsdp"]) == ("devices", "user")


def test_changed_keys_are_named_before_anything_is_opened(tmp_path):
    def prepared(**keys):
        config = load_config("quickstart:debug")
        keys = {"model.depth": "3", "optimizer.last_layers": "1"} | keys
        assert apply_overrides(config, list(keys.items())) == []
        return prepare(config, tmp_path)

    run = prepared()
    write_workdir(tmp_path, run.resolved, run.train_source, run.division)
    for key, value in (("optimizer.last_layers", "2"), ("data.name", "folder")):
        with at_fault(key):
            prepared(**{key: value})


def test_a_run_whose_config_json_is_lost_takes_its_fields_and_its_division(
    folder, source, tmp_path
):
    asked = make(folder, source, duration="3 steps", global_batch_size=8)
    run = prepare(asked, tmp_path)
    write_workdir(tmp_path, run.resolved, run.train_source, run.division)
    (tmp_path / "config.json").unlink()
    more = shutil.copytree(folder, tmp_path / "more")
    shutil.copy(more / "cat/0.png", more / "cat/new.png")
    asked.data.data_dir = str(more)
    again = prepare(asked, tmp_path, before=StoredRun(saved_steps=(1,)))
    assert again.resolved.config.data.image_size == 16 and not again.division
    assert again.train_source.fingerprint == run.train_source.fingerprint


def test_a_start_and_an_evaluation_read_config_json_once(tmp_path, monkeypatch):
    """Process 0 reads it; under the lock its bytes are compared with those that were read."""
    config = load_config("quickstart:debug")
    apply_overrides(config, [("duration", "1 steps"), ("schedule.warmup", "0 steps")])
    monkeypatch.setattr(loop, "compile_step", count_steps())
    train_and_evaluate(config, tmp_path)
    parsed, parse = [], workdir_module.parse_stored
    monkeypatch.setattr(workdir_module, "parse_stored", lambda *a: parsed.append(1) or parse(*a))
    monkeypatch.setattr("vit_jax.config.stored.read_stored", None)
    train_and_evaluate(config, tmp_path)
    assert parsed == [1]
    again = "vit_jax.config.stored.parse_stored"
    monkeypatch.setattr(again, lambda *a: parsed.append(2) or parse(*a))
    vit_jax.evaluate(tmp_path, overrides={"evals.test.batch_size": 360})
    assert parsed == [1, 2]
