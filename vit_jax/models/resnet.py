"""The ResNet of BiT and of the hybrids: weight standardisation, group normalisation, stages.

Axes: B images, H rows, W columns, C channels.
Parameters and statistics are float32; the computation uses `dtype`.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.tree import Params
from vit_jax.models.block_ops import Constrain, unconstrained
from vit_jax.models.contract import Model, SplitLayer

# Number of layers -> units of each stage (He et al. 2015, arXiv:1512.03385, table 1; R26: Steiner
# et al. 2021, arXiv:2106.10270; R200: BiT's release).
RESNET_STAGES = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
STEM_WIDTH = 64
NUM_GROUPS = 32  # groups of each group normalisation, at any width
ROOT_STRIDE = 4
EXPANSION = 4  # output channels of a unit / channels of its first convolution
# The kernel axes (inputs, outputs) that are split over the mesh's `tensor` axis.
INPUTS, OUTPUTS = ("tensor", None), (None, "tensor")

_CONVOLUTION = re.compile(r"(?:^|/)conv\w*/kernel$")
_UNIT = re.compile(r"(?:.*/)?stage_(\d+)/layer_(\d+)/")


def map_stride(stages: tuple[int, ...]) -> int:
    """The stride of the last stage's feature map in pixels of the image."""
    return ROOT_STRIDE * 2 ** max(len(stages) - 1, 0)


def find_stage_faults(stages: Any, stem_width: int) -> list[str]:
    """The faults of a ResNet's sizes."""
    faults = []
    if any(type(units) is not int or units < 1 for units in stages):
        faults.append(f"stages={stages}: needs the units of each stage, e.g. (3, 4, 6, 3)")
    if stem_width < 1 or stem_width % NUM_GROUPS:
        faults.append(
            f"stem_width={stem_width}: needs a multiple of {NUM_GROUPS}, the groups of each norm"
        )
    return faults


