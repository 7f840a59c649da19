"""Format version of saved steps, and renamed leaves.

A step holds its version and, with the checksums, the names of all its leaves. The form of the seal
and the place of the version in `meta` are the same in all versions, so that a newer step is not
taken for a damaged one.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp

from vit_jax import tree

# Format of a step, stored in its meta as `format_version`; steps of version 1 lack it. Increase it
# with every entry in RENAMED_LEAVES, and when a leaf or an entry of meta changes its meaning.
FORMAT_VERSION = 2

# Regex over the whole name of a leaf in older versions -> its name today, with \1 for groups. All
# matching entries are applied, in this order. Start with "(.*/)", since a parameter also occurs in
# the average and the optimizer state: r"(.*/)norm/scale": r"\1norm/gain". The regex must not match
# any name of today. Patterns in configs, such as optimizer.freeze, are not rewritten.
RENAMED_LEAVES: dict[str, str] = {}


def stored_names(target: Any, saved: Iterable[str], *, partial: bool) -> dict[str, str]:
    """{name in `target`: name in the step} for all leaves of `target`.

    Args:
      target: a pytree with today's names.
      saved: names of the leaves in the step.
      partial: whether the step may have leaves that `target` lacks.

    Raises:
      ValueError: names a leaf that the step lacks, or has in excess.
    """
    wanted, by_today = tree.flatten_names(target), {_todays_name(name): name for name in saved}
    for name in wanted:
        if name not in by_today:
            raise ValueError(f"leaf {name} is missing")
    surplus = sorted(by_today.keys() - wanted.keys())
    if surplus and not partial:
        raise ValueError(f"leaf {by_today[surplus[0]]} is not part of this run's state")
    return {name: by_today[name] for name in wanted}


def _todays_name(name: str) -> str:
    for old, new in RENAMED_LEAVES.items():
        match = re.fullmatch(old, name)
        name = match.expand(new) if match else name
    return name


def as_stored(target: Any, names: dict[str, str]) -> Any:
    """`target` as nested dicts and lists, the form that orbax saves, with the step's names."""
    form = ocp.tree.serialize_tree(target, keep_empty_nodes=True)
    moved = {new: _pop(form, name.split("/")) for name, new in names.items() if name != new}
    for name, leaf in moved.items():
        *above, last = name.split("/")
        node = form
        for key in above:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[last] = leaf
    return form


def as_today(stored: Any, target: Any, names: dict[str, str]) -> Any:
    """The leaves of `stored`, which has the form of `as_stored`, in the structure of `target`."""
    leaves = tree.flatten_names(stored)
    return jax.tree.unflatten(
        jax.tree.structure(target), [leaves[names[name]] for name in tree.flatten_names(target)]
    )


def _pop(node: Any, way: list[str]) -> Any:
    """Remove and return the leaf at the path `way`, and remove the dicts that become empty."""
    key, *below = way
    if not below:
        return node.pop(key)
    child = node[int(key) if isinstance(node, list) else key]
    leaf = _pop(child, below)
    if child == {}:
        del node[key]
    return leaf
