"""Measures goodput under faults: docs/explanation/goodput.csv and the figure goodput.png beside it.

python tools/goodput.py WORKDIR [--minutes=30]

Jobs of 2 and 4 processes under launch/local.py take the same steps without a fault and with faults:
SIGKILL at times drawn by chance, on average every 20, 10, 5 and 2.5 restarts. The time of a restart
is measured first. Runs that the CSV already has are not run again. Runs that do not fit into the
minutes are named and left out; the same command goes on with them. Exit code 1 means that a run
ended with other bits than the run without faults. WORKDIR keeps the output of each run.
"""

import argparse
import csv
import hashlib
import itertools
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import matplotlib
from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.checkpoints.restore import read_meta
from vit_jax.insight.tables import as_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/explanation/goodput.csv"
STEPS, DEVICES, SEEDS = 1000, 4, 3
EVERY = ("20", "10", "5", "2.5")  # restarts between two faults
WORDS = (
    "--config=quickstart", f"--config.duration={STEPS} steps", "--config.log.every=5 steps",
    "--config.evals.test=None", f"--config.checkpoint.every={STEPS // 4} steps",
)  # fmt: skip
STYLES = {  # (processes, memory): colour, line, mark
    ("2", "no"): ("#1b6ca8", "--", "x"),
    ("2", "yes"): ("#1b6ca8", "-", "o"),
    ("4", "no"): ("#c0392b", "--", "x"),
    ("4", "yes"): ("#c0392b", "-", "o"),
}


class Case(NamedTuple):
    """A run.

    memory: whether it also keeps copies in host memory; yes or no.
    every: restarts between two faults on average, "none", or "once" for one fault half-way.
    seed: of the times of the faults.
    """

    processes: str
    memory: str
    every: str
    seed: str = "0"


def cases() -> list[Case]:
    """All runs: a restart, those without faults, then seed by seed; the shortest ones first."""
    first = [Case("2", "no", "none"), Case("2", "no", "once")]
    first += [Case(*style, "none") for style in STYLES]
    seeds = map(str, range(SEEDS))
    drawn = itertools.product(seeds, "24", EVERY, ("no", "yes"))
    return [
        *dict.fromkeys(first),
        *(Case(n, memory, every, seed) for seed, n, every, memory in drawn),
    ]


def run(case: Case, workdir: pathlib.Path, restart_s: float, until: float) -> dict | None:
    """The measured values of a run; None if it has not ended at `until`, by `time.monotonic`."""
    shutil.rmtree(workdir, ignore_errors=True)
    command = [
        sys.executable, "launch/local.py", "--platform=cpu", f"--num_processes={case.processes}",
        f"--devices_per_process={DEVICES // int(case.processes)}", "--max_restarts=1000", "--",
        *WORDS, f"--workdir={workdir}",
    ]  # fmt: skip
    if case.memory == "yes":
        command.append(f"--config.checkpoint.memory_every={STEPS // 40} steps")
    if case.every == "once":
        command.append(f"--config.job.inject=kill:process=1:step={STEPS // 2}")
    elif case.every != "none":
        place, wait_s = int(case.seed) % int(case.processes), round(float(case.every) * restart_s)
        times = f"every={max(wait_s, 1)}s:seed={case.seed}"
        command.append(f"--config.job.inject=kill:process={place}:{times}")
    path = workdir.with_name(f"{workdir.name}.txt")
    with open(path, "w") as output:
        job = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = job.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
            return None
    if code:
        raise SystemExit(f"{' '.join(case)}: exit code {code}; see {path}")
    summary = json.loads((workdir / "summary.json").read_text())
    seconds = summary["seconds"]
    sums = read_meta(epath.Path(workdir) / "checkpoints" / str(STEPS))["checksums"]
    return {
        "steps": STEPS,
        "faults": len((workdir / "starts.jsonl").read_text().splitlines()) - 1,
        "goodput": summary["goodput"],
        "wall_s": sum(seconds.values()),
        "lost_s": seconds["lost"],
        "down_s": seconds["restart"],
        "starts_s": sum(seconds[kind] for kind in ("start", "choose", "compile")),
        "bits": hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16],
    }


def seconds_to_next_step(row: dict) -> float | None:
    """From the end of the processes to the next step, on average; None for a run without faults.

    The starts of a run, the first one too, are taken to be equally long.
    """
    if not row["faults"]:
        return None
    return row["down_s"] / row["faults"] + row["starts_s"] / (row["faults"] + 1)


def _kind(row: dict) -> tuple[str, str]:
    return row["processes"], row["memory"]


def measure(rows: list[dict], workdir: pathlib.Path, until: float) -> list[Case]:
    """Add rows to the table, each when its run has ended; return the cases that are left out."""
    left, restart_s = [], 0.0
    for case in cases():
        known = [row for row in rows if Case(*(row[name] for name in Case._fields)) == case]
        if not known and time.monotonic() < until:
            found = run(case, workdir / "_".join(case), restart_s, until)
            if found is not None:
                known = [case._asdict() | found | {"to_next_step_s": seconds_to_next_step(found)}]
                rows += known
                write_whole(epath.Path(TABLE), as_csv([rows[0], *(row.values() for row in rows)]))
                print(", ".join(f"{name} {value}" for name, value in known[0].items()), flush=True)
        if not known:
            left.append(case)
        elif case.every == "once":
            restart_s = float(known[0]["to_next_step_s"])
    return left


def draw(rows: list[dict]) -> None:
    """Draw a point for each run, and a line through the means over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    panels = {
        "goodput": (100, "goodput in %"),
        "to_next_step_s": (1, "seconds from fault to next step"),
    }
    places = ("none", *EVERY)
    for axis, (column, (factor, title)) in zip(axes, panels.items(), strict=True):
        for kind, (colour, line, mark) in STYLES.items():
            points: dict[int, list[float]] = {}
            for row in rows:
                if _kind(row) == kind and row["every"] in places and row[column] not in ("", None):
                    place = places.index(row["every"])
                    points.setdefault(place, []).append(factor * float(row[column]))
            for place, values in points.items():
                axis.plot([place] * len(values), values, mark, color=colour, alpha=0.4, ms=4)
            means = [statistics.mean(points[place]) for place in sorted(points)]
            label = f"{kind[0]} processes" + ", copies in host memory" * (kind[1] == "yes")
            axis.plot(sorted(points), means, line, color=colour, label=label)
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(places)), places)
        axis.set_xlim(-0.2, len(places) - 0.8)
        axis.set_xlabel("restart times between two faults", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    labelled = axes[0].get_legend_handles_labels()
    figure.legend(*labelled, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(TABLE.with_suffix(".png"), dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30)
    flags = parser.parse_args()
    until, workdir = time.monotonic() + 60 * flags.minutes, flags.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    rows = [*csv.DictReader(TABLE.read_text().splitlines())] if TABLE.exists() else []
    left = measure(rows, workdir, until)
    if rows:
        draw(rows)
    for case in left:
        print("left out:", ", ".join(f"{k} {v}" for k, v in case._asdict().items()))
    ends = {n: {row["bits"] for row in rows if row["processes"] == n} for n in "24"}
    print("bits of the ends:", ends)
    return int(any(len(bits) > 1 for bits in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
