"""Prepared TFDS data sets as sources: by byte offset, from array_record files, or from memory.

Nothing is ever downloaded or prepared here. What a data set holds is read from the features.json
beside its files, so data sets outside TFDS's catalogue are read as well as those in it. Record i
of a split is the i-th in the order of its files, whichever reader gives it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from etils import epath

from vit_jax.data import host_ops, tfrecord
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.runs import Runs, stored_labels, stored_records
from vit_jax.data.sources import Source, fingerprint, read_tensors
from vit_jax.errors import InputError, nearest

_NAME = re.compile(r"(?P<name>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>\d+\.\d+\.\d+))?")
_RECORDS_AT_ONCE = 1024
_SMALL_BYTES = 1 << 30  # of files and pixels: up to there a split is held in memory by default

# What the readers read; memory is filled by the reader of the files' format.
FORMATS = {"offsets": "tfrecord", "array_record": "array_record"}
READERS = ("memory", *FORMATS)
BROKEN_LABELS = ("read", "by_reader")
ON_DISK = "on_disk"  # of the two the one that fits; for callers, a config has READERS


def check_reader(reader: str | None) -> None:
    """Raises InputError if `reader` is neither None nor in READERS."""
    if reader is not None and reader not in READERS:
        raise InputError(f"data.reader={reader!r}: {nearest(reader, READERS)}")


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

    `reader` is how records are read:

      memory        all of them now, once; decoded too, where features.json fixes the size
      offsets       each when it is asked for, from TFRecord files by its byte offset
      array_record  likewise, from array_record files
      on_disk       one of these two, by the files
      None          memory if files and pixels are small and fit, else on_disk

    `broken_labels`: "read" gives a record with a broken image its label; "by_reader" does so for
    every reader but `memory`, as older versions did.

    Raises: InputError if the data set or a file is missing or not as dataset_info.json says, if
      it has no `image` of integer pixels or no class `label`, if there is no such split, if
      `reader` does not read its format, or if it is to be held in memory and does not fit.
    """
    builder = tfds.builder_from_directory(prepared_folder(name, data_dir, other_sources))
    features, full_name = dict(builder.info.features), builder.info.full_name
    by_rule, first_feature = view.num_classes is not None, features.get(view.features[0])
    labelled = by_rule or _is_class_label(first_feature)
    if not (_is_image(features.get("image")) and labelled and features.keys() >= {*view.features}):
        needed = ", ".join(map(repr, view.features)) + ("" if by_rule else ", a ClassLabel")
        raise InputError(
            f"data.name={name!r}: {full_name} has the features {features}; needed: 'image', "
            f"an Image, and {needed}"
        )
    _check_pixels(features["image"], f"data.name={name!r}: {full_name}")
    image_shape = features["image"].shape
    image_shape = None if None in image_shape else (*image_shape[:2], 3)
    class_names: tuple[str, ...] | None = None
    num_classes = view.num_classes
    if num_classes is None:
        class_names = tuple(features[view.features[0]].names)
        num_classes = len(class_names)

    try:
        num_examples = builder.info.splits[split].num_examples
    except (ValueError, KeyError) as error:
        raise InputError(f"data.split={split!r} of {full_name}: {error}") from error
    # Of a slice that ends before it begins TFDS makes any number of examples, negative ones too.
    slices = []
    if "[" in split:
        slices = tfds.core.ReadInstruction.from_spec(split).to_absolute(builder.info.splits)
    backwards = any(s.to is not None and s.to < (s.from_ or 0) for s in slices)
    if backwards or num_examples < 1:
        raise InputError(
            f"data.split={split!r} of {full_name} holds no examples, or ends before it begins"
        )
    parts = builder.info.splits[split].file_instructions
    segments = np.cumsum([0, *(part.take for part in parts)])[:-1]

    reader = _choose_reader(reader, builder, parts, num_examples, image_shape)
    openers = {"tfrecord": _open_tfrecord, "array_record": _open_array_record}
    open_run = openers[_format(builder)](parts, segments)
    looked_at = {key: features[key] for key in ("image", *view.features)}
    parse = _make_parse(looked_at, view, num_classes)
    runs = Runs(segments, open_run, parse)
    if not by_rule:
        _check_labelled(runs, looked_at, view, f"data.split={split!r} of {full_name}")

    def record_name(record):
        i = np.searchsorted(segments, record, side="right") - 1
        in_file = record - segments[i] + parts[i].skip
        file_name = pathlib.PurePath(parts[i].filename).name
        return f"{file_name} record {in_file} (record {record} of {full_name} {split})"

    names_feature = features.get("file_name")
    file_names = None
    if isinstance(names_feature, tfds.features.Text):
        file_names = _make_file_names(runs, names_feature)
    identity = (full_name, split, num_examples, class_names)
    some_records = _digest_records(runs, num_examples)
    if reader == "memory":
        read = _read_all(runs, num_examples, image_shape, broken_labels)
    else:

        def read(record_id):
            stored = open_run(record_id, tf.constant(1, tf.int64)).get_single_element()
            return parse(stored, record_id)

    return Source(
        name=name,
        split=split,
        num_examples=num_examples,
        num_classes=num_classes,
        class_names=class_names,
        image_shape=image_shape,
        fingerprints=(fingerprint(*identity), fingerprint(*identity, some_records)),
        read=read,
        record_name=record_name,
        encoded=reader != "memory" or image_shape is None,
        runs=None if reader == "memory" else runs,
        file_names=file_names,
    )


