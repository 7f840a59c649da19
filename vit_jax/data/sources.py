"""`Source`, the pipeline's interface to a data set: records read by their index.

This module also defines the sources `digits` and `synthetic`. Image folders are in image_folder.py,
TFDS data sets in prepared_tfds.py, mixtures in mixture.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data.host_tf import tf
from vit_jax.data.record_files import RecordFiles
from vit_jax.errors import InputError


def _unknown(record: int) -> str:
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One split of a labelled image data set.

    `read(record_ids)` consists of TensorFlow ops. Call it inside a tf.data map with int64 ids in
    [0, num_examples). It returns `image`, `label` (int32; -1 if it cannot be read; or as
    `multi_label` says) and `mask` (float32; 0 for a record known to be broken, which may still have
    a label). An encoded source takes one id and returns the image as JPEG or PNG bytes, or raises
    an error. A source of pixels takes ids of any shape S and returns uint8 images of shape
    S + image_shape.

    Attributes:
      name: the name in data.name.
      split: the split in data.split.
      num_examples: number of records in the split.
      num_classes: labels lie in [0, num_classes).
      class_names: by label, or None.
      image_shape: (H, W, channels) if all images have the same size, else None.
      encoded: whether images are JPEG or PNG bytes.
      channels: number of channels of the images that the pipeline makes.
      fingerprint: hex digest of the data's identity, which depends neither on their location nor on
        the reader.
      read: see above.
      record_name: index -> the record's name in messages.
      why_unreadable: index -> why the record's file cannot be read, and the remedy; "" if unknown.
      record_files: the way an encoded source reads neighbours together; None if that saves nothing.
      file_names: (start, stop) -> the original file names of these records, "" where one cannot be
        read; None if the source does not know them.
      multi_label: whether labels are float32 (C,), 1 for each class that the image shows.
      soft_labels: whether labels are float32 (C,), the probabilities of the classes.
      part_sizes: number of records of each data set of a mixture; one number for a single data set.
    """

    name: str
    split: str
    num_examples: int
    num_classes: int
    class_names: tuple[str, ...] | None
    image_shape: tuple[int, int, int] | None
    fingerprint: str
    read: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    record_name: Callable[[int], str]
    encoded: bool = False
    why_unreadable: Callable[[int], str] = _unknown
    record_files: RecordFiles | None = None
    file_names: Callable[[int, int], Sequence[str]] | None = None
    channels: int = 3
    multi_label: bool = False
    soft_labels: bool = False
    part_sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.part_sizes:
            object.__setattr__(self, "part_sizes", (self.num_examples,))

    @property
    def has_label_vectors(self) -> bool:
        """Whether labels are float32 (C,) instead of int32."""
        return self.multi_label or self.soft_labels


def fingerprint(*identity) -> str:
    """The digest (32 hex digits) of a data set's identity: names, numbers, and lists of these."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def numbered(name: str, split: str) -> Callable[[int], str]:
    """`Source.record_name` for a source whose records have no names."""
    return lambda record: f"record {record} of {name} {split}"


def read_tensors(
    images: np.ndarray, labels: np.ndarray, mask: np.ndarray
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """`Source.read` for n records in memory: images, integer labels (n,) and mask 0/1 (n,).

    Images are uint8 (n, H, W, 3), or bytes (n,), empty where the mask is 0.
    """
    columns = {
        "image": tf.constant(images),
        "label": tf.constant(labels, tf.int32),
        "mask": tf.constant(mask, tf.float32),
    }
    return lambda record_ids: {k: tf.gather(column, record_ids) for k, column in columns.items()}


def digits(*, split: str, **_) -> Source:
    """scikit-learn's 1,797 handwritten digits, grey 8 x 8; every fifth is in the test split.

    Splits: `train` (1,437) and `test` (360: index % 5 == 0). Grey values 0..16 become 0..255, the
    same in all three channels.

    Source: https://archive.ics.uci.edu/dataset/80 (the test set of optdigits).
    """
    if split not in ("train", "test"):
        raise InputError(f"data.split={split!r}: digits has the splits 'train' and 'test'")
    pixels, labels = _read_digits()
    is_test = np.arange(len(pixels)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    grey = np.rint(pixels[chosen] * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    class_names = tuple(str(digit) for digit in range(10))
    return Source(
        name="digits",
        split=split,
        num_examples=len(images),
        num_classes=len(class_names),
        class_names=class_names,
        image_shape=images.shape[1:],
        fingerprint=fingerprint("digits", split, len(images), class_names),
        read=read_tensors(images, labels[chosen], np.ones(len(images))),
        record_name=numbered("digits", split),
    )


@functools.cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """What `sklearn.datasets.load_digits` reads: pixels (1797, 8, 8), 0 to 16, and labels (1797,).

    From scikit-learn's file, because importing scikit-learn takes a CPU second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise InputError("data.name='digits': needs scikit-learn; run pip install scikit-learn")
    table = np.loadtxt(
        pathlib.Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
    )
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def synthetic(
    *,
    split: str,
    image_size: tuple[int, int],
    num_classes: int | None,
    num_examples: int | None,
    channels: int = 3,
    **_,
) -> Source:
    """Noise that costs nothing to generate, for benchmarks and trial runs; takes any split name.

    Each split has one noise image. Image i is that image plus the three lowest bytes of i, one per
    channel in turn (modulo 256); its label is i % num_classes.
    """
    for key, value in (("num_classes", num_classes), ("num_examples", num_examples)):
        if value is None or value < 1:
            raise InputError(
                f"data.{key}={value}: synthetic data need a positive number; "
                f"set --config.data.{key}"
            )
    assert num_classes is not None and num_examples is not None
    image_shape = (*image_size, channels)
    seed = zlib.crc32(split.encode())
    noise = tf.constant(np.random.Generator(np.random.Philox(seed)).bytes(math.prod(image_shape)))
    noise = tf.reshape(tf.io.decode_raw(noise, tf.uint8), image_shape)

    def read(record_ids):
        tint = tf.stack([record_ids // 256 ** (i % 3) for i in range(channels)], -1) % 256
        tint = tf.cast(tint, tf.uint8)[..., None, None, :]
        label = tf.cast(record_ids % num_classes, tf.int32)
        return {"image": noise + tint, "label": label, "mask": tf.ones_like(label, tf.float32)}

    return Source(
        name="synthetic",
        split=split,
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=None,
        image_shape=image_shape,
        fingerprint=fingerprint("synthetic", split, num_examples, num_classes, image_shape),
        read=read,
        record_name=numbered("synthetic", split),
    )
