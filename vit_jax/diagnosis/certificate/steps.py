"""The training step on the devices: its speed and memory beside their plan, and its bits."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.diagnosis.benchmarks.step import made_up_batch, measure_step
from vit_jax.diagnosis.certificate import NAME, keep, part_file
from vit_jax.diagnosis.certificate.context import Context
from vit_jax.diagnosis.settled import settle_step
from vit_jax.planning.calculated import calculate_memory
from vit_jax.planning.measured import target_of_certificate
from vit_jax.planning.targets import target_of
from vit_jax.run.setup.validation import load_config
from vit_jax.run.teachers import planned_experiment

_LEAST_SHARE = 0.05  # of activations in a step's memory, to measure their scale


def measure_steps(context: Context) -> dict[str, Any]:
    """The step of each model that fits, and of the user's config: seconds, memory, their plan.

    Each row is written at once, as there may be no time for all of them.
    """
    rows = list[dict[str, Any]]()
    for name in context.models:
        rows.append({"model": name, "config": False, **_measure_largest(context, name)})
        keep(context, "steps", _say_steps(rows))
    if (asked := context.asked) is not None:
        of_user = {"model": asked.model.name, "config": True}
        rows.append(of_user | _measure_if_it_fits(context, asked))
    return _say_steps(rows)


def _say_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    said = [
        f"{row['model']} {1e3 * row['step_s']:,.4g} ms for {row['global_batch_size']} images"
        + ("" if row["mfu"] is None else f", MFU {row['mfu']:.0%}")
        if "step_s" in row
        else f"{row['model']} not run: {row['not_run']}"
        for row in rows
    ]
    return {"rows": rows, "held": None, "said": "; ".join(said)}


def load(model: str, images: int, **mesh: Any) -> Settings:
    """The recipe that is measured, with so many images in a batch; CPUs compute in float32."""
    overrides: dict[str, Any] = {"global_batch_size": images, "mesh": mesh}
    if jax.default_backend() == "cpu":
        overrides["model.dtype"] = "float32"
    return Settings.of(load_config(f"pretrain:{model},imagenet2012", overrides))


def images_a_device() -> int:
    """The images of a step, or of a block, on one device."""
    return 4 if jax.default_backend() == "cpu" else 64


def _measure_largest(context: Context, model: str) -> dict[str, Any]:
    """The step of a model with the most images that fit."""
    images, found = images_a_device(), dict[str, Any]()
    while images and "step_s" not in found:
        found = _measure_if_it_fits(context, load(model, images * jax.device_count()))
        images //= 2
    return found


def _measure_if_it_fits(context: Context, asked: Settings) -> dict[str, Any]:
    try:
        return _measure(context, *settle_step(asked))
    except InputError:
        return {"not_run": "it does not suit these devices"}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"not_run": "it does not fit these devices"}


def _measure(context: Context, settings: Settings, mesh: Mesh) -> dict[str, Any]:
    found = measure_step(settings, mesh)
    size = settings.run.global_batch_size
    experiment = planned_experiment(settings, mesh)
    with jax.set_mesh(mesh):
        counted = experiment.flops_per_step
    row = {
        key: found[key]
        for key in ("device_kind", "num_devices", "mesh", "num_params", "compile_s", "mfu")
    }
    row |= {
        "global_batch_size": size,
        "dtype": str(jnp.dtype(settings.model.dtype)),
        "kernels": "calculated" if settings.model.kernels == "auto" else settings.model.kernels,
        "step_s": size / found["images_per_s"]["median"],
        "flops": counted,
        "memory_bytes": found["memory_per_device_bytes"],
    }
    return row | _beside_plan(context, settings, mesh, row)


def _beside_plan(
    context: Context, settings: Settings, mesh: Mesh, row: dict[str, Any]
) -> dict[str, Any]:
    """The memory of the step as calculated, and the scale of its activations.

    The scale is 1 where they have no part in the peak.
    """
    devices = part_file(context.output, "devices")
    target = target_of(mesh.devices.flatten().tolist())
    if jax.default_backend() == "cpu" and devices.exists():
        target = target_of_certificate(json.loads(devices.read_text()), NAME)
    if target is None:
        return {}
    planned, twice = (
        calculate_memory(settings, target._replace(scale=scale))["peak"] for scale in (1.0, 2.0)
    )
    has_part = twice > (1 + _LEAST_SHARE) * planned
    scale = 1 + (row["memory_bytes"] - planned) / (twice - planned) if has_part else 1.0
    return {"planned_memory_bytes": planned, "scale_of_activations": scale}


def repeat_gradient(context: Context) -> dict[str, Any]:
    """Whether a step from one state and one batch gives the same bits twice."""
    model = context.models[0]
    images = images_a_device() * jax.device_count()
    settings, mesh = settle_step(load(model, images, deterministic=True))  # as GPUs need
    experiment = planned_experiment(settings, mesh)
    with jax.set_mesh(mesh):
        compiled = experiment.lower().compile()
        batch = made_up_batch(experiment, settings.data.num_classes)
        (first, _), (second, _) = (compiled(experiment.init(), batch) for _ in range(2))
        differ = [bool(x) for x in _compare(first.params, second.params)]
    said = "the same bits twice"
    if any(differ):
        said = f"{sum(differ)} of {len(differ)} arrays differ"
    return {"model": model, "differ": sum(differ), "held": not any(differ), "said": said}


@jax.jit
def _compare(first: tree.PyTree, second: tree.PyTree) -> list[jax.Array]:
    """For each array whether a bit differs; one program, as several processes compute it."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return [jnp.any(_bits(x) != _bits(y)) for x, y in pairs]


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
