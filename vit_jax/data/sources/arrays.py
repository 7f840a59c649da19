"""Images that the user has in Python: arrays, and anything with a length and an index.

    vit_jax.train(config, workdir, data={"train": (images, labels), "val": dataset})

A split is a pair (images, labels); a dict of columns, {"image": images, "caption": captions}, which
may have labels; or a sequence of items: (image, label), or a dict, as data sets of torch and of
Hugging Face give them. An array of pixels is read a batch at a time; other items one by one, in
several threads. Item i is record i, so training has the same order as with every other source.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import io
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base.errors import Faults, InputError, ReadError, collect_faults, few, shown
from vit_jax.data.captions import NAMES, find_captions, one_by_one
from vit_jax.data.class_names import spell
from vit_jax.data.contract import DataSet, Request, Source, fingerprint
from vit_jax.data.given_labels import as_labels, count_classes, labels_matter, settle_labels
from vit_jax.data.host_tf import tf
from vit_jax.data.images.files import split_of
from vit_jax.data.images.formats import Reading, why_unreadable
from vit_jax.data.images.given import content_of, file_of
from vit_jax.data.order import spread
from vit_jax.data.records import open_in_python, read_one
from vit_jax.data.retries import retried
from vit_jax.data.shards import parts_of

_SMALL_BYTES = 1 << 30  # arrays up to this size are copied, and count whole in the digest
_SAMPLE = 64  # items that count in the digest of others
_AT_ONCE = 4096
_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
_NEEDED = "a pair (images, labels), or a sequence of pairs (image, label)"


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The user's arrays for one split.

    name: its key.
    images: uint8 (n, H, W, C) or (n, H, W); or a sequence of images, or of items with a label.
    labels: as `as_labels` gives them; None: the items have their own, or there are none.
    class_names: that the data set knows; None: it knows none.
    captions: of each image, as `as_captions` takes them; None: the items have their own, or there
      are none.
    """

    name: str
    images: Any
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None
    captions: Any = None

    @classmethod
    def of(cls, name: str, given: Any) -> Split:
        """Raises InputError if `given` is no split."""
        where = f"data[{name!r}]"
        images, labels = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        captions = None
        if isinstance(given, Mapping) and (columns := _columns(given))[0] is not None:
            images, labels, captions = columns
        has_index = hasattr(images, "__len__") and hasattr(images, "__getitem__")
        if isinstance(images, Mapping) or not has_index:
            what = "" if has_index else ", which has no length or no index"
            raise InputError(f"{where}: got {type(images).__name__}{what}; needed: {_NEEDED}")
        if not len(images):
            raise InputError(f"{where}: has no images; needed: {_NEEDED}")
        for what, values in (("label", labels), ("caption", captions)):
            if values is not None and len(values) != len(images):
                counts = f"{len(images):,} images and {len(values):,} {what}s"
                raise InputError(f"{where}: has {counts}; give one {what} for each image")
        if labels is not None:
            labels = as_labels(labels, where)
        images, class_names = _undecoded(images)
        split = cls(name, images, labels, class_names, captions)
        if split.has_pixels:
            has = f"{where}: the images are {images.dtype} {images.shape}"
            if images.dtype != np.uint8:
                scaled = "np.uint8(np.rint(images * 255)) for values from 0 to 1"
                raise InputError(f"{has}; needed: uint8 from 0 to 255, such as {scaled}")
            if images.ndim != 3 and images.shape[3:] not in ((1,), (3,), (4,)):
                raise InputError(
                    f"{has}; needed: (N, H, W, C) with 1, 3 or 4 channels C, or (N, H, W); "
                    "channels that come first move by images.transpose(0, 2, 3, 1)"
                )
        else:
            faults = Faults()
            with contextlib.suppress(OSError):  # a missing file is left out, as others are
                faults.check_in(f"{where}: its first ", content_of, split.item(0)[0])
            collect_faults(faults)
        return split

    @property
    def has_pixels(self) -> bool:
        """Whether `images` are one array."""
        return isinstance(self.images, np.ndarray) and self.images.dtype != object

    def item(self, i: int) -> tuple[Any, Any]:
        """(image, label) of an item; the label is None if it has none."""
        found = self.images[i]
        if self.labels is not None:
            return found, self.labels[i]
        if isinstance(found, Mapping) and not found.keys() & {"bytes", "path"}:
            if not found.keys() & {*_IMAGES}:
                raise InputError(
                    f"data[{self.name!r}]: its items have {few(found)}; needed: {_IMAGES[0]}, and "
                    f"{_LABELS[0]} if there are labels"
                )
            image, label, _ = _columns(found)
            return image, label
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        return (found[0], found[1]) if is_pair else (found, None)

    def captions_of(self, i: int) -> list[str | bytes]:
        """The captions of an item; none if it is broken."""
        with contextlib.suppress(Exception):  # of the user's code
            found = self.images[i] if self.captions is None else {NAMES[0]: self.captions[i]}
            return find_captions(found) if isinstance(found, Mapping) else []
        return []

    def has_labels(self, request: Request) -> bool:
        """Whether it is read with labels; an item has one if the first has."""
        if self.labels is None:
            return self.item(0)[1] is not None
        if request.captions:
            return labels_matter(self.labels, request.multi_label)
        return self.labels.ndim == 2 or bool((self.labels >= 0).any())

    @functools.cached_property
    def digest(self) -> str:
        """12 hex digits of the content: of all of an array up to 1 GiB, else of a sample."""
        digest, count = hashlib.sha256(), len(self.images)
        if self.labels is not None:
            digest.update(f"{self.labels.dtype} {self.labels.shape} ".encode())
            digest.update(self.labels.tobytes())
        if self.has_pixels and self.images.nbytes <= _SMALL_BYTES:
            digest.update(f"{self.images.shape} ".encode())
            for start in range(0, count, _AT_ONCE):
                digest.update(self.images[start : start + _AT_ONCE].tobytes())
            return digest.hexdigest()[:12]
        for i in np.unique(np.linspace(0, count - 1, _SAMPLE).astype(int)):
            with contextlib.suppress(Exception):  # of a broken item, or of the user's code
                image, label = self.item(int(i))
                content = file_of(image, Reading(decoding=1))  # as digests of older runs
                digest.update(f"{i} {np.asarray(label).tolist()} ".encode() + content)
        return digest.hexdigest()[:12]

    @property
    def identity(self) -> str:
        """The facts of it that a run keeps."""
        return f"{self.name}-{len(self.images)}-{self.digest}"


