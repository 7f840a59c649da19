"""Compare runs: the keys in which their configs differ, their last metrics, their curves.

  python -m vit_jax.main compare runs/a runs/b
  python -m vit_jax.main compare runs/sweep --output=curves.png --output=table.csv

The folder of a study stands for its runs. Runs may still be training. FILE.png has a panel for each
--metric, by default the first four of train/loss, the evaluators' top-1 and their other metrics,
with the curves of all runs. --output and --metric may be repeated.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax import files
from vit_jax.errors import InputError, nearest
from vit_jax.job import exit_codes

FORMATS = ("table", "json")
ENDINGS = (".png", ".csv")
_CURVES = 4  # panels, unless metrics are chosen


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="workdirs of runs and studies")
    repeated = {"action": "append", "default": []}
    parser.add_argument(
        "--output", metavar="FILE", help="FILE.png for curves, FILE.csv for the table", **repeated
    )
    parser.add_argument("--metric", metavar="NAME", help="metric to draw", **repeated)
    parser.add_argument("--format", default="table", help="standard output: table or json")


def main(flags: argparse.Namespace) -> int:
    if flags.format not in FORMATS:
        raise InputError(f"--format={flags.format}: {nearest(flags.format, FORMATS)}")
    outputs = [files.absolute(output) for output in flags.output]
    for output in outputs:
        if output.suffix not in ENDINGS:
            raise InputError(f"--output={output}: the name must end in {' or '.join(ENDINGS)}")
        files.check_output(output, "--output")
    draws = any(output.suffix == ".png" for output in outputs)
    if flags.metric and not draws:
        raise InputError("--metric: chooses the curves to draw; add --output=FILE.png")

    from vit_jax.insight import (
        plots,
        runs,
        tables,
    )  # heavy imports only after the flags are checked

    found, _ = runs.read_all(flags.runs)
    names = [run.name for run in found]
    shown = {"config": runs.differences(found), "metrics": runs.last_values(found)}
    contents = {}
    if draws:
        chosen = runs.choose_metrics(found, flags.metric)
        if not chosen:
            raise InputError("no run has a metric yet; wait for the first line of one")
        chosen = chosen if flags.metric else chosen[:_CURVES]
        contents[".png"] = plots.as_png(plots.draw_runs(found, chosen))
    contents[".csv"] = tables.as_csv([
        ("kind", "name", *names),
        *((kind, name, *row) for kind, rows in shown.items() for name, row in rows.items()),
    ])  # fmt: skip
    for output in outputs:
        files.write_whole(output, contents[output.suffix])
    if flags.format == "json":
        print(json.dumps({"runs": names, **shown}, indent=2, default=str))
        return exit_codes.DONE
    console = Console()
    if not shown["config"]:
        console.print("The configs are the same.")
    for title, rows in shown.items():
        if rows:
            console.print(as_table(title, names, rows))
    return exit_codes.DONE


def as_table(title: str, names: Sequence[str], rows: dict[str, list[Any]]) -> Table:
    """A row for each key or metric, and a column for each run."""
    heads = (Column(Text(name), overflow="fold") for name in (title, *names))
    table = Table(*heads)
    for name, values in rows.items():
        table.add_row(Text(name), *(Text(_readable(name, value)) for value in values))
    return table


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "None" if "/" not in name else ""
    if isinstance(value, float) and "/" in name:
        return f"{value:.2%}" if "top" in name.rpartition("/")[2] else f"{value:.4g}"
    return f"{value:,}" if name == "step" else str(value)
