"""What the launchers share: the job behind `--`, how it is checked, shown and ended.

A launcher is called with its own flags, then `--`, then what follows `python -m vit_jax.main`.
"""

import argparse
import dataclasses
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # that a clone which is not installed can be launched from

from vit_jax import exit_codes  # noqa: E402
from vit_jax.commands import COMMANDS, load_valid_config, require_flags  # noqa: E402
from vit_jax.errors import InputError  # noqa: E402
from vit_jax.main import parse_flags  # noqa: E402

_OF_PROCESSES = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Job:
    """What each process of a job runs.

    words: that follow `python -m vit_jax.main`.
    config: of `--config`, FILE[:words]; None for a command that takes its config from the workdir.
    workdir: a path or an address such as gs://bucket/run, as typed.
    """

    words: tuple[str, ...]
    config: str | None
    workdir: str

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
    given = [f"--{name}" for name in _OF_PROCESSES if getattr(flags, name, None) is not None]
    if given:
        raise InputError(f"{', '.join(given)}: the launcher sets these; leave them out")
    needed = [name for name in ("config", "workdir") if hasattr(flags, name)]
    require_flags(flags, needed, example)
    config = getattr(flags, "config", None)
    if config is not None:
        load_valid_config(flags)
    return Job(tuple(words), config, flags.workdir)


def check_config_travels(job: Job, where: str) -> None:
    """Raises InputError if the config file is none of the repository's, which alone are `where`."""
    if job.config is None:
        return
    path = pathlib.Path(job.config.partition(":")[0])
    if path.is_absolute() or not (ROOT / path).is_file():
        raise InputError(
            f"--config={job.config}: {where} holds the repository's files alone; put the file "
            "into configs/, and name it from the repository's root"
        )


def run_launcher(
    parser: argparse.ArgumentParser, launch: Callable[[argparse.Namespace, list[str]], int]
) -> int:
    """launch(flags before `--`, words behind it); the exit code, 2 where the input is wrong."""
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    flags = parser.parse_args(argv[:split])
    try:
        return launch(flags, argv[split + 1 :])
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.INPUT_WRONG


def make_parser(doc: str, action: str = "") -> argparse.ArgumentParser:
    """A launcher's parser, whose help is the docstring of its file; `action`: its first word."""
    return argparse.ArgumentParser(
        usage=f"python launch/{pathlib.Path(sys.argv[0]).name} {action}[FLAGS] -- [COMMAND] "
        "--config=FILE --workdir=DIR [--config.key=value ...]",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def shell(words: Iterable[str], environment: Mapping[str, str] | None = None) -> str:
    """A command as one types it, with its environment in front."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
    return " ".join([*settings, shlex.join(words)])


def find_program(name: str, remedy: str) -> str:
    """The path of a program.

    Raises:
      InputError: it is not on PATH.
    """
    path = shutil.which(name)
    if path is None:
        raise InputError(f"{name}: not found on PATH; {remedy}")
    return path


def positive(flags: argparse.Namespace, *names: str) -> None:
    """Raises InputError for what is given and below 1."""
    faults = [
        f"--{name}={value}: needs a positive number"
        for name in names
        if (value := getattr(flags, name)) is not None and value < 1
    ]
    if faults:
        raise InputError(*faults, where="flags") if len(faults) > 1 else InputError(faults[0])


def parse_pairs(name: str, values: Sequence[str], separator: str) -> dict[str, str]:
    """{key: value} of the flag --NAME=KEY<separator>VALUE, which may be given again.

    Raises:
      InputError: one is no pair.
    """
    pairs = {}
    for value in values:
        key, found, rest = value.partition(separator)
        if not (key and found and rest):
            raise InputError(f"--{name}={value}: needs two parts with {separator!r} between them")
        pairs[key] = rest
    return pairs
