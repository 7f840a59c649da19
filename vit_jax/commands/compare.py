"""Compare runs: the keys in which their configs differ, their last metrics, their curves.

  python -m vit_jax.main compare runs/a runs/b
  python -m vit_jax.main compare runs/sweep --output=curves.png --output=table.csv

The folder of a study stands for its runs. Runs may still be training. The picture has a panel for
each --metric, by default train/loss and the evaluators' top-1, with the curves of all runs.
--output and --metric may be repeated.
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
    pictures = [output for output in outputs if output.suffix == ".png"]
    if flags.metric and not pictures:
        raise InputError("--metric: chooses the curves of a picture; add --output=FILE.png")

    from vit_jax.insight import compare  # heavy imports only after the flags are checked

    runs = compare.read_runs(flags.runs)
    curves = compare.choose_curves(runs, flags.metric) if pictures else []
    for output in outputs:
        drawn = output.suffix == ".png"
        files.write_whole(output, compare.draw(runs, curves) if drawn else compare.as_csv(runs))
    names = [run.name for run in runs]
    tables = {"config": compare.differences(runs), "metrics": compare.last_values(runs)}
    if flags.format == "json":
        print(json.dumps({"runs": names, **tables}, indent=2, default=str))
        return exit_codes.DONE
    console = Console()
    if not tables["config"]:
        console.print("The configs are the same.")
    for title, rows in tables.items():
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
