"""Runs evaluators without training; prints one JSON object of metrics on standard output.

  python -m vit_jax.main evaluate --workdir=runs/quickstart
  python -m vit_jax.main evaluate --init_from=ViT-B/16@augreg \\
    --config=configs/evaluate.py:fewshot,knn,probe,cifar10 --config.data.data_dir=DIR

Of a run by --workdir: those of its own config, on its newest valid checkpoint; the workdir is only
read. Of any model by --init_from, as train takes it (a workdir, a file, an address, a name): those
of --config.
"""

import argparse
import json
import signal
from collections.abc import Callable

import jax
from ml_collections import ConfigDict
from rich.console import Console

from vit_jax import config_text, exit_codes, files
from vit_jax.commands import define_process_flags, load_valid_config, start_job
from vit_jax.config import REQUIRED_TO_EVALUATE
from vit_jax.errors import InputError
from vit_jax.validation import validate


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", metavar="DIR", help="of the run to evaluate")
    parser.add_argument("--init_from", metavar="SOURCE", help="instead: a workdir, a file, a name")
    parser.add_argument("--config", metavar="FILE[:words]", help="of --init_from: what to evaluate")
    define_process_flags(parser)


def run(flags: argparse.Namespace) -> int:
    if (flags.workdir is None) == (flags.init_from is None):
        raise InputError(
            "--workdir: missing; e.g. python -m vit_jax.main evaluate --workdir=runs/quickstart; "
            "or give --init_from=SOURCE and --config=FILE"
            if flags.workdir is None
            else "give one of --workdir=DIR and --init_from=SOURCE"
        )
    of_run = flags.workdir is not None
    if of_run != (flags.config is None):
        raise InputError(
            "--config: a run is evaluated by its own config; for another give --init_from=DIR"
            if of_run
            else "--config: missing; e.g. --config=configs/evaluate.py:fewshot,knn,probe,cifar10"
        )
    config, evaluate = _of_run(flags) if of_run else _of_source(flags)

    from vit_jax import metrics

    metrics.log_to_console(Console(stderr=True))
    start_job(flags, config)
    # It has nothing to save: what JAX has put in the place of the signal's default is for training.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    results = evaluate()
    if jax.process_index() == 0:
        print(json.dumps(metrics.finite_or_none(results), indent=2))
    return exit_codes.DONE


def _of_run(flags: argparse.Namespace) -> tuple[ConfigDict, Callable]:
    workdir = files.absolute(flags.workdir)
    if not (workdir / "config.json").exists():
        raise InputError(f"--workdir={workdir}: no config.json there; give the workdir of a run")
    config = config_text.read_config(workdir)
    faults = config_text.apply_overrides(config, flags.overrides)
    validate(config, faults, f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config has no evals")

    from vit_jax import evaluation  # orbax only now, that a typo is answered at once

    return config, lambda: evaluation.evaluate(config, workdir)


def _of_source(flags: argparse.Namespace) -> tuple[ConfigDict, Callable]:
    config = load_valid_config(flags, REQUIRED_TO_EVALUATE)
    if config.model.name is not None:
        raise InputError(f"model.name={config.model.name!r}: --init_from says it; leave it out")
    if not config.evals:
        raise InputError(f"--config={flags.config}: it has no evals")

    from vit_jax import evaluation, transfer

    return config, lambda: evaluation.evaluate_pretrained(
        config, transfer.read_pretrained(flags.init_from)
    )
