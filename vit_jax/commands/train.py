"""Train a model as its config describes, and evaluate it during training.

  python -m vit_jax.main --config=quickstart --workdir=runs/quickstart

The same command continues an earlier run in the workdir; so does --workdir=DIR alone.
"""

import argparse
import sys

import jax
from rich.console import Console

from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    is_run,
    load_asked_config,
    load_valid_config,
    print_config,
    require_flags,
    start_job,
)
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder for everything the run writes")
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    if flags.print_config:
        return print_config(load_valid_config(flags))
    goes_on = flags.config is None and is_run(flags.workdir)
    example = "python -m vit_jax.main --config=quickstart --workdir=runs/quickstart"
    require_flags(flags, ("workdir",) if goes_on else ("config", "workdir"), example)
    config = load_asked_config(flags) if goes_on else load_valid_config(flags)

    from vit_jax import metrics
    from vit_jax.checkpoints.replicas import DivergedError
    from vit_jax.job.lock import LostLockError
    from vit_jax.planning.search import choose_layout
    from vit_jax.run import guards, loop, train

    console = Console(stderr=True) if flags.quiet else metrics.CONSOLE
    metrics.log_to_console(console, quiet=flags.quiet)
    start_job(flags, config)
    console.quiet = jax.process_index() > 0
    metrics.CONSOLE.quiet = flags.quiet or console.quiet
    command = {"config": flags.config, "overrides": dict(flags.overrides)}
    try:
        train.train_and_evaluate(config, flags.workdir, command, choose_layout)
    except loop.Interrupted as e:
        print(e, file=sys.stderr)
        return exit_codes.INTERRUPTED
    except loop.Preempted as e:
        print(e, file=sys.stderr)
        return exit_codes.PREEMPTED
    except (guards.NonFiniteError, guards.CorruptDataError, DivergedError, LostLockError) as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE
