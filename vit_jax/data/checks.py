"""The first check of the section `data` of a config, before any file is touched."""

from ml_collections import ConfigDict

from vit_jax.data.device_ops import MIXING_OPS
from vit_jax.data.image_folder import check_holdout
from vit_jax.data.mixture import parse_mix
from vit_jax.data.ops import parse_ops
from vit_jax.data.order import check_order
from vit_jax.data.prepared_tfds import BROKEN_LABELS
from vit_jax.data.subset import check_classes
from vit_jax.data.tfds_readers import check_reader
from vit_jax.errors import Faults

_ANY_SIZE = (1, 1)  # only the sizes that ops leave out depend on it


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks everything that can be known without the data; crops are checked with them."""
    d = config.data
    for key in ("num_classes", "num_examples"):
        faults.need_positive(f"data.{key}", d[key])
    ops = faults.check(parse_ops, d.ops, _ANY_SIZE, key="data.ops")
    mixes = ops is not None and any(op.name in MIXING_OPS for op in ops[1])
    faults.check(
        check_order,
        d.order,
        chunk_size=d.chunk_size,
        streams=d.streams,
        repeats=d.repeats,
        global_batch_size=config.global_batch_size,
        mixes=mixes,
    )
    faults.check(check_reader, d.reader)
    faults.check(check_holdout, d.holdout)
    faults.need_known("data.broken_labels", d.broken_labels, BROKEN_LABELS)
    faults.check(check_classes, d.classes)
    mixed = faults.check(parse_mix, d.mix)
    if d.name == "synthetic":
        faults.need(
            d.classes is None, f"data.classes={d.classes}: synthetic data have data.num_classes"
        )
        faults.need(not mixed, f"data.mix={d.mix!r}: synthetic data cannot be mixed with others")
    _check_pixels(config, faults)


def _check_pixels(config: ConfigDict, faults: Faults) -> None:
    d = config.data
    faults.need(
        0 <= d.max_corrupt_fraction <= 1,
        f"data.max_corrupt_fraction={d.max_corrupt_fraction}: needs a number from 0 to 1",
    )
    for key in ("mean", "std"):
        three = len(d[key]) == 3 and all(isinstance(v, int | float) for v in d[key])
        faults.need(
            three, f"data.{key}={d[key]}: needs three numbers, one a channel, of pixels in [0, 1]"
        )
    faults.need(all(d.std), f"data.std={d.std}: needs numbers other than 0")


def check_eval_ops(config: ConfigDict, faults: Faults) -> None:
    """Checks that the ops of every evaluator run on the host."""
    for name, entry in config.evals.items():
        key = f"evals.{name}.ops"
        ops = faults.check(parse_ops, entry.ops, _ANY_SIZE, key=key)
        names = ", ".join(op.text for op in ops[1]) if ops else ""
        faults.need(not names, f"{key}={entry.ops!r}: {names} is for training; leave it out here")
