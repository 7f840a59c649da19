"""Optimizer parts that treat layers separately: a map over scanned layers, and layer-wise decay."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import tree
from vit_jax.base.errors import InputError

_TEXTS = f"{tree.OBJECTIVE}/text/"  # parameters of a text tower
_PATCHES = re.compile("embedding/(kernel|bias)")  # parameters of the patch embedding


class LayersState(NamedTuple):
    """State of an optimizer that is mapped over scanned layers.

    layers: state of the leaves with scanned layers; every array has the layer as first axis. If the
      stacks have several depths: {depth: state}.
    others: state of all other leaves.
    """

    layers: Any
    others: Any


def over_layers(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `tx` to each scanned layer separately, as in an unrolled model.

    Needed for transformations that are not elementwise: they would see stacked matrices (L, D, F)
    and vectors (L, D) with one axis more than a layer's own arrays have.
    """

    def split(leaves: tree.PyTree) -> tuple[dict[str, tree.PyTree], tree.PyTree]:
        """{depth: the stacks of so many layers}, and all other leaves."""
        depths = jax.tree.map(
            lambda name, leaf: leaf.shape[0] if tree.is_stacked(name) else 0,
            tree.leaf_names(leaves),
            leaves,
        )

        def keep(depth: int) -> tree.PyTree:
            return jax.tree.map(
                lambda own, leaf: leaf if own == depth else optax.MaskedNode(), depths, leaves
            )

        known = sorted({*jax.tree.leaves(depths)} - {0})
        return {str(depth): keep(depth) for depth in known}, keep(0)

    def joined(states: dict[str, Any]) -> Any:
        """The states of stacks by depth; of one depth its own, as stored runs have it."""
        if len(states) > 1:
            return states
        return next(iter(states.values()), optax.EmptyState())

    def init(params: optax.Params) -> LayersState:
        stacks, others = split(params)
        states = {depth: jax.vmap(tx.init)(layers) for depth, layers in stacks.items()}
        return LayersState(joined(states), tx.init(others))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LayersState]:
        (stacks, found), (own, other_params) = split(updates), split(params)
        found, others = tx.update(found, state.others, other_params)
        states = state.layers if len(stacks) > 1 else dict.fromkeys(stacks, state.layers)
        new = dict[str, Any]()
        for depth, layers in stacks.items():
            grads, new[depth] = jax.vmap(tx.update)(layers, states[depth], own[depth])
            found = jax.tree.map(
                lambda layer, other: other if isinstance(layer, optax.MaskedNode) else layer,
                grads,
                found,
                is_leaf=lambda node: isinstance(node, optax.MaskedNode),
            )
        return found, LayersState(joined(new) if new else state.layers, others)

    return optax.GradientTransformation(init, update)


def scale_embedding(rate: float) -> optax.GradientTransformation:
    """Multiply the updates of the patch embedding by `rate`."""

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        names = tree.leaf_names(updates)
        return jax.tree.map(
            lambda name, leaf: leaf * rate if _PATCHES.fullmatch(name) else leaf, names, updates
        )

    return optax.stateless(update)


def scale_layers(layer_decay: float, of_texts: bool = False) -> optax.GradientTransformation:
    """Multiply the updates of each part by `layer_decay` ^ (the number of parts above it).

    `of_texts`: of the text tower that an objective trains, and no others.

    Raises: InputError if there are no layers.
    """
    path, key = (_TEXTS, "text_layer_decay") if of_texts else ("", "layer_decay")

    def part_of(name: str) -> str:
        return "embedding" if name.startswith("token_embedding/") else tree.part_of(name)

    def scales(params: tree.PyTree) -> tree.PyTree:
        own = params
        for name in filter(None, path.split("/")):
            own = own.get(name, {})
        layers = [part for part in tree.parts(own) if part not in ("embedding", "head")]
        if not layers:
            raise InputError(
                f"optimizer.{key}={layer_decay}: the model has no layers (layer_0, ...); "
                "set it to None"
            )
        above = {part: i for i, part in enumerate(reversed(layers), 1)}
        above |= {"head": 0, "embedding": len(layers) + 1}

        def scale(name: str) -> float:
            if not name.startswith(path):
                return 1.0
            return layer_decay ** above[part_of(name.removeprefix(path))]

        return tree.map_layers(scale, params)

    def init(params: optax.Params) -> optax.OptState:
        scales(params)  # raises before anything is computed
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        scaled = jax.tree.map(
            lambda scale, leaf: leaf * jnp.asarray(scale, leaf.dtype), scales(params), updates
        )
        return scaled, state

    return optax.GradientTransformation(init, update)
