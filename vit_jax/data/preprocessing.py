"""The preprocessing ops and the views of a config, parsed once.

Views are several differently augmented crops of every image of a batch:

    global_views  uint8 (B, G, H, W, channels)   data.num_global, data.global_ops, data.image_size
    local_views   uint8 (B, L, h, w, channels)   data.num_local, data.local_ops, data.local_size
    gram_views    uint8 (B, G, H', W', channels) objective.gram_size: the crops of the global views
                  at another size, flipped like them, without their ops on colours

A view is a function of (seed, position, its number) only. The local views have their own range of
numbers, so that neither kind depends on how many views the other has.

Source: Caron et al. 2020 (arXiv:2006.09882), section 3.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.config.sections import Data
from vit_jax.data.batch import BatchSpec, Crops, image_batch, image_crops
from vit_jax.data.colour_ops import ColourOp
from vit_jax.data.device_ops import DeviceTransform, make_device_transform
from vit_jax.data.host_tf import tf
from vit_jax.data.native import PatchRule
from vit_jax.data.ops import DeviceOp, HostOp, Hw, Op, parse_ops
from vit_jax.data.order import check_order, pair_distance, resolve_order
from vit_jax.data.tokenizers import SIZE, TextFacts

OpKind = TypeVar("OpKind", HostOp, DeviceOp)

_FIRST_LOCAL = 512  # number of the first local view


class Views(NamedTuple):
    """The views of one kind.

    crops: what the host makes.
    device_ops: of each view.
    """

    crops: Crops
    device_ops: tuple[tuple[DeviceOp, ...], ...]


def parse_views(data: Data, further: Mapping[str, tuple[str, Hw]] = {}) -> dict[str, Views]:
    """{key of a batch: its views} for the kinds that `data` has.

    `further`: as `ObjectivePart.further_views`.

    Raises:
      InputError: the ops of one kind are wrong.
    """
    found = {}
    kinds = (
        ("global_views", "data.global_ops", data.global_ops, data.num_global, "image_size", 0),
        ("local_views", "data.local_ops", data.local_ops, data.num_local, "local_size",
         _FIRST_LOCAL),
    )  # fmt: skip
    for name, key, ops, number, sized, first in kinds:
        if number:
            size = getattr(data, sized)
            host_ops, device_ops = zip(*parse_view_ops(ops, size, number, key), strict=True)
            found[name] = Views(Crops(key, size, host_ops, first, f"data.{sized}"), device_ops)
    for name, (own, size) in further.items() if data.num_global else ():
        key, sized = "data.global_ops", f"objective.{own}"
        of_views = parse_view_ops(data.global_ops, size, data.num_global, key)
        # They have the numbers of the global views, and so what is left of their ops draws alike.
        left = [(_before_colours(host, key, sized), _before_colours(device, key, sized))
                for host, device in of_views]  # fmt: skip
        host_ops, device_ops = zip(*left, strict=True)
        found[name] = Views(Crops(key, size, host_ops, 0, sized), device_ops)
    return found


def _keeps_colours(op: Op) -> bool:
    return not (op.of_colours or isinstance(op, ColourOp))


def _before_colours(ops: Sequence[OpKind], key: str, sized: str) -> tuple[OpKind, ...]:
    """The ops before the first one of colours; InputError if a later one may move pixels."""
    left = tuple(itertools.takewhile(_keeps_colours, ops))
    if moving := [op.text for op in ops[len(left) :] if not isinstance(op, ColourOp)]:
        raise InputError(
            f"{key}: {', '.join(moving)} may move pixels after colours have changed, so the crops "
            f"of {sized} would show other places; write ops that move pixels first, or "
            f"set --config.{sized}=None"
        )
    return left


def parse_view_ops(
    string: str, size: tuple[int, int], number: int, key: str
) -> list[tuple[tuple[HostOp, ...], tuple[DeviceOp, ...]]]:
    """(host ops, device ops) of each of `number` views; the last string holds for all that follow.

    Args:
      string: one string of ops, or one for each of the first views, joined by ";".
      size: (height, width), the default for an op's `size`.
      number: how many views there are, at least 1.
      key: the config key, named in errors.

    Raises:
      InputError: there are more strings than views, an op is wrong, or it mixes images.
    """
    strings = string.split(";")
    if len(strings) > number:
        raise InputError(f"{key}={string!r}: has the ops of {len(strings)} views; needs {number}")
    parsed = [parse_ops(part, size, key=key) for part in strings]
    for op in itertools.chain.from_iterable(device_ops for _, device_ops in parsed):
        if op.mixes:
            raise InputError(f"{key}: {op.text!r} mixes images, which views are not; leave it out")
    return parsed + [parsed[-1]] * (number - len(parsed))


def fingerprint_of_views(data: Data, further: Mapping[str, tuple[str, Hw]]) -> list[str]:
    """The keys that decide the bytes of the views; [] if there are none; see `parse_views`."""
    d, found = data, []
    if d.num_global:
        found.append(f"{d.num_global} global views: {d.global_ops}")
        found += [f"and of {size}" for _, size in further.values()]
    if d.num_local:
        found.append(f"{d.num_local} local views of {d.local_size}: {d.local_ops}")
    return found


class Preprocessing(NamedTuple):
    """The parsed preprocessing of a run.

    host_ops, device_ops: ops for training.
    eval_ops: {name: host ops} for each entry of `evals`.
    views: {key of a batch: its views}.
    text: of the tokenizer; None: no captions are read. Until a run has opened its tokenizer, the
      facts of one that it would train, with `data.vocabulary` ids.
    """

    host_ops: tuple[HostOp, ...]
    device_ops: tuple[DeviceOp, ...]
    eval_ops: Mapping[str, tuple[HostOp, ...]]
    views: Mapping[str, Views] = {}
    text: TextFacts | None = None

    @property
    def mixes(self) -> bool:
        """Whether a device op mixes pairs of images."""
        return any(op.mixes for op in self.device_ops)


def parse_preprocessing(settings: Settings) -> Preprocessing:
    """Parse the preprocessing of a config that has passed its first check."""
    data, evals = settings.data, settings.evals.items()
    size = data.image_size
    host_ops, device_ops = parse_ops(data.ops, size)
    eval_ops = {name: parse_ops(e.ops, size, key=f"evals.{name}.ops")[0] for name, e in evals}
    views = parse_views(data, settings.objective.further_views)
    length = data.text_length
    text = None if length is None else TextFacts(data.vocabulary or SIZE, length)
    return Preprocessing(host_ops, device_ops, eval_ops, views, text)


def rule_of(data: Data) -> PatchRule | None:
    """The rule by which images become patches; None: all have `data.image_size`.

    Raises:
      InputError: no run has decided the size of the patches.
    """
    if data.max_tokens is None:
        return None
    if data.patch_size is None:
        raise InputError(
            f"data.max_tokens={data.max_tokens}: only a training run sets it; leave it out (a "
            "model that learned from pictures in their own shape is evaluated on such pictures)"
        )
    return PatchRule(data.patch_size, data.max_tokens)


def rule_of_training(data: Data) -> PatchRule | None:
    """`rule_of` for training, where a row may hold several pictures."""
    rule = rule_of(data)
    return rule._replace(most=max(data.pack), pack=data.pack) if rule and data.pack else rule


def describe_images(data: Data) -> str:
    """The shape of a run's images, for the user; of packed ones also how a row holds them."""
    rule, pack = rule_of(data), data.pack
    if rule is None:
        return "{} x {} (height x width)".format(*data.image_size)
    said = f"in their own shape, at most {rule.most} patches"
    if not pack:
        return said
    wide = [math.prod(rule.grid_of(tf.constant([1500, 2000]), n).numpy()) for n in pack]
    return (
        f"{said}; training packs {len(pack)} into each row of {sum(pack)} patches: "
        f"{', '.join(map(str, pack))}; of pictures 3:4, {1 - sum(wide) / sum(pack):.1%} is padding"
    )


