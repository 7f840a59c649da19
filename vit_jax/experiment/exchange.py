"""The sums of several CPU processes' devices, exchanged as one array.

XLA exchanges every gradient of a step by itself. Its partitioner for CPUs does not join them, and
between processes each exchange takes a millisecond or more, whatever its size. So each device
computes the gradients of its own rows, and one all-reduce adds them all.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.models.axial import AxialViT
from vit_jax.models.bit import BiT
from vit_jax.models.deit import DeiT
from vit_jax.models.fields import has_batch_statistics
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.t2t import T2TViT
from vit_jax.models.vit import ViT
from vit_jax.objectives.contract import ObjectiveOutput
from vit_jax.tree import Params

# sums(state, batch, frozen, key) -> (gradients, the objective's sums) over the rows of the batch.
Sums = Callable[..., tuple[Params, ObjectiveOutput]]
Exchange = Callable[[Sums], Sums]

# Exact types: a plug-in's subclass may draw random values or couple rows in its own way.
_KNOWN = (ViT, DeiT, T2TViT, AxialViT, HybridViT, BiT)

# Rates of random draws: all devices would draw the same values for their rows.
_RATES = ("dropout", "attention_dropout", "stochastic_depth")


def choose_exchange(model: nn.Module, objective: str, mesh: Mesh) -> Exchange | None:
    """`join_devices` where it is faster and changes no more than the rounding; else None.

    That is on CPUs of several processes with whole parameters on each device, for supervised
    training of a model of this package without random draws and batch statistics. The model must
    then not constrain its activations.
    """
    devices = list(mesh.devices.flat)
    if devices[0].platform != "cpu" or len({device.process_index for device in devices}) == 1:
        return None
    if mesh.shape["fsdp"] > 1 or mesh.shape["tensor"] > 1 or objective != "supervised":
        return None
    if type(model) not in _KNOWN or has_batch_statistics(model):
        return None
    if any(getattr(model, rate, 0.0) for rate in _RATES):
        return None
    return lambda sums: join_devices(sums, mesh)


def join_devices(sums: Sums, mesh: Mesh) -> Sums:
    """`sums` of the whole batch: each device computes those of its rows, and one exchange adds all.

    Args:
      sums: of floating-point arrays. The state, the frozen arrays and the key are whole on each
        device; the states of the model and of the objective stay as they are.
      mesh: only its batch axes are larger than 1.
    """

    def add(state, batch, frozen, key):
        grads, out = sums(state, batch, frozen, key)
        out = out._replace(model_state={}, objective_state={})
        flat, restore = ravel_pytree((grads, out))
        return restore(jax.lax.psum(flat, BATCH_AXES))

    specs = (P(), P(BATCH_AXES), P(), P())
    added = jax.shard_map(add, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def joined(state, batch, frozen, key):
        grads, out = added(state.replace(opt_state=(), ema={}), batch, frozen, key)
        kept = {"model_state": state.model_state, "objective_state": state.objective_state}
        return grads, out._replace(**kept)

    return joined
