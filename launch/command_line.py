"""The command line of a launcher: its own flags, `--`, and the arguments of its job."""

import argparse
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that launchers work in a clone that is not installed

from vit_jax.errors import InputError, collect_faults  # noqa: E402
from vit_jax.job import exit_codes  # noqa: E402


def launcher_main(
    parser: argparse.ArgumentParser, launch: Callable[[argparse.Namespace, list[str]], int]
) -> int:
    """Call launch(flags before `--`, words after it); return the exit code, 2 for wrong input."""
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    flags, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; arguments of the job go after --")
    try:
        return launch(flags, argv[split + 1 :])
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.INPUT_WRONG


def make_parser(doc: str, action: str = "") -> argparse.ArgumentParser:
    """A launcher's parser; `doc`: docstring of its file; `action`: its first word, if any."""
    return argparse.ArgumentParser(
        usage=f"python launch/{pathlib.Path(sys.argv[0]).name} {action}[FLAGS] -- [COMMAND] "
        "--config=FILE --workdir=DIR [--config.key=value ...]",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_common_flags(parser: argparse.ArgumentParser, shown: str) -> None:
    """Add --env, which environment.py reads, and --dry_run, which prints what is `shown`."""
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="variable of every process; without =VALUE its value comes from this shell. "
        "Keys, tokens and passwords stay hidden. W&B's key is passed too if the job logs to W&B",
    )  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help=f"print {shown} and exit")


def shell(words: Iterable[str], environment: Mapping[str, str] | None = None) -> str:
    """A command as typed in a shell, preceded by its environment variables."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
    return " ".join([*settings, shlex.join(words)])


def find_program(name: str, remedy: str) -> str:
    """Path of a program.

    Raises:
      InputError: if it is not on PATH.
    """
    path = shutil.which(name)
    if path is None:
        raise InputError(f"{name}: not found on PATH; {remedy}")
    return path


def positive(flags: argparse.Namespace, *names: str) -> None:
    """Raise InputError for flags that are given and less than 1."""
    faults = [
        f"--{name}={value}: needs a positive number"
        for name in names
        if (value := getattr(flags, name)) is not None and value < 1
    ]
    collect_faults(faults)


def check_name(name: str | None) -> None:
    """Raise InputError for a --name that Google's tools or Kubernetes would reject."""
    if name is not None and not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise InputError(
            f"--name={name}: needs at most 40 characters of a to z, 0 to 9 and -, starting with a "
            "letter and not ending with -"
        )


def parse_pairs(name: str, values: Sequence[str], separator: str) -> dict[str, str]:
    """{key: value} from the repeatable flag --NAME=KEY<separator>VALUE.

    Raises:
      InputError: if a value is not a pair.
    """
    pairs = {}
    for value in values:
        key, found, rest = value.partition(separator)
        if not (key and found and rest):
            raise InputError(f"--{name}={value}: needs two parts separated by {separator!r}")
        pairs[key] = rest
    return pairs
