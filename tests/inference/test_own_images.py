"""A run evaluated on other images: classes are matched by name, and so are those it lacks."""

import csv
import io
import json
import shutil

import jax
import numpy as np
import pytest
from asked import evaluate_model, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath
from images import write_images
from opened import evaluate_run, open_all
from read_settings import data_and_evals

from vit_jax import data
from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, knn
from vit_jax.config.stored import read_config
from vit_jax.config.text import load_config
from vit_jax.data.division import hash_of, read_division
from vit_jax.inference import evaluate as evaluation
from vit_jax.inference import saved
from vit_jax.main import main
from vit_jax.run.setup.sources import open_evaluated
from vit_jax.run.setup.workdir import write_workdir
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.export import export

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twenty images of two classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    images = {f"{('ant', 'bee')[i % 2]}/{i}.png": image for i, image in enumerate(pixels)}
    return write_images(tmp_path_factory.mktemp("own") / "images", images)


@pytest.fixture(scope="module")
def trained(images):
    """The workdir of a run of one step on `images`."""
    c = base_config()
    c.global_batch_size, c.duration = 8, "1 steps"
    c.model.name, c.model.patch_size, c.model.pool = "ViT-mu/16", 4, "gap"
    c.data.name, c.data.data_dir, c.data.image_size = "folder", str(images), 8
    c.data.ops = "decode|resize"
    c.evals.val = classification(split="val", every="1 steps", ops="decode|resize")
    c.optimizer.peak_lr = 1e-2
    train_and_evaluate(c, images.parent / "run")
    return images.parent / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def others(images, tmp_path):
    """others(bee="zebra"): the run's images, with the folder `bee` renamed to `zebra`."""

    def make(**names):
        root = shutil.copytree(images, tmp_path / "others")
        for old, new in names.items():
            (root / old).rename(root / new)
        return root

    return make


@pytest.mark.slow
def test_labels_follow_the_names_of_the_model(run, others):
    config = read_config(epath.Path(run))
    config.data.data_dir, config.data.num_classes = str(others(ant="cow")), 3
    sources = open_evaluated(*data_and_evals(config), ("cow", "bee", "ant"))
    (source,) = sources.values()
    labels = {source.record_name(i)[:3]: int(source.read(i)["label"]) for i in range(2)}
    assert labels == {"cow": 0, "bee": 1}


def test_classes_that_the_model_lacks_are_refused_by_name(run, others, capsys):
    where = f"--config.data.data_dir={others(ant='cow', bee='zebra')}"
    assert main(["evaluate", f"--workdir={run}", where]) == 2
    error = capsys.readouterr().err
    assert "data.data_dir=" in error and "'zebra'" in error and "'ant', 'bee'" in error


def test_foreign_classes_are_refused_before_a_loss_is_assumed(run, others, caplog):
    caplog.set_level("INFO", "vit_jax")
    foreign = read_pretrained(str(run))
    foreign = foreign._replace(run=None, spec=foreign.spec._replace(loss=None))
    config = load_config("evaluate:classification,folder")
    config.data.data_dir = str(others(ant="cow", bee="zebra"))
    with at_fault("evals.classification.split"):
        evaluate_model(config, foreign)
    assert "assuming" not in caplog.text


def test_moved_images_are_asked_for_by_the_flag(run, tmp_path, capsys):
    where = f"--config.data.data_dir={tmp_path / 'gone'}"
    assert main(["evaluate", f"--workdir={run}", where]) == 2
    assert "--config.data.data_dir=PATH" in capsys.readouterr().err
    features = [f"--features={tmp_path / 'f.npz'}", "--data=folder:val"]
    assert main(["predict", f"--init_from={run}", *features]) == 2
    error = capsys.readouterr().err
    assert "--data_dir=PATH" in error and "--config" not in error


