"""Reports on runs and studies, from workdirs written by hand; and in a browser, if there is one."""

import base64
import hashlib
import html.parser
import json
import os
import pathlib
import re
import shutil
import statistics
import sys

import numpy as np
import pytest
from etils import epath
from test_runs import write_run

from vit_jax.base.errors import InputError
from vit_jax.insight import charts, levels, plots, report, runs
from vit_jax.main import main

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

HOSTILE = "<img src=x onerror=alert(1)>$$\\alpha$$"
TOP1 = 0.5, 0.75, 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study of three runs with a figure and results by class; two differ only in the seed."""
    folder = tmp_path_factory.mktemp("report")
    png = plots.as_file(plots.draw_confusion(np.eye(2, dtype=int), ["cat", "dog"]))
    study = folder / "study"
    for i, (name, top1) in enumerate(zip(("a_seed_0", "a_seed_1", HOSTILE), TOP1, strict=True)):
        rows = [{"step": s, "train/loss": 2.0 / s, "time/seconds": 3.0 * s, "time/save_s": 0.5,
                 "time/images_per_s": 90.0 + s} for s in range(1, 40)]  # fmt: skip
        run = write_run(study / name, [*rows, {"step": 20, "test/top1": top1 / 2},
                                       {"step": 39, "test/top1": top1}])  # fmt: skip
        config = json.loads((run / "config.json").read_text())
        config["resolved"]["seed"] = i
        config["resolved"]["optimizer"]["peak_lr"] = 0.5 if i == 2 else 0.25
        (run / "config.json").write_text(json.dumps(config))
    start = {"time": "2026-11-22", "command": "vit_jax --config=<b>", "resumed_at": None,
             "commit": "0d37fb3", "clean": True, "software": {"jax": "0.10.2"},
             "hardware": {"host": "here", "devices": 1, "device_kind": "cpu"}}  # fmt: skip
    (study / "a_seed_0/starts.jsonl").write_text(json.dumps(start) + '\n{"cut')
    members = {"b": {"state": "failed", "error": "one\nout of memory\n", "summary": {}}}
    content = {
        "title": "cells: grid", "axes": "row: a, b", "winner": {"workdirs": ["w/a_seed_1"]},
        "complete": False, "warnings": [], "members": members,
        "columns": ["row", "test/top1, %"], "rows": [["<script>a</script>", "62.50 ± 17.68"]],
    }  # fmt: skip
    (study / "study.json").write_text(json.dumps(content))
    (study / "study.png").write_bytes(png)
    (study / "a_seed_1/figures").mkdir()
    (study / "a_seed_1/figures/filters.png").write_bytes(png)
    classes = folder / "classes/test"
    classes.mkdir(parents=True)
    (classes / "classes.csv").write_text("class,images,accuracy\ncat,2,0.5\ndog,2,0.25\nowl,0,\n")
    (classes / "confusions.csv").write_text("class,predicted,images\ncat,dog,1\n")
    (classes / "confusion.png").write_bytes(png)
    (folder / "classes/labels").mkdir()  # several labels an image
    (folder / "classes/labels/classes.csv").write_text(
        "class,average_precision\nsea,0.5\nsky,0.25\n"
    )
    return folder


@pytest.fixture(scope="module")
def page(folder):
    output = folder / "report.html"
    assert main(["report", str(folder / "study"), f"--figures={folder / 'classes'}",
                 f"--output={output}"]) == 0  # fmt: skip
    return output


class Reader(html.parser.HTMLParser):
    """Collects the tags with their attributes, the text, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self._script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "wbr":  # within a name
            self.text.append(" ")
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text.append(data)


def test_page_is_whole_and_names_are_only_text(page):
    read = Reader(page.read_text())
    assert {attrs["id"] for tag, attrs in read.tags if tag == "section"} == {
        "study", "results", "curves", "time", "config", "classes", "figures", "provenance"
    }  # fmt: skip
    addresses = [attrs[key] for _, attrs in read.tags for key in ("src", "href") if key in attrs]
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    assert sum(address.startswith("data:") for address in addresses) == 3
    assert not any("onerror" in attrs for _, attrs in read.tags)
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    for script in read.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    text = " ".join("".join(read.text).split())
    shown = (
        f"{100 * statistics.mean([0.5, 0.75]):.2f} ± {100 * statistics.stdev([0.5, 0.75]):.2f} %"
    )
    for words in (
        shown, HOSTILE, "<script>a</script>", "b: failed: out of memory", "optimizer.peak_lr",
        "cells: grid (row: a, b).", "Best: w/a_seed_1", "117.0 (86 %)",
        "vit_jax --config=<b>", "Figures of the model", "dog",
    ):  # fmt: skip
        assert words in text, words
    assert text.index("dog 2 0.25") < text.index("cat 2 0.5")  # the weakest first
    assert text.index("sky 0.25") < text.index("sea 0.5")


