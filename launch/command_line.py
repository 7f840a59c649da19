"""The command line of a launcher: its own flags, `--`, and the arguments of its job."""

import argparse
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that launchers work in a clone that is not installed

from vit_jax.base.addresses import HIDDEN, hide  # noqa: E402
from vit_jax.base.errors import InputError, nearest  # noqa: E402
from vit_jax.job import exit_codes  # noqa: E402


def launcher_main(
    parser: argparse.ArgumentParser, launch: Callable[[argparse.Namespace, list[str]], int]
) -> int:
    """Call launch(flags before `--`, words after it); return the exit code, 2 for wrong input."""
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    known = re.findall(r"^  (--\w+)", parser.format_help(), re.MULTILINE)
    given = [word.partition("=")[0] for word in argv[:split] if word.startswith("--")]
    hints = [f"{word}: {nearest(word, known)}" for word in given if word not in [*known, "--help"]]
    if hints:
        parser.error(f"{'; '.join(hints)} (arguments of the job go after --)")
    flags, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; arguments of the job go after --")
    try:
        return launch(flags, argv[split + 1 :])
    except InputError as e:
        print(f"error: {hide(str(e))}", file=sys.stderr)
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
    """Add --env and --show_env, which environment.py reads, and --dry_run.

    --dry_run prints what is `shown`.
    """
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="variable of every process; without =VALUE its value comes from this shell. "
        "Its value stays hidden. W&B's key is passed too if the job logs to W&B",
    )  # fmt: skip
    parser.add_argument("--show_env", action="store_true",
                        help="show values of --env, but of no key, token or password")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help=f"print {shown} and exit")


def add_cluster_flags(parser: argparse.ArgumentParser, max_restarts: int) -> None:
    """Add the flags of jobs on Google's TPU slices, which restart at most `max_restarts` times."""
    parser.add_argument("--topology", metavar="SLICE", help="TPU slice, e.g. v5e:4x4")
    parser.add_argument("--num_slices", type=positive, default=1, help="slices connected by DCN")
    parser.add_argument("--service_account", help="account that may write to the workdir")
    parser.add_argument("--max_restarts", type=int, default=max_restarts,
                        help="limit of restarts after failures")  # fmt: skip
    parser.add_argument("--no_plan", action="store_true", help="do not check that the job fits")


def shell(words: Iterable[str], environment: Mapping[str, str] | None = None) -> str:
    """A command as typed in a shell, preceded by its environment variables."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
    return " ".join([*settings, shlex.join(words)])


def say(text: str) -> None:
    """Print `text` without the passwords and tokens in its addresses, and say so."""
    shown = hide(text)
    print(shown, flush=True)
    if shown != text:
        print(f"{HIDDEN} hides a password or token: a job that this launcher starts gets it; put "
              "it back into copies of these lines", file=sys.stderr)  # fmt: skip


def find_program(name: str, remedy: str) -> str:
    """Path of a program.

    Raises:
      InputError: if it is not on PATH.
    """
    path = shutil.which(name)
    if path is None:
        raise InputError(f"{name}: not found on PATH; {remedy}")
    return path


def positive(text: str) -> int:
    """The type of a flag that takes a positive whole number."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a positive number")
    return int(text)


def name_of_job(text: str) -> str:
    """The type of a --name that Google's tools and Kubernetes take."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text}: needs at most 40 characters of a to z, 0 to 9 and -, starting with a letter "
            "and not ending with -"
        )
    return text


def pair(separator: str) -> Callable[[str], tuple[str, str]]:
    """The type of a flag that takes KEY<separator>VALUE."""

    def parse(text: str) -> tuple[str, str]:
        key, _, value = text.partition(separator)
        if not (key and value):
            raise argparse.ArgumentTypeError(f"{text}: needs two parts separated by {separator!r}")
        return key, value

    return parse
