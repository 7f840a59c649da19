"""Results by class of predictions made by hand, and a table with a row for each model."""

import csv
import io
import types

import jax
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from PIL import Image
from read_settings import settings_of
from scipy.special import expit

from vit_jax.config import base_config
from vit_jax.evaluators.classification import Classification, Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.insight import plots, results
from vit_jax.insight.tables import add_row, as_csv, read_rows

pytestmark = pytest.mark.usefixtures("one_device")


def examples(true, predicted, confidence=None):
    n = len(true)
    confidence = np.linspace(0.9, 0.5, n) if confidence is None else np.asarray(confidence)
    return Examples(np.asarray(true), np.asarray(predicted), np.arange(n), confidence, confidence)


TRUE, PREDICTED = [0, 0, 0, 1, 1, 3], [0, 1, 1, 1, 3, 0]  # no image of class 2
NAMES = ("ant", "bee", "cow", "dog")


class NamedSource:
    """The parts of a source that a report reads."""

    class_names, num_classes, split = NAMES, len(NAMES), "val"

    @staticmethod
    def record_name(record):
        return f"{NAMES[TRUE[record]]}/{record}.jpg"


def read(path):
    return list(csv.reader(io.StringIO(path.read_text())))


def test_rows_by_class():
    confusions = results.count_confusions(examples(TRUE, PREDICTED))
    ant, bee, cow, dog = results.by_class(confusions, NAMES)
    assert ant == {
        "class": "ant", "images": 3, "correct": 1, "accuracy": pytest.approx(1 / 3),
        "predictions": 2, "precision": 0.5, "confused_with": "bee", "confusions": 2,
    }  # fmt: skip
    assert (bee["accuracy"], bee["precision"], bee["confused_with"]) == (
        0.5, pytest.approx(1 / 3), "dog",
    )  # fmt: skip
    assert (cow["images"], cow["accuracy"], cow["precision"]) == (0, None, None)
    assert (dog["correct"], dog["confused_with"]) == (0, "ant")
    line = results.summarize([ant, bee, cow, dog], "accuracy")
    assert "dog 0.0% of 1, ant 33.3% of 3" in line and "1 of 4 classes" in line
    # A class that is always right is confused with none, and one without images has no accuracy.
    right, absent = results.by_class({(0, 0): 2}, "ab")
    assert (right["accuracy"], right["confused_with"], right["confusions"]) == (1.0, None, 0)
    assert (absent["accuracy"], absent["predictions"]) == (None, 0)


def test_tables_and_an_image_are_written(tmp_path):
    results.write_results(tmp_path, "val", examples(TRUE, PREDICTED), NamedSource)
    folder = tmp_path / "val"
    assert read(folder / "confusion.csv") == [
        ["class", *NAMES],
        ["ant", "1", "2", "0", "0"],
        ["bee", "0", "1", "0", "1"],
        ["cow", "0", "0", "0", "0"],
        ["dog", "1", "0", "0", "0"],
    ]
    assert read(folder / "confusions.csv")[:2] == [["class", "predicted", "images"],
                                                   ["ant", "bee", "2"]]  # fmt: skip
    head, cow = read(folder / "classes.csv")[0], read(folder / "classes.csv")[3]
    assert head[:5] == ["class", "images", "predictions", "correct", "accuracy"]
    assert cow[:5] == ["cow", "0", "0", "0", ""]
    wrong = read(folder / "wrong.csv")
    assert wrong[1][:3] == ["ant/1.jpg", "ant", "bee"]  # the most confident first
    assert [float(cell) for cell in wrong[1][3:]] == [np.linspace(0.9, 0.5, 6)[1]] * 2
    assert [row[0] for row in wrong[1:]] == ["ant/1.jpg", "ant/2.jpg", "bee/4.jpg", "dog/5.jpg"]
    assert Image.open(folder / "confusion.png").size > (100, 100)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_leaves_no_half_folder(tmp_path, monkeypatch):
    def no_space(path, content):
        if path.suffix == ".png":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(results.files, "write_whole", no_space)
    with pytest.raises(OSError, match="No space left"):
        results.write_results(
            epath.Path(tmp_path / "new"), "val", examples(TRUE, PREDICTED), NamedSource
        )
    assert not [*tmp_path.iterdir()]


