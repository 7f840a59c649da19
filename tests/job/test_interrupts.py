"""Ctrl-C and a lost lock end all processes of a job at once. The processes are real."""

import json
import signal
import subprocess
import sys

import pytest
from started_job import Job

ENDLESS = ("--config=configs/quickstart.py:debug", "--config.duration=1000000 steps")


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        (1, "data: digits"),
        pytest.param(0, "data: digits", marks=pytest.mark.slow),
        pytest.param(0, "start: from scratch", marks=pytest.mark.slow),
        pytest.param(1, "start: from scratch", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_before_the_first_step_ends_all_processes_at_once(victim, phase, tmp_path):
    words = (*ENDLESS, f"--workdir={tmp_path / 'run'}")
    # JAX aborts a process that outlives process 0, which has the job's store.
    with Job(tmp_path, *words, devices=1, own={1: ("slow_exit:0.5", ())}) as job:
        job.wait_until_said(0, phase)
        job.signal(victim, signal.SIGINT)
        assert job.codes(timeout_s=60) == [130, 130], job.everything()
        assert "Interrupted; nothing is saved" in job.said(victim)
        assert f"process {victim} has ended the job: Ctrl-C" in job.said(1 - victim)
        assert not any("lost" in job.said(i) or "unreachable" in job.said(i) for i in range(2))


@pytest.mark.slow
def test_a_lost_lock_ends_all_processes_at_once(tmp_path):
    with Job(tmp_path, *ENDLESS, f"--workdir={tmp_path / 'run'}", devices=1) as job:
        job.wait_until_said(0, "step 10")
        lock = tmp_path / "run" / "held_by.json"
        holder = json.loads(lock.read_text()) | {"token": "another"}
        lock.write_text(json.dumps(holder))
        assert job.codes(timeout_s=90) == [1, 1], job.everything()
        assert "process 0 has ended the job: --workdir=" in job.said(1)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_thread_ends_a_process_whose_main_thread_does_not_notice_ctrl_c(in_loop):
    """As in a compilation. The handler here does nothing; in the loop it has not been called."""
    code = (
        "import os, signal, time, types\n"
        "from vit_jax.job import interrupts, processes\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "interrupts._GRACE_S = 0.1\n"
        "interrupts.watch()\n"
        f"guard = types.SimpleNamespace(interrupted=False) if {in_loop} else None\n"
        "processes.PreemptionGuard.entered = guard\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Interrupted in the phase start; run the same command again" in done.stderr
