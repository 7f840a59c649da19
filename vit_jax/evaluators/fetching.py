"""Fetches results to the host while the devices compute the next ones."""

import collections
from collections.abc import Iterable, Iterator

import jax

from vit_jax.tree import PyTree

_RESULTS_BEHIND = 2  # each may hold its batch on the devices


def fetch(results: Iterable[PyTree]) -> Iterator[PyTree]:
    """Yield each of `results`, pytrees of arrays from a jitted function, on the host."""
    pending: collections.deque = collections.deque()
    for result in results:
        pending.append(result)
        if len(pending) > _RESULTS_BEHIND:
            yield jax.device_get(pending.popleft())
    yield from jax.device_get(list(pending))
