"""Which operations a model computes with, by the devices of its mesh.

Kernels see the share of one device: they run under `jax.shard_map`, images over the batch axes and
heads over `tensor`.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.devices.cudnn import described_attention
from vit_jax.devices.gpus import has_cuda
from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.devices.random_bytes import draw_bytes_by_device
from vit_jax.devices.sharding import free_axes, on_shares
from vit_jax.models.block_ops import (
    PLAIN,
    BlockOps,
    RowKernels,
    add_bias_on_tpu,
    multiply_on_cpu,
    repeat_in_order,
)
from vit_jax.models.contract import about, field_names
from vit_jax.models.dot_product import choose_attention
from vit_jax.models.fast_block import FastBlock
from vit_jax.models.kernels import long_attention, mlp, projections, short_attention
from vit_jax.models.kernels.rows import MOST_ROWS
from vit_jax.models.layers import EncoderBlock
from vit_jax.models.packing import Parts, attend_apart
from vit_jax.models.rotary import turn

logger = logging.getLogger("vit_jax")

# Tokens, with padding: up to the first the whole of an image fits, from the second on blocks pay.
SHORT, LONG = 640, 1000
_MULTIPLE = short_attention.SUBLANES
# JAX 0.10.2 refuses the gradient of cuDNN's attention for an odd number of tokens. Padding in each
# attention instead takes 3 to 21 % more temporaries (docs/explanation/plans.md).
_EVEN = 2
_BFLOAT16 = 8.0  # compute capability from which GPUs, and cuDNN's attention, compute in bfloat16

# VMEM of one core in MiB, by `pltpu.get_tpu_info_for_chip`, of chips with kernels of rows. v4 has
# too little; there and on v5p, a kernel whose programs run in order would use one of two cores.
_VMEM_MIB = {"TPU v5 lite": 128, "TPU v5e": 128, "TPU v6 lite": 128,
             "TPU v6e": 128, "TPU7x": 64}  # fmt: skip

# The values that the fields of a model with kernels of rows may have. The policy "dots" sees no
# product in a kernel; a kernel would compute the gradients that adapters spare.
_WITH_ROWS: dict[str, tuple] = {
    "block_class": (EncoderBlock,),
    "remat": ("none", "full"),
    "parallel": (False,),
    "lora_rank": (None,),
}


def choose_ops(model: nn.Module, mesh: Mesh, kernels: str = "auto") -> nn.Module:
    """`model` with its ops on the devices of `mesh`; `kernels` is the config's.

    They are the form of that name, see `find_forms`. A form that these devices do not have, "auto"
    and "calculated" stand for the form that is fastest by calculation. One line of the log then
    says why attention has no kernel.
    """
    model = in_dtype_of(mesh.devices.flat[0], model)
    if "ops" not in field_names(type(model)):
        return model
    forms = find_forms(model, mesh)
    name = kernels if kernels in forms else fastest(forms)
    platform = mesh.devices.flat[0].platform
    reason = None
    if kernels != "plain" and platform != "cpu" and forms[name].attention_kernel is None:
        reason = why_plain(model, mesh, on_tpu=platform == "tpu")
    if reason is not None:
        _say_plain(reason)
    return model.clone(ops=forms[name])


def find_forms(model: nn.Module, mesh: Mesh, platform: str | None = None) -> dict[str, BlockOps]:
    """The forms in which blocks of `model` can compute on the devices of `mesh`, by name.

    `platform` takes the place of the devices' own.

    The last one is the fastest by calculation:

    plain: all is left to XLA.
    products: the gradients of weights in the form that CPUs compute best.
    biases: the gradients of biases by products; on TPUs.
    attention: `biases`, and attention by kernels.
    rows: `attention`, and norms, projections and MLPs by kernels.
    norms: norms of scanned layers computed again in the backward pass; on GPUs.
    cudnn: `norms`, and attention by cuDNN.

    Only on CPUs JAX's default generator draws the masks of dropout.
    """
    platform = platform or mesh.devices.flat[0].platform
    forms = {"plain": BlockOps(attend=choose_attention(platform))}
    if platform == "cpu":
        return forms | {"products": dataclasses.replace(forms["plain"], multiply=multiply_on_cpu)}
    forms["plain"] = dataclasses.replace(
        forms["plain"], draw_bytes=partial(draw_bytes_by_device, mesh=mesh)
    )
    more = {"tpu": tpu_forms, "gpu": gpu_forms}.get(platform)
    return forms if more is None else forms | more(model, mesh, forms["plain"])


def fastest(forms: Mapping[str, BlockOps]) -> str:
    """The name of the form that is fastest by calculation; see `find_forms`."""
    return [*forms][-1]


def has_kernels(model: nn.Module) -> bool:
    """Whether `choose_ops` gave the model a kernel."""
    return getattr(model, "ops", PLAIN).attention_kernel is not None


def has_row_kernels(model: nn.Module, mesh: Mesh) -> bool:
    """Whether both kernels of rows take the blocks of `model` on `mesh`, in blocks of some rows."""
    if getattr(model, "ops", PLAIN).rows is None or model.dtype != jnp.bfloat16:
        return False
    if model.qk_norm or model.mlp_norm:
        return False
    width, vmem = about(model).width, _vmem_bytes(mesh)
    found = mlp.find_blocks(MOST_ROWS, vmem, width, about(model).mlp_dim, model.gated_mlp)
    return found is not None and projections.find_blocks(MOST_ROWS, vmem, width) is not None


def gpu_forms(model: nn.Module, mesh: Mesh, plain: BlockOps = PLAIN) -> dict[str, BlockOps]:
    """The forms of `model` on GPUs beside `plain`; see `find_forms`."""
    repeat = partial(_repeat_on_gpu, mesh=mesh)
    again = about(model).scan  # unrolled, it saves 1 to 3 % of memory and costs as much time
    forms = {"norms": dataclasses.replace(plain, recompute_norms=again, repeat=repeat)}
    if why_plain(model, mesh, on_tpu=False) is None:
        attend = partial(_cudnn_attention, mesh=mesh)
        forms["cudnn"] = dataclasses.replace(
            forms["norms"], attention_kernel=attend, token_multiple=_EVEN
        )
    return forms


def in_dtype_of(device: Any, model: nn.Module) -> nn.Module:
    """`model` in float32 on a GPU without bfloat16, such as a T4."""
    stated = str(getattr(device, "compute_capability", ""))  # AMD's is a name
    capability = float(stated) if re.fullmatch(r"\d+\.\d+", stated) else _BFLOAT16
    is_able = device.platform != "gpu" or capability >= _BFLOAT16
    if is_able or getattr(model, "dtype", None) != jnp.bfloat16:
        return model
    told = f"a GPU of compute capability {stated} computes no bfloat16: the model computes in "
    _say_once(logging.WARNING, f"{told}float32")
    return model.clone(dtype=jnp.float32)


def tpu_forms(model: nn.Module, mesh: Mesh, plain: BlockOps = PLAIN) -> dict[str, BlockOps]:
    """The forms of `model` on TPUs beside `plain`; see `find_forms`."""
    forms = {"biases": dataclasses.replace(plain, add_bias=add_bias_on_tpu)}
    if why_plain(model, mesh, on_tpu=True) is not None:
        return forms
    forms["attention"] = dataclasses.replace(
        forms["biases"],
        attention_kernel=partial(_tpu_attention, mesh=mesh),
        token_multiple=_MULTIPLE,
    )
    if all(getattr(model, field, values[0]) in values for field, values in _WITH_ROWS.items()):
        finds = partial(_find_mlp_kernel, mesh=mesh), partial(_find_projections_kernel, mesh=mesh)
        rows = RowKernels(FastBlock, *finds)
        forms["rows"] = dataclasses.replace(forms["attention"], rows=rows)
    return forms


def why_plain(model: nn.Module, mesh: Mesh, *, on_tpu: bool) -> str | None:
    """Why the attention of `model` has no kernel on TPUs, or on GPUs; None: it has one."""
    shape = about(model).attention_shape
    if isinstance(shape, str):
        return shape
    heads, width, tokens, dropout, relative = shape
    if relative:
        return f"model.pos_embed={getattr(model, 'pos_embed', None)} adds to the logits"
    if dropout > 0:
        return f"model.attention_dropout={dropout} drops weights"
    if width % 8:
        return f"heads are {width} wide, which 8 does not divide"
    if heads % mesh.shape["tensor"]:
        return f"mesh.tensor={mesh.shape['tensor']} does not divide model.num_heads={heads}"
    if on_tpu and tokens is not None and SHORT < tokens < LONG:
        return f"{tokens} tokens lie between {SHORT} and {LONG}"
    if not on_tpu and width > 128:
        return f"heads are {width} wide; cuDNN takes up to 128"
    if not on_tpu and model.dtype != jnp.bfloat16:
        return f"cuDNN computes in bfloat16, not in model.dtype={jnp.dtype(model.dtype).name}"
    is_here = isinstance(mesh.devices.flat[0], jax.Device)  # not a plan's description
    if not on_tpu and is_here and not has_cuda():
        return "JAX's plugin for CUDA is not installed, and cuDNN computes it"
    return None


@cache
def _say_once(level: int, text: str) -> None:
    """Log what many models of a plan, and each layer that is traced, have to say."""
    logger.log(level, text)


def _say_plain(reason: str) -> None:
    _say_once(logging.INFO, f"attention computes without kernel: {reason}")


def _tpu_attention(
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
    turns: jax.Array | None,
    num_keys: int | jax.Array | None,
    parts: Parts = (),
    *,
    mesh: Mesh,
) -> jax.Array:
    """`block_ops.AttentionKernel` by the kernel for so many tokens, over the devices of `mesh`."""
    _, tokens, *head = qkv[0].shape
    if parts and tokens > SHORT:
        kernel = partial(_tpu_attention, mesh=mesh)
        return _attend_apart(kernel, qkv, biases, turns, num_keys, parts)
    numbers = (num_keys,) if isinstance(num_keys, jax.Array) else ()
    of_all = tokens if num_keys is None or isinstance(num_keys, jax.Array) else num_keys
    if tokens <= SHORT:
        biases = tuple(jnp.zeros(head) if bias is None else bias for bias in biases)
        attend = _on_devices(partial(_short_attention, num_keys=of_all, parts=parts), mesh)
        return attend(qkv, biases, () if turns is None else (turns,), numbers)
    q_BNHK, *keys_values = _plain_qkv(qkv, biases, turns)
    if tokens < LONG:  # images of a size that was not known before
        _say_plain(f"{tokens} tokens lie between {SHORT} and {LONG}")
        keys_values = [x_BMHK[:, :of_all] for x_BMHK in keys_values]
        num_keys_B = numbers[0] if numbers else None
        return choose_attention("tpu")(q_BNHK, *keys_values, num_keys_B=num_keys_B)

    def attend_long(qkv: tuple[jax.Array, ...], _: tuple[()], numbers: tuple[Any, ...]) -> Any:
        q_BNHK, k_BMHK, v_BMHK = qkv
        num_keys = numbers[0] if numbers else of_all
        return long_attention.attention(q_BNHK, k_BMHK, v_BMHK, num_keys)

    return _on_devices(attend_long, mesh)((q_BNHK, *keys_values), (), numbers)


def _cudnn_attention(
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
    turns: jax.Array | None,
    num_keys: int | jax.Array | None,
    parts: Parts = (),
    *,
    mesh: Mesh,
) -> jax.Array:
    """`block_ops.AttentionKernel` by cuDNN.

    The call names cuDNN; without the name JAX would choose another implementation silently. Queries
    of padding attend to the tokens that count, so that their outputs are finite.
    """
    if parts:
        kernel = partial(_cudnn_attention, mesh=mesh)
        return _attend_apart(kernel, qkv, biases, turns, num_keys, parts)

    def attend(qkv: tuple[jax.Array, ...], _: tuple[()], lengths: tuple[jax.Array, ...]) -> Any:
        q_BNHK, k_BMHK, v_BMHK = qkv
        if not has_cuda():  # a plan by calculation
            return described_attention(q_BNHK, k_BMHK, v_BMHK)
        B, M = k_BMHK.shape[:2]
        lengths_B = lengths[0] if lengths else None
        if isinstance(num_keys, int) and num_keys < M:  # the others are padding
            lengths_B = jnp.full(B, num_keys, jnp.int32)
        return jax.nn.dot_product_attention(
            q_BNHK, k_BMHK, v_BMHK, key_value_seq_lengths=lengths_B, implementation="cudnn"
        )

    lengths = (num_keys,) if isinstance(num_keys, jax.Array) else ()
    return _on_devices(attend, mesh)(_plain_qkv(qkv, biases, turns), (), lengths)


def _attend_apart(
    kernel: Callable[..., jax.Array],
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
    turns: jax.Array | None,
    num_keys: int | jax.Array | None,
    parts: Parts,
) -> jax.Array:
    """The pictures of rows, cut apart, by a kernel without `parts`."""

    def attend(*arrays: Any) -> jax.Array:
        *qkv, turns, num_keys = arrays
        return kernel(tuple(qkv), biases, turns, num_keys)

    return attend_apart(attend, parts, (*qkv, turns), num_keys)


def _plain_qkv(
    qkv: tuple[jax.Array, ...], biases: tuple[jax.Array | None, ...], turns: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values with their biases; queries and keys turned."""
    q_BNHK, k_BMHK, v_BMHK = (
        x_BNHK if bias_HK is None else x_BNHK + bias_HK.astype(x_BNHK.dtype)[None, None]
        for x_BNHK, bias_HK in zip(qkv, biases, strict=True)
    )
    if turns is not None:
        q_BNHK, k_BMHK = turn(q_BNHK, turns), turn(k_BMHK, turns)
    return q_BNHK, k_BMHK, v_BMHK


