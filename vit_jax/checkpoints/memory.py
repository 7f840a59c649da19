"""The last states of a run in the memory of its hosts, from which it restarts without the store.

    FOLDER/vit_jax-UID/RUN/process-I/STEP/pieces      bytes of parts of leaves, one after another
                                          index.json  their places, and the meta of the step

FOLDER is /dev/shm, or on a disk of the host. These files outlive their process, but not their host.
Therefore each process also writes the pieces of a process on another host, unless its own devices
hold them. After the loss of one host every piece still exists, and the process that replaces the
lost one receives its pieces over the network of the devices. Each piece has the region of its leaf,
so a job with another mesh or another number of processes can restore them too, if each process
finds its regions on its host or the next one.

A step is written under another name and then renamed. Two steps are kept, so one is always whole.
The checksums of leaves, which do not depend on the mesh, are verified after reading.
"""

import functools
import json
import logging
import math
import os
import pathlib
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.checkpoints.checksums import checksums
from vit_jax.checkpoints.collective import InvalidError, on_all
from vit_jax.job import processes

logger = logging.getLogger("vit_jax")

_STEPS_OFFERED = 4  # by a process at a restart: its own two, and others on its host
_SAID_WITHIN_S = 600

Region = tuple[tuple[int, int], ...]  # (start, stop) of each axis of a leaf


def folder_here(run: str, folder: str) -> pathlib.Path:
    """Where this process keeps its steps; `run` and `folder` as of `Memory`."""
    return pathlib.Path(folder, f"vit_jax-{os.getuid()}", run, f"process-{jax.process_index()}")


class Memory:
    """The kept steps of one run; all processes make it, and call its methods, together.

    Args:
      run: a name that no other run of this user has.
      folder: of each host, in memory or on a local disk.
    """

    def __init__(self, run: str, folder: str):
        self._folder = folder_here(run, folder)
        self._run = self._folder.parent
        self._distance = _distance_to_next_host()

    def __str__(self) -> str:
        return str(self._run)

    def save(self, step: int, state: tree.PyTree, meta: Mapping[str, Any]) -> None:
        """Keep `state`, whose leaves have NamedShardings over one mesh, with `meta` as `step`.

        A full or unsuitable folder is only a warning: the store remains.
        """
        own = {"step": step, "checksums": checksums(state)}
        pieces = _pieces(tree.flatten_names(state), self._distance)
        try:
            _check_private(self._run.parent)
            for old in sorted(_steps_in(self._folder))[:-1]:
                shutil.rmtree(self._folder / str(old))
            _write(self._folder / str(step), pieces, {**meta, **own})
        except OSError as e:
            logger.warning("step %d is not kept in %s: %s", step, self, e.strerror or e)
        finally:
            for _ in pieces:  # exchanged by all processes, so also by one that cannot write
                pass

    def restore(
        self, target: Any, first: int, accepts: Callable[[dict], bool] = lambda meta: True
    ) -> tuple[Any, dict] | None:
        """(state, meta) of the newest kept step from `first` on; None: no step is whole and valid.

        Args:
          target: shapes and dtypes, with NamedShardings over one mesh.
          first: a step.
          accepts: whether a step with this meta is wanted; the same on all processes.
        """
        leaves, me = tree.flatten_names(target), jax.process_index()
        for step, has_own in self._agree(leaves, first):
            kept, giver = _Kept(self._run, step), has_own.index(True)
            say_meta = functools.partial(getattr, kept, "meta")
            meta = processes.say_to_all("the kept meta", say_meta, _SAID_WITHIN_S, by=giver)
            if not accepts(meta):
                continue
            to = {self._holder(p): p for p, has in enumerate(has_own) if not has}
            try:
                # Everything is read before anything is exchanged, so none waits for one that fails.
                read_for = functools.partial(kept.read_for, leaves=leaves)
                mine = on_all(functools.partial(read_for, me if has_own[me] else None))
                sent = on_all(functools.partial(read_for, to.get(me)))
                found = _place(leaves, mine, sent, to)
                for name, value in checksums(found).items():
                    if meta["checksums"][name] != value:
                        raise InvalidError(f"leaf {name} is damaged: its checksum differs")
            except InvalidError as e:
                logger.warning("step %d in %s is invalid: %s", step, self, e)
                continue
            for holder, process in to.items():
                logger.info("process %d received its shards from process %d", process, holder)
            return jax.tree.unflatten(jax.tree.structure(target), found.values()), meta
        return None

    def drop_after(self, step: int) -> None:
        """Remove kept steps beyond `step`, from which the run does not go on."""
        for folder in self._run.glob("process-*"):
            for newer in _steps_in(folder):
                if newer > step:
                    shutil.rmtree(folder / str(newer), ignore_errors=True)

    def remove(self) -> None:
        """Remove all steps of the run on this host."""
        shutil.rmtree(self._run, ignore_errors=True)

    def _folders(self) -> list[pathlib.Path]:
        """Of the processes that kept steps on this host; none if another user can write them."""
        try:
            _check_private(self._run.parent)
        except OSError as e:
            logger.warning("%s is not read: %s", self, e.strerror or e)
            return []
        return sorted(self._run.glob("process-*"))

    def _holder(self, process: int) -> int:
        """The process that keeps a copy of the pieces of `process`."""
        return (process + self._distance) % jax.process_count()

    def _agree(self, leaves: Mapping[str, Any], first: int) -> list[tuple[int, list[bool]]]:
        """[(step, for each process whether its host has all its regions)], the newest first.

        Only steps in which the holders have the regions of all other processes.
        """
        me, n = jax.process_index(), jax.process_count()
        here = {step for folder in self._folders() for step in _steps_in(folder)}
        offers = np.full((_STEPS_OFFERED, 3), -1, np.int32)
        newest = sorted((step for step in here if step >= first), reverse=True)[:_STEPS_OFFERED]
        for row, step in enumerate(newest):
            kept = _Kept(self._run, step)
            has = [kept.covers(leaves, p) for p in (me, (me - self._distance) % n)]
            offers[row] = step, *has
        table = multihost_utils.process_allgather(offers).reshape(n, _STEPS_OFFERED, 3)
        agreed = []
        for step in sorted({*table[..., 0].ravel().tolist()} - {-1}, reverse=True):
            has = (table[..., :1] == step) & (table[..., 1:] == 1)
            own, copy = has.any(axis=1).T.tolist()
            if any(own) and all(own[p] or copy[self._holder(p)] for p in range(n)):
                agreed.append((step, own))
        return agreed


