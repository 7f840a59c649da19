"""The job that a launcher starts: what stands behind `--`, as `python -m vit_jax.main` takes it."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

from command_line import ROOT

from vit_jax.commands import COMMANDS
from vit_jax.commands.flags import load_valid_config, require_flags
from vit_jax.config import plugins
from vit_jax.config.text import shipped_configs
from vit_jax.errors import InputError
from vit_jax.main import parse_flags

_OF_PROCESSES = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Job:
    """What each process of a job runs.

    words: that follow `python -m vit_jax.main`.
    config: of `--config`, NAME[:words]; None for a command that takes its config from the workdir.
    workdir: a path or an address such as gs://bucket/run, as typed.
    plugins: the files of the plug-ins that its config names, of those by path.
    typed_plugins: the plug-ins of `--config.plugins`, as typed.
    """

    words: tuple[str, ...]
    config: str | None
    workdir: str
    plugins: tuple[pathlib.Path, ...] = ()
    typed_plugins: tuple[str, ...] = ()

    def command(self, *process_words: str, python: str = "python") -> list[str]:
        """The command of a process, with what tells it its place in the job."""
        return [python, "-m", "vit_jax.main", *self.words, *process_words]

    @property
    def overrides(self) -> list[str]:
        """The words that set keys of the config, each as `--config.key=value`."""
        found, words = [], iter(self.words)
        for word in words:
            if word.startswith("--config."):
                found.append(word if "=" in word else f"{word}={next(words)}")
        return found

    @property
    def name(self) -> str:
        """The last part of the workdir, as a name that every scheduler takes."""
        part = self.workdir.rstrip("/").rpartition("/")[2].lower()
        name = re.sub(r"[^a-z0-9]+", "-", part)[:40].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".strip("-")  # begins with a letter

    def on(self, platform: str) -> "Job":
        """The job that refuses to run on anything but `platform`, unless it says where it runs."""
        if any(word.startswith("--config.mesh.platform") for word in self.words):
            return self
        word = f"--config.mesh.platform={platform}"
        return dataclasses.replace(self, words=(*self.words, word))


def check_job(words: Sequence[str]) -> Job:
    """The job of `words`, with its flags and its config checked as the job itself will do.

    Raises:
      InputError: with all faults of the config; or naming the flag that is missing or too many.
    """
    words = list(words)
    command = words[0] if words and not words[0].startswith("-") else "train"
    example = "-- --config=configs/quickstart.py --workdir=runs/quickstart"
    if not words:
        raise InputError(f"no job: give what it runs behind --, e.g. {example}")
    if command not in COMMANDS:
        raise InputError(f"-- {command}: no such command; known: {', '.join(COMMANDS)}")
    flags = parse_flags(command, words[1:] if words[0] == command else words)
    if not hasattr(flags, "workdir"):
        raise InputError(f"-- {command}: has no workdir, so it is no job; run it by itself")
    if command == "study":
        raise InputError(
            "-- study: is no job, but hands each of its members to a launcher: python -m "
            'vit_jax.main study ... --launcher="python launch/LAUNCHER.py WHERE ..."'
        )
    given = [f"--{name}" for name in _OF_PROCESSES if getattr(flags, name, None) is not None]
    if given:
        raise InputError(f"{', '.join(given)}: the launcher sets these; leave them out")
    if command == "evaluate" and (flags.init_from or flags.config):
        raise InputError("-- evaluate: as a job it takes --workdir alone; run it by itself")
    # `evaluate` takes its config from the workdir.
    of_command = ("workdir",) if command == "evaluate" else ("config", "workdir")
    require_flags(flags, [name for name in of_command if hasattr(flags, name)], example)
    config, named = getattr(flags, "config", None), ()
    with plugins.using(flags.plugins, trusted=flags.trust_plugins):
        if config is not None:
            named = load_valid_config(flags).plugins
    found = [plugins.find_plugin(name) for name in named]
    by_path = tuple(pathlib.Path(p.file) for p in found if p.name.endswith(".py"))
    return Job(tuple(words), config, flags.workdir, by_path, tuple(flags.plugins))


def check_config_travels(job: Job, where: str) -> None:
    """Raises InputError if a file of the job is none of the repository's, which alone are `where`.

    Those are its config and its plug-ins; a plug-in that is a module is installed there by the
    user.
    """
    configs = ROOT / "configs"
    elsewhere = [
        name for name in job.typed_plugins if name.endswith(".py") and not _is_below(configs, name)
    ]
    elsewhere += [str(file) for file in job.plugins if not file.is_relative_to(configs)]
    if elsewhere:
        raise InputError(
            f"plugins: {elsewhere[0]}: {where} holds the repository's files alone; put the file "
            "into configs/, and name it from the repository's root; or install it there as a module"
        )
    if job.config is None:
        return
    name = job.config.partition(":")[0]
    if name in shipped_configs():
        return
    path = pathlib.Path(name)
    if path.is_absolute() or not (ROOT / path).is_file():
        raise InputError(
            f"--config={job.config}: {where} holds the repository's files alone; put the file "
            "into configs/, and name it from the repository's root"
        )


def _is_below(folder: pathlib.Path, name: str) -> bool:
    """Whether a process, which starts in the repository's root, finds the file in `folder`."""
    file = (ROOT / name).resolve()
    return not os.path.isabs(name) and file.is_file() and file.is_relative_to(folder)
