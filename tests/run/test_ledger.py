"""Where wall time goes, from rows made by hand."""

import datetime
import json
import logging
import os
import pathlib
import time

import psutil
import pytest
from etils import epath

from vit_jax.job.age import process_age, started_at
from vit_jax.run.watch import ledger

ROWS = [
    {"step": 5, "time/seconds": 4.0, "time/wall_s": 9.0, "time/restart_s": 1.0,
     "time/compile_s": 3.0, "time/input_wait_s": 0.5},
    {"step": 5, "test/top1": 0.5},
    {"step": 10, "time/seconds": 8.0, "time/wall_s": 15.0, "time/save_s": 2.0},
    {"step": 15, "time/seconds": 12.0, "time/wall_s": 20.0, "time/evaluation_s": 1.0},
]  # fmt: skip


def write_starts(workdir, *lines):
    """A line for each (seconds ago, other fields)."""
    text, hardware = "", {"host": "here", "devices": 1, "device_kind": "cpu"}
    rest = {"command": "", "resumed_at": None, "hardware": hardware}
    for ago_s, fields in lines:
        began = datetime.datetime.fromtimestamp(time.time() - ago_s, datetime.UTC)
        text += json.dumps({"time": began.isoformat(), **rest, **fields}) + "\n"
    (workdir / "starts.jsonl").write_text(text)
    return epath.Path(workdir)


def test_kinds_add_up_to_the_wall_time():
    seconds = ledger.add_up(ROWS)
    assert {kind: s for kind, s in seconds.items() if s} == {
        "step": 11.5, "input_wait": 0.5, "compile": 3.0, "evaluation": 1.0, "save": 2.0,
        "restart": 1.0, "other": 1.0,
    }  # fmt: skip
    assert sum(seconds.values()) == 20.0 and ledger.goodput(seconds) == 0.575
    assert ledger.say(seconds).startswith("goodput 57.5% of 20.0 s: step 11.5 s, input wait 0.5 s")
    assert ledger.goodput(ledger.add_up([])) == 0


def test_what_a_kill_costs_is_lost_or_restart(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    past = ledger.read_past(write_starts(tmp_path, (50.0, {})), iter(ROWS), 10, start_s=6.0)
    assert past.seconds["start"] == 6.0
    assert past.seconds["lost"] == 4.0 and past.seconds["evaluation"] == 1.0
    assert caplog.messages == ["lost: 5 steps, 4.0 s; and the steps after the last row"]
    assert past.after_compiling(2.0).seconds["compile"] == 2.0
    assert past.seconds["restart"] == pytest.approx(24.0, abs=5)
    assert past.wall_s == pytest.approx(50.0, abs=5) and past.input_wait_s == 0.5


def test_a_run_that_stopped_in_order_has_lost_nothing(tmp_path):
    past = ledger.read_past(write_starts(tmp_path, (50.0, {})), ROWS, 15)
    assert past.seconds["lost"] == 0


def test_steps_that_were_saved_without_a_row_are_no_restart(tmp_path):
    workdir = write_starts(tmp_path, (50.0, {}))
    restart = ledger.read_past(workdir, [], 4, start_s=6.0, train_s=30.0).seconds["restart"]
    assert restart == pytest.approx(50 - 6 - 30, abs=5)


def test_steps_saved_between_rows_are_neither_lost_nor_restart(tmp_path):
    rows = [{"step": n, "time/wall_s": float(n), "time/seconds": float(n)} for n in (10, 20)]
    workdir = write_starts(tmp_path, (100.0, {}))
    seconds = ledger.read_past(workdir, rows, 15, train_s=15.0).seconds
    assert seconds["lost"] == 5.0 and seconds["restart"] == pytest.approx(80, abs=5)


def test_a_run_that_never_saved_has_lost_all(tmp_path):
    past = ledger.read_past(write_starts(tmp_path, (50.0, {})), ROWS, None)
    assert past.seconds["lost"] == 13.0
    assert past.after_compiling(2.0).seconds["compile"] == 3.0 + 2.0


def test_the_time_before_a_branch_is_trained_is_not_lost(tmp_path):
    made = {"branch_of": "runs/a", "resumed_at": 10}
    run = write_starts(tmp_path, (9000.0, {}), (500.0, made), (30.0, {}), (10.0, {}))
    past = ledger.read_past(run, ROWS, 15)
    assert past.wall_s == pytest.approx(15.0 + 30.0, abs=5)  # the wall time of step 10
    assert past.seconds["restart"] == pytest.approx(45.0 - 20.0, abs=5)


def test_a_clock_that_was_set_back_takes_nothing_away(tmp_path):
    past = ledger.read_past(write_starts(tmp_path, (-9000.0, {}), (0.0, {})), ROWS, 15, start_s=4.0)
    assert past.wall_s == 20.0 + 4.0 and past.seconds["restart"] == 0


def test_the_age_of_a_process_counts_from_its_start():
    stat = f"7 (py) 3 (x) {' '.join(['S', *['0'] * 18, '250', '0'])}"
    assert started_at(stat, 100) == 2.5
    own = started_at(pathlib.Path("/proc/self/stat").read_text(), os.sysconf("SC_CLK_TCK"))
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert boot_s + own == pytest.approx(psutil.Process().create_time(), abs=1.5)
    assert 0 < process_age() < time.clock_gettime(time.CLOCK_BOOTTIME)
