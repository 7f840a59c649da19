"""From a source to global batches on the devices.

    positions -> record ids and keys -> read -> host ops -> local batches -> global jax.Arrays
    (order.py)     (record_files.py, a Source)  (tf.data)    (NumPy)

A batch is a dict with leaves, B being the global batch and b this process's rows of it:

    image  uint8 (B, H, W, 3)
    label  int32 (B,)     without meaning where mask is 0
    mask   float32 (B,)   0 for padding in evaluation, and for records that are corrupt
    id     int32 (B,)     the record's index in its split; -1 for padding

A record that cannot be read, decoded or cropped (an image smaller than a crop that does not pad)
never moves another: it is black, masked, and named in a warning, once a process.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from vit_jax.data import host_ops as host_ops_lib
from vit_jax.data import order
from vit_jax.data.host_tf import tf
from vit_jax.data.ops import Op, check_crops
from vit_jax.data.record_files import stored_labels, stored_records
from vit_jax.data.sources import Source
from vit_jax.errors import InputError

_BATCHES_IN_FLIGHT = 2
_LABELS_AT_ONCE = 4096
_named_broken: set[tuple[str, str]] = set()  # (fingerprint, name) of the records warned of

Batch = dict[str, np.ndarray]


def train_batches(
    source: Source,
    host_ops: Sequence[Op],
    *,
    global_batch_size: int,
    seed: int,
    image_size: tuple[int, int],
    sharding: jax.sharding.Sharding,
    start_step: int,
    num_steps: int,
    data_order: order.Order | None = None,
) -> Iterator[dict[str, jax.Array]]:
    """Global batches of steps start_step, ..., start_step + num_steps - 1; see `host_batches`.

    `sharding` is that of every leaf: its first dimension over the mesh's batch axes.
    """
    batches = host_batches(
        source,
        host_ops,
        global_batch_size=global_batch_size,
        seed=seed,
        image_size=image_size,
        rows=order.local_rows(sharding, global_batch_size),
        start_step=start_step,
        num_steps=num_steps,
        data_order=data_order,
    )
    return _put_ahead(batches, num_steps, sharding, global_batch_size)


def eval_batches(
    source: Source,
    host_ops: Sequence[Op],
    *,
    global_batch_size: int,
    image_size: tuple[int, int],
    sharding: jax.sharding.Sharding,
    record_ids: np.ndarray | None = None,
) -> Iterator[dict[str, jax.Array]]:
    """Global batches of one pass over the split; see `host_eval_batches`."""
    batches = host_eval_batches(
        source,
        host_ops,
        global_batch_size=global_batch_size,
        image_size=image_size,
        rows=order.local_rows(sharding, global_batch_size),
        record_ids=record_ids,
    )
    num_records = source.num_examples if record_ids is None else len(record_ids)
    num_steps = math.ceil(num_records / global_batch_size)
    return _put_ahead(batches, num_steps, sharding, global_batch_size)


def read_labels(source: Source, start: int, stop: int) -> np.ndarray:
    """The labels of the records from `start` to before `stop`: int32 (stop - start,).

    Images are not decoded, nor read where the source keeps its labels apart, as a folder does. A
    record whose label cannot be read has the label -1.
    """

    def label_of(record_ids):  # in the map that reads, so that the rest of it is pruned
        return record_ids, source.read(record_ids)["label"]

    ids = tf.data.Dataset.range(start, stop)
    by_batch = ids.batch(_LABELS_AT_ONCE)
    if not source.encoded:
        found = by_batch.map(label_of).unbatch()
    elif source.record_files is None:
        found = ids.map(label_of, tf.data.AUTOTUNE).ignore_errors()
    else:
        found = stored_labels(source.record_files, by_batch)
    labels = np.full(stop - start, -1, np.int32)
    for record_ids, label in found.batch(_LABELS_AT_ONCE).as_numpy_iterator():
        labels[record_ids - start] = label
    return labels


def host_batches(
    source: Source,
    host_ops: Sequence[Op],
    *,
    global_batch_size: int,
    seed: int,
    image_size: tuple[int, int],
    rows: np.ndarray,
    start_step: int,
    num_steps: int,
    data_order: order.Order | None = None,
) -> Iterator[Batch]:
    """The rows `rows` of each training batch, in NumPy.

    What stands in a row depends on (seed, step, row) only: not on `rows`, nor on `start_step`,
    whose batch comes as quickly as the first. `data_order` None is `record`.

    Raises: InputError, before the first batch, if the ops do not give image_size.
    """
    local_rows = tf.constant(rows, tf.int64)
    data_order = data_order or order.record_order(source.num_examples, seed)

    def arrange(step):
        positions = step * global_batch_size + local_rows
        return data_order(positions), order.keys(positions, seed)

    steps = range(start_step, start_step + num_steps)
    return _batches(source, host_ops, steps, arrange, len(rows), image_size, "data.ops")


def host_eval_batches(
    source: Source,
    host_ops: Sequence[Op],
    *,
    global_batch_size: int,
    image_size: tuple[int, int],
    rows: np.ndarray,
    record_ids: np.ndarray | None = None,
    key: str = "evals.*.ops",
) -> Iterator[Batch]:
    """The rows `rows` of each batch of one pass over the split, in its order, in NumPy.

    `record_ids`, int64 (n,), are the records to read, in their order, if not all are.

    Every example comes once over all rows; the last batch is filled up with padding, so the
    number of batches is the same on every process.

    Raises: InputError, before the first batch, if the ops do not give image_size.
    """
    local_rows = tf.constant(rows, tf.int64)
    num_records = source.num_examples if record_ids is None else len(record_ids)
    chosen = None if record_ids is None else tf.constant(record_ids, tf.int64)

    def arrange(step):
        positions = step * global_batch_size + local_rows
        found = positions
        if chosen is not None:
            found = tf.gather(chosen, positions % num_records)
        return tf.where(positions < num_records, found, -1), order.keys(positions, seed=0)

    steps = range(math.ceil(num_records / global_batch_size))
    return _batches(source, host_ops, steps, arrange, len(rows), image_size, key)


def to_global(
    batch: Batch, sharding: jax.sharding.Sharding, global_batch_size: int
) -> dict[str, jax.Array]:
    """This process's rows, as `order.local_rows` lists them, to global arrays.

    Args:
      batch: leaves (b, ...).
      sharding: of each leaf.
      global_batch_size: B, the first dimension of each global leaf.
    """
    rows = order.local_rows(sharding, global_batch_size)

    def put(leaf):
        def shard(index):
            first, stop, _ = index[0].indices(global_batch_size)
            return leaf[slice(*np.searchsorted(rows, [first, stop]))]

        shape = (global_batch_size, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, sharding, shard)

    return jax.tree.map(put, batch)


def _batches(source, host_ops, steps, arrange, num_rows, image_size, key) -> Iterator[Batch]:
    """Batches of what arrange(step) says: record ids (b,), -1 for padding, and keys (b, 2).

    `key` is where the config has the ops, for errors.
    """
    takes_encoded = bool(host_ops) and host_ops[0].takes_encoded
    if source.encoded and source.image_shape is None and not takes_encoded:
        first = repr(host_ops[0].text) if host_ops else "no host op"
        raise InputError(
            f"{key} begins with {first}, and the images of data.name={source.name!r} are "
            "encoded; put 'decode' or 'inception_crop' first"
        )
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

    return _name_broken(read(), source, host_ops)


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
        ids = arranged.map(lambda record_ids, keys: record_ids)
        stored = stored_records(source.record_files, ids)
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


def _name_broken(batches: Iterator[Batch], source: Source, host_ops) -> Iterator[Batch]:
    """Warns of each record that is masked, once a process."""
    for batch in batches:
        for record in batch["id"][(batch["mask"] == 0) & (batch["id"] >= 0)]:
            name = source.record_name(record)
            if (source.fingerprint, name) not in _named_broken:
                _named_broken.add((source.fingerprint, name))
                why = _why_masked(source, host_ops, record)
                logging.getLogger("vit_jax").warning("%s %s; it is masked", name, why)
        yield batch


def _why_masked(source: Source, host_ops: Sequence[Op], record: int) -> str:
    """Why a record is masked, found by reading it once more."""
    try:
        image = source.read(tf.constant(record, tf.int64))["image"]
        if source.image_shape is not None:
            image = host_ops_lib.to_pixels(image)
        for op in host_ops:
            if image.dtype != tf.string and not op.takes(tuple(image.shape[:2])):
                return (
                    f"has {image.shape[0]} x {image.shape[1]} pixels, and {op.text!r} takes "
                    f"{op.needs[0]} x {op.needs[1]}"
                )
            image = op(image, tf.zeros([2], tf.int64))
    except (tf.errors.OpError, UnicodeDecodeError):
        pass
    return "cannot be read or decoded"


def _put_ahead(batches: Iterator[Batch], num_steps: int, sharding, global_batch_size):
    """`num_steps` global batches, some on their way to the devices while one is used.

    It never looks for a batch behind the last: there tf.data's threads would be waited for, while
    steps are still to be made.
    """
    arrays = (to_global(batch, sharding, global_batch_size) for batch in batches)
    ahead = collections.deque(itertools.islice(arrays, min(_BATCHES_IN_FLIGHT, num_steps)))
    for step in range(num_steps):
        yield ahead.popleft()
        if step + len(ahead) + 1 < num_steps:
            ahead.append(next(arrays))
