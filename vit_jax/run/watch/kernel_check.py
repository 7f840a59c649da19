"""The kernels of a model against the forms without, on random numbers, before the first step."""

import functools
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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
from vit_jax.models.layers import Context, EncoderBlock
from vit_jax.objectives.contract import TokenPass

logger = logging.getLogger("vit_jax")

# A kernel may err by so much more than the plain form, both against float32.
_FACTOR, _MARGIN = 3.0, 1e-3


def check_kernels(passes: Iterable[TokenPass], mesh: Mesh) -> None:
    """Compares a block of each pass that uses kernels with its plain form, on the run's mesh.

    Passes of one model with equally many tokens are checked once; layers that are recomputed, and
    those that are not, in their own forms.

    Raises:
      InputError: an output or a gradient of the two differs by more than rounding.
    """
    with_kernels = [each for each in passes if has_kernels(each.model)]
    forms = [
        (model, each.tokens or _tokens_of(model))
        for each in with_kernels
        for model in _forms(each.model)
    ]
    for model, tokens in dict.fromkeys(forms):
        with watchdog.phase("compile"):
            error, difference = compare_with_plain(model, mesh, tokens)
        if difference is not None:
            raise InputError(f"model.kernels: {difference}; set --config.model.kernels=plain")
        logger.info(
            "kernels agree with the plain form: a block of %d tokens errs by %.2g at most",
            tokens, error,
        )  # fmt: skip


def _forms(model: nn.Module) -> list[nn.Module]:
    """`model` with the ops of the layers that it keeps, and with the ops of recomputed ones."""
    known = about(model)
    kept = [model] if known.remat == "none" or known.remat_layers is not None else []
    return kept + [model.clone(ops=model.ops.recomputed)] * (known.remat != "none")


def compare_with_plain(
    model: nn.Module, mesh: Mesh, tokens: int | None = None
) -> tuple[float, str | None]:
    """The largest relative error of an array that a block of `model` computes with its ops.

    Beside it, in words, the array that differs from the plain form by more than rounding; None:
    there is none.

    `tokens`: of an image; None: as many as in training.
    """
    with jax.set_mesh(mesh):
        measure = functools.partial(_measure, model, mesh, tokens or _tokens_of(model))
        found = jax.jit(measure, out_shardings=NamedSharding(mesh, P()))()
    kernel, plain = ({n: float(x) for n, x in tree.flatten_names(each).items()} for each in found)
    # Not bounded, which NaN is not either.
    wrong = [n for n, error in kernel.items() if not error <= _FACTOR * plain[n] + _MARGIN]
    worst = max(wrong or kernel, key=lambda name: kernel[name])
    if not wrong:
        return kernel[worst], None
    return kernel[worst], (
        f"on {mesh.devices.flat[0].device_kind} a kernel computes {worst} with a relative error of "
        f"{kernel[worst]:.2g}, and XLA with {plain[worst]:.2g} ({len(wrong)} of {len(kernel)} "
        "arrays differ)"
    )


class BlockSample(NamedTuple):
    """A block of a model, and random numbers for one forward and backward pass of it.

    block, fields: the module, and its fields.
    params: of the block.
    x, grad: its input, and the gradient of its output: (images, N, D), N with padding, float32.
    turns: (1, N, K), where tokens have rotary positions.
    num_tokens: without padding.
    num_keys: int32 (images,), the tokens of each that count, of a model for pictures in their own
      shape; None: all.
    """

    block: nn.Module
    fields: dict[str, Any]
    params: Any
    x: jax.Array
    grad: jax.Array
    turns: jax.Array | None
    num_tokens: int
    num_keys: jax.Array | None

    def run(self, block: nn.Module, *, train: bool = False) -> dict[str, Any]:
        """The output and the gradients of `block`, this one or another form of it."""
        is_padded = block.ops.token_multiple > 1  # the others know no padding
        taken = self.x.shape[1] if is_padded else self.num_tokens
        turned = None if self.turns is None else self.turns[:, :taken]
        rngs = {"dropout": jax.random.key(1)} if train else None
        context = Context(turns=turned, num_keys_B=self.num_keys)

        def apply(params: tree.Params, x: jax.Array) -> jax.Array:
            args = x[:, :taken].astype(block.dtype), 0.0, train, context
            out, _ = block.apply({"params": params}, *args, rngs=rngs)
            out = out[:, : self.num_tokens].astype(jnp.float32)
            if self.num_keys is None:
                return out
            counts = jnp.arange(self.num_tokens)[None] < self.num_keys[:, None]
            return jnp.where(counts[..., None], out, 0)

        out, vjp = jax.vjp(apply, self.params, self.x)
        grad_params, grad_x = vjp(self.grad[:, : self.num_tokens])
        return {"output": out, "gradient of input": grad_x, "gradient of params": grad_params}


