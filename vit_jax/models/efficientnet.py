"""EfficientNet: a convolutional network scaled in width, depth and image size at once.

Axes: B images, H rows, W columns, C channels, N = H W positions, D width, R channels of the
squeeze. All convolutions pad as XLA's "SAME" (TensorFlow's): as little as the image's size needs,
the odd zero at the end.
Source: Tan & Le 2019 (arXiv:1905.11946); L2: Xie et al. 2019 (arXiv:1911.04252); B8: Xie et al.
2019 (arXiv:1911.09665). Rounding and initial weights: github.com/tensorflow/tpu,
models/official/efficientnet.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.block_ops import Constrain, unconstrained
from vit_jax.models.contract import Model, SplitLayer
from vit_jax.models.dropout import Dropout
from vit_jax.models.fields import check_image_shape
from vit_jax.models.resnet import CONVOLUTION_REMAT_POLICIES


class StageSizes(NamedTuple):
    """A stage of B0: its MBConv blocks. Only the first has a stride.

    blocks: number of blocks.
    size: of the depthwise kernels.
    stride: of the first block.
    expansion: channels of the depthwise convolution / channels of the block's input.
    width: channels of the output.
    """

    blocks: int
    size: int
    stride: int
    expansion: int
    width: int


# Table 1 of arXiv:1905.11946.
B0_STAGES = (
    StageSizes(1, 3, 1, 1, 16),
    StageSizes(2, 3, 2, 6, 24),
    StageSizes(2, 5, 2, 6, 40),
    StageSizes(3, 3, 2, 6, 80),
    StageSizes(3, 5, 1, 6, 112),
    StageSizes(4, 5, 2, 6, 192),
    StageSizes(1, 3, 1, 6, 320),
)
_ROOT_WIDTH, _LAST_WIDTH, _STRIDE = 32, 1280, 32
_SQUEEZE = 4  # input channels of a block / channels of its squeeze


def round_width(channels: int, factor: float) -> int:
    """`channels` times `factor`, to the nearest multiple of 8, but at least 90 % of it."""
    scaled = channels * factor
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def _init_kernel(
    key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Normal, with variance 2 / (outputs of one input position)."""
    std = math.sqrt(2 / math.prod((*shape[:-2], shape[-1])))
    return std * jax.random.normal(key, shape, dtype)


