"""Names of leaves, and masks chosen by them.

A leaf is named by the way to it, joined by '/': `encoder/layer_0/mlp/kernel`. Dict keys, fields of
named tuples and dataclasses, and indices all count, so parameters, optax states and a whole
TrainState are named alike. No part of a way may itself hold a '/'.

Scanned layers are one leaf, `encoder/layers/mlp/kernel`, whose first axis is the layer. What is
chosen layer by layer is chosen by the names that the unrolled model has.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import traverse_util

PyTree = Any
# Nested dicts of arrays, as flax holds the parameters of a model; what else it carries has one more
# level above, e.g. batch_stats.
Params: TypeAlias = Mapping[str, "jax.Array | Params"]
ModelState: TypeAlias = Mapping[str, Params]
Batch: TypeAlias = dict[str, jax.Array]

_STACKED = re.compile(r"(?P<above>(?:.*/)?)layers/(?P<below>.*)")
_LAYER = re.compile(r"((?:.*/)?layer_\d+)/.*")
_EMBEDDING = re.compile(
    r"(stem|trunk/conv_root|embedding|class_token|distillation_token|pos_embedding)(/.*)?"
)


def leaf_names(tree: PyTree) -> PyTree:
    """The same tree with each leaf's name in its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
    )


def flatten_names(tree: PyTree) -> dict[str, Any]:
    """{name: leaf}, in the tree's own order."""
    return dict(zip(jax.tree.leaves(leaf_names(tree)), jax.tree.leaves(tree), strict=True))


def unflatten_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from {name: leaf}; undoes `flatten_names` on a tree of dicts."""
    return traverse_util.unflatten_dict(dict(named), sep="/")


def is_stacked(name: str) -> bool:
    """Whether the leaf called `name` has scanned layers along its first axis."""
    return _STACKED.fullmatch(name) is not None


def unrolled_names(name: str, leaf: Any) -> list[str]:
    """The names that the parts of a leaf have in the unrolled model: one for each layer of it."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['above']}layer_{i}/{match['below']}" for i in range(leaf.shape[0])]


def map_layers(function: Callable[[str], Any], tree: PyTree) -> PyTree:
    """function(name in the unrolled model) in the place of each leaf.

    A leaf of scanned layers gets an array (L, 1, ..., 1) with the value of each, which goes with
    the leaf elementwise.
    """

    def value(name, leaf):
        values = [function(unrolled) for unrolled in unrolled_names(name, leaf)]
        if not is_stacked(name):
            return values[0]
        return np.reshape(np.array(values), (-1, *(1,) * (leaf.ndim - 1)))

    return jax.tree.map(value, leaf_names(tree), tree)


def mask(tree: PyTree, pattern: str) -> PyTree:
    """Whether the regex `pattern` matches the whole name that a leaf has in the unrolled model.

    A bool for each leaf; for one of scanned layers an array (L, 1, ..., 1) of bools.
    """
    return map_layers(lambda name: re.fullmatch(pattern, name) is not None, tree)


def part_of(name: str) -> str:
    """The part of a model to which the unrolled `name` belongs.

    "embedding" (patches, class token, positions; of a hybrid its whole ResNet, of a ResNet its
    root), a layer such as "encoder/layer_3" or "trunk/stage_0/layer_1", or "head": all that comes
    after the layers, their last norm included.
    """
    if _EMBEDDING.fullmatch(name):
        return "embedding"
    match = _LAYER.fullmatch(name)
    return match[1] if match else "head"


def parts(tree: PyTree) -> list[str]:
    """The parts of a model with the parameters `tree`, in the order of the forward pass."""
    found = {
        part_of(unrolled)
        for name, leaf in flatten_names(tree).items()
        for unrolled in unrolled_names(name, leaf)
    }

    def place(part):
        if part in ("embedding", "head"):
            return (0 if part == "embedding" else 2), "", 0
        above, _, number = part.rpartition("_")
        return 1, above, int(number)

    return sorted(found, key=place)
