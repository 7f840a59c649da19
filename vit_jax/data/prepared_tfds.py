"""Prepared TFDS data sets as sources.

This module never downloads or prepares data. It takes a data set's features from the features.json
next to its files, so data sets outside TFDS's catalogue work as well. tfds_folder.py finds the
files, and tfds_readers.py reads their records.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.data import host_ops
from vit_jax.data.elements import PARALLEL_CALLS, Elements, untuned
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.record_files import RecordFiles, stored_records
from vit_jax.data.sources import Source, fingerprint
from vit_jax.data.tfds_folder import prepared_folder
from vit_jax.data.tfds_readers import RECORDS_AT_ONCE, choose_reader, open_files, read_all
from vit_jax.errors import InputError


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


_LABEL = View()


def tfds_source(
    name: str,
    *,
    split: str,
    data_dir: str | None,
    reader: str | None = None,
    other_sources: Sequence[str] = (),
    view: View = _LABEL,
    **_,
) -> Source:
    """A split of the prepared TFDS data set `name[/config][:version]` below `data_dir`.

    `split` is in TFDS notation (`train`, `train[:90%]`, `train+validation`). `data_dir` None is
    TFDS's default folder. Without a version the newest one in the folder is read. `other_sources`
    are more names to suggest for a misspelt `name`. `view` makes images and labels from examples.

    `reader` is one that tfds_readers.py lists.

    Raises: InputError if the data set or a file is missing or contradicts dataset_info.json, if
      it has no `image` of integer pixels or no class `label`, if the split does not exist, if
      `reader` does not read its format, or if reader `memory` is set and the split does not fit.
    """
    info = tfds.builder_from_directory(prepared_folder(name, data_dir, other_sources)).info
    _check_features(info, view, f"data.name={name!r}: {info.full_name}")
    num_examples = _count_examples(info, split)
    features = dict(info.features)
    image_shape = features["image"].shape
    image_shape = None if None in image_shape else (*image_shape[:2], 3)
    class_names: tuple[str, ...] | None = None
    num_classes = view.num_classes
    if num_classes is None:
        class_names = tuple(features[view.features[0]].names)
        num_classes = len(class_names)

    parts = info.splits[split].file_instructions
    reader = choose_reader(reader, info, parts, num_examples, image_shape)
    read_features = {key: features[key] for key in ("image", *view.features)}
    files = open_files(info, parts, _make_parse(read_features, view, num_classes))
    if class_names is not None:
        _check_labelled(files, read_features, view, f"data.split={split!r} of {info.full_name}")
    digest = _digest_records(files, num_examples)
    in_memory = reader == "memory"
    read_in_memory = functools.partial(read_all, files, num_examples, image_shape)
    return Source(
        name=name,
        split=split,
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=class_names,
        image_shape=image_shape,
        fingerprint=fingerprint(info.full_name, split, num_examples, class_names, digest),
        read=read_in_memory() if in_memory else _make_read(files),
        record_name=_make_record_name(parts, files.segments, f"{info.full_name} {split}"),
        encoded=not in_memory or image_shape is None,
        record_files=None if in_memory else files,
        file_names=_make_file_names(files, features.get("file_name")),
    )


def _check_features(info, view: View, where: str) -> None:
    """Raise InputError if `image` is not of integer pixels, or a feature of `view` is missing."""
    features = dict(info.features)
    labelled = view.num_classes is not None or _is_class_label(features.get(view.features[0]))
    if not (_is_image(features.get("image")) and labelled and features.keys() >= {*view.features}):
        needed = ", ".join(map(repr, view.features))
        needed += ", a ClassLabel" if view.num_classes is None else ""
        raise InputError(
            f"{where} has the features {features}; needed: 'image', an Image, and {needed}"
        )
    _check_pixels(features["image"], where)


def _count_examples(info, split: str) -> int:
    """The number of examples of `split`; raises InputError if it does not exist or is empty."""
    where = f"data.split={split!r} of {info.full_name}"
    try:
        num_examples = info.splits[split].num_examples
    except (ValueError, KeyError) as error:
        raise InputError(f"{where}: {error}") from error
    # For a slice that ends before it begins, TFDS's number of examples is wrong, even negative.
    slices = []
    if "[" in split:
        slices = tfds.core.ReadInstruction.from_spec(split).to_absolute(info.splits)
    backwards = any(s.to is not None and s.to < (s.from_ or 0) for s in slices)
    if backwards or num_examples < 1:
        raise InputError(f"{where} holds no examples, or ends before it begins")
    return num_examples


def _make_read(files: RecordFiles) -> Callable:
    """`Source.read` for records that are read on demand."""

    def read(record_id):
        return _read_one(files, record_id, files.parse)

    return read


def _read_one(files: RecordFiles, record_id: tf.Tensor, parse: Callable) -> Any:
    """Read one record and return parse(stored string, record_id)."""
    stored = untuned(files.open(record_id, tf.constant(1, tf.int64))).get_single_element()
    return parse(stored, record_id)


def _make_record_name(parts, segments: np.ndarray, where: str) -> Callable[[int], str]:
    """Make `Source.record_name`: the record's file, its index there, and its index in the split."""

    def record_name(record):
        i = np.searchsorted(segments, record, side="right") - 1
        in_file = record - segments[i] + parts[i].skip
        file_name = pathlib.PurePath(parts[i].filename).name
        return f"{file_name} record {in_file} (record {record} of {where})"

    return record_name


