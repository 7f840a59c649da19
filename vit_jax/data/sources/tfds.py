"""Prepared TFDS data sets.

This module never downloads or prepares data. It takes a data set's features from the features.json
next to its files, so data sets outside TFDS's catalogue work as well. The values of `data.reader`:

    memory        read all records at once; decode them too if features.json fixes the size
    offsets       read each record on demand from TFRecord files, by its byte offset
    array_record  read each record on demand from array_record files
    on_disk       offsets or array_record, depending on the files; not for a config
    None          memory if files and pixels are small and fit, else on_disk

With every reader, record i of a split is the i-th in the order of the split's files.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.config.registries import SOURCES
from vit_jax.data.captions import NAMES
from vit_jax.data.contract import DataSet, Request, Source, fingerprint, read_tensors
from vit_jax.data.elements import Elements
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.images.formats import Reading, as_known_format, to_pixels
from vit_jax.data.records import (
    RecordFiles,
    digest_records,
    open_files,
    read_now,
    read_one,
    stored_labels,
    stored_values,
)

_NAME = re.compile(r"(?P<name>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>\d+\.\d+\.\d+))?")
_RECORDS_AT_ONCE = 1024
_KEPT = 100_000  # captions of so many records are kept in memory, at most
_SMALL_BYTES = 1 << 30  # files and pixels up to this size are held in memory by default

ON_DISK = "on_disk"
# The reader of each file format; `memory` reads both.
_BY_FORMAT = {"tfrecord": "offsets", "array_record": "array_record"}


@dataclasses.dataclass(frozen=True)
class View:
    """The way an image and a label are made from a data set's example.

    Attributes:
      features: the features that `label` needs; if num_classes is None, only one, a ClassLabel.
      label: {feature: tensor} -> the label, an integer in [0, num_classes).
      num_classes: number of classes; None takes number and names from the ClassLabel.
      image_scale: factor for the stored pixels if their range is not 0 to 255.
    """

    features: tuple[str, ...] = ("label",)
    label: Callable[[dict[str, tf.Tensor]], tf.Tensor] = lambda example: example["label"]
    num_classes: int | None = None
    image_scale: int = 1


_UNLABELLED = View(("image",), lambda example: tf.constant(0), 1)


class Tfds(DataSet):
    """A split of the prepared TFDS data set `name[/config][:version]` below `data_dir`.

    `split` is in TFDS notation (`train`, `train[:90%]`, `train+validation`). `data_dir` None is
    TFDS's default folder. Without a version the newest one in the folder is read.

    Captions are the feature `caption`, `captions` or `text`: a text, a sequence of texts, or a
    sequence with texts named `text`. A data set that is read for them may lack a class.
    """

    def open(self, request: Request) -> Source:
        return open_prepared(request)


def open_prepared(request: Request, view: View = View()) -> Source:
    """The split of a prepared data set, with the images and labels that `view` makes.

    Raises: InputError if the data set or a file is missing or contradicts dataset_info.json, if
      it has no `image` of integer pixels or no class `label`, if the split does not exist, if
      `reader` does not read its format, or if reader `memory` is set and the split does not fit.
    """
    split, folder = request.split, prepared_folder(request.name, request.data_dir)
    info = tfds.builder_from_directory(folder).info
    names = NAMES if request.captions else ()
    caption = next((name for name in names if name in info.features), None)
    is_labelled = isinstance(dict(info.features).get(view.features[0]), tfds.features.ClassLabel)
    if caption is not None and view.num_classes is None and not is_labelled:
        view = _UNLABELLED
    features = _read_features(info, view, f"data.name={request.name!r}: {info.full_name}")
    num_examples = count_examples(split, info.splits, info.full_name)
    image_shape = features["image"].shape
    image_shape = None if None in image_shape else (*image_shape[:2], 3)
    class_names: tuple[str, ...] | None = None
    num_classes = view.num_classes
    if num_classes is None:
        class_names = tuple(features[view.features[0]].names)
        num_classes = len(class_names)

    parts = info.splits[split].file_instructions
    reader = _choose_reader(request.reader, info, parts, num_examples, image_shape)
    parse = _make_parse(features, view, num_classes, request.reading._replace(exif=False))
    files = open_files(info.file_format.value, parts, parse)
    if class_names is not None:
        _check_labelled(files, features, view, f"data.split={split!r} of {info.full_name}")
    digest = digest_records(files, num_examples)
    in_memory = reader == "memory"
    read = _read_all(files, num_examples, image_shape) if in_memory else None
    return Source(
        name=request.name,
        split=split,
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=class_names,
        image_shape=image_shape,
        fingerprint=fingerprint(info.full_name, split, num_examples, class_names, digest),
        read=read or (lambda record_id: read_one(files, record_id, files.parse)),
        record_name=_make_record_name(parts, files.segments, f"{info.full_name} {split}"),
        encoded=not in_memory or image_shape is None,
        record_files=None if in_memory else files,
        file_names=_make_file_names(files, dict(info.features).get("file_name")),
        captions=None if caption is None else _make_captions(files, num_examples, caption, info),
    )


def prepared_folder(name: str, data_dir: str | None) -> epath.Path:
    """The folder of the data set's version: data_dir/name[/config]/version.

    Raises: InputError if it does not exist; the message says how to get the data set.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(f"data.name={name!r}; needed: a name such as 'cifar10', 'cifar10:3.0.2'")
    root = epath.Path(os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR))
    parent = root / match["name"] / (match["config"] or "")
    found = sorted(p.name for p in parent.iterdir() if p.is_dir()) if parent.exists() else []
    versions = [v for v in found if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    newest = max(versions, key=lambda v: [int(n) for n in v.split(".")], default="VERSION")
    folder = parent / (match["version"] or newest)
    if (folder / "dataset_info.json").exists() and (folder / "features.json").exists():
        return folder
    raise InputError(
        f"data.name={name!r}: no prepared data set, {folder / 'features.json'} or the "
        f"dataset_info.json next to it is missing (there: {', '.join(found) or 'nothing'}); "
        f"{_how_to_get(match['name'], name, root)}"
    )


def _how_to_get(catalogue_name: str, name: str, root: epath.Path) -> str:
    or_set = f"set data.data_dir to the folder that holds {catalogue_name}/"
    catalogue = tfds.list_builders(with_community_datasets=False)
    if catalogue_name not in catalogue:
        known = [*SOURCES, *catalogue]
        close = difflib.get_close_matches(catalogue_name, known, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
        return f"{meant}prepare it as docs/how_to/data.md shows, or {or_set}"
    steps = (
        'prepare it with: python -c "import tensorflow_datasets as tfds; '
        f'tfds.builder({name!r}, data_dir={str(root)!r}).download_and_prepare()"'
    )
    if manual := tfds.builder_cls(catalogue_name).MANUAL_DOWNLOAD_INSTRUCTIONS:
        place = root / "downloads/manual"
        steps += f", after placing files in {place}. TFDS says: {' '.join(manual.split())}"
    return f"{steps}; or {or_set}"


def _read_features(info: tfds.core.DatasetInfo, view: View, where: str) -> dict:
    """The features that are read: `image` and the features of `view`.

    Raises: InputError if one is missing, or `image` is not of integer pixels.
    """
    features: dict[str, Any] = dict(info.features)
    image, label = features.get("image"), features.get(view.features[0])
    labelled = view.num_classes is not None or isinstance(label, tfds.features.ClassLabel)
    is_image = isinstance(image, tfds.features.Image)
    if image is None or not (is_image and labelled and features.keys() >= {*view.features}):
        needed = ", ".join(map(repr, view.features))
        needed += ", a ClassLabel" if view.num_classes is None else ""
        raise InputError(
            f"{where} has the features {features}; needed: 'image', an Image, and {needed}"
        )
    # TFDS stores the bytes of a float in the four channels of a PNG.
    if np.dtype(image.np_dtype).name not in ("uint8", "uint16") or len(image.shape) != 3:
        raise InputError(
            f"{where} has images {np.dtype(image.np_dtype)} {image.shape}; needed: uint8 or uint16 "
            "(height, width, channels); prepare it again with pixels from 0 to 255 as uint8"
        )
    return {key: features[key] for key in ("image", *view.features)}


def find_parts(split: str, infos: Mapping[str, Any], name: str) -> list[tuple[str, int, int]]:
    """The parts (split, first record, last record + 1) of `split` in TFDS notation.

    Args:
      split: the text.
      infos: {split: tfds.core.SplitInfo} of the data set.
      name: of the data set, in messages.

    Raises: InputError if it does not exist or is empty.
    """
    where = f"data.split={split!r} of {name}"
    try:
        found = tfds.core.ReadInstruction.from_spec(split).to_absolute(infos)
    except (ValueError, KeyError) as error:
        raise InputError(f"{where}: {error}") from error
    ends = [infos[p.splitname].num_examples if p.to is None else p.to for p in found]
    parts = [(p.splitname, p.from_ or 0, end) for p, end in zip(found, ends, strict=True)]
    sizes = [stop - start for _, start, stop in parts]
    if sum(sizes) < 1 or min(sizes) < 0:
        raise InputError(f"{where} holds no examples, or ends before it begins")
    return parts


def count_examples(split: str, infos: Mapping[str, Any], name: str) -> int:
    """The number of examples of `split`; see `find_parts`."""
    return sum(stop - start for _, start, stop in find_parts(split, infos, name))


def _choose_reader(
    reader: str | None,
    info: tfds.core.DatasetInfo,
    parts: Sequence[Any],
    num_examples: int,
    image_shape: tuple[int, ...] | None,
) -> str:
    """The reader of a split: `reader` if given, else chosen by size and format.

    Args:
      reader: see the top of this module.
      info: tfds.core.DatasetInfo.
      parts: TFDS's file instructions, in the order of the records.
      num_examples: number of records in the split.
      image_shape: (H, W, 3) if all images have the same size, else None.

    Raises: InputError if a file is missing, or `reader` does not read the format or needs more
      memory than there is.
    """
    stored_as = info.file_format.value
    if stored_as not in _BY_FORMAT:
        known = " or ".join(_BY_FORMAT)
        raise InputError(f"data.name: {info.full_name} is stored as {stored_as}; needed: {known}")
    on_disk = _BY_FORMAT[stored_as]
    if reader not in (None, "memory", on_disk, ON_DISK):
        where = f"data.reader={reader!r}: {info.full_name} is stored as {stored_as}"
        raise InputError(f"{where}; set it to {on_disk} or memory")
    encoded_bytes = 0
    for part in parts:
        path = epath.Path(part.filename)
        if not path.exists():
            raise InputError(f"data.data_dir: {path} is missing; copy or prepare it again")
        encoded_bytes += path.stat().length * part.take / part.examples_in_shard
    pixel_bytes = num_examples * math.prod(image_shape) if image_shape else 0
    needed = 2 * (encoded_bytes + pixel_bytes)  # loading holds everything twice for a moment
    available = min(psutil.virtual_memory().available, _container_memory())
    if reader == "memory" and needed > available:
        raise InputError(
            f"data.reader='memory': loading {num_examples} examples takes about "
            f"{needed / 2**30:.1f} GiB and this host has {available / 2**30:.1f} GiB free; leave "
            "it out, or read a part (data.split='train[:10%]')"
        )
    small = encoded_bytes + pixel_bytes <= _SMALL_BYTES and needed <= available
    return "memory" if reader == "memory" or (reader is None and small) else on_disk


def _container_memory() -> float:
    """Free bytes under the container's memory limit (cgroup 2); infinite if there is none."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return math.inf


def _make_parse(features: dict, view: View, num_classes: int, reading: Reading) -> Callable:
    """Make `RecordFiles.parse`, which decodes only `features`."""
    dictionary = tfds.features.FeaturesDict(features)

    def parse(stored: tf.Tensor, record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        del record_id
        example = _parse_example(dictionary, stored)
        label = tf.cast(view.label(example), tf.int32)
        labelled = tf.debugging.Assert((label >= 0) & (label < num_classes), [label])
        with tf.control_dependencies([labelled]):
            label = tf.identity(label)
        image = as_known_format(example["image"], reading)
        if view.image_scale != 1:
            image = to_pixels(image) * tf.constant(view.image_scale, tf.uint8)
        return {"image": image, "label": label, "mask": tf.ones([])}

    return parse


def _parse_example(features: tfds.features.FeaturesDict, stored: tf.Tensor) -> dict:
    decoders = {"image": tfds.decode.SkipDecoding()}
    return features.deserialize_example(stored, decoders=decoders)


def _check_labelled(files: RecordFiles, features: dict, view: View, where: str) -> None:
    """Raise InputError if the first record has no label, as in some test splits."""
    dictionary = tfds.features.FeaturesDict(features)
    label = read_now(files, 0, lambda stored, _: view.label(_parse_example(dictionary, stored)))
    if label is not None and label < 0:
        raise InputError(f"{where} holds unlabelled examples")


def _read_all(
    files: RecordFiles, num_examples: int, image_shape: tuple[int, ...] | None
) -> Callable:
    """Read a split into memory and make its `Source.read`; broken records are masked."""

    def load(stored: tf.Tensor, record_id: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = files.parse(stored, record_id)
        image = example["image"]
        if image_shape is not None:
            image = tf.ensure_shape(to_pixels(image), image_shape)
        return image, example["label"]

    ids = tf.data.Dataset.range(num_examples).batch(_RECORDS_AT_ONCE)
    loaded = stored_values(files, ids, load)
    empty, dtype = (b"", object) if image_shape is None else (0, np.uint8)
    images = np.full((num_examples, *(image_shape or ())), empty, dtype)
    labels, mask = np.full(num_examples, -1, np.int32), np.zeros(num_examples, np.float32)
    for record_ids, (image, label) in Elements(loaded.batch(_RECORDS_AT_ONCE)):
        images[record_ids], labels[record_ids], mask[record_ids] = image, label, 1
    broken = np.flatnonzero(mask == 0)
    if len(broken):
        ids = tf.data.Dataset.from_tensor_slices(broken).batch(_RECORDS_AT_ONCE)
        for record_id, label in Elements(stored_labels(files, ids)):
            labels[record_id] = label
    return read_tensors(images, labels, mask)


def _make_record_name(
    parts: Sequence[Any], segments: np.ndarray, where: str
) -> Callable[[int], str]:
    """Make `Source.record_name`: the record's file, its index there, and its index in the split."""
    file_names = [pathlib.PurePath(part.filename).name for part in parts]

    def record_name(record: int) -> str:
        i = int(np.searchsorted(segments, record, side="right")) - 1
        in_file = record - segments[i] + parts[i].skip
        return f"{file_names[i]} record {in_file} (record {record} of {where})"

    return record_name


def _make_captions(
    files: RecordFiles, number: int, name: str, info: tfds.core.DatasetInfo
) -> Callable:
    """Make `Source.captions`; of up to `_KEPT` records the first call reads all, which stay.

    TFDS stores captions with their images, so that both are read, one stretch after the other.
    """
    features = tfds.features.FeaturesDict({name: info.features[name]})
    kept: list[list[bytes]] = []

    def texts_of(stored: tf.Tensor, record_id: tf.Tensor) -> tf.Tensor:
        found = features.deserialize_example(stored)[name]
        return tf.reshape(found["text"] if isinstance(found, dict) else found, [-1])

    def read(records: Sequence[int]) -> Iterator[list[bytes]]:
        ids = tf.data.Dataset.from_tensor_slices(np.asarray(records, np.int64))
        elements = Elements(stored_values(files, ids.batch(_RECORDS_AT_ONCE), texts_of))
        none = -1, np.array([])
        found, texts = next(elements, none)
        for record in records:
            if record != found:  # it is broken, and left out
                yield []
                continue
            yield texts.tolist()
            found, texts = next(elements, none)

    def captions(records: Sequence[int]) -> Iterator[list[bytes]]:
        if number > _KEPT:
            return read(records)
        kept[:] = kept or [*read(range(number))]
        return map(kept.__getitem__, records)

    return captions


def _make_file_names(
    files: RecordFiles, feature: tfds.features.FeatureConnector
) -> Callable | None:
    """Make `Source.file_names` from the feature `file_name`; None if that is not a text."""
    if not isinstance(feature, tfds.features.Text):
        return None
    features = tfds.features.FeaturesDict({"file_name": feature})

    def file_names(start: int, stop: int) -> Sequence[str]:
        ids = tf.data.Dataset.range(start, stop).batch(_RECORDS_AT_ONCE)
        found = stored_values(
            files, ids, lambda stored, i: features.deserialize_example(stored)["file_name"]
        )
        names = [""] * (stop - start)
        for record_id, name in Elements(found):
            names[record_id - start] = name.decode()
        return names

    return file_names
