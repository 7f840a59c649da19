"""Compare runs and studies: tables, curves, or one HTML page that needs no network.

  python -m vit_jax.main report runs/
  python -m vit_jax.main report runs/a runs/b --output=curves.png --output=table.csv
  python -m vit_jax.main report runs/a runs/study --figures=FIGURES --output=report.html

Runs may still be training; a folder stands for the runs and studies in it, up to two folders deep.
It prints the last metrics of the runs, the best run first, and the config keys in which they
differ; FILE.csv holds the same of every metric. FILE.png, FILE.pdf and FILE.svg have a panel for
each --metric, by default the first four of train/loss, the evaluators' top-1 and their other
metrics. FILE.tex is a LaTeX table of the evaluators' last values, or of each --metric; runs that
differ in the seed only share a row: mean, sample standard deviation, and n, the number of values.

FILE.html shows results with deviations over seeds, curves that zoom, times, the configs and their
differences, results by class (of `evaluate --output=RUN/classes`), images in RUN/figures and in
each --figures, and where the runs come from. It needs: pip install -e '.[report]'

--output, --metric and --figures may be repeated.
"""

import argparse
import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults, shown_lines
from vit_jax.commands.flags import define_format_flag
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.insight.runs import Run

logger = logging.getLogger("vit_jax")

_IMAGES = (".png", ".pdf", ".svg")
ENDINGS = (".html", *_IMAGES, ".csv", ".tex")
_CURVES = 4  # panels, unless metrics are chosen
# Keys that say what a run is; where all runs have one value, a line above the results has it.
_COMMON = ("model.name", "data.name", "objective.name", "duration", "global_batch_size")
_KEYS = 20  # rows of the table of differences
_NAME, _EDGE = 24, 3  # characters of a run's name before it is folded, and of a column's edges


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="workdirs of runs and studies, or folders of them"
    )
    parser.add_argument(
        "--output", metavar="FILE", action="append", default=[], type=files.absolute,
        help="FILE.html; curves as FILE.png, .pdf or .svg; tables as FILE.csv or .tex",
    )  # fmt: skip
    parser.add_argument(
        "--figures", metavar="DIR", action="append", default=[], type=files.absolute,
        help="folder with PNGs to show",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME", action="append", default=[], help="metric to draw"
    )
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
    if not found and not studies:
        raise InputError("no run is left to report")
    found = runs.best_first(found)
    said = runs.compare(found)
    names, config, last = said.values()
    curves = runs.choose_metrics(found, flags.metric)
    curves = curves if flags.metric else curves[:_CURVES]
    if not curves and any(output.suffix in _IMAGES for output in flags.output):
        raise InputError("no run has a metric yet; wait for the first line of one")
    rows = [
        (kind, name, *values)
        for kind, table in (("config", config), ("metrics", last))
        for name, values in table.items()
    ]

    def draw(form: str) -> bytes:
        return plots.as_file(plots.draw_runs(found, curves), form[1:])

    make: dict[str, Callable[[], str | bytes]] = {
        ".html": lambda: report.write(found, studies, flags.figures, flags.metric),
        ".csv": lambda: tables.as_csv([("kind", "name", *names), *rows]),
        ".tex": lambda: runs.as_latex(found, flags.metric).encode(),
    }
    make |= {form: functools.partial(draw, form) for form in _IMAGES}
    contents = [make[output.suffix]() for output in flags.output]  # all, or none is written
    for output, content in zip(flags.output, contents, strict=True):
        files.write_whole(output, content)
        logger.info("written: %s", output)
    if flags.format == "json":
        print(json.dumps(said, indent=2, default=str))
        return exit_codes.DONE
    if found:  # else a study waits
        _print_comparison(found, **said)
    return exit_codes.DONE


