"""Trains short runs without a workdir and keeps their numbers."""

import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from vit_jax.base import tree
from vit_jax.config import Settings
from vit_jax.evaluators import evaluate
from vit_jax.run.build import Run, prepare
from vit_jax.run.loop import Batches, compile_step
from vit_jax.run.teachers import place_teachers
from vit_jax.run.train import start_state
from vit_jax.run.watch.layer_norms import norms_by_group
from vit_jax.run.watch.watchers import compile_layer_norms

FIRST_STEPS = 20
_POINTS = 10  # of the curve of the loss
_IN_CURVE = ("loss", "/top1", "nn_top1", "/rank")  # ends of the names of the evaluators' values

Place = tuple[int, str]  # the step and the name of a number


class Trace(NamedTuple):
    """The numbers of runs that differ only in their seed.

    first_steps: {place: value} of the first run, at the first steps.
      `data/image`, `data/label`: mean pixel and mean label of the batch; `loss`; `grad_norm`, of
      everything, and `grad_norm/PART`, before clipping; `param_norm/GROUP`, after the step.
    curve: {place: the values of all runs}. `train/loss` is the mean over the steps since the point
      before; the other values are the evaluators' loss, top-1 accuracy and effective rank.
    """

    first_steps: dict[Place, float]
    curve: dict[Place, list[float]]


def group_of(name: str) -> str:
    """The group of the unrolled parameter `name`: PART/KIND, such as encoder/layer_0/kernel."""
    return f"{tree.part_of(name)}/{name.rpartition('/')[2]}"


def trace_runs(asked: Sequence[Settings], *, curve: bool = True) -> Trace:
    """Train as each of `asked` describes, in this process alone, and return the numbers.

    The step is compiled once, so dropout and what else it draws follow the first seed; the others
    change the initial weights, the order of the data and what the host draws.

    Args:
      asked: of valid configs that differ only in `seed`.
      curve: whether to train to the end and evaluate; else only the first steps are trained.

    Raises:
      InputError: the config does not fit its data or these devices.
    """
    found = Trace({}, {})
    with tempfile.TemporaryDirectory() as folder:
        runs = [prepare(each, pathlib.Path(folder) / "run") for each in asked]
        with jax.set_mesh(runs[0].mesh):
            train_step = runs[0].by_stage(compile_step)
            for run in runs:
                _trace(run, runs[0], train_step, curve, found)
    return found


def _trace(
    run: Run,
    first: Run,
    train_step: Callable[[int], jax.stages.Compiled],
    curve: bool,
    found: Trace,
) -> None:
    """Train `run` by the step and the evaluators of `first`; add its numbers to `found`."""
    e = run.experiment
    total = e.total_steps if curve else min(FIRST_STEPS, e.total_steps)
    period = max(e.total_steps // _POINTS, 1)
    state, _ = start_state(run)
    frozen = place_teachers(run.teachers, e.abstract_frozen)
    gradient_norms = run.by_stage(compile_layer_norms) if run is first else None
    param_norms = jax.jit(functools.partial(norms_by_group, group=group_of))
    losses: list[float] = []
    with Batches(run, 0) as batches:
        for step, batch in itertools.islice(batches, total):
            numbers = {}
            if gradient_norms is not None and step <= FIRST_STEPS:
                norms = gradient_norms(step)(state, batch, *frozen)
                numbers = {k: v for k, v in norms.items() if k.startswith("grad_norm/")}
                numbers |= _data_numbers(batch)
            state, metrics = train_step(step)(state, batch, *frozen)
            losses.append(float(metrics["loss"]))
            if numbers:
                numbers |= {"loss": losses[-1], "grad_norm": metrics["grad_norm"]}
                norms = param_norms(state.params)
                numbers |= {f"param_norm/{group}": norm for group, norm in norms.items()}
            found.first_steps.update({(step, name): float(x) for name, x in numbers.items()})
            if not curve:
                continue
            row = {"train/loss": float(np.mean(losses[-period:]))} if step % period == 0 else {}
            for name in run.timetable.evaluators(step):
                measured = evaluate(name, first.evaluators[name], state)
                row |= {key: value for key, value in measured.items() if key.endswith(_IN_CURVE)}
            for name, value in row.items():
                found.curve.setdefault((step, name), []).append(float(value))


def _data_numbers(batch: tree.Batch) -> dict[str, float]:
    """Mean pixel of images and views, and mean label; labels (B, C) count by their classes."""
    label = np.asarray(batch["label"], np.float64)
    if label.ndim == 2:
        label = label @ np.arange(label.shape[1])
    images = {f"data/{k}": float(np.mean(v)) for k, v in batch.items() if v.dtype == np.uint8}
    return images | {"data/label": float(label.mean())}
