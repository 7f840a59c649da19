"""The number of microbatches of a step on CPUs, if `optimizer.accum_steps` leaves it open.

A CPU computes fastest while the activations of a layer stay in its cache, so it computes a batch in
parts. On accelerators the whole batch is the fastest.
"""

import math

from jax.sharding import Mesh

from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.models.contract import Model
from vit_jax.objectives.contract import ObjectivePart

# Bytes of a part's hidden units and attention weights in one layer, in float32.
_PART_BYTES = 5 << 20


def settle_microbatches(
    objective: ObjectivePart, model: Model, global_batch_size: int, mesh: Mesh,
    recorded: int | None = None,
) -> int:  # fmt: skip
    """The number of microbatches on `mesh`: the one that the run has `recorded`, else chosen.

    A recorded number that does not divide each device's rows, because the run goes on on other
    devices, becomes the largest one that divides both.
    """
    share = global_batch_size // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if recorded is None:
        return choose_accum_steps(objective, model, mesh, share)
    return math.gcd(recorded, share)


def choose_accum_steps(objective: ObjectivePart, model: Model, mesh: Mesh, share: int) -> int:
    """The fewest microbatches of `share` rows a device whose activations stay in a CPU's cache.

    1 on other devices, for objectives that do not allow it, and for models whose batch statistics
    parts would change.
    """
    if mesh.devices.flat[0].platform != "cpu" or not objective.splits_on_cpus:
        return 1
    if model.block_bytes is None or model.has_batch_statistics:
        return 1
    rows = max(_PART_BYTES // model.block_bytes, 1)
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n <= rows)
