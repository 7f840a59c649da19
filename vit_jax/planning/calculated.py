"""A plan that is calculated.

For GPUs, whose compiler is not there and says nothing of capacity, and for TPUs without libtpu.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax.devices.chips import GPUS_PER_HOST
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.planning.activations import activation_bytes, tensor_exchanges
from vit_jax.planning.layout import describe, judge, state_bytes
from vit_jax.planning.targets import Target, plan_mesh, readable_mesh

logger = logging.getLogger("vit_jax")


def calculate_plan(config: ConfigDict, target: Target) -> dict[str, Any]:
    """`plan` without a compiler.

    Temporaries are the gradients, in float32 and laid out as the parameters are, and what the
    backward pass keeps of a microbatch; the compiler's working space is not among them. Of what
    moves between memory and chip only this counts: each byte of the state, of the gradients and of
    what is kept, once read and once written.
    """
    mesh = plan_mesh(config, target)
    experiment = make_experiment(config, mesh)
    figures = describe(config, target, mesh, experiment)
    state = state_bytes(experiment)
    images, accum_steps = figures["images_per_way"], config.optimizer.accum_steps
    logger.info(
        "calculating %s for %s, mesh %s, %d images a way, remat %s",
        config.model.name, target.slice.name, readable_mesh(mesh.shape), images,
        figures["remat"],
    )  # fmt: skip
    activations = images * activation_bytes(experiment.model)
    temporaries = state["params"] + activations // accum_steps
    peak = sum(state.values()) + temporaries
    memory = state | {"temporaries": temporaries, "peak": peak}
    return figures | {
        "by": "calculation",
        "compile_s": 0.0,
        "memory_bytes": memory | judge(peak, target),
        "collectives": collective_table(experiment, mesh.shape, target, state["params"], images),
        "hbm_bytes_accessed": 2 * (sum(state.values()) + state["params"] + activations),
        "compiler_cycles": None,
    }


def collective_table(
    experiment: Experiment,
    shape: Mapping[str, int],
    target: Target,
    params_bytes: int,
    images: int,
) -> list[dict[str, Any]]:
    """The exchanges that the layout needs, by the ring algorithm, all beside computation.

    Over fsdp the weights are gathered in the dtype of computation, for the forward and for the
    backward pass, and gradients are scattered in it; over replica and data they are reduced, in
    it too; over tensor `tensor_exchanges` says what of the activations is.

    Args:
      params_bytes: float32 parameters on a device.
      images: on a device, a step.
    """
    model = experiment.model
    size = jnp.dtype(model.dtype).itemsize
    share = params_bytes * size // 4
    whole = share * shape["fsdp"]
    passes = 2 + (model.remat != "none")  # forward, backward, and forward again
    wanted = [
        ("all-gather", ("fsdp",), passes, whole),
        ("reduce-scatter", ("fsdp",), 1, whole),
        ("all-reduce", ("replica", "data"), 1, share),
    ]
    backward = tensor_exchanges(model, backward=True)
    for kind, (forward_count, forward_bytes) in tensor_exchanges(model).items():
        count = (passes - 1) * forward_count + backward[kind][0]
        number = (passes - 1) * forward_bytes + backward[kind][1]
        if count:
            wanted.append((kind, ("tensor",), count, images * number // count))
    table, inner = [], {"tensor": 1, "fsdp": shape["tensor"]}
    for kind, axes, count, number in wanted:
        n = math.prod(shape[axis] for axis in axes)
        if n == 1:
            continue
        if target.chip.is_gpu:
            # Neighbours on the mesh are the devices of its last axes.
            near = n * inner.get(axes[0], shape["tensor"] * shape["fsdp"]) <= GPUS_PER_HOST
            network = "NVLink" if near else "network"
        else:
            network = "DCN" if "replica" in axes and target.num_slices > 1 else "ICI"
        sent = number * (n - 1) / n * (2 if kind == "all-reduce" else 1)
        table.append(
            {
                "kind": kind,
                "axes": [axis for axis in axes if shape[axis] > 1],
                "network": network,
                "asynchronous": True,
                "count": count,
                "bytes": count * number,
                "sent_bytes": count * sent,
            }
        )
    return table