def _make_parse(features: dict, view: View, num_classes: int) -> Callable:
    """Make `RecordFiles.parse`, which decodes only `features`."""
    features = tfds.features.FeaturesDict(features)

    def parse(stored, record_id):
        del record_id
        example = _parse_example(features, stored)
        label = tf.cast(view.label(example), tf.int32)
        labelled = tf.debugging.Assert((label >= 0) & (label < num_classes), [label])
        with tf.control_dependencies([labelled]):
            label = tf.identity(label)
        image = example["image"]
        if view.image_scale != 1:
            image = host_ops.to_pixels(image) * tf.constant(view.image_scale, tf.uint8)
        return {"image": image, "label": label, "mask": tf.ones([])}

    return parse


def _make_file_names(files: RecordFiles, feature) -> Callable | None:
    """Make `Source.file_names` from the feature `file_name`; None if that is not a text."""
    if not isinstance(feature, tfds.features.Text):
        return None
    features = tfds.features.FeaturesDict({"file_name": feature})

    def file_names(start, stop):
        ids = tf.data.Dataset.range(start, stop)
        stored = stored_records(files, ids.batch(RECORDS_AT_ONCE))
        found = tf.data.Dataset.zip(ids, stored).map(
            lambda i, s: (i, features.deserialize_example(s)["file_name"]), PARALLEL_CALLS
        )
        names = [""] * (stop - start)
        for record_ids, batch in Elements(found.ignore_errors().batch(RECORDS_AT_ONCE)):
            for record_id, name in zip(record_ids, batch, strict=True):
                names[record_id - start] = name.decode()
        return names

    return file_names


def _parse_example(features, stored):
    decoders = {"image": tfds.decode.SkipDecoding()}
    return features.deserialize_example(stored, decoders=decoders)


def _check_labelled(files: RecordFiles, features: dict, view: View, where: str) -> None:
    """Raise InputError if the first record has no label, as in some test splits."""
    features = tfds.features.FeaturesDict(features)
    label = _read_now(files, 0, lambda stored, _: view.label(_parse_example(features, stored)))
    if label is not None and label < 0:
        raise InputError(f"{where} holds unlabelled examples")


def _read_now(files: RecordFiles, record: int, parse: Callable) -> Any:
    """`_read_one` outside of a graph; None for a broken record.

    Errors that may not recur, such as a store that does not answer, are raised.
    """
    e = tf.errors
    broken = e.DataLossError, e.InvalidArgumentError, e.NotFoundError, e.OutOfRangeError
    try:
        return _read_one(files, tf.constant(record, tf.int64), parse)
    except (*broken, UnicodeDecodeError):  # the error may quote the record's bytes
        return None


def _is_image(feature) -> bool:
    return isinstance(feature, tfds.features.Image)


def _check_pixels(image, where: str) -> None:
    """Raise InputError if `to_pixels` does not restore the pixels stored in the feature."""
    dtype, shape = np.dtype(image.np_dtype), image.shape
    # TFDS stores the bytes of a float in the four channels of a PNG.
    if dtype not in (np.uint8, np.uint16) or len(shape) != 3:
        raise InputError(
            f"{where} has images {dtype} {shape}; needed: uint8 or uint16 (height, width, "
            "channels); prepare it again with pixels from 0 to 255 as uint8"
        )


def _digest_records(files: RecordFiles, num_examples: int) -> list[str]:
    """Digests of the first, middle and last record; they change if the order of records does."""

    def digest(stored, record_id):
        example = files.parse(stored, record_id)
        image, label = example["image"], example["label"].numpy()
        if image.dtype == tf.string and tf.io.is_jpeg(image):  # decoders differ in its pixels
            return hashlib.sha256(f"{label} ".encode() + image.numpy()).hexdigest()
        pixels = host_ops.to_pixels(image).numpy()  # the compression of a PNG may differ
        identity = f"{label} {pixels.shape} ".encode()
        return hashlib.sha256(identity + pixels.tobytes()).hexdigest()

    records = (0, num_examples // 2, num_examples - 1)
    return [_read_now(files, record, digest) or "broken" for record in records]


def _is_class_label(feature) -> bool:
    return isinstance(feature, tfds.features.ClassLabel)