class _Kept:
    """One step in the files of this host, whoever wrote them.

    meta: saved with the step; {} if this host has no files of it.
    """

    def __init__(self, run: pathlib.Path, step: int):
        self.meta: dict[str, Any] = {}
        self._pieces: dict[str, dict[Region, np.ndarray]] = {}  # bytes
        for folder in sorted(run.glob(f"process-*/{step}")):
            try:
                index = json.loads((folder / "index.json").read_text())
                data = np.memmap(folder / "pieces", np.uint8, "r")
            except (OSError, ValueError) as e:
                logger.warning("%s is damaged: %s", folder, e)
                continue
            self.meta = self.meta or index["meta"]
            for name, region, start, stop in index["pieces"]:
                found = self._pieces.setdefault(name, {})
                found[tuple((first, last) for first, last in region)] = data[start:stop]

    def covers(self, leaves: Mapping[str, Any], process: int) -> bool:
        """Whether the files have every region that the devices of `process` need."""
        return all(
            sum(_size(_overlap(region, piece)) for piece in self._pieces.get(name, {}))
            == _size(region)
            for name, leaf in leaves.items()
            for region in set(_regions(leaf.sharding, leaf.shape)[process])
        )

    def read_for(
        self, process: int | None, leaves: Mapping[str, Any]
    ) -> dict[str, list[np.ndarray]]:
        """The shards of every leaf on the devices of `process`; {} for None."""
        return (
            {}
            if process is None
            else {
                name: [
                    self._read(name, region, np.dtype(leaf.dtype))
                    for region in _regions(leaf.sharding, leaf.shape)[process]
                ]
                for name, leaf in leaves.items()
            }
        )

    def _read(self, name: str, region: Region, dtype: np.dtype) -> np.ndarray:
        pieces = self._pieces[name]
        shape = [stop - start for start, stop in region]
        if region in pieces:
            return np.array(pieces[region]).view(dtype).reshape(shape)
        whole = np.empty(shape, dtype)
        for piece, data in pieces.items():
            if _size(common := _overlap(region, piece)):
                values = data.view(dtype).reshape([stop - start for start, stop in piece])
                whole[_slices(common, region)] = values[_slices(common, piece)]
        return whole


def _place(
    leaves: Mapping[str, Any],
    mine: Mapping[str, Sequence[np.ndarray]],
    sent: Mapping[str, Sequence[np.ndarray]],
    to: Mapping[int, int],
) -> dict[str, jax.Array]:
    """Arrays with the shards `mine`; a process without them receives what its holder has `sent`.

    `to`: {holder: process without shards}.
    """
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        nothing = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        devices = _by_process(leaf.sharding.mesh)[jax.process_index()]

        def make(
            shards: Sequence[np.ndarray], leaf: Any = leaf, devices: Sequence[jax.Device] = devices
        ) -> jax.Array:
            return jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, list(map(jax.device_put, shards, devices))
            )

        received = _move(make(sent.get(name, [nothing] * len(devices))), to) if to else None
        found[name] = make(mine[name]) if mine else received
    return found


