"""The workdir of a run: checked before anything is written, then created."""

import contextlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.checkpoints import restore
from vit_jax.config import changed_evals, changed_keys, say_changes
from vit_jax.config.plugins import store_plugins
from vit_jax.config.stored import StoredConfig, parse_stored
from vit_jax.data import Source
from vit_jax.data.division import FILE
from vit_jax.errors import InputError, collect_faults
from vit_jax.files import check_folder, write_whole
from vit_jax.job import processes
from vit_jax.job.lock import Lock, NoLock, check_free
from vit_jax.run.extension import KEYS_OF_THE_END, find_other_past, say_extension
from vit_jax.run.resolve import Resolved
from vit_jax.run.starts import last_devices

logger = logging.getLogger("vit_jax")


# choose(config, mesh) -> config with the fastest layout that fits the devices of the mesh.
ChooseLayout = Callable[[ConfigDict, Mesh], ConfigDict]


class StoredRun(NamedTuple):
    """What a workdir holds before a start.

    text: of config.json; "" if there is none.
    stored: the content of `text`; None if there is none.
    saved_steps: of its checkpoints, the newest first.
    devices: number and kind of the devices of the last start; None: it is not recorded.
    """

    text: str = ""
    stored: StoredConfig | None = None
    saved_steps: tuple[int, ...] = ()
    devices: tuple[int, str] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun; its config.json may be lost."""
        return self.stored is not None or bool(self.saved_steps)


NEW_RUN = StoredRun()


def read_run(workdir: epath.Path) -> StoredRun:
    """What this process finds in `workdir`; raises InputError if config.json is damaged."""
    return _parse_run(_describe_run(workdir), workdir)


def _describe_run(workdir: epath.Path) -> str:
    facts = {
        "text": _read_if_there(workdir / "config.json"),
        "saved_steps": restore.saved_steps(workdir / "checkpoints"),
        "devices": last_devices(workdir),
    }
    return json.dumps(facts)


def _parse_run(description: str, workdir: epath.Path) -> StoredRun:
    facts = json.loads(description)
    text, devices = facts["text"], facts["devices"]
    stored = parse_stored(text, workdir) if text else None
    return StoredRun(text, stored, tuple(facts["saved_steps"]), devices and tuple(devices))


def check_store(workdir: epath.Path) -> None:
    """Raise InputError if the library needed for checkpoints in `workdir` is not installed."""
    if os.fspath(workdir).startswith("gs://") and not _is_installed("google.cloud.storage"):
        raise InputError(
            f"--workdir={workdir}: checkpoints on gs:// need google-cloud-storage, which is not "
            "installed; run pip install -e '.[gcs]'"
        )


def check_writable(workdir: epath.Path) -> None:
    """Raise InputError unless `workdir` is a directory that can be created or written to."""
    check_store(workdir)
    check_folder(workdir, "--workdir")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent module is missing
        return False


def check_settings(
    config: ConfigDict, before: StoredRun, workdir: epath.Path, free: Sequence[str]
) -> None:
    """Raise InputError if `config` and the run that was `before` differ in a fixed key.

    `free`: keys that may change, besides those that always may.
    """
    if before.stored is None:
        return
    changed = changed_keys(before.stored.resolved, config)
    collect_faults(
        say_changes({key: values for key, values in changed.items() if key not in free}),
        f"--workdir={workdir} already holds a run with other settings; restore them, use a new "
        "--workdir, or start from its weights with --config.init_from=...",
    )


def check_unchanged(
    config: ConfigDict, before: StoredRun, workdir: epath.Path, free: Sequence[str] = ()
) -> None:
    """Raise InputError if the run that was `before` has other settings; warn of other evaluators.

    `free`: keys that may differ.
    """
    if before.stored is None:
        return
    check_settings(config, before, workdir, (*free, *KEYS_OF_THE_END))
    resolved = before.stored.resolved
    changed = changed_keys(resolved, config)
    of_end = {key: changed[key] for key in KEYS_OF_THE_END if key in changed}
    if of_end:
        steps_done = next(iter(before.saved_steps), 0)
        fault = find_other_past(resolved, config, steps_done, workdir)
        if fault is not None:
            raise InputError(f"--workdir={workdir}: {fault}")
        logger.info("%s: the run gets another end: %s", workdir, say_extension(of_end))
    both = {*resolved.evals} & {*config.evals}
    changed = changed_evals(resolved, config)
    changed = {key: values for key, values in changed.items() if key.split(".")[1] in both}
    if changed:
        logger.warning(
            "%s: evaluators have changed since the run began, so results may not be comparable "
            "with earlier ones: %s",
            workdir,
            "; ".join(say_changes(changed)),
        )


def agree_on_run(workdir: epath.Path, timeout_s: float) -> StoredRun:
    """What process 0 finds in a `workdir` that no other job trains in; the same on all processes.

    Raises:
      InputError: on every process: it cannot be read, another job trains there, or config.json is
        damaged.
    """

    def find() -> str:
        check_store(workdir)
        check_free(workdir)
        return _describe_run(workdir)

    return _parse_run(processes.say_to_all("what the workdir holds", find, timeout_s), workdir)


def _read_if_there(path: epath.Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextlib.contextmanager
def lock_workdir(
    workdir: epath.Path, before: StoredRun, timeout_s: float
) -> Iterator[Lock | NoLock]:
    """Makes `workdir`, and keeps other jobs out of it; yields the lock, which process 0 holds.

    `before`: what `agree_on_run` has found there, before the run was prepared.

    Raises:
      InputError: on every process: it cannot be made, or another job trains or trained there.
    """
    locks: list[Lock] = []
    made = jax.process_index() == 0 and not workdir.exists()

    def take() -> str:
        _make(workdir)
        locks.append(Lock(workdir))
        if _read_if_there(workdir / "config.json") != before.text:
            raise InputError(
                f"--workdir={workdir}: another job has begun a run there meanwhile; start the same "
                "command again, or use another --workdir"
            )
        return ""

    try:
        processes.say_to_all("that the workdir is locked", take, timeout_s)
        yield locks[0] if locks else NoLock()
    finally:
        for lock in locks:
            lock.release()
        if made and workdir.exists() and not any(workdir.iterdir()):
            workdir.rmdir()


def _make(workdir: epath.Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--workdir={workdir}: {e.strerror}; choose another directory") from None


def write_workdir(
    workdir: epath.Path, resolved: Resolved, source: Source, pictures: bytes = b""
) -> None:
    """Create the workdir with config.json and the class names of the training `source`.

    `pictures`: content of `division.FILE` of a run that begins; a run keeps the file that it has.
    classes.json holds null if the source names no classes.
    """
    _make(workdir)
    if pictures:  # before config.json, which says that the run has begun
        write_whole(workdir / FILE, pictures)
    store_plugins(resolved.config.plugins, workdir)
    stored = StoredConfig(resolved.asked, resolved.config, resolved.decided_by)
    write_whole(workdir / "config.json", stored.to_json())
    text = json.dumps(source.class_names, indent=2, ensure_ascii=False) + "\n"
    write_whole(workdir / "classes.json", text)
