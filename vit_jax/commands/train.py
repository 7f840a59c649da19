"""Trains a model as a config file says, and evaluates it on the way.

  python -m vit_jax.main --config=quickstart --workdir=runs/quickstart

The same command goes on where an earlier run in the workdir stopped.
"""

import argparse
import sys

import jax

from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    load_valid_config,
    print_config,
    require_flags,
    start_job,
)
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="where everything is written")
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    if flags.print_config:
        return print_config(load_valid_config(flags))
    example = "python -m vit_jax.main --config=quickstart --workdir=runs/quickstart"
    require_flags(flags, ("config", "workdir"), example)
    config = load_valid_config(flags)

    from vit_jax import metrics
    from vit_jax.checkpoints.replicas import DivergedError
    from vit_jax.training import guards, train

    metrics.log_to_console()
    start_job(flags, config)
    metrics.CONSOLE.quiet = jax.process_index() > 0
    try:
        train.train_and_evaluate(config, flags.workdir)
    except train.Preempted as e:
        print(e, file=sys.stderr)
        return exit_codes.PREEMPTED
    except (guards.NonFiniteError, guards.CorruptDataError, DivergedError) as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE
