"""Views: several differently augmented crops of every picture of a batch.

    global_views  uint8 (B, G, H, W, channels)   data.num_global, data.global_ops, data.image_size
    local_views   uint8 (B, L, h, w, channels)   data.num_local, data.local_ops, data.local_size

A view is a function of (seed, position, its number) only. The local views have their own range of
numbers, so that neither kind depends on how many views the other has.

Source: Caron et al. 2020 (arXiv:2006.09882), section 3.3.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.crops import Crops
from vit_jax.data.device_ops import MIXING_OPS
from vit_jax.data.ops import Op, parse_ops
from vit_jax.errors import Faults, InputError

_FIRST_LOCAL = 512  # number of the first local view
_KINDS = {"global_views": "global", "local_views": "local"}


class Views(NamedTuple):
    """The views of one kind.

    key: the config key of their ops.
    size: (height, width).
    first: number of the first one; the others follow.
    host_ops, device_ops: of each view.
    """

    key: str
    size: tuple[int, int]
    first: int
    host_ops: tuple[tuple[Op, ...], ...]
    device_ops: tuple[tuple[Op, ...], ...]

    @property
    def crops(self) -> Crops:
        """What the host makes."""
        return Crops(self.key, self.size, self.host_ops, self.first)


def parse_views(config: ConfigDict) -> dict[str, Views]:
    """{key of a batch: its views} for the kinds that `config` has.

    Raises:
      InputError: the ops of one kind are wrong.
    """
    found = {}
    for name, kind in _KINDS.items():
        number = config.data[f"num_{kind}"]
        if not number:
            continue
        key, sized = f"data.{kind}_ops", "image_size" if kind == "global" else "local_size"
        size = image_hw(config.data[sized], f"data.{sized}")
        of_views = parse_view_ops(config.data[f"{kind}_ops"], size, number, key)
        first = _FIRST_LOCAL if kind == "local" else 0
        found[name] = Views(key, size, first, *zip(*of_views, strict=True))
    return found


def parse_view_ops(
    string: str, size: tuple[int, int], number: int, key: str
) -> list[tuple[tuple[Op, ...], tuple[Op, ...]]]:
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
        raise InputError(
            f"{key}={string!r}: has the ops of {len(strings)} views, but there are {number}; leave "
            "out some, or add views"
        )
    parsed = [parse_ops(part, size, key=key) for part in strings]
    for op in itertools.chain.from_iterable(device_ops for _, device_ops in parsed):
        if op.name in MIXING_OPS:
            raise InputError(f"{key}: {op.text!r} mixes images, which views are not; leave it out")
    return parsed + [parsed[-1]] * (number - len(parsed))


def check_views(config: ConfigDict, faults: Faults) -> None:
    """Check the keys of the views; crops are checked once the data are known."""
    d = config.data
    for kind in _KINDS.values():
        number = d[f"num_{kind}"]
        faults.need(
            0 <= number < _FIRST_LOCAL,
            f"data.num_{kind}={number}: needs a number from 0 to {_FIRST_LOCAL - 1}",
        )
        if number > 0:
            faults.check(parse_view_ops, d[f"{kind}_ops"], (1, 1), number, f"data.{kind}_ops")
    if d.num_local > 0:
        faults.check(image_hw, d.local_size, "data.local_size")
    faults.need(
        not d.num_local or d.num_global,
        f"data.num_local={d.num_local}: needs global views too; set --config.data.num_global=2",
    )


def fingerprint_of_views(config: ConfigDict) -> list[str]:
    """What decides the bytes of the views; [] if there are none."""
    d, found = config.data, []
    if d.num_global:
        found.append(f"{d.num_global} global views: {d.global_ops}")
    if d.num_local:
        size = image_hw(d.local_size, "data.local_size")
        found.append(f"{d.num_local} local views of {size}: {d.local_ops}")
    return found
