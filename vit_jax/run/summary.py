"""The results of a run: summary.json, or diverged.json."""

import json
import logging
import os
import shlex
from typing import Any

import jax

from vit_jax.base.files import read_json, write_whole
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.history import check_summary, read_history
from vit_jax.config.metric_names import say_no_gain
from vit_jax.run.build import Run
from vit_jax.run.selection import read_selection
from vit_jax.run.terminal import readable
from vit_jax.run.watch import ledger
from vit_jax.run.watch.guards import DIVERGED_FILE, NonFiniteError
from vit_jax.run.watch.speed import rented_chips
from vit_jax.run.writers import values_at

logger = logging.getLogger("vit_jax")


def read_summary(run: Run) -> dict[str, Any] | None:
    """The summary of a finished run, which may have stopped early; None if it is not finished."""
    summary = read_json(run.workdir / "summary.json", check_summary)
    if summary is None or "step" not in summary or not (run.workdir / "config.json").exists():
        return None  # without its config the run goes on, and writes it
    at_end = summary["step"] == run.experiment.total_steps
    return summary if at_end or read_selection(run, summary["step"]).stops else None


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
    s, e = run.settings, run.experiment
    step = restore.saved_steps(run.workdir / "checkpoints")[0]
    meta = restore.read_meta(run.workdir / "checkpoints" / str(step))
    images = s.stages.images(step)

    def evaluated(at: int) -> dict[str, Any]:
        found = values_at(at, run.workdir)
        return {name: value for name, value in found.items() if name.split("/")[0] in s.evals}

    summary = {
        "step": step,
        **evaluated(step),
        "num_params": e.num_params,
        "images_seen": images,
        "exaflops": run.flops(step) / 1e18,
        "images_per_s": images / meta["train_s"],
    }
    seconds = ledger.add_up(read_history(run.workdir))
    summary |= {"goodput": ledger.goodput(seconds), "seconds": seconds}
    if rented_chips(run.mesh.devices.flatten().tolist()):
        summary["chip_hours"] = meta["chip_hours"]
    summary |= read_selection(run, step).summary()
    if "best" in summary:  # with what the other evaluators found at that step
        summary["best"] = evaluated(summary["best"]["step"]) | summary["best"]
    write_whole(run.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    shown = {k: v for k, v in summary.items() if "/" in k or k in ("images_per_s", "chip_hours")}
    logger.info("finished at step %s: %s", f"{step:,}", readable(shown))
    logger.info(ledger.say(seconds))
    logger.info("summary: %s", run.workdir / "summary.json")
    _say_progress(run)
    start = values_at(0, run.workdir)
    for metric, value in summary.items():
        if text := say_no_gain(metric, value, start):
            logger.warning("%s", text)
    return summary


def _say_progress(run: Run) -> None:
    """Warn if the last training loss is not below the first, and say what would tell more.

    The first counts if it is of the first half: later ones fall little. A loss whose teacher learns
    may rise. Without labels a loss does not show what features are
    worth; that is said unless an evaluator shows it.
    """
    losses = [(row["step"], loss) for row in read_history(run.workdir)
              if (loss := row.get("train/loss")) is not None]  # fmt: skip
    if not losses:
        return
    (start, first), (step, last) = losses[0], losses[-1]
    objective = run.experiment.objective
    if step >= 2 * start and last >= first and not objective.needs_average:
        logger.warning(
            "the loss did not fall: train/loss is %.4g at step %d and was %.4g at step %d",
            last, step, first, start,
        )  # fmt: skip
    compared = any(evaluator.shows_worth for evaluator in run.settings.evals.values())
    if "label" not in objective.needs and not compared:
        logger.info(
            "train/loss is %.4g and was %.4g at step %d; it does not show what the features are "
            "worth, but a few labelled images do: vit_jax evaluate --init_from=%s "
            "--config=evaluate:knn,folder --config.data.data_dir=IMAGES",
            last, first, start, shlex.quote(os.fspath(run.workdir)),
        )  # fmt: skip
