"""What watches the steps of a run, a function each; the loop knows only the watched step.

A watcher takes a step, (number, state, batch) -> (new state, metrics), and returns one: it may act
before and after the step, add metrics, raise, or take its place. Others: `speed.Profiler.watch`,
`replay.watch_replays`, `spikes.Spikes.watch`.
"""

import jax

from vit_jax.base import tree
from vit_jax.base.errors import SharedInputError
from vit_jax.base.faults import flip_weight, parse_fault
from vit_jax.job import watchdog
from vit_jax.run.build import Run, RunStep, Watcher
from vit_jax.run.replay import watch_replays


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

    for watch in (watch_layers(run, frozen), watch_replays(run, frozen), inject(run)):
        step = watch(step)
    return step


def watch_layers(run: Run, frozen: tuple[tree.PyTree, ...]) -> Watcher:
    """Add the norms by layer to the metrics of each step that is logged (`log.by_layer`)."""
    if not run.config.log.by_layer:
        return lambda step: step
    with watchdog.phase("compile"):
        layer_norms = run.experiment.layer_norms.lower(*run.experiment.arguments).compile()

    def watch(step):
        def watched(number, state, batch):
            logs = run.timetable.logs(number)
            norms = layer_norms(state, batch, *frozen) if logs else {}
            state, metrics = step(number, state, batch)
            return state, metrics | norms

        return watched

    return watch


def inject(run: Run) -> Watcher:
    """Flip a bit of a weight before a step, if `job.inject` asks for it."""
    flip = parse_fault(run.config.job.inject)
    if flip is not None and flip.device >= run.mesh.size:
        raise SharedInputError(f"job.inject={run.config.job.inject!r}: needed: a "
                               f"device of the mesh, 0 to {run.mesh.size - 1}")  # fmt: skip
    if flip is None or flip.what != "weight":
        return lambda step: step
    device = run.mesh.devices.flat[flip.device]

    def watch(step):
        def watched(number, state, batch):
            if number == flip.step:
                state = state.replace(params=flip_weight(state.params, device))
            return step(number, state, batch)

        return watched

    return watch