def _format(builder) -> str:
    return builder.info.file_format.value


def _choose_reader(reader, builder, parts, num_examples, image_shape) -> str:
    """The reader of READERS; raises InputError if it cannot be the one that is asked for."""
    by_format = {file_format: reader for reader, file_format in FORMATS.items()}
    if _format(builder) not in by_format:
        raise InputError(
            f"data.name: {builder.info.full_name} is stored as {_format(builder)}; needed: "
            f"{' or '.join(by_format)}; prepare it anew in one of them"
        )
    on_disk = by_format[_format(builder)]
    if reader == ON_DISK:
        reader = on_disk
    if reader not in (None, "memory", on_disk):
        raise InputError(
            f"data.reader={reader!r}: {builder.info.full_name} is stored as {_format(builder)}; "
            f"set data.reader to {on_disk} or memory, or leave it out"
        )
    encoded_bytes = 0
    for part in parts:
        path = epath.Path(part.filename)
        if not path.exists():
            raise InputError(f"data.data_dir: {path} is missing; copy it there or prepare it anew")
        encoded_bytes += path.stat().length * part.take / part.examples_in_shard
    pixel_bytes = num_examples * math.prod(image_shape) if image_shape else 0
    needed = 2 * (encoded_bytes + pixel_bytes)  # loading holds everything twice for a moment
    available = min(psutil.virtual_memory().available, _container_memory())
    if reader == "memory" and needed > available:
        raise InputError(
            f"data.reader='memory': {num_examples} examples need about {needed / 2**30:.1f} GiB "
            f"to load and this host has {available / 2**30:.1f} GiB free; leave data.reader out, "
            "or read a part (data.split='train[:10%]')"
        )
    small = encoded_bytes + pixel_bytes <= _SMALL_BYTES and needed <= available
    return reader or ("memory" if small else on_disk)


