"""Leaf names of a tree, and masks selected by name.

A leaf's name is its path joined by '/': `encoder/layer_0/mlp/kernel`. Dict keys, indices, and
fields of named tuples and dataclasses all count, so that parameters, optax states and a whole
TrainState are named the same way. No part of a path may contain a '/'.

Scanned layers are one leaf, `encoder/layers/mlp/kernel`, with the layer as its first axis. Patterns
that select single layers match the names in the unrolled model.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import traverse_util

PyTree = Any
# Nested dicts of arrays: flax's parameters. Model state has one level above, e.g. batch_stats.
Params: TypeAlias = Mapping[str, "jax.Array | Params"]
ModelState: TypeAlias = Mapping[str, Params]
Batch: TypeAlias = dict[str, jax.Array]

OBJECTIVE = "objective"  # name of the subtree of parameters that belongs to the objective

_STACKED = re.compile(r"(?P<above>(?:.*/)?)layers/(?P<below>.*)")
_LAYER = re.compile(r"((?:.*/)?layer_\d+)/.*")
_EMBEDDING = re.compile(
    r"(stem|trunk/(conv|norm)_root|embedding|embedding_norm|class_token|distillation_token|"
    r"register_tokens|pos_embedding)(/.*)?"
)


def leaf_names(tree: PyTree) -> PyTree:
    """The same tree with each leaf replaced by its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
    )


def flatten_names(tree: PyTree) -> dict[str, Any]:
    """{name: leaf}, in the tree's own order."""
    return dict(zip(jax.tree.leaves(leaf_names(tree)), jax.tree.leaves(tree), strict=True))


def unflatten_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from {name: leaf}; the inverse of `flatten_names` for a tree of dicts."""
    return traverse_util.unflatten_dict(dict(named), sep="/")


def is_stacked(name: str) -> bool:
    """Whether the leaf `name` stacks scanned layers along its first axis."""
    return _STACKED.fullmatch(name) is not None


def unrolled_names(name: str, leaf: Any) -> list[str]:
    """Names of a leaf's layers in the unrolled model; just [name] if the leaf is not stacked."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['above']}layer_{i}/{match['below']}" for i in range(leaf.shape[0])]


def map_layers(function: Callable[[str], Any], tree: PyTree) -> PyTree:
    """Replace each leaf by function(name in the unrolled model).

    A leaf of L scanned layers is replaced by an array (L, 1, ..., 1) with one value per layer,
    which broadcasts against the leaf.
    """

    def value(name: str, leaf: Any) -> Any:
        values = [function(unrolled) for unrolled in unrolled_names(name, leaf)]
        if not is_stacked(name):
            return values[0]
        return np.reshape(np.array(values), (-1, *(1,) * (leaf.ndim - 1)))

    return jax.tree.map(value, leaf_names(tree), tree)


def mask(tree: PyTree, pattern: str) -> PyTree:
    """Whether the regex `pattern` matches each leaf's full name in the unrolled model.

    A bool per leaf; for scanned layers an array (L, 1, ..., 1) of bools.
    """
    return map_layers(lambda name: re.fullmatch(pattern, name) is not None, tree)


def part_of(name: str) -> str:
    """The part of the model that the unrolled `name` belongs to.

    One of: "embedding" (patches, class token, positions; the whole ResNet of a hybrid; the root of
    a ResNet), a layer such as "encoder/layer_3" or "trunk/stage_0/layer_1", or "head" (everything
    after the layers, including their final norm, and what belongs to the objective).
    """
    if _EMBEDDING.fullmatch(name):
        return "embedding"
    if name.startswith(f"{OBJECTIVE}/"):
        return "head"
    match = _LAYER.fullmatch(name)
    return match[1] if match else "head"


def pattern_below(tree: PyTree, last_layers: int) -> str:
    """A pattern for `mask`: all parameters before the last `last_layers` layers.

    Raises:
      ValueError: if the model has fewer layers.
    """
    layers = [part for part in parts(tree) if part not in ("embedding", "head")]
    if not 1 <= last_layers <= len(layers):
        raise ValueError(f"needs a number from 1 to {len(layers)}, the model's layers")
    below = [re.escape(f"{part}/") + ".*" for part in layers[: len(layers) - last_layers]]
    return "|".join([_EMBEDDING.pattern, *below])


def parts(tree: PyTree) -> list[str]:
    """Parts of a model with the parameters `tree`, in the order of the forward pass."""
    found = {
        part_of(unrolled)
        for name, leaf in flatten_names(tree).items()
        for unrolled in unrolled_names(name, leaf)
    }

    def place(part: str) -> tuple[int, str, int]:
        if part in ("embedding", "head"):
            return (0 if part == "embedding" else 2), "", 0
        above, _, number = part.rpartition("_")
        return 1, above, int(number)

    return sorted(found, key=place)
