"""Prepare a set of pictures: shards by many processes, or by Apache Beam, and a manifest.

    OUTPUT/manifest.json   counts, classes, sizes, checksums by file, the command, versions
    OUTPUT/broken.csv      split, name and reason of each picture that is left out

Both call `make_shard` for each shard that is not finished; nothing else is shared between workers.
The files depend neither on the number of workers nor on restarts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import multiprocessing
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
from etils import epath

import vit_jax
from vit_jax.base.errors import InputError, OneProcessError, few
from vit_jax.base.files import read_json, write_whole
from vit_jax.config.sections import Data
from vit_jax.curation.formats import Facts, find_format
from vit_jax.curation.pictures import Rule, read_pictures
from vit_jax.curation.shards import (
    DECODED_BY,
    FOLDER,
    Plan,
    Shard,
    Tally,
    digest_of,
    finished,
    labels_of,
    make_shard,
    open_split,
    open_splits,
    shards_of,
)
from vit_jax.insight.tables import as_csv

logger = logging.getLogger("vit_jax")

# Libraries that write the bytes of shards.
_LIBRARIES = ("array_record", "numpy", "pillow", "pyarrow", "tensorflow", "tensorflow-cpu",
              "tensorflow-datasets")  # fmt: skip
_SAID_S = 10.0  # between two lines of progress
_ORPHAN_S = 1.0
_STALE_S = 3600.0  # age of temporary files that nobody writes any more
_PIXEL_KEYS = (*DECODED_BY, "image_size", "own")

# Calls a function with each item, here or elsewhere: (function, items, progress). The function
# gives {"records": number, "broken": [...], ...}; only the numbers come back.
Runner = Callable[[Callable[[Any], Mapping[str, Any]], Sequence[Any], "Progress"], None]


def prepare(plan: Plan, command: str, runner: Runner) -> dict[str, Any]:
    """Make the missing shards of a set, and return its manifest without the list of files.

    Raises: InputError if the source is missing, the format cannot hold it, `output` holds another
      set, or a split has no picture that can be read; OneProcessError if the command must be run
      again.
    """
    shards, output = shards_of(plan), plan.folder
    facts = Facts.of(open_splits(plan)[plan.splits[0]])
    if fault := find_format(plan.format).fault(output, facts):
        raise InputError(f"--format={plan.format}: {fault}")
    command = _begin(plan, shards, command)
    missing = [shard for shard in shards if finished(plan, shard) is None]
    logger.info("%s: %d of %d shards are to be made", output, len(missing), len(shards))
    runner(functools.partial(make_shard, plan), missing, Progress(len(missing)))
    records = {shard: finished(plan, shard) for shard in shards}
    if left := [shard for shard, record in records.items() if record is None]:
        said = f"{len(left)} shards are not finished; run the command again"
        raise OneProcessError(f"{output}: {said}")
    _remove_stale({plan.path(shard).parent for shard in shards} | {output / FOLDER})
    return _finish(plan, command, facts, {k: v for k, v in records.items() if v is not None})


def _remove_stale(folders: Iterable[epath.Path]) -> None:
    """Remove the temporary files of processes that were killed, and none that is being written."""
    for path in (path for folder in folders for path in folder.glob(".*.tmp")):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished
            if time.time() - path.stat().mtime > _STALE_S:
                path.unlink()


def _begin(plan: Plan, shards: Sequence[Shard], command: str) -> str:
    """Store the plan, or check that the stored one is equal; the command that began."""
    decided = {
        "source": {shard.split: shard.fingerprint for shard in shards},
        **{key: getattr(plan.data, key) for key in _PIXEL_KEYS},
        "captions": plan.captions,
        "format": plan.format,
        **dataclasses.asdict(plan.rule),
        "shard_size": plan.shard_size,
        "shuffle_seed": plan.shuffle_seed,
        "versions": _versions(),
    }
    decided = json.loads(json.dumps(decided))  # tuples become lists, as they are stored
    path = plan.folder / FOLDER / "plan.json"
    stored = read_json(path, lambda found: found["command"])
    if stored is None:
        if plan.folder.exists() and {*plan.folder.iterdir()} - {path.parent}:
            raise InputError(f"--output={plan.folder}: holds other files; give a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"command": command, **decided}, indent=2) + "\n")
        return command
    if differing := [key for key in decided if stored.get(key) != decided[key]]:
        said = ", ".join(f"{key} {stored.get(key)} -> {decided[key]}" for key in differing)
        raise InputError(
            f"--output={plan.folder}: holds pictures that were prepared otherwise: {said}; restore "
            "it, or give a new --output"
        )
    return stored["command"]


def _versions() -> dict[str, str]:
    found = {"vit_jax": vit_jax.__version__}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _finish(
    plan: Plan, command: str, facts: Facts, records: Mapping[Shard, Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the manifest and the files that describe the set."""
    tallies = {split: Tally() for split in plan.splits}
    lengths: dict[str, list[int]] = {split: [] for split in plan.splits}
    names = {field.name for field in dataclasses.fields(Tally)}
    for shard, record in records.items():
        tallies[shard.split].add(Tally(**{k: v for k, v in record.items() if k in names}))
        lengths[shard.split].append(record["records"])
    rows = [(split, *row) for split, tally in tallies.items() for row in tally.broken]
    write_whole(plan.folder / "broken.csv", as_csv([("split", "name", "reason"), *rows]))
    for split in (split for split, tally in tallies.items() if not tally.records):
        reasons = few(f"{name}: {why}" for name, why in tallies[split].broken)
        raise InputError(f"{plan.data.name} {split}: no picture can be read: {reasons}")
    splits = {split: (lengths[split], tally.image_bytes) for split, tally in tallies.items()}
    find_format(plan.format).describe(plan.folder, facts, splits)
    settings = {key: getattr(plan.data, key) for key in DECODED_BY}
    read_by = {k: v for k, v in settings.items() if v != getattr(Data, k)}
    read_by = {**reading_of(plan.folder, plan.format), **read_by}
    manifest = {
        "command": command,
        "read_by": shlex.join(f"--config.data.{k}={v}" for k, v in read_by.items()),
        "settings": {"format": plan.format, **settings},
        "versions": _versions(),
        "splits": {split: _summary(tally, facts) for split, tally in tallies.items()},
    }
    files = {r["file"]: {k: r[k] for k in ("records", "bytes", "sha256")}
             for r in records.values() if r["records"]}  # fmt: skip
    content = json.dumps({**manifest, "files": files}, indent=2) + "\n"
    write_whole(plan.folder / "manifest.json", content)
    return manifest


