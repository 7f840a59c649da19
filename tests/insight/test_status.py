"""The table of runs."""

import functools
import json
import os
import time

import pytest
from at_fault import at_fault
from opened import config_json

from vit_jax.config.text import load_config
from vit_jax.insight.status import read_status
from vit_jax.main import main


def write_run(workdir, rows):
    config = load_config("quickstart:debug")
    config.data.num_examples, config.data.num_classes = 1437, 10
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(config_json(config))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hardware = {"host": "node7", "devices": 8, "device_kind": "TPU v5 lite"}
    start = {"time": "2026-11-22", "command": "", "resumed_at": None, "hardware": hardware}
    (workdir / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return workdir


@pytest.fixture
def folder(tmp_path):
    row = {"step": 10, "train/loss": 1.25, "time/images_per_s": 64.0, "time/wall_s": 20.0,
           "time/goodput": 0.75}  # fmt: skip
    for name in ("a", "b", "c", "d"):
        write_run(tmp_path / name, [row])
    write_run(tmp_path / "e", [])
    (tmp_path / "a/summary.json").write_text(json.dumps({"step": 10, "goodput": 0.5}))
    (tmp_path / "b/held_by.json").write_text("{}")
    (tmp_path / "c/held_by.json").write_text("{}")
    os.utime(tmp_path / "c/held_by.json", (time.time() - 3600,) * 2)
    for name in ("spikes/7.json", "spikes/9.json", "replay/4.json"):
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text("{}")
    return tmp_path


def test_status_is_read_from_the_files(folder, capsys, json_of):
    a, b, c, d, e = read_status([folder])
    assert (a.health, a.eta_s, a.goodput) == ("finished", None, 0.5)
    assert (b.health, b.eta_s, b.goodput) == ("training", 60.0, 0.75)
    assert c.health.startswith("not heard of for 1:00:0")
    assert d.health == "stopped; spikes: 2; wrong bits: 1"
    assert (e.health, e.step, e.loss) == ("stopped", 0, None)
    assert b.cells() == {
        "run": "b", "step": "10/40", "images/s": "64", "ETA": "0:01:00", "train/loss": "1.25",
        "health": "training", "where": "node7, 8 x TPU v5 lite", "goodput": "75%",
    }  # fmt: skip
    assert [run["name"] for run in json_of("status", str(folder), "--format=json")] == [*"abcde"]
    assert main(["status", str(folder)]) == 0
    assert "finished" in capsys.readouterr().out


def test_a_folder_without_runs_is_named(tmp_path):
    with at_fault(str(tmp_path)):
        read_status([tmp_path])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", ""),
        ("summary.json", "null"),
        ("summary.json", '{"step": 10, "goodput": "high"}'),
        ("summary.json", '{"step": 10, "test/top1": [0.5]}'),
        ("summary.json", None),
        ("diverged.json", '{"error": 5}'),
        ("config.json", None),
        ("metrics.jsonl", None),
        ("diverged.json", "[1"),
        ("config.json", "{"),
        ("starts.jsonl", '{"time": 5}\n'),
        ("metrics.jsonl", "null\n"),
        ("metrics.jsonl", '{"a": 1}\n'),
        ("metrics.jsonl", '{"step": "x"}\n'),
        ("metrics.jsonl", '{"step": 3, "train/loss": "abc"}\n'),
    ],
)
def test_a_damaged_file_is_named_and_the_other_runs_are_shown(folder, caplog, name, text):
    if text is None:  # a folder in its place
        (folder / "b" / name).unlink(missing_ok=True)
        (folder / "b" / name).mkdir()
    else:
        (folder / "b" / name).write_text(text)
    shown = [status.name for status in read_status([folder])]
    assert shown == [*"acde"] if name == "config.json" else [*"abcde"]
    assert [r.getMessage().partition(": ")[0] for r in caplog.records] == [f"{folder}/b/{name}"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("resolved", "x"),
        ("resolved.data", None),
        ("asked.job", 7),
        ("resolved.evals", {"test": 3}),
        ("resolved.duration", 7),
        ("resolved.global_batch_size", [None]),
        ("resolved.data.num_examples", {}),
        ("decided_by", 7),
        ("decided_by.seed", {}),
    ],
)
def test_a_damaged_value_of_a_config_is_one_line(folder, capsys, place, value):
    path = folder / "b/config.json"
    content = json.loads(path.read_text())
    *above, last = place.split(".")
    functools.reduce(dict.__getitem__, above, content)[last] = value
    path.write_text(json.dumps(content))
    assert [status.name for status in read_status([folder])] in ([*"acde"], [*"abcde"])
    for command in ("status", "report"):
        assert main([command, str(folder)]) == 0
    for words in (["keys", f"--workdir={path.parent}"], [f"--workdir={path.parent}"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "config.json" in err.splitlines()[0] and "Traceback" not in err


def test_no_run_is_left_to_report(tmp_path, capsys):
    write_run(tmp_path / "runs/a", [])
    (tmp_path / "runs/a/config.json").write_text("{")
    assert main(["report", str(tmp_path / "runs")]) == 2
    assert "no run is left to report" in capsys.readouterr().err


def test_the_plugins_of_a_run_are_not_run(folder):
    stored = json.loads((folder / "b/config.json").read_text())
    for part in ("asked", "resolved"):
        stored[part]["plugins"] = ["not_installed"]
        stored[part]["of_plugin"] = 3
    (folder / "b/config.json").write_text(json.dumps(stored))
    assert read_status([folder])[1].total_steps == 40


@pytest.mark.parametrize("command", ["status", "report"])
def test_no_name_reaches_the_terminal_as_a_control_character(tmp_path, capsys, command):
    for name in ("a", "b\x1b[31m"):
        write_run(tmp_path / "runs" / name, [{"step": 1, "test/top1": 0.5}])
    start = (tmp_path / "runs/a/starts.jsonl").read_text()
    (tmp_path / "runs/a/starts.jsonl").write_text(start.replace("node7", "node\\u001b]0;x"))
    assert main([command, str(tmp_path / "runs")]) == 0
    assert main([command, f"{tmp_path}/\x1b[31m"]) == 2
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and r"b\x1b[31m" in out and r"/\x1b[31m" in err