def test_results_of_several_labels(tmp_path, caplog):
    labels = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]], np.float32)
    logits = np.array([[2, -1, -1, -1], [-3, 1, 0, -1], [-2, -1, -1, 1]], np.float32)
    precision = np.array([0.75, 1, np.nan, 1])
    shown = Shown(logits, labels, np.array([0, 1, 2], np.int32), precision)
    with caplog.at_level("INFO", "vit_jax"):
        results.write_results(tmp_path, "val", shown, NamedSource)
    assert "lowest average precision by class: ant 75.0% of 2" in caplog.text
    head, *rows = read(tmp_path / "val/classes.csv")
    assert head[1:] == ["images", "predictions", "correct", "recall", "precision",
                        "average_precision", "threshold", "best_f1"]  # fmt: skip

    def at(logit):
        return float(jax.nn.sigmoid(np.float32(logit)))  # as `predict` computes it

    assert rows == [
        ["ant", "2", "1", "1", "0.5", "1.0", "0.75", str(at(-3) / 2), "0.8"],
        ["bee", "1", "1", "1", "1.0", "1.0", "1.0", str((at(1) + at(-1)) / 2), "1.0"],
        ["cow", "0", "1", "0", "", "0.0", "", "", ""],
        ["dog", "1", "1", "1", "1.0", "1.0", "1.0", str((at(1) + at(-1)) / 2), "1.0"],
    ]
    assert read(tmp_path / "val/wrong.csv") == [
        ["file", "classes", "missed", "added", "worst", "probability_of_worst"],
        [NamedSource.record_name(1), "ant;bee", "ant", "cow", "ant", str(expit(-3))],
    ]
    of_test = type("Test", (NamedSource,), {"split": "test"})
    results.write_results(tmp_path, "test", shown, of_test)
    assert read(tmp_path / "test/classes.csv") == [row[:-2] for row in (head, *rows)]


def test_a_threshold_close_to_one_is_read_back_equal(tmp_path):
    """As 1 it would refuse the image that it was chosen for."""
    shown = Shown(np.array([[16.5], [15]], np.float32), np.array([[1.0], [0]], np.float32),
                  np.array([0, 1], np.int32), np.ones(1))  # fmt: skip
    of_one = type("One", (NamedSource,), {"num_classes": 1, "class_names": ["ant"]})
    results.write_results(tmp_path, "val", shown, of_one)
    ((*_, threshold, _),) = read(tmp_path / "val/classes.csv")[1:]
    chosen, other = np.asarray(jax.nn.sigmoid(np.array([16.5, 15], np.float32)))
    assert chosen >= float(threshold) > other


def test_a_threshold_holds_for_the_probabilities_that_predict_computes(tmp_path):
    """Two logits whose probabilities are one number in float32: both are predicted, or none."""
    logits = np.array([[16.62], [16.60], [3]], np.float32)
    shown = Shown(logits, np.array([[1.0], [0], [0]], np.float32),
                  np.array([0, 1, 2], np.int32), np.ones(1))  # fmt: skip
    of_one = type("One", (NamedSource,), {"num_classes": 1, "class_names": ["ant"]})
    results.write_results(tmp_path, "val", shown, of_one)
    ((*_, threshold, f1),) = read(tmp_path / "val/classes.csv")[1:]
    predicted = np.asarray(jax.nn.sigmoid(logits)) >= float(threshold)
    assert predicted[:, 0].tolist() == [True, True, False] and abs(float(f1) - 2 / 3) < 1e-6


