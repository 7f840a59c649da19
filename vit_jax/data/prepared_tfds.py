"""Prepared TFDS data sets as sources.

Nothing is ever downloaded or prepared here. A data set's features are read from the features.json
beside its files, so data sets outside TFDS's catalogue are read as well as those in it.
tfds_folder.py finds those files, and tfds_readers.py reads their records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.data import host_ops
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.record_files import RecordFiles, stored_records
from vit_jax.data.sources import Source, fingerprint
from vit_jax.data.tfds_folder import prepared_folder
from vit_jax.data.tfds_readers import RECORDS_AT_ONCE, choose_reader, open_files, read_all
from vit_jax.errors import InputError

BROKEN_LABELS = ("read", "by_reader")


@dataclasses.dataclass(frozen=True)
class View:
    """What of a data set's examples becomes image and label.

    Attributes:
      features: those that the label is made of; the first alone, a ClassLabel, if num_classes is
        None.
      label: {feature: tensor} -> the label, an integer in [0, num_classes).
      num_classes: None for those of the ClassLabel, which has their names too.
      image_scale: of the stored pixels, where these are not 0 to 255.
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
    broken_labels: str = "read",
    other_sources: Sequence[str] = (),
    view: View = _LABEL,
    **_,
) -> Source:
    """A split of the prepared TFDS data set `name[/config][:version]` below `data_dir`.

    `split` is in TFDS notation (`train`, `train[:90%]`, `train+validation`), `data_dir` None is
    TFDS's own default, and without a version the newest one there is read. `other_sources` are
    names that a misspelt `name` may have meant. `view` is how examples become images and labels.

    `reader` is one of those that tfds_readers.py lists. `broken_labels`: "read" gives a record
    with a broken image its label; "by_reader" does so for every reader but `memory`, as older
    versions did.

    Raises: InputError if the data set or a file is missing or not as dataset_info.json says, if
      it has no `image` of integer pixels or no class `label`, if there is no such split, if
      `reader` does not read its format, or if it is to be held in memory and does not fit.
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
    identity = (info.full_name, split, num_examples, class_names)
    newest = fingerprint(*identity, _digest_records(files, num_examples))
    if in_memory := reader == "memory":
        read = read_all(files, num_examples, image_shape, broken_labels)
    else:
        read = _make_read(files)
    return Source(
        name=name,
        split=split,
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=class_names,
        image_shape=image_shape,
        fingerprints=(fingerprint(*identity), newest),
        read=read,
        record_name=_make_record_name(parts, files.segments, f"{info.full_name} {split}"),
        encoded=not in_memory or image_shape is None,
        record_files=None if in_memory else files,
        file_names=_make_file_names(files, features.get("file_name")),
    )


def _check_features(info, view: View, where: str) -> None:
    """Raises InputError if there is no `image` of integer pixels, or a feature of `view` lacks."""
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
    """The examples of `split`; raises InputError if there is no such split or it is empty."""
    where = f"data.split={split!r} of {info.full_name}"
    try:
        num_examples = info.splits[split].num_examples
    except (ValueError, KeyError) as error:
        raise InputError(f"{where}: {error}") from error
    # Of a slice that ends before it begins TFDS makes any number of examples, negative ones too.
    slices = []
    if "[" in split:
        slices = tfds.core.ReadInstruction.from_spec(split).to_absolute(info.splits)
    backwards = any(s.to is not None and s.to < (s.from_ or 0) for s in slices)
    if backwards or num_examples < 1:
        raise InputError(f"{where} holds no examples, or ends before it begins")
    return num_examples


def _make_read(files: RecordFiles) -> Callable:
    """`Source.read` of records that are read when they are asked for."""

    def read(record_id):
        return _read_one(files, record_id, files.parse)

    return read


def _read_one(files: RecordFiles, record_id: tf.Tensor, parse: Callable) -> Any:
    """`parse` of a record as it is stored and its id."""
    stored = files.open(record_id, tf.constant(1, tf.int64)).get_single_element()
    return parse(stored, record_id)


def _make_record_name(parts, segments: np.ndarray, where: str) -> Callable[[int], str]:
    """`Source.record_name`: the record's file and its place there, and its place in the split."""

    def record_name(record):
        i = np.searchsorted(segments, record, side="right") - 1
        in_file = record - segments[i] + parts[i].skip
        file_name = pathlib.PurePath(parts[i].filename).name
        return f"{file_name} record {in_file} (record {record} of {where})"

    return record_name


def _make_parse(features: dict, view: View, num_classes: int) -> Callable:
    """`RecordFiles.parse` of `features`; others are not looked at."""
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
    """`Source.file_names` of the feature `file_name`; None where that is not a text."""
    if not isinstance(feature, tfds.features.Text):
        return None
    features = tfds.features.FeaturesDict({"file_name": feature})

    def file_names(start, stop):
        ids = tf.data.Dataset.range(start, stop)
        stored = stored_records(files, ids.batch(RECORDS_AT_ONCE))
        found = tf.data.Dataset.zip(ids, stored).map(
            lambda i, s: (i, features.deserialize_example(s)["file_name"]), tf.data.AUTOTUNE
        )
        names = [""] * (stop - start)
        for record_ids, batch in found.ignore_errors().batch(RECORDS_AT_ONCE).as_numpy_iterator():
            for record_id, name in zip(record_ids, batch, strict=True):
                names[record_id - start] = name.decode()
        return names

    return file_names


def _parse_example(features, stored):
    decoders = {"image": tfds.decode.SkipDecoding()}
    return features.deserialize_example(stored, decoders=decoders)


def _check_labelled(files: RecordFiles, features: dict, view: View, where: str) -> None:
    """Raises InputError if the first record has no label, as those of some test splits."""
    features = tfds.features.FeaturesDict(features)
    label = _read_now(files, 0, lambda stored, _: view.label(_parse_example(features, stored)))
    if label is not None and label < 0:
        raise InputError(f"{where} holds unlabelled examples")


def _read_now(files: RecordFiles, record: int, parse: Callable) -> Any:
    """`_read_one` outside of a graph; None where that fails."""
    try:
        return _read_one(files, tf.constant(record, tf.int64), parse)
    except (tf.errors.OpError, UnicodeDecodeError):  # the error may quote the record's bytes
        return None


def _is_image(feature) -> bool:
    return isinstance(feature, tfds.features.Image)


def _check_pixels(image, where: str) -> None:
    """Raises InputError if `to_pixels` does not give the pixels that were put into the feature."""
    dtype, shape = np.dtype(image.np_dtype), image.shape
    # TFDS hides the bytes of a float in the four channels of a PNG.
    if dtype not in (np.uint8, np.uint16) or len(shape) != 3:
        raise InputError(
            f"{where} has images {dtype} {shape}; needed: uint8 or uint16 (height, width, "
            "channels); prepare it anew with pixels from 0 to 255 as uint8"
        )


def _digest_records(files: RecordFiles, num_examples: int) -> list[str]:
    """Digests of the first, middle and last record, which change with the order of preparing."""

    def digest(stored, record_id):  # of pixels, as a PNG may be compressed otherwise next time
        example = files.parse(stored, record_id)
        pixels = host_ops.to_pixels(example["image"]).numpy()
        identity = f"{example['label'].numpy()} {pixels.shape} ".encode()
        return hashlib.sha256(identity + pixels.tobytes()).hexdigest()

    records = (0, num_examples // 2, num_examples - 1)
    return [_read_now(files, record, digest) or "broken" for record in records]


def _is_class_label(feature) -> bool:
    return isinstance(feature, tfds.features.ClassLabel)
