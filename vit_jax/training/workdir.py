"""The workdir of a run: checked before anything is written, then created."""

import contextlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Sequence

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax.checkpoints import restore
from vit_jax.config import changed_evals, changed_keys, say_changes
from vit_jax.config.plugins import store_plugins
from vit_jax.config.stored import read_config, to_json
from vit_jax.data import Source
from vit_jax.data.division import FILE
from vit_jax.errors import InputError, collect_faults
from vit_jax.files import check_folder, write_whole
from vit_jax.job import processes
from vit_jax.job.lock import Lock, check_free
from vit_jax.training.decided import take_decided
from vit_jax.training.extension import KEYS_OF_THE_END, find_other_past, say_extension

logger = logging.getLogger("vit_jax")


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


def continue_run(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
    """`config` with what the source and the data of the run in `workdir` decided, if there is one.

    Raises:
      InputError: config.json has another format or is damaged.
    """
    if not (workdir / "config.json").exists():
        return config
    return take_decided(config, read_config(workdir))


def check_unchanged(config: ConfigDict, workdir: epath.Path, free: Sequence[str] = ()) -> None:
    """Raise InputError if the run in `workdir` has other settings; warn if evaluators differ.

    `free`: keys that may differ.
    """
    if not (workdir / "config.json").exists():
        return
    stored = read_config(workdir)
    changed = changed_keys(stored, config)
    changed = {key: values for key, values in changed.items() if key not in free}
    of_end = {key: changed.pop(key) for key in KEYS_OF_THE_END if key in changed}
    faults = say_changes(changed)
    if of_end and not faults:
        steps_done = next(iter(restore.saved_steps(workdir / "checkpoints")), 0)
        fault = find_other_past(stored, config, steps_done, workdir)
        if fault is not None:
            raise InputError(f"--workdir={workdir}: {fault}")
        logger.info("%s: the run gets another end: %s", workdir, say_extension(of_end))
    collect_faults(
        faults,
        f"--workdir={workdir} already holds a run with other settings; restore them, use a new "
        "--workdir, or start from its weights with --config.init_from=...",
    )
    both = {*stored.evals} & {*config.evals}
    changed = changed_evals(stored, config)
    changed = {key: values for key, values in changed.items() if key.split(".")[1] in both}
    if changed:
        logger.warning(
            "%s: evaluators have changed since the run began, so results may not be comparable "
            "with earlier ones: %s",
            workdir,
            "; ".join(say_changes(changed)),
        )


def wait_until_free(workdir: epath.Path, timeout_s: float) -> str:
    """What config.json holds in a `workdir` that no other job trains in; "" if there is none.

    Raises:
      InputError: on every process: another job trains there.
    """

    def find() -> str:
        check_free(workdir)
        return _read_if_there(workdir / "config.json")

    return processes.say_to_all("who trains in the workdir", find, timeout_s)


def _read_if_there(path: epath.Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextlib.contextmanager
def lock_workdir(workdir: epath.Path, begun: str, timeout_s: float) -> Iterator[Lock | None]:
    """Makes `workdir`, and keeps other jobs out of it; yields the lock, None but on process 0.

    `begun`: what `wait_until_free` has found there, before the run was prepared.

    Raises:
      InputError: on every process: it cannot be made, or another job trains or trained there.
    """
    locks: list[Lock] = []
    made = jax.process_index() == 0 and not workdir.exists()

    def take() -> str:
        _make(workdir)
        locks.append(Lock(workdir))
        if _read_if_there(workdir / "config.json") != begun:
            raise InputError(
                f"--workdir={workdir}: another job has begun a run there meanwhile; start the same "
                "command again, or use another --workdir"
            )
        return ""

    try:
        processes.say_to_all("that the workdir is locked", take, timeout_s)
        yield locks[0] if locks else None
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
    workdir: epath.Path, config: ConfigDict, source: Source, pictures: bytes = b""
) -> None:
    """Create the workdir with the resolved config and the class names of the training `source`.

    `pictures`: content of `division.FILE` of a run that begins; a run keeps the file that it has.
    classes.json holds null if the source names no classes.
    """
    _make(workdir)
    if pictures:  # before config.json, which says that the run has begun
        write_whole(workdir / FILE, pictures)
    store_plugins(config.plugins, workdir)
    write_whole(workdir / "config.json", to_json(config))
    text = json.dumps(source.class_names, indent=2, ensure_ascii=False) + "\n"
    write_whole(workdir / "classes.json", text)
