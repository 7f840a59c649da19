"""What a data set is to the pipeline: records that are read by their index.

`Source` is the one interface. `digits` and `synthetic` are made here, folders of images in
image_folder.py, TFDS data sets in prepared_tfds.py, mixtures of these in mixture.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from etils import epy

from vit_jax.data.host_tf import tf
from vit_jax.data.record_files import RecordFiles
from vit_jax.errors import InputError

with epy.lazy_imports():
    import sklearn.datasets


# Of `Source.fingerprints`. Version 2 adds three records of a TFDS data set. A checkpoint stores the
# version with its fingerprint, and an older one is compared by the older rule.
FINGERPRINT_VERSION = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One split of a labelled image data set.

    `read(record_ids)` is made of TensorFlow ops, to be called inside a tf.data map with int64 ids
    in [0, num_examples). It gives `image`, `label` (int32; -1 where that cannot be read) and `mask`
    (float32; 0 for a record known to be broken, which may have a label). An encoded source takes
    one id and gives the image as JPEG or PNG bytes, or raises; one of pixels takes ids of any shape
    S and gives uint8 images of shape S + image_shape.

    Attributes:
      name: the name in data.name.
      split: the split in data.split.
      num_examples: records in the split.
      num_classes: labels lie in [0, num_classes).
      class_names: by label, or None.
      image_shape: (H, W, 3), where all images have one; None where they differ.
      encoded: whether images come as JPEG or PNG bytes.
      fingerprints: hex digests of the data's identity, one a FINGERPRINT_VERSION, the oldest
        first; the same wherever the data lie and whatever reads them.
      read: see above.
      record_name: index -> how messages call the record.
      record_files: how an encoded source reads neighbours together; None: one by one is as good.
      file_names: (start, stop) -> what the files were called that these records were made of, ""
        where one cannot be read; None where it is not known.
      part_sizes: of a mixture, the records of each of its data sets; else those of the one.
    """

    name: str
    split: str
    num_examples: int
    num_classes: int
    class_names: tuple[str, ...] | None
    image_shape: tuple[int, int, int] | None
    fingerprints: tuple[str, ...]
    read: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    record_name: Callable[[int], str]
    encoded: bool = False
    record_files: RecordFiles | None = None
    file_names: Callable[[int, int], Sequence[str]] | None = None
    part_sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.part_sizes:
            object.__setattr__(self, "part_sizes", (self.num_examples,))

    @property
    def fingerprint(self) -> str:
        """The one of the newest version."""
        return self.fingerprints[-1]


def fingerprint(*identity) -> str:
    """32 hex digits of what identifies a data set: names, numbers, and lists of these."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def same_fingerprints(*identity) -> tuple[str, ...]:
    """`Source.fingerprints` of a data set whose identity no version describes differently."""
    return (fingerprint(*identity),) * FINGERPRINT_VERSION


def numbered(name: str, split: str) -> Callable[[int], str]:
    """`record_name` of a source whose records have no names of their own."""
    return lambda record: f"record {record} of {name} {split}"


def read_tensors(
    images: np.ndarray, labels: np.ndarray, mask: np.ndarray
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """`read` of a source held in memory: images, labels int (n,) and mask 0/1 (n,) by record.

    Images are uint8 (n, H, W, 3), or bytes (n,), empty where mask is 0.
    """
    columns = {
        "image": tf.constant(images),
        "label": tf.constant(labels, tf.int32),
        "mask": tf.constant(mask, tf.float32),
    }
    return lambda record_ids: {k: tf.gather(column, record_ids) for k, column in columns.items()}


def digits(*, split: str, **_) -> Source:
    """scikit-learn's 1,797 handwritten digits, grey 8 x 8: every fifth is for the test.

    Splits: `train` (1,437) and `test` (360: index % 5 == 0). Grey values 0..16 become 0..255 in
    three equal channels.

    Source: https://archive.ics.uci.edu/dataset/80 (the test set of optdigits).
    """
    if split not in ("train", "test"):
        raise InputError(f"data.split={split!r}: digits has the splits 'train' and 'test'")
    bunch = sklearn.datasets.load_digits()
    is_test = np.arange(len(bunch.images)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    grey = np.rint(bunch.images[chosen] * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    class_names = tuple(str(name) for name in bunch.target_names)
    return Source(
        name="digits",
        split=split,
        num_examples=len(images),
        num_classes=len(class_names),
        class_names=class_names,
        image_shape=images.shape[1:],
        fingerprints=same_fingerprints("digits", split, len(images), class_names),
        read=read_tensors(images, bunch.target[chosen], np.ones(len(images))),
        record_name=numbered("digits", split),
    )


def synthetic(
    *,
    split: str,
    image_size: tuple[int, int],
    num_classes: int | None,
    num_examples: int | None,
    **_,
) -> Source:
    """Noise that costs nothing to make; any split name. For benchmarks and trial runs.

    Image i is one noise image, the split's own, plus the bytes of i on its three channels (modulo
    256); its label is i % num_classes.
    """
    for key, value in (("num_classes", num_classes), ("num_examples", num_examples)):
        if value is None or value < 1:
            raise InputError(
                f"data.{key}={value}: synthetic data need a positive number; "
                f"set --config.data.{key}"
            )
    assert num_classes is not None and num_examples is not None
    image_shape = (*image_size, 3)
    seed = zlib.crc32(split.encode())
    noise = tf.constant(np.random.Generator(np.random.Philox(seed)).bytes(math.prod(image_shape)))
    noise = tf.reshape(tf.io.decode_raw(noise, tf.uint8), image_shape)

    def read(record_ids):
        tint = tf.stack([record_ids, record_ids // 256, record_ids // 256**2], -1) % 256
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
        fingerprints=same_fingerprints("synthetic", split, num_examples, num_classes, image_shape),
        read=read,
        record_name=numbered("synthetic", split),
    )
