"""Local batches: records are read, preprocessed and batched by tf.data, into NumPy.

A record that cannot be read, decoded or cropped (an image smaller than a crop that does not pad)
never moves another: it is black, masked, and named in a warning, once a process. Evaluation can
refuse an image that is too small instead.
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
_UNREADABLE = "cannot be read or decoded"
# {(fingerprint, name, ops): `_find_small`} of the records warned of.
_named_broken: dict[tuple[str, str, str], str | None] = {}

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
) -> Iterator[Batch]:
    """The batches of `steps`, `num_rows` rows each.

    arrange(step) gives record ids (b,), -1 for padding, and keys (b, 2). `key` is where the config
    has the ops.

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
    if tuple(shape) != (*image_size, 3):
        ops = "|".join(op.text for op in host_ops)
        raise InputError(
            f"{key}={ops!r} gives images of {tuple(shape)}; needed: {(*image_size, 3)}, from "
            "data.image_size; end the host ops with one that fixes the size, such as 'resize'"
        )

    iterator = batches.as_numpy_iterator()

    def read():
        # Care costs a quarter more: it is taken from the batch on that holds the first broken
        # record. What stands in a batch depends on its step alone, so nothing else changes.
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

    return _name_broken(read(), source, host_ops, key if refuse_small else None)


def _check_first_op(source: Source, host_ops: Sequence[Op], key: str) -> None:
    """Raises InputError if encoded images of any size are not decoded first."""
    takes_encoded = bool(host_ops) and host_ops[0].takes_encoded
    if source.encoded and source.image_shape is None and not takes_encoded:
        first = repr(host_ops[0].text) if host_ops else "no host op"
        raise InputError(
            f"{key} begins with {first}, and the images of data.name={source.name!r} are "
            "encoded; put 'decode' or 'inception_crop' first"
        )


def _load_pixels(source, host_ops, arranged):
    """Batches, and their images' static shape. By the batch costs half as much as one by one."""

    def load(record_ids, keys):
        example = source.read(tf.maximum(record_ids, 0))
        image, mask = example["image"], example["mask"] * tf.cast(record_ids >= 0, tf.float32)
        if host_ops:
            image = tf.map_fn(
                lambda row: _preprocess(host_ops, *row), (image, keys), fn_output_signature=tf.uint8
            )
        image *= tf.cast(mask, tf.uint8)[:, None, None, None]
        label = example["label"] * tf.cast(mask, tf.int32)
        record_ids = tf.cast(record_ids, tf.int32)
        return {"image": image, "label": label, "mask": mask, "id": record_ids}

    batches = arranged.map(load, tf.data.AUTOTUNE)
    return batches, batches.element_spec["image"].shape[1:]


def _load_encoded(source, host_ops, arranged, image_size, careful):
    """Examples, and their images' static shape.

    If `careful`, an error in one becomes its mask; otherwise it ends them all.
    """
    rows = arranged.unbatch()
    if source.record_files is None:
        rows = rows.map(lambda record_id, key: (record_id, key, ""))
    else:
        stored = stored_records(
            source.record_files, arranged.map(lambda record_ids, keys: record_ids)
        )
        rows = tf.data.Dataset.zip(rows, stored).map(lambda row, stored: (*row, stored))

    def load(record_id, key, stored):
        if source.record_files is None:
            example = source.read(record_id)
        else:
            example = source.record_files.parse(stored, record_id)
        image = example["image"]
        if source.image_shape is not None:  # as a source of pixels has it
            image = tf.ensure_shape(host_ops_lib.to_pixels(image), source.image_shape)
        image = _preprocess(host_ops, image, key)
        return {**example, "image": image, "id": tf.cast(record_id, tf.int32)}

    def masked(record_id):
        return {
            "image": tf.zeros((*image_size, 3), tf.uint8),
            "label": tf.constant(0),
            "mask": tf.constant(0.0),
            "id": tf.cast(record_id, tf.int32),
        }

    def load_or_pad(record_id, key, stored):
        return tf.cond(
            record_id >= 0, lambda: load(record_id, key, stored), lambda: masked(record_id)
        )

    def load_or_mask(record_id, key, stored):
        # A data set of one example confines its error; ignore_errors on all would move the rest.
        one = tf.data.Dataset.from_tensors((record_id, key, stored)).filter(lambda i, *_: i >= 0)
        padding = tf.data.Dataset.from_tensors(masked(record_id))
        either = one.map(load).ignore_errors().concatenate(padding)
        return either.take(1).get_single_element()

    shape = rows.map(load).element_spec["image"].shape
    return rows.map(load_or_mask if careful else load_or_pad, tf.data.AUTOTUNE), shape


def _preprocess(host_ops, image, key):
    for i, op in enumerate(host_ops):
        image = op(image, order.fold_in(key, i))
    return image


def _name_broken(
    batches: Iterator[Batch], source: Source, host_ops: Sequence[Op], refuse_small: str | None
) -> Iterator[Batch]:
    """Warns of each record that is masked, once a process.

    Raises: InputError naming the key `refuse_small`, if given, at an image smaller than a crop.
    """
    ops = "|".join(op.text for op in host_ops)
    for batch in batches:
        for record in batch["id"][(batch["mask"] == 0) & (batch["id"] >= 0)]:
            name = source.record_name(record)
            found = (source.fingerprint, name, ops)
            new = found not in _named_broken
            small = _find_small(source, host_ops, record) if new else _named_broken[found]
            if small is not None and refuse_small is not None:
                raise InputError(
                    f"{refuse_small}: {name} {small}; resize images before they are cropped, "
                    "leave the small ones out, or ask for a black border by pad=True"
                )
            if new:
                _named_broken[found] = small
                why = small or _UNREADABLE
                logging.getLogger("vit_jax").warning("%s %s; it is masked", name, why)
        yield batch


def why_masked(source: Source, host_ops: Sequence[Op], record: int) -> str:
    """Why a record is masked: the end of a sentence, such as "cannot be read or decoded"."""
    return _find_small(source, host_ops, record) or _UNREADABLE


def _find_small(source: Source, host_ops: Sequence[Op], record: int) -> str | None:
    """The sizes of a readable image and of the crop that it is too small for, from a second read.

    None: it cannot be read, or fits every crop.
    """
    try:
        image = source.read(tf.constant(record, tf.int64))["image"]
        if source.image_shape is not None:
            image = host_ops_lib.to_pixels(image)
        for op in host_ops:
            needs = None if image.dtype == tf.string else op.needs
            if needs is not None and not op.takes(tuple(image.shape[:2])):
                return (
                    f"has {image.shape[0]} x {image.shape[1]} pixels, and {op.text!r} takes "
                    f"{needs[0]} x {needs[1]}"
                )
            image = op(image, tf.zeros([2], tf.int64))
    except (tf.errors.OpError, UnicodeDecodeError):
        pass
    return None
