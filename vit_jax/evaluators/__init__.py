"""Evaluators: one file each, with its config entry, its check and its run.

An evaluator has `run(state) -> {name: float}`, which looks at the state's `params` and
`model_state` only; every example counts once on any number of hosts.
"""

from collections.abc import Mapping
from typing import Protocol

import flax.linen as nn
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import SplitKey, eval_splits
from vit_jax.config.evals import find_evaluator
from vit_jax.data import Source
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Params


class StateEvaluator(Protocol):
    """What the loop knows of an evaluator."""

    def run(self, state: TrainState) -> dict[str, float]:
        """{metric: value} of the state's `params` and `model_state`; all processes call it."""


def evaluate(name: str, evaluator: StateEvaluator, state: TrainState) -> dict[str, float]:
    """{"name/metric": ...} of what the evaluator called `name` finds about `state`.

    Where the state holds an average of the parameters, that is what the metrics are about; those of
    the parameters themselves follow as "name/metric_raw". Counts are told once.

    Raises:
      InputError: naming a key of the evaluator's entry; a NothingToMeasureError on every process.
    """

    def measure(params: Params) -> dict[str, float]:
        try:
            return evaluator.run(state.replace(params=params, ema={}))
        except InputError as e:
            raise type(e)(*(f"evals.{name}.{fault}" for fault in e.faults)) from None

    if not state.ema:
        return {f"{name}/{key}": value for key, value in measure(state.params).items()}
    metrics = {f"{name}/{key}": value for key, value in measure(state.ema).items()}
    raw = {f"{name}/{key}_raw": v for key, v in measure(state.params).items() if type(v) is float}
    return metrics | raw


def make_evaluators(
    config: ConfigDict,
    preprocessing: Preprocessing,
    model: nn.Module,
    mesh: Mesh,
    sources: Mapping[SplitKey, Source],
) -> dict[str, StateEvaluator]:
    """{name: evaluator} of `config.evals`, over the sources that `open_sources` gives.

    Raises:
      InputError: naming the key, for what an evaluator also needs and does not find.
    """
    faults = Faults()
    evaluators: dict[str, StateEvaluator] = {}
    for name, entry in config.evals.items():
        inputs = EvalInputs(
            entry=entry,
            model=model,
            mesh=mesh,
            sources={k: sources[key] for k, key in eval_splits(config, entry).items()},
            host_ops=preprocessing.eval_ops[name],
            image_size=preprocessing.image_size,
            batch_size=entry.batch_size or config.global_batch_size,
            mean=config.data.mean,
            std=config.data.std,
            loss=config.loss,
        )
        make = find_evaluator(entry.type).make
        evaluator = faults.check(make, inputs, prefix=f"evals.{name}.")
        if evaluator is not None:
            evaluators[name] = evaluator
    collect_faults(faults)
    return evaluators