def _on_devices(attend: Callable, mesh: Mesh) -> Callable:
    """`attend` on every device's images and heads.

    It takes arrays (B, N, H, K), then of the heads (H, K), then of the images (B or 1, ...).
    """
    images, heads = P(BATCH_AXES, None, "tensor", None), P("tensor", None)

    def on_all(*args: tuple[jax.Array, ...]) -> jax.Array:
        more = (tuple(P(BATCH_AXES if len(x) > 1 else None) for x in arg) for arg in args[2:])
        specs = (images, heads, *more)
        return on_shares(attend, mesh, specs, images)(*args)

    return on_all


def _repeat_on_gpu(
    x_1ND: jax.Array, rows: int, dtype: jax.typing.DTypeLike, *, mesh: Mesh
) -> jax.Array:
    """`block_ops.Repeat`, whose gradients keep the order of their axes in memory.

    XLA for GPUs (jax 0.10.2) would put the axis that is summed last, in all tokens of a model, and
    then transpose them before and after each dense layer. Each device states the order of its own
    rows. If the program stated it for all rows, XLA would gather them on each device.
    """

    def in_order(grad_BND: jax.Array) -> jax.Array:
        state = partial(with_layout_constraint, layouts=Layout((0, 1, 2)))
        return _on_rows(state, mesh, (P(BATCH_AXES),))(grad_BND)

    return repeat_in_order(x_1ND, rows, dtype, in_order)


