"""Evaluation of a run, finished or not, from its workdir alone."""

import logging

import jax
import jax.numpy as jnp
from etils import epath
from ml_collections import ConfigDict

from vit_jax import checkpoint, watchdog
from vit_jax.comparison import compare_findings
from vit_jax.errors import InputError
from vit_jax.evaluators import evaluate as run_evaluator
from vit_jax.run import prepare
from vit_jax.step import TrainState

logger = logging.getLogger("vit_jax")


def evaluate(config: ConfigDict, workdir: epath.PathLike) -> dict[str, float]:
    """{"step": ..., "test/top1": ..., ...} of the newest valid checkpoint; writes nothing.

    `config` is that of the run, resolved (`config_text.read_config(workdir)`).

    Raises:
      InputError: if there is no checkpoint that can be read.
    """
    run = prepare(config, workdir, training=False)
    workdir = run.workdir
    saved = checkpoint.saved_steps(workdir / "checkpoints")
    compare_findings(run.config, run.sources, {"checkpoints in --workdir": saved})
    with jax.set_mesh(run.mesh):
        wanted = {
            "params": run.experiment.abstract_state.params,
            "model_state": run.experiment.abstract_state.model_state,
            "ema": run.experiment.abstract_state.ema,
        }
        restored = checkpoint.restore_newest(workdir / "checkpoints", wanted, partial=True)
        if restored is None:
            raise InputError(f"--workdir={workdir}: no checkpoint there yet")
        found, meta = restored
        state = TrainState(jnp.int32(meta["step"]), **found, opt_state=())
        logger.info("evaluating step %d of %s", meta["step"], workdir)
        results = {"step": meta["step"]}
        for name, evaluator in run.evaluators.items():
            with watchdog.phase("evaluation"):
                results |= run_evaluator(name, evaluator, state)
    return results
