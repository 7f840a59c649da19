"""Comparisons between the processes of a job, each made before a difference would cause a hang.

The order: the requests; the files found and the weights read; the lowered program; the starting
point. A job of one process compares nothing.

Every function raises:
  InputError: if processes differ; names them and the differences.
  ProcessError: if processes miss the deadline; names them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from vit_jax import data
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.config import Settings, SplitKey
from vit_jax.config.plugins import digests
from vit_jax.config.sections import Job
from vit_jax.job import processes, watchdog
from vit_jax.job.software import software

_NONE: Mapping[str, Any] = MappingProxyType({})


def compare(job: Job, what: str, find: Callable[[], Mapping[str, Any]]) -> None:
    """Check that all processes `find` the same facts, {name: value}; `what` names them in errors.

    `find` is not called in a job of one process.
    """
    if jax.process_count() > 1:
        with watchdog.phase("comparison"):
            processes.agree(what, find(), job.compile_deadline_s)


def compare_requests(settings: Settings, more: Mapping[str, Any] = _NONE) -> None:
    """Check that all processes have the same settings, `more` facts, software and local devices."""

    def find() -> dict[str, Any]:
        facts = {
            f"--config.{key}": value
            for key, value in settings.values.items()
            if not key.endswith("data_dir")  # each process may have its own copy of the data
        }
        devices = jax.local_device_count(), jax.local_devices()[0].device_kind
        own = {"devices per process": devices, **software(), **digests(settings.run.plugins)}
        return {**facts, **own, **more}

    compare(settings.job, "config, software or devices", find)


def compare_findings(
    job: Job,
    sources: Mapping[SplitKey, data.Source],
    weights: Mapping[str, np.ndarray] = _NONE,
    more: Mapping[str, Any] = _NONE,
) -> None:
    """Check that all processes found the same data, weights and `more` facts."""

    def find() -> dict[str, Any]:
        facts = {f"{k.data_name} {k.split}": s.fingerprint for k, s in sources.items()}
        read = {name: x for name, x in weights.items() if not getattr(x, "agreed", False)}
        return facts | {"weights read": hash_params(read)} | dict(more)

    compare(job, "data or files", find)