def _find_mlp_kernel(x_BND: jax.Array, hidden: int, gated: bool, *, mesh: Mesh) -> Callable | None:
    """`RowKernels.find_mlp` on the devices of `mesh`."""
    found = mlp.find_blocks(*_rows_in_vmem(x_BND, mesh), x_BND.shape[-1], hidden, gated)
    if found is None:
        return None
    blocks, pieces = found

    def kernel(
        x_RD: jax.Array,
        params: tuple[jax.Array, ...],
        drawn: tuple[jax.Array | None, ...],
        **fields: Any,
    ) -> jax.Array:
        spec, rows = mlp.Spec(**fields, blocks=blocks, pieces=pieces), P(BATCH_AXES)
        args = x_RD, mlp.Params(*params), mlp.Drawn(*drawn)
        return _on_rows(partial(mlp.mlp, spec=spec), mesh, (rows, P(), rows))(*args)

    return kernel


def _find_projections_kernel(x_BND: jax.Array, *, mesh: Mesh) -> Callable | None:
    """`RowKernels.find_projections` on the devices of `mesh`."""
    blocks = projections.find_blocks(*_rows_in_vmem(x_BND, mesh), x_BND.shape[-1])
    if blocks is None:
        return None

    def kernel(*args: Any, **fields: Any) -> Any:
        spec = projections.Spec(**fields, blocks=blocks)
        compute = partial(projections.project, spec=spec)
        return _on_rows(compute, mesh, (P(BATCH_AXES), P(), P()))(*args)

    return kernel


