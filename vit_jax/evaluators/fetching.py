"""Results of the devices brought to the host while the devices compute the next."""

import collections
from collections.abc import Iterable, Iterator

import jax

from vit_jax.tree import PyTree

_RESULTS_BEHIND = 2  # each may hold its batch on the devices


def fetch(results: Iterable[PyTree]) -> Iterator[PyTree]:
    """Each of `results`, pytrees of arrays as a jitted function returns them, on the host."""
    pending: collections.deque = collections.deque()
    for result in results:
        pending.append(result)
        if len(pending) > _RESULTS_BEHIND:
            yield jax.device_get(pending.popleft())
    yield from jax.device_get(list(pending))
