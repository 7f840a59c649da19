"""Local batches: tf.data reads, preprocesses and batches records into NumPy arrays.

A record that cannot be decoded or cropped (an image smaller than a crop that does not pad) keeps
its place: its image is black, its mask is 0, and each process warns of it once. Evaluation can
refuse images that are too small instead. A read that fails is tried again; see retries.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vit_jax.base.errors import InputError, ReadError
from vit_jax.data.batch import Crops, decode_early, make_all
from vit_jax.data.contract import Source
from vit_jax.data.elements import PARALLEL_CALLS, Elements, untuned
from vit_jax.data.host_tf import tf
from vit_jax.data.ops import HostOp, by
from vit_jax.data.records import stored_records
from vit_jax.data.retries import raise_failed, sure_reads

_BATCHES_IN_FLIGHT = 2
_FEW = 16  # records that are read in less time than a pipeline is made
_UNREADABLE = "not a readable image"
# {(fingerprint, name, ops): result of `why_masked`} for records that are masked.
_broken: dict[tuple[str, str, str], tuple[str | None, str]] = {}
# (fingerprint, name, the reason) of records with a warning.
_named: set[tuple[str, str, str]] = set()

Batch = dict[str, np.ndarray]


def local_batches(
    source: Source,
    crops: Mapping[str, Crops],
    steps: range,
    arrange: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    num_rows: int,
    refuse_small: str | None = None,
) -> Iterator[Batch]:
    """The batches of `steps`, each with `num_rows` rows.

    arrange(step) returns record ids (b,), -1 for padding, and random keys (b, 2).

    Raises: InputError, before the first batch, if the ops do not give the sizes of `crops`; also at
      the first image that is smaller than a crop if `refuse_small` is the config key to name.
    """
    for crop in crops.values():
        crop.check(source)

    # All functions use TensorFlow's control flow. AutoGraph would convert each of them, which took
    # a fifth of a short run's CPU time.
    @tf.autograph.experimental.do_not_convert
    def make(steps: range, *, careful: bool) -> tuple[tf.data.Dataset, dict[str, tf.TensorShape]]:
        arranged = tf.data.Dataset.range(steps.start, steps.stop).map(arrange)
        if source.encoded:
            examples, shapes = _load_encoded(source, crops, arranged, careful)
            batches = examples.batch(num_rows, drop_remainder=True)
        else:
            batches, shapes = _load_pixels(source, crops, arranged)
        return batches.prefetch(_BATCHES_IN_FLIGHT), shapes

    all_ops = [ops for crop in crops.values() for ops in crop.distinct_ops]
    if len(steps) == 1 and num_rows <= _FEW and source.encoded and source.record_files is None:
        few = _load_few(source, crops, *arrange(tf.constant(steps[0], tf.int64)))
        return _name_broken(iter([few]), source, all_ops, refuse_small)
    batches, shapes = make(steps, careful=False)
    for name, crop in crops.items():
        crop.check_made(shapes[name], source.channels)
    elements = Elements(batches)

    def read() -> Iterator[Batch]:
        # The careful pipeline costs a quarter more, so it takes over only at the batch with the
        # first broken record. A batch depends only on its step, so all others stay the same.
        for num_read in range(len(steps)):
            try:
                batch = next(elements)
            except (tf.errors.OpError, UnicodeDecodeError):  # which may quote the record's bytes
                careful_batches, _ = make(steps[num_read:], careful=True)
                yield from Elements(careful_batches)
                return
            yield batch

    return _name_broken(read(), source, all_ops, refuse_small)


def _load_few(
    source: Source, crops: Mapping[str, Crops], record_ids: tf.Tensor, keys: tf.Tensor
) -> Batch:
    """The batch of these records, read one after another without a pipeline."""
    rows = []
    for record_id, key in zip(record_ids, keys, strict=True):
        row = _masked(source, crops, record_id)
        if record_id >= 0 and (found := _load_one(source, crops, record_id, key)) is not None:
            for name, crop in crops.items():
                crop.check_made(found[name].shape, source.channels)
            row |= found
        rows.append(row)
    return {name: np.stack([row[name].numpy() for row in rows]) for name in rows[0]}


def _load_one(
    source: Source, crops: Mapping[str, Crops], record_id: tf.Tensor, key: tf.Tensor
) -> dict[str, tf.Tensor] | None:
    """The example of a record; None if it is wrong, which is an error of any type here."""
    try:
        with sure_reads():
            example = source.read(record_id)
        return example | make_all(crops, source, example.pop("image"), key)
    except ReadError:
        raise
    except Exception:
        return None
    finally:
        raise_failed()


def _masked(
    source: Source, crops: Mapping[str, Crops], record_id: tf.Tensor
) -> dict[str, tf.Tensor]:
    """A row without a readable record."""
    images = {name: tf.zeros(crop.shape(source.channels), tf.uint8) for name, crop in crops.items()}
    if any(crop.rule is not None for crop in crops.values()):
        images["grid"] = tf.ones([2], tf.int32)
    label = tf.zeros(source.num_classes) if source.has_label_vectors else tf.constant(0)
    return {
        **images,
        "label": label,
        "mask": tf.constant(0.0),
        "id": tf.cast(record_id, tf.int32),
    }


def _load_pixels(
    source: Source, crops: Mapping[str, Crops], arranged: tf.data.Dataset
) -> tuple[tf.data.Dataset, dict[str, tf.TensorShape]]:
    """Batches, and {key: static shape of the images of a record}.

    Whole batches cost half as much as examples.
    """

    def make(images: tf.Tensor, keys: tf.Tensor) -> dict[str, tf.Tensor]:
        if not crops:
            return {}
        cuts = any(crop.rule is not None for crop in crops.values())
        if [*crops] == ["image"] and not any(crops["image"].host_ops) and not cuts:
            return {"image": images}
        types = dict.fromkeys(crops, tf.uint8) | ({"grid": tf.int32} if cuts else {})
        return tf.map_fn(
            lambda row: make_all(crops, source, *row), (images, keys), fn_output_signature=types
        )

    def load(record_ids: tf.Tensor, keys: tf.Tensor) -> dict[str, tf.Tensor]:
        example = source.read(tf.maximum(record_ids, 0))
        mask = example["mask"] * tf.cast(record_ids >= 0, tf.float32)
        made = make(example["image"], keys)
        for name in crops:
            shown = tf.reshape(tf.cast(mask, tf.uint8), [-1] + [1] * (made[name].shape.rank - 1))
            made[name] *= shown
        label = example["label"]
        counted = tf.cast(mask, label.dtype)
        label *= counted[:, None] if source.has_label_vectors else counted
        record_ids = tf.cast(record_ids, tf.int32)
        return {**made, "label": label, "mask": mask, "id": record_ids}

    batches = arranged.map(load, PARALLEL_CALLS)
    return batches, {name: batches.element_spec[name].shape[1:] for name in crops}


def _load_encoded(
    source: Source, crops: Mapping[str, Crops], arranged: tf.data.Dataset, careful: bool
) -> tuple[tf.data.Dataset, dict[str, tf.TensorShape]]:
    """Examples, and {key: static shape of the images of a record}.

    With `careful`, failed reads are tried again, and an example with an error is masked; otherwise
    the error ends the data set.
    """
    rows, files = arranged.unbatch(), source.record_files
    if files is None:
        rows = rows.map(lambda record_id, key: (record_id, key, ""))
    else:
        stored = stored_records(files, arranged.map(lambda record_ids, keys: record_ids))
        rows = tf.data.Dataset.zip(rows, stored).map(lambda row, stored: (*row, stored))

    shapes = []  # one from each trace of `load`, since tracing it takes long

    def load(record_id: tf.Tensor, key: tf.Tensor, stored: tf.Tensor) -> dict[str, tf.Tensor]:
        with sure_reads() if careful else contextlib.nullcontext():
            example = files.parse(stored, record_id) if files else source.read(record_id)
        made = make_all(crops, source, example.pop("image"), key)
        shapes.append({name: images.shape for name, images in made.items()})
        return {**example, **made, "id": tf.cast(record_id, tf.int32)}

    masked = functools.partial(_masked, source, crops)

    def load_or_pad(
        record_id: tf.Tensor, key: tf.Tensor, stored: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        return tf.cond(
            record_id >= 0, lambda: load(record_id, key, stored), lambda: masked(record_id)
        )

    def load_or_mask(
        record_id: tf.Tensor, key: tf.Tensor, stored: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        # A data set of one example confines its error; ignoring errors in the whole data set would
        # shift the examples that follow.
        one = tf.data.Dataset.from_tensors((record_id, key, stored)).filter(lambda i, *_: i >= 0)
        padding = tf.data.Dataset.from_tensors(masked(record_id))
        either = one.map(load).ignore_errors().concatenate(padding)
        return untuned(either.take(1)).get_single_element()

    examples = rows.map(load_or_mask if careful else load_or_pad, PARALLEL_CALLS)
    return examples, shapes[-1]


def _name_broken(
    batches: Iterator[Batch],
    source: Source,
    all_ops: Sequence[Sequence[HostOp]],
    refuse_small: str | None,
) -> Iterator[Batch]:
    """Warn of each masked record, once per process, and pass the batches on.

    Raises: InputError naming the key `refuse_small`, if given, at an image smaller than a crop.
    """
    ops = ";".join("|".join(op.text for op in ops) for ops in all_ops)
    for batch in batches:
        for record in batch["id"][(batch["mask"] == 0) & (batch["id"] >= 0)]:
            name = source.record_name(record)
            found = (source.fingerprint, name, ops)
            if found not in _broken:
                _broken[found] = why_masked(source, all_ops, record)
            small, why = _broken[found]
            if small is not None and refuse_small is not None:
                raise InputError(
                    f"{refuse_small}: {name}: {small}; resize images before the crop, or allow a "
                    "black border with pad=True"
                )
            if (source.fingerprint, name, why) not in _named:
                _named.add((source.fingerprint, name, why))
                logging.getLogger("vit_jax").warning("%s: %s; left out", name, why)
        yield batch


def why_masked(
    source: Source, all_ops: Sequence[Sequence[HostOp]], record: int
) -> tuple[str | None, str]:
    """(which crop is too large, if that is why; the reason why a record is masked)."""
    if fault := source.why_unreadable(record):
        return None, f"{_UNREADABLE} ({fault})"
    found = (_find_small(source, ops, record) for ops in all_ops)
    small = next(filter(None, found), None)
    return small, small or _UNREADABLE


def _find_small(source: Source, host_ops: Sequence[HostOp], record: int) -> str | None:
    """The sizes of a readable image and of the crop that exceeds it; reads the record again.

    None if the image cannot be read, or if no crop exceeds it.
    """
    try:
        image = decode_early(source, source.read(tf.constant(record, tf.int64))["image"])
        for op in host_ops:
            size = None if image.dtype == tf.string else tuple(image.shape[:2])
            if not op.takes(size):
                return f"{by(size)} pixels are too few for {op.text!r}, which takes {by(op.needs)}"
            image = op(image, tf.zeros([2], tf.int64))
    except (tf.errors.OpError, UnicodeDecodeError):
        pass
    return None
