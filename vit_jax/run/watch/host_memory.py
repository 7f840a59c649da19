"""The copies of a run's state in the memory of its hosts; see `checkpoints.memory`."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from vit_jax.base.errors import RaisedByAll, SharedInputError
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.memory import Memory
from vit_jax.checkpoints.replicas import DivergedError
from vit_jax.experiment.state import TrainState
from vit_jax.job import processes
from vit_jax.run.build import Run
from vit_jax.run.setup.workdir import run_name
from vit_jax.run.watch.guards import CorruptDataError

# After these errors the same command goes on, from the kept step.
_GOES_ON = (CorruptDataError, DivergedError, SharedInputError)

logger = logging.getLogger("vit_jax")


def _open(run: Run) -> Memory | None:
    """The memory of a run that has begun and keeps steps there; None: there is none."""
    if run.settings.checkpoint.memory_every is None:
        return None
    timeout_s = run.settings.job.compile_deadline_s
    name = processes.say_to_all("the run's name", lambda: run_name(run.workdir), timeout_s)
    return Memory(name, run.settings.checkpoint.memory_dir) if name else None


def restore_from_memory(run: Run) -> tuple[TrainState, dict[str, Any], Memory] | None:
    """(state, meta, where) of a kept step that is newer than the store's; None: there is none."""
    if (memory := _open(run)) is None:
        return None
    in_store = restore.steps_of_first(run.workdir / "checkpoints")

    def accepts(meta: dict[str, Any]) -> bool:
        if (saved := meta["saved"]) not in (None, *in_store):  # that one may be the best
            logger.warning("step %d in %s is not taken, since the store has no step %d, which was "
                           "saved before it", meta["step"], memory, saved)  # fmt: skip
            return False
        restore.check_same_data(meta, run.fingerprint, str(memory))
        return True

    newest = max(in_store, default=0)
    found = memory.restore(run.experiment.abstract_state, newest, accepts)
    memory.drop_after(found[1]["step"] if found else newest)
    return None if found is None else (*found, memory)


@contextlib.contextmanager
def open_memory(run: Run) -> Iterator[Memory | None]:
    """The memory for the steps of a run.

    It is removed at the end of the run, when a signal has stopped it, and when its loss is not
    finite. It stays when a process is lost or fails by itself, and after the errors in _GOES_ON.
    """
    memory = _open(run)
    try:
        yield memory
    except RaisedByAll as e:
        if memory is not None and not isinstance(e, _GOES_ON):
            memory.remove()
        raise
    if memory is not None:
        memory.remove()
