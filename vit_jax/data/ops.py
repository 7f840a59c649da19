"""Preprocessing strings: "inception_crop|flip", "decode|resize(72, antialias=True)|central_crop".

A string joins small ops by "|"; arguments are literals. An op is a part: one class, whose fields
are its arguments, and one line in `registries.OPS`. Host ops come first and run in tf.data
(host_ops.py); device ops come last and run inside the jitted step (device_ops.py, colour_ops.py).
Parsing finds every fault without TensorFlow.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import Batch
from vit_jax.config import image_hw
from vit_jax.config.parts import Part, find_wrong, key
from vit_jax.config.registries import OPS
from vit_jax.data.host_tf import tf

Size = int | tuple[int, int] | None
Hw = tuple[int, int]
SIZE = "(height, width), or one number for both; None: data.image_size"
PROBABILITY = "share of the images that are changed"


class Op(Part):
    """An op of a preprocessing string; its fields are its arguments, in order.

    of_colours: whether it needs images of three channels.
    on_device: whether it runs on the device, on a batch, and not on the host, on one image.
    decodes: whether it only gives the pixels of a file, and so comes first.
    draws: whether what it makes of an image may differ from step to step.
    text: the op as the user typed it.
    """

    of_colours: ClassVar[bool] = False
    on_device: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    text: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Its key in OPS."""
        return self.text.partition("(")[0].strip()

    def before(self, after: Op) -> Op:
        """This op where `after` follows, for ops that then make less."""
        return self

    def check(self) -> list[str]:
        """Faults of arguments called X_min and X_max: the former is at most the latter."""
        for name in (name for name in self.declared() if name.endswith("_min")):
            high, low = name.replace("_min", "_max"), getattr(self, name)
            if low > getattr(self, high, low):
                return [f"{name}={low}: needs at most {high}={getattr(self, high)}"]
        return []

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Its arguments with their defaults."""
        fields = inspect.signature(cls).parameters.values()
        bare = (f.replace(kind=f.POSITIONAL_OR_KEYWORD, annotation=f.empty) for f in fields)
        return inspect.Signature([*bare])


class HostOp(Op):
    """An op on the host, on one image in tf.data.

    takes_encoded: whether it can start from JPEG or PNG bytes.
    cuts: whether it keeps a part of the image only.
    full_size: the name of the op that does the same, where this one scales JPEGs as it decodes
      them; "": it does not.
    """

    takes_encoded: ClassVar[bool] = False
    cuts: ClassVar[bool] = False
    full_size: ClassVar[str] = ""

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """The next image: uint8 pixels (h, w, 3) of such pixels; results are rounded and clipped.

        AutoGraph is off: what depends on a tensor's value needs `tf.cond`, not Python's `if`.

        seed: int64 (2,), for TensorFlow's stateless ops.
        """
        raise NotImplementedError

    @property
    def gives(self) -> Hw | None:
        """The minimum (height, width) of its results; None if it keeps the image's size."""
        return None

    @property
    def needs(self) -> Hw | None:
        """The minimum (height, width) of its input; None if it takes any size."""
        return None

    @property
    def decodes_for(self) -> Hw | None:
        """The largest (height, width) to which a resize after it may resize.

        None if it decodes no JPEGs at a fraction of their size, or resizes them itself.
        """
        return None

    def takes(self, size: Hw | None) -> bool:
        """Whether it takes images of `size` (height, width); True if the size is unknown."""
        return size is None or self.needs is None or all(map(operator.ge, size, self.needs))


class SizedOp(HostOp):
    """A host op with a size."""

    size: Size = key(None, SIZE)

    def check(self) -> list[str]:
        image_hw(self.size, "size")
        return super().check()

    @property
    def hw(self) -> Hw:
        """The size as (height, width)."""
        return image_hw(self.size, "size")

    @property
    def gives(self) -> Hw | None:
        return self.hw


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of rows that are mixed: within blocks of 2 D rows, row j with row j + D.

    D is `order.pair_distance`. Pairs are fixed; if 2 D divides the number of rows on a device, both
    rows lie on it and mixing moves no data between devices. The shuffled order of the data decides
    which images meet.
    """

    distance: int = 1

    def swapped(self, x: jax.Array) -> jax.Array:
        """The value of each row's partner: (B, ...) -> (B, ...)."""
        return jnp.flip(self._blocks(x), 1).reshape(x.shape)

    def firsts(self, x: jax.Array) -> jax.Array:
        """The value of each pair's first row, for both rows: (B, ...) -> (B, ...)."""
        blocks = self._blocks(x)
        return jnp.broadcast_to(blocks[:, :1], blocks.shape).reshape(x.shape)

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, 2, self.distance, *x.shape[1:])


class DeviceOp(Op):
    """An op on the device, on a whole batch inside the jitted step.

    mixes: whether it mixes pairs of images and their labels; labels are then float32 (B, C).
    takes_patches: whether it also takes `Pictures` as the batch's `image`.
    """

    on_device = True
    takes_patches: ClassVar[bool] = False
    mixes: ClassVar[bool] = False

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        """The next batch: `image` (B, H, W, 3), `label`, `mask` and `id` (each (B,)).

        Images are pixels from 0 to 255, uint8 or float32.

        keys: a JAX key for each row, so that draws do not depend on the batch's sharding.
        pairs: the rows that are mixed with each other.
        """
        raise NotImplementedError


