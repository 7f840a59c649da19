"""Names and shapes of a model's variables, found without computing them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base import tree
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import about, with_known
from vit_jax.models.text import Matcher


def abstract_params(model: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """{leaf name: shape} of a model's parameters, without creating them."""
    params, _ = _shapes(_Traced(model))
    if about(model).stacks_layers:
        return dict(params)
    return {
        unrolled: jax.ShapeDtypeStruct(leaf.shape[tree.is_stacked(name) :], leaf.dtype)
        for name, leaf in params.items()
        for unrolled in tree.unrolled_names(name, leaf)
    }


def abstract_model_state(model: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape} of a model's variables other than parameters, such as batch statistics."""
    _, model_state = _shapes(_Traced(model))
    return dict(model_state)


class _Traced:
    """A model as a key of a cache, also where a field of a plug-in's model has no hash.

    Its layers are scanned, which is traced in a fraction of the time; it needs no mesh.
    """

    def __init__(self, model: nn.Module):
        self.model = with_known(model, scan=True, constrain=unconstrained, ops=PLAIN)

    def __hash__(self) -> int:
        return hash(type(self.model))

    def __eq__(self, other: Any) -> bool:
        return self.model == other.model


@functools.lru_cache(maxsize=16)
def _shapes(traced: _Traced) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
    """({parameter: shape}, {other variable: shape}).

    One model is asked for several times while a source is read.
    """
    model = traced.model
    if isinstance(model, Matcher):
        inputs: tuple[jax.Array, ...] = model.example_inputs
    else:
        size = model.image_size or model.token_stride  # without an image size, any one will do
        inputs = (jnp.zeros((1, *size, about(model).channels)),)
    collections = dict(jax.eval_shape(model.init, jax.random.key(0), *inputs))
    params = collections.pop("params")
    return tree.flatten_names(params), tree.flatten_names(collections)
