"""Trains a short run without a workdir and keeps its numbers."""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import tree
from vit_jax.evaluators import evaluate
from vit_jax.experiment.layer_norms import norms_by_group
from vit_jax.experiment.state import TrainState
from vit_jax.run.build import Run, prepare
from vit_jax.run.loop import compile_step, open_batches
from vit_jax.run.teachers import place_teachers
from vit_jax.run.train import start_state

FIRST_STEPS = 20
_POINTS = 10  # of the curve of the loss
_IN_CURVE = ("loss", "top1", "/rank")  # ends of the names of the evaluators' values


class Trace(NamedTuple):
    """The numbers of a run.

    first_steps: {name: its values at the first steps}.
      `data/image`, `data/label`: mean pixel and mean label of the batch; `loss`; `grad_norm`, of
      everything, and `grad_norm/PART`, before clipping; `param_norm/GROUP`, after the step.
    curve: {name: {step: value, or the values of all seeds}}. `train/loss` is the mean over the
      steps since the point before; the other values are the evaluators' loss, top-1 accuracy and
      effective rank.
    """

    first_steps: dict[str, list[float]]
    curve: dict[str, dict[int, Any]]


def group_of(name: str) -> str:
    """The group of the unrolled parameter `name`: PART/KIND, such as encoder/layer_0/kernel."""
    return f"{tree.part_of(name)}/{name.rpartition('/')[2]}"


def trace_run(config: ConfigDict, *, curve: bool = True) -> Trace:
    """Train as `config` describes, in this process alone, and return the numbers.

    Args:
      config: has passed `validation.validate`.
      curve: whether to train to the end and evaluate; else only the first steps are trained.

    Raises:
      InputError: the config does not fit its data or these devices.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(config, pathlib.Path(folder) / "run")
        with jax.set_mesh(run.mesh):
            return _trace(run, compile_step(run), first_steps=True, curve=curve)


def trace_seeds(configs: Sequence[ConfigDict]) -> Trace:
    """The first steps of the first of `configs`, and the curve of each: {name: {step: values}}.

    The configs differ in `seed` only: in initial weights, in the order of the data and in what the
    host draws. The step is compiled once, so dropout and what else it draws follow the first seed.

    Raises:
      InputError: as `trace_run`.
    """
    found = Trace({}, {})
    with tempfile.TemporaryDirectory() as folder:
        runs = [prepare(config, pathlib.Path(folder) / "run") for config in configs]
        first = runs[0]
        with jax.set_mesh(first.mesh):
            train_step = compile_step(first)
            for run in runs:
                shared = dataclasses.replace(run, evaluators=first.evaluators)
                trace = _trace(shared, train_step, first_steps=run is first, curve=True)
                found.first_steps.update(trace.first_steps)
                for name, points in trace.curve.items():
                    for step, value in points.items():
                        found.curve.setdefault(name, {}).setdefault(step, []).append(value)
    return found


def _trace(run: Run, train_step: jax.stages.Compiled, *, first_steps: bool, curve: bool) -> Trace:
    e, found = run.experiment, Trace({}, {})
    total = e.total_steps if curve else min(FIRST_STEPS, e.total_steps)
    period = max(e.total_steps // _POINTS, 1)
    state, _ = start_state(run)
    frozen = place_teachers(run.teachers, e.abstract_frozen)
    gradient_norms = e.layer_norms.lower(*e.arguments).compile() if first_steps else None
    param_norms = jax.jit(functools.partial(norms_by_group, group=group_of))
    losses: list[float] = []
    with open_batches(run, 0) as batches:
        for step, batch in zip(range(1, total + 1), batches, strict=False):
            detailed = gradient_norms is not None and step <= FIRST_STEPS
            numbers = {}
            if detailed:
                norms = gradient_norms(state, batch, *frozen)
                numbers = {k: v for k, v in norms.items() if k.startswith("grad_norm/")}
                numbers |= _data_numbers(batch)
            state, metrics = train_step(state, batch, *frozen)
            losses.append(float(metrics["loss"]))
            if detailed:
                numbers |= {"loss": losses[-1], "grad_norm": metrics["grad_norm"]}
                norms = param_norms(state.params)
                numbers |= {f"param_norm/{group}": norm for group, norm in norms.items()}
                for name, value in numbers.items():
                    found.first_steps.setdefault(name, []).append(float(value))
            if not curve:
                continue
            row = {"train/loss": float(np.mean(losses[-period:]))} if step % period == 0 else {}
            row |= _evaluate(run, state, step)
            for name, value in row.items():
                found.curve.setdefault(name, {})[step] = value
    return found


def _evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
    """The values of the evaluators that are due at `step` and count for the curve."""
    return {
        key: float(value)
        for name in run.timetable.evaluators(step)
        for key, value in evaluate(name, run.evaluators[name], state).items()
        if key.endswith(_IN_CURVE)
    }


def _data_numbers(batch: tree.Batch) -> dict[str, float]:
    """Mean pixel of images and views, and mean label; labels (B, C) count by their classes."""
    label = np.asarray(batch["label"], np.float64)
    if label.ndim == 2:
        label = label @ np.arange(label.shape[1])
    pictures = {f"data/{k}": float(np.mean(v)) for k, v in batch.items() if v.dtype == np.uint8}
    return pictures | {"data/label": float(label.mean())}
