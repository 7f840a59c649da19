"""The activations that a step exchanges over `tensor`, from the model's sizes.

In a ResNet's unit there are M channels between the convolutions, and 4 M output channels.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import InputError
from vit_jax.models.axial import AxialViT
from vit_jax.models.bit import BiT
from vit_jax.models.deit import DeiT
from vit_jax.models.efficientnet import EfficientNet
from vit_jax.models.fields import value_of
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.resnet import EXPANSION, ROOT_STRIDE
from vit_jax.models.t2t import T2TViT
from vit_jax.models.vit import ViT
from vit_jax.objectives.contract import Objective, TokenPass
from vit_jax.objectives.mae import Decoder


class Unit(NamedTuple):
    """Sizes of a ResNet's unit for one image: positions before and after, input channels, M."""

    positions_in: int
    positions_out: int
    width_in: int
    width: int

    @property
    def input(self) -> int:
        """Number of values in the unit's input."""
        return self.positions_in * self.width_in

    @property
    def output(self) -> int:
        """Number of values in the unit's output."""
        return self.positions_out * self.width * EXPANSION


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


class Block(NamedTuple):
    """Number of values in the input and the output of an EfficientNet's block for one image."""

    input: int
    output: int


def efficientnet_blocks(model: EfficientNet) -> list[Block]:
    """The blocks of all stages, in order."""
    sides, channels = [-(-side // 2) for side in model.image_size], model.root_width
    blocks = []
    for stage in model.stage_sizes:
        for number in range(stage.blocks):
            values = math.prod(sides) * channels
            if number == 0:
                sides = [-(-side // stage.stride) for side in sides]
            channels = stage.width
            blocks.append(Block(values, math.prod(sides) * channels))
    return blocks


def num_tokens(model: ViT) -> int:
    """Number of tokens of one image."""
    return math.prod(model.grid) + model.num_prefix_tokens


def recomputed_layers(model: ViT | Decoder) -> int:
    """Number of Transformer blocks that the backward pass computes again."""
    if model.remat == "none":
        return 0
    layers = value_of(model, "remat_layers")
    return model.depth if layers is None else layers


def passes_of(model: nn.Module, objective: Objective) -> tuple[TokenPass, ...]:
    """What passes through Transformer blocks in a step of `objective`."""
    return objective.passes or (TokenPass(model),)


def still_of(each: TokenPass, still: int) -> int:
    """`still` for the model of a pass: an objective's own decoder learns."""
    return 0 if isinstance(each.model, Decoder) else still


def still_layers(depth: int, still: int) -> int:
    """The number of layers among the first `still` parts of a model, after its embedding."""
    return min(max(still - 1, 0), depth)


def tensor_exchanges(
    model: nn.Module,
    tokens: int | None = None,
    *,
    backward: bool = False,
    again: bool = False,
    still: int = 0,
) -> dict[str, tuple[int, int]]:
    """The collectives over `tensor` that one image causes in one pass: {kind: (count, bytes)}.

    With `again`, those of the forward pass that the backward pass computes again. `tokens`: number
    of the image's tokens; None: those of an image of the model's size. `still`: number of the first
    parts of the model (`tree.parts`) that are left out.

    A Transformer block is split over heads and hidden units. Its forward pass all-reduces the
    outputs of attention and MLP, its backward pass the gradients of their inputs. A ResNet's unit
    is split over channels. Its forward pass gathers the first convolution's output and all-reduces
    the last one's; its backward pass all-reduces the gradients of the inputs of both. An
    EfficientNet's block is split over the inner channels; each pass all-reduces one map. What its
    squeeze exchanges, a few values of each image, is not included.

    Raises:
      InputError: for an unknown family.
    """
    _check_known(model)
    size = jnp.dtype(model.dtype).itemsize
    reduces = gathers = reduced = gathered = 0
    if isinstance(model, BiT | HybridViT):
        units = resnet_units(model) if model.remat != "none" or not again else []
        of_stem = isinstance(model, HybridViT)  # which is all embedding
        units = units[len(units) if of_stem and still else still_layers(len(units), still) :]
        inner = sum(unit.positions_in * unit.width for unit in units)
        if backward:
            reduces, reduced = 2 * len(units), inner + sum(unit.input for unit in units)
        else:
            reduces, reduced = len(units), sum(unit.output for unit in units)
            gathers, gathered = len(units), inner
    if isinstance(model, EfficientNet):
        blocks = efficientnet_blocks(model) if model.remat != "none" or not again else []
        blocks = blocks[still_layers(len(blocks), still) :]
        reduces = len(blocks)
        reduced = sum(block.input if backward else block.output for block in blocks)
    if isinstance(model, ViT | Decoder):
        layers = recomputed_layers(model) if again else model.depth
        layers = max(layers - still_layers(model.depth, still), 0)
        layers *= 2 if isinstance(model, AxialViT) else 1
        tokens = num_tokens(model) if tokens is None else tokens
        reduces += 2 * layers
        reduced += 2 * layers * tokens * model.width
    return {"all-reduce": (reduces, reduced * size), "all-gather": (gathers, gathered * size)}


_KNOWN = (ViT, DeiT, T2TViT, AxialViT, HybridViT, BiT, EfficientNet, Decoder)


def _check_known(model: nn.Module) -> None:
    # Exact types: a subclass of a known family may keep or exchange more.
    if type(model) not in _KNOWN:
        raise InputError(
            f"model {type(model).__name__}: its exchanges over mesh.tensor cannot be calculated; "
            "set --config.mesh.tensor=1, or plan it for TPUs with their compiler "
            "(pip install -e '.[plan]', and no --no_compile)"
        )
