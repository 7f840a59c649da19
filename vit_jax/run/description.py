"""The summary of a run in the log: devices, batch, data, model."""

import logging
import math

import jax

from vit_jax.data.order import local_rows
from vit_jax.devices import flops, sharding
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.experiment.model_name import describe_model
from vit_jax.run.build import Run

logger = logging.getLogger("vit_jax")


def describe(run: Run) -> None:
    """Log the devices, batch, data and model of a run."""
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
            "global_batch_size=%d exceeds the %d examples: each batch repeats some of them",
            size, data_config.num_examples,
        )  # fmt: skip
    for teacher in run.described_teachers:
        logger.info(
            "teacher: %s, %s, weight %.3g", teacher["source"], teacher["model"], teacher["weight"]
        )
    logger.info(
        "model: %s, %s parameters%s, %.3g GFLOP per image forward and backward; "
        "state %s per device",
        describe_model(run.config), f"{e.num_params:,}",
        "" if e.num_trained == e.num_params else f" ({e.num_trained:,} trained)",
        e.flops_per_image / 1e9,
        flops.format_bytes(sharding.bytes_per_device(e.abstract_state, e.shardings)),
    )  # fmt: skip
