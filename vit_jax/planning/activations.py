"""The bytes of activations that a training step keeps and exchanges, from the model's sizes.

Axes: s tokens, D width, F hidden width of the MLP, H heads; in a ResNet's unit C input channels, M
channels between the convolutions, 4 M output channels.
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
from vit_jax.models.t2t import SPLITS, T2TViT
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
    def middle(self) -> int:
        """Number of values in the outputs of the first two convolutions."""
        return (self.positions_in + self.positions_out) * self.width

    @property
    def output(self) -> int:
        """Number of values in the unit's output."""
        return self.positions_out * self.width * EXPANSION

    @property
    def has_projection(self) -> bool:
        """Whether the shortcut has a projection."""
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


class Block(NamedTuple):
    """Sizes of an EfficientNet's block for one image.

    `inner` is the number of channels of the depthwise convolution.
    """

    positions_in: int
    positions_out: int
    width_in: int
    inner: int
    width: int

    @property
    def input(self) -> int:
        """Number of values in the block's input."""
        return self.positions_in * self.width_in

    @property
    def output(self) -> int:
        """Number of values in the block's output."""
        return self.positions_out * self.width

    @property
    def middle(self) -> int:
        """Number of values in the outputs of the convolutions before the projection."""
        expanded = self.positions_in * self.inner if self.inner > self.width_in else 0
        return expanded + self.positions_out * self.inner


