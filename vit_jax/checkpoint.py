"""Checkpoints that certify themselves, written by orbax.

    checkpoints/<step>/state      the whole TrainState
    checkpoints/<step>/meta       JSON: a checksum of every leaf, the data's fingerprint, ...
    checkpoints/<step>/seal.json  size of every file, and the digest of the small ones
    checkpoints/invalid-<step>    moved aside, because it did not verify

orbax commits a step atomically, but restores a flipped bit without a word: so every leaf has a
checksum that does not depend on how it is laid out over devices, and what the leaves do not cover
is sealed, before the commit.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import tree
from vit_jax.config import InputError
from vit_jax.files import write_whole

logger = logging.getLogger("vit_jax")

_SEAL = "seal.json"
_DIGESTED_UP_TO = 1 << 20  # bytes; array data above that is covered by the leaves' checksums
# What orbax still writes while it commits, after the seal: it is sealed when the commit is over.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the input moves half of the output's."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _leaf_checksum(leaf: jax.Array) -> jax.Array:
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    # A 64-bit number becomes two words, along an axis of their own.
    bits = jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)
    for axis in range(bits.ndim):  # one by one: a flat index would wrap in large leaves
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        bits = _mix(bits ^ _mix(index + jnp.uint32(axis + 1)))
    return bits.sum(dtype=jnp.uint32)


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(_leaf_checksum, leaves)


def checksums(state) -> dict[str, int]:
    """{leaf name: 32-bit checksum of its bits and their places}, the same on any mesh.

    A sum over elements of the mixed bits, so that it can be taken shard by shard; any change of one
    element changes it.
    """
    return {n: int(x) for n, x in jax.device_get(_checksums(tree.flatten_names(state))).items()}


def _files(step_dir: epath.Path, prefix: str = "") -> dict[str, list]:
    """{relative path: [bytes, digest or None if the file is large]} but for the seal."""
    found = {}
    for path in step_dir.iterdir():
        if path.is_dir():
            found |= _files(path, f"{prefix}{path.name}/")
        elif path.name != _SEAL:
            found[prefix + path.name] = _entry(path)
    return found


def _entry(path: epath.Path) -> list:
    size, digest = path.stat().length, None
    if size <= _DIGESTED_UP_TO:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [size, digest]


def _check_seal(step_dir: epath.Path) -> None:
    """Raises ValueError naming the first file that is not as it was sealed."""
    if not (step_dir / _SEAL).exists():
        raise ValueError(f"file {_SEAL} is missing")
    found = _files(step_dir)
    for name, entry in json.loads((step_dir / _SEAL).read_text()).items():
        if name not in found:
            raise ValueError(f"file {name} is missing")
        if entry is not None and found[name] != entry:
            raise ValueError(f"file {name} is not as it was saved ({found[name][0]} bytes)")


def saved_steps(directory: epath.Path) -> list[int]:
    """The committed steps in `directory`, newest first."""
    if not directory.exists():
        return []
    steps = [p for p in directory.iterdir() if p.name.isdigit() and p.is_dir()]
    return sorted((int(p.name) for p in steps), reverse=True)


def read_meta(step_dir: epath.Path) -> dict:
    """What was saved beside the state."""
    return json.loads((step_dir / "meta" / "metadata").read_text())


def _restore(step_dir: epath.Path, target: Any, partial: bool) -> tuple[Any, dict]:
    """One step's state as `target` and its meta.

    Raises whatever orbax, or a check, finds wrong with it.
    """
    _check_seal(step_dir)
    meta = read_meta(step_dir)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        state = checkpointer.restore(
            step_dir / "state",
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=partial,
            ),
        )
    for name, found in checksums(state).items():
        if meta["checksums"].get(name) != found:
            raise ValueError(f"leaf {name} is not as it was saved (checksum)")
    return state, meta


# What says nothing about the checkpoint that was being read.
_NOT_ITS_FAULT = (
    MemoryError,
    PermissionError,
    TimeoutError,
    ConnectionError,
    jax.errors.JaxRuntimeError,
)


def restore_newest(
    directory: epath.Path,
    abstract_state: Any,
    *,
    partial: bool = False,
    fingerprint: str | None = None,
    move_aside: bool = False,
) -> tuple[Any, dict] | None:
    """(state, meta) of the newest step in `directory` that verifies; None if there is no step.

    Args:
      directory: the workdir's `checkpoints`.
      abstract_state: shapes and dtypes with shardings, of any mesh; with `partial` it may lack
        whole fields, e.g. be {"params": ...} alone.
      partial: see `abstract_state`.
      fingerprint: of the data, which must be that of the step; None: it does not matter.
      move_aside: rename what did not verify to `invalid-<step>`, once a good one was found.

    Raises:
      InputError: if there are steps and none verifies, or one was made with other data; nothing
        is moved then.
    """
    invalid = {}
    for step in saved_steps(directory):
        try:
            state, meta = _restore(directory / str(step), abstract_state, partial)
        except _NOT_ITS_FAULT:
            raise
        except Exception as e:  # a damaged file may fail anywhere below
            first_line = (str(e).strip() or repr(e)).splitlines()[0]
            invalid[step] = f"{type(e).__name__}: {first_line}"
            logger.warning("checkpoint %s is invalid: %s", directory / str(step), invalid[step])
            continue
        if fingerprint is not None and meta["data_fingerprint"] != fingerprint:
            raise InputError(
                f"the data set is not the one that the checkpoints in {directory} were made with "
                "(its examples or its classes differ); bring it back, or take a new --workdir"
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
        keep = [policies.LatestN(keep_last)]
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
        """Called by orbax when all is written but what the commit itself writes."""
        if jax.process_index() == 0:
            name = str(self._saving)
            uncommitted = list(self._directory.glob(f"{name}.orbax-checkpoint-tmp*"))
            step_dir = uncommitted[0] if uncommitted else self._directory / name
            files = _files(step_dir) | dict.fromkeys(_COMMIT_FILES)
            write_whole(step_dir / _SEAL, json.dumps(files, indent=1))

    def _wait(self) -> None:
        """Waits for the save in flight, if there is one, and seals what its commit wrote."""
        try:
            self._manager.wait_until_finished()
        finally:
            saving, self._saving = self._saving, None
        if saving is not None and jax.process_index() == 0:
            step_dir = self._directory / str(saving)
            sealed = json.loads((step_dir / _SEAL).read_text())
            committed = [step_dir / name for name in _COMMIT_FILES]
            sealed |= {path.name: _entry(path) for path in committed if path.exists()}
            write_whole(step_dir / _SEAL, json.dumps(sealed, indent=1))

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Saves `state` as `step`; returns once it may be donated, the files follow."""
        meta = meta | {"step": step, "checksums": checksums(state)}
        self._wait()
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)
                ),
                force=True,
            )
        except BaseException:
            self._saving = None  # there is nothing to wait for and to seal
            raise

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._wait()
        self._manager.close()


def start(
    *,
    directory: epath.Path,
    abstract_state: Any,
    fingerprint: str,
    from_init: Callable[[], Any] | None,
    from_scratch: Callable[[], Any],
) -> tuple[Any, dict]:
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
