"""Preprocessing strings: "inception_crop|flip", "decode|resize(72, antialias=True)|central_crop".

A string joins small ops by "|"; arguments are literals. Host ops come first and run in tf.data
(host_ops.py); device ops come last and run inside the jitted step (device_ops.py). Parsing finds
every fault without TensorFlow.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import difflib
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.data.device_ops import DEVICE_OPS, MIXING_OPS, DeviceOp
from vit_jax.data.host_ops import (
    CUTS,
    FULL_SIZE,
    HOST_OPS,
    RESIZES_BEFORE_CROP,
    TAKES_ENCODED,
    HostOp,
)
from vit_jax.errors import InputError

_MOST_OPS = 100  # of a string; each makes the pipeline's graph, or the step's program, longer

# A view of both tables; plug-ins add to either.
OPS: Mapping[str, Callable[..., HostOp] | Callable[..., DeviceOp]]
OPS = collections.ChainMap[str, Any](DEVICE_OPS, HOST_OPS)


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of a string.

    text: the op as the user typed it.
    name: its key in OPS.
    apply: the function itself.
    arguments: (name, value) of each argument, with defaults filled in; ops with equal names and
      arguments do the same.
    """

    text: str
    name: str
    apply: HostOp | DeviceOp
    arguments: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any) -> Any:
        return self.apply(*args)

    @property
    def takes_encoded(self) -> bool:
        """Whether the op can start from JPEG or PNG bytes."""
        return self.name in TAKES_ENCODED

    @property
    def gives(self) -> tuple[int, int] | None:
        """The minimum (height, width) of a host op's results; None if it keeps the size."""
        assert isinstance(self.apply, HostOp)
        return self.apply.gives

    @property
    def needs(self) -> tuple[int, int] | None:
        """The minimum (height, width) of a host op's input; None if it takes any size."""
        assert isinstance(self.apply, HostOp)
        return self.apply.needs

    def takes(self, size: tuple[int, int] | None) -> bool:
        """Whether a host op takes images of `size` (height, width); True if the size is unknown."""
        return size is None or self.needs is None or all(map(operator.ge, size, self.needs))


