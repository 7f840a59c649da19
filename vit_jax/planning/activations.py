"""What a training step keeps and exchanges of its activations, by a model's sizes.

Axes: s tokens, D width, F hidden width of the MLP, H heads; of a unit its input's and its output's
positions, C channels in, M between, 4 M out.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import InputError
from vit_jax.models.bit import BiT
from vit_jax.models.deit import DeiT
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.resnet import EXPANSION, ROOT_STRIDE
from vit_jax.models.vit import ViT


class Unit(NamedTuple):
    """Sizes of a ResNet's unit for one image: positions before and after, channels before, M."""

    positions_in: int
    positions_out: int
    width_in: int
    width: int

    @property
    def input(self) -> int:
        """Numbers in its input."""
        return self.positions_in * self.width_in

    @property
    def middle(self) -> int:
        """Numbers in the outputs of its first two convolutions."""
        return (self.positions_in + self.positions_out) * self.width

    @property
    def output(self) -> int:
        """Numbers in its output."""
        return self.positions_out * self.width * EXPANSION

    @property
    def has_projection(self) -> bool:
        """Whether its residual is projected."""
        return self.positions_in > self.positions_out or self.width_in != self.width * EXPANSION


def resnet_units(model: BiT | HybridViT) -> list[Unit]:
    """The units of all stages, in order."""
    sides = [-(-side // ROOT_STRIDE) for side in model.image_size]
    units, positions, channels = [], math.prod(sides), model.stem_width
    for stage, depth in enumerate(model.stages):
        if stage:
            sides = [-(-side // 2) for side in sides]
        for _ in range(depth):
            units.append(Unit(positions, math.prod(sides), channels, model.stem_width * 2**stage))
            positions, channels = math.prod(sides), units[-1].width * EXPANSION
    return units


def num_tokens(model: ViT) -> int:
    """Tokens of one image."""
    return math.prod(model.grid) + model.num_prefix_tokens


def activation_bytes(model: nn.Module) -> int:
    """What the backward pass keeps of one image, on a device that splits nothing of it.

    Of each Transformer block: with remat "full" its input, with "dots" the dense layers' outputs
    too, with "none" s D 18 + s F 4 + 5 H s^2 bytes in bfloat16, for s tokens of width D, F the
    width of the MLP and H heads; and of one block all of that, when it is computed again. Dropout's
    masks, of a byte each, are among them, used or not.

    Of a ResNet its root's, its last map, of BiT normalised too, and of each unit: with "full" its
    input, with "dots" the convolutions' outputs too, with "none" what each convolution and each
    norm has as input; and all of that of the largest unit, when it is computed again. Statistics,
    and the kernels as standardised, are not among them.

    Raises:
      InputError: for a family of which it is not known.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, for the blocks.
    """
    _check_known(model)
    if isinstance(model, BiT):
        return _resnet_bytes(model)
    stem = _resnet_bytes(model) if isinstance(model, HybridViT) else 0
    s, d, f, heads = num_tokens(model), model.width, model.mlp_dim, model.num_heads
    size = jnp.dtype(model.dtype).itemsize
    block_input = size * s * d
    whole = size * s * (8 * d + 2 * f) + 2 * s * d + heads * s**2 * (2 * size + 1)
    kept = {"full": block_input, "dots": size * s * (6 * d + f), "none": whole}[model.remat]
    return stem + model.depth * kept + (whole if model.remat != "none" else 0)


def _resnet_bytes(model: BiT | HybridViT) -> int:
    norm_is_before = isinstance(model, BiT)

    def kept_of(unit: Unit, remat: str) -> int:
        if remat == "full":
            return unit.input
        convolved = unit.output * (1 + unit.has_projection)
        if remat == "dots":
            return unit.input + unit.middle + convolved
        # Each convolution but the last of BiT has a norm behind it, which needs its output too.
        return unit.input + 2 * unit.middle + (unit.input if norm_is_before else convolved)

    pixels, units = math.prod(model.image_size), resnet_units(model)
    root = 3 * pixels + (1 if norm_is_before else 2) * pixels // 4 * model.stem_width
    last = units[-1].output if units else pixels // ROOT_STRIDE**2 * model.stem_width
    kept = root + sum(kept_of(unit, model.remat) for unit in units)
    kept += 2 * last if norm_is_before else last
    if model.remat != "none" and units:
        kept += max(kept_of(unit, "none") for unit in units)
    return kept * jnp.dtype(model.dtype).itemsize


def tensor_exchanges(model: nn.Module, *, backward: bool = False) -> dict[str, tuple[int, int]]:
    """What one image makes a mesh's `tensor` axis exchange in one pass: {kind: (count, bytes)}.

    The inner products of a Transformer block are split over heads and hidden units, and its two
    outputs added up; backward the gradients of its two inputs. Those of a ResNet's unit are split
    over channels: the first convolution's output is gathered, and the last one's added up;
    backward the gradients of both convolutions' inputs are.

    Raises:
      InputError: for a family of which it is not known.
    """
    _check_known(model)
    size = jnp.dtype(model.dtype).itemsize
    reduces = gathers = reduced = gathered = 0
    if isinstance(model, BiT | HybridViT):
        units = resnet_units(model)
        inner = sum(unit.positions_in * unit.width for unit in units)
        if backward:
            reduces, reduced = 2 * len(units), inner + sum(unit.input for unit in units)
        else:
            reduces, reduced = len(units), sum(unit.output for unit in units)
            gathers, gathered = len(units), inner
    if isinstance(model, ViT):
        reduces += 2 * model.depth
        reduced += 2 * model.depth * num_tokens(model) * model.width
    return {"all-reduce": (reduces, reduced * size), "all-gather": (gathers, gathered * size)}


def _check_known(model: nn.Module) -> None:
    # Exact: what is derived from a known family may do more.
    if type(model) not in (ViT, DeiT, HybridViT, BiT):
        raise InputError(
            f"a {type(model).__name__}: what it keeps and exchanges of its activations is unknown "
            "here; plan it for TPUs, by their compiler (pip install -e '.[plan]')"
        )
