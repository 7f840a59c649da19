"""Evaluators: one module each, with its config entry, its check and its run.

An evaluator has `run(state) -> {name: float}`, which reads only `params` and `model_state` of the
state. Every example counts once, on any number of hosts. It declares the names of its metrics, and
which of their values are better, in `metrics`; see `metric_names`.
"""

import functools
from collections.abc import Mapping
from typing import Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import SplitKey, eval_splits
from vit_jax.config.evals import find_evaluator
from vit_jax.data import Source
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.experiment.state import TrainState
from vit_jax.models.contract import about, with_known
from vit_jax.models.forms import PLAIN, unconstrained


class StateEvaluator(Protocol):
    """The interface of an evaluator; a plug-in may leave `metrics` out, see `metric_names`."""

    def run(self, state: TrainState) -> dict[str, float]:
        """{metric: value} for the state's `params` and `model_state`; all processes call it."""


def evaluate(name: str, evaluator: StateEvaluator, state: TrainState) -> dict[str, float]:
    """Run the evaluator called `name` on `state`: {"name/metric": value}.

    If the state holds a running average of the parameters, the metrics are computed with it and
    the average of the model state; those of the parameters and the model state themselves follow
    as "name/metric_raw". Counts are listed once.

    Raises:
      InputError: names a key of the evaluator's entry.
      NothingToMeasureError: a subclass, raised by every process.
    """

    def measure(state: TrainState) -> dict[str, float]:
        try:
            return evaluator.run(state.replace(ema={}, ema_model_state={}))
        except InputError as e:
            raise type(e)(*(f"evals.{name}.{fault}" for fault in e.faults)) from None

    if not state.ema:
        return {f"{name}/{key}": value for key, value in measure(state).items()}
    metrics = {f"{name}/{key}": value for key, value in measure(state.averaged()).items()}
    raw = {f"{name}/{key}_raw": value for key, value in measure(state).items()
           if not isinstance(value, int | np.integer)}  # fmt: skip
    return metrics | raw


def make_evaluators(
    config: ConfigDict,
    preprocessing: Preprocessing,
    model: nn.Module,
    mesh: Mesh,
    sources: Mapping[SplitKey, Source],
    folder: epath.Path | None = None,
) -> dict[str, StateEvaluator]:
    """Make the evaluators of `config.evals`: {name: evaluator}.

    `sources` come from `open_sources`. `folder`: the workdir of a run that trains, where evaluators
    may write files; None: they write none.

    Raises:
      InputError: names the key, if an evaluator needs something that is missing.
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
            objective=config.objective,
            name=name,
            folder=folder,
        )
        kind = find_evaluator(entry.type)
        several = [
            k for k, s in inputs.sources.items() if kind.multi_label not in (None, s.multi_label)
        ]
        if several:
            other = "multilabel" if not kind.multi_label else "classification"
            faults.append(
                f"evals.{name}.type={entry.type!r}: {several[0]} has "
                f"{'one label' if kind.multi_label else 'several labels'} an image; needs {other}"
            )
            continue
        evaluator = faults.check(kind.make, inputs, prefix=f"evals.{name}.")
        if evaluator is not None:
            evaluators[name] = evaluator
    collect_faults(faults)
    return evaluators


def check_outputs(config: ConfigDict, model: nn.Module, image_size: tuple[int, int]) -> None:
    """Checks by shapes that `model` gives every evaluator of `config.evals` the output it needs.

    Raises:
      InputError: naming each evaluator that it cannot serve.
    """
    by_method: dict[str, list[str]] = {}
    for name, entry in config.evals.items():
        kind = find_evaluator(entry.type)
        method = kind.output or ("features" if kind.learns_classes else "__call__")
        by_method.setdefault(method, []).append(f"evals.{name}.type={entry.type!r}")
    faults = Faults()
    for method, entries in by_method.items():
        fault = _find_output_fault(model, image_size, method)
        remedy = "leave it out" if len(entries) == 1 else "leave them out"
        faults.need(not fault, f"{', '.join(entries)}: {fault}; {remedy}")
    collect_faults(faults)


def _find_output_fault(model: nn.Module, image_size: tuple[int, int], method: str) -> str:
    """Why no evaluator can use what `method` of the model gives, found by shapes; "" if it can."""
    family = type(model).__name__
    # Scanned layers are traced in a fraction of the time.
    plain = with_known(model, scan=True, constrain=unconstrained, forms=PLAIN)
    images = jax.ShapeDtypeStruct((1, *image_size, about(model).channels), jnp.float32)
    needs = "logits (B, C)" if method == "__call__" else f"{method} (B, D)"
    init = functools.partial(plain.init_with_output, method=method)
    try:
        output, _ = jax.eval_shape(init, jax.random.key(0), images)
    except Exception as e:  # whatever a user's model raises
        why = " ".join(str(e).split())
        return f"needs {needs} of the model, and {family}.{method} fails: {why}"
    if isinstance(output, jax.ShapeDtypeStruct) and output.ndim == 2:
        return ""
    found = jax.tree.map(lambda leaf: leaf.shape, output)
    return f"needs {needs} of the model, and {family}.{method} gives {found}"
