"""ReaL: labels by the number in a file name, from folders and TFDS sets, and the counts."""

import json

import numpy as np
import pytest
from hand_made import OF_SPLIT, State, make_inputs
from PIL import Image
from read_settings import settings_of

from vit_jax.base.errors import InputError
from vit_jax.config import LOSSES, SplitKey, base_config, real
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import evaluate, make_evaluators
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.evaluators.mapped import measure_by_labels
from vit_jax.evaluators.real import (
    Real,
    check_numbers,
    labels_by_record,
    read_numbers,
    read_real_labels,
)
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.metrics import make_metrics

BOTH = make_metrics(("top1", "top5"), LOSSES.make({"name": "softmax"}), False)
LABELS = [[], [2, 0], [1], [0], [1, 2], [0, 1, 2]]  # of images 1 to 6


def test_labels_by_record():
    table = labels_by_record(LABELS, np.array([6, 1, 3, 0]))
    assert table.tolist() == [[0, 1, 2], [-1, -1, -1], [1, -1, -1], [-1, -1, -1]]


def test_what_counts():
    """Any label counts as correct; unlabelled and masked images are left out."""
    logits = np.eye(3, dtype=np.float32)[[0, 0, 1, 2, 1, 1, 2, 0]]
    batches = [
        {"image": logits[:4], "id": np.arange(4), "mask": np.float32([1, 1, 1, 1])},
        {"image": logits[4:], "id": np.array([4, 5, -1, -1]), "mask": np.float32([1, 0, 0, 0])},
    ]
    table = labels_by_record(LABELS, np.arange(1, 7))
    result = measure_by_labels(make_inputs(batches), BOTH, lambda: table, "id")(1.0)
    # Predicted 0 0 1 2 1: no label; right; right; wrong; right.
    assert result == {"top1": 0.75, "top5": 1.0, "num_examples": 4}
    masked = [batch | {"mask": np.zeros(4, np.float32)} for batch in batches]
    with pytest.raises(NothingToMeasureError, match="split: none of the images"):
        measure_by_labels(make_inputs(masked), BOTH, lambda: table, "id")(1.0)


class MeanColour:
    """A model whose logits are the means of an image's channels."""

    def apply(self, variables, images, train, method):
        return images.mean(axis=(1, 2))


def evaluator(root, labels_file, names=None, ops="decode|resize"):
    """On a folder with one image each, red, green, blue and so on, numbered 6 down to 1."""
    for i, number in enumerate(range(6, 0, -1)):
        colour = np.zeros((8, 8, 3), np.uint8)
        colour[..., i % 3] = 255
        name = (names or "ILSVRC2012_val_{:08d}.png").format(number)
        path = root / "images/val" / "abc"[number % 3] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colour).save(path)
        (root / "images/train" / path.parent.name).mkdir(parents=True, exist_ok=True)
    data_dir = str(root / "images")
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size, c.data.data_dir = 8, "folder", 8, data_dir
    c.evals.real = real(split="val", every="1 epochs", ops=ops, labels_file=str(labels_file))
    source = make_source("folder", split="val", data_dir=data_dir, image_size=(8, 8))
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    sources = {SplitKey("folder", "val", data_dir): source}
    return make_evaluators(
        settings_of(c), parse_preprocessing(settings_of(c)), MeanColour(), mesh, sources
    )["real"]


@pytest.fixture
def labels_file(tmp_path):
    path = tmp_path / "real.json"
    path.write_text(json.dumps(LABELS))
    return path


def test_a_folder_of_the_validation_images(tmp_path, labels_file):
    result = evaluator(tmp_path, labels_file)(State({}, {}))
    # Images 6 to 2 are predicted 0 1 2 0 1: the first two are right. Image 1 has no label.
    assert result == {"top1": pytest.approx(0.4), "num_examples": 5}


def test_faults_name_the_key(tmp_path, labels_file):
    with pytest.raises(InputError, match=r"evals\.real\.split: folder val has a record .*cat3.png"):
        evaluator(tmp_path / "names", labels_file, names="cat{}.png")
    # Only one of several processes may read such a name; all report it after the exchange.
    (tmp_path / "later/images/val/c").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "later/images/val/c/zebra.png")
    later = evaluator(tmp_path / "later", labels_file)
    with pytest.raises(NothingToMeasureError, match=r"evals\.real\.split: .*zebra.png"):
        evaluate("real", later, TrainState(0, {}, {}, ()))
    small = evaluator(tmp_path / "small", labels_file, ops="decode|central_crop(9)|resize")
    with pytest.raises(InputError, match=r"evals\.real\.ops: .*_00000003.png: 8 x 8 pixels"):
        evaluate("real", small, TrainState(0, {}, {}, ()))
    digits = make_source("digits", split="test", image_size=(8, 8))
    with pytest.raises(InputError, match="digits test does not provide file names"):
        Real(**OF_SPLIT, labels_file=str(labels_file)).bind(make_inputs([], source=lambda: digits))
    with pytest.raises(InputError, match=r"evals\.real\.labels_file=.* use real\.json from https"):
        evaluator(tmp_path / "none", tmp_path / "nothing.json")
    labels_file.write_text(json.dumps([[], []]))
    with pytest.raises(InputError, match=r"labels_file=.*; use real"):
        evaluator(tmp_path / "empty", labels_file)
    labels_file.write_text(json.dumps([[3]]))
    with pytest.raises(InputError, match=r"labels_file=.* has class 3, but the model has 3 class"):
        evaluator(tmp_path / "classes", labels_file)
    labels_file.write_text(json.dumps([[1]]))
    with pytest.raises(InputError, match=r"labels for 1 images, but .* number 6"):
        evaluator(tmp_path / "number", labels_file)(State({}, {}))


def test_the_published_labels(shared_data):
    labels = read_real_labels(str(shared_data / "imagenet_real/real.json"), 1000)
    assert len(labels) == 50_000
    assert sum(map(bool, labels)) == 46_837
    assert labels[:3] == [[], [970, 795], [230, 231]]


@pytest.mark.slow
def test_file_names_of_a_prepared_data_set(shared_data):
    where = {"data_dir": str(shared_data), "image_size": (1, 1), "reader": "offsets"}
    sample = make_source("imagenet_sample", split="train", **where)
    names = sample.file_names(60, 64)
    assert len(set(names)) == 4 and sample.file_names(0, 1) == ["n04238763_slide_rule.JPEG"]
    assert sample.file_names(62, 63) == names[2:3]
    with pytest.raises(InputError, match=r"the file 'n04238763_slide_rule\.JPEG'; needs"):
        check_numbers(sample, read_numbers(sample, 0, 1))
