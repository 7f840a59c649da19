"""Arrays and sequences given in Python: the batches of TFDS; what is wrong is named."""

import contextlib
import logging
import pathlib

import numpy as np
import pytest
from at_fault import at_fault, golden_page
from images import encode
from PIL import Image

from vit_jax.base.errors import InputError
from vit_jax.data import (
    count_labels,
    image_batch,
    loading,
    make_order,
    make_source,
    parse_ops,
    pipeline,
    read_labels,
)
from vit_jax.data.host_tf import tf
from vit_jax.data.sources import arrays

SIZE = (32, 32)


@pytest.fixture(scope="module")
def cifar(shared_data):
    """(names of classes, 300 images, their labels, batches of them) of TFDS."""
    how = {"split": "test[4900:5200]", "data_dir": str(shared_data), "image_size": SIZE}
    source = make_source("cifar10", **how, reader="memory")
    found = source.read(tf.range(300, dtype=tf.int64))
    images, labels = found["image"].numpy(), found["label"].numpy()
    return source.class_names, images, labels, batches(source, range(24))


def open_arrays(split="train", name="arrays", multi_label=False, **data):
    with arrays.give(data):
        return make_source(name, split=split, image_size=SIZE, multi_label=multi_label)


def batches(source, rows):
    spec = image_batch(24, SIZE, parse_ops("decode|random_crop(24)|resize", SIZE)[0])
    how = {"data_order": make_order("record", source.part_sizes, 0, global_batch_size=24)}
    steps = range(11, 13)  # over the end of an epoch
    return list(
        pipeline.host_batches(source, spec, rows=np.array(rows), steps=steps, seed=0, **how)
    )


