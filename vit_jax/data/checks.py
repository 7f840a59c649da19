"""The first check of the section `data` of a config, before any file is touched."""

from collections.abc import Mapping, Sequence

from vit_jax.base.errors import Faults
from vit_jax.config import SOURCES, Evaluator
from vit_jax.config.sections import Data
from vit_jax.data.id_files import SUFFIX
from vit_jax.data.mixture import mixed_keys
from vit_jax.data.ops import DeviceOp, HostOp, parse_ops
from vit_jax.data.order import check_order
from vit_jax.data.preprocessing import parse_view_ops
from vit_jax.data.subset import check_classes, subset_size

_ANY_SIZE = (1, 1)  # affects only the default sizes of ops, which are not checked here


def check_data(data: Data, global_batch_size: int, faults: Faults) -> None:
    """Check everything that needs no data; crops are checked once the data are known."""
    d = data
    ops = faults.check(parse_ops, d.ops, _ANY_SIZE, key="data.ops")
    of_views = {
        key: faults.check(parse_view_ops, strings, _ANY_SIZE, number, key) or []
        for key, strings, number in (
            ("data.global_ops", d.global_ops, d.num_global),
            ("data.local_ops", d.local_ops, d.num_local),
        )
        if number
    }
    faults.need(
        d.text_length is None or not any(op.mixes for op in (ops or ((), ()))[1]),
        f"data.text_length={d.text_length}: data.ops mixes images, and captions cannot be mixed; "
        "leave one of the two out",
    )
    if d.keep_features:
        drawn = [op.text for kind in ops or () for op in kind if op.draws]
        faults.need(
            not drawn,
            f"data.keep_features=True: {', '.join(drawn)} in data.ops may change an image from "
            "step to step; leave it out",
        )
    parsed = {"data.ops": [ops] if ops else []} | of_views
    for key, views in parsed.items():
        found = {op.name for view in views for kind in view for op in kind if op.of_colours}
        faults.need(
            d.channels == 3 or not found,
            f"data.channels={d.channels}: {', '.join(found)} in {key} needs three channels",
        )
    faults.check(
        check_order,
        d.order,
        streams=d.streams,
        repeats=d.repeats,
        global_batch_size=global_batch_size,
        mixes=ops is not None and any(op.mixes for op in ops[1]),
    )
    if d.max_tokens is not None:
        _check_pictures(d, ops or ((), ()), faults)
    if d.pack is not None:
        _check_rows(d, d.pack, faults)
    _check_records(d, faults)


def _check_records(d: Data, faults: Faults) -> None:
    """Check which records are read, and their labels."""
    faults.check(check_classes, d.classes)
    if d.subset is not None:
        faults.check(subset_size, d.subset, None, "")
        faults.need(
            not (d.subset_balanced and d.subset.endswith(SUFFIX)),
            f"data.subset_balanced=True: data.subset={d.subset!r} names its records; leave out one",
        )
        faults.need(
            not (d.exclude is not None and d.subset.endswith(SUFFIX)),
            f"data.exclude={d.exclude!r}: data.subset={d.subset!r} names records of the whole "
            "split; leave out one, or write the set without the excluded by `vit_jax prepare`",
        )
    faults.check(mixed_keys, d)
    if SOURCES.find(d.name).is_made:
        for key in ("classes", "exclude", "subset", "mix"):
            value = getattr(d, key)
            faults.need(not value, f"data.{key}={value!r}: synthetic data take none")


def _check_rows(d: Data, pack: Sequence[int], faults: Faults) -> None:
    """Check `data.pack`, the pictures of a row of tokens."""
    most = max(pack, default=0)
    faults.need(
        isinstance(d.max_tokens, int) and most <= d.max_tokens,
        f"data.pack={d.pack}: needs --config.data.max_tokens={most}, the patches of pictures in "
        "evaluation, or more",
    )
    faults.need(
        not d.keep_features,
        f"data.pack={d.pack}: rows hold images, and data.keep_features=True reads none; leave one "
        "out",
    )


def _check_pictures(
    d: Data, ops: tuple[Sequence[HostOp], Sequence[DeviceOp]], faults: Faults
) -> None:
    """Check what pictures in their own shape rule out."""
    key, (host_ops, device_ops) = f"data.max_tokens={d.max_tokens}", ops
    _need_own_shape(host_ops, f"data.ops={d.ops!r}", d, faults)
    squares = [op.text for op in device_ops if not op.takes_patches]
    faults.need(
        not squares,
        f"{key}: {', '.join(squares)} in data.ops needs images of one size; leave it out",
    )
    faults.need(
        not d.num_global, f"{key}: views have data.image_size; set --config.data.num_global=0"
    )


def _need_own_shape(ops: Sequence[HostOp], key: str, d: Data, faults: Faults) -> None:
    """Check that `ops` leave pictures in their own shape; `key`: theirs, with its value."""
    sized = [op.text for op in ops if op.gives is not None]
    faults.need(
        not sized,
        f"{key}: {', '.join(sized)} would change the shape that data.max_tokens={d.max_tokens} "
        "keeps; leave out ops that set a size (files need decode only)",
    )


def check_eval_ops(evals: Mapping[str, Evaluator], data: Data, faults: Faults) -> None:
    """Check that the ops of every evaluator run on the host, and leave pictures their shape."""
    for name, entry in evals.items():
        key = f"evals.{name}.ops"
        ops = faults.check(parse_ops, entry.ops, _ANY_SIZE, key=key)
        names = ", ".join(op.text for op in ops[1]) if ops else ""
        faults.need(not names, f"{key}={entry.ops!r}: {names} works only in training; leave it out")
        if data.max_tokens is not None and ops:
            _need_own_shape(ops[0], f"{key}={entry.ops!r}", data, faults)