def test_heading_names_the_study_and_the_runs_beside_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report.charts, "embed", lambda drawn: ([""] * len(drawn), "", ""))
    single = write_run(tmp_path / "single", [])  # has not logged anything yet
    for workdirs, heading in (
        ([folder / "study"], "study 3 runs of 1 study."),
        ([folder / "study", single], "study, single 4 runs, 3 of them in 1 study."),
        ([single], "single 1 run."),
    ):
        text = " ".join("".join(Reader(report.write(*runs.read_all(workdirs))).text).split())
        assert f" {heading} Written " in text


def test_figures_of_folders_of_one_name_are_all_shown_once(tmp_path):
    run = runs.read_all([write_run(tmp_path / "a", [{"step": 1, "train/loss": 1.0}])])[0][0]
    names = {epath.Path(tmp_path / x): x for x in ("a/figures", "b/figures", "b/a")}
    for folder in names:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "filters.png").write_bytes(b"")
    assert [name for name, _ in report.read_figures([run], names)] == ["a", "b/figures", "b/a"]


def test_accuracies_are_in_percent_and_names_may_hold_line_breaks(tmp_path):
    for name in ("test/top1", "few/10shot_top1", "knn/10nn_top1_raw"):
        assert runs.show_mean(name, [0.5, 0.75]) == "62.50 ± 17.68 %"
    assert runs.show_mean("test/loss", [0.5]) == "0.5"
    (tmp_path / "classes.csv").write_text('class,images,accuracy\n"a\nb",2,0.5\nc\x85d,2,0.25\n')
    (found,) = report.read_classes([], {epath.Path(tmp_path): "x"})
    assert [row[0] for row in found.weakest] == ["class", "c\x85d", "a\nb"]


def test_smoothing_is_a_centred_mean():
    values = np.array([1.0, 5.0, 3.0, 7.0, 9.0, 2.0])
    smoothed = charts.smooth(values, 5)
    np.testing.assert_allclose(smoothed, [1, 3, 5, 26 / 5, 6, 2])
    np.testing.assert_allclose(charts.smooth(np.arange(50.0), 21), np.arange(50.0))


def test_times_by_kind(tmp_path):
    times = [(1, 4.0), (2, 9.0), (3, 11.0)]  # of training, also before a restart
    rows = [{"step": s, "time/seconds": t, "time/wall_s": t + 3.0} for s, t in times]
    rows[1]["time/save_s"] = rows[2]["time/save_s"] = 0.75
    rows += [{"step": 3, "time/save_s": 0.25, "time/wall_s": 15.0, "time/input_wait_s": 1.0}]
    record = runs.read_all([write_run(tmp_path / "run", rows)])[0][0]
    found = {kind: seconds for kind, seconds in record.seconds.items() if seconds}
    assert found == {"step": 10.0, "input_wait": 1.0, "save": 1.75, "other": 2.25}


