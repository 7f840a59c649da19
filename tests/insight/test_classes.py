"""Results by class, of predictions made by hand and of a run on a folder of pictures."""

import csv
import io
import types

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax.config import base_config
from vit_jax.evaluators.classification import Classification, Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.insight import classes, figures
from vit_jax.main import main

pytestmark = pytest.mark.usefixtures("one_device")


def examples(true, predicted, confidence=None):
    n = len(true)
    confidence = np.linspace(0.9, 0.5, n) if confidence is None else np.asarray(confidence)
    return Examples(np.asarray(true), np.asarray(predicted), np.arange(n), confidence, confidence)


TRUE, PREDICTED = [0, 0, 0, 1, 1, 3], [0, 1, 1, 1, 3, 0]  # no image of class 2
NAMES = ("ant", "bee", "cow", "dog")


class NamedSource:
    """The parts of a source that a report reads."""

    class_names, num_classes = NAMES, len(NAMES)

    @staticmethod
    def record_name(record):
        return f"{NAMES[TRUE[record]]}/{record}.jpg"


def read(path):
    return list(csv.reader(io.StringIO(path.read_text())))


def test_rows_by_class():
    confusions = classes.count_confusions(examples(TRUE, PREDICTED), 4)
    ant, bee, cow, dog = classes.by_class(confusions, NAMES)
    assert ant == {
        "class": "ant", "images": 3, "correct": 1, "accuracy": pytest.approx(1 / 3),
        "predictions": 2, "precision": 0.5, "confused_with": "bee", "confusions": 2,
    }  # fmt: skip
    assert (bee["accuracy"], bee["precision"], bee["confused_with"]) == (
        0.5, pytest.approx(1 / 3), "dog",
    )  # fmt: skip
    assert (cow["images"], cow["accuracy"], cow["precision"]) == (0, None, None)
    assert (dog["correct"], dog["confused_with"]) == (0, "ant")
    line = classes.summarize([ant, bee, cow, dog])
    assert "dog 0.0% of 1 (1 taken for ant), ant 33.3% of 3 (2 taken for bee)" in line
    assert "no images of 1 of 4 classes" in line


def test_a_class_that_is_always_right_is_confused_with_none():
    rows = classes.by_class(classes.count_confusions(examples([0, 0], [0, 0]), 2), "ab")
    assert (rows[0]["accuracy"], rows[0]["confused_with"], rows[0]["confusions"]) == (1.0, None, 0)
    assert (rows[1]["accuracy"], rows[1]["predictions"]) == (None, 0)


def test_a_report_writes_tables_and_a_picture(tmp_path):
    classes.report(tmp_path, "val", examples(TRUE, PREDICTED), NamedSource)
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
    assert head[:4] == ["class", "images", "correct", "accuracy"]
    assert cow[:4] == ["cow", "0", "0", ""]
    wrong = read(folder / "wrong.csv")
    assert wrong[1] == ["ant/1.jpg", "ant", "bee", "0.82", "0.82"]  # the most confident first
    assert [row[0] for row in wrong[1:]] == ["ant/1.jpg", "ant/2.jpg", "bee/4.jpg", "dog/5.jpg"]
    assert Image.open(folder / "confusion.png").size > (100, 100)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_report_of_several_labels(tmp_path, caplog):
    labels = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]], np.float32)
    logits = np.array([[2, -1, -1, -1], [-3, 1, 0, -1], [-2, -1, -1, 1]], np.float32)
    precision = np.array([0.75, 1, np.nan, 1])
    shown = Shown(logits, labels, np.array([0, 1, 2], np.int32), precision)
    with caplog.at_level("INFO", "vit_jax"):
        classes.report(tmp_path, "val", shown, NamedSource)
    assert "lowest average precision by class: ant 75.0% of 2" in caplog.text
    head, *rows = read(tmp_path / "val/classes.csv")
    assert head[:4] == ["class", "images", "average_precision", "predictions"]
    assert rows == [
        ["ant", "2", "0.75", "1", "1", "1", "0.5"],
        ["bee", "1", "1", "1", "1", "1", "1"],
        ["cow", "0", "", "1", "0", "0", ""],
        ["dog", "1", "1", "1", "1", "1", "1"],
    ]
    assert read(tmp_path / "val/wrong.csv") == [
        ["file", "classes", "missed", "added", "worst", "probability_of_worst"],
        [NamedSource.record_name(1), "ant;bee", "ant", "cow", "ant", "0.0474259"],
    ]