def _open_tfrecord(parts, segments: np.ndarray) -> Callable:
    """`Runs.open` of TFRecord files; raises InputError if one is damaged or of another length."""
    files = sorted({part.filename for part in parts})
    offsets_of = dict(zip(files, tfrecord.record_offsets(files), strict=True))
    for part in parts:
        found = len(offsets_of[part.filename]) - 1
        if found != part.examples_in_shard:
            raise InputError(
                f"data.data_dir: {part.filename} holds {found} records and dataset_info.json "
                f"says {part.examples_in_shard}; copy or prepare it anew"
            )
    ends = [offsets_of[part.filename][part.skip : part.skip + part.take + 1] for part in parts]
    boundaries = tf.constant(np.concatenate(ends))  # one more a part than it has records
    paths, firsts = tf.constant([part.filename for part in parts]), tf.constant(segments)

    def open_run(first, count):
        part = tf.searchsorted(firsts, first[None], side="right", out_type=tf.int64)[0] - 1
        begin, end = tf.unstack(tf.gather(boundaries, first + part + [0, count]))
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.gather(paths, part)[None],
            compression_type="",
            buffer_size=tf.maximum(end - begin, 1),  # so that the run is one read
            byte_offsets=begin[None],
        )
        spec = tf.TensorSpec([], tf.string)
        return tf.data.experimental.from_variant(variant, spec).take(count)

    return open_run


def _open_array_record(parts, segments: np.ndarray) -> Callable:
    """`Runs.open` of array_record files."""
    del segments  # the data source has a table of its own
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(list(parts))

    def read(first, count):
        return np.array(records.__getitems__(range(first, first + count)), dtype=object)

    def open_run(first, count):
        at_once = tf.data.Dataset.from_tensors((first, count)).map(
            lambda first, count: tf.ensure_shape(
                tf.numpy_function(read, [first, count], tf.string, stateful=False), [None]
            )
        )
        return at_once.unbatch()

    return open_run


def _make_parse(features: dict, view: View, num_classes: int) -> Callable:
    """`Runs.parse` of `features`; others are not looked at."""
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


def _make_file_names(runs: Runs, feature) -> Callable:
    """`Source.file_names` of the feature `file_name`."""
    features = tfds.features.FeaturesDict({"file_name": feature})

    def file_names(start, stop):
        ids = tf.data.Dataset.range(start, stop)
        stored = stored_records(runs, ids.batch(_RECORDS_AT_ONCE))
        found = tf.data.Dataset.zip(ids, stored).map(
            lambda i, s: (i, features.deserialize_example(s)["file_name"]), tf.data.AUTOTUNE
        )
        names = [""] * (stop - start)
        for record_ids, batch in found.ignore_errors().batch(_RECORDS_AT_ONCE).as_numpy_iterator():
            for record_id, name in zip(record_ids, batch, strict=True):
                names[record_id - start] = name.decode()
        return names

    return file_names


def _parse_example(features, stored):
    decoders = {"image": tfds.decode.SkipDecoding()}
    return features.deserialize_example(stored, decoders=decoders)


def _check_labelled(runs: Runs, features: dict, view: View, where: str) -> None:
    """Raises InputError if the first record has no label, as those of some test splits."""
    features = tfds.features.FeaturesDict(features)
    label = _read_now(runs, 0, lambda stored, _: view.label(_parse_example(features, stored)))
    if label is not None and label < 0:
        raise InputError(f"{where} holds unlabelled examples")


def _read_now(runs: Runs, record: int, parse: Callable) -> Any:
    """What `parse` gives of a stored record and its id; None where that fails."""
    record_id, one = tf.constant(record, tf.int64), tf.constant(1, tf.int64)
    try:
        return parse(runs.open(record_id, one).get_single_element(), record_id)
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


