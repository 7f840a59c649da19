"""Watchers of the steps of a run, a function each; the loop knows only the watched step.

A watcher takes a step, (number, state, batch) -> (new state, metrics), and returns one: it may act
before and after the step, add metrics, raise, or take its place. Others: `speed.Profiler.watch`,
`replay.watch_replays`, `spikes.Spikes.watch`.
"""

import time
from collections.abc import Sequence

import jax

from vit_jax.base import tree
from vit_jax.job import watchdog
from vit_jax.run.build import Run, RunStep, Watcher
from vit_jax.run.watch.faults import Fault
from vit_jax.run.watch.injected import faults_left, is_here, make
from vit_jax.run.watch.layer_norms import layer_norms_program
from vit_jax.run.watch.replay import watch_replays


def watched_step(
    run: Run, train_step: jax.stages.Compiled, frozen: tuple[tree.PyTree, ...], first: int
) -> RunStep:
    """The training step of a run, wrapped by what watches it.

    `first`: number of the first step.
    """

    def step(number, state, batch):
        if number > first:
            return train_step(state, batch, *frozen)
        with watchdog.phase("compile"):  # also loads the program and connects the devices
            return jax.block_until_ready(train_step(state, batch, *frozen))

    left = faults_left(run)
    for watch in (watch_layers(run, frozen), watch_replays(run, frozen, left), inject(run, left)):
        step = watch(step)
    return step


def watch_layers(run: Run, frozen: tuple[tree.PyTree, ...]) -> Watcher:
    """Add the norms by layer to the metrics of each step that is logged (`log.by_layer`)."""
    if not run.settings.log.by_layer:
        return lambda step: step
    with watchdog.phase("compile"):
        layer_norms = layer_norms_program(run.experiment).lower(*run.experiment.arguments).compile()

    def watch(step):
        def watched(number, state, batch):
            logs = run.timetable.logs(number)
            norms = layer_norms(state, batch, *frozen) if logs else {}
            state, metrics = step(number, state, batch)
            return state, metrics | norms

        return watched

    return watch


def inject(run: Run, left: Sequence[Fault]) -> Watcher:
    """Make the faults of `job.inject` that belong to this process, each before its step."""
    mine = [fault for fault in left if is_here(run, fault)]

    def watch(step):
        def watched(number, state, batch):
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