class Data(NamedTuple):
    """The user's data: splits by name, and the names of the classes if they are known."""

    splits: Mapping[str, Split]
    class_names: tuple[str, ...] | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Data:
        """Raises InputError if `given` is not {split: see `Split.of`}, perhaps with class_names."""
        if not isinstance(given, Mapping):
            needed = '{"train": (images, labels), "val": (images, labels)}'
            raise InputError(f"data: got {type(given).__name__}; needed: {needed}")
        splits = {split_of(key) or key: given[key] for key in given if key != "class_names"}
        found = {name: Split.of(name, split) for name, split in splits.items()}
        of_splits = (split.class_names for split in found.values() if split.class_names)
        names = given.get("class_names")
        return cls(found, next(of_splits, None) if names is None else tuple(map(str, names)))


_given: contextvars.ContextVar[Data | None] = contextvars.ContextVar("data", default=None)


@contextlib.contextmanager
def give(data: Mapping[str, Any] | None) -> Iterator[dict[str, str]]:
    """Let `data.name=arrays` read `data`; yields the overrides that choose it.

    Raises: InputError if `data` are not as `Data.of` takes them.
    """
    token = _given.set(None if data is None else Data.of(data))
    try:
        yield {} if data is None else {"data.name": "arrays"}
    finally:
        _given.reset(token)


@functools.lru_cache(maxsize=1)
def _read(path: str, *version: float) -> Data:
    """The arrays of FILE.npz: SPLIT_images, SPLIT_labels or SPLIT_captions, perhaps class_names.

    Raises: InputError if it cannot be read, or has no images.
    """
    del version
    where = f"data.data_dir={shown(path)!r}"
    try:
        with np.load(io.BytesIO(epath.Path(path).read_bytes()), allow_pickle=False) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise InputError(f"{where}: cannot be read ({e}); write it by np.savez") from None
    names = [key.removesuffix("_images") for key in arrays if key.endswith("_images")]
    if not names:
        needed = "train_images, train_labels, val_images, val_labels and so on"
        raise InputError(f"{where}: has {few(arrays) or 'no arrays'}; needed: {needed}")
    columns = ("image", "label", "caption")
    splits = {name: {key: arrays.get(f"{name}_{key}s") for key in columns} for name in names}
    return Data.of(splits | {"class_names": arrays.get("class_names")})


