"""The first check of the section `data` of a config, before any file is touched."""

from ml_collections import ConfigDict

from vit_jax.data.device_ops import MIXING_OPS
from vit_jax.data.mixture import parse_mix
from vit_jax.data.ops import parse_ops
from vit_jax.data.order import check_order
from vit_jax.data.subset import check_classes, check_subset
from vit_jax.data.tfds_readers import check_reader
from vit_jax.data.views import check_views
from vit_jax.errors import Faults

_NUMBERS = {3: "three"}
_OF_COLOURS = ("randaugment", "autoaugment", "color_jitter", "greyscale")
_ANY_SIZE = (1, 1)  # affects only the default sizes of ops, which are not checked here


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check everything that needs no data; crops are checked once the data are known."""
    d = config.data
    for key in ("num_classes", "num_examples"):
        faults.need_positive(f"data.{key}", d[key])
    ops = faults.check(parse_ops, d.ops, _ANY_SIZE, key="data.ops")
    check_views(config, faults)
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
    faults.check(check_classes, d.classes)
    faults.check(check_subset, d.subset)
    faults.need(
        not (d.soft_labels and d.multi_label),
        "data.soft_labels=True: needs classes that exclude each other, and data.multi_label=True "
        "says that they do not; set one of them to false",
    )
    mixed = faults.check(parse_mix, d.mix)
    if d.name == "synthetic":
        faults.need(
            d.classes is None,
            f"data.classes={d.classes}: synthetic data take data.num_classes instead; leave it out",
        )
        faults.need(
            d.subset is None,
            f"data.subset={d.subset!r}: synthetic data take data.num_examples instead; leave it "
            "out",
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
        numbers = len(d[key]) > 0 and all(isinstance(v, int | float) for v in d[key])
        alike = len(d[key]) == 3 and len({*d[key]}) == 1  # as the defaults are
        fits = numbers and (len(d[key]) == d.channels or alike)
        faults.need(
            fits,
            f"data.{key}={d[key]}: needs {_NUMBERS.get(d.channels, d.channels)} numbers, one per "
            "channel, for pixels in [0, 1]",
        )
        positive = key == "mean" or not numbers or all(v > 0 for v in d.std)
        faults.need(positive, f"data.std={d.std}: needs numbers above 0")
    faults.need_positive("data.channels", d.channels)
    for key in ("ops", "global_ops", "local_ops"):
        for name in _OF_COLOURS:
            faults.need(
                d.channels == 3 or name not in d[key],
                f"data.channels={d.channels}: {name} needs three channels; leave it out of "
                f"data.{key}",
            )


def check_eval_ops(config: ConfigDict, faults: Faults) -> None:
    """Check that the ops of every evaluator run on the host."""
    for name, entry in config.evals.items():
        key = f"evals.{name}.ops"
        ops = faults.check(parse_ops, entry.ops, _ANY_SIZE, key=key)
        names = ", ".join(op.text for op in ops[1]) if ops else ""
        faults.need(not names, f"{key}={entry.ops!r}: {names} works only in training; leave it out")