def parse_ops(
    string: str, image_size: Hw, *, key: str = "data.ops"
) -> tuple[tuple[HostOp, ...], tuple[DeviceOp, ...]]:
    """The host ops and the device ops of a preprocessing string.

    Args:
      string: such as "decode|resize|flip"; empty pieces are ignored.
      image_size: (H, W), the default for an op's `size`.
      key: the config key, named in errors.

    Raises: InputError if an op is unknown, in the wrong place, or has wrong arguments.
    """
    faults = Faults()
    calls = parse_calls(string, key)
    ops: list[Any] = [faults.check(make_op, *call, image_size, key) for call in calls]
    if faults:  # one text, as they have one key
        raise InputError("; ".join([faults[0], *(f.removeprefix(f"{key}: ") for f in faults[1:])]))
    ops = [*(op.before(after) for op, after in itertools.pairwise(ops)), *ops[-1:]]
    host_ops = tuple(op for op in ops if isinstance(op, HostOp))
    device_ops = tuple(op for op in ops if isinstance(op, DeviceOp))
    for before, op in itertools.pairwise(ops):
        if isinstance(op, HostOp) and isinstance(before, DeviceOp):
            needed = "|".join(op.text for op in (*host_ops, *device_ops))
            raise InputError(
                f"{key}: {op.text!r} runs on the host, but {before.text!r} before it on the "
                f"device; needed: {needed!r}"
            )
        if op.decodes:
            raise InputError(
                f"{key}: {op.text!r} comes after {before.text!r}, which already gives pixels; "
                "put it first"
            )
    _check_scaled(host_ops, key)
    mixing = [op.text for op in device_ops if op.mixes]
    if len(mixing) > 1:
        raise InputError(
            f"{key}: {' and '.join(mixing)} would mix images twice; keep one, or use "
            "mixup_or_cutmix(0.8, 1.0)"
        )
    return host_ops, device_ops


def _check_scaled(host_ops: Sequence[HostOp], key: str) -> None:
    """Raise InputError unless what is decoded at a fraction of its size is resized to that size.

    A crop would show another part of large JPEGs than of small ones, and a larger resize would
    blur them.
    """
    scaled, limit = None, (0, 0)
    for op in host_ops:
        if op.gives is not None and scaled is not None:
            if op.cuts or not all(map(operator.le, op.gives, limit)):
                raise InputError(
                    f"{key}: {scaled.text!r} scales JPEGs for a resize to at most {by(limit)} "
                    f"pixels, but {op.text!r} follows it; replace it by 'decode'"
                )
            scaled = None
        if op.decodes_for is not None:
            scaled, limit = op, op.decodes_for


def full_size(name: str) -> str:
    """The name of the op that does the same as the op `name` with JPEGs at their full size."""
    return getattr(OPS.find(name), "full_size", "") or name


def at_full_size(ops: Sequence[HostOp]) -> tuple[HostOp, ...]:
    """`ops`, from `parse_ops`, with JPEGs decoded at their full size instead of scaled."""
    return tuple(_at_full_size(op) if op.full_size else op for op in ops)


def _at_full_size(op: HostOp) -> HostOp:
    keys = OPS.find(op.full_size).declared()
    kept = {name: getattr(op, name) for name in keys}
    text = op.text.replace(op.name, op.full_size) if kept else op.full_size
    return make_op(text, op.full_size, [], kept, (1, 1), "ops")


def check_crops(host_ops: Sequence[HostOp], key: str, image_size: Hw | None = None) -> None:
    """Refuse a crop that is larger than its images, unless it pads.

    Args:
      host_ops: from `parse_ops`.
      key: the config key, named in errors.
      image_size: (H, W) of the images before the first op; None if sizes differ or are unknown.

    Raises: InputError naming both sizes.
    """
    size, made_by = image_size, "the data give"
    for op in host_ops:
        if not op.takes(size):
            raise InputError(
                f"{key}: {op.text!r} takes {by(op.needs)} pixels, but {made_by} images of "
                f"{by(size)}; enlarge the resize before it (resize_small(crop=0.875) follows "
                f"data.image_size), or allow a black border with {op.name}(pad=True)"
            )
        if op.gives is not None:
            size, made_by = op.gives, f"{op.text!r} gives"


def by(size: Any) -> str:
    """A size for a message: "16 x 24"."""
    return "{} x {}".format(*size)


def parse_calls(string: str, key: str) -> list[tuple[str, str, list, dict[str, Any]]]:
    """(text, name, arguments, keyword arguments) of each op of a preprocessing string.

    'decode|resize(72, crop=0.8)' -> ('decode', 'decode', [], {}), ('resize(72, crop=0.8)',
    'resize', [72], {'crop': 0.8})

    Raises: InputError if a piece of the string is not an op.
    """
    texts = [text.strip() for text in string.split("|") if text.strip()]
    return [(text, *_parse_call(text, key)) for text in texts]


def _parse_call(text: str, key: str) -> tuple[str, list, dict[str, Any]]:
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


def make_op(
    text: str, name: str, args: list, kwargs: dict[str, Any], image_size: Hw, key: str
) -> Any:
    """The op of a call from `parse_calls`; `image_size` and `key` as for `parse_ops`."""
    try:
        made = OPS.find(name)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    keys = made.declared()
    try:
        values = made.signature().bind(*args, **kwargs).arguments
        if "size" in keys and values.get("size") is None:
            values["size"] = image_size
        faults = [
            f"{k}={value!r}: needs {keys[k].kind.__name__}"
            for k, value in values.items()
            if not _has_type(value, keys[k].kind)
        ]
        op = made(**values)
        collect_faults(faults or find_wrong(keys, values) or op.check())
    except (TypeError, InputError) as error:
        raise InputError(f"{key}: {text!r}: {error}; usage: {name}{made.signature()}") from error
    object.__setattr__(op, "text", text)
    return op


def _has_type(value: Any, kind: type) -> bool:
    return kind is object or type(value) in ((int, float) if kind is float else (kind,))
