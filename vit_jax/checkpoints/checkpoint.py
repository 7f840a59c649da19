"""Checkpoints that certify themselves, written by orbax.

    checkpoints/<step>/state      the whole TrainState
    checkpoints/<step>/meta       JSON: the format's version, a checksum of every leaf, ...
    checkpoints/<step>/seal.json  size of every file, and the digest of the small ones
    checkpoints/invalid-<step>    moved aside, because it did not verify

orbax commits a step atomically, but restores a flipped bit without a word: so every leaf has a
checksum that does not depend on how it is laid out over devices, and what the leaves do not cover
is sealed, before the commit.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.checkpoints import stored
from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.restore import restore_newest
from vit_jax.checkpoints.seal import complete_seal, write_seal
from vit_jax.tree import PyTree

logger = logging.getLogger("vit_jax")

State = TypeVar("State")  # a pytree, restored as it is described

# A process reads whole chunks of a leaf, so they are small beside what it keeps of it: of the two
# greatest axes of a leaf's share orbax makes about equal pieces.
_CHUNKS_OF_A_LEAF = 4096
_MIN_CHUNK_BYTES = 1 << 14
# orbax warns, once a leaf, that chunks below a MiB could be slow.
logging.getLogger("absl").addFilter(lambda record: record.module != "subchunking")


def _save_args(leaf: jax.Array) -> ocp.SaveArgs:
    chunk_bytes = max(leaf.nbytes // _CHUNKS_OF_A_LEAF, _MIN_CHUNK_BYTES)
    return ocp.SaveArgs(chunk_byte_size=chunk_bytes)


class Checkpoints:
    """Saves states asynchronously into `directory`, keeping the newest and every n-th.

    Args:
      directory: the workdir's `checkpoints`; made if absent. Files of a killed save are removed.
      keep_last: how many of the newest are kept, at least 2.
      keep_every: steps whose multiples are kept for ever; None: none.
    """

    def __init__(self, directory: epath.Path, *, keep_last: int, keep_every: int | None):
        self._directory = directory
        self._saving: int | None = None
        policies = ocp.checkpoint_managers
        keep: list[policies.PreservationPolicy] = [policies.LatestN(keep_last)]
        if keep_every:
            keep.append(policies.EveryNSteps(keep_every))
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._seal_uncommitted
                ),
            ),
        )

    def _seal_uncommitted(self) -> None:
        """Called by orbax when all is written but the files of the commit."""
        if jax.process_index() == 0:
            name = str(self._saving)
            uncommitted = list(self._directory.glob(f"{name}.orbax-checkpoint-tmp*"))
            write_seal(uncommitted[0] if uncommitted else self._directory / name)

    def wait(self) -> None:
        """Waits for the save in flight, if there is one, and completes its seal."""
        try:
            self._manager.wait_until_finished()
        finally:
            saving, self._saving = self._saving, None
        if saving is not None and jax.process_index() == 0:
            complete_seal(self._directory / str(saving))

    def save(self, step: int, state: PyTree, meta: dict) -> None:
        """Saves `state` as `step`; returns once it may be donated, the files follow."""
        own = {"format_version": stored.FORMAT_VERSION, "step": step, "checksums": checksums(state)}
        meta = meta | own
        self.wait()
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state, save_args=jax.tree.map(_save_args, state)),
                    meta=ocp.args.JsonSave(meta),
                ),
                force=True,
            )
        except BaseException:
            self._saving = None  # there is nothing to wait for and to seal
            raise

    def close(self) -> None:
        """Waits until everything is on disk."""
        self.wait()
        self._manager.close()


def start(
    *,
    directory: epath.Path,
    abstract_state: State,
    fingerprint: Callable[[int], str],
    from_init: Callable[[], State] | None,
    from_scratch: Callable[[], State],
) -> tuple[State, dict]:
    """How a run starts: resume > init_from > scratch; the log says which.

    Returns:
      The state and, where it was resumed, the meta saved with it, else {}.

    Raises:
      InputError: if the checkpoint was made with another order of data.
    """
    restored = restore_newest(directory, abstract_state, fingerprint=fingerprint, move_aside=True)
    if restored is not None:
        logger.info("start: resumed at step %d of %s", restored[1]["step"], directory)
        return restored
    if from_init is not None:
        return from_init(), {}
    logger.info("start: from scratch")
    return from_scratch(), {}
