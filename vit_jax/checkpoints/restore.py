"""Restores a saved step: finds it, verifies it, and shards it over any mesh."""

import contextlib
import functools
import gc
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.errors import InputError, check_version
from vit_jax.base.files import LiteralPath, is_object
from vit_jax.base.lazy import Lazy
from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.collective import InvalidError, on_all
from vit_jax.checkpoints.seal import check_seal
from vit_jax.job import processes

logger = logging.getLogger("vit_jax")

_LISTED_WITHIN_S = 600  # by process 0; a store may be slow
_GROUP_BYTES = 2**28  # of leaves that are verified at once
FORMAT_VERSION = 2  # of a step, stored in its meta as `format_version`


def saved_steps(directory: epath.Path) -> list[int]:
    """Committed steps in `directory`, newest first."""
    if not directory.exists():
        return []
    # Object stores cannot rename, so an uncommitted step has its final name there.
    steps = [
        p for p in directory.iterdir()
        if p.name.isdecimal() and p.is_dir() and ocp.utils.is_checkpoint_finalized(p)
    ]  # fmt: skip
    return sorted((int(p.name) for p in steps), reverse=True)


def steps_of_first(directory: epath.Path) -> list[int]:
    """`saved_steps` as seen by process 0; a shared disk may show others an older listing."""
    return processes.say_to_all("the saved steps", lambda: saved_steps(directory), _LISTED_WITHIN_S)


def read_meta(step_dir: epath.Path) -> dict:
    """The metadata saved with the state."""
    return json.loads((step_dir / "meta" / "metadata").read_text())


def newest_meta(directory: epath.Path, last_step: int) -> dict:
    """The metadata of the newest step up to `last_step` that is as sealed; {}: there is none."""
    for step in saved_steps(directory):
        if step <= last_step:
            with contextlib.suppress(OSError, ValueError):
                check_seal(directory / str(step))
                return read_meta(directory / str(step))
    return {}


def _restore(
    step_dir: epath.Path, target: Any, partial: bool, keep: bool = True
) -> tuple[Any, dict]:
    """State of one step, structured like `target`, and its meta; fails on all processes or none.

    Without `keep` it is verified group by group, and None.

    Raises:
      InputError: the step has another format.
      InvalidError: orbax or a check found it damaged on any process.
    """

    def read_sealed_meta() -> dict:
        if jax.process_index() == 0:  # it reads every small file, so one process is enough
            check_seal(step_dir)
        return read_meta(step_dir)

    meta = on_all(read_sealed_meta)
    check_version(str(step_dir), meta.get("format_version", 1), FORMAT_VERSION)
    on_all(functools.partial(_check_names, target, meta["checksums"], partial))
    kept: dict[str, jax.Array] = {}
    for names in _groups(target, keep):
        leaves = on_all(functools.partial(_read_leaves, step_dir, target, names))
        # Over whole leaves, so equal on every process.
        for name, found in checksums(leaves).items():
            if meta["checksums"][name] != found:
                raise InvalidError(f"leaf {name} is damaged: its checksum differs")
        kept |= leaves if keep else {}
        del leaves
    return jax.tree.map(kept.get, tree.leaf_names(target)) if keep else None, meta


def _groups(target: Any, keep: bool) -> Iterator[list[str]]:
    """The names of the leaves of `target` in groups, the largest first.

    A group is one leaf, or several of at most _GROUP_BYTES together, so that few bytes are in host
    memory at once. With `keep` that limit is at least a sixteenth of the state: each group costs
    time.
    """
    sizes = {
        name: leaf.size * leaf.dtype.itemsize for name, leaf in tree.flatten_names(target).items()
    }
    most = max(_GROUP_BYTES, sum(sizes.values()) // 16) if keep else _GROUP_BYTES
    group: list[str] = []
    filled = 0
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if group and filled + sizes[name] > most:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += sizes[name]
    if group:
        yield group


def _check_names(target: Any, saved: Iterable[str], partial: bool) -> None:
    """Raise ValueError unless `saved` are the leaves of `target`; with `partial`, or more."""
    wanted, saved = tree.flatten_names(target).keys(), {*saved}
    if missing := sorted(wanted - saved):
        raise ValueError(f"leaf {missing[0]} is missing")
    surplus = sorted(saved - wanted)
    if surplus and not partial:
        raise ValueError(f"leaf {surplus[0]} is not part of this run's state")


def _read_leaves(step_dir: epath.Path, target: Any, names: Sequence[str]) -> dict[str, jax.Array]:
    """{name: array}: this process's shards of those leaves of `target`, read from the disk."""
    found, wanted = tree.flatten_names(target), {*names}
    item = jax.tree.map(
        lambda name: found[name] if name in wanted else ocp.PLACEHOLDER, tree.leaf_names(target)
    )
    largest = max(found[name].size * found[name].dtype.itemsize for name in names)
    # Orbax would read all leaves at once, into buffers beside them: of whole chunks, up to twice as
    # large as a leaf.
    at_once = 1 + 2 * largest // 10**9
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=at_once)
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(
            LiteralPath(step_dir) / "state",
            args=ocp.args.PyTreeRestore(
                item=item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                partial_restore=True,  # names have been compared already
            ),
        )
    leaves = tree.flatten_names(jax.block_until_ready(restored))
    gc.collect(0)  # JAX holds the arrays that it has copied to devices in reference cycles
    return {name: leaves[name] for name in names}