def _init_depthwise(
    key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """As `_init_kernel`, where each channel has a single output."""
    return math.sqrt(2 / math.prod(shape[:2])) * jax.random.normal(key, shape, dtype)


class Conv(nn.Module):
    """A `size` x `size` convolution without bias; `depthwise`: each channel by itself.

    `split` names the mesh axes over which the computation splits the kernel's inputs and outputs.

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, features), rounded up.
    """

    features: int
    size: int = 1
    stride: int = 1
    depthwise: bool = False
    dtype: Any = jnp.float32
    split: tuple[str | None, str | None] = (None, None)
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        inputs = 1 if self.depthwise else x_BHWC.shape[-1]
        init = _init_depthwise if self.depthwise else _init_kernel
        kernel = self.param("kernel", init, (self.size, self.size, inputs, self.features))
        kernel = self.constrain(kernel.astype(self.dtype), (None, None, *self.split))
        return jax.lax.conv_general_dilated(
            x_BHWC.astype(self.dtype),
            kernel,
            (self.stride, self.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.features if self.depthwise else 1,
        )


class MBConv(nn.Module):
    """Inverted bottleneck: expansion, depthwise convolution, squeeze and excitation, projection.

    Without an `expansion` above 1 there is no first convolution. If input and output have the same
    shape, the input is added; training then drops the rest for an example with probability
    `drop_rate`.

    Shapes: (B, H, W, C), mask (B,) or None -> (B, H / stride, W / stride, width), rounded up.
    Source: Sandler et al. 2018 (arXiv:1801.04381); squeeze and excitation: Hu et al. 2017
      (arXiv:1709.01507); stochastic depth: Huang et al. 2016 (arXiv:1603.09382).
    """

    width: int
    size: int
    stride: int
    expansion: int
    drop_rate: float
    norm_momentum: float
    norm_eps: float
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, mask_B: jax.Array | None, train: bool) -> jax.Array:
        conv = partial(Conv, dtype=self.dtype, constrain=self.constrain)
        batch_norm = partial(BatchNorm, self.norm_momentum, self.norm_eps, self.dtype)
        channels = x_BHWC.shape[-1]
        inner, y_BHWC = channels * self.expansion, x_BHWC
        if self.expansion > 1:
            y_BHWC = conv(inner, split=(None, "tensor"), name="conv_expand")(y_BHWC)
            y_BHWC = self.constrain(y_BHWC, ("batch", None, None, "tensor"))
            y_BHWC = nn.silu(batch_norm(name="norm_expand")(y_BHWC, mask_B, train))
        depthwise = conv(
            inner, self.size, self.stride, depthwise=True, split=(None, "tensor"),
            name="conv_depthwise",
        )  # fmt: skip
        y_BHWC = self.constrain(depthwise(y_BHWC), ("batch", None, None, "tensor"))
        y_BHWC = nn.silu(batch_norm(name="norm_depthwise")(y_BHWC, mask_B, train))
        y_BHWC = y_BHWC * self._excite(y_BHWC, max(1, channels // _SQUEEZE))
        y_BHWC = conv(self.width, split=("tensor", None), name="conv_project")(y_BHWC)
        y_BHWC = batch_norm(name="norm_project")(y_BHWC, mask_B, train)
        if self.stride == 1 and channels == self.width:
            if train and self.drop_rate > 0:
                keep_rate, shape = 1.0 - self.drop_rate, (x_BHWC.shape[0], 1, 1, 1)
                kept = jax.random.bernoulli(self.make_rng("dropout"), keep_rate, shape)
                y_BHWC = jnp.where(kept, y_BHWC / keep_rate, 0).astype(y_BHWC.dtype)
            y_BHWC = x_BHWC + y_BHWC
        return self.constrain(y_BHWC, ("batch", None, None, None))

    def _excite(self, x_BHWC: jax.Array, squeezed: int) -> jax.Array:
        """A factor in (0, 1) for every channel of every image, (B, 1, 1, C)."""
        dense = partial(nn.Dense, dtype=self.dtype, kernel_init=_init_kernel)
        x_BC = x_BHWC.mean(axis=(1, 2), dtype=jnp.float32)
        x_BR = nn.silu(dense(squeezed, name="se_reduce")(x_BC))
        x_BC = nn.sigmoid(dense(x_BHWC.shape[-1], name="se_expand")(x_BR))
        return rearrange(x_BC, "b c -> b 1 1 c")


class Stage(nn.Module):
    """The blocks of a stage, `layer_0`, `layer_1`, ...; block i drops with rate `drop_rates[i]`."""

    sizes: StageSizes
    drop_rates: tuple[float, ...]
    remat: str
    fields: dict[str, Any]

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, mask_B: jax.Array | None, train: bool) -> jax.Array:
        block = MBConv
        if self.remat != "none":
            policy = CONVOLUTION_REMAT_POLICIES[self.remat]
            block = nn.remat(MBConv, policy=policy, static_argnums=(3,))  # train; 0 is self
        _, size, stride, expansion, width = self.sizes
        for i, drop_rate in enumerate(self.drop_rates):
            sizes = (width, size, stride if i == 0 else 1, expansion)
            mbconv = block(*sizes, drop_rate, **self.fields, name=f"layer_{i}")
            x_BHWC = mbconv(x_BHWC, mask_B, train)
        return x_BHWC


class Trunk(nn.Module):
    """The network without pooling and head: a root of stride 2, the stages, a 1x1 convolution.

    Shapes: (B, H, W, 3), mask (B,) or None -> (B, H / 32, W / 32, D), rounded up.
    """

    stages: tuple[StageSizes, ...]
    root_width: int
    last_width: int
    stochastic_depth: float
    remat: str
    fields: dict[str, Any]

    @nn.compact
    def __call__(self, images: jax.Array, mask_B: jax.Array | None, train: bool) -> jax.Array:
        dtype, constrain = self.fields["dtype"], self.fields["constrain"]
        conv = partial(Conv, dtype=dtype, constrain=constrain)
        norm_fields = self.fields["norm_momentum"], self.fields["norm_eps"], dtype
        x_BHWC = conv(self.root_width, 3, 2, name="conv_root")(images)
        x_BHWC = nn.silu(BatchNorm(*norm_fields, name="norm_root")(x_BHWC, mask_B, train))
        x_BHWC = constrain(x_BHWC, ("batch", None, None, None))
        total, begin = sum(stage.blocks for stage in self.stages), 0
        for i, stage in enumerate(self.stages):
            numbers = range(begin, begin + stage.blocks)
            rates = tuple(self.stochastic_depth * number / total for number in numbers)
            layers = Stage(stage, rates, self.remat, self.fields, name=f"stage_{i}")
            x_BHWC, begin = layers(x_BHWC, mask_B, train), begin + stage.blocks
        x_BHWC = conv(self.last_width, name="conv_last")(x_BHWC)
        x_BHWC = nn.silu(BatchNorm(*norm_fields, name="norm_last")(x_BHWC, mask_B, train))
        return constrain(x_BHWC, ("batch", None, None, None))


class Variant(NamedTuple):
    """A published size, with the image size and the dropout of its training."""

    width_factor: float
    depth_factor: float
    image_size: int
    dropout: float


# Sources: the release's efficientnet_builder.py for B0 to B7, arXiv:1911.04252 for L2, timm's
# efficientnet.py for B8.
EFFICIENTNET_VARIANTS = {
    "B0": Variant(1.0, 1.0, 224, 0.2),
    "B1": Variant(1.0, 1.1, 240, 0.2),
    "B2": Variant(1.1, 1.2, 260, 0.3),
    "B3": Variant(1.2, 1.4, 300, 0.3),
    "B4": Variant(1.4, 1.8, 380, 0.4),
    "B5": Variant(1.6, 2.2, 456, 0.4),
    "B6": Variant(1.8, 2.6, 528, 0.5),
    "B7": Variant(2.0, 3.1, 600, 0.5),
    "B8": Variant(2.2, 3.6, 672, 0.5),
    "L2": Variant(4.3, 5.3, 800, 0.5),
}

EFFICIENTNET_NAMES = tuple(f"EfficientNet-{variant}" for variant in EFFICIENTNET_VARIANTS)


def find_variant(name: str) -> Variant:
    """The published size called `name`, e.g. "EfficientNet-B0".

    Raises:
      InputError: if it is not one of EFFICIENTNET_NAMES.
    """
    if name not in EFFICIENTNET_NAMES:
        hint = nearest(name, EFFICIENTNET_NAMES)
        raise InputError(f"name={name!r}: no such EfficientNet; {hint}")
    return EFFICIENTNET_VARIANTS[name.removeprefix("EfficientNet-")]


def efficientnet_fields(name: str) -> dict[str, Any]:
    """The fields of the model called `name`.

    Raises:
      InputError: if it is not one of EFFICIENTNET_NAMES.
    """
    variant = find_variant(name)
    return {"width_factor": variant.width_factor, "depth_factor": variant.depth_factor}


class EfficientNet(Model):
    """EfficientNet: images (B, H, W, 3) in its value range -> logits (B, C), float32.

    With `num_classes` None the model has no head and `__call__` returns the features. With
    `image_size` None it takes images of any size. `width_factor` scales the channels and
    `depth_factor` the blocks of B0. `dropout` acts before the head; `stochastic_depth` is the rate
    of the last block; rates grow linearly from 0 in the first. `remat` is as in `ViT`, for each
    block.

    The model has batch statistics: `init` returns the collections "params" and "batch_stats", and
    evaluation needs both. In training (`train=True`) the rows of a batch depend on each other;
    `mask` (B,) is 0 for rows that must not count, and the new averages are returned with
    `mutable=["batch_stats"]`. Dropout and stochastic depth need the random stream `dropout`.

    Methods: "tokens" -> (B, N, D), the last feature map in raster order; "features" -> (B, D), its
      mean; "pre_logits" -> (B, D), the same as the features.
    Raises: InputError for fields that are out of range, or images of another size.
    """

    num_classes: int | None = key(..., **fields.NUM_CLASSES)
    image_size: tuple[int, int] | None = key(..., "of the images")
    width_factor: float = key(..., "channels / B0's channels", within=fields.POSITIVE)
    depth_factor: float = key(..., "blocks / B0's blocks", within=fields.POSITIVE)
    dropout: float = key(0.0, **fields.DROPOUT)
    stochastic_depth: float = key(0.0, **fields.STOCHASTIC_DEPTH)
    norm_momentum: float = key(0.99, "of the running batch statistics", within=fields.RATE)
    norm_eps: float = key(1e-3, **fields.NORM_EPS)
    head_bias: float = key(0.0, **fields.HEAD_BIAS)
    remat: str = key("none", **fields.REMAT)
    channels: int = key(3, "of the images", within=fields.FROM_1)
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    # In a block as in a ResNet's unit, around a depthwise convolution.
    split_params = (
        (r"conv_expand/kernel", (None, None, "fsdp", "tensor")),
        (r"conv_depthwise/kernel", (None, None, None, "tensor")),
        (r"conv_project/kernel", (None, None, "tensor", "fsdp")),
        (r"se_reduce/kernel", ("fsdp", None)),
        (r"se_expand/kernel", (None, "fsdp")),
    )

    names = EFFICIENTNET_NAMES
    parse = staticmethod(efficientnet_fields)
    has_batch_statistics = True

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        """One block in each stage and an eighth of the width of B0."""
        return {"name": name, "width_factor": 0.125, "depth_factor": 0.1}

    def setup(self) -> None:
        self.trunk = Trunk(
            self.stage_sizes,
            self.root_width,
            self.width,
            self.stochastic_depth,
            self.remat,
            {field: getattr(self, field) for field in
             ("norm_momentum", "norm_eps", "dtype", "constrain")},
        )  # fmt: skip
        self.drop = Dropout(self.dropout)
        if self.num_classes is not None:
            self.head = nn.Dense(
                self.num_classes,
                kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform"),
                bias_init=nn.initializers.constant(self.head_bias),
            )

    def tokens(
        self, images: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """The last feature map (B, N, D)."""
        check_image_shape(images.shape, self.image_size, self.channels)
        x_BHWC = self.trunk(images.astype(self.dtype), mask, train)
        return rearrange(x_BHWC, "b h w d -> b (h w) d")

    def features(
        self, images: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """The mean (B, D) of the last feature map."""
        return self.tokens(images, train=train, mask=mask).mean(axis=1)

    def pre_logits(
        self, images: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """The features: the head is linear."""
        return self.features(images, train=train, mask=mask)

    def __call__(
        self, images: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x_BD = self.features(images, train=train, mask=mask)
        if self.num_classes is None:
            return x_BD
        return self.head(self.drop(x_BD, ("batch", None), train=train))

    @property
    def stage_sizes(self) -> tuple[StageSizes, ...]:
        """The stages of B0 with widths and numbers of blocks scaled; blocks are rounded up."""
        return tuple(
            stage._replace(
                blocks=math.ceil(stage.blocks * self.depth_factor),
                width=round_width(stage.width, self.width_factor),
            )
            for stage in B0_STAGES
        )

    @property
    def root_width(self) -> int:
        """Number of channels of the root."""
        return round_width(_ROOT_WIDTH, self.width_factor)

    @property
    def width(self) -> int:
        """D, the number of channels of the last feature map."""
        return round_width(_LAST_WIDTH, self.width_factor)

    @property
    def token_stride(self) -> tuple[int, int]:
        """Stride of the last feature map in pixels, vertically and horizontally."""
        return _STRIDE, _STRIDE

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The kernel of the root convolution."""
        return params["trunk/conv_root/kernel"]

    @nn.nowrap
    def dtypes_in_use(self, name: str) -> tuple[Any, Any]:
        """Convolutions and dense layers cast their kernels; norms compute in float32."""
        if name.startswith("head/") or not name.endswith("/kernel"):
            return jnp.float32, jnp.float32
        return self.dtype, self.dtype

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer]:
        """The blocks, split over their inner channels; without the few values of their squeeze.

        Each pass sums one map: the forward pass the output, the backward pass the gradient of the
        input.
        """
        del tokens
        assert self.image_size is not None
        sides, channels = [-(-side // 2) for side in self.image_size], self.root_width
        layers: list[SplitLayer] = []
        for stage in self.stage_sizes:
            for number in range(stage.blocks):
                before = math.prod(sides) * channels
                if number == 0:
                    sides = [-(-side // stage.stride) for side in sides]
                channels = stage.width
                output = math.prod(sides) * channels
                part, recomputed = 1 + len(layers), self.remat != "none"
                layers.append(SplitLayer(part, recomputed, (output,), (before,)))
        return layers
