"""Runs the evaluators of a run's config on the newest valid checkpoint of its workdir.

  python -m vit_jax.main evaluate --workdir=runs/quickstart

Prints one JSON object of metrics on standard output. The workdir is only read.
"""

import argparse
import json
import signal

import jax
from rich.console import Console

from vit_jax import config_text, exit_codes, files
from vit_jax.commands import define_process_flags, require_flags, start_job
from vit_jax.errors import InputError
from vit_jax.validation import validate


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", metavar="DIR", help="of the run to evaluate")
    define_process_flags(parser)


def run(flags: argparse.Namespace) -> int:
    require_flags(flags, ("workdir",), "python -m vit_jax.main evaluate --workdir=runs/quickstart")
    workdir = files.absolute(flags.workdir)
    if not (workdir / "config.json").exists():
        raise InputError(f"--workdir={workdir}: no config.json there; give the workdir of a run")
    config = config_text.read_config(workdir)
    faults = config_text.apply_overrides(config, flags.overrides)
    validate(config, faults, f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config has no evals")

    from vit_jax import evaluation, metrics  # orbax only now, that a typo is answered at once

    metrics.log_to_console(Console(stderr=True))
    start_job(flags, config)
    # It has nothing to save: what JAX has put in the place of the signal's default is for training.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    results = evaluation.evaluate(config, workdir)
    if jax.process_index() == 0:
        print(json.dumps(metrics.finite_or_none(results), indent=2))
    return exit_codes.DONE
