"""A report on runs and studies: one HTML file that needs no network.

read_all ──> results, charts, tables ──> page/page.html

The page carries its own charts (Bokeh) and forbids the browser every request, so names and texts of
runs, which anyone may have written, are shown and never executed: the template escapes them, and
only the scripts with a digest in the page's Content-Security-Policy run.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

import vit_jax
from vit_jax.errors import InputError
from vit_jax.insight import charts, compare
from vit_jax.insight import report_data as data
from vit_jax.run.terminal import is_accuracy

if TYPE_CHECKING:
    import markupsafe

_CURVES = 12  # charts, unless metrics are chosen
_BARS = 24  # runs whose times are drawn
_CONSTANT = "/num_examples"
_SPEEDS = ("time/images_per_s", "time/mfu")


def check_installed() -> None:
    """Raise InputError if the packages for reports are not installed."""
    missing = [name for name in ("bokeh", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"report: not installed: {', '.join(missing)}; run pip install -e '.[report]'"
        )


def write(
    workdirs: Sequence[str], figures: Sequence[epath.Path] = (), metrics: Sequence[str] = ()
) -> str:
    """The report on the runs and studies in `workdirs`, as HTML.

    Args:
      workdirs: of runs, finished or not, and of studies.
      figures: folders with more PNGs, or with results by class.
      metrics: what to draw; () chooses.

    Raises:
      InputError: if a workdir holds neither run nor study, or no run has one of `metrics`.
    """
    runs, studies = data.read_all(workdirs)
    alone = [run for run in runs if run.workdir.parent not in {s.workdir for s in studies}]
    records = [run.record for run in runs]
    chosen = choose_metrics(records, metrics)
    curves = charts.draw_curves(records, chosen)
    speeds = [name for name in _SPEEDS if any(name in record.curves for record in records)]
    speed_curves = charts.draw_curves(records, speeds)
    times = {run.name: data.seconds_by_kind(run.record) for run in runs}
    times = {name: seconds for name, seconds in times.items() if seconds}
    bars = [charts.draw_times(list(times), list(times.values()))] if times else []
    bars = bars if len(times) <= _BARS else []
    drawn = [*curves, *speed_curves, *bars]
    divs, script, library = charts.embed(drawn)
    shown = {chart.title: div for chart, div in zip(drawn, divs, strict=True)}
    return render(
        runs=runs,
        studies=studies,
        alone=alone,
        styles=[charts.style(i) for i in range(len(runs))],
        groups=data.group_seeds(runs),
        evaluated=data.evaluated(runs),
        curves=curves,
        speeds=speed_curves,
        bars=bars,
        divs=shown,
        left_out=count_left_out(records, chosen),
        times=times,
        kinds=list(dict.fromkeys(kind for seconds in times.values() for kind in seconds)),
        differences=compare.differences(records),
        figures=data.read_figures(runs, figures),
        classes=data.read_classes(runs, figures),
        smoothed=charts.SMOOTHED,
        scripts=[library, script],
        version=vit_jax.__version__,
        now=datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes"),
    )


def choose_metrics(runs: Sequence[compare.RunRecord], asked: Sequence[str]) -> list[str]:
    """The metrics to draw: those `asked` for, else at most 12, those of `compare` first.

    Metrics of the clock and those that never change are left out.

    Raises:
      InputError: if no run has a metric that is asked for.
    """
    if not any(run.curves for run in runs) and not asked:
        return []
    first = compare.choose_curves(runs, asked)
    if asked:
        return first
    return [*first, *(name for name in _changing(runs) if name not in first)][:_CURVES]


def count_left_out(runs: Sequence[compare.RunRecord], chosen: Sequence[str]) -> int:
    """The number of changing metrics that are not among the chosen."""
    return len({*_changing(runs)} - {*chosen})


def _changing(runs: Sequence[compare.RunRecord]) -> list[str]:
    """Metrics, without the clock's, that take more than one value; evaluators' first."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for metric, points in run.curves.items():
            values.setdefault(metric, set()).update(value for _, value in points)
    names = [
        metric
        for metric, found in values.items()
        if len(found) > 1 and not metric.startswith("time/") and not metric.endswith(_CONSTANT)
    ]
    return sorted(names, key=lambda name: (name.startswith("train/"), name))


def render(*, scripts: Sequence[str], **fields: Any) -> str:
    """Fill the template; `scripts` are the JavaScript of Bokeh and of the charts."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("vit_jax.insight", "page")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"metric": show_metric, "value": show_value, "broken": break_name}
    source = {name: loader.get_source(environment, name)[0] for name in ("page.css", "page.js")}
    scripts = [script.replace("</script", "<\\/script") for script in (*scripts, source["page.js"])]
    fields["divs"] = {title: Markup(div) for title, div in fields["divs"].items()}
    return environment.get_template("page.html").render(
        css=Markup(source["page.css"]),
        scripts=[Markup(script) for script in scripts],
        digests=[_digest(script) for script in scripts],
        **fields,
    )


def break_name(name: str) -> markupsafe.Markup:
    """`name`, escaped, where a line may break after each `_`, `.` and `/`."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"([_./])", r"\1<wbr>", str(markupsafe.escape(name))))


def _digest(script: str) -> str:
    """The digest of a script, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def show_metric(found: dict[str, float | None], name: str) -> str:
    """A mean with its deviation over seeds, if there are several: accuracies in percent."""
    mean, std = found["mean"], found["std"]
    if mean is None:
        return ""
    if is_accuracy(name):
        return f"{100 * mean:.2f}" + (f" ± {100 * std:.2f}" if std is not None else "") + " %"
    if float(mean).is_integer() and not std:
        return f"{mean:,.0f}"
    return f"{mean:.4g}" + (f" ± {std:.2g}" if std is not None else "")


def show_value(value: Any) -> str:
    """A value of a config, summary or start as text."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