def _rows_in_vmem(x_BND: jax.Array, mesh: Mesh) -> tuple[int, int]:
    """The rows of a device, 0 where it has no kernel of rows, and the bytes of a core's VMEM."""
    B, N, _ = x_BND.shape
    ways = {axis: mesh.shape[axis] for axis in free_axes(mesh)}
    devices = math.prod(ways.values())
    is_split = max(ways.get("fsdp", 1), ways.get("tensor", 1)) > 1 or B % devices
    B = 0 if is_split else B // devices
    if x_BND.dtype != jnp.bfloat16:
        B = 0
    return B * N, _vmem_bytes(mesh)


def _vmem_bytes(mesh: Mesh) -> int:
    """The bytes of a core's VMEM; 0 where there are no kernels of rows."""
    return _VMEM_MIB.get(mesh.devices.flat[0].device_kind, 0) * 2**20


def _on_rows(compute: Callable, mesh: Mesh, specs: tuple) -> Callable:
    """`compute` on every device's rows."""
    return on_shares(compute, mesh, specs, P(BATCH_AXES))


def _short_attention(
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    turns: tuple[jax.Array, ...],
    numbers: tuple[jax.Array, ...],
    *,
    num_keys: int,
    parts: Parts,
) -> jax.Array:
    B, N, H, K = qkv[0].shape
    sizes = short_attention.Sizes(H, num_keys, parts)
    qkv = tuple(x.reshape(B, N, H * K) for x in qkv)
    biases = tuple(b.reshape(H * K) for b in biases)
    turns_BKN = jnp.swapaxes(turns[0], 1, 2) if turns else None
    num_keys_B = numbers[0] if numbers else None
    out_BNW = short_attention.attention(qkv, biases, turns_BKN, num_keys_B, sizes)
    return out_BNW.reshape(B, N, H, K)
