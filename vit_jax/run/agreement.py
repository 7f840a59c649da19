"""Comparisons between the processes of a job, each made before a difference would cause a hang.

The order: the requests; the files found and the weights read; the lowered program; the starting
point. A job of one process compares nothing.

Every function raises:
  InputError: if processes differ; names them and the differences.
  ProcessError: if processes miss the deadline; names them.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.config import SplitKey
from vit_jax.config.plugins import digests
from vit_jax.job import processes, watchdog
from vit_jax.job.software import software

_BATCHES_COMPARED = 2


def compare_requests(config: ConfigDict, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Check that all processes have the same config, `more` facts, software and local devices."""
    if jax.process_count() == 1:
        return
    facts = {
        f"--config.{key}": value
        for key, value in config_lib.flatten(config).items()
        if not key.endswith("data_dir")  # each process may have its own copy of the data
    }
    facts["devices per process"] = (jax.local_device_count(), jax.local_devices()[0].device_kind)
    _agree(
        config,
        "config, software or devices",
        facts | software() | digests(config.plugins) | dict(more),
    )


def compare_findings(
    config: ConfigDict, sources: Mapping[SplitKey, data.Source], more: Mapping[str, Any]
) -> None:
    """Check that all processes found the same data, and agree on the facts in `more`."""
    if jax.process_count() == 1:
        return
    facts = {f"{k.data_name} {k.split}": s.fingerprint for k, s in sources.items()}
    _agree(config, "data or files", facts | dict(more))


def compare_workdirs(config: ConfigDict, workdir: epath.Path) -> None:
    """Check that all processes see the same workdir; a path may be another disk on another host."""
    with watchdog.phase("comparison"):
        processes.check_one_workdir(workdir, config.job.compile_deadline_s)


def compare_weights(
    config: ConfigDict,
    params: Mapping[str, np.ndarray] | None,
    model_state: Mapping[str, np.ndarray],
) -> None:
    """Check that all processes have read the same initial weights; None: there are none."""
    if jax.process_count() == 1 or params is None:
        return
    _agree(config, "initial weights", {"weights read": hash_params({**params, **model_state})})


def compare_programs(config: ConfigDict, lowered: jax.stages.Lowered) -> None:
    """Check that all processes are about to compile the same step."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    _agree(config, "lowered program", {"lowered step": digest})


def compare_starts(config: ConfigDict, order: data.Order, start: int) -> None:
    """Check that all processes continue after step `start`, with examples in the same order."""
    size = config.global_batch_size
    first = np.arange(start * size, (start + _BATCHES_COMPARED) * size)
    facts = {
        "first step": start + 1,
        "ids of the first batches": np.asarray(order(first)).tobytes(),
    }
    _agree(config, "starting point", facts)


def _agree(config: ConfigDict, what: str, facts: Mapping[str, Any]) -> None:
    with watchdog.phase("comparison"):
        processes.agree(what, facts, config.job.compile_deadline_s)
