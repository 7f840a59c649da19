"""A report on runs and studies: one HTML file that needs no network.

read_all ──> results, charts, tables ──> page/page.html

The page carries its own charts (Bokeh) and forbids the browser every request, so names and texts of
runs, which anyone may have written, are shown and never executed: the template escapes them, and
only the scripts with a digest in the page's Content-Security-Policy run.
"""

from __future__ import annotations

import base64
import csv
import datetime
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

import vit_jax
from vit_jax.base import files
from vit_jax.base.packages import need_package
from vit_jax.insight import charts, plots
from vit_jax.insight.levels import say_no_gains
from vit_jax.insight.pages import environment_of_pages
from vit_jax.insight.runs import (
    Run,
    choose_metrics,
    differences,
    evaluated,
    group_seeds,
    short_names,
    show_mean,
)
from vit_jax.run.watch.ledger import add_up

_CURVES = 12  # charts, unless metrics are chosen
_SPEEDS = ("time/images_per_s", "time/mfu")
_MEASURES = ("accuracy", "average_precision")  # of classes; the second with several labels each
_DRAWN = ("neighbours", "patch_features", "reconstructions")  # folders of evaluators in a workdir
_ROWS = 10  # of the tables of classes and confusions


def write(
    runs: Sequence[Run],
    studies: Sequence[Mapping[str, Any]],
    figures: Sequence[epath.Path] = (),
    metrics: Sequence[str] = (),
) -> str:
    """The report on runs and studies, as HTML.

    Args:
      runs, studies: as `read_all` gives them.
      figures: folders with more PNGs, or with results by class.
      metrics: what to draw; () chooses.

    Raises:
      InputError: if no run has one of `metrics`, or the packages for reports are not installed.
    """
    need_package("report", "bokeh", "report")
    from markupsafe import Markup

    known, groups = choose_metrics(runs), group_seeds(runs)
    chosen = choose_metrics(runs, metrics) if metrics else known[:_CURVES]
    curves = charts.chart_curves(runs, chosen)
    folders = dict(zip(dict.fromkeys(figures), short_names([*dict.fromkeys(figures)]), strict=True))
    present = [name for name in _SPEEDS if any(name in run.curves for run in runs)]
    speeds = charts.chart_curves(runs, present)
    times = {run.name: run.seconds for run in runs if any(run.seconds.values())}
    drawn = [*curves, *speeds]
    divs, script, library = charts.embed(drawn)
    environment, css = environment_of_pages()
    own_script = environment.loader.get_source(environment, "page.js")[0]
    scripts = [x.replace("</script", "<\\/script") for x in (library, script, own_script)]
    return environment.get_template("page.html").render(
        runs=runs,
        studies=studies,
        study_images=[read_images(study["workdir"], "*.png") for study in studies],
        alone=[run for run in runs if run.workdir.parent not in {s["workdir"] for s in studies}],
        styles=plots.styles(groups),
        groups=groups,
        evaluated=evaluated(runs),
        warnings=say_no_gains(runs),
        show_mean=show_mean,
        curves=curves,
        speeds=speeds,
        divs={chart.title: Markup(div) for chart, div in zip(drawn, divs, strict=True)},
        left_out=len({*known} - {*chosen}),
        times=times,
        kinds=[kind for kind in add_up(()) if any(seconds[kind] for seconds in times.values())],
        differences=differences(runs),
        figures=read_figures(runs, folders),
        classes=read_classes(runs, folders),
        smoothed=charts.SMOOTHED,
        css=css,
        scripts=[Markup(script) for script in scripts],
        digests=[_digest(script) for script in scripts],
        version=vit_jax.__version__,
        now=datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes"),
    )


def _digest(script: str) -> str:
    """The digest of a script, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


class Image(NamedTuple):
    """A PNG: its caption, and its content as base64."""

    caption: str
    content: str


class ClassResults(NamedTuple):
    """Results by class that `evaluate --output` wrote.

    weakest: classes by accuracy or average precision, the lowest first. confusions: pairs of
    classes, the most frequent first. Both are tables; their first row names the columns.
    """

    name: str
    images: Sequence[Image]
    weakest: Sequence[Sequence[str]]
    confusions: Sequence[Sequence[str]]


def find(folder: epath.Path, *patterns: str) -> list[epath.Path]:
    """The files below `folder` that match any of `patterns`, by name."""
    return sorted({path for p in patterns for path in files.LiteralPath(folder).glob(p)})


def read_images(folder: epath.Path, *patterns: str) -> list[Image]:
    """The PNGs below `folder`; captions are their names below it."""
    images = []
    for path in find(folder, *patterns):
        caption = os.path.relpath(path, folder).removesuffix(".png")
        images.append(Image(caption, _in_base64(path)))
    return images


def read_figures(
    runs: Sequence[Run], folders: Mapping[epath.Path, str]
) -> list[tuple[str, list[Image]]]:
    """(name, images) of each RUN/figures and of each of `folders`, one folder deep or less.

    Then (name, images) of what the evaluators of each run have drawn.
    """
    of_runs = {run.workdir / "figures": run.name for run in runs}
    found = []
    for place, name in {**of_runs, **folders, **of_runs}.items():
        images = [
            image
            for image in read_images(place, "*.png", "*/*.png")
            if not image.caption.endswith("confusion")
        ]
        if images:
            found.append((name, images))
    drawn = ((run.name, read_drawn(run.workdir)) for run in runs)
    return [*found, *(pair for pair in drawn if pair[1])]


def read_drawn(workdir: epath.Path) -> list[Image]:
    """The last image that each evaluator has drawn in training, as FOLDER/NAME_STEP.png."""
    last = {
        (path.parent.name, path.stem[:-9]): path
        for path in find(workdir, *(f"{folder}/*_????????.png" for folder in _DRAWN))
        if path.stem[-8:].isdecimal()
    }
    return [
        Image(f"{folder} {name}, step {int(path.stem[-8:]):,}", _in_base64(path))
        for (folder, name), path in last.items()
    ]


def _in_base64(path: epath.Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def read_classes(runs: Sequence[Run], folders: Mapping[epath.Path, str]) -> list[ClassResults]:
    """The results of `evaluate --output` in the workdirs, one or two folders deep, or `folders`."""
    found = []
    for place, name in {**{run.workdir: run.name for run in runs}, **folders}.items():
        for path in find(place, "classes.csv", "*/classes.csv", "*/*/classes.csv"):
            head, *rows = _read_csv(path)
            for at in [head.index(measure) for measure in _MEASURES if measure in head]:
                rows = sorted((row for row in rows if row[at]), key=lambda row: float(row[at]))
            found.append(ClassResults(
                f"{name}: {os.path.relpath(path.parent, place)}",
                read_images(path.parent, "confusion.png"),
                [head, *rows[:_ROWS]],
                _read_csv(path.parent / "confusions.csv")[: _ROWS + 1],
            ))  # fmt: skip
    return found


def _read_csv(path: epath.Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(), newline=""))) if path.exists() else []
