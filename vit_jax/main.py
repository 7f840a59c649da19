"""vit_jax [COMMAND] --config=NAME[:words] --workdir=DIR [--config.key=value ...]

Trains Vision Transformers and carries them over to other tasks. The command is train where none is
named. `python -m vit_jax.main` is the same program; --version prints its version. Exit codes: 0
done; 1 failed; 2 the input is wrong; 3 the plan does not fit; 75 stopped by preemption, and 143
before it trained: start again.
"""

import argparse
import contextlib
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import vit_jax
from vit_jax.commands import COMMANDS, find_command
from vit_jax.errors import InputError, nearest
from vit_jax.job import exit_codes
from vit_jax.job.first_process import run_in_child_of_first_process


def parse_flags(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """The command's flags, and `--config.key=value` as the list of pairs `overrides`.

    Every command takes `--config.plugins`, as the list `plugins`, and `--trust_plugins`.

    Raises:
      InputError: naming every flag that is unknown.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m vit_jax.main {command}",
        description=find_command(command).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    find_command(command).define_flags(parser)
    parser.add_argument(
        "--trust_plugins", action="store_true", help="run the copies of plug-ins in workdirs"
    )
    parser.epilog = f"Commands: {', '.join(COMMANDS)}."
    takes_config = "--config" in parser.format_usage()
    if takes_config:
        parser.epilog = (
            "Any key of the config is set by --config.KEY=VALUE, e.g. --config.mesh.fsdp=8.\n"
            + parser.epilog
        )
    overrides, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith("--config."):
            key, equals, value = word.removeprefix("--config.").partition("=")
            value = value if equals else next(words, None)
            if value is None or (value.startswith("--") and not equals):
                raise InputError(f"{word}: no value; write {word}=VALUE")
            overrides.append((key, value))
        else:
            rest.append(word)
    flags, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        hints = [f"{word}: {nearest(word.partition('=')[0], known)}" for word in unknown]
        raise InputError("unknown flags: " + "; ".join(hints))
    others = [key for key, _ in overrides if key != "plugins"]
    if others and not takes_config:
        raise InputError(f"--config.{others[0]}: this command takes no config")
    flags.overrides = overrides
    values = [value for key, value in overrides if key == "plugins"]
    flags.plugins = [name.strip() for name in ",".join(values).split(",") if name.strip()]
    return flags


def _overview() -> str:
    """What this program does, and a line for each command."""
    heads = {name: find_command(name).__doc__.partition("\n")[0] for name in COMMANDS}
    lines = [f"  {name:<10} {head}" for name, head in heads.items()]
    return "\n".join([
        __doc__, "Commands:", *lines, "", "COMMAND --help lists its flags, with examples.",
    ])  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Runs the command that `argv` names and returns the exit code."""
    from vit_jax.job import watchdog

    try:
        code, _ = execute(argv)
    finally:
        watchdog.stop()
    return code


def execute(argv: Sequence[str]) -> tuple[int, BaseException | None]:
    """Runs the command that `argv` names: the exit code, and the error that made it so.

    What is raised is not for the user to mend.
    """
    words = list(argv)
    if words in (["--help"], ["-h"]):
        print(_overview())
        return exit_codes.DONE, None
    if words == ["--version"]:
        print(f"vit_jax {vit_jax.__version__}")
        return exit_codes.DONE, None
    command = words.pop(0) if words and not words[0].startswith("-") else "train"
    try:
        if command not in COMMANDS:
            raise InputError(f"{command!r}: no such command; {nearest(command, COMMANDS)}")
        flags = parse_flags(command, words)
        from vit_jax.config import plugins  # only now, that a wrong flag is answered at once

        with plugins.using(flags.plugins, trusted=flags.trust_plugins):
            return find_command(command).main(flags), None
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.INPUT_WRONG, e
    except KeyboardInterrupt as e:
        print("Interrupted. Run the same command to continue from the last save.", file=sys.stderr)
        return exit_codes.INTERRUPTED, e


def execute_and_exit(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command that `argv` names and ends this process, of a job's as one of them.

    `argv` None: the command line of this process.
    """
    run_in_child_of_first_process()
    try:
        code, error = execute(sys.argv[1:] if argv is None else argv)
    except Exception as e:
        if not (isinstance(e, BrokenPipeError) and _drop_unread_output()):
            traceback.print_exc()
        code, error = exit_codes.FAILED, e
    finally:
        _drop_unread_output()
    from vit_jax.job import watchdog

    watchdog.leave(code, error)


def _drop_unread_output() -> bool:
    """Whether the reader of standard output has left, as behind `| head`; then the rest is dropped.

    Python would complain of the rest when it ends, and end with another exit code.
    """
    if sys.stdout is None:  # closed from the start
        return False
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    output = select.poll()
    output.register(sys.stdout, 0)  # for errors only: an error of a pipe is that nobody reads it
    has_left = bool(output.poll(0))
    if has_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_left


if __name__ == "__main__":
    execute_and_exit()
