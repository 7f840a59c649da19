"""vit_jax [COMMAND] --config=NAME[:words] --workdir=DIR [--config.key=value ...]

Train Vision Transformers and transfer them to other tasks. COMMAND defaults to train.
`python -m vit_jax.main` is the same program; --version prints its version.

Exit codes: 0 done; 1 failed; 2 wrong input; 3 the plan does not fit. Run the same command again
after 75 (stopped by SIGTERM and saved), 143 (stopped by SIGTERM before training) or 130 (Ctrl-C).
"""

import argparse
import contextlib
import errno
import gc
import os
import re
import select
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

import vit_jax
from vit_jax.base.addresses import hide
from vit_jax.base.errors import (
    InputError,
    OneProcessError,
    collect_faults,
    nearest,
    shown,
    shown_lines,
)
from vit_jax.commands import COMMANDS, find_command
from vit_jax.commands.flags import print_config
from vit_jax.job import exit_codes
from vit_jax.job.allocator import limit_arenas
from vit_jax.job.first_process import run_in_child_of_first_process

# Python 3.11 looks for cyclic garbage after 700 new containers. During the imports and the
# tracing of a program almost all of them stay, and the search takes an eighth of a start.
_NEW_CONTAINERS = 20_000

_AGAIN_S = 0.1  # until a Ctrl-C that Python has ignored is sent again

_SYNONYMS = {"compare": "report"}  # as in Python
_FREE_SPACE = "free space on its disk, then run the same command again"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit of `ulimit -f`, then run the same command again",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def parse_flags(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of `command`; argparse exits with 2 on a wrong one.

    `--config.KEY=VALUE` flags are collected as (key, value) pairs in `overrides`. Every command
    accepts `--config.plugins`, stored as the list `plugins`, and `--trust_plugins`.

    Raises:
      InputError: a `--config.KEY` has no value, or the command takes no config.
    """
    sys.set_int_max_str_digits(0)  # the checks of flags and keys refuse long numbers by name
    parser = argparse.ArgumentParser(
        prog=f"vit_jax {command}",
        description=find_command(command).__doc__,
        epilog=f"Commands: {', '.join(COMMANDS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    find_command(command).define_flags(parser)
    parser.add_argument(
        "--trust_plugins", action="store_true", help="run the copies of plug-ins kept in workdirs"
    )
    parser.add_argument("--quiet", action="store_true", help="show warnings and errors only")
    overrides, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith("--config."):
            key, equals, after = word.removeprefix("--config.").partition("=")
            value = after if equals else next(words, None)
            if value is None or (value.startswith("--") and not equals):
                raise InputError(f"{word}: no value; write {word}=VALUE")
            overrides.append((key, value))
        else:
            rest.append(word)
    flags, unknown = parser.parse_known_args(rest)
    collect_faults([
        f"{word}: no such flag of {command}; "
        f"{_say_flag(word, parser, command)}"
        for word in unknown
    ])  # fmt: skip
    keys = [key for key, _ in overrides if key != "plugins"]
    if keys and "config.KEY" not in flags:
        raise InputError(f"--config.{keys[0]}: this command takes no config")
    flags.overrides = overrides
    values = [value for key, value in overrides if key == "plugins"]
    flags.plugins = [name.strip() for name in ",".join(values).split(",") if name.strip()]
    return flags


def _flags_in(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"--\w+(?=[ \]])", parser.format_usage())


def _say_flag(given: str, parser: argparse.ArgumentParser, command: str) -> str:
    """The hint for the unknown flag `given`: a key, the commands that have it, or the nearest."""
    known, word = _flags_in(parser), given.partition("=")[0]
    if not word.startswith("-"):
        folder = f"a run is --workdir={word}; " if "--workdir" in known else ""
        return f"{folder}put a value with spaces in quotes, such as --config.duration='1 epoch'"
    if "--config" in known and word.startswith("--"):
        from vit_jax.config import base_config, flatten
        from vit_jax.config.node import keys_named
        from vit_jax.config.other_words import say_without_key

        config, name = base_config(), word.removeprefix("--")
        if "." in name and name.partition(".")[0] in config:
            _, equals, value = given.partition("=")
            return f"did you mean --config.{name}{equals}{equals and shlex.quote(value)}?"
        keys = [key for key in keys_named(name, [*flatten(config)])
                if command == "study" or not key.startswith("study.")]  # fmt: skip
        if keys:
            return f"did you mean {' or '.join(f'--config.{key}' for key in keys)}?"
        if said := say_without_key(name):
            return said
    formats = re.search(r"--format \{(.*?)\}", parser.format_usage())
    if word == "--output" and formats is not None:
        return f"the result is printed; write --format={formats[1].split(',')[-1]} > FILE"
    parsers = {name: argparse.ArgumentParser() for name in COMMANDS}
    for name, parser in parsers.items():
        find_command(name).define_flags(parser)
    having = [name for name in parsers if word in _flags_in(parsers[name])]
    return f"a flag of {', '.join(having)}" if having else nearest(word, known)


def _overview() -> str:
    """Description of the program, followed by one line per command."""
    heads = {name: (find_command(name).__doc__ or "").partition("\n")[0] for name in COMMANDS}
    lines = [f"  {name:<10} {head}" for name, head in heads.items()]
    return "\n".join([
        __doc__, "Commands:", *lines, "", "COMMAND --help shows its flags and examples.",
    ])  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names and return the exit code."""
    from vit_jax.job import interrupts, watchdog

    try:
        code, _ = execute(argv)
    finally:
        interrupts.stop()
        watchdog.stop()
    return code


