"""Mean average precision by its definition, and a whole run on images with several labels."""

import csv
import dataclasses
import io
import json
import warnings

import hand_made
import numpy as np
import pytest
from PIL import Image
from read_settings import settings_of, splits_of
from sklearn.metrics import f1_score

from vit_jax.base.errors import InputError
from vit_jax.config import METRICS, base_config, classification
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.evaluators import make_evaluators
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.evaluators.multilabel import MultiLabel
from vit_jax.main import main
from vit_jax.objectives.metrics import MeanLoss

pytestmark = pytest.mark.usefixtures("one_device")


def average_precision(right_N, scores_N):
    """The mean, over the images of the class, of the precision down to each in the ranking."""
    right_N = right_N[np.argsort(-scores_N)]
    precisions = np.cumsum(right_N) / np.arange(1, len(right_N) + 1)
    return precisions[right_N > 0].mean()


class OfMany(MeanLoss):
    more_than = 1000


class WithMore(MultiLabel):
    """A plug-in's, with a metric that is left out where there are few classes."""

    usual = ("my_loss", *MultiLabel.usual)


def run(logits, labels, broken):
    config = base_config()
    config.loss.name = "sigmoid"
    batches = [*hand_made.make_batches(logits, labels, broken)()]
    evaluator, settings = WithMore(**hand_made.OF_SPLIT), settings_of(config)
    return hand_made.run(evaluator, batches, absent=("my_loss",), settings=settings)


def test_mean_average_precision_of_the_classes_that_are_shown(monkeypatch):
    monkeypatch.setitem(METRICS, "my_loss", OfMany)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 5)).astype(np.float32)
    labels = (rng.random((20, 5)) < 0.3).astype(np.float32)
    labels[:, 3] = 0
    found = run(logits, labels, broken=(2, 17))
    x, t = (np.delete(rows, (2, 17), axis=0) for rows in (logits.astype(np.float64), labels))
    expected = np.mean([average_precision(t[:, c], x[:, c]) for c in (0, 1, 2, 4)])
    assert found["mean_ap"] == pytest.approx(expected) and found["num_examples"] == 18
    with warnings.catch_warnings(action="ignore"):  # of the class that no image shows
        macro, micro = (f1_score(t, x >= 0, average=of) for of in ("macro", "micro"))
    assert found["macro_f1"] == pytest.approx(macro) and found["micro_f1"] == pytest.approx(micro)
    entropies = np.logaddexp(0, x) - x * t
    assert found["loss"] == pytest.approx(entropies.sum(axis=1).mean(), rel=1e-5)
    with pytest.raises(NothingToMeasureError, match=r"^split: no image has a label"):
        run(logits, np.zeros_like(labels), broken=())


@pytest.fixture
def images(tmp_path):
    rows, rng = [], np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (8, 12, 3), np.uint8)).save(tmp_path / f"{i}.png")
        rows.append({"file": f"{i}.png", "labels": [("ant", "bee")[i % 2]] + ["first"] * (i < 10)})
    path = tmp_path / "list.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_a_run_on_images_with_several_labels(images, tmp_path, capsys, json_of):
    where = f"--config.data.data_dir={images}"
    words = [where, "--config.data.image_size=8", "--config.model.patch_size=4",
             "--config.duration=1 steps", "--config.schedule.warmup=0 steps",
             "--config.model.depth=1",
             "--config.loss.class_weights=balanced", f"--workdir={tmp_path / 'run'}"]  # fmt: skip
    assert main(["--config=configs/folder.py:multilabel,debug", *words]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    last = {name: value for line in lines for name, value in json.loads(line).items()}
    assert 0 < last["val/mean_ap"] <= 1 and "test/mean_ap" not in last
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert list(config["resolved"]["evals"]) == ["val"]
    assert len(config["resolved"]["loss"]["class_weights"].split(",")) == 3
    assert json.loads((tmp_path / "run/classes.json").read_text()) == ["ant", "bee", "first"]
    output = f"--output={tmp_path / 'tables'}"
    by_run = json_of("evaluate", f"--workdir={tmp_path / 'run'}", output)
    assert (tmp_path / "tables/val/classes.csv").read_text().count("\n") == 4
    assert by_run["val/mean_ap"] == last["val/mean_ap"]
    # Every class above its threshold is predicted.
    predict = ["predict", f"--workdir={tmp_path / 'run'}", "--format=csv", str(tmp_path / "0.png")]
    assert main([*predict, "--thresholds=0"]) == 0
    head, row = csv.reader(io.StringIO(capsys.readouterr().out))
    assert head == ["file", "labels", "probabilities", "error"]
    names, p = row[1].split(";"), [float(x) for x in row[2].split(";")]
    assert sorted(names) == ["ant", "bee", "first"] and p == sorted(p, reverse=True)
    (tmp_path / "t.csv").write_text(
        f"\ufeffclass,threshold\n{names[0]},1\n{names[1]},\n{names[2]},0\n"
    )
    for flags, kept in (
        ([], [n for n, x in zip(names, p, strict=True) if x >= 0.5]),
        ([f"--thresholds={tmp_path / 't.csv'}"], names[1 : 2 if p[1] >= 0.5 else 1] + names[2:]),
    ):
        assert main([*predict, *flags]) == 0
        assert capsys.readouterr().out.splitlines()[1].split(",")[1] == ";".join(kept)
    export = f"--output={tmp_path / 'export'}"
    assert main(["export", f"--workdir={tmp_path / 'run'}", export, "--format=timm"]) == 0
    weights = config["resolved"]["loss"]["class_weights"]
    several = ["--config=evaluate:multilabel,list", where, f"--config.loss.class_weights={weights}"]
    for source in ("run", "export"):
        found = json_of("evaluate", f"--init_from={tmp_path / source}", *several)
        assert found["multilabel/loss"] == pytest.approx(by_run["val/loss"], rel=1e-5), source

    folder = ["--config=configs/folder.py:list,debug", *words[:2], f"--workdir={tmp_path / 'b'}"]
    assert main(folder) == 2
    assert "multilabel" in capsys.readouterr().err
    words[-1] = f"--workdir={tmp_path / 'b'}"
    softmax = ["--config=configs/folder.py:multilabel,debug", "--config.loss.name=softmax"]
    assert main([*softmax, *words]) == 2
    assert "loss.name='softmax'" in capsys.readouterr().err


def test_evaluators_of_one_label_are_refused():
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size = 8, "digits", 8
    c.evals.test = classification(split="test", every="1 epochs")
    source = make_source("digits", split="test", image_size=(8, 8))
    source = dataclasses.replace(source, multi_label=True)
    sources = dict.fromkeys(splits_of(c, "test").values(), source)
    with pytest.raises(InputError, match=r"evals\.test\.type='classification': split has several"):
        make_evaluators(settings_of(c), parse_preprocessing(settings_of(c)), None, None, sources)
