"""Runs evaluators without training; prints one JSON object of metrics on standard output.

  python -m vit_jax.main evaluate --workdir=runs/quickstart
  python -m vit_jax.main evaluate --init_from=ViT-B/16@augreg \\
    --config=evaluate:fewshot,knn,probe,cifar10 --config.data.data_dir=DIR

Of a run by --workdir: those of its own config, on its newest valid checkpoint; the workdir is only
read. Of any model by --init_from, as train takes it (a workdir, a file, an address, a name): those
of --config.
"""

import argparse
import json
import signal

import jax
from ml_collections import ConfigDict
from rich.console import Console

from vit_jax import files
from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    load_valid_config,
    print_config,
    start_job,
)
from vit_jax.config import REQUIRED_TO_EVALUATE
from vit_jax.config import stored as stored_config
from vit_jax.config import text as config_text
from vit_jax.errors import InputError
from vit_jax.job import exit_codes
from vit_jax.training.validation import validate


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", metavar="DIR", help="of the run to evaluate")
    parser.add_argument("--init_from", metavar="SOURCE", help="instead: a workdir, a file, a name")
    define_config_flags(parser)
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    of_run, of_source = flags.workdir is not None, flags.init_from is not None
    if of_run and of_source:
        raise InputError("give one of --workdir=DIR and --init_from=SOURCE")
    if not (of_run or of_source or flags.print_config):
        raise InputError(
            "--workdir: missing; e.g. python -m vit_jax.main evaluate --workdir=runs/quickstart; "
            "or give --init_from=SOURCE and --config=NAME"
        )
    if of_run and flags.config is not None:
        raise InputError(
            "--config: a run is evaluated by its own config; for another give --init_from=DIR"
        )
    if of_source and flags.config is None:
        raise InputError("--config: missing; e.g. --config=evaluate:fewshot,knn,probe,cifar10")
    config = _config_of_run(flags) if of_run else _config_of_source(flags)
    if flags.print_config:
        return print_config(config)

    from vit_jax import metrics, transfer
    from vit_jax.inference import evaluate as evaluation

    metrics.log_to_console(Console(stderr=True))
    start_job(flags, config)
    # It has nothing to save: what JAX has put in the place of the signal's default is for training.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if of_run:
        results = evaluation.evaluate(config, files.absolute(flags.workdir))
    else:
        pretrained = transfer.read_pretrained(flags.init_from)
        results = evaluation.evaluate_pretrained(config, pretrained)
    if jax.process_index() == 0:
        print(json.dumps(metrics.finite_or_none(results), indent=2))
    return exit_codes.DONE


def _config_of_run(flags: argparse.Namespace) -> ConfigDict:
    workdir = files.absolute(flags.workdir)
    if not (workdir / "config.json").exists():
        raise InputError(f"--workdir={workdir}: no config.json there; give the workdir of a run")
    config = stored_config.read_config(workdir)
    faults = config_text.apply_overrides(config, flags.overrides)
    validate(config, faults, f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config has no evals")
    return config


def _config_of_source(flags: argparse.Namespace) -> ConfigDict:
    config = load_valid_config(flags, REQUIRED_TO_EVALUATE)
    if config.model.name is not None:
        raise InputError(f"model.name={config.model.name!r}: --init_from says it; leave it out")
    if not config.evals:
        raise InputError(f"--config={flags.config}: it has no evals")
    return config
