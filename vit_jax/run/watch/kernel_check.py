"""The kernels of a model against the forms without, on random numbers, before the first step."""

import functools
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.devices.kernels import has_kernels
from vit_jax.devices.mesh import batch_sharding
from vit_jax.job import watchdog
from vit_jax.models.block_ops import BlockOps
from vit_jax.models.contract import AttentionShape, about
from vit_jax.models.dot_product import plain_attention
from vit_jax.models.kernels.rows import Blocks
from vit_jax.models.layers import EncoderBlock

logger = logging.getLogger("vit_jax")

# A kernel may err by so much more than the plain form, both against float32.
_FACTOR, _MARGIN = 3.0, 1e-3


def check_kernels(model: nn.Module, mesh: Mesh) -> None:
    """Runs a block of `model` once with its kernels and once without, on its mesh.

    Raises:
      InputError: an output or a gradient of the two differs by more than rounding.
    """
    if not has_kernels(model):
        return
    with watchdog.phase("compile"), jax.set_mesh(mesh):
        measure = functools.partial(_measure, model, mesh)
        found = jax.jit(measure, out_shardings=NamedSharding(mesh, P()))()
    kernel, plain = ({n: float(x) for n, x in tree.flatten_names(each).items()} for each in found)
    # Not bounded, which NaN is not either.
    wrong = [n for n, error in kernel.items() if not error <= _FACTOR * plain[n] + _MARGIN]
    worst = max(wrong or kernel, key=lambda name: kernel[name])
    if wrong:
        raise InputError(
            f"model.kernels=auto: on {mesh.devices.flat[0].device_kind} a kernel computes {worst} "
            f"with a relative error of {kernel[worst]:.2g}, and XLA with {plain[worst]:.2g} "
            f"({len(wrong)} of {len(kernel)} arrays differ); set --config.model.kernels=plain"
        )
    logger.info("kernels agree with the plain form: a block errs by %.2g at most", kernel[worst])


def _measure(model: nn.Module, mesh: Mesh) -> tuple[Any, Any]:
    """The errors of a block's output and gradients with kernels, and without: two trees.

    Each batch way has as few images as fill blocks of the kernels of rows, if there are any, else
    one. A model for images of any size gets 14 x 14 patches.
    """
    shape = about(model).attention_shape
    assert isinstance(shape, AttentionShape)
    num_tokens = shape.num_tokens or 14 * 14 + model.num_prefix_tokens
    padded = num_tokens + -num_tokens % model.ops.token_multiple
    fields = model.block_fields() | {"dropout": 0.0, "attention_dropout": 0.0}
    block = getattr(model.ops.rows, "block", EncoderBlock)(**fields, num_tokens=num_tokens)
    plain = EncoderBlock(**fields | {"ops": BlockOps(attend=plain_attention)})
    exact = plain.clone(dtype=jnp.float32)

    keys = jax.random.split(jax.random.key(0), 3)
    images = mesh.size // mesh.shape["tensor"]
    if model.ops.rows is not None:
        # The number of tokens is a multiple of 8 here: at most 32 images are needed.
        images *= next(n for n in range(1, 33) if Blocks.fitting(n * padded, 0, 0, 0))
    x, g = (jax.random.normal(key, (images, padded, model.width)) for key in keys[:2])
    x, g = (jax.lax.with_sharding_constraint(each, batch_sharding(mesh)) for each in (x, g))
    shapes = jax.eval_shape(
        lambda x: plain.init(keys[2], x, 0.0, False)["params"], x[:, :num_tokens]
    )
    # Kernels keep the size of their input.
    params = jax.tree.map(
        lambda x: x * x.shape[0] ** -0.5 if x.ndim > 1 else x,
        optax.tree.random_like(keys[2], shapes),
    )

    turns = None
    by_position = getattr(getattr(model, "position_class", None), "acts_on", None) == "turns"
    if by_position or getattr(model, "rotary", None) is not None:
        angles = jax.random.uniform(keys[2], (1, padded, shape.width // 2), maxval=6.0)
        turns = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2)

    def compute(block):
        def apply(params, x):
            taken = num_tokens if block.ops == plain.ops else padded  # it knows no padding
            x, turned = x[:, :taken], None if turns is None else turns[:, :taken]
            args = x.astype(block.dtype), 0.0, False, None, turned
            out, _ = block.apply({"params": params}, *args)
            return out[:, :num_tokens].astype(jnp.float32)

        out, vjp = jax.vjp(apply, params, x)
        grad_params, grad_x = vjp(g[:, :num_tokens])
        return {"output": out, "gradient of input": grad_x, "gradient of params": grad_params}

    with jax.default_matmul_precision("highest"):
        reference = compute(exact)
    return _errors(compute(block), reference), _errors(compute(plain), reference)


def _errors(found: Any, reference: Any) -> Any:
    """The error of each array, relative to its norm, which is at least a tenth of the usual one.

    A gradient that is 0 apart from rounding, such as the gradient of the keys' bias, is so compared
    with the size of the others.
    """
    leaves = jax.tree.leaves(reference)
    usual = jnp.sqrt(sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves))

    def error(x, exact):
        return jnp.linalg.norm(x - exact) / jnp.maximum(
            jnp.linalg.norm(exact), 0.1 * usual * exact.size**0.5
        )

    return jax.tree.map(lambda x, exact: error(x.ravel(), exact.ravel()), found, reference)