def _find(name: str, data_dir: str | None) -> Data:
    """The data given in Python, else in the file `data_dir`."""
    if (data := _given.get()) is not None:
        return data
    path = epath.Path(data_dir or "")
    if path.suffix == ".npz" and path.exists():
        stat = path.stat()
        return _read(os.fspath(path), stat.length, stat.mtime)
    where = f"data.name={name!r}, data.data_dir={data_dir!r}: "
    if data_dir and not path.exists():
        raise InputError(
            f"{where}no such file; needs FILE.npz with train_images, train_labels, ..."
        )
    raise InputError(
        f"{where}needs images from Python: "
        'vit_jax.train(config, workdir, data={"train": (images, labels), ...}) or '
        'vit_jax.evaluate(workdir, data={"val": (images, labels)}); or a file with arrays '
        "train_images, train_labels and so on: --config.data.data_dir=FILE.npz, or `vit_jax "
        "evaluate --data=FILE.npz`"
    )


class Arrays(DataSet):
    """The arrays or sequences given in Python, or the arrays in `data_dir`, FILE.npz.

    Splits are those given, or parts of one in TFDS notation. A run keeps the number of images and a
    digest of each split that it was given, `arrays@train-50000-3f2a1c9e05d2`.
    """

    is_own = True

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        return [*_find(name, data_dir).splits]

    @classmethod
    def settle(cls, name: str) -> str:
        data = _given.get()
        if data is None or "@" in name:
            return name
        return f"{name}@{','.join(split.identity for split in data.splits.values())}"

    def open(self, request: Request) -> Source:
        """Raises InputError if nothing was given, it is not what the run had, or lacks labels."""
        data = _find(request.name, request.data_dir)
        sizes = {name: len(split.images) for name, split in data.splits.items()}
        try:
            parts = parts_of(request.split, sizes, "the given data")
        except InputError as e:
            remedy = f"give data[{request.split!r}] too, or set data.split or evals.NAME.split"
            raise InputError(f"{str(e).rstrip('.')}; {remedy}") from None
        if len({name for name, _, _ in parts}) > 1:
            raise InputError(f"data.split={request.split!r}: needs one split, or parts of one")
        split = data.splits[parts[0][0]]
        _check_same(request.name, split)
        rows = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        names = _class_names(data, split, request) if split.has_labels(request) else None
        num_classes, multi_label = len(names or (0,)), request.multi_label
        settled = functools.partial(settle_labels, f"data[{split.name!r}]", num_classes)
        labels = None if names else np.zeros(len(rows), np.int32)
        if names and split.labels is not None:
            labels = settled(split.labels[rows], multi_label, rows)
        # An item cannot say whether others have several labels.
        multi_label = bool(multi_label) if labels is None else labels.ndim == 2
        if split.has_pixels:
            assert labels is not None
            how = _open_pixels(split.images, rows, labels)
        else:

            def label_of(record: int, label: Any) -> np.ndarray:
                if labels is None:
                    return settled(as_labels([label], f"data[{split.name!r}]"), multi_label)[0]
                return labels[record]

            shape = [num_classes] if multi_label else []
            how = _open_items(split, rows, label_of, shape, request.reading)
        identity = [*map(list, parts), split.digest, names, multi_label, request.exif]
        seen = rows[spread(20, len(rows))].tolist() if request.captions else []
        has = bool(seen) and (split.captions is not None or any(map(split.captions_of, seen)))
        return Source(
            name=request.name,
            split=request.split,
            num_examples=len(rows),
            num_classes=num_classes,
            class_names=names,
            captions=one_by_one(lambda i: split.captions_of(int(rows[i]))) if has else None,
            fingerprint=fingerprint("arrays", *identity),
            record_name=lambda record: f"item {rows[record]} of {split.name}",
            multi_label=multi_label,
            **how,
        )


def _columns(given: Mapping[str, Any]) -> list[Any]:
    """The images, the labels and the captions in a dict of them; None for what it lacks."""
    return [
        next((given[name] for name in names if name in given), None)
        for names in (_IMAGES, _LABELS, NAMES)
    ]


def _check_same(name: str, split: Split) -> None:
    """Raise InputError if `name` is of a run that was given another split of that name."""
    stored = {text.rsplit("-", 2)[0]: text for text in name.partition("@")[2].split(",")}
    was, now = stored.get(split.name), split.identity
    if was not in (None, now):
        raise InputError(
            f"data.name={name!r}: the run began with other images or labels for {split.name!r}: "
            f"got {now}, needed {was} (number of images and digest); give the same again, or begin "
            "a new run in another workdir"
        )