def test_a_diverged_run_is_in_no_mean(tmp_path):
    for i, top1 in enumerate((0.5, 0.7, 0.1)):
        run = write_run(
            tmp_path / f"seed_{i}",
            [{"step": 9 - i // 2, "test/top1": top1, "test/num_examples": 360}],
        )
        config = json.loads((run / "config.json").read_text())
        config["resolved"]["seed"] = i
        (run / "config.json").write_text(json.dumps(config))
    (run / "diverged.json").write_text('{"error": "step 9: loss is nan"}')
    read = runs.read_all([tmp_path / f"seed_{i}" for i in range(3)])[0]
    (group,) = runs.group_seeds(read)
    assert group.values["test/top1"] == [0.5, 0.7]
    assert runs.show_mean("test/top1", group.values["test/top1"]) == "60.00 ± 14.14 %"
    assert (group.steps, group.num_measured, len(group.runs)) == ([9], 2, 3)
    mean = [[9, 0.6, np.std([0.5, 0.7], ddof=1)]]
    np.testing.assert_allclose(runs.mean_curve(group, "test/top1"), mean)
    (axes,) = (figure := plots.draw_runs(read, ["test/top1"])).axes
    assert len(axes.lines) == len(axes.collections) == 1 and axes.get_ylabel() == "test top1"
    assert "mean ± deviation, 2 of 3 seeds" in figure.legends[0].get_texts()[0].get_text()
    (chart,) = charts.chart_curves(read, ["test/top1"])
    band = chart.figure.renderers[-1].data_source.data
    np.testing.assert_allclose(band["high"] - band["low"], 2 * mean[0][2])
    assert len({color for color, _ in plots.styles([group]).values()}) == 1
    (group,) = runs.group_seeds(read[2:])
    assert (group.steps, group.values) == ([], {})
    again = runs.group_seeds([*read, read[0]])  # the same seed is no new one
    assert [len(group.runs) for group in again] == [3, 1]


def test_features_are_shown_beside_step_0_the_pixels_and_the_last_pictures(tmp_path):
    rows = [{"step": 0, "near/20nn_top1": 0.25, "near/pixels_20nn_top1": 0.28},
            {"step": 9, "near/20nn_top1": 0.3}]  # fmt: skip
    workdir = write_run(tmp_path / "run", rows)
    (workdir / "neighbours").mkdir()
    for name in ("near_00000003.png", "near_00000012.png", "near_of_eight.png"):
        (workdir / "neighbours" / name).write_bytes(name.encode())
    (run,) = read = runs.read_all([workdir])[0]
    assert not levels.say_no_gains(read)  # it goes on
    assert runs.choose_metrics(read) == ["near/20nn_top1"]
    (chart,) = charts.chart_curves(read, ["near/20nn_top1"])
    drawn = {r.name: {*r.data_source.data["value"]} for r in chart.figure.renderers}
    assert drawn["run, pixels"] == {0.28} and drawn["run, step 0"] == {0.25}
    (axes,) = plots.draw_runs(read, ["near/20nn_top1"]).axes
    assert [text.get_text() for text in axes.texts] == ["pixels", "step 0"]
    assert [line.get_ydata()[0] for line in axes.lines] == [0.25, 0.28, 0.25]
    last = base64.b64encode(b"near_00000012.png").decode()
    (pictures,) = report.read_figures([run], {})
    assert pictures == ("run", [report.Image("neighbours near, step 12", last)])


def test_features_that_gained_nothing_and_the_entropy_stand_beside_their_limits(tmp_path, capsys):
    rows = [{"step": 0, "near/20nn_top1": 0.25, "near/pixels_20nn_top1": 0.28},
            {"step": 9, "near/20nn_top1": 0.28, "train/teacher_entropy": 2.5}]  # fmt: skip
    workdir = write_run(tmp_path / "run", rows)
    (workdir / "summary.json").write_text('{"step": 9, "near/20nn_top1": 0.28}')
    config = workdir / "config.json"
    stored = json.loads(config.read_text())
    stored["resolved"]["objective"] |= {"name": "self_distillation", "num_prototypes": 32}
    config.write_text(json.dumps(stored))
    said = "evals.near: 20nn_top1 ends at 28.00 %; the weights at step 0 had 25.00 %, the pixels"
    assert main(["report", str(workdir), f"--output={tmp_path / 'page.html'}"]) == 0
    printed = capsys.readouterr().out
    assert f"WARNING: run: {said} have 28.00 %" in printed
    assert re.search(r"28\.00 % │ pixels 28\.00 %, step 0 25\.00 %", printed)
    assert re.search(r"train/teacher_entropy │ 2\.5 +│ log K 3\.466", printed)
    assert f'<p class="warning">run: {said}' in (tmp_path / "page.html").read_text()
    read = runs.read_all([workdir])[0]
    assert levels.levels(read, levels.ENTROPY) == {"log K": pytest.approx(np.log(32))}
    (of_plugin,) = (run._replace(config={}) for run in read)  # whose objective has no such key
    assert levels.levels([of_plugin], levels.ENTROPY) == {}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(InputError, match=r"bokeh.*; run pip install.*report"):
        report.write([], [])


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra test")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine; e.g. apt-get install chromium")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has no sandbox
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        yield browser
        browser.close()


RANGE = "Bokeh.documents[0].roots()[0].{}_range.{}"


@pytest.mark.slow  # 10 CPU seconds
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(browser, page, width):
    """It loads, zooms, changes axes and smooths; sends no request; is accessible."""
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 844}, has_touch=width < 800)
    tab = context.new_page()
    said, requests = [], []
    tab.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: said.append(dialog.message))
    tab.route("**/*", lambda route: (requests.append(route.request.url), route.continue_()))
    tab.goto(pathlib.Path(page).as_uri())
    tab.wait_for_function("Bokeh.documents.length && document.querySelector('.bk-Figure')")
    canvas = tab.locator(".bk-Figure").first
    canvas.scroll_into_view_if_needed()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    whole = tab.evaluate(RANGE.format("x", "end"))

    if width > 800:  # a box drawn with the mouse
        box = canvas.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        tab.mouse.move(x - 60, y - 40)
        tab.mouse.down()
        tab.mouse.move(x + 60, y + 40, steps=4)
        tab.mouse.up()
        tab.wait_for_function(f"{RANGE.format('x', 'end')} < {whole}")
        ends = tab.evaluate("Bokeh.documents[0].roots().slice(0, 2).map(f => f.x_range.end)")
        assert ends[0] == ends[1]
    tab.select_option("#y_axis", "log")
    tab.wait_for_function(f"{RANGE.format('y', 'start')} > 0")
    tab.select_option("#y_axis", "linear")
    assert tab.evaluate("Bokeh.documents[0].roots()[0].y_scale.type") == "LinearScale"
    tab.select_option("#smoothing", "mean_5")
    assert "mean of 5 rows" in tab.locator("#curves figcaption").first.inner_text()
    tab.locator("[data-run]").last.uncheck()
    visible = "Bokeh.documents[0].roots()[0].renderers.filter(r => r.visible).length"
    assert tab.evaluate(visible) == 2 * 2 + 1  # and the band over two seeds
    assert not tab.evaluate("!!document.querySelector('[onerror]')")
    violations = Axe().run(tab).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in violations
               if v["impact"] in ("serious", "critical")]  # fmt: skip
    assert not serious
    assert said == []
    assert requests == [pathlib.Path(page).as_uri()]
    context.close()
