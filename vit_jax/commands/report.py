"""Report on runs and studies: tables, curves, or one HTML page that needs no network.

  python -m vit_jax.main report runs/a runs/b
  python -m vit_jax.main report runs/sweep --output=curves.png --output=table.csv
  python -m vit_jax.main report runs/a runs/study --figures=FIGURES --output=report.html

Runs may still be training; the folder of a study stands for its runs. It prints the config keys in
which the runs differ and their last metrics; FILE.csv holds the same. FILE.png has a panel for each
--metric, by default the first four of train/loss, the evaluators' top-1 and their other metrics.

FILE.html shows results with deviations over seeds, curves that zoom, times, the configs and their
differences, results by class (of `evaluate --output=RUN/classes`), images in RUN/figures and in
each --figures, and where the runs come from. It needs: pip install -e '.[report]'

--output, --metric and --figures may be repeated.
"""

import argparse
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.commands.flags import define_format_flag
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.insight.runs import Run

logger = logging.getLogger("vit_jax")

ENDINGS = (".html", ".png", ".csv")
_CURVES = 4  # panels, unless metrics are chosen


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="workdirs of runs and studies")
    repeated = {"action": "append", "default": []}
    paths = repeated | {"type": files.absolute}
    parser.add_argument(
        "--output", metavar="FILE", help="FILE.html, FILE.png for curves, FILE.csv", **paths
    )
    parser.add_argument("--figures", metavar="DIR", help="folder with PNGs to show", **paths)
    parser.add_argument("--metric", metavar="NAME", help="metric to draw", **repeated)
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    faults = Faults()
    for output in flags.output:
        ends = ", ".join(ENDINGS)
        faults.need(output.suffix in ENDINGS, f"--output={output}: needs a name ending in {ends}")
        faults.check(files.check_output, output, "--output")
    for folder in flags.figures:
        faults.need(folder.is_dir(), f"--figures={folder}: no such folder; give one with PNGs")
    collect_faults(faults)

    # Heavy imports only after the flags are checked.
    from vit_jax.insight import plots, report, runs, tables
    from vit_jax.run import terminal

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    found, studies = runs.read_all(flags.runs)
    said = _compared(found)
    names, config, last = said.values()
    curves = runs.choose_metrics(found, flags.metric)
    curves = curves if flags.metric else curves[:_CURVES]
    if not curves and any(output.suffix == ".png" for output in flags.output):
        raise InputError("no run has a metric yet; wait for the first line of one")
    rows = [
        (kind, name, *values)
        for kind, table in (("config", config), ("metrics", last))
        for name, values in table.items()
    ]
    make = {
        ".html": lambda: report.write(found, studies, flags.figures, flags.metric),
        ".png": lambda: plots.as_png(plots.draw_runs(found, curves)),
        ".csv": lambda: tables.as_csv([("kind", "name", *names), *rows]),
    }
    for output in flags.output:
        files.write_whole(output, make[output.suffix]())
        logger.info("written: %s", output)
    if flags.format == "json":
        print(json.dumps(said, indent=2, default=str))
        return exit_codes.DONE
    shown = {
        name: ["" if x is None else runs.show_mean(name, [x]) for x in values]
        for name, values in last.items()
    }
    console = Console()
    console.print(as_table("config", names, config) if config else "The configs are the same.")
    console.print(as_table("metrics", names, shown))
    return exit_codes.DONE


def compare(workdirs: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Compare runs by their configs and their last metrics.

        found = vit_jax.compare(["runs/a", "runs/b"])
        pandas.DataFrame(found["metrics"], index=found["runs"])

    Args:
      workdirs: of runs, which may still be training, and of studies, which stand for their runs.

    Returns:
      {"runs": their names, "config": {key in which they differ: its values}, "metrics": {name: its
      last values}}, with a value for each run, None where it has none; as `report --format=json`.

    Raises:
      InputError: a ValueError that names each workdir that holds neither.
    """
    from vit_jax.insight import runs

    return _compared(runs.read_all(workdirs)[0])


def _compared(found: "Sequence[Run]") -> dict[str, Any]:
    from vit_jax.insight import runs

    names, config = [run.name for run in found], runs.differences(found)
    return {"runs": names, "config": config, "metrics": runs.last_values(found)}


def as_table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[object]]) -> Table:
    """A row for each key or metric, and a column for each run."""
    table = Table(*(Column(Text(name), overflow="fold") for name in (title, *names)))
    for name, values in rows.items():
        table.add_row(Text(name), *(Text(str(value)) for value in values))
    return table
