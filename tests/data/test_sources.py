"""Digits, synthetic data, and what make_source refuses."""

import sys

import numpy as np
import pytest
import sklearn.datasets
from at_fault import at_fault

from vit_jax.data import make_source
from vit_jax.data.host_tf import tf
from vit_jax.data.sources import made


def read(source, *record_ids):
    example = source.read(tf.constant(record_ids, tf.int64))
    return {key: value.numpy() for key, value in example.items()}


@pytest.mark.parametrize(("split", "num_examples"), [("train", 1437), ("test", 360)])
def test_digits(split, num_examples):
    source = make_source("digits", split=split, image_size=(8, 8))
    assert (source.num_examples, source.num_classes, source.encoded) == (num_examples, 10, False)
    assert source.class_names == tuple("0123456789")
    assert source.record_name(7) == f"record 7 of digits {split}"

    bunch, index = sklearn.datasets.load_digits(), {"train": [1, 2, 3, 4, 6], "test": [0, 5]}[split]
    example = read(source, *range(len(index)))
    grey = np.floor(bunch.images[index] * 255 / 16 + 0.5)
    np.testing.assert_allclose(example["image"], np.repeat(grey[..., None], 3, -1), atol=0)
    assert (example["image"].dtype, example["image"].max()) == (np.uint8, 255)
    np.testing.assert_array_equal(example["label"], bunch.target[index])
    np.testing.assert_array_equal(example["mask"], 1)


def test_digits_are_read_without_importing_scikit_learn(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    made._read_digits.cache_clear()
    make_source("digits", split="train", image_size=(8, 8))
    assert "sklearn" not in sys.modules


def synthetic(split="train", **changes):
    fields = {"image_size": (6, 4), "num_classes": 10, "num_examples": 1000} | changes
    return make_source("synthetic", split=split, **fields)


def test_synthetic_images_are_a_function_of_split_and_record():
    images = read(synthetic(), *range(1000), 65_536, 131_072)["image"]
    assert images.shape == (1002, 6, 4, 3)
    assert len({image.tobytes() for image in images}) == 1002
    np.testing.assert_array_equal(images[[999, 3]], read(synthetic(), 999, 3)["image"])
    assert not np.array_equal(images[:1], read(synthetic("test"), 0)["image"])
    np.testing.assert_array_equal(read(synthetic(), 0, 9, 10, 11)["label"], [0, 9, 0, 1])


def test_fingerprints_tell_data_apart():
    sources = [
        make_source("digits", split="train", image_size=(8, 8)),
        make_source("digits", split="test", image_size=(8, 8)),
        synthetic(),
        synthetic("test"),
        synthetic(num_examples=999),
        synthetic(num_classes=9),
        synthetic(image_size=(4, 6)),
    ]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert synthetic().fingerprint == synthetic().fingerprint


@pytest.mark.parametrize(
    ("name", "fields", "key"),
    [
        ("digits", {"split": "val"}, "data.split"),
        ("digits", {"num_classes": 9}, "data.num_classes"),
        ("digits", {"num_examples": 360}, "data.num_examples"),
        ("synthetic", {"num_examples": 5}, "data.num_classes"),
        ("synthetic", {"num_classes": 5, "num_examples": 0}, "data.num_classes"),
    ],
)
def test_what_does_not_fit_is_refused(name, fields, key):
    with at_fault(key):
        make_source(name, **{"split": "train", "image_size": (8, 8)} | fields)