def _digest_records(runs: Runs, num_examples: int) -> list[str]:
    """Digests of the first, middle and last record, which change with the order of preparing."""

    def digest(stored, record_id):  # of pixels, as a PNG may be compressed otherwise next time
        example = runs.parse(stored, record_id)
        pixels = host_ops.to_pixels(example["image"]).numpy()
        identity = f"{example['label'].numpy()} {pixels.shape} ".encode()
        return hashlib.sha256(identity + pixels.tobytes()).hexdigest()

    records = (0, num_examples // 2, num_examples - 1)
    return [_read_now(runs, record, digest) or "broken" for record in records]


def _is_class_label(feature) -> bool:
    return isinstance(feature, tfds.features.ClassLabel)


def prepared_folder(
    name: str, data_dir: str | None, other_sources: Sequence[str] = ()
) -> epath.Path:
    """The folder of the data set's version: data_dir/name[/config]/version.

    Raises: InputError if it is not there, saying how to get it.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(f"data.name={name!r}; needed: a name such as 'cifar10', 'cifar10:3.0.2'")
    root = epath.Path(data_dir or tfds.core.constants.DATA_DIR)
    parent = root / match["name"] / (match["config"] or "")
    found = sorted(p.name for p in parent.iterdir() if p.is_dir()) if parent.exists() else []
    versions = [v for v in found if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    newest = max(versions, key=lambda v: [int(n) for n in v.split(".")], default="")
    folder = parent / (match["version"] or newest)
    if (folder / "dataset_info.json").exists() and (folder / "features.json").exists():
        return folder

    looked_for = folder / "features.json" if folder != parent else parent / "VERSION/features.json"
    there = f" (there: {', '.join(found)})" if found else ""
    raise InputError(
        f"data.name={name!r}: no prepared data set, {looked_for} or the dataset_info.json beside "
        f"it is missing{there}; {_how_to_get(match['name'], name, root, other_sources)}"
    )


def _how_to_get(catalogue_name: str, name: str, root: epath.Path, other_sources) -> str:
    catalogue = tfds.list_builders(with_community_datasets=False)
    if catalogue_name not in catalogue:
        known = [*other_sources, *catalogue]
        close = difflib.get_close_matches(catalogue_name, known, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
        meant += "write it as README's 'Data sets' says, or "
        return f"{meant}set data.data_dir to the folder that holds {catalogue_name}/"
    manual = tfds.builder_cls(catalogue_name).MANUAL_DOWNLOAD_INSTRUCTIONS
    steps = (
        'prepare it with: python -c "import tensorflow_datasets as tfds; '
        f'tfds.builder({name!r}, data_dir={str(root)!r}).download_and_prepare()"'
    )
    if manual:
        steps += f", once {root / 'downloads/manual'} holds what TFDS cannot download. "
        steps += f"TFDS says: {' '.join(manual.split())}"
    return f"{steps}; or set data.data_dir to the folder that holds {catalogue_name}/"


def _container_memory() -> float:
    """What a container (cgroup 2) still allows this process, in bytes; infinite outside of one."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # none, or "max"
        return math.inf


def _read_all(runs: Runs, num_examples: int, image_shape, broken_labels: str) -> Callable:
    """`Source.read` of a split that is read now; what is broken is masked, as any reader does."""
    ids = tf.data.Dataset.range(num_examples)
    stored = stored_records(runs, ids.batch(_RECORDS_AT_ONCE))

    def load(record_id, stored):
        example = runs.parse(stored, record_id)
        if image_shape is not None:
            pixels = tf.ensure_shape(host_ops.to_pixels(example["image"]), image_shape)
            example |= {"image": pixels}
        return record_id, example["image"], example["label"]

    loaded = tf.data.Dataset.zip(ids, stored).map(load, tf.data.AUTOTUNE).ignore_errors()
    if image_shape is None:
        images = np.full(num_examples, b"", object)
    else:
        images = np.zeros((num_examples, *image_shape), np.uint8)
    labels, mask = np.full(num_examples, -1, np.int32), np.zeros(num_examples, np.float32)
    for record_ids, image, label in loaded.batch(_RECORDS_AT_ONCE).as_numpy_iterator():
        images[record_ids], labels[record_ids], mask[record_ids] = image, label, 1
    broken = np.flatnonzero(mask == 0)
    if len(broken) and broken_labels == "read":
        ids = tf.data.Dataset.from_tensor_slices(broken).batch(_RECORDS_AT_ONCE)
        for record_id, label in stored_labels(runs, ids).as_numpy_iterator():
            labels[record_id] = label
    return read_tensors(images, labels, mask)
