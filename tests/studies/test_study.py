"""A study of real training runs."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
from finished_run import rows

from vit_jax.main import main

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
WORDS = "ViT-B/4,cifar10,debug"
CONFIG = f"--config={ROOT / 'configs/finetune_study.py'}:{WORDS}"
OVERRIDES = ("--config.study.peak_lrs=0.03,1e30", "--config.study.seeds=1")


def test_training_runs_as_members(tmp_path, monkeypatch, capsys, one_device):
    """In this process, since starting members is slow."""
    commands = []

    def execute_here(command):
        monkeypatch.setattr(sys, "orig_argv", command)  # which a run records
        commands.append(command[1:])
        return main(command[3:]), "", False

    monkeypatch.setattr("vit_jax.studies.running._execute", execute_here)
    flags = ["study", CONFIG, f"--workdir={tmp_path / 'study'}"]
    assert main([*flags, *OVERRIDES]) == 0
    found = json.loads((tmp_path / "study/study.json").read_text())
    assert found["complete"] and found["peak_lr"] == 0.03
    states = {name: member["state"] for name, member in found["members"].items()}
    assert states == {
        "dev_lr_0.03": "finished",
        "dev_lr_1e+30": "diverged",
        "lr_0.03_seed_0": "finished",
    }
    assert "grad_norm is inf" in found["members"]["dev_lr_1e+30"]["error"]
    for name, splits in (
        ("dev_lr_0.03", ("dev_train", "dev")),
        ("lr_0.03_seed_0", ("train", "test")),
    ):
        config = json.loads((tmp_path / "study" / name / "config.json").read_text())["resolved"]
        assert (config["data"]["split"], config["evals"]["held_out"]["split"]) == splits

    assert [shlex.split(m["command"])[1:] for m in found["members"].values()] == commands
    summary = json.loads((tmp_path / "study/lr_0.03_seed_0/summary.json").read_text())
    assert summary["held_out/top1"] == found["table"][-1]["held_out/top1, %"]["mean"]

    assert main([*flags, *OVERRIDES]) == 0
    for change in ("duration=30 steps", "evals.held_out.ops=resize|resize"):
        assert main([*flags, *OVERRIDES, f"--config.{change}"]) == 2
        said = capsys.readouterr().err
        assert "dev_lr_0.03 already holds a run with other settings" in said
        assert f"{change.partition('=')[0]}: was " in said
    assert len(commands) == 3


def test_killed_members_resume(tmp_path):
    """Study and member are killed together; the same command then gives the same results."""
    command = [
        sys.executable, "-m", "vit_jax.main", "study", CONFIG, "--config.study.peak_lrs=0.03,",
        "--config.study.seeds=2", "--config.duration=60 steps", "--config.checkpoint.every=5 steps",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    subprocess.run([*command, f"--workdir={whole}"], check=True, env=environment)
    process = subprocess.Popen(
        [*command, f"--workdir={killed}"], env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while not (killed / "lr_0.03_seed_1/checkpoints/10").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = (killed / "lr_0.03_seed_0/metrics.jsonl").stat().st_mtime_ns
    done = subprocess.run(
        [*command, f"--workdir={killed}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert (killed / "lr_0.03_seed_0/metrics.jsonl").stat().st_mtime_ns == first
    for name in ("lr_0.03_seed_0", "lr_0.03_seed_1"):
        assert rows(killed / name) == rows(whole / name)
