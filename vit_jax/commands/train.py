"""Train a model as its config describes, and evaluate it during training.

  python -m vit_jax.main --config=quickstart --workdir=runs/quickstart

The same command continues an earlier run in the workdir; so does --workdir=DIR alone.
"""

import argparse
import sys
import time

import jax
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    is_run,
    load_valid_config,
    require_flags,
    start_job,
)
from vit_jax.config import Settings
from vit_jax.job import exit_codes
from vit_jax.job.age import process_age


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder for everything the run writes")
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    goes_on = flags.config is None and is_run(flags.workdir)
    example = "python -m vit_jax.main --config=quickstart --workdir=runs/quickstart"
    if flags.config is None and flags.workdir and not goes_on:
        raise InputError(f"--workdir={flags.workdir}: holds no run; give --config to begin one")
    require_flags(flags, ("workdir",) if goes_on else ("config", "workdir"), example)
    config = load_valid_config(flags, of_run=goes_on)

    from vit_jax.checkpoints import restore
    from vit_jax.checkpoints.replicas import DivergedError
    from vit_jax.planning.search import choose_layout
    from vit_jax.run import loop, terminal, train
    from vit_jax.run.watch import guards

    console = Console(stderr=True) if flags.quiet else terminal.CONSOLE
    terminal.log_to_console(console, quiet=flags.quiet)
    start_job(flags, config)
    console.quiet = jax.process_index() > 0
    terminal.CONSOLE.quiet = flags.quiet or console.quiet
    command = {"config": flags.config, "overrides": dict(flags.overrides)}
    try:
        train.train_and_evaluate(
            Settings.of(config), flags.workdir, command, choose_layout,
            began=time.perf_counter() - process_age(),
        )  # fmt: skip
    except KeyboardInterrupt:  # outside of the loop, which saves
        steps = restore.saved_steps(files.absolute(flags.workdir) / "checkpoints")
        saved, what = guards.say_saved(max(steps, default=None)), "continue" if steps else "begin"
        raise KeyboardInterrupt(f"Interrupted; {saved}. Run the same command to {what}") from None
    except loop.Preempted as e:
        print(e, file=sys.stderr)
        return exit_codes.INTERRUPTED if isinstance(e, loop.Interrupted) else exit_codes.PREEMPTED
    except (guards.NonFiniteError, guards.CorruptDataError, DivergedError) as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE
