"""Jobs that lose a process go on from the memory of the host, without a checkpoint of the store."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from asked import count_steps, train_and_evaluate
from cheap_compilation import flags_for
from finished_run import check_same_end, final_state, rows
from started_job import ROOT

from vit_jax.base.errors import InputError
from vit_jax.config.text import load_config
from vit_jax.run import build, loop
from vit_jax.run.setup.workdir import run_name
from vit_jax.run.watch.guards import CorruptDataError

WORDS = (
    "--config=configs/quickstart.py:debug", "--config.duration=200 steps",
    "--config.global_batch_size=48", "--config.evals.test.batch_size=48",
    "--config.evals.test.every=100 steps", "--config.log.every=5 steps",
    "--config.checkpoint.every=100000 steps", "--config.checkpoint.memory_every=20 steps",
    "--config.optimizer.eps=1e-3",
)  # fmt: skip


def folder_of(workdir):
    return pathlib.Path(f"/dev/shm/vit_jax-{os.getuid()}", run_name(workdir))


@contextlib.contextmanager
def started(workdir, *words, num_processes=4, max_restarts=3):
    command = [
        sys.executable, "launch/local.py", f"--num_processes={num_processes}", "--platform=cpu",
        f"--max_restarts={max_restarts}", "--", *WORDS, f"--workdir={workdir}", *words,
    ]  # fmt: skip
    with open(workdir.with_name("output"), "ab") as output:
        job = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | {"XLA_FLAGS": flags_for(1)},
        )  # fmt: skip
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


@pytest.fixture
def make_workdir(tmp_path):
    """make_workdir(name) -> a workdir whose memory on this host is removed after the test."""
    made = []

    def make_workdir(name):
        made.append(tmp_path / name / "run")
        made[-1].parent.mkdir()
        return made[-1]

    yield make_workdir
    for workdir in made:
        shutil.rmtree(folder_of(workdir), ignore_errors=True)


def last_step(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def wait_for_step(workdir, step):
    until = time.monotonic() + 300
    while last_step(workdir) < step:
        assert time.monotonic() < until, workdir.with_name("output").read_text()
        time.sleep(0.02)


def kill(workdir, process):
    """SIGKILL to the process of this number; returns the time."""
    found = subprocess.run(
        ["pgrep", "-f", f"vit_jax.main.*--workdir={workdir} .*--process_id={process}$"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    return time.monotonic()


def said(workdir):
    return workdir.with_name("output").read_text()


@pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")
def test_a_kept_step_is_taken_only_if_the_store_has_the_save_before_it(
    make_workdir, monkeypatch, caplog
):
    """Steps 16 and 24 are kept, and 10 and 20 are saved; the save of 20 does not end."""

    class KilledError(Exception):
        pass

    def kill(step, *_):
        if step == 25:
            raise KilledError

    monkeypatch.setattr(loop, "compile_step", count_steps())
    run, config = make_workdir("run"), load_config(f"{ROOT}/configs/quickstart.py:debug")
    config.checkpoint.memory_every = "8 steps"
    with pytest.raises(KilledError):
        train_and_evaluate(config, run, callbacks=[kill])
    shutil.rmtree(run / "checkpoints/20")
    with caplog.at_level("INFO", "vit_jax"):
        assert train_and_evaluate(config, run)["step"] == 40
    assert "step 24 in /dev/shm" in caplog.text and "the store has no step 20" in caplog.text
    assert "start: resumed at step 16 from /dev/shm" in caplog.text
    assert not folder_of(run).exists()


@pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")
def test_a_kept_step_outlives_corrupt_data_and_is_refused_with_other_data(
    tmp_path, monkeypatch, caplog
):
    def fail(step, *_):
        if step == 10:
            raise CorruptDataError("repair them, and run the same command again")

    monkeypatch.setattr(loop, "compile_step", count_steps())
    run, config = tmp_path / "run", load_config(f"{ROOT}/configs/quickstart.py:debug")
    config.checkpoint.memory_every, config.checkpoint.every = "5 steps", "1000 steps"
    config.duration, config.checkpoint.memory_dir = "15 steps", str(tmp_path)
    with pytest.raises(CorruptDataError):
        train_and_evaluate(config, run, callbacks=[fail])
    with monkeypatch.context() as patch, pytest.raises(InputError, match=f"data set .* {tmp_path}"):
        patch.setattr(build, "data_fingerprint", lambda *_: "other")
        train_and_evaluate(config, run)
    with caplog.at_level("INFO", "vit_jax"):
        assert train_and_evaluate(config, run)["step"] == 15
    assert f"start: resumed at step 5 from {tmp_path}" in caplog.text


@pytest.mark.slow
def test_a_job_that_loses_a_process_ends_with_the_same_bits(make_workdir):
    whole, killed = make_workdir("whole"), make_workdir("killed")
    mesh = ("--config.mesh.fsdp=2", "--config.mesh.data=2")
    since = time.monotonic()
    with started(whole, *mesh) as job:
        wait_for_step(whole, 5)
        start_s = time.monotonic() - since
        assert job.wait(300) == 0, said(whole)
    fault = "lose:process=1:step=72"
    with started(killed, *mesh, f"--config.job.inject={fault}") as job:
        wait_for_step(killed, 75)
        restart_s = time.time() - float((killed / "injected" / fault).read_text())
        assert job.wait(300) == 0, said(killed)
    assert "lost a process; restart 1 of at most 3" in said(killed)
    resumed = re.search(r"start: resumed at step (\d+) from /dev/shm", said(killed))
    assert resumed, said(killed)
    print(f"start {start_s:.1f} s; SIGKILL to step 75 {restart_s:.1f} s")
    assert resumed[1] == "60"
    assert final_state(killed)[0] == final_state(whole)[0] == 200
    check_same_end(killed, whole)
    assert not folder_of(killed).exists()


@pytest.mark.slow
def test_four_processes_become_three_and_four_again(make_workdir):
    run = make_workdir("run")
    for num_processes, until in ((4, 50), (3, 120), (4, None)):
        with started(run, num_processes=num_processes, max_restarts=0) as job:
            if until is not None:
                wait_for_step(run, until)
                kill(run, num_processes - 1)
            assert job.wait(300) == (0 if until is None else 137), said(run)
        memory = folder_of(run)
    resumed = re.findall(r"start: resumed at step (\d+) from (\S+)", said(run))
    assert [where.startswith("/dev/shm") for _, where in resumed] == [True, True], said(run)
    assert 40 <= int(resumed[0][0]) <= 60 and int(resumed[1][0]) >= 100
    logged = [row["step"] for row in rows(run) if "train/loss" in row]
    assert logged == list(range(5, 201, 5))
    assert not memory.exists()
