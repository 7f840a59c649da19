"""Accuracy on data whose classes map to the model's, and the file that maps them."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import mapped
from vit_jax.data import make_source
from vit_jax.errors import InputError
from vit_jax.evaluators import evaluate
from vit_jax.evaluators.mapped import METRICS, Mapped, make_mapped, read_class_map
from vit_jax.experiment.state import TrainState

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


def test_averaged_weights_do_not_hide_the_raw_ones():
    table, batch = np.array([[0], [1]]), {"image": np.zeros(2), "label": np.array([0, 1])}
    batch["mask"] = np.ones(2, np.float32)

    def logits(state, image):
        return jnp.tile(state.params["logits"], (2, 1))

    state = TrainState(0, {"logits": np.float32([1, 2])}, {}, (), {"logits": np.float32([1, 2])})
    found = evaluate("other", Mapped(logits, lambda: [batch], lambda: table), state)
    assert found == {
        "other/top1": 0.5, "other/top5": 1.0, "other/num_examples": 2,
        "other/top1_raw": 0.5, "other/top5_raw": 1.0,
    }  # fmt: skip


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


def make(num_classes, **entry):
    source = make_source("digits", split="test", image_size=(8, 8), classes=(3, 8))
    inputs = types.SimpleNamespace(
        source=lambda: source,
        entry=mapped(split="test", every="1 epochs", **entry),
        model=types.SimpleNamespace(num_classes=num_classes),
        apply=None,
        batches=None,
    )
    return make_mapped(inputs)


def test_data_with_the_model_s_labels_need_no_map(tmp_path):
    assert make(2)._labels.tolist() == [[0], [1]]
    with pytest.raises(InputError, match=r"class_map='': .* has 2 classes, but the model has 10"):
        make(10)
    (tmp_path / "map.json").write_text('{"8": [8]}')
    assert make(10, class_map=str(tmp_path / "map.json"))._labels.tolist() == [[-1], [8]]
    with pytest.raises(InputError, match="the model has no classes"):
        make(None)
