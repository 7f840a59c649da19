"""Cost and results of a run: the clock saved with its state, and summary.json."""

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
from vit_jax.run.build import Run
from vit_jax.run.guards import DIVERGED_FILE, NonFiniteError
from vit_jax.run.selection import read_selection

logger = logging.getLogger("vit_jax")


class Clock:
    """The chip-hours of a run, including its earlier parts, which may have used other meshes.

    Parts on a CPU add no chip-hours: nobody rents CPUs by the chip.

    Args:
      meta: saved with the state that the run continues from; {} from scratch.
      devices: devices of this part of the run.
    """

    def __init__(self, meta: Mapping[str, Any], devices: Sequence[jax.Device]):
        self._since = time.perf_counter()
        self._rented_chips = 0 if _are_cpus(devices) else count_chips(devices)
        self._chip_hours = meta.get("chip_hours", 0.0)

    def read(self) -> dict[str, float]:
        """The total to save; it counts everything that the run does."""
        hours = (time.perf_counter() - self._since) / 3600
        return {"chip_hours": self._chip_hours + hours * self._rented_chips}


def _chip_hours(meta: Mapping[str, Any], devices: Sequence[jax.Device]) -> dict[str, float]:
    """{"chip_hours": of the run}; {} on a CPU."""
    return {} if _are_cpus(devices) else {"chip_hours": meta["chip_hours"]}


def _are_cpus(devices: Sequence[jax.Device]) -> bool:
    return devices[0].platform == "cpu"


def read_summary(run: Run) -> dict[str, Any] | None:
    """The summary of a finished run, which may have stopped early; None if it is not finished."""
    path = run.workdir / "summary.json"
    if not path.exists() or not (run.workdir / "config.json").exists():
        return None  # without its config the run goes on, and writes it
    summary = json.loads(path.read_text())
    at_end = summary["step"] == run.experiment.total_steps
    return summary if at_end or read_selection(run, summary["step"]).stops else None


def remove_summary(run: Run) -> None:
    """Removes, on process 0, the summary of an earlier end of a run that goes on."""
    (run.workdir / "summary.json").unlink(missing_ok=True)


def write_diverged(run: Run, error: NonFiniteError) -> None:
    """Write diverged.json on process 0; a run with this config would diverge again."""
    if jax.process_index() == 0:
        text = json.dumps({"error": str(error)}, indent=2) + "\n"
        write_whole(run.workdir / DIVERGED_FILE, text)


def write_summary(run: Run) -> dict[str, Any]:
    """Write summary.json from what the run has saved; return {} on processes other than 0.

    A shared disk may show the other processes an older listing.
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
        **_chip_hours(meta, list(run.mesh.devices.flat)),
        **read_selection(run, step).summary(),
    }
    if "best" in summary:  # with what the other evaluators found at that step
        at_best = metrics.values_at(summary["best"]["step"], run.workdir)
        kept = {k: v for k, v in at_best.items() if k.split("/")[0] in c.evals}
        summary["best"] = kept | summary["best"]
    write_whole(run.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    speed = ("images_per_s", "chip_hours")
    shown = {k: v for k, v in summary.items() if "/" in k or k in speed}
    logger.info("finished at step %s: %s", f"{step:,}", metrics.readable(shown))
    logger.info("summary: %s", run.workdir / "summary.json")
    return summary
