"""The workdir of a run: checked before anything is written, then made."""

import importlib.util
import json
import logging
import os

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import changed_evals, changed_keys, say_changes
from vit_jax.config.plugins import store_plugins
from vit_jax.config.stored import continue_older, read_config, to_json
from vit_jax.data import Source
from vit_jax.data.preprocessing import keep_spelling
from vit_jax.errors import InputError, collect_faults
from vit_jax.files import write_whole

logger = logging.getLogger("vit_jax")


def check_store(workdir: epath.Path) -> None:
    """Raises InputError if what checkpoints in `workdir` are read and written by is missing."""
    if os.fspath(workdir).startswith("gs://") and not _is_installed("google.cloud.storage"):
        raise InputError(
            f"--workdir={workdir}: checkpoints on gs:// need google-cloud-storage, which is not "
            "installed; pip install -e '.[gcs]'"
        )


def check_writable(workdir: epath.Path) -> None:
    """Raises InputError if `workdir` is no directory that can be made or written to."""
    check_store(workdir)
    there = next((path for path in [workdir, *workdir.parents] if path.exists()), None)
    if there is None or "://" in os.fspath(workdir):
        return
    if not there.is_dir():
        what = "" if there == workdir else f"{there} "
        raise InputError(f"--workdir={workdir}: {what}is a file; give a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--workdir={workdir}: {there} cannot be written to; choose another")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def continue_run(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
    """`config` for resuming the run in `workdir`, if there is one.

    It keeps what an older version of this code did (`continue_older`), and the run's own spelling
    of its ops, which are part of its identity, where that does the same.

    Raises:
      InputError: config.json has a newer format, or is not as a run writes it.
    """
    if not (workdir / "config.json").exists():
        return config
    return keep_spelling(continue_older(config, workdir), read_config(workdir))


def check_unchanged(config: ConfigDict, workdir: epath.Path) -> None:
    """Raises InputError if `workdir` holds a run with other settings; warns of other evaluators."""
    if not (workdir / "config.json").exists():
        return
    stored = read_config(workdir)
    collect_faults(
        say_changes(changed_keys(stored, config)),
        f"--workdir={workdir} already holds a run with other settings; restore them, use a new "
        "--workdir, or start from its weights with --config.init_from=...",
    )
    both = {*stored.evals} & {*config.evals}
    changed = changed_evals(stored, config)
    changed = {key: values for key, values in changed.items() if key.split(".")[1] in both}
    if changed:
        logger.warning(
            "%s: evaluators have changed since the run began, so results may not compare with "
            "earlier ones: %s",
            workdir,
            "; ".join(say_changes(changed)),
        )


def write_workdir(workdir: epath.Path, config: ConfigDict, source: Source) -> None:
    """Makes the workdir, with the resolved config and the class names of training's `source`."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--workdir={workdir}: {e.strerror}; choose another") from None
    store_plugins(config.plugins, workdir)
    write_whole(workdir / "config.json", to_json(config))
    if source.class_names is not None:
        text = json.dumps(list(source.class_names), indent=2, ensure_ascii=False) + "\n"
        write_whole(workdir / "classes.json", text)
