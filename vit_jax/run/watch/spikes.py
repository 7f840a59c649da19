"""Spikes of the loss or of the gradient's norm, and what becomes of their batch.

    value > median + 8 max(1.4826 MAD, 0.02 |median|)

of the last 100 good steps of a stage (`config.sizes`), the median and the median absolute deviation
(MAD; 1.4826 MAD is the standard deviation of a normal distribution), once there are 20 of them; a
value that is not finite always is a spike. `optimizer.on_spike` says what happens:

    find (where a row, an evaluation or a save is due) ──> restore the last good state, read on
    after it ──> the step of the spike: evidence, then its batch is left out

The decision depends only on the metrics of the steps before, which each checkpoint keeps, so a run
that is killed, resumed or repeated decides as before. The steps up to the spike are computed again,
with the same bits.
"""

import collections
import functools
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from vit_jax.base import tree
from vit_jax.base.files import write_whole
from vit_jax.devices.sharding import HostCopy
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics, skip_step
from vit_jax.job import watchdog
from vit_jax.run.build import Run, RunStep
from vit_jax.run.watch.guards import NonFiniteError
from vit_jax.run.watch.layer_norms import layer_norms_program
from vit_jax.run.watch.row_losses import row_losses_program
from vit_jax.run.writers import finite_or_none

logger = logging.getLogger("vit_jax")

FOLDER = "spikes"  # in the workdir: STEP.json and STEP.png of each
WATCHED = ("loss", "grad_norm")
_WINDOW, _FEWEST = 100, 20  # good steps
_DEVIATIONS, _LEAST_DEVIATION = 8.0, 0.02
_MOST = 10  # spikes in _WINDOW steps; with more the run ends
_COLUMNS = 8  # of the images of a batch