class Files:
    """As `datasets`: files that are decoded unless the column is cast."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, label = self.items[i]
        return {"image": {"bytes": encode(image, "png"), "path": None}, "label": label}


GIVEN = {
    "arrays": lambda images, labels: (images, labels),
    "a large array": lambda images, labels: (
        np.ascontiguousarray(images.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1), [*labels],
    ),
    "pairs": lambda images, labels: [*zip(map(Image.fromarray, images), labels, strict=True)],
    "dicts": lambda images, labels: Files([*zip(images, labels, strict=True)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", GIVEN)
def test_the_batches_of_tfds_on_the_second_host(kind, cifar, monkeypatch):
    if kind == "a large array":
        monkeypatch.setattr(arrays, "_SMALL_BYTES", 0)
    class_names, images, labels, expected = cifar
    source = open_arrays(train=GIVEN[kind](images, labels), class_names=class_names)
    assert source.class_names == class_names
    assert list(read_labels(source, 0, 300)) == list(labels)
    for batch, found in zip(expected, batches(source, range(12, 24)), strict=True):
        for key, value in batch.items():
            np.testing.assert_array_equal(found[key], value[12:], err_msg=key)


PIXELS = np.arange(6 * 8 * 8 * 3, dtype=np.uint8).reshape(6, 8, 8, 3)
MIXED = [[0, 2], [], [1], 2, None, -1]


@pytest.mark.parametrize("images", [PIXELS, [*PIXELS]], ids=["pixels", "items"])
def test_several_labels_missing_ones_and_none(images):
    expected = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    multi_hot = expected.astype(np.int64)
    how = {"multi_label": True, "class_names": range(3)}
    for given in ((images, MIXED), (images, multi_hot), [*zip(images, MIXED, strict=True)]):
        source = open_arrays(train=given, **how)
        found = [source.read(tf.constant(i, tf.int64))["label"].numpy() for i in range(6)]
        np.testing.assert_array_equal(found, expected)
    assert list(count_labels(source)) == [1, 1, 2]
    one_hot = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    assert list(read_labels(open_arrays(train=(images, one_hot)), 0, 6)) == [0, 1, 2] * 2
    part = open_arrays("train[:50%]+train[5:]", train=(images, [[i // 2] for i in range(6)]))
    assert list(read_labels(part, 0, 4)) == [0, 0, 1, 2] and part.class_names == ("0", "1", "2")
    for unlabelled in ((images, None), (images, [None] * 6)):
        source = open_arrays(train=unlabelled)
        assert (source.num_classes, source.class_names) == (1, None)


def test_labels_are_numbers_of_the_models_classes():
    with arrays.give({"validation": (PIXELS, [0, 1, 0, 1, 0, 1])}):
        how = {"split": "val", "image_size": SIZE, "class_names": ["cat", "dog", "emu"]}
        source = make_source("arrays", **how)
    assert (source.class_names, source.num_classes) == (("cat", "dog", "emu"), 3)


def test_items_that_cannot_be_read_are_masked_and_named(caplog):
    items = [(image, i % 2) for i, image in enumerate(PIXELS)]
    items[1:5] = [(b"<html>", 1), (PIXELS[2] / 255, 1), (PIXELS[3], 2), (PIXELS[4], None)]
    source = open_arrays(train=items, class_names=["cat", "dog"])
    loading._named.clear()
    with caplog.at_level(logging.WARNING, "vit_jax"):
        spec = image_batch(6, SIZE, parse_ops("decode|resize", SIZE)[0])
        [batch] = pipeline.host_eval_batches(source, spec, rows=np.arange(6))
    assert list(batch["id"][batch["mask"] == 0]) == [1, 2, 3, 4]
    said = sorted(record.getMessage() for record in caplog.records)
    whys = ("HTML page", "float64; needed: uint8", "label 2; needed: 0 to 1", "no label")
    for i, (message, why) in enumerate(zip(said, whys, strict=True), 1):
        assert message.startswith(f"item {i} of train") and why in message


LABELS = [0, 1, 2, 0, 1, 2]
REFUSED = {
    "no dict": [1],
    "no length": {"train": (i for i in LABELS)},
    "a dict of arrays": {"train": {"images": PIXELS, "labels": LABELS}},
    "no images": {"train": []},
    "another number of labels": {"train": (PIXELS, LABELS[1:])},
    "fractions of pixels": {"train": (PIXELS / 255, LABELS)},
    "channels first": {"train": (PIXELS.transpose(0, 3, 1, 2), LABELS)},
    "labels in words": {"train": (PIXELS, ["cat", "dog"] * 3)},
    "images for labels": {"train": (PIXELS, PIXELS)},
    "labels in fractions": {"train": (PIXELS, np.full(6, 0.5))},
    "a label without class": {"train": (PIXELS, LABELS), "class_names": ["cat", "dog"]},
    "no label, or several": {"train": (PIXELS, [0, [1, 2], 2, 0, None, 2])},
    "classes that nothing names": {"train": [*zip(PIXELS, LABELS, strict=True)]},
    "items without images": {"train": [{"pixels": 1}]},
    "items of fractions": {"train": [*zip(PIXELS / 255, LABELS, strict=True)]},
    "another split": {"val": (PIXELS, LABELS)},
    "no data": None,
}
PAGE = pathlib.Path(__file__).parent / "refused_arrays.txt"


def refusal(kind):
    """What is said of these data."""
    try:
        with arrays.give(REFUSED[kind]):
            make_source("arrays", split="train", image_size=SIZE)
    except InputError as e:
        return str(e)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(kind):
    assert refusal(kind) == golden_page(PAGE)[kind]


@contextlib.contextmanager
def begun_with(**data):
    """The name that a run keeps which began with `data`."""
    with arrays.give(data):
        yield arrays.Arrays.settle("arrays")


@pytest.mark.parametrize("kind", ["pixels", "items"])
def test_a_run_goes_on_only_with_the_same(kind):
    images = PIXELS if kind == "pixels" else [*PIXELS]
    with begun_with(train=(images, LABELS), val=(images[:2], [0, 1])) as name:
        before = make_source(name, split="train", image_size=SIZE)
    again = open_arrays(name=name, train=(images, LABELS))
    assert (before.name, before.fingerprint) == (name, again.fingerprint)
    other = PIXELS.copy()
    other[3, 0, 0, 0] += 1
    for changed in ((other, LABELS), (images, LABELS[::-1]), (images[:5], LABELS[:5])):
        with at_fault("data.name"):
            open_arrays(name=name, train=changed)


if __name__ == "__main__":
    PAGE.write_text("\n\n".join(f"{kind}\n    {refusal(kind)}" for kind in REFUSED) + "\n")
