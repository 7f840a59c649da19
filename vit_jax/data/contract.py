"""`Source`, the pipeline's interface to a data set: records read by their index.

The data sets are in sources/; mixtures are in mixture.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vit_jax.config.parts import Part
from vit_jax.data.division import Divider
from vit_jax.data.elements import PARALLEL_CALLS, Elements
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import Reading, Turn
from vit_jax.data.order import Chunks
from vit_jax.data.records import RecordFiles, stored_labels
from vit_jax.data.tokenizers import Tokenizer

_LABELS_AT_ONCE = 4096


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
      fingerprint: hex digest of the data's identity, which depends neither on their location nor on
        the reader.
      read: see above.
      record_name: index -> the record's name in messages.
      class_names: by label, or None.
      image_shape: (H, W, channels) if all images have the same size, else None.
      encoded: whether images are JPEG or PNG bytes.
      why_unreadable: index -> why the record's file cannot be read, and the remedy; "" if unknown.
      turn: index -> how EXIF turns the record's image; None if nothing states it.
      record_files: the way an encoded source reads neighbours together; None if that saves nothing.
      file_names: (start, stop) -> the original file names of these records, "" where one cannot be
        read; None if the source does not know them.
      channels: number of channels of the images that the pipeline makes.
      multi_label: whether labels are float32 (C,), 1 for each class that the image shows.
      soft_labels: whether labels are float32 (C,), the probabilities of the classes.
      part_sizes: number of records of each data set of a mixture; one number for a single data set.
      chunks: how to read records that are stored together; None: in any order.
      captions: indices -> the captions of each record's image in turn, text or its bytes, as many
        as there are; None: there are none, or they were not asked for.
      tokenizer: of the captions; None: they are not read.
      features: of each record, which training reads instead of its image: float16 (n, D), NaN for
        images that cannot be read; None: it reads images.
    """

    name: str
    split: str
    num_examples: int
    num_classes: int
    fingerprint: str
    read: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    record_name: Callable[[int], str]
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int, int, int] | None = None
    encoded: bool = False
    why_unreadable: Callable[[int], str] = lambda record: ""
    turn: Callable[[int], Turn | None] = lambda record: None
    record_files: RecordFiles | None = None
    file_names: Callable[[int, int], Sequence[str]] | None = None
    channels: int = 3
    multi_label: bool = False
    soft_labels: bool = False
    part_sizes: tuple[int, ...] = ()
    chunks: Chunks | None = None
    captions: Callable[[Sequence[int]], Iterator[Sequence[str | bytes]]] | None = None
    tokenizer: Tokenizer | None = None
    features: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.part_sizes:
            object.__setattr__(self, "part_sizes", (self.num_examples,))

    @property
    def has_label_vectors(self) -> bool:
        """Whether labels are float32 (C,) instead of int32."""
        return self.multi_label or self.soft_labels


@dataclasses.dataclass(frozen=True)
class Request:
    """The split that a data set is asked for, and what the config says of all data sets.

    name: as in data.name.
    split: `train`, `test`, `val`, ..., depending on the data set; TFDS's notation for TFDS sets.
    image_size: (H, W) of synthetic images; others ignore it.
    data_dir: the folder of the images, or of TFDS data sets (None: TFDS's default).
    divider: divides the user's own images without a split `val`.
    exif: whether own images are turned by their EXIF orientation.
    pixel_range, decoding: see `formats.Reading`.
    multi_label: whether images must have several labels (True) or one (False); None: either.
    channels: number of channels of the pipeline's images.
    num_classes: number of classes of synthetic data; for other data the expected number, or None.
    num_examples: number of examples in this split, likewise.
    reader: for TFDS data sets; see sources/tfds.py.
    max_corrupt_fraction: own images are refused if a larger share of the files is missing.
    class_names: of the model that is evaluated, for labels that are numbers without names.
    captions: whether the captions of the images are read.
    """

    name: str
    split: str
    image_size: tuple[int, int]
    data_dir: str | None = None
    divider: Divider = dataclasses.field(default_factory=lambda: Divider(anew=True))
    exif: bool = True
    pixel_range: tuple[float, ...] | None = None
    decoding: int = 2
    multi_label: bool | None = False
    channels: int = 3
    num_classes: int | None = None
    num_examples: int | None = None
    reader: str | None = None
    max_corrupt_fraction: float = 1.0
    class_names: Sequence[str] | None = None
    captions: bool = False

    @property
    def reading(self) -> Reading:
        """How the bytes of image files become pixels."""
        return Reading(self.exif, self.channels, self.pixel_range, self.decoding)