class Spikes:
    """Finds spikes, keeps the last good state in host memory, and leaves batches out.

    Args:
      run: the run.
      frozen: arrays that its step takes too.
      meta: saved with the state that the run continues from; {} from scratch.
    """

    def __init__(self, run: Run, frozen: tuple[tree.PyTree, ...], meta: Mapping[str, Any]):
        self._run, self.frozen = run, frozen
        self._rule = run.settings.optimizer.on_spike
        self._firsts = {stage.steps.start + 1 for stage in run.settings.stages}
        known = meta.get("spikes", {})
        self._good = {
            name: collections.deque(known.get(name, ()), maxlen=_WINDOW) for name in WATCHED
        }
        self._steps: list[int] = known.get("steps", [])
        self._found: dict[int, dict[str, Any]] = {}
        self._kept: tuple[int, Any] | None = None

    def watch(self, step: RunStep) -> RunStep:
        """`step`, or in its place one that leaves the batch of a spike out."""
        if self._rule is None:
            return step

        e = self._run.experiment
        skip = e.jit(
            functools.partial(skip_step, e.objective),
            out_shardings=(e.shardings, None),
            donate_argnums=0,
        )

        def watched(
            number: int, state: TrainState, batch: tree.Batch
        ) -> tuple[TrainState, Metrics]:
            if self._kept is None:
                self.keep(number - 1, state)
            if number not in self._found:
                return step(number, state, batch)
            self._write_evidence(number, state, batch)
            return skip(state, batch)

        return watched

    def find(self, steps: Sequence[tuple[int, Mapping[str, Any]]]) -> int | None:
        """The first step with a spike among `steps`, (number, metrics); None: all are good.

        Raises:
          NonFiniteError: spikes follow each other.
        """
        if self._rule is None:
            return None
        good = {name: values.copy() for name, values in self._good.items()}
        for number, metrics in steps:
            if number in self._firsts:
                good = {name: collections.deque(maxlen=_WINDOW) for name in WATCHED}
            if number in self._found:
                continue
            seen = {name: float(metrics[name]) for name in WATCHED}
            limits = {name: limit(good[name]) for name in WATCHED}
            if not all(math.isfinite(seen[name]) and seen[name] <= limits[name] for name in seen):
                self._note(number, seen, limits)
                return number
            for name in WATCHED:
                good[name].append(seen[name])
        self._good = good
        return None

    def _note(self, number: int, seen: Mapping[str, float], limits: Mapping[str, float]) -> None:
        self._steps = [n for n in self._steps if n > number - _WINDOW] + [number]
        self._found[number] = {"values": seen, "limits": finite_or_none(limits)}
        said = ", ".join(f"{k} {v:.4g} (limit {limits[k]:.4g})" for k, v in seen.items())
        if len(self._steps) > _MOST:
            raise NonFiniteError(
                f"step {number}: {said}: {len(self._steps)} spikes in {_WINDOW} steps; their "
                f"batches are in {self._run.workdir / FOLDER}. Lower optimizer.peak_lr, lengthen "
                "schedule.warmup or set optimizer.grad_clip_norm, and use a new --workdir"
            )
        assert self._kept is not None, "kept before the first step"
        rest = ", and the rate is halved from there on" if self._rule == "lower" else ""
        logger.warning(
            "step %d: a spike: %s; going back to step %d; the batch is left out%s",
            number, said, self._kept[0], rest,
        )  # fmt: skip

    def keep(self, step: int, state: TrainState) -> None:
        """Keep a copy of this process's shards of a good state in host memory."""
        if self._rule is not None:
            self._kept = step, jax.tree.map(HostCopy, state)

    def restore(self) -> tuple[int, TrainState]:
        """(its step, the last good state) on the devices."""
        assert self._kept is not None, "a spike was found after it"
        step, copies = self._kept
        return step, jax.tree.map(HostCopy.restore, copies)

    def row(self, step: int) -> dict[str, float]:
        """The row of metrics of a spike."""
        return {f"train/spike_{k}": v for k, v in self._found[step]["values"].items()}

    def read(self) -> dict[str, Any]:
        """The values that a resumed run needs, saved with the state; {} if the rule is off."""
        if self._rule is None:
            return {}
        good = {name: list(values) for name, values in self._good.items()}
        return {"spikes": good | {"steps": self._steps}}

    def _write_evidence(self, step: int, state: TrainState, batch: tree.Batch) -> None:
        """Write WORKDIR/spikes/STEP.json and STEP.png, on process 0.

        values, limits: of loss and gradient norm.
        norms: by layer, as `log.by_layer` gives them.
        rows: id and mask of each row of the batch; losses: theirs, null: not finite,
          or there is no loss by row (`row_losses`).
        shown: rows of the images in the PNG; there is none of pictures in their own shape, and of
          kept features.
        """
        e = self._run.experiment_of(step)
        with watchdog.phase("compile"):
            made = layer_norms_program(e), row_losses_program(e, self._run.mesh)
            programs = [program.lower(*e.arguments).compile() for program in made]
        norms, rows = jax.device_get([p(state, batch, *self.frozen) for p in programs])
        if jax.process_index() > 0:
            return
        losses = {str(row): loss for row, loss in enumerate(rows["loss"].tolist())}
        evidence = {
            "step": step,
            "rule": self._rule,
            "values": finite_or_none(self._found[step]["values"]),
            "limits": self._found[step]["limits"],
            "norms": finite_or_none({name: float(norm) for name, norm in norms.items()}),
            "rows": {name: rows[name].tolist() for name in ("id", "mask")},
            "losses": [*finite_or_none(losses).values()],
            "shown": rows["rows"].tolist(),
        }
        folder = self._run.workdir / FOLDER
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{step}.json", json.dumps(evidence) + "\n")
        if "images" in rows:
            write_whole(folder / f"{step}.png", as_png(rows["images"]))


def limit(good: Sequence[float]) -> float:
    """The largest value that is no spike after the `good` values; inf: there are too few."""
    if len(good) < _FEWEST:
        return math.inf
    median = float(np.median(good))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(good) - median)))
    return median + _DEVIATIONS * max(deviation, _LEAST_DEVIATION * abs(median))


def as_png(images: np.ndarray) -> bytes:
    """uint8 images (n, h, w, channels) as one PNG, row by row, 8 in each row."""
    images = images[..., :3] if images.shape[-1] >= 3 else images[..., :1].repeat(3, axis=-1)
    n, h, w, _ = images.shape
    rows = -(-n // _COLUMNS)
    tiles = np.zeros((rows * _COLUMNS, h, w, 3), np.uint8)
    tiles[:n] = images
    sheet = tiles.reshape(rows, _COLUMNS, h, w, 3).swapaxes(1, 2)
    file = io.BytesIO()
    Image.fromarray(sheet.reshape(rows * h, _COLUMNS * w, 3)).save(file, "PNG")
    return file.getvalue()
