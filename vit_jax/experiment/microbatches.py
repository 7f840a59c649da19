"""The number of microbatches of a step, if `optimizer.accum_steps` leaves it open.

Devices compute fastest while what they compute with stays near them, so they compute a batch in
parts. A CPU keeps the activations of a layer in its cache. A TPU keeps the tokens of a layer in
VMEM: ViT-B/16 takes 6 % less time for 4 parts of 64 images than for 256 at once, and a third of the
memory, so that fewer layers, or none, are computed again. GPUs compute the whole batch.
"""

import math

import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.models.contract import Model
from vit_jax.objectives.contract import ObjectivePart

# Bytes of a part: of its hidden units and attention weights in one layer, in float32.
_CPU_BYTES = 5 << 20
# Of its tokens in the dtype of the model: 64 images of ViT-L/16. Fewer bytes than the second stay
# whole, as 256 images of ViT-S/16 take less time than 2 parts of 128.
_TPU_BYTES, _TPU_WHOLE, _LEAST_ROWS = 25 << 20, 45 << 20, 8


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
    """The fewest microbatches of `share` rows a device whose activations stay in its cache or VMEM.

    1 on GPUs, for objectives that do not allow it, and for models whose batch statistics or rows of
    packed pictures parts would change. On TPUs also for a small batch; if parameters are split, as
    every part would exchange their gradients, or keep whole sums of them; and if a part would have
    few rows, or `share` divides only into parts of less than half the rows, in which the layers'
    weights would take more time than their tokens.
    """
    platform = mesh.devices.flat[0].platform
    is_whole = model.has_batch_statistics or model.pack is not None
    if not objective.splits_unasked or model.block_bytes is None or is_whole:
        return 1
    if platform == "cpu":
        rows = max(_CPU_BYTES // model.block_bytes, 1)
        return _fewest_parts(share, rows)
    if platform == "tpu":
        if (
            model.num_tokens_in_training is None
            or max(mesh.shape["fsdp"], mesh.shape["tensor"]) > 1
        ):
            return 1
        of_row = model.num_tokens_in_training * model.width * jnp.dtype(model.dtype).itemsize
        if (rows := _TPU_BYTES // of_row) < _LEAST_ROWS:
            return 1
        parts = _fewest_parts(share, rows)
        is_worth = share * of_row > _TPU_WHOLE and 2 * share >= rows * parts
        return parts if is_worth else 1
    return 1


def _fewest_parts(share: int, rows: int) -> int:
    """The smallest divisor of `share` that leaves parts of at most `rows`."""
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n <= rows)
