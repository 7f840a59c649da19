"""Profiler traces of some steps of a run."""

import logging
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import step_range
from vit_jax.errors import Faults

logger = logging.getLogger("vit_jax")


class Profiler:
    """Traces the steps in `log.profile` to a directory, by `jax.profiler`."""

    def __init__(self, steps: str | None, directory: epath.Path):
        self._steps = step_range(steps, "log.profile") if steps else range(0)
        self._directory = directory
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        """Call before the step numbered `step` is dispatched."""
        if step - 1 in self._steps and not self._tracing:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, result: Any) -> None:
        """Call with the result of `step`; waits for it before ending a trace."""
        if self._tracing and step not in self._steps:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            self._tracing = False
            logger.info("trace written to %s; open it with TensorBoard or XProf", self._directory)


def check_profile(config: ConfigDict, faults: Faults) -> None:
    """Check `log.profile`."""
    if config.log.profile is not None:
        faults.check(step_range, config.log.profile, key="log.profile")
