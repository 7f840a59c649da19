"""Accuracy on data whose classes map to the model's, and the file that maps them."""

import json
import types

import numpy as np
import pytest
from hand_made import OF_SPLIT, make_inputs

from vit_jax.base.errors import InputError
from vit_jax.config import LOSSES
from vit_jax.data import make_source
from vit_jax.evaluators.mapped import Mapped, measure_by_labels, read_class_map
from vit_jax.objectives.metrics import make_metrics

BOTH = make_metrics(("top1", "top5"), LOSSES.make({"name": "softmax"}), False)
NAMES = ("chair", "lamp", "spoon")


def test_what_counts():
    """Any label of the class is right; classes without labels are left out."""
    table = np.array([[0, 2], [1, -1], [-1, -1]])
    logits = np.float32([[5, 1, 4, 9], [1, 5, 0, 9], [0, 1, 2, 9], [9, 0, 0, 0], [9, 0, 0, 0]])
    batch = {
        "image": logits, "label": np.array([0, 0, 0, 2, 1]),
        "mask": np.float32([1, 1, 1, 1, 0]),
    }  # fmt: skip

    def measure(among):
        return measure_by_labels(make_inputs([batch]), BOTH, lambda: table, "label", among)(1.0)

    found = measure("mapped")  # without the label 3, which is in no list: right, wrong, right
    assert found == {"top1": pytest.approx(2 / 3), "top5": 1.0, "num_examples": 3}
    assert found.keys() == Mapped(**OF_SPLIT).reports().keys()
    assert measure("all")["top1"] == 0.0


def read(tmp_path, content):
    (tmp_path / "map.json").write_text(json.dumps(content))
    return read_class_map(str(tmp_path / "map.json"), NAMES, 1000)


def test_the_file_of_a_map(tmp_path):
    table = read(tmp_path, {"spoon": [7], "chair": [423, 559]})
    assert table.tolist() == [[423, 559], [-1, -1], [7, -1]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"stool": [1]}, r"has classes that the data lack: \['stool'\]; rename"),
        ({"chair": [1000]}, r"has the labels \[1000\]; the model has 0 to 999"),
        ({"chair": 3}, r"needs JSON such as"),
        ({"chair": []}, r"maps no class"),
    ],
)
def test_maps_that_do_not_fit(tmp_path, content, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, content)


def bind(num_classes, **entry):
    source = make_source("digits", split="test", image_size=(8, 8), classes=(3, 8))
    batch = {"image": np.eye(10, dtype=np.float32)[[8, 3]], "label": np.array([1, 0])}
    batch["mask"] = np.ones(2, np.float32)
    model = types.SimpleNamespace(num_classes=num_classes)
    inputs = make_inputs([batch], source=lambda: source, model=model)
    return Mapped(**OF_SPLIT, **entry).bind(inputs)


def test_data_with_the_model_s_labels_need_no_map(tmp_path):
    found = bind(2)(1.0)  # logits of the labels 0 and 1 are equal: the first wins
    assert found == {"top1": 0.5, "top5": 1.0, "num_examples": 2}
    with pytest.raises(InputError, match=r"class_map='': .* has 2 classes, but the model has 10"):
        bind(10)
    (tmp_path / "map.json").write_text('{"8": [8]}')
    found = bind(10, class_map=str(tmp_path / "map.json"))(1.0)
    assert found == {"top1": 1.0, "top5": 1.0, "num_examples": 1}
    with pytest.raises(InputError, match="the model has no classes"):
        bind(None)
