"""Self-verifying checkpoints, written by orbax.

    checkpoints/<step>/state      the whole TrainState
    checkpoints/<step>/meta       JSON: format version, checksum of every leaf, ...
    checkpoints/<step>/seal.json  size of every file, digest of the small ones
    checkpoints/invalid-<step>    moved aside because verification failed

orbax commits a step atomically, but restores flipped bits without an error. Therefore every leaf
has a checksum, which does not depend on its sharding, and all other files are sealed before the
commit.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.base.files import LiteralPath
from vit_jax.base.tree import PyTree
from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.restore import FORMAT_VERSION
from vit_jax.checkpoints.seal import complete_seal, write_seal

logger = logging.getLogger("vit_jax")

# A process reads whole chunks of a leaf, so chunks must be small compared to its share of the leaf.
# orbax splits the two largest axes of the share about evenly.
_CHUNKS_OF_A_LEAF = 4096
_MIN_CHUNK_BYTES = 1 << 16
# orbax counts by the wall clock, which may jump; `job.save_deadline_s` ends a save that hangs.
_NEVER_S = 10 * 365 * 86400
# orbax warns for every leaf that chunks below 1 MiB may be slow.
logging.getLogger("absl").addFilter(lambda record: record.module != "subchunking")
for _name in ("absl", "asyncio"):  # an error of a save is raised too, and said once
    logging.getLogger(_name).addFilter(lambda record: not record.exc_info)


def _save_args(leaf: jax.Array) -> ocp.SaveArgs:
    chunk_bytes = max(leaf.nbytes // _CHUNKS_OF_A_LEAF, _MIN_CHUNK_BYTES)
    return ocp.SaveArgs(chunk_byte_size=chunk_bytes)


class _Best(NamedTuple):
    """Orbax's form of a rule that keeps one step."""

    best_step: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        best = self.best_step()
        return [info.step == best for info in checkpoints]


class Checkpoints:
    """Saves states asynchronously in `directory`, and keeps the newest and every n-th.

    Args:
      directory: the workdir's `checkpoints`; created if absent. Files of a killed save are removed.
      keep_last: number of newest checkpoints to keep, at least 2.
      keep_every: interval, in steps, of checkpoints to keep for ever; None: none.
      best_step: returns the step to keep as the best so far; None if there is none.
    """

    def __init__(
        self,
        directory: epath.Path,
        *,
        keep_last: int,
        keep_every: int | None,
        best_step: Callable[[], int | None] = lambda: None,
    ):
        self._directory = LiteralPath(directory)
        self._saving: int | None = None
        self._handled: BaseException | None = None  # by the caller of `save`
        policies = ocp.checkpoint_managers
        keep: list[policies.PreservationPolicy] = [policies.LatestN(keep_last), _Best(best_step)]
        if keep_every:
            keep.append(policies.EveryNSteps(keep_every))
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=_NEVER_S,
                    barrier_sync_fn=self._wait_for_others,
                    post_finalization_callback=self._seal_uncommitted,
                ),
            ),
        )

    def _wait_for_others(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes are at the barrier `key`.

        Raises:
          Exception: with which a save has failed in this process. orbax waits for the others even
            then, and they wait for this process at an earlier barrier.
        """
        error = sys.exception()
        if error is not None and error is not self._handled:
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _seal_uncommitted(self) -> None:
        """Seal the step; orbax calls this once all files are written but the commit's own."""
        if jax.process_index() == 0:
            name = str(self._saving)
            uncommitted = list(self._directory.glob(f"{name}.orbax-checkpoint-tmp*"))
            write_seal(uncommitted[0] if uncommitted else self._directory / name)

    def wait(self) -> None:
        """Wait for the save in flight, if any, and complete its seal."""
        try:
            self._manager.wait_until_finished()
        finally:
            saving, self._saving = self._saving, None
        if saving is not None and jax.process_index() == 0:
            complete_seal(self._directory / str(saving))

    def save(self, step: int, state: PyTree, meta: dict) -> None:
        """Save `state` as `step`; returns once the state may be donated, and writes files later."""
        own = {"format_version": FORMAT_VERSION, "step": step, "checksums": checksums(state)}
        self.wait()
        self._saving, self._handled = step, sys.exception()
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state, save_args=jax.tree.map(_save_args, state)),
                    meta=ocp.args.JsonSave(meta | own),
                ),
                force=True,
            )
        except BaseException:
            self._saving = None  # the save failed: nothing to wait for or to seal
            raise

    def close(self) -> None:
        """Wait until everything is on disk."""
        self.wait()
        self._manager.close()