def test_many_classes_are_drawn_as_pairs_and_too_many_have_no_matrix(tmp_path, monkeypatch):
    def drawn(num_classes, true, predicted):
        found = {}
        for kind in ("draw_heat_map", "draw_pairs"):
            monkeypatch.setattr(
                figures, kind, lambda *parts, kind=kind: found.update({kind: parts}) or b""
            )
        names = [f"c{i}" for i in range(num_classes)]
        confusions = classes.count_confusions(examples(true, predicted), num_classes)
        classes._write_confusions(tmp_path, confusions, names)
        return found

    everything = np.arange(1000)
    found = drawn(1000, [*everything, 7, 7], [*np.roll(everything, 1), 9, 9])
    pairs, number = found["draw_pairs"]
    assert (pairs[0], len(pairs), number) == (("c7", "c9", 2), 30, 1001)
    assert len(read(tmp_path / "confusion.csv")) == 1001
    (tmp_path / "confusion.csv").unlink()
    # A few classes of many: predicted classes without images have columns after the others.
    counts, rows, columns = drawn(3000, [1, 1, 1, 1, 2000], [1, 5, 7, 7, 2000])["draw_heat_map"]
    assert (rows, columns) == (["c1", "c2000"], ["c1", "c2000", "c7", "c5"])
    assert counts.tolist() == [[1, 0, 2, 1], [0, 1, 0, 0]]
    assert read(tmp_path / "confusion.csv") == [["class", "c1", "c5", "c7", "c2000"],
                                                ["c1", "1", "1", "2", "0"],
                                                ["c2000", "0", "0", "0", "1"]]  # fmt: skip
    # The picture has room for the most frequent ones.
    counts, _, columns = drawn(90, [0] * 91, [*range(90), 89])["draw_heat_map"]
    assert columns == ["c0", "c89", *(f"c{i}" for i in range(1, 38)), "51 other classes"]
    assert counts.tolist() == [[1, 2, *[1] * 37, 51]]
    assert len(read(tmp_path / "confusion.csv")[0]) == 91
    # Too many classes for a matrix.
    (tmp_path / "confusion.csv").unlink()
    drawn(3000, range(3000), range(3000))
    assert not (tmp_path / "confusion.csv").exists()


def test_names_that_fonts_and_formulas_dislike():
    names = ["$a_b$", "猫", "\udcff", "a\nb", "x" * 200]
    assert figures.draw_heat_map(np.eye(5, dtype=int), names, names).startswith(b"\x89PNG")
    pairs = [(name, names[0], 1) for name in names]
    assert figures.draw_pairs(pairs, 5).startswith(b"\x89PNG")
    assert figures.draw_pairs([], 0).startswith(b"\x89PNG")


def test_examples_are_those_of_the_metrics_without_padding():
    logits = np.float32([[4, 0, 0], [0, 4, 0], [0, 0, 4], [1, 0, 0]])
    batch = {"image": logits, "label": np.int32([0, 2, 2, 1]), "id": np.int32([5, 6, 7, -1]),
             "mask": np.float32([1, 1, 1, 0])}  # fmt: skip
    seen = []
    inputs = types.SimpleNamespace(
        config=base_config(), apply=lambda state, image: image, batches=lambda: [batch, batch],
        replicated=jax.sharding.SingleDeviceSharding(jax.devices()[0]), see=seen.append,
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


def test_a_file_in_the_place_of_the_output_is_refused_first(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["evaluate", "--workdir=no", f"--output={tmp_path / 'out'}"]) == 2
    assert "--output=" in capsys.readouterr().err