def reading_of(output: epath.Path, format: str) -> dict[str, str]:
    """The keys of `data` that read a set, prepared in the folder `output`."""
    if name := find_format(format).reads:
        return {"name": name, "data_dir": os.fspath(output)}
    return {"name": output.name, "data_dir": os.fspath(output.parent)}


def _summary(tally: Tally, facts: Facts) -> dict[str, Any]:
    sides = {
        name: {"least": least, "mean": round(total / tally.records, 1), "greatest": greatest}
        for name, of in (("height", tally.height), ("width", tally.width))
        for least, total, greatest in [of] * bool(of)
    }
    counts = sorted((int(label), number) for label, number in tally.classes.items())
    return {
        "records": tally.records,
        "broken": len(tally.broken),
        "lost_captions": tally.lost_captions,
        "image_bytes": tally.image_bytes,
        **sides,
        "unlabelled": tally.unlabelled,
        "classes": {facts.classes[label]: number for label, number in counts},
    }


class Progress:
    """Lines with the pictures that are done, their rate, and the time left, for `number` items."""

    def __init__(self, number: int):
        self._number, self.items, self.pictures = number, 0, 0
        self._start = self._said = time.perf_counter()

    def add(self, result: Mapping[str, Any]) -> None:
        self.reach(self.items + 1, self.pictures + result["records"] + len(result["broken"]))

    def reach(self, items: int, pictures: int) -> None:
        """So many items and pictures are done by now."""
        self.items, self.pictures, now = items, pictures, time.perf_counter()
        if not items or (now - self._said < _SAID_S and items < self._number):
            return
        self._said, took = now, now - self._start
        left = took / items * (self._number - items)
        logger.info("%d of %d parts, %d pictures, %.0f/s, %d:%02d:%02d left", items,
                    self._number, pictures, pictures / took, left // 3600,
                    left % 3600 // 60, left % 60)  # fmt: skip


def in_processes(workers: int) -> Runner:
    """Calls the function in that many processes; 1: in this one."""

    def run(
        function: Callable[[Any], Mapping[str, Any]], items: Sequence[Any], progress: Progress
    ) -> None:
        if workers == 1:
            for item in items:
                progress.add(function(item))
            return
        spawn = multiprocessing.get_context("spawn")  # TensorFlow's threads do not survive a fork
        with concurrent.futures.ProcessPoolExecutor(
            workers, spawn, initializer=_end_with, initargs=(os.getpid(),)
        ) as pool:
            jobs = [pool.submit(function, item) for item in items]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    progress.add(job.result())
            except concurrent.futures.BrokenExecutor:
                said = "a worker was killed, often for lack of memory; set fewer"
                said = f"--workers={workers}: {said}, and run the command again"
                raise OneProcessError(said) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    return run


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def verify(output: epath.Path) -> list[str]:
    """Read a prepared set back: the faults of its files and pictures; [] if all is well.

    Raises: InputError if nothing is prepared, or the set cannot be opened.
    """
    manifest = read_json(output / "manifest.json", lambda found: found["settings"])
    if manifest is None:
        raise InputError(f"--verify: {output} has no manifest.json; prepare it first")
    faults = [
        f"{file}: {fault}"
        for file, expected in manifest["files"].items()
        if (fault := _fault_of(output / file, expected))
    ]
    stored = manifest["settings"].items()
    keys: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored}
    keys |= reading_of(output, keys.pop("format"))
    data = Data(**keys)
    return faults or [
        f"{split}: {fault}"
        for split, expected in manifest["splits"].items()
        for fault in _faults_of_split(data, split, expected)
    ]


def _fault_of(path: epath.Path, expected: Mapping[str, Any]) -> str:
    if not path.exists():
        return "is missing; prepare again"
    opened: IO[bytes] = path.open("rb")
    with opened as file:
        is_equal = digest_of(file) == expected["sha256"]
    return "" if is_equal else "has changed; remove it and prepare again"


def _faults_of_split(data: Data, split: str, expected: Mapping[str, Any]) -> Iterable[str]:
    source = open_split(data, split, False)
    ids, names = np.arange(source.num_examples), Facts.of(source).classes
    tally = Tally()
    for picture in read_pictures(source, ids, Rule()):
        tally.count(picture, labels_of(picture) if expected["classes"] else [])
    found = {names[int(label)]: n for label, n in tally.classes.items()} if names else {}
    for what, got, needed in (
        ("pictures", tally.records, expected["records"]),
        ("bytes of pictures", tally.image_bytes, expected["image_bytes"]),
        ("pictures by class", found, expected["classes"]),
    ):
        if got != needed:
            yield f"{what}: {got} are read back, {needed} were written"
