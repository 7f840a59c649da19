"""Evaluators: one class each, whose fields are the keys of its entries in `evals`.

`Evaluator.bind` gives a function, state -> {metric: value}, which reads only `params` and
`model_state` of the state. Every example counts once, on any number of hosts.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import EVALUATORS, Evaluator, Settings, SplitKey, eval_splits
from vit_jax.config.metric_names import is_named
from vit_jax.data import Source
from vit_jax.data.given_labels import ONE_LABEL
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import about, with_known
from vit_jax.models.zero_shot import TextSide

logger = logging.getLogger("vit_jax")


def evaluate(name: str, measure: Measure, state: TrainState) -> dict[str, float]:
    """Run the evaluator called `name` on `state`: {"name/metric": value}; `measure`: as bound.

    If the state holds a running average of the parameters, the metrics are computed with it and
    the average of the model state; the metrics of the parameters and the model state themselves
    follow as "name/metric_raw". Counts are listed once.

    Raises:
      InputError: names a key of the evaluator's entry.
      NothingToMeasureError: a subclass, raised by every process.
    """

    def of_weights(state: TrainState) -> dict[str, float]:
        try:
            return measure(state.replace(ema={}, ema_model_state={}))
        except InputError as e:
            raise type(e)(*(f"evals.{name}.{fault}" for fault in e.faults)) from None

    if not state.ema:
        return {f"{name}/{key}": value for key, value in of_weights(state).items()}
    metrics = {f"{name}/{key}": value for key, value in of_weights(state.averaged()).items()}
    raw = {f"{name}/{key}_raw": value for key, value in of_weights(state).items()
           if not isinstance(value, int | np.integer)}  # fmt: skip
    return metrics | raw


def make_evaluators(
    settings: Settings,
    preprocessing: Preprocessing,
    model: nn.Module,
    mesh: Mesh,
    sources: Mapping[SplitKey, Source],
    folder: epath.Path | None = None,
    see: Callable[[str, Any], Any] | None = None,
    read_text_side: Callable[[], TextSide] | None = None,
) -> dict[str, Measure]:
    """Bind the evaluators of `settings.evals`: {name: what `evaluate` runs}.

    `sources`: as opened for the run. `folder`: the workdir of a run that trains, where evaluators
    may write files; None: they write none. `see` gets an evaluator's name and its predictions at
    each run, if the evaluator is of the model's classes. `read_text_side`: see `EvalInputs`.

    Raises:
      InputError: names the key, if an evaluator needs something that is missing.
    """
    faults = Faults()
    evaluators: dict[str, Measure] = {}
    for name, evaluator in settings.evals.items():
        inputs = EvalInputs(
            name=name,
            settings=settings,
            model=model,
            mesh=mesh,
            sources={k: sources[key] for k, key in eval_splits(settings.data, evaluator).items()},
            host_ops=preprocessing.eval_ops[name],
            image_size=settings.data.image_size,
            folder=folder,
            see=see and functools.partial(see, name),
            read_text_side=read_text_side,
        )
        of_labels = evaluator.multi_label
        several = [k for k, s in inputs.sources.items() if of_labels not in (None, s.multi_label)]
        if several:
            needs = f"needs {'classification' if of_labels else 'multilabel'}"
            faults.append(
                f"evals.{name}.type={EVALUATORS.name_of(evaluator)!r}: {several[0]} has "
                f"{'one label' if of_labels else 'several labels'} an image; "
                f"{ONE_LABEL if evaluator.learns_classes else needs}"
            )
            continue
        measure = faults.check_in(f"evals.{name}.", evaluator.bind, inputs)
        if measure is not None:
            evaluators[name] = _warned(name, evaluator.reports(), measure)
    collect_faults(faults)
    return evaluators


def _warned(name: str, declared: Mapping[str, Any] | None, measure: Measure) -> Measure:
    """`measure`, which warns once of each metric that the evaluator `name` does not declare."""
    known = {*declared} if declared is not None else {"*"}

    def measure_and_warn(state: TrainState) -> dict[str, float]:
        found = measure(state)
        for metric in [m for m in found if not is_named(m, known)]:
            known.add(metric)
            logger.warning("evals.%s reports %r, which its `reports` do not declare", name, metric)
        return found

    return measure_and_warn


def check_outputs(
    evals: Mapping[str, Evaluator], model: nn.Module, image_size: tuple[int, int]
) -> None:
    """Checks by shapes that `model` gives every evaluator of `evals` the output it needs.

    Raises:
      InputError: naming each evaluator that it cannot serve.
    """
    find_fault = functools.cache(functools.partial(_find_output_fault, model, image_size))
    faults = Faults()
    for name, evaluator in evals.items():
        if fault := find_fault(evaluator.output):
            kind = EVALUATORS.name_of(evaluator)
            faults.append(f"evals.{name}.type={kind!r}: {fault}; leave it out")
    collect_faults(faults)


def _find_output_fault(model: nn.Module, image_size: tuple[int, int], method: str) -> str:
    """Why no evaluator can use what `method` of the model gives, found by shapes; "" if it can."""
    family = type(model).__name__
    # Scanned layers are traced in a fraction of the time.
    plain = with_known(model, scan=True, constrain=unconstrained, ops=PLAIN)
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
