"""Says in the log what a run is: devices, batch, data, model."""

import logging
import math

import jax

from vit_jax.data.order import local_rows
from vit_jax.devices import flops, sharding
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.training.prepare import Run

logger = logging.getLogger("vit_jax")


def describe(run: Run) -> None:
    """Says what runs where: devices, batch, data, model."""
    devices = run.mesh.devices.flatten()
    axes = ", ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    logger.info(
        "devices: %d x %s on %d host(s); mesh: %s",
        devices.size, devices[0].device_kind, jax.process_count(), axes,
    )  # fmt: skip
    size = run.config.global_batch_size
    rows = len(local_rows(batch_sharding(run.mesh), size))
    ways = math.prod(run.mesh.shape[axis] for axis in BATCH_AXES)
    logger.info("batch: %d globally, %d per host, %d per device", size, rows, size // ways)
    e, data_config = run.experiment, run.config.data
    own = data_config.name
    splits = ", ".join(
        f"{key.split if key.data_name == own else f'{key.data_name} {key.split}'} "
        f"{source.num_examples:,}"
        for key, source in run.sources.items()
    )
    logger.info(
        "data: %s, %d classes, examples: %s; %s steps",
        data_config.name, data_config.num_classes, splits, f"{e.total_steps:,}",
    )  # fmt: skip
    if size > data_config.num_examples:
        logger.warning(
            "global_batch_size=%d is more than the %d examples: a batch repeats them",
            size, data_config.num_examples,
        )  # fmt: skip
    logger.info(
        "model: %s, %s parameters, %.3g GFLOP an image forward and backward; state %s per device",
        run.config.model.name, f"{e.num_params:,}", e.flops_per_image / 1e9,
        flops.format_bytes(sharding.bytes_per_device(e.abstract_state, e.shardings)),
    )  # fmt: skip