def _class_names(data: Data, split: Split, request: Request) -> tuple[str, ...]:
    """Those given, else the model's, else the numbers of the labels of `train`.

    Raises: InputError if the labels come with the items, and nothing names their classes.
    """
    if names := data.class_names or request.class_names:
        return spell(names, request.divider.class_names)
    labels = data.splits.get("train", split).labels
    if labels is None:
        raise InputError(
            f"data[{split.name!r}]: the classes are unknown, as each item has its own label; name "
            'them by data["class_names"], such as ["cat", "dog"] or range(10)'
        )
    return tuple(map(str, range(count_classes(labels))))


def _open_pixels(images: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Fields of a `Source` of pixels, which are read a batch at a time.

    Up to 1 GiB they are copied to TensorFlow, which costs less than calls of Python; larger arrays,
    perhaps on the disk, stay where they are.
    """
    images = images if images.ndim == 4 else images[..., None]
    labels_tensor = tf.constant(labels)
    held = tf.constant(images[rows]) if images.nbytes <= _SMALL_BYTES else None

    def gather(ids: tf.Tensor) -> tf.Tensor:
        if held is not None:
            return tf.gather(held, ids)
        found = tf.numpy_function(lambda ids: images[rows[ids]], [ids], tf.uint8, stateful=False)
        return tf.ensure_shape(found, ids.shape.concatenate(images.shape[1:]))

    def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        label = tf.gather(labels_tensor, record_ids)
        mask = tf.ones(tf.shape(record_ids))
        return {"image": gather(record_ids), "label": label, "mask": mask}

    return {"read": read, "image_shape": images.shape[1:]}


def _open_items(
    split: Split,
    rows: np.ndarray,
    label_of: Callable[[int, Any], np.ndarray],
    shape: list[int],
    reading: Reading,
) -> dict[str, Any]:
    """Fields of a `Source` of items, which are read one by one.

    A stored record is the item's label, int32 or float32 (C,), and the bytes of its image.

    Args:
      label_of: (record, the item's own label) -> the label.
      shape: of a label.
    """
    kind, size = tf.float32 if shape else tf.int32, 4 * math.prod(shape)

    def load(record: int) -> tuple[bytes, bytes]:
        image, label = split.item(int(rows[record]))
        return label_of(record, label).tobytes(), file_of(image, reading)

    def read_item(record: int) -> bytes:
        name = f"item {rows[record]} of {split.name}"
        try:
            return b"".join(retried(lambda: load(record), name)) if record >= 0 else b""
        except ReadError:
            raise
        except Exception:  # of the user's code; `why` says it
            return b""

    def parse(stored: tf.Tensor, record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        del record_id
        label = tf.io.decode_raw(tf.strings.substr(stored, 0, size), kind)
        image = tf.strings.substr(stored, size, -1)
        return {"image": image, "label": tf.reshape(label, shape), "mask": tf.ones([])}

    def why(record: int) -> str:
        try:
            load(record)
            image = content_of(split.item(int(rows[record]))[0])
        except InputError as e:
            return str(e)
        except Exception as e:  # of the user's code
            return f"{type(e).__name__}: {e}"
        return why_unreadable(image, reading) if isinstance(image, bytes) else ""

    files = open_in_python(np.zeros(1, np.int64), lambda ids: [*map(read_item, ids)], parse=parse)
    return {
        "read": lambda record_id: read_one(files, record_id, parse),
        "encoded": True,
        "record_files": files,
        "why_unreadable": why,
    }


def _undecoded(images: Any) -> tuple[Any, tuple[str, ...] | None]:
    """A data set of `datasets` with the files of its images, and the names of its classes.

    Anything else, and what a transform of the user's decodes, stays as it is.
    """
    features = getattr(images, "features", None)
    if not (isinstance(features, Mapping) and hasattr(images, "cast_column")):
        return images, None
    label = next((features[name] for name in _LABELS if name in features), None)
    names = getattr(getattr(label, "feature", label), "names", None)
    column = next((name for name in _IMAGES if name in features), None)
    if column and hasattr(features[column], "decode") and images.format["type"] is None:
        images = images.cast_column(column, dataclasses.replace(features[column], decode=False))
    return images, None if names is None else tuple(names)