class DataSet(Part):
    """A data set that `data.name` chooses; its fields are keys of `data` that only it reads.

    is_made: whether it makes as many images, of as many classes, as the config asks for.
    is_own: whether it holds the user's own images, whose classes the user names.
    """

    is_made: ClassVar[bool] = False
    is_own: ClassVar[bool] = False

    def sizes(self) -> tuple[int, Mapping[str, int]] | None:
        """(classes, {split: examples}), for plans; None: only `open` knows."""
        return None

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        """The splits with classes that can be left out where they are missing, as "test?".

        Raises: InputError if there are no data.
        """
        return ()

    @classmethod
    def settle(cls, name: str) -> str:
        """The name that a run keeps, for one that may later mean other data; usually `name`."""
        return name

    def open(self, request: Request) -> Source:
        """The split that is asked for; raises InputError if it cannot be had."""
        raise NotImplementedError


def fingerprint(*identity: Any) -> str:
    """The digest (32 hex digits) of a data set's identity: names, numbers, and lists of these."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def in_memory(
    request: Request,
    images: np.ndarray,
    labels: np.ndarray,
    class_names: tuple[str, ...],
    identity: Sequence[Any] = (),
) -> Source:
    """The source of n labelled images in memory, uint8 (n, H, W, 3) and (n,).

    identity: what else than the name, the split, n and the classes decides the images.
    """
    return Source(
        name=request.name,
        split=request.split,
        num_examples=len(images),
        num_classes=len(class_names),
        class_names=class_names,
        image_shape=images.shape[1:],
        fingerprint=fingerprint(request.name, request.split, len(images), class_names, *identity),
        read=read_tensors(images, labels, np.ones(len(images))),
        record_name=numbered(request.name, request.split),
    )


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


def read_labels(source: Source, start: int, stop: int) -> np.ndarray:
    """The labels of the records start, ..., stop - 1: int32 (stop - start,).

    Images are not decoded; sources that store labels separately, such as a folder, do not read
    them either. A record whose label cannot be read gets the label -1.
    """

    def label_of(record_ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # In the map that reads, so that TensorFlow prunes the image.
        return record_ids, source.read(record_ids)["label"]

    ids = tf.data.Dataset.range(start, stop)
    by_batch = ids.batch(_LABELS_AT_ONCE)
    if not source.encoded:
        found = by_batch.map(label_of).unbatch()
    elif source.record_files is None:
        found = ids.map(label_of, PARALLEL_CALLS).ignore_errors()
    else:
        found = stored_labels(source.record_files, by_batch)
    labels = np.full(stop - start, -1, np.int32)
    for record_ids, label in Elements(found.batch(_LABELS_AT_ONCE)):
        labels[record_ids - start] = label
    return labels


def count_labels(source: Source) -> np.ndarray:
    """How many records of `source` have each label, without decoding images.

    int64 (C,); for label vectors the sum over all records, float64 (C,), as a record of soft labels
    counts partly for several classes.
    """
    if not source.has_label_vectors:
        labels = read_labels(source, 0, source.num_examples)
        return np.bincount(labels[labels >= 0], minlength=source.num_classes)

    ids = tf.data.Dataset.range(source.num_examples)
    found = ids.map(lambda record_id: source.read(record_id)["label"], PARALLEL_CALLS)
    counts = np.zeros(source.num_classes, np.float64)
    for labels in Elements(found.batch(_LABELS_AT_ONCE)):
        counts += labels.sum(axis=0, dtype=np.float64)
    return counts