def efficientnet_blocks(model: EfficientNet) -> list[Block]:
    """The blocks of all stages, in order."""
    sides, channels = [-(-side // 2) for side in model.image_size], model.root_width
    blocks = []
    for stage in model.stage_sizes:
        for number in range(stage.blocks):
            positions = math.prod(sides)
            if number == 0:
                sides = [-(-side // stage.stride) for side in sides]
            inner = channels * stage.expansion
            blocks.append(Block(positions, math.prod(sides), channels, inner, stage.width))
            channels = stage.width
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


def step_activation_bytes(model: nn.Module, objective: Objective, still: int = 0) -> int:
    """Bytes of activations of one example kept for the backward pass, if no axis splits them.

    The sum over the objective's passes through which gradients flow, as in `activation_bytes`, and
    the values that the objective itself keeps. What one block needs at a time is added, for the
    largest pass: its full activations where blocks are recomputed; where they keep nothing, as they
    are frozen, its input and output with its hidden units, or with its queries, keys, values and
    weights. A teacher keeps no activations.

    Args:
      model: of the run.
      objective: of the run.
      still: number of the first parts of the model (`tree.parts`) through which no gradient flows,
        as they are frozen.

    Raises:
      InputError: for an unknown family.
    """
    found = [
        (each.images, _kept_and_again(each.model, each.tokens, still_of(each, still)))
        for each in passes_of(model, objective)
        if each.learns
    ]
    kept = sum(images * kept for images, (kept, _) in found)
    again = max((images * again for images, (_, again) in found), default=0)
    return kept + again + objective.kept_values * jnp.dtype(jnp.float32).itemsize


def still_of(each: TokenPass, still: int) -> int:
    """`still` for the model of a pass: an objective's own decoder learns."""
    return 0 if isinstance(each.model, Decoder) else still


def activation_bytes(model: nn.Module) -> int:
    """Bytes of activations of one image kept for the backward pass, if no axis splits them.

    Each Transformer block that is recomputed keeps its input with remat "full"; also the dense
    layers' outputs with "dots". Each other block keeps s D 18 + s F 4 + 5 H s^2 bytes in bfloat16.
    With remat, one block's full activations are added, for the block that is being recomputed.
    Dropout masks, one byte per value, are always included.

    A ResNet keeps the activations of its root, its last feature map (in BiT also normalised), and
    for each unit: with "full" its input; with "dots" also the convolutions' outputs; with "none"
    the inputs of all convolutions and norms. With remat, the full activations of the largest unit
    are added. Statistics and standardised kernels are not included. The same holds for the blocks
    of an EfficientNet, which with "none" also keep the map that is excited.

    A block of an Axial-ViT counts as two, with s rows and s columns of weights for each head. A
    T2T-ViT adds its token module, see `_token_module_bytes`.

    Raises:
      InputError: for an unknown family.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, for the blocks.
    """
    return sum(_kept_and_again(model))


def _kept_and_again(model: nn.Module, tokens: int | None = None, still: int = 0) -> tuple[int, int]:
    """`activation_bytes`: (what is kept, what one block needs that keeps less).

    `tokens`: number of the image's tokens; None: those of an image of the model's size. `still`:
    see `step_activation_bytes`.
    """
    _check_known(model)
    if isinstance(model, BiT):
        return _resnet_bytes(model, still), 0
    if isinstance(model, EfficientNet):
        return _efficientnet_bytes(model, still), 0
    stem = 0
    if not still:
        stem += _resnet_bytes(model) if isinstance(model, HybridViT) else 0
        stem += _token_module_bytes(model) if isinstance(model, T2TViT) else 0
    s = num_tokens(model) if tokens is None else tokens
    d, f, heads = model.width, model.mlp_dim, model.num_heads
    size = jnp.dtype(model.dtype).itemsize
    block_input = size * s * d
    dense = size * s * (8 * d + 2 * f) + 2 * s * d
    products = size * s * (5 * d + f)
    pairs = s**2
    if isinstance(model, AxialViT):  # two blocks, the second over the columns
        dense, products, pairs = 2 * dense, 2 * products, s * sum(model.grid)
    whole = dense + heads * pairs * (2 * size + 1)
    kept = {"full": block_input, "dots": block_input + products, "none": whole}[model.remat]
    layers = model.depth - still_layers(model.depth, still)
    again = max(layers - model.depth + recomputed_layers(model), 0)
    forward = size * (2 * s * d + max(s * f, 3 * s * d + heads * pairs))
    of_one = whole if again else forward if layers < model.depth else 0
    return stem + again * kept + (layers - again) * whole, of_one


def still_layers(depth: int, still: int) -> int:
    """The number of layers among the first `still` parts of a model, after its embedding."""
    return min(max(still - 1, 0), depth)


def _token_module_bytes(model: T2TViT) -> int:
    """Bytes that the layers of the token module keep, and the last soft split.

    A layer of n tokens, from C channels to K, keeps its input, also normalised, and 9 arrays of K
    channels; a performer also random features of queries and keys in float32, a transformer its
    n x n weights. With remat "full" it keeps only its input; with "dots" also the outputs of its 6
    dense layers. With both, the largest layer's full activations are added.
    """
    size, k = jnp.dtype(model.dtype).itemsize, model.token_width
    (height, width), channels = model.image_size, model.channels
    inputs, products, whole = [], [], []
    for split in SPLITS:
        height, width = height // split.stride, width // split.stride
        n, channels = height * width, channels * split.size**2
        inputs.append(size * n * channels)
        weights = 4 * n * k if model.token_module == "performer" else size * n**2
        whole.append(2 * inputs[-1] + 9 * size * n * k + weights)
        products.append(6 * size * n * k)
        channels = k
    *layers, last = inputs
    if model.remat == "none":
        return sum(whole[:-1]) + last
    kept = sum(layers) + (sum(products[:-1]) if model.remat == "dots" else 0)
    return kept + last + max(whole[:-1])


def _resnet_bytes(model: BiT | HybridViT, still: int = 0) -> int:
    norm_is_before = isinstance(model, BiT)

    def kept_of(unit: Unit, remat: str) -> int:
        if remat == "full":
            return unit.input
        convolved = unit.output * (1 + unit.has_projection)
        if remat == "dots":
            return unit.input + unit.middle + convolved
        # A norm follows each convolution except BiT's last one, and also keeps its input.
        return unit.input + 2 * unit.middle + (unit.input if norm_is_before else convolved)

    pixels, units = math.prod(model.image_size), resnet_units(model)
    root = 3 * pixels + (1 if norm_is_before else 2) * pixels // 4 * model.stem_width
    last = units[-1].output if units else pixels // ROOT_STRIDE**2 * model.stem_width
    if still > len(units):
        return max(kept_of(unit, "none") for unit in units) * jnp.dtype(model.dtype).itemsize
    units = units[still_layers(len(units), still) :]
    kept = (0 if still else root) + sum(kept_of(unit, model.remat) for unit in units)
    kept += 2 * last if norm_is_before else last
    if model.remat != "none" and units:
        kept += max(kept_of(unit, "none") for unit in units)
    return kept * jnp.dtype(model.dtype).itemsize


def _efficientnet_bytes(model: EfficientNet, still: int = 0) -> int:
    def kept_of(block: Block, remat: str) -> int:
        if remat == "full":
            return block.input
        convolved = block.middle + block.output
        if remat == "dots":
            return block.input + convolved
        # The norms' inputs, the activated maps, and the excited one.
        return block.input + convolved + block.middle + block.positions_out * block.inner

    blocks, pixels = efficientnet_blocks(model), math.prod(model.image_size)
    root = 3 * pixels + blocks[0].positions_in * model.root_width
    last = blocks[-1].output + 2 * blocks[-1].positions_out * model.width
    if still > len(blocks):
        return max(kept_of(block, "none") for block in blocks) * jnp.dtype(model.dtype).itemsize
    blocks = blocks[still_layers(len(blocks), still) :]
    kept = (0 if still else root) + sum(kept_of(block, model.remat) for block in blocks) + last
    if model.remat != "none":
        kept += max(kept_of(block, "none") for block in blocks)
    return kept * jnp.dtype(model.dtype).itemsize


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
            f"model {type(model).__name__}: the size of its activations cannot be calculated; plan "
            "it for TPUs with their compiler (pip install -e '.[plan]', and no --no_compile)"
        )
