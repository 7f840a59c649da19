"""Outputs of single layers, and attention weights, of any model of this package.

Axes: B images, N tokens, D width, H heads, K width of a head.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images
from vit_jax.base.tree import ModelState, Params
from vit_jax.models.block_ops import BlockOps
from vit_jax.models.contract import about, with_known
from vit_jax.models.dot_product import dot_product_attention, hide_padding
from vit_jax.models.own_shapes import mean_of_first
from vit_jax.models.watched import watch

T = TypeVar("T")

_NO_STATE: ModelState = types.MappingProxyType({})


def layer_outputs(
    model: nn.Module, params: Params, images: Images, model_state: ModelState = _NO_STATE
) -> list[jax.Array]:
    """The output of every layer for images (B, H, W, 3) in the model's value range.

    A Transformer's layers are its blocks: (B, N, D), before the final norm. In an Axial-ViT row and
    column blocks take turns. A BiT's layers are its residual units, and an EfficientNet's its
    blocks: maps (B, rows, columns, D). `params` belong to unrolled layers.
    """
    with watch() as found:
        variables = {"params": params, **model_state}
        _unrolled(model).apply(variables, images, method="tokens")
    return found.layers


def attention_weights(
    model: nn.Module, params: Params, images: Images, model_state: ModelState = _NO_STATE
) -> list[jax.Array]:
    """The attention weights (B, H, N, N) of every layer, float32: softmax(q k^T / sqrt(K) + bias).

    Entry [b, h, n, m] is the weight that query n gives to key m. Prefix tokens (the class token)
    come first. The other arguments are as in `layer_outputs`.

    Raises:
      InputError: if the model has no attention over all tokens.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix A, Eq. 7.
    """
    if fault := about(model).why_no_weights:
        raise InputError(f"output='attention': {fault}; take output='dense'")
    return watch_attention(model, params, images, lambda weights: weights, model_state)


def watch_attention(
    model: nn.Module,
    params: Params,
    images: Images,
    see: Callable[[jax.Array], T],
    model_state: ModelState = _NO_STATE,
) -> list[T]:
    """The results of `see` for the `attention_weights` of every layer, in order.

    Within a jitted function, each layer's weights need memory only until `see` has used them.
    """
    found: list[T] = []

    def attend(
        q_BNHK: jax.Array,
        k_BMHK: jax.Array,
        v_BMHK: jax.Array,
        *,
        bias_BHNM: jax.Array | None,
        **others: Any,
    ) -> jax.Array:
        scores = jnp.einsum("bnhk,bmhk->bhnm", q_BNHK, k_BMHK) * q_BNHK.shape[-1] ** -0.5
        scores = scores if bias_BHNM is None else scores + bias_BHNM
        scores = hide_padding(scores, others.get("num_keys_B"))
        found.append(see(jax.nn.softmax(scores.astype(jnp.float32), axis=-1)))
        return dot_product_attention(q_BNHK, k_BMHK, v_BMHK, bias_BHNM=bias_BHNM, **others)

    watched = with_known(_unrolled(model), ops=BlockOps(attend=attend))
    watched.apply({"params": params, **model_state}, images, method="tokens")
    return found


def choose(found: Sequence[T], layer: int | None) -> T:
    """The part of `found` at a layer, counted from 0, or from the end if negative; None: the last.

    Raises:
      InputError: if the model has no such layer.
    """
    depth = len(found)
    if layer is not None and not -depth <= layer < depth:
        raise InputError(
            f"layer={layer}: the model has {depth} layers; choose 0 to {depth - 1}, or -1 for the "
            "last one"
        )
    return found[-1 if layer is None else layer]


def pool(model: nn.Module, x: jax.Array, counts_B: jax.Array | None = None) -> jax.Array:
    """One vector (B, D) per image from a layer's output: the class token, else the patches' mean.

    The class token is taken from models that classify it; maps of convolutional networks are
    averaged. `counts_B`: so many first patches of each picture count; None: all.
    """
    if x.ndim == 4:
        return x.mean(axis=(1, 2))
    if model.pool == "token":
        return x[:, 0]
    return mean_of_first(x[:, model.num_prefix_tokens :], counts_B)


def _unrolled(model: nn.Module) -> nn.Module:
    """`model` with its layers called one by one, so that each can be seen."""
    return with_known(model, scan=False, remat="none")
