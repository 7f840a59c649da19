"""Restoring a saved step: found, verified, and laid out over any mesh."""

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.checkpoints import stored
from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.collective import InvalidError, on_all
from vit_jax.checkpoints.seal import check_seal
from vit_jax.errors import InputError, check_version

logger = logging.getLogger("vit_jax")


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


def _restore(step_dir: epath.Path, target: Any, partial: bool) -> tuple[Any, dict]:
    """One step's state as `target` and its meta; on all processes, or on none.

    Raises:
      InputError: the step has a newer format.
      InvalidError: whatever orbax, or a check, finds wrong with it on any process.
    """

    def read_sealed_meta():
        if jax.process_index() == 0:  # it reads every small file: once is enough
            check_seal(step_dir)
        return read_meta(step_dir)

    meta = on_all(read_sealed_meta)
    check_version(str(step_dir), meta.get("format_version", 1), stored.FORMAT_VERSION)
    find_names = functools.partial(stored.stored_names, target, meta["checksums"], partial=partial)
    names = on_all(find_names)
    state = on_all(functools.partial(_read_state, step_dir, target, names))
    for name, found in checksums(state).items():  # of whole leaves, the same on every process
        if meta["checksums"][names[name]] != found:
            raise InvalidError(f"leaf {name} is not as it was saved (checksum)")
    return state, meta


def _read_state(step_dir: epath.Path, target: Any, names: dict[str, str]) -> Any:
    """The leaves of one step that `target` has; of each this process's shards.

    names: of these leaves, {name in `target`: name in the step}.
    """
    item = stored.as_stored(target, names)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(
            step_dir / "state",
            args=ocp.args.PyTreeRestore(
                item=item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                partial_restore=True,  # the names have been compared already
            ),
        )
    return stored.as_today(found, target, names)


def restore_step(path: epath.Path, abstract_state: Any, *, partial: bool = False) -> tuple:
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
    abstract_state: Any,
    *,
    partial: bool = False,
    fingerprint: Callable[[int], str] | None = None,
    move_aside: bool = False,
) -> tuple[Any, dict] | None:
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
      InputError: if there are steps and none verifies, or one has a newer format or was made with
        other data; nothing is moved then.
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