def execute(argv: Sequence[str]) -> tuple[int, BaseException | None]:
    """Run the command that `argv` names; return the exit code and the error behind it, if any.

    Any exception that escapes is a bug or a failure that the user cannot fix. Not so a full disk
    and a name that is too long: orbax and tensorstore meet them anywhere, as errors of many types.
    """
    words = [hide(word) for word in argv]
    if words in (["--help"], ["-h"]):
        print(_overview())
        return exit_codes.DONE, None
    if not words:
        print(_overview(), file=sys.stderr)
        return exit_codes.INPUT_WRONG, None
    if words == ["--version"]:
        print(f"vit_jax {vit_jax.__version__}")
        return exit_codes.DONE, None
    command = words.pop(0) if not words[0].startswith("-") else "train"
    try:
        if command not in COMMANDS:
            hint = nearest(_SYNONYMS.get(command, command), COMMANDS)
            from vit_jax.config.text import shipped_configs

            if command in shipped_configs():
                hint = f"did you mean --config={command}?"
            raise InputError(f"{command!r}: no such command; {hint}")
        flags = parse_flags(command, words)
        from vit_jax.config import plugins  # imported late, so that wrong flags fail at once

        with plugins.using(flags.plugins, trusted=flags.trust_plugins):
            if getattr(flags, "print_config", False):
                return print_config(flags), None
            return find_command(command).main(flags), None
    except InputError as e:
        print(shown_lines(f"error: {e}"), file=sys.stderr)
        return exit_codes.INPUT_WRONG, e
    except KeyboardInterrupt as e:
        print(str(e) or "Interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED, e
    except OneProcessError as e:
        print(shown_lines(f"error: {e}"), file=sys.stderr)
        return exit_codes.FAILED, e
    except Exception as e:
        said = str(e)
        remedy = next((_REMEDIES[n] for n in _REMEDIES if os.strerror(n) in said), None)
        if remedy is None:
            raise
        print(shown(f"error: {' '.join(said.split())}; {remedy}"), file=sys.stderr)
        return exit_codes.INPUT_WRONG, e


def execute_and_exit(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `argv` names and end this process with its exit code.

    `argv` defaults to the command line. In a job of several processes the watchdog ends them all.
    """
    run_in_child_of_first_process()
    limit_arenas()
    gc.set_threshold(_NEW_CONTAINERS, *gc.get_threshold()[1:])
    sys.unraisablehook = _handle_unraisable
    try:
        code, error = execute(sys.argv[1:] if argv is None else argv)
    except Exception as e:
        if not (isinstance(e, BrokenPipeError) and _drop_unread_output()):
            traceback.print_exc()
        code, error = exit_codes.FAILED, e
    finally:
        _drop_unread_output()
    from vit_jax.job import interrupts, watchdog

    if isinstance(error, KeyboardInterrupt | OneProcessError):  # the others have not met it
        interrupts.end_job(code, "Ctrl-C" if code == exit_codes.INTERRUPTED else str(error))
    watchdog.leave(code, error)


def _handle_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Sends Ctrl-C again if Python ignores it, as it came during a finalizer or JAX's gc callback.

    From a thread, as Python would also ignore an error in this function.

    Drops what TensorStore prints after a save has failed, as on a full disk: its other writes end
    when the event loop that would wait for them is closed. The error of the save is raised.
    """
    if str(unraisable.exc_value) == "Event loop is closed":
        return
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    to_main = threading.main_thread().ident, signal.SIGINT
    again = threading.Timer(_AGAIN_S, signal.pthread_kill, to_main)
    again.daemon = True
    again.start()


def _drop_unread_output() -> bool:
    """Drop unread output if the reader of stdout has left, as in `| head`; return whether it has.

    Otherwise Python would report a broken pipe at exit and change the exit code.
    """
    if sys.stdout is None:  # closed from the start
        return False
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    output = select.poll()
    output.register(sys.stdout, 0)  # errors only: a pipe reports an error once nobody reads it
    has_left = bool(output.poll(0))
    if has_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_left


if __name__ == "__main__":
    execute_and_exit()