def test_many_classes_are_drawn_as_pairs_and_too_many_have_no_matrix():
    def made(num_classes, confusions):
        found = results.confusion_files(confusions, [f"c{i}" for i in range(num_classes)])
        size = Image.open(io.BytesIO(found["confusion.png"])).size
        tables = {k: [*csv.reader(io.StringIO(x.decode()))] for k, x in found.items() if "csv" in k}
        return size, tables

    size, tables = made(3000, {(1, 2000): 2, (1, 1): 1, (1, 5): 1})  # a few classes of many
    assert tables == {"confusions.csv": [["class", "predicted", "images"],
                                         ["c1", "c2000", "2"], ["c1", "c5", "1"]]}  # fmt: skip
    confusions = {(i, (i + 1) % 60): 1 for i in range(60)}
    (width, _), tables = made(60, confusions)
    assert width == 8 * 120 > size[0]  # bars
    assert [len(tables[name]) for name in ("confusions.csv", "confusion.csv")] == [61, 61]


def test_names_that_fonts_and_formulas_dislike():
    names = ["$a_b$", "猫", "\udcff", "a\nb", "x" * 200]
    pairs = [(name, names[0], 1) for name in names]
    for figure in (plots.draw_confusion(np.eye(5, dtype=int), names), plots.draw_pairs(pairs, 5),
                   plots.draw_pairs([], 0)):  # fmt: skip
        assert plots.as_file(figure).startswith(b"\x89PNG")


def test_examples_are_those_of_the_metrics_without_padding():
    logits = np.float32([[4, 0, 0], [0, 4, 0], [0, 0, 4], [1, 0, 0]])
    batch = {"image": logits, "label": np.int32([0, 2, 2, 1]), "id": np.int32([5, 6, 7, -1]),
             "mask": np.float32([1, 1, 1, 0])}  # fmt: skip
    seen = []
    inputs = types.SimpleNamespace(
        settings=settings_of(base_config()),
        apply=lambda state, image: image, batches=lambda: [batch, batch],
        jit=jax.jit, see=seen.append,
        source=lambda: types.SimpleNamespace(num_classes=3),
    )  # fmt: skip
    evaluator = Classification(split="test", every="1 epochs")
    metrics = evaluator.bind(inputs)(None)
    (found,) = seen
    inputs.see = None
    assert metrics == evaluator.bind(inputs)(None)
    assert found.id_N.tolist() == [5, 6, 7] * 2
    assert found.predicted_N.tolist() == [0, 1, 2] * 2
    assert metrics["top1"] == pytest.approx((found.predicted_N == found.label_N).mean())
    e = np.exp(4)
    np.testing.assert_allclose(found.confidence_N, e / (e + 2), rtol=1e-6)
    np.testing.assert_allclose(found.right_N[1], 1 / (e + 2), rtol=1e-6)


def test_one_row_for_each_model(tmp_path):
    path = epath.Path(tmp_path / "t.csv")
    add_row(path, "runs/a", {"v2/top1": 0.123456789, "a/top1": None})
    add_row(path, "runs/b", {"v2/top1": 0.75, "r/top1": 0.25})
    add_row(path, "runs/a", {"v2/top1": 0.123456789})
    assert path.read_text() == "model,v2/top1,r/top1\nruns/a,0.123456789,\nruns/b,0.75,0.25\n"
    for content in (b"x,y\n1,2\n", b"\x89PNG\xff"):
        path.write_bytes(content)
        with at_fault("--table"):
            read_rows(path)


def test_no_cell_is_a_formula_and_numbers_are_none(tmp_path):
    row = ["=1+1", "+a", "-x", "@x", "-0.5", "-1e-05", -0.5, "a=b", None]
    text = as_csv([row]).decode()
    assert text == "'=1+1,'+a,'-x,'@x,-0.5,-1e-05,-0.5,a=b,\n"
    for loss in (-0.5, -0.25):
        add_row(epath.Path(tmp_path / "t.csv"), "=a", {"val/loss": loss})
    assert (tmp_path / "t.csv").read_text() == "model,val/loss\n'=a,-0.25\n"
