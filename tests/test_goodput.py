"""tools/goodput.py: which runs it makes, its table and its figure; no run is started."""

import csv
import sys
import types

import notebooks
import pytest
from fake_clock import FakeClock
from loaded_file import load_module


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The tool with a table of its own, and runs that take a minute by a fake clock."""
    pytest.importorskip("matplotlib")
    tool, clock, tool.started = load_module(notebooks.ROOT / "tools/goodput.py"), FakeClock(), []

    def run(case, workdir, restart_s, until):
        clock.now += 60
        if clock.now > until:
            return None
        tool.started.append((case, restart_s))
        faults = {"none": 0, "once": 1}.get(case.every, 2)
        return {"steps": 1000, "faults": faults, "goodput": 0.5, "wall_s": 60.0, "lost_s": 1.0,
                "down_s": 1.0 * faults, "starts_s": 12.0 * (faults + 1),
                "bits": tool.bits[case.processes]}  # fmt: skip

    tool.bits = {"2": "a", "4": "b"}
    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "time", types.SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(tool, "TABLE", tmp_path / "docs/explanation/goodput.csv")
    tool.TABLE.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["goodput.py", str(tmp_path / "work"), "--minutes=10"])
    return tool


def test_all_runs_in_the_order_of_what_they_tell(tool):
    cases = tool.cases()
    assert len(cases) == len({*cases}) == 4 + 1 + 2 * 2 * 4 * 3
    assert cases[:2] == [("2", "no", "none", "0"), ("2", "no", "once", "0")]
    assert {case.every for case in cases[:5]} == {"none", "once"}
    assert [case.seed for case in cases[5:]] == sorted(case.seed for case in cases[5:])


def test_it_stops_in_time_and_goes_on(tool, tmp_path, capsys):
    assert tool.main() == 0
    assert len(tool.started) == 10 and tool.started[2][1] == 13  # the restart that was measured
    assert capsys.readouterr().out.count("left out:") == 53 - 10
    assert tool.main() == 0
    assert [case for case, _ in tool.started] == tool.cases()[:20]
    rows = [*csv.DictReader(tool.TABLE.read_text().splitlines())]
    assert {row["to_next_step_s"] for row in rows} == {"", "13.0"}
    assert tool.TABLE.with_suffix(".png").stat().st_size > 1000


def test_other_bits_are_an_error_and_the_page_says_so(tool, tmp_path, monkeypatch):
    tables = load_module(notebooks.ROOT / "docs/measured_tables.py")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tool.main() == 0
    assert "| 2 | no | none | 1 | 0 | 50% | 1.0 |  |\n" in tables.goodput()
    assert "\n10 of 10 runs ended with the bits" in tables.goodput()
    tool.bits["2"] = "c"
    assert tool.main() == 1
    assert "\n17 of 20 runs ended with the bits" in tables.goodput()
