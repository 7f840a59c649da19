"""Accuracy on data whose classes map to the model's, and the file that maps them."""

import json

import numpy as np
import pytest

from vit_jax.errors import InputError
from vit_jax.evaluators.mapped import METRICS, Mapped, read_class_map

NAMES = ("chair", "lamp", "spoon")


def test_what_counts():
    """Any label of the class is right; classes without labels are left out."""
    table = np.array([[0, 2], [1, -1], [-1, -1]])
    logits = np.float32([[5, 1, 4, 9], [1, 5, 0, 9], [0, 1, 2, 9], [9, 0, 0, 0], [9, 0, 0, 0]])
    batch = {
        "image": logits, "label": np.array([0, 0, 0, 2, 1]),
        "mask": np.float32([1, 1, 1, 1, 0]),
    }  # fmt: skip

    def run(among):
        return Mapped(lambda state, image: image, lambda: [batch], lambda: table, among).run(None)

    found = run("mapped")  # without the label 3, which is in no list: right, wrong, right
    assert found == {"top1": pytest.approx(2 / 3), "top5": 1.0, "num_examples": 3}
    assert found.keys() == METRICS.keys()
    assert run("all")["top1"] == 0.0


def read(tmp_path, content):
    (tmp_path / "map.json").write_text(json.dumps(content))
    return read_class_map(str(tmp_path / "map.json"), NAMES, 1000)


def test_the_file_of_a_map(tmp_path):
    table = read(tmp_path, {"spoon": [7], "chair": [423, 559]})
    assert table.tolist() == [[423, 559], [-1, -1], [7, -1]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"stool": [1]}, r"has 1 classes that the data lack: 'stool'; rename"),
        ({"chair": [1000]}, r"has the labels \[1000\]; the model has 0 to 999"),
        ({"chair": 3}, r"needs JSON such as"),
        ({"chair": []}, r"maps no class"),
    ],
)
def test_maps_that_do_not_fit(tmp_path, content, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, content)