def _pieces(
    leaves: Mapping[str, jax.Array], distance: int
) -> Iterator[tuple[str, Region, np.ndarray]]:
    """(leaf name, region, values) of the shards here, and of the other process's that this holds.

    Leaves move one by one, so the devices need memory for one leaf more.
    """
    me, n = jax.process_index(), jax.process_count()
    for name, leaf in leaves.items():
        regions = _regions(leaf.sharding, leaf.shape)
        own = dict(zip(regions[me], _local_shards(leaf), strict=True))
        for region, shard in own.items():
            yield name, region, np.asarray(shard)
        holders = {p: (p + distance) % n for p in range(n)}
        if any({*regions[p]} - {*regions[holder]} for p, holder in holders.items()):
            moved = _local_shards(_move(leaf, holders))
            for region, shard in zip(regions[(me - distance) % n], moved, strict=True):
                if region not in own:
                    yield name, region, np.asarray(shard)


def _write(
    folder: pathlib.Path, pieces: Iterable[tuple[str, Region, np.ndarray]], meta: dict[str, Any]
) -> None:
    """Write `folder`, which replaces one of its name as a whole."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    for path in (unfinished, folder):
        shutil.rmtree(path, ignore_errors=True)
    unfinished.mkdir(parents=True)
    places = []
    with open(unfinished / "pieces", "wb") as file:
        for name, region, values in pieces:
            start = file.tell()
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            places.append((name, region, start, file.tell()))
    (unfinished / "index.json").write_text(json.dumps({"meta": meta, "pieces": places}))
    unfinished.rename(folder)


def _move(leaf: jax.Array, to: Mapping[int, int]) -> jax.Array:
    """An array with the shards of `leaf` on the devices of other processes, {from: to}.

    The n-th device of a process receives the shard of the n-th device of the other.
    """
    sharding = _named_sharding(leaf)
    moved = _mover(sharding.mesh, sharding.spec, tuple(to.items()))(leaf)
    return jax.block_until_ready(moved)  # on CPUs two exchanges at once can block each other


@functools.cache
def _mover(
    mesh: Mesh, spec: P, to: tuple[tuple[int, int], ...]
) -> Callable[[jax.Array], jax.Array]:
    devices, place = _by_process(mesh), {d: i for i, d in enumerate(mesh.devices.flat)}
    pairs = [
        (place[a], place[b])
        for source, target in to
        for a, b in zip(devices[source], devices[target], strict=True)
    ]

    def move(shard: jax.Array) -> jax.Array:
        return jax.lax.ppermute(shard, mesh.axis_names, pairs)

    return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@functools.cache
def _by_process(mesh: Mesh) -> dict[int, list[jax.Device]]:
    """The devices of each process, in the order of the mesh."""
    devices: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        devices.setdefault(device.process_index, []).append(device)
    return devices


@functools.cache
def _regions(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, list[Region]]:
    """The region of each device of each process, as in `_by_process`."""
    slices = sharding.devices_indices_map(shape)
    return {
        process: [
            tuple(s.indices(size)[:2] for s, size in zip(slices[device], shape, strict=True))
            for device in devices
        ]
        for process, devices in _by_process(sharding.mesh).items()
    }


def _local_shards(leaf: jax.Array) -> list[jax.Array]:
    """The shards of this process's devices, as in `_by_process`."""
    by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [by_device[d] for d in _by_process(_named_sharding(leaf).mesh)[jax.process_index()]]


def _named_sharding(leaf: jax.Array) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding


def _overlap(a: Region, b: Region) -> Region:
    return tuple(
        (max(p, q), max(min(r, s), max(p, q))) for (p, r), (q, s) in zip(a, b, strict=True)
    )


def _size(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def _slices(region: Region, within: Region) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(region, within, strict=True)
    )


def _steps_in(folder: pathlib.Path) -> list[int]:
    """Whole steps in the folder of a process."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def _check_private(root: pathlib.Path) -> None:
    """Make `root` for this user only; OSError if it is another user's, or others may open it."""
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{root} must be a folder that only this user can open")


def _distance_to_next_host() -> int:
    """Difference between the numbers of two processes on neighbouring hosts; 1 on a single host."""
    own = np.uint32(zlib.crc32(socket.gethostname().encode()))
    hosts = multihost_utils.process_allgather(own).ravel()
    together = int(np.unique(hosts, return_counts=True)[1].max())
    return together if together < len(hosts) else 1
