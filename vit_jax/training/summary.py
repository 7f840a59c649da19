"""What a run has cost and come to: the clock that is saved with its state, and summary.json."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vit_jax import metrics
from vit_jax.checkpoints import restore
from vit_jax.devices.chips import count_chips
from vit_jax.files import write_whole
from vit_jax.training.guards import DIVERGED_FILE, NonFiniteError
from vit_jax.training.prepare import Run

logger = logging.getLogger("vit_jax")


class Clock:
    """What a run has cost, its earlier parts, maybe on other meshes, included.

    Args:
      meta: saved with the state that the run goes on from; {} from scratch.
      devices: of this part.
    """

    def __init__(self, meta: Mapping[str, Any], devices: Sequence[jax.Device]):
        self._since = time.perf_counter()
        self._num_chips = count_chips(devices)
        self._train_s = meta.get("train_s", 0.0)
        self._chip_hours = read_chip_hours(meta, devices)
        if "chip_s" in meta and self._num_chips != len(devices):
            logger.warning(
                "an older version counted the chip-hours of this run by JAX's devices; its part "
                "is taken as %.4g chip-hours, at %g devices a chip as here",
                self._chip_hours, len(devices) / self._num_chips,
            )  # fmt: skip

    def read(self, train_s: float) -> dict[str, float]:
        """To be saved; `train_s` is what the steps of this part have taken.

        `train_s`: seconds of training alone; `chip_hours`: of everything, times chips.
        """
        hours = (time.perf_counter() - self._since) / 3600
        return {
            "train_s": self._train_s + train_s,
            "chip_hours": self._chip_hours + hours * self._num_chips,
        }


def read_chip_hours(meta: Mapping[str, Any], devices: Sequence[jax.Device]) -> float:
    """The chip-hours in what was saved with a state; 0 in {}.

    An older version saved `chip_s`, seconds times JAX's devices. That run is assumed to have had as
    many devices per chip as `devices`.
    """
    if "chip_s" in meta:
        return meta["chip_s"] / 3600 * count_chips(devices) / len(devices)
    return meta.get("chip_hours", 0.0)


def read_summary(run: Run) -> dict[str, Any] | None:
    """The summary of a run that is finished; None if it is not."""
    path = run.workdir / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text())
    return summary if summary["step"] == run.experiment.total_steps else None


def write_diverged(run: Run, error: NonFiniteError) -> None:
    """Writes, from process 0, what has ended the run; as configured it will not get further."""
    if jax.process_index() == 0:
        text = json.dumps({"error": str(error)}, indent=2) + "\n"
        write_whole(run.workdir / DIVERGED_FILE, text)


def write_summary(run: Run) -> dict[str, Any]:
    """Writes summary.json from what the run has made durable; {} on processes other than 0.

    A shared disk may show these an older listing.
    """
    if jax.process_index() > 0:
        return {}
    c, e = run.config, run.experiment
    step = restore.saved_steps(run.workdir / "checkpoints")[0]
    meta = restore.read_meta(run.workdir / "checkpoints" / str(step))
    images = step * c.global_batch_size
    found = metrics.values_at(step, run.workdir)
    summary = {
        "step": step,
        **{k: v for k, v in found.items() if k.split("/")[0] in c.evals},
        "num_params": e.num_params,
        "images_seen": images,
        "exaflops": e.flops_per_image * images / 1e18,
        "images_per_s": images / meta["train_s"],
        "chip_hours": read_chip_hours(meta, list(run.mesh.devices.flat)),
    }
    write_whole(run.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    shown = {k: v for k, v in summary.items() if "/" in k or k in ("images_per_s", "chip_hours")}
    logger.info("finished at step %s: %s", f"{step:,}", metrics.readable(shown))
    logger.info("summary: %s", run.workdir / "summary.json")
    return summary