def test_a_home_folder_is_found(images, tmp_path, monkeypatch):
    shutil.copytree(images, tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    c = base_config()
    c.data.name, c.data.data_dir, c.data.image_size = "folder", "~/images", 8
    c.global_batch_size = 2
    c.evals.val = classification(split="val", every="1 epochs")
    _, sources = open_all(c)
    assert sum(source.num_examples for source in sources.values()) == 20


def test_features_learn_classes_of_their_own(run, others):
    c = read_config(epath.Path(run))
    c.data.data_dir = str(others(bee="zebra"))
    c.evals.unlock()
    del c.evals["val"]
    c.evals.near = knn(train_split="train", test_split="val", every="1 epochs")
    sources = open_evaluated(*data_and_evals(c), ("ant", "bee"))
    assert {source.class_names for source in sources.values()} == {("ant", "zebra")}
    c.evals.near.data_dir = "/none"  # of both splits, said once
    with pytest.raises(InputError) as error:
        open_evaluated(*data_and_evals(c), ("ant", "bee"))
    assert len(error.value.faults) == 1


def names(source):
    return {source.record_name(record) for record in range(source.num_examples)}


@pytest.fixture
def opened(monkeypatch):
    """[(split, names of its records)] of all sources opened from now on."""
    splits, make = [], data.make_source

    def note(name, **how):
        source = make(name, **how)
        splits.append((how["split"], names(source)))
        return source

    monkeypatch.setattr(data, "make_source", note)
    monkeypatch.setattr(evaluation, "evaluate_one", lambda *_: {})
    monkeypatch.setattr(saved, "write_features", lambda *_, **__: {"unreadable": 0})
    return splits


def test_training_and_all_commands_follow_the_run_s_division(
    run, others, opened, tmp_path, caplog, capsys
):
    """Whatever is added to the folder, and wherever it lies."""
    recorded = read_pretrained(str(run)).division.splits
    held = {name for name, split in recorded.items() if split == "val"}
    train = recorded.keys() - held
    assert (len(train), len(held)) == (18, 2)
    root = others()
    config = read_config(epath.Path(run))
    config.data.data_dir = str(root)
    before = prepare(config, run).fingerprint
    (root / "cow").mkdir()
    new = [root / f"{c}/new{i}.png" for c in ("ant", "bee", "cow") for i in range(10)]
    for path in new:
        shutil.copy(root / "bee/1.png", path)

    assert prepare(config, run).fingerprint == before
    assert "images that this run did not begin with (30) are neither in train" in caplog.text
    evaluate_run(config, run)
    words = load_config("evaluate:classification,knn,folder")
    words.data.data_dir, words.global_batch_size = str(root), 8
    evaluate_model(words, read_pretrained(str(run)))
    where = [f"--features={tmp_path}/f.npz", "--data=folder:val", f"--data_dir={root}"]
    assert main(["predict", f"--init_from={run}", *where]) == 0
    assert opened == [(split, held if split == "val" else train) for split, _ in opened]
    assert [split for split, _ in opened].count("val") == 5

    opened.clear()
    config.init_from = str(run)
    config.data.num_classes = config.data.num_examples = None
    tuned = prepare(config, tmp_path / "tuned")
    assert dict(opened)["val"] >= held and not dict(opened)["val"] & train
    assert {name for name in dict(opened)["val"] if name[:3] != "cow"} == held
    assert dict(opened)["train"] > train
    write_workdir(tuned.workdir, tuned.resolved, tuned.train_source, tuned.division)
    assert read_division(tuned.workdir, tuned.settings.data).splits == {
        name: split for split, found in opened for name in found
    }
    gone = sorted(train)[3]
    (root / gone).unlink()
    config = read_config(epath.Path(run))
    config.data.data_dir, config.data.num_examples = str(root), None
    with pytest.raises(InputError, match=f"1 of the images that the run .* missing: {gone};"):
        prepare(config, run)


@pytest.mark.parametrize("format", ["npz", "timm"])
def test_an_export_holds_out_what_its_run_did(run, others, opened, tmp_path, format):
    held = {n for n, split in read_pretrained(str(run)).division.splits.items() if split == "val"}
    output = tmp_path / ("model.npz" if format == "npz" else "model")
    receipt = export(read_pretrained(str(run)), output, format)
    hashes = f"model.{'npz' if format == 'npz' else 'safetensors'}.held_out.npy"
    assert hashes in receipt["files"]
    root = others()
    for i in range(40):
        shutil.copy(root / "bee/1.png", root / f"ant/new{i}.png")
    config = load_config("evaluate:classification,folder")
    config.data.data_dir, config.global_batch_size = str(root), 8
    exported = read_pretrained(str(output))
    assert exported.division.held_out() == {hash_of(name) for name in held}
    evaluate_model(config, exported)
    assert opened == [("val", held)]
    ((tmp_path if format == "npz" else output) / hashes).unlink()
    assert not any(read_pretrained(str(output)).division)


def test_other_images_are_evaluated_whole_by_the_user_s_word(run, others, opened, caplog):
    """By nobody's guess: images of the run may lie there under other names."""
    root = others()
    for path in root.rglob("*.png"):
        path.rename(path.with_name(f"renamed_{path.name}"))
    config = read_config(epath.Path(run))
    config.data.data_dir = str(root)
    evaluate_run(config, run)
    assert [(split, len(found)) for split, found in opened] == [("val", 2)]
    assert f"holds none of the images that {run} holds out; val is a tenth (2 of 20" in caplog.text
    config.evals.val.split = "all"
    evaluate_run(config, run)
    assert len(opened[-1][1]) == 20
    config.data.split = "all"
    with pytest.raises(InputError, match=r"data\.split='all': is for evaluation only"):
        open_all(config)


def test_a_damaged_or_lost_division_is_named(run):
    """Images that were trained on would be evaluated, if they were divided anew."""
    said = r"images\.csv\.gz: cannot be read .*; restore it"
    for content in (b"no gzip", b""):
        (run / "images.csv.gz").write_bytes(content)
        with pytest.raises(InputError, match=said):
            read_pretrained(str(run))
    (run / "images.csv.gz").unlink()
    for read in (lambda: read_pretrained(str(run)),
                 lambda: evaluate_run(read_config(epath.Path(run)), run)):  # fmt: skip
        with pytest.raises(InputError, match=said):
            read()


def test_names_are_read_from_the_run(run, others, monkeypatch, caplog):
    monkeypatch.setattr(evaluation, "evaluate_one", lambda *_: {})
    config = read_config(epath.Path(run))
    config.data.data_dir = str(others())
    (run / "classes.json").write_text(json.dumps(["bee", "cat"]))
    with caplog.at_level("INFO", "vit_jax"), at_fault("evals.val.split"):
        evaluate_run(config, run)
    assert not caplog.messages  # of what would have been evaluated
    (run / "classes.json").unlink()
    for read in (lambda: evaluate_run(config, run), lambda: read_pretrained(run)):
        with pytest.raises(InputError, match=r"classes\.json: not readable"):
            read()
    (run / "classes.json").write_text("null")
    assert read_pretrained(run).spec.class_names is None


def read_csv(path):
    return list(csv.reader(io.StringIO(path.read_text())))


@pytest.mark.slow
def test_tables_by_class_agree_with_the_accuracy(
    images, trained, tmp_path, one_device, monkeypatch, capsys
):
    """The files of `evaluate --output` agree with the accuracy that it prints."""
    shutil.copytree(images, tmp_path / "images")
    run = f"--workdir={trained}"
    words = ["evaluate", run, f"--config.data.data_dir={tmp_path / 'images'}"]
    words += ["--config.evals.val.split=train"]  # which is larger
    monkeypatch.setattr(jax, "devices", lambda *args: one_device[:2])
    out = tmp_path / "out"
    assert main([*words, f"--output={out}"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    top1, images = found["val/top1"], found["val/num_examples"]
    assert "lowest accuracy by class" in captured.err
    head, *rows = read_csv(out / "val/classes.csv")
    assert [row[0] for row in rows] == ["ant", "bee"]
    assert sum(int(row[head.index("correct")]) for row in rows) == pytest.approx(top1 * images)
    _, *wrong = read_csv(out / "val/wrong.csv")
    assert 0 < len(wrong) == round((1 - top1) * images)
    assert all((tmp_path / "images" / row[0]).parent.name == row[1] != row[2] for row in wrong)

    # A folder with one of the model's classes only: its images are of class bee, by name.
    shutil.rmtree(tmp_path / "images/ant")
    assert main([*words, f"--output={tmp_path / 'out2'}"]) == 0
    captured = capsys.readouterr()
    by_class = {row[0]: int(row[1]) for row in read_csv(tmp_path / "out2/val/classes.csv")[1:]}
    assert by_class == {"ant": 0, "bee": json.loads(captured.out)["val/num_examples"]}
    assert "no images of 1 of 2 classes" in captured.err
