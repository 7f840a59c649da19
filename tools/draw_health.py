"""Draws the curves of docs/explanation/does_it_learn.md from the runs that the page lists.

python tools/draw_health.py RUNS docs/explanation/does_it_learn.png

RUNS holds the workdirs lejepa, lejepa_collapsed, dino and dino_collapsed.
"""

import json
import math
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {"lejepa": "LeJEPA", "dino": "DINO"}
ARMS = {"": ("not collapsed", "#1b6ca8", "-"), "_collapsed": ("collapsed", "#c0392b", "--")}
PROTOTYPES = 64
PANELS = (  # (metric, factor, label, line at which a run warns)
    ("train/loss", 1, "training loss", None),
    ("near/20nn_top1", 100, "20-NN, top-1 in %", None),
    ("rank/share", 100, "effective rank, % of the width", 5),
)
LAST = {  # of each method, likewise
    "lejepa": ("train/loss_sigreg", 1, "SIGReg; 1.06 is normal", 1.06),
    "dino": (
        "train/teacher_entropy",
        100 / math.log(PROTOTYPES),
        "entropy of the teacher, % of log K",
        1,
    ),
}


def read(workdir, metric):
    """(steps, values) of a metric."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    return [step for step, _ in found], [value for _, value in found]


def main(runs, output):
    figure, grid = plt.subplots(
        len(METHODS), len(PANELS) + 1, figsize=(13, 5.6), sharex=True, layout="constrained"
    )
    for axes, (method, title) in zip(grid, METHODS.items(), strict=True):
        panels = (*PANELS, LAST[method])
        for axis, (metric, factor, label, limit) in zip(axes, panels, strict=True):
            for suffix, (arm, colour, style) in ARMS.items():
                steps, values = read(pathlib.Path(runs) / f"{method}{suffix}", metric)
                values = [factor * value for value in values]
                axis.plot(steps, values, style, color=colour, label=arm)
            if limit is not None:
                axis.axhline(limit, color="black", linewidth=0.8, linestyle=":")
            axis.set_ylim(bottom=0)
            axis.set_title(f"{title}: {label}", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        axes[0].legend(frameon=False, fontsize=8)
    for axis in grid[-1]:
        axis.set_xlabel("step", fontsize=9)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
