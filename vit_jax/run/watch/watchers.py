"""Watchers of the steps of a run, a function each; the loop knows only the watched step.

A watcher takes a step, (number, state, batch) -> (new state, metrics), and returns one: it may act
before and after the step, add metrics, raise, or take its place. Others: `speed.Profiler.watch`,
`replay.watch_replays`, `spikes.Spikes.watch`.
"""

import time
from collections.abc import Callable, Sequence

import jax

from vit_jax.base import tree
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics
from vit_jax.job import watchdog
from vit_jax.run.build import Run, RunStep, Watcher
from vit_jax.run.watch.faults import Fault
from vit_jax.run.watch.injected import faults_left, is_here, make
from vit_jax.run.watch.layer_norms import layer_norms_program
from vit_jax.run.watch.replay import watch_replays


def watched_step(
    run: Run,
    program: Callable[[int], jax.stages.Compiled],
    frozen: tuple[tree.PyTree, ...],
    first: int,
) -> RunStep:
    """The training step of a run, wrapped by what watches it.

    `program`: gives the compiled step of a number. `first`: number of the first step.
    """
    loading = run.settings.stages.loads(first - 1)

    def step(number: int, state: TrainState, batch: tree.Batch) -> tuple[TrainState, Metrics]:
        if number not in loading:
            return program(number)(state, batch, *frozen)
        with watchdog.phase("compile"):  # also loads the program and connects the devices
            return jax.block_until_ready(program(number)(state, batch, *frozen))

    left = faults_left(run)
    layers, replays = watch_layers(run, frozen, first), watch_replays(run, frozen, left, first)
    return inject(run, left)(replays(layers(step)))


def watch_layers(run: Run, frozen: tuple[tree.PyTree, ...], first: int) -> Watcher:
    """Add the norms by layer to the metrics of each step that is logged (`log.by_layer`)."""
    if not run.settings.log.by_layer:
        return lambda step: step
    with watchdog.phase("compile"):
        layer_norms = run.by_stage(compile_layer_norms, first - 1)

    def watch(step: RunStep) -> RunStep:
        def watched(
            number: int, state: TrainState, batch: tree.Batch
        ) -> tuple[TrainState, Metrics]:
            logs = run.timetable.logs(number)
            norms = layer_norms(number)(state, batch, *frozen) if logs else {}
            state, metrics = step(number, state, batch)
            return state, metrics | norms

        return watched

    return watch


def compile_layer_norms(run: Run) -> jax.stages.Compiled:
    """The compiled `layer_norms_program` of a run."""
    return layer_norms_program(run.experiment).lower(*run.experiment.arguments).compile()


def inject(run: Run, left: Sequence[Fault]) -> Watcher:
    """Make the faults of `job.inject` that belong to this process, each before its step."""
    mine = [fault for fault in left if is_here(run, fault)]

    def watch(step: RunStep) -> RunStep:
        def watched(
            number: int, state: TrainState, batch: tree.Batch
        ) -> tuple[TrainState, Metrics]:
            now = time.time()
            for fault in [fault for fault in mine if fault.is_due(number, now)]:
                mine.remove(fault)
                made = fault._replace(times=(*fault.times, now))
                if made.every:
                    mine.append(made)
                state = make(run, made, state)
            return step(number, state, batch)

        return watched

    return watch if mine else lambda step: step