class ResNetModel(Model):
    """The layers of a model's ResNet, whose sizes are its fields `stages` and `stem_width`."""

    @nn.nowrap
    def make_trunk(self, convention: "ResNetConvention") -> "Trunk":
        """The ResNet of the model's fields."""
        fields = {name: getattr(self, name) for name in ("scan", "remat", "dtype", "constrain")}
        return Trunk(convention, self.stages, self.stem_width, **fields)

    @nn.nowrap
    def dtypes_in_use(self, name: str) -> tuple[Any, Any]:
        """A kernel of a convolution is standardised in float32."""
        if _CONVOLUTION.search(name):
            return jnp.float32, self.dtype
        return super().dtypes_in_use(name)

    @nn.nowrap
    def reads_again(self, name: str) -> bool:
        """As `Model`; a unit may also run in a loop, see `Stage`."""
        unit = _UNIT.match(name)
        if unit is None:
            return super().reads_again(name)
        loops = self.scan and int(unit[2]) > 0 and scans_units(self.stages[int(unit[1])])
        return loops or self.remat != "none"

    @nn.nowrap
    def split_units(self) -> list[SplitLayer]:
        """`split_layers` of the units of all stages, as part 0.

        A unit is split over the channels between its convolutions. Its forward pass gathers the
        first convolution's output and sums the last one's; its backward pass sums the gradients of
        the inputs of both.
        """
        assert self.image_size is not None
        sides, channels = [-(-side // ROOT_STRIDE) for side in self.image_size], self.stem_width
        units, recomputed = [], self.remat != "none"
        for stage, depth in enumerate(self.stages):
            positions, width = math.prod(sides), self.stem_width * 2**stage
            if stage:
                sides = [-(-side // 2) for side in sides]
            for _ in range(depth):
                inner, before = positions * width, positions * channels
                positions, channels = math.prod(sides), width * EXPANSION
                output = positions * channels
                units.append(SplitLayer(0, recomputed, (output,), (inner, before), (inner,)))
        return units


def _by_std(kernel: jax.Array) -> jax.Array:
    return _centred(kernel) / (jnp.std(kernel, axis=(0, 1, 2), keepdims=True) + 1e-5)


def _by_variance(kernel: jax.Array) -> jax.Array:
    return _centred(kernel) * jax.lax.rsqrt(jnp.var(kernel, (0, 1, 2), keepdims=True) + 1e-10)


def _centred(kernel: jax.Array) -> jax.Array:
    return kernel - jnp.mean(kernel, axis=(0, 1, 2), keepdims=True)


class ResNetConvention(NamedTuple):
    """The differences between the two published kinds of these ResNets.

    standardize: kernel (h, w, in, out) -> kernel with mean 0 and variance 1 for each output
      (Qiao et al. 2019, arXiv:1903.10520, Eqs. 4-6).
    norm_eps: epsilon of group normalisation.
    pads_evenly: pad k // 2 zeros on each side, also for the max-pooling, where a padded zero can be
      the maximum of its window; False pads as XLA's "SAME" does: as little as possible, the odd
      zero at the end.
    norms_first: a norm and a ReLU precede each convolution after the root, and end the network;
      False: a norm follows each convolution.
    """

    standardize: Callable[[jax.Array], jax.Array]
    norm_eps: float
    pads_evenly: bool
    norms_first: bool


HYBRID = ResNetConvention(_by_std, norm_eps=1e-6, pads_evenly=False, norms_first=False)
BIT = ResNetConvention(_by_variance, norm_eps=1e-5, pads_evenly=True, norms_first=True)


class StdConv(nn.Module):
    """A `size` x `size` convolution with a standardised kernel and no bias.

    `split` names the mesh axes over which the computation splits the kernel's inputs and outputs;
    the kernel is first gathered over all other axes. Without this constraint XLA's partitioner
    (jax 0.10.2) computes wrong sums on meshes with three axes; see
    tests/devices/test_resnet_sharding.py.

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, features), rounded up.
    """

    features: int
    size: int
    convention: ResNetConvention
    stride: int = 1
    dtype: Any = jnp.float32
    split: tuple[str | None, str | None] = (None, None)
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x_BHWC.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        kernel = self.convention.standardize(kernel).astype(self.dtype)
        kernel = self.constrain(kernel, (None, None, *self.split))
        half = self.size // 2
        return jax.lax.conv_general_dilated(
            x_BHWC.astype(self.dtype),
            kernel,
            (self.stride, self.stride),
            [(half, half)] * 2 if self.convention.pads_evenly else "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


def group_norm(convention: ResNetConvention, dtype: Any, name: str, **fields: Any) -> nn.Module:
    """A group normalisation (Wu & He 2018, arXiv:1803.08494) with one scale and bias a channel."""
    eps = convention.norm_eps
    return nn.GroupNorm(NUM_GROUPS, epsilon=eps, dtype=dtype, name=name, **fields)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with norms, and a residual.

    Where norms follow the convolutions, the last norm's scale starts at 0, so the unit starts as
    its shortcut.

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, 4 width), rounded up.
    """

    convention: ResNetConvention
    width: int
    stride: int
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        norms_first, width_out = self.convention.norms_first, EXPANSION * self.width
        conv = partial(StdConv, convention=self.convention, dtype=self.dtype,
                       constrain=self.constrain)  # fmt: skip
        norm = partial(group_norm, self.convention, self.dtype)
        inner, middle = ("norm2", "norm3") if norms_first else ("norm1", "norm2")
        y_BHWC = nn.relu(norm("norm1")(x_BHWC)) if norms_first else x_BHWC
        shortcut_BHWC = x_BHWC
        if x_BHWC.shape[-1] != width_out or self.stride > 1:
            shortcut_BHWC = conv(width_out, 1, stride=self.stride, name="conv_proj")(y_BHWC)
            if not norms_first:
                shortcut_BHWC = norm("norm_proj")(shortcut_BHWC)
        y_BHWC = nn.relu(norm(inner)(conv(self.width, 1, split=OUTPUTS, name="conv1")(y_BHWC)))
        y_BHWC = self.constrain(y_BHWC, ("batch", None, None, "tensor"))
        y_BHWC = conv(self.width, 3, stride=self.stride, split=OUTPUTS, name="conv2")(y_BHWC)
        y_BHWC = nn.relu(norm(middle)(y_BHWC))
        y_BHWC = self.constrain(y_BHWC, ("batch", None, None, "tensor"))
        y_BHWC = conv(width_out, 1, split=INPUTS, name="conv3")(y_BHWC)
        if not norms_first:
            y_BHWC = norm("norm3", scale_init=nn.initializers.zeros)(y_BHWC)
        y_BHWC = shortcut_BHWC + y_BHWC
        y_BHWC = y_BHWC if norms_first else nn.relu(y_BHWC)
        return self.constrain(y_BHWC, ("batch", None, None, None))


def _saves_convolutions(primitive: jax.extend.core.Primitive, *_: object, **__: object) -> bool:
    return primitive.name == "conv_general_dilated"


# As `layers.REMAT_POLICIES`, for units whose products are convolutions.
CONVOLUTION_REMAT_POLICIES = {
    "dots": _saves_convolutions,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def scans_units(depth: int) -> bool:
    """Whether the units after the first of a stage of `depth` units run in a loop under `scan`."""
    return depth > 2


class Stage(nn.Module):
    """A sequence of `depth` units, `layer_0`, `layer_1`, ...; the first has the stride.

    With `scan`, the units after the first are compiled once and run in a loop. Their parameters
    stay apart, so both forms have the same parameters; each call stacks them. The loop's backward
    pass computes norms and ReLUs again also without remat: keeping them took 143 instead of 75
    Mcycles and 7.4 instead of 1.8 GB for R50x1 (libtpu 0.0.52, v5e:4x4, 64 images a chip).

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, 4 width), rounded up.
    """

    convention: ResNetConvention
    depth: int
    width: int
    stride: int
    scan: bool = False
    remat: str = "none"
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        unit = Bottleneck
        if self.remat != "none":
            unit = nn.remat(unit, policy=CONVOLUTION_REMAT_POLICIES[self.remat])
        make = partial(unit, self.convention, self.width, dtype=self.dtype,
                       constrain=self.constrain)  # fmt: skip
        scans = self.scan and scans_units(self.depth) and not self.is_initializing()
        for i in range(1 if scans else self.depth):
            stride = self.stride if i == 0 else 1
            x_BHWC = make(stride=stride, name=f"layer_{i}")(x_BHWC)
        return self._scan_others(x_BHWC) if scans else x_BHWC

    @nn.nowrap
    def _scan_others(self, x_BHWC: jax.Array) -> jax.Array:
        """Apply the units after the first, which all have the same shapes."""
        params = self.variables["params"]
        others = [params[f"layer_{i}"] for i in range(1, self.depth)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *others)
        sizes = self.convention, self.width, 1
        unit = Bottleneck(*sizes, self.dtype, self.constrain, parent=None)

        def apply(x_BHWC: jax.Array, params: Params) -> tuple[Any, None]:
            return unit.apply({"params": params}, x_BHWC), None

        # Outside a loop the compiler itself decides to compute norms and ReLUs again.
        policy = CONVOLUTION_REMAT_POLICIES["dots" if self.remat == "none" else self.remat]
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        return jax.lax.scan(apply, x_BHWC, stacked)[0]


class Trunk(nn.Module):
    """A root of stride 4 (convolution, max-pooling), then the stages.

    Each stage after the first halves the resolution and doubles the width.

    Shapes: (B, H, W, 3) -> (B, H / stride, W / stride, C), rounded up; C is the width of
      the last stage, or `stem_width` without stages.
    """

    convention: ResNetConvention
    stages: tuple[int, ...]
    stem_width: int
    scan: bool = False
    remat: str = "none"
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        convention, fields = self.convention, {"dtype": self.dtype, "constrain": self.constrain}
        root = StdConv(self.stem_width, 7, convention, stride=2, name="conv_root", **fields)
        norm = partial(group_norm, convention, self.dtype)
        x_BHWC = root(images)
        if not convention.norms_first:
            x_BHWC = nn.relu(norm("norm_root")(x_BHWC))
        if convention.pads_evenly:
            x_BHWC = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)))
        padding = "VALID" if convention.pads_evenly else "SAME"
        x_BHWC = nn.max_pool(x_BHWC, window_shape=(3, 3), strides=(2, 2), padding=padding)
        x_BHWC = self.constrain(x_BHWC, ("batch", None, None, None))
        fields |= {"scan": self.scan, "remat": self.remat}
        for i, depth in enumerate(self.stages):
            sizes = depth, self.stem_width * 2**i, 2 if i else 1
            x_BHWC = Stage(convention, *sizes, name=f"stage_{i}", **fields)(x_BHWC)
        return nn.relu(norm("norm")(x_BHWC)) if convention.norms_first else x_BHWC
