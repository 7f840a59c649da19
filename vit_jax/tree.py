"""Names of leaves, and masks chosen by them.

A leaf is named by the way to it, joined by '/': `encoder/block_0/mlp/kernel`. Dict keys, fields of
named tuples and dataclasses, and indices all count, so parameters, optax states and a whole
TrainState are named alike. No part of a way may itself hold a '/'.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util

PyTree = Any


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


def mask(tree: PyTree, pattern: str) -> PyTree:
    """The same tree of bools: True where the regex `pattern` matches the whole name."""
    return jax.tree.map(lambda name: re.fullmatch(pattern, name) is not None, leaf_names(tree))
