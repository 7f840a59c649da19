"""The cost of a compiled step: FLOPs, model FLOPs utilisation, memory.

XLA's `cost_analysis()` counts the body of a scan only once, so FLOPs are counted on the jaxpr.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval

from vit_jax.devices.chips import CHIPS
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import about, with_known

# Peaks of dense bfloat16 matrix products, FLOP/s per chip, by `jax.Device.device_kind`.
PEAK_FLOPS = {kind: chip.peak_flops for chip in CHIPS.values() for kind in chip.device_kinds}

# Products of (tokens x keys x width of a head) in cuDNN's attention and in its gradients, by JAX's
# primitives and by the functions that XLA calls. The logits that the gradients compute again are
# not counted, as in the plain form.
CUDNN_PRODUCTS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 4,
    "__cudnn$fmhaSoftmax": 2,
    "__cudnn$fmhaSoftmaxBackward": 4,
}


def mfu(flops_per_s: float, *, device_kind: str, num_chips: int) -> float | None:
    """Model FLOPs utilisation, a fraction of the chips' `PEAK_FLOPS`; None for unknown chips.

    `flops_per_s` should exclude the FLOPs that rematerialisation repeats; `num_chips` is
    `chips.count_chips` of the devices.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    if device_kind not in PEAK_FLOPS:
        return None
    return flops_per_s / (num_chips * PEAK_FLOPS[device_kind])


def count_flops(fn: Callable, *args: Any) -> int:
    """FLOPs of the matrix products and convolutions in `fn(*args)`, over all devices.

    A multiply-add counts 2; elementwise operations count nothing. A scan counts its length times
    its body, `shard_map` its body on every device, a Pallas kernel its body at every point of its
    grid, cuDNN's attention the products of its formula, `cond` its costliest branch. Products with
    the zeros that the gradient of a strided convolution inserts do not count; products with padding
    do.

    Args:
      fn: a function; it is traced but not run.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: the jaxpr does not show the work of `fn`: it has a product in a `while` loop or a
        kernel that is not from Pallas (count with the plain form of attention instead).
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def program_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of a traced program without what no output needs, which the compiler leaves out."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, True)
    return jaxpr_flops(live)


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """`count_flops` for a function that is already traced."""
    return sum(_eqn_flops(eqn) for eqn in jaxpr.eqns)


def array_of(var: Any) -> jax.core.ShapedArray:
    """The shape and dtype of an array in a jaxpr; JAX's annotation of `aval` states neither."""
    return var.aval


def _eqn_flops(eqn: JaxprEqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = array_of(eqn.invars[0]).shape
        return 2 * array_of(eqn.outvars[0]).size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = array_of(eqn.invars[1])
        out_features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        pairs = array_of(eqn.outvars[0]).size * (kernel.size // out_features)
        return 2 * pairs // math.prod(params["lhs_dilation"])
    if name == "pallas_call":  # a body for each point of the grid
        return math.prod(params["grid_mapping"].grid) * jaxpr_flops(params["jaxpr"])
    if (kernel := params.get("target_name", name)) in CUDNN_PRODUCTS:
        (B, N, H, K), M = array_of(eqn.invars[0]).shape, array_of(eqn.invars[1]).shape[1]
        return 2 * CUDNN_PRODUCTS[kernel] * B * H * N * M * K
    if name == "ffi_call" or name.startswith("dot_product_attention"):
        raise ValueError(f"FLOPs of the hand-written kernel {name} are unknown; count without it")
    inner = [jaxpr_flops(jaxpr) for jaxpr in jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)
    if name == "while" and any(inner):
        raise ValueError("FLOPs in a while loop are unknown; use jax.lax.scan")
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        is_new = "newly_manual_axes" in params
        axes = params["newly_manual_axes" if is_new else "manual_axes"]  # the second in jax 0.10.0
        return math.prod(params["mesh"].shape[axis] for axis in axes) * sum(inner)
    return sum(inner)


def forward_macs(model: nn.Module) -> int:
    """Multiply-adds of the forward pass of one image of the model's image size.

    Only matrix products and convolutions count, including the patch embedding and the head.
    """
    model = with_known(model, scan=True, remat="none", constrain=unconstrained, ops=PLAIN)
    images = jax.ShapeDtypeStruct((1, *model.image_size, about(model).channels), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    return count_flops(model.apply, variables, images) // 2


class Memory(NamedTuple):
    """Bytes on one device; `total` is the program's peak."""

    arguments: int
    temporaries: int
    total: int


def expected_memory(stats: Any) -> Memory:
    """The memory that XLA reserves; `stats` is `jax.stages.Compiled.memory_analysis()`.

    An output that reuses a donated argument's bytes counts once.
    """
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(arguments, temporaries, arguments + outputs + temporaries)


def format_bytes(num_bytes: int) -> str:
    """Format a size as '13.25 GiB', or '512.0 MiB' below one GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.1f} MiB"