def eval_batch(data: Data, size: int, host_ops: Sequence[HostOp], key: str) -> BatchSpec:
    """A batch of `size` images as the model takes them, by other ops; `key`: see `image_batch`."""
    return image_batch(size, data.image_size, host_ops, key, rule_of(data))


def describe_batch(
    data: Data, size: int, preprocessing: Preprocessing, features: int | None = None
) -> BatchSpec:
    """The training batches of `size` rows: `image`, made by `data.ops`, views, or both.

    features: the width of features that take the place of `image`; None: there are none.
    """
    d, (host_ops, device_ops, _, views, text) = data, preprocessing
    crops = {name: kind.crops for name, kind in views.items()}
    if (host_ops or device_ops or not views) and features is None:
        crops["image"] = image_crops("data.ops", d.image_size, host_ops, rule_of_training(data))
    label_size = d.num_classes if d.multi_label or d.soft_labels else None
    return BatchSpec(size, crops, d.channels, label_size, text, features)


def make_transform(data: Data, size: int, preprocessing: Preprocessing) -> DeviceTransform:
    """The device part of the preprocessing of batches of `size` rows.

    Raises:
      InputError: an op mixes images, and the order of the data has no pairs for it.
    """
    d, ops = data, preprocessing.device_ops
    rows: dict[str, Any] = {"global_batch_size": size, "repeats": d.repeats}
    order, streams = resolve_order(d.order, d.streams, num_examples=d.num_examples, **rows)
    check_order(order, streams=streams, **rows, mixes=preprocessing.mixes)
    return make_device_transform(
        ops,
        d.mean,
        d.std,
        num_classes=d.num_classes,
        distance=pair_distance(order, streams, **rows),
        views=preprocessing.views,
    )
