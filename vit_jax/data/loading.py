"""Local batches: tf.data reads, preprocesses and batches records into NumPy arrays.

A record that cannot be read, decoded or cropped (an image smaller than a crop that does not pad)
keeps its place: its image is black, its mask is 0, and each process warns of it once. Evaluation
can refuse images that are too small instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax.data import host_ops as host_ops_lib
from vit_jax.data import order
from vit_jax.data.host_tf import tf
from vit_jax.data.ops import Op, check_crops
from vit_jax.data.record_files import stored_records
from vit_jax.data.sources import Source
from vit_jax.errors import InputError

_BATCHES_IN_FLIGHT = 2
_UNREADABLE = "not a readable image"
LEFT_OUT = "left out of loss and metrics"  # what happens to such a record in training
# {(fingerprint, name, ops): (result of `_find_small`, why)} for records that are masked.
_broken: dict[tuple[str, str, str], tuple[str | None, str]] = {}
# (fingerprint, name, the reason) of records with a warning.
_named: set[tuple[str, str, str]] = set()

Batch = dict[str, np.ndarray]


def local_batches(
    source: Source,
    host_ops: Sequence[Op],
    steps: range,
    arrange: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    num_rows: int,
    image_size: tuple[int, int],
    key: str,
    refuse_small: bool = False,
    consequence: str = LEFT_OUT,
) -> Iterator[Batch]:
    """The batches of `steps`, each with `num_rows` rows.

    arrange(step) returns record ids (b,), -1 for padding, and random keys (b, 2). `key` is the
    config key of the ops; `consequence` says what happens to a record that cannot be read.

    Raises: InputError, before the first batch, if the ops do not give image_size; with
      `refuse_small` also at the first image that is smaller than a crop.
    """
    _check_first_op(source, host_ops, key)
    check_crops(host_ops, key, source.image_shape and source.image_shape[:2])
    options = tf.data.Options()
    options.deterministic = True
    options.threading.max_intra_op_parallelism = 1

    def make(steps, *, careful):
        arranged = tf.data.Dataset.range(steps.start, steps.stop).map(arrange)
        if source.encoded:
            examples, shape = _load_encoded(source, host_ops, arranged, image_size, careful)
            batches = examples.batch(num_rows, drop_remainder=True)
        else:
            batches, shape = _load_pixels(source, host_ops, arranged)
        return batches.with_options(options).prefetch(_BATCHES_IN_FLIGHT), shape

    batches, shape = make(steps, careful=False)
    needed = (*image_size, source.channels)
    if tuple(shape) != needed:
        ops = "|".join(op.text for op in host_ops)
        raise InputError(
            f"{key}={ops!r} gives images of {tuple(shape)}; needed: {needed}, from "
            "data.image_size; end the host ops with an op that fixes the size, such as 'resize'"
        )

    iterator = batches.as_numpy_iterator()

    def read():
        # The careful pipeline costs a quarter more, so it takes over only at the batch with the
        # first broken record. A batch depends only on its step, so all others stay the same.
        num_read = 0
        try:
            for batch in iterator:
                yield batch
                num_read += 1
            return
        except (tf.errors.OpError, UnicodeDecodeError):  # the error may quote the record's bytes
            pass
        careful_batches, _ = make(steps[num_read:], careful=True)
        yield from careful_batches.as_numpy_iterator()

    return _name_broken(read(), source, host_ops, key if refuse_small else None, consequence)


def _check_first_op(source: Source, host_ops: Sequence[Op], key: str) -> None:
    """Raise InputError if encoded images of any size are not decoded first."""
    takes_encoded = bool(host_ops) and host_ops[0].takes_encoded
    if source.encoded and source.image_shape is None and not takes_encoded:
        first = repr(host_ops[0].text) if host_ops else "no host op"
        raise InputError(
            f"{key} begins with {first}, but the images of data.name={source.name!r} are "
            "encoded; put 'decode' or 'inception_crop' first"
        )


def _load_pixels(source, host_ops, arranged):
    """Batches, and the static shape of an image; whole batches cost half as much as examples."""

    def load(record_ids, keys):
        example = source.read(tf.maximum(record_ids, 0))
        image, mask = example["image"], example["mask"] * tf.cast(record_ids >= 0, tf.float32)
        if host_ops:
            image = tf.map_fn(
                lambda row: _preprocess(host_ops, *row), (image, keys), fn_output_signature=tf.uint8
            )
        image *= tf.cast(mask, tf.uint8)[:, None, None, None]
        label = example["label"]
        counted = tf.cast(mask, label.dtype)
        label *= counted[:, None] if source.has_label_vectors else counted
        record_ids = tf.cast(record_ids, tf.int32)
        return {"image": image, "label": label, "mask": mask, "id": record_ids}

    batches = arranged.map(load, tf.data.AUTOTUNE)
    return batches, batches.element_spec["image"].shape[1:]


def _load_encoded(source, host_ops, arranged, image_size, careful):
    """Examples, and the static shape of an image.

    With `careful`, an example with an error is masked; otherwise the error ends the data set.
    """
    rows = arranged.unbatch()
    if source.record_files is None:
        rows = rows.map(lambda record_id, key: (record_id, key, ""))
    else:
        stored = stored_records(
            source.record_files, arranged.map(lambda record_ids, keys: record_ids)
        )
        rows = tf.data.Dataset.zip(rows, stored).map(lambda row, stored: (*row, stored))

    shapes = []  # one from each trace of `load`, since tracing it takes long

    def load(record_id, key, stored):
        if source.record_files is None:
            example = source.read(record_id)
        else:
            example = source.record_files.parse(stored, record_id)
        image = _decode_early(source, example["image"])
        image = _preprocess(host_ops, image, key)
        shapes.append(image.shape)
        return {**example, "image": image, "id": tf.cast(record_id, tf.int32)}

    def masked(record_id):
        return {
            "image": tf.zeros((*image_size, source.channels), tf.uint8),
            "label": tf.zeros(source.num_classes) if source.has_label_vectors else tf.constant(0),
            "mask": tf.constant(0.0),
            "id": tf.cast(record_id, tf.int32),
        }

    def load_or_pad(record_id, key, stored):
        return tf.cond(
            record_id >= 0, lambda: load(record_id, key, stored), lambda: masked(record_id)
        )

    def load_or_mask(record_id, key, stored):
        # A data set of one example confines its error; ignoring errors in the whole data set would
        # shift the examples that follow.
        one = tf.data.Dataset.from_tensors((record_id, key, stored)).filter(lambda i, *_: i >= 0)
        padding = tf.data.Dataset.from_tensors(masked(record_id))
        either = one.map(load).ignore_errors().concatenate(padding)
        return either.take(1).get_single_element()

    examples = rows.map(load_or_mask if careful else load_or_pad, tf.data.AUTOTUNE)
    return examples, shapes[-1]


def _decode_early(source, image):
    """An encoded image before the first op: pixels, where all have one shape, or not 3 channels.

    Otherwise the first op decodes it, perhaps only a window of it.
    """
    if source.image_shape is None and source.channels == 3:
        return image
    pixels = host_ops_lib.to_pixels(image, source.channels)
    return pixels if source.image_shape is None else tf.ensure_shape(pixels, source.image_shape)


def _preprocess(host_ops, image, key):
    for i, op in enumerate(host_ops):
        image = op(image, order.fold_in(key, i))
    return image


def _name_broken(
    batches: Iterator[Batch],
    source: Source,
    host_ops: Sequence[Op],
    refuse_small: str | None,
    consequence: str,
) -> Iterator[Batch]:
    """Warn of each masked record, once per process, and pass the batches on.

    Raises: InputError naming the key `refuse_small`, if given, at an image smaller than a crop.
    """
    ops = "|".join(op.text for op in host_ops)
    for batch in batches:
        for record in batch["id"][(batch["mask"] == 0) & (batch["id"] >= 0)]:
            name = source.record_name(record)
            found = (source.fingerprint, name, ops)
            if found not in _broken:
                fault = source.why_unreadable(record)
                small = None if fault else _find_small(source, host_ops, record)
                _broken[found] = small, small or _describe(fault)
            small, why = _broken[found]
            if small is not None and refuse_small is not None:
                raise InputError(
                    f"{refuse_small}: {name}: {small}; resize images before the crop, remove the "
                    "small ones, or allow a black border with pad=True"
                )
            if (source.fingerprint, name, why) not in _named:
                _named.add((source.fingerprint, name, why))
                logging.getLogger("vit_jax").warning("%s: %s; %s", name, why, consequence)
        yield batch


def why_masked(source: Source, host_ops: Sequence[Op], record: int) -> str:
    """The reason why a record is masked, such as "not a readable image"."""
    fault = source.why_unreadable(record)
    return _describe(fault) if fault else _find_small(source, host_ops, record) or _UNREADABLE


def _describe(fault: str) -> str:
    """What is said of a record that cannot be read, with the reason `fault` unless it is ""."""
    return f"{_UNREADABLE} ({fault})" if fault else _UNREADABLE


def _find_small(source: Source, host_ops: Sequence[Op], record: int) -> str | None:
    """The sizes of a readable image and of the crop that exceeds it; reads the record again.

    None if the image cannot be read, or if no crop exceeds it.
    """
    try:
        image = _decode_early(source, source.read(tf.constant(record, tf.int64))["image"])
        for op in host_ops:
            needs = None if image.dtype == tf.string else op.needs
            if needs is not None and not op.takes(tuple(image.shape[:2])):
                return (
                    f"{image.shape[0]} x {image.shape[1]} pixels are too few for {op.text!r}, "
                    f"which takes {needs[0]} x {needs[1]}"
                )
            image = op(image, tf.zeros([2], tf.int64))
    except (tf.errors.OpError, UnicodeDecodeError):
        pass
    return None