def sample_block(
    model: nn.Module,
    mesh: Mesh,
    images: int,
    fields: Mapping[str, Any] = MappingProxyType({}),
    num_tokens: int | None = None,
) -> BlockSample:
    """A block of `model` with its ops, some of its `fields` replaced, and numbers for `images`.

    `num_tokens`: of an image; None: as many as in training.
    """
    num_tokens = num_tokens or _tokens_of(model)
    padded = _padded(model, num_tokens)
    of_block = model.block_fields() | dict(fields)
    block = getattr(model.ops.rows, "block", EncoderBlock)(**of_block, num_tokens=num_tokens)

    keys = jax.random.split(jax.random.key(0), 3)
    x, grad = (jax.random.normal(key, (images, padded, model.width)) for key in keys[:2])
    x, grad = (jax.lax.with_sharding_constraint(each, batch_sharding(mesh)) for each in (x, grad))
    plain = EncoderBlock(**of_block | {"ops": BlockOps(attend=plain_attention)})
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
        half = model.width // model.num_heads // 2
        angles = jax.random.uniform(keys[2], (1, padded, half), maxval=6.0)
        turns = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2)
    num_keys = None
    if about(model).max_tokens is not None:
        num_keys = num_tokens - (jnp.arange(images) + 1) % 4 * (num_tokens // 4)
    return BlockSample(block, of_block, params, x, grad, turns, num_tokens, num_keys)


def _tokens_of(model: nn.Module) -> int:
    """The tokens of an image in training; a model for images of any size gets 14 x 14 patches."""
    shape = about(model).attention_shape
    assert isinstance(shape, AttentionShape)
    return shape.num_tokens or 14 * 14 + model.num_prefix_tokens


def _padded(model: nn.Module, num_tokens: int) -> int:
    return num_tokens + -num_tokens % model.ops.token_multiple


def _measure(model: nn.Module, mesh: Mesh, num_tokens: int) -> tuple[Any, Any]:
    """The errors of a block's output and gradients with its ops, and without: two trees.

    Each batch way has as few images as fill blocks of the kernels of rows, if there are any, else
    one.
    """
    images = mesh.size // mesh.shape["tensor"]
    if model.ops.rows is not None:
        # The number of tokens is a multiple of 8 here: at most 32 images are needed.
        padded = _padded(model, num_tokens)
        images *= next(n for n in range(1, 33) if Blocks.fitting(n * padded, 0, 0, 0))
    without_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    sample = sample_block(model, mesh, images, without_dropout, num_tokens)
    plain = EncoderBlock(**sample.fields | {"ops": BlockOps(attend=plain_attention)})
    with jax.default_matmul_precision("highest"):
        reference = sample.run(plain.clone(dtype=jnp.float32))
    return _errors(sample.run(sample.block), reference), _errors(sample.run(plain), reference)


def _errors(found: Any, reference: Any) -> Any:
    """The error of each array, relative to its norm, which is at least a tenth of the usual one.

    A gradient that is 0 apart from rounding, such as the gradient of the keys' bias, is so compared
    with the size of the others.
    """
    leaves = jax.tree.leaves(reference)
    usual = jnp.sqrt(sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves))

    def error(x: jax.Array, exact: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x - exact) / jnp.maximum(
            jnp.linalg.norm(exact), 0.1 * usual * exact.size**0.5
        )

    return jax.tree.map(lambda x, exact: error(x.ravel(), exact.ravel()), found, reference)
