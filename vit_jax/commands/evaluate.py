"""Runs the evaluators of a run's config on the newest valid checkpoint of its workdir.

  python -m vit_jax.main evaluate --workdir=runs/quickstart

Prints one JSON object of metrics on standard output. The workdir is only read.
"""

import argparse
import json
import logging
import os

import jax
from etils import epath
from ml_collections import ConfigDict
from rich.console import Console

from vit_jax import checkpoint, metrics
from vit_jax import config as config_lib
from vit_jax.commands import define_process_flags
from vit_jax.config import InputError
from vit_jax.evaluators import make_evaluators
from vit_jax.mesh import start_backend, start_processes
from vit_jax.run import prepare
from vit_jax.validation import validate

logger = logging.getLogger("vit_jax")


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", metavar="DIR", help="of the run to evaluate")
    define_process_flags(parser)


def run(flags: argparse.Namespace) -> int:
    if flags.workdir is None:
        raise InputError("--workdir: missing; give the workdir of a run")
    workdir = epath.Path(flags.workdir)
    if not (workdir / "config.json").exists():
        raise InputError(f"--workdir={workdir}: no config.json there; give the workdir of a run")
    config = config_lib.from_json((workdir / "config.json").read_text())
    faults = config_lib.apply_overrides(config, flags.overrides)
    validate(config, faults, f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config has no evals")
    metrics.log_to_console(Console(stderr=True))
    start_processes(flags.coordinator, flags.num_processes, flags.process_id)
    start_backend(config.mesh.platform)
    results = evaluate(config, workdir)
    if jax.process_index() == 0:
        print(json.dumps(results, indent=2))
    return os.EX_OK


def evaluate(config: ConfigDict, workdir: epath.Path) -> dict[str, float]:
    """{"step": ..., "test/top1": ..., ...} of the newest valid checkpoint; writes nothing.

    Raises:
      InputError: if there is no checkpoint that can be read.
    """
    run = prepare(config, workdir, resuming=False)
    with jax.set_mesh(run.mesh):
        restored = checkpoint.restore_newest(workdir / "checkpoints", run.experiment.abstract_state)
        if restored is None:
            raise InputError(f"--workdir={workdir}: no checkpoint there yet")
        state, meta = restored
        logger.info("evaluating step %d of %s", meta["step"], workdir)
        evaluators = make_evaluators(run.config, run.experiment.model, run.mesh, run.sources)
        results = {"step": meta["step"]}
        for name, evaluator in evaluators.items():
            results |= {f"{name}/{k}": v for k, v in evaluator.run(state).items()}
    return results