def parse_ops(
    string: str, image_size: tuple[int, int], *, key: str = "data.ops"
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The host ops and the device ops of a preprocessing string.

    Args:
      string: such as "decode|resize|flip"; empty pieces are ignored.
      image_size: (H, W), the default for an op's `size`.
      key: the config key, named in errors.

    Raises: InputError if an op is unknown, in the wrong place, or has wrong arguments, or if there
      are too many.
    """
    texts = [text.strip() for text in string.split("|") if text.strip()]
    if len(texts) > _MOST_OPS:
        raise InputError(f"{key}: has {len(texts):,} ops; needs at most {_MOST_OPS}")
    ops = [_parse_op(text, image_size, key) for text in texts]
    host_ops = tuple(op for op in ops if op.name in HOST_OPS)
    device_ops = tuple(op for op in ops if op.name in DEVICE_OPS)
    for before, op in itertools.pairwise(ops):
        if op.name in HOST_OPS and before.name in DEVICE_OPS:
            raise InputError(
                f"{key}: {op.text!r} runs on the host, but {before.text!r} before it runs on the "
                f"device; put the device ops last: "
                f"{'|'.join(op.text for op in host_ops + device_ops)!r}"
            )
        if FULL_SIZE.get(op.name, op.name) == "decode":
            raise InputError(
                f"{key}: {op.text!r} comes after {before.text!r}, which already gives pixels; "
                "put it first"
            )
    _check_scaled(host_ops, key)
    mixing = [op.text for op in device_ops if op.name in MIXING_OPS]
    if len(mixing) > 1:
        raise InputError(
            f"{key}: {' and '.join(mixing)} would mix images twice; keep one, or use "
            "mixup_or_cutmix(0.8, 1.0), which draws one of the two for each pair"
        )
    return host_ops, device_ops


def _check_scaled(host_ops: Sequence[Op], key: str) -> None:
    """Raise InputError unless what is decoded at a fraction of its size is resized to that size.

    A crop would show another part of large JPEGs than of small ones, and a larger resize would
    blur them.
    """
    scaled, limit = None, (0, 0)
    for op in host_ops:
        assert isinstance(op.apply, HostOp)
        if op.gives is not None and scaled is not None:
            if op.name in CUTS or not all(map(operator.le, op.gives, limit)):
                raise InputError(
                    f"{key}: {scaled.text!r} decodes large JPEGs at a fraction of their size, for "
                    f"a resize to at most {_by(limit)} pixels, but {op.text!r} follows it; replace "
                    "it by 'decode'"
                )
            scaled = None
        if op.apply.decodes_for is not None:
            scaled, limit = op, op.apply.decodes_for


def do_the_same(a: Sequence[Op], b: Sequence[Op]) -> bool:
    """Whether the ops `a` and `b`, from `parse_ops`, do the same, whatever their spelling."""
    return [(op.name, op.arguments) for op in a] == [(op.name, op.arguments) for op in b]


def at_full_size(ops: Sequence[Op]) -> tuple[Op, ...]:
    """`ops`, from `parse_ops`, with JPEGs decoded at their full size instead of scaled."""
    return tuple(_at_full_size(op) if op.name in FULL_SIZE else op for op in ops)


def _at_full_size(op: Op) -> Op:
    name = FULL_SIZE[op.name]
    taken = inspect.signature(OPS[name]).parameters
    arguments = {key: value for key, value in op.arguments if key in taken}
    text = op.text.replace(op.name, name) if arguments else name
    return Op(text, name, OPS[name](**arguments), tuple(arguments.items()))


def check_crops(
    host_ops: Sequence[Op], key: str, image_size: tuple[int, int] | None = None
) -> None:
    """Refuse a crop that is larger than its images, unless it pads.

    Args:
      host_ops: from `parse_ops`.
      key: the config key, named in errors.
      image_size: (H, W) of the images before the first op; None if sizes differ or are unknown.

    Raises: InputError naming both sizes.
    """
    size, made_by = image_size, "the data give"
    for op in host_ops:
        needs = op.needs
        if size is not None and needs is not None and not op.takes(size):
            raise InputError(
                f"{key}: {op.text!r} takes {_by(needs)} pixels, but {made_by} images of "
                f"{_by(size)}, which would need a black border; enlarge the resize before it "
                "(resize_small(crop=0.875) follows data.image_size), or allow the border with "
                f"{op.name}(pad=True)"
            )
        if op.gives is not None:
            size, made_by = op.gives, f"{op.text!r} gives"


def parse_calls(string: str, key: str) -> list[tuple[str, list, dict[str, Any]]]:
    """(name, arguments, keyword arguments) of each op of a preprocessing string, as written.

    Raises: InputError if a piece of the string is not an op.
    """
    return [_parse_call(text.strip(), key) for text in string.split("|") if text.strip()]


def _by(size: tuple[int, int]) -> str:
    return "{} x {}".format(*size)


def _parse_op(text: str, image_size: tuple[int, int], key: str) -> Op:
    name, args, kwargs = _parse_call(text, key)
    if name not in OPS:
        close = difflib.get_close_matches(name, OPS, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"{key}: unknown op {text!r}; {meant}Known: {', '.join(OPS)}")
    signature = inspect.signature(OPS[name])
    try:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments.get("size", image_size) is None:
            call.arguments["size"] = image_size
        apply = OPS[name](*call.args, **call.kwargs)
        arguments = dict(call.arguments)
        if name in RESIZES_BEFORE_CROP:  # `crop` only sets the size
            arguments |= {"size": getattr(apply, "gives", None), "crop": 1.0}
        return Op(text, name, apply, tuple(arguments.items()))
    except (TypeError, ValueError) as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        usage = f"{name}({', '.join(map(str, bare))})"
        raise InputError(f"{key}: {text!r}: {error}; usage: {usage}") from error


def _parse_call(text: str, key: str) -> tuple[str, list, dict[str, Any]]:
    """'resize(72, antialias=True)' -> ('resize', [72], {'antialias': True})."""
    try:
        match ast.parse(text, mode="eval").body:
            case ast.Name(id=name):
                return name, [], {}
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                kwargs = {word.arg or "**": ast.literal_eval(word.value) for word in keywords}
                return name, [ast.literal_eval(arg) for arg in args], kwargs
    except (SyntaxError, ValueError):
        pass
    raise InputError(
        f"{key}: {text!r} is not an op; needed: a name such as flip, or a call with literal "
        "arguments such as resize(72, antialias=True)"
    )
