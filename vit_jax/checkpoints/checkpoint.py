"""Checkpoints that certify themselves, written by orbax.

    checkpoints/<step>/state      the whole TrainState
    checkpoints/<step>/meta       JSON: a checksum of every leaf, the data's fingerprint, ...
    checkpoints/<step>/seal.json  size of every file, and the digest of the small ones
    checkpoints/invalid-<step>    moved aside, because it did not verify

orbax commits a step atomically, but restores a flipped bit without a word: so every leaf has a
checksum that does not depend on how it is laid out over devices, and what the leaves do not cover
is sealed, before the commit.
"""

import functools
import json
import logging
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.collective import InvalidError, on_all
from vit_jax.checkpoints.seal import check_seal, complete_seal, write_seal
from vit_jax.errors import InputError
from vit_jax.tree import PyTree

logger = logging.getLogger("vit_jax")

State = TypeVar("State")  # a pytree, restored as it is described

# A process reads whole chunks of a leaf, so they are small beside what it keeps of it: of the two
# greatest axes of a leaf's share orbax makes about equal pieces.
_CHUNKS_OF_A_LEAF = 4096
_MIN_CHUNK_BYTES = 1 << 14
# orbax warns, once a leaf, that chunks below a MiB could be slow.
logging.getLogger("absl").addFilter(lambda record: record.module != "subchunking")


def saved_steps(directory: epath.Path) -> list[int]:
    """The committed steps in `directory`, newest first."""
    if not directory.exists():
        return []
    # An object store, which cannot rename, has a step under its name before it is committed.
    steps = [
        p for p in directory.iterdir()
        if p.name.isdigit() and p.is_dir() and ocp.utils.is_checkpoint_finalized(p)
    ]  # fmt: skip
    return sorted((int(p.name) for p in steps), reverse=True)


def _steps_of_first(directory: epath.Path) -> list[int]:
    """`saved_steps` as process 0 sees it; a shared disk may show others an older listing."""
    steps = saved_steps(directory)
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    as_many = np.resize(np.array(steps, np.int32), count)
    return multihost_utils.broadcast_one_to_all(as_many).tolist()


def read_meta(step_dir: epath.Path) -> dict:
    """What was saved beside the state."""
    return json.loads((step_dir / "meta" / "metadata").read_text())


def _restore(step_dir: epath.Path, target: State, partial: bool) -> tuple[State, dict]:
    """One step's state as `target` and its meta; on all processes, or on none.

    Raises:
      InvalidError: whatever orbax, or a check, finds wrong with it on any process.
    """

    def read_sealed_meta():
        if jax.process_index() == 0:  # it reads every small file: once is enough
            check_seal(step_dir)
        return read_meta(step_dir)

    meta = on_all(read_sealed_meta)
    state = on_all(functools.partial(_read_state, step_dir, target, partial))
    for name, found in checksums(state).items():  # of whole leaves, the same on every process
        if meta["checksums"].get(name) != found:
            raise InvalidError(f"leaf {name} is not as it was saved (checksum)")
    return state, meta


def _read_state(step_dir: epath.Path, target: State, partial: bool) -> State:
    """The leaves of one step that `target` has; of each this process's shards."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            step_dir / "state",
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=partial,
            ),
        )


def restore_step(
    path: epath.Path, abstract_state: State, *, partial: bool = False
) -> tuple[State, dict]:
    """(state, meta) of the checkpoint `path`, a step's; arguments as of `restore_newest`.

    Raises:
      InputError: if it does not verify.
    """
    try:
        return _restore(path, abstract_state, partial)
    except InvalidError as e:
        raise InputError(f"checkpoint {path} is invalid: {e}; take another step") from None


def restore_newest(
    directory: epath.Path,
    abstract_state: State,
    *,
    partial: bool = False,
    fingerprint: Callable[[int], str] | None = None,
    move_aside: bool = False,
) -> tuple[State, dict] | None:
    """(state, meta) of the newest step in `directory` that verifies; None if there is no step.

    Args:
      directory: the workdir's `checkpoints`.
      abstract_state: shapes and dtypes with shardings, of any mesh; with `partial` it may lack
        whole fields, e.g. be {"params": ...} alone.
      partial: see `abstract_state`.
      fingerprint: version -> the data's fingerprint by it, which must be that of the step; None:
        it does not matter.
      move_aside: rename what did not verify to `invalid-<step>`, once a good one was found.

    Raises:
      InputError: if there are steps and none verifies, or one was made with other data; nothing
        is moved then.
    """
    invalid = {}
    for step in _steps_of_first(directory):
        try:
            state, meta = _restore(directory / str(step), abstract_state, partial)
        except InvalidError as e:
            invalid[step] = str(e)
            logger.warning("checkpoint %s is invalid: %s", directory / str(step), invalid[step])
            continue
        version = meta.get("fingerprint_version", 1)  # versions are stored from the second on
        if fingerprint is not None and meta["data_fingerprint"] != fingerprint(version):
            raise InputError(
                f"the data set is not the one that the checkpoints in {directory} were made with "
                "(its examples, their order or its classes differ); bring it back, or take a new "
                "--workdir"
            )
        for bad in invalid if move_aside else ():
            _move_aside(directory, bad)
        return state, meta
    if invalid:
        reasons = "\n  ".join(f"{step}: {reason}" for step, reason in invalid.items())
        raise InputError(
            f"no checkpoint in {directory} can be read; put an intact copy there, or move the "
            f"directory away to start anew\n  {reasons}"
        )
    return None


def _move_aside(directory: epath.Path, step: int) -> None:
    """Renames a step, before a manager opens that would count it among those it keeps."""
    aside = directory / f"invalid-{step}"
    if jax.process_index() == 0:
        if aside.exists():
            aside.rmtree()
        (directory / str(step)).rename(aside)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"moved aside {step}")
    logger.warning("moved checkpoint %d aside to %s", step, aside)


def _save_args(leaf: jax.Array) -> ocp.SaveArgs:
    chunk_bytes = max(leaf.nbytes // _CHUNKS_OF_A_LEAF, _MIN_CHUNK_BYTES)
    return ocp.SaveArgs(chunk_byte_size=chunk_bytes)


class Checkpoints:
    """Saves states asynchronously into `directory`, keeping the newest and every n-th.

    Args:
      directory: the workdir's `checkpoints`; made if absent. What a killed save left is removed.
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
        meta = meta | {"step": step, "checksums": checksums(state)}
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