def split_over_all(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """`leaf` split over all devices of the job on the first axis whose size allows it."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    axis = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "all"))


def open_leaves(step_dir: epath.Path, names: Iterable[str]) -> dict[str, Lazy]:
    """The leaves of a step whose names are given, read where they are used; they are not verified.

    They lie in orbax's files: arrays of zarr by name in one OCDBT database.
    """
    import tensorstore

    place = os.fspath(step_dir / "state") + "/"
    base = place if is_object(step_dir) else {"driver": "file", "path": place}

    def open_leaf(name: str) -> Lazy:
        kvstore = {"driver": "ocdbt", "base": base, "path": name.replace("/", ".") + "/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result()

        def read(index: tuple[slice, ...]) -> np.ndarray:
            try:
                return array[index].read().result()
            except (OSError, ValueError) as e:
                raise InputError(
                    f"checkpoint {step_dir}: {name} cannot be read any more ({e}); if the run that "
                    "wrote it goes on, give a step that it keeps"
                ) from None

        return Lazy(array.shape, read, agreed=True)

    return {name: open_leaf(name) for name in names}


def restore_step(
    path: epath.Path, abstract_state: Any, *, partial: bool = False, keep: bool = True
) -> tuple:
    """(state, meta) of the checkpoint of one step at `path`; arguments as in `restore_newest`.

    Raises:
      InputError: if verification fails.
    """
    try:
        return _restore(path, abstract_state, partial, keep)
    except InvalidError as e:
        raise InputError(f"checkpoint {path} is invalid: {e}; use another step") from None


def restore_newest(
    directory: epath.Path,
    abstract_state: Any,
    *,
    partial: bool = False,
    keep: bool = True,
    fingerprint: str | None = None,
    move_aside: bool = False,
) -> tuple[Any, dict] | None:
    """(state, meta) of the newest valid step in `directory`; None if there are no steps.

    Args:
      directory: the workdir's `checkpoints`.
      abstract_state: shapes and dtypes with shardings over any mesh; with `partial` it may lack
        whole fields, e.g. be {"params": ...}.
      partial: see `abstract_state`.
      keep: False: the state is verified, and None is returned in its place.
      fingerprint: of the data, which must equal that in the step; None: not checked.
      move_aside: rename damaged steps to `invalid-<step>` once a valid one has been found.

    Raises:
      InputError: if none of the steps is valid, or one has another format or was made with other
        data; nothing is moved then.
    """
    invalid: dict[int, str] = {}
    steps = steps_of_first(directory)
    while steps:
        step = steps.pop(0)
        try:
            state, meta = _restore(directory / str(step), abstract_state, partial, keep)
        except InvalidError as e:
            found = steps_of_first(directory)
            if found[:1] > [max([step, *invalid])]:  # a run saves here, and deletes old steps
                steps, invalid = found, {}
                continue
            invalid[step] = str(e)
            logger.warning("checkpoint %s is invalid: %s", directory / str(step), invalid[step])
            continue
        if fingerprint is not None:
            check_same_data(meta, fingerprint, str(directory))
        if invalid:
            logger.warning("step %d is taken instead", step)
        for bad in invalid if move_aside else ():
            _move_aside(directory, bad)
        return state, meta
    if invalid:
        reasons = "\n  ".join(f"{step}: {reason}" for step, reason in invalid.items())
        raise InputError(
            f"no checkpoint in {directory} is valid; restore an intact copy, or move the directory "
            f"away to start from scratch\n  {reasons}"
        )
    return None


def check_same_data(meta: Mapping[str, Any], fingerprint: str, where: str) -> None:
    """Raise InputError if a step in `where`, saved with `meta`, was made with other data."""
    if meta["data_fingerprint"] != fingerprint:
        raise InputError(
            f"the data set differs from the one that the checkpoints in {where} were made with (in "
            "its examples, their order or its classes); restore it, or use a new --workdir"
        )


def _move_aside(directory: epath.Path, step: int) -> None:
    """Rename a step, before a checkpoint manager counts it among those to keep."""
    aside = directory / f"invalid-{step}"
    if jax.process_index() == 0:
        if aside.exists():
            aside.rmtree()
        (directory / str(step)).rename(aside)
    multihost_utils.sync_global_devices(f"moved aside {step}")
    logger.warning("moved checkpoint %d aside to %s", step, aside)