def _print_comparison(
    found: Sequence["Run"],
    runs: Sequence[str],
    config: Mapping[str, Sequence[object]],
    metrics: Mapping[str, Sequence[float | None]],
) -> None:
    """Print the tables of `found`; the other arguments are the values of `insight.runs.compare`."""
    from vit_jax.insight.levels import ENTROPY, levels, say_no_gains
    from vit_jax.insight.runs import by_use, show_mean

    cells = {"step": [run.short_state for run in found]} | {
        name: ["" if x is None else show_mean(name, [x]) for x in metrics[name]]
        for name in (*by_use(found), "train/loss")
        if name in metrics
    }
    common = [f"{key} {value}" for key in _COMMON if key not in config
              and (value := found[0].config.get(key)) is not None]  # fmt: skip
    print_runs(Console(), runs, cells, common)
    beside = Table("run", "metric", "last", "beside")
    for run in found:
        drawn = [name for name in by_use([run]) if levels([run], name)]
        for name in (*drawn[:1], *([ENTROPY] if ENTROPY in run.curves else [])):
            known = levels([run], name).items()
            texts = ", ".join(f"{text} {show_mean(name, [value])}" for text, value in known)
            last = show_mean(name, [run.curves[name][-1][1]])
            beside.add_row(Text(run.name), name, last, texts)
    if beside.rows:
        Console().print(beside)
    for text in say_no_gains(found):
        Console().print(Text(f"WARNING: {text}"), soft_wrap=True)
    if config:
        by_user = {key for run in found for key, by in run.decided_by.items() if by == "user"}
        print_differences(Console(), config, by_user)
    elif len(runs) > 1:
        print("The configs are the same.")


def print_runs(
    console: Console,
    names: Sequence[str],
    cells: Mapping[str, Sequence[str]],
    common: Sequence[str],
) -> None:
    """Print a row for each run, with as many of the columns `cells` as the console has room for.

    What several runs have in common, `common` and columns of one text, is a line above.
    """
    if len(names) > 1:
        same = {name: texts[0] for name, texts in cells.items() if len({*texts}) == 1}
        cells = {name: texts for name, texts in cells.items() if name not in same}
        said = ", ".join([*common, *(f"{name} {text}" for name, text in same.items())])
        console.print(Text(f"In common: {said}"), soft_wrap=True)
    width, shown = min(_NAME, max(map(len, names))), list[str]()
    table = Table(Column("", justify="right"), Column("run", overflow="fold", min_width=width))
    left = console.width - 1 - len(str(len(names))) - width - 2 * _EDGE
    for name, texts in cells.items():
        head = name.replace("/", "/\n")  # a narrow column
        left -= max(map(len, [*head.split("\n"), *texts])) + _EDGE
        if left >= 0:
            table.add_column(Text(head), justify="right", no_wrap=True)
            shown.append(name)
    for i, name in enumerate(names):
        table.add_row(str(i + 1), Text(name), *(Text(cells[column][i]) for column in shown))
    console.print(table)
    if others := [name for name in cells if name not in shown]:
        console.print(f"Not shown: {', '.join(others)}; see --format=json", soft_wrap=True)


def print_differences(
    console: Console, config: Mapping[str, Sequence[object]], by_user: Collection[str]
) -> None:
    """Print a row for each key: its values, each with the numbers of the runs that have it.

    Of many keys, those `by_user`, which a user has set, come first, and the last ones are left out.
    """
    keys = [*config]
    if len(keys) > _KEYS:
        keys.sort(key=lambda key: key not in by_user)
    table = Table("config", Column("value: runs", overflow="fold"))
    for key in keys[:_KEYS]:
        runs_of: dict[str, list[int]] = {}
        for i, value in enumerate(config[key], 1):
            runs_of.setdefault(str(value), []).append(i)
        lines = (f"{value}: {_as_ranges(numbers)}" for value, numbers in runs_of.items())
        table.add_row(Text(key), Text(shown_lines("\n".join(lines))))
    console.print(table)
    if len(keys) > _KEYS:
        console.print(f"Not shown: {len(keys) - _KEYS} more keys; see --format=json")


def _as_ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as text: [1, 2, 3, 5] is "1-3, 5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in found)
