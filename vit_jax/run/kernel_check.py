"""The kernels of a model against the forms without, on random numbers, before the first step."""

import functools
import logging
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.devices.kernels import has_kernels
from vit_jax.devices.mesh import batch_sharding
from vit_jax.errors import InputError
from vit_jax.models.contract import AttentionShape, about
from vit_jax.models.dot_product import plain_attention
from vit_jax.models.forms import BlockOps
from vit_jax.models.layers import EncoderBlock

logger = logging.getLogger("vit_jax")

# A kernel may err by so much more than the plain form, both against float32.
_FACTOR, _MARGIN = 3.0, 1e-3


class Error(NamedTuple):
    """Relative errors of an array, in the Euclidean norm, against float32."""

    kernel: float
    plain: float

    @property
    def is_bounded(self) -> bool:
        return self.kernel <= _FACTOR * self.plain + _MARGIN  # False for NaN


def check_kernels(model: nn.Module, mesh: Mesh) -> None:
    """Runs a block of `model` once with its kernels and once without, on its mesh.

    Raises:
      InputError: an output or a gradient of the two differs by more than rounding.
    """
    if not has_kernels(model):
        return
    errors = measure_errors(model, mesh)
    wrong = {name: error for name, error in errors.items() if not error.is_bounded}
    if wrong:
        name, error = max(wrong.items(), key=lambda item: item[1].kernel)
        raise InputError(
            f"model.kernels=auto: on {mesh.devices.flat[0].device_kind} a kernel computes {name} "
            f"with a relative error of {error.kernel:.2g}, and XLA with {error.plain:.2g} "
            f"({len(wrong)} of {len(errors)} arrays differ); set --config.model.kernels=plain"
        )
    worst = max(errors.values(), key=lambda error: error.kernel)
    logger.info(
        "kernels agree with the plain form: outputs and gradients of a block err by %.2g at most, "
        "without kernels by %.2g", worst.kernel, worst.plain,
    )  # fmt: skip


def measure_errors(model: nn.Module, mesh: Mesh) -> dict[str, Error]:
    """{array: its errors} of a block's output and gradients, with an image for each batch way.

    A gradient that is 0 apart from rounding, such as the gradient of the keys' bias, is compared
    with the size of the others.
    """
    with jax.set_mesh(mesh):
        found = jax.jit(
            functools.partial(_measure, model, mesh), out_shardings=NamedSharding(mesh, P())
        )()
    kernel, plain = ({n: float(x) for n, x in tree.flatten_names(each).items()} for each in found)
    return {name: Error(kernel[name], plain[name]) for name in kernel}


def _measure(model: nn.Module, mesh: Mesh) -> tuple[Any, Any]:
    shape = about(model).attention_shape
    assert isinstance(shape, AttentionShape)
    # Of a model for images of any size those of 14 x 14 patches.
    num_tokens = shape.num_tokens or 14 * 14 + model.num_prefix_tokens
    padded = num_tokens + -num_tokens % model.forms.token_multiple
    plain_forms = BlockOps(attend=plain_attention)
    block = EncoderBlock(**model.block_fields(), num_tokens=num_tokens)
    block = block.clone(dropout=0.0, attention_dropout=0.0)
    plain, exact = block.clone(forms=plain_forms), block.clone(forms=plain_forms, dtype=jnp.float32)

    keys = jax.random.split(jax.random.key(0), 3)
    images = mesh.size // mesh.shape["tensor"]
    x, g = (jax.random.normal(key, (images, padded, model.width)) for key in keys[:2])
    x, g = (jax.lax.with_sharding_constraint(each, batch_sharding(mesh)) for each in (x, g))
    shapes = jax.eval_shape(
        lambda x: plain.init(keys[2], x, 0.0, False)["params"], x[:, :num_tokens]
    )
    params = _random(shapes, keys[2])

    def compute(block):
        def apply(params, x):
            if block.forms == plain_forms:
                x = x[:, :num_tokens]  # it knows no padding
            out, _ = block.apply({"params": params}, x.astype(block.dtype), 0.0, False)
            return out[:, :num_tokens].astype(jnp.float32)

        out, vjp = jax.vjp(apply, params, x)
        grad_params, grad_x = vjp(g[:, :num_tokens])
        return {"output": out, "gradient of input": grad_x, "gradient of params": grad_params}

    with jax.default_matmul_precision("highest"):
        reference = compute(exact)
    return _errors(compute(block), reference), _errors(compute(plain), reference)


def _random(shapes: Any, key: jax.Array) -> Any:
    """Parameters of these shapes: kernels that keep the size of their input, others around 1."""
    leaves, structure = jax.tree.flatten(shapes)

    def draw(shape, key):
        x = jax.random.normal(key, shape.shape)
        return x * shape.shape[0] ** -0.5 if len(shape.shape) > 1 else x

    keys = jax.random.split(key, len(leaves))
    drawn = [draw(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _errors(found: Any, reference: Any) -> Any:
    """The error of each array, relative to its norm, which is at least a tenth of the usual one."""
    leaves = jax.tree.leaves(reference)
    usual = jnp.sqrt(sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves))

    def error(x, exact):
        return jnp.linalg.norm(x - exact) / jnp.maximum(
            jnp.linalg.norm(exact), 0.1 * usual * exact.size**0.5
        )

    return jax.tree.map(lambda x, exact: error(x.ravel(), exact.ravel()), found, reference)
