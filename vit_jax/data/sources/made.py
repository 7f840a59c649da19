"""Data sets that need no files of their own: `digits` and `synthetic`."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.data.contract import DataSet, Request, Source, fingerprint, in_memory, numbered
from vit_jax.data.host_tf import tf


class Digits(DataSet):
    """scikit-learn's 1,797 handwritten digits, grey 8 x 8; every fifth is in the test split.

    Splits: `train` (1,437) and `test` (360: index % 5 == 0). Grey values 0..16 become 0..255, the
    same in all three channels.

    Source: https://archive.ics.uci.edu/dataset/80 (the test set of optdigits).
    """

    def sizes(self) -> tuple[int, dict[str, int]]:
        return 10, {"train": 1_437, "test": 360}

    def open(self, request: Request) -> Source:
        split = request.split
        if split not in ("train", "test"):
            raise InputError(f"data.split={split!r}: digits has the splits 'train' and 'test'")
        pixels, labels = _read_digits()
        chosen = (np.arange(len(pixels)) % 5 == 0) == (split == "test")
        grey = np.rint(pixels[chosen] * (255 / 16)).astype(np.uint8)
        images = np.repeat(grey[..., None], 3, axis=-1)
        class_names = tuple(str(digit) for digit in range(10))
        return in_memory(request, images, labels[chosen], class_names)


@functools.cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """`sklearn.datasets.load_digits`: pixels (1797, 8, 8), 0 to 16, and labels (1797,).

    From scikit-learn's file, because importing scikit-learn takes a CPU second.
    """
    installed = importlib.metadata.distribution("scikit-learn")
    path = installed.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


class Synthetic(DataSet):
    """Noise that costs nothing to generate, for benchmarks and trial runs; takes any split name.

    Each split has one noise image. Image i is that image plus the three lowest bytes of i, one per
    channel in turn (modulo 256); its label is i % num_classes, which its caption names.
    """

    is_made = True

    def open(self, request: Request) -> Source:
        num_classes, num_examples = request.num_classes, request.num_examples
        if not num_classes or not num_examples:
            raise InputError(
                f"data.num_classes={num_classes}, data.num_examples={num_examples}: synthetic data "
                "need both"
            )
        image_shape = (*request.image_size, request.channels)
        generator = np.random.Generator(np.random.Philox(zlib.crc32(request.split.encode())))
        noise = tf.io.decode_raw(tf.constant(generator.bytes(math.prod(image_shape))), tf.uint8)
        noise = tf.reshape(noise, image_shape)

        def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
            tint = [record_ids // 256 ** (i % 3) for i in range(request.channels)]
            tint = tf.cast(tf.stack(tint, -1) % 256, tf.uint8)[..., None, None, :]
            label = tf.cast(record_ids % num_classes, tf.int32)
            return {"image": noise + tint, "label": label, "mask": tf.ones_like(label, tf.float32)}

        def captions(records: Sequence[int]) -> Iterator[list[str]]:
            return ([f"noise {i % num_classes}"] for i in records)

        name, split = request.name, request.split
        return Source(
            name=name,
            split=split,
            num_examples=num_examples,
            num_classes=num_classes,
            image_shape=image_shape,
            fingerprint=fingerprint(name, split, num_examples, num_classes, image_shape),
            read=read,
            record_name=numbered(name, split),
            captions=captions if request.captions else None,
        )
