"""Run evaluators without training; print one JSON object of metrics.

  python -m vit_jax.main evaluate --workdir=runs/quickstart
  python -m vit_jax.main evaluate --init_from=ViT-B/16@augreg \\
    --config=evaluate:fewshot,knn,probe,cifar10 --config.data.data_dir=DIR

--workdir runs the evaluators of that run's config on its newest valid checkpoint, with --best on
its best; nothing is written to the workdir. --table=FILE.csv adds the results as a row, one for
each model. --output=DIR writes tables for each classification evaluator into DIR/NAME: accuracy by
class, the confusion matrix, and the wrong images; for a multilabel evaluator the average precision
by class, and the wrong images. --init_from runs the evaluators of --config on any model that train
can start from: a workdir, a file, an address or a name.

Of your own images (--config.data.data_dir) without val/, the split val has those that the model's
run held out, or a tenth if the model held out none of them. --config.evals.NAME.split=all evaluates
all of them.
"""

import argparse
import functools
import json
import logging
import signal

import jax
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_best_flag,
    define_config_flags,
    define_process_flags,
    load_valid_config,
    start_job,
)
from vit_jax.config import EVALUATORS, REQUIRED_TO_EVALUATE, Settings
from vit_jax.insight.tables import add_row, read_rows
from vit_jax.job import exit_codes
from vit_jax.run.setup.validation import check_evaluates_any, load_run

logger = logging.getLogger("vit_jax")


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", metavar="DIR", help="run to evaluate")
    parser.add_argument(
        "--init_from", metavar="SOURCE", help="or a model: workdir, file, address or name"
    )
    parser.add_argument(
        "--output", type=files.absolute, metavar="DIR",
        help="folder for results by class and mistakes",
    )  # fmt: skip
    parser.add_argument(
        "--table", type=files.absolute, metavar="FILE.csv",
        help="add a row with the results to a CSV",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="FILE.npz",
        help="evaluate arrays: SPLIT_images, and SPLIT_labels, of the splits that are read",
    )  # fmt: skip
    define_best_flag(parser)
    define_config_flags(parser, REQUIRED_TO_EVALUATE)
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    of_run = flags.workdir is not None
    given = of_run, flags.init_from is not None, flags.config is not None
    if given not in [(True, False, False), (False, True, True)]:
        raise InputError(
            "give either --workdir=DIR, a run, which is evaluated by its own config; or "
            "--init_from=SOURCE and --config=NAME, e.g. --config=evaluate:fewshot,knn,probe,cifar10"
        )
    if flags.output is not None:
        files.check_folder(flags.output, "--output")
    if flags.table is not None:
        files.check_output(flags.table, "--table")
        read_rows(flags.table)  # raises unless it is a table
    if flags.data is not None:
        flags.overrides += [("data.name", "arrays"), ("data.data_dir", flags.data)]
    run = None
    if of_run:
        workdir = files.absolute(flags.workdir)
        config, trained = load_run(workdir, flags.overrides)
        run = workdir, trained
    else:
        config = load_valid_config(flags)
        check_evaluates_any(config, f"--config={flags.config}")

    from vit_jax import transfer
    from vit_jax.inference.evaluate import StoredModel, evaluate_model
    from vit_jax.insight.results import write_results
    from vit_jax.run import terminal, writers

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    kinds = [EVALUATORS.find(entry.type) for entry in config.evals.values()]
    if flags.output is not None and not any(kind.shows_images for kind in kinds):
        logger.warning("--output=%s: no evaluator of this config writes files there", flags.output)
    start_job(flags, config)
    # Nothing needs saving on SIGTERM, so undo the handler that JAX installs for training.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    see = functools.partial(write_results, flags.output)
    model = (
        transfer.read_pretrained(flags.init_from, best=flags.best)
        if run is None
        else StoredModel(*run, flags.best)
    )
    results = evaluate_model(Settings.of(config), model, see, dict(flags.overrides))
    if jax.process_index() == 0:
        finite = writers.finite_or_none(results)
        print(json.dumps(finite, indent=2))
        if flags.table is not None:
            add_row(flags.table, flags.workdir if of_run else flags.init_from, finite)
    return exit_codes.DONE
