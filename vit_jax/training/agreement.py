"""What the processes of a job compare before the first step, each time before what would hang.

Requests come first, then what was found on disk and the weights read, then the lowered program,
then where they start. A process alone compares nothing.

Each raises:
  InputError: with the processes and their differences.
  ProcessError: naming those that have not come by the deadline.
"""

import hashlib
from collections.abc import Mapping
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


def compare_requests(config: ConfigDict, more: Mapping[str, Any]) -> None:
    """That all are asked for the same, with the same `more` facts, on as many like devices."""
    if jax.process_count() == 1:
        return
    facts = {
        f"--config.{key}": value
        for key, value in config_lib.flatten(config).items()
        if not key.endswith("data_dir")  # each may have its own copy of the data
    }
    facts["devices of a process"] = (jax.local_device_count(), jax.local_devices()[0].device_kind)
    _agree(config, "what they run", facts | software() | digests(config.plugins) | dict(more))


def compare_findings(
    config: ConfigDict, sources: Mapping[SplitKey, data.Source], more: Mapping[str, Any]
) -> None:
    """That all have found the same data, with the same `more` facts."""
    if jax.process_count() == 1:
        return
    facts = {f"{k.data_name} {k.split}": s.fingerprint for k, s in sources.items()}
    _agree(config, "what they found", facts | dict(more))


def compare_workdirs(config: ConfigDict, workdir: epath.Path) -> None:
    """That all write to one workdir, though its name may be another disk's on another host."""
    with watchdog.phase("comparison"):
        processes.check_one_workdir(workdir, config.job.compile_deadline_s)


def compare_weights(config: ConfigDict, params: Mapping[str, np.ndarray] | None) -> None:
    """That all have read the same weights to begin with; None: none were to be read."""
    if jax.process_count() == 1 or params is None:
        return
    _agree(config, "what they begin with", {"weights read": hash_params(params)})


def compare_programs(config: ConfigDict, lowered: jax.stages.Lowered) -> None:
    """That all are about to compile the same step."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    _agree(config, "the program", {"lowered step": digest})


def compare_starts(config: ConfigDict, order: data.Order, start: int) -> None:
    """That all go on after step `start` with the same examples in one order."""
    size = config.global_batch_size
    first = np.arange(start * size, (start + _BATCHES_COMPARED) * size)
    facts = {
        "first step": start + 1,
        "ids of the first batches": np.asarray(order(first)).tobytes(),
    }
    _agree(config, "where they start", facts)


def _agree(config: ConfigDict, what: str, facts: Mapping[str, Any]) -> None:
    with watchdog.phase("comparison"):
        processes.agree(what, facts, config.job.compile_deadline_s)
