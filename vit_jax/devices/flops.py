"""What a compiled step costs: floating-point operations, their share of the chip's peak, memory.

XLA's `cost_analysis()` counts the body of a scan once, so operations are counted on the jaxpr.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from vit_jax.devices.chips import CHIPS
from vit_jax.models.deit import DeiT
from vit_jax.models.fields import with_known
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.layers import unconstrained
from vit_jax.models.vit import ViT

# Peaks of dense bfloat16 matrix products, FLOP/s per chip, by `jax.Device.device_kind`.
PEAK_FLOPS = {kind: chip.peak_flops for chip in CHIPS.values() for kind in chip.device_kinds}


def mfu(flops_per_s: float, *, device_kind: str, num_chips: int) -> float | None:
    """Model FLOPs utilisation: the share of the chips' `PEAK_FLOPS`; None for unknown chips.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B. `flops_per_s` should leave out
    what rematerialisation computes again; `num_chips` is `topologies.count_chips` of the devices.
    """
    if device_kind not in PEAK_FLOPS:
        return None
    return flops_per_s / (num_chips * PEAK_FLOPS[device_kind])


def count_flops(fn: Callable, *args: Any) -> int:
    """FLOPs of the matrix products and convolutions in `fn(*args)`, over all devices.

    A multiply-add is 2. Elementwise work is not counted. A scan counts its length times its body,
    `shard_map` its body on every device, `cond` its costliest branch. Products with the zeros that
    a strided convolution's gradient inserts are left out; those with padding are not.

    Args:
      fn: traced, never run.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: `fn` holds work that its jaxpr does not tell: a product in a `while` loop, or a
        hand-written kernel (count with the plain implementation of attention instead).
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """`count_flops` of what is traced already."""
    return sum(_eqn_flops(eqn) for eqn in jaxpr.eqns)


def _eqn_flops(eqn: JaxprEqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        out_features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        pairs = eqn.outvars[0].aval.size * (kernel.size // out_features)
        return 2 * pairs // math.prod(params["lhs_dilation"])
    if name in ("pallas_call", "ffi_call") or name.startswith("dot_product_attention"):
        raise ValueError(f"FLOPs of the hand-written kernel {name} are unknown; count without it")
    inner = [jaxpr_flops(jaxpr) for jaxpr in jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)
    if name == "while" and sum(inner):
        raise ValueError("FLOPs in a while loop are unknown; use jax.lax.scan")
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        axes = params["newly_manual_axes"]
        return math.prod(params["mesh"].shape[axis] for axis in axes) * sum(inner)
    return sum(inner)


def forward_macs(model: nn.Module) -> int:
    """Multiply-adds of a forward pass of one image, of the model's image size.

    Matrix products and convolutions alone, the embedding of patches and the head among them.
    """
    model = with_known(model, scan=True, remat="none", constrain=unconstrained)
    images = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    return count_flops(model.apply, variables, images) // 2


def vit_flops(model: nn.Module) -> int | None:
    """FLOPs of a forward and a backward pass of one image, by the sizes of a ViT alone.

    None for a model with a ResNet in it, or with relative positions.

    Of N tokens of width D a block's products are 2 N D (4 D + 2 F) + 4 N^2 D, F the width of its
    MLP; the backward pass makes each twice, but for the gradient by the image's pixels.
    """
    if not isinstance(model, ViT) or isinstance(model, HybridViT) or model.pos_embed == "relative":
        return None
    height, width = model.image_size
    patch_height, patch_width = model.patch_size
    patches = (height // patch_height) * (width // patch_width)
    tokens = patches + model.num_prefix_tokens
    d, f = model.width, model.mlp_dim
    embedding = 2 * patches * patch_height * patch_width * 3 * d
    layers = model.depth * (2 * tokens * d * (4 * d + 2 * f) + 4 * tokens**2 * d)
    heads = 2 if isinstance(model, DeiT) and model.distillation_head else 1
    head = heads * 2 * d * (model.num_classes or 0) + 2 * d**2 * bool(model.hidden_head)
    if model.pool == "map":  # one query: the probe
        head += 2 * d * (2 * d + 2 * f) + 4 * tokens * d**2 + 4 * tokens * d
    return 2 * embedding + 3 * (layers + head)


class Memory(NamedTuple):
    """Bytes on one device; `total` is what the program needs at once."""

    arguments: int
    temporaries: int
    total: int


def expected_memory(stats: Any) -> Memory:
    """What XLA reserves, from `compiled.memory_analysis()` of a `jax.stages.Compiled`.

    An output that takes over a donated argument's bytes counts once.
    """
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(arguments, temporaries, arguments + outputs + temporaries)


def format_bytes(num_bytes: int) -> str:
    """'13.25 GiB', or '512.0 MiB' below one GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.1f} MiB"
