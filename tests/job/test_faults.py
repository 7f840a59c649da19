"""Messages and ends of a job of several processes when one of them fails.

The faults are real: processes are killed, stopped and terminated; every job is a run of the
command line.
"""

import re
import time

import pytest
from started_job import KILL, STOP, Job

pytestmark = pytest.mark.slow
HEARTBEAT_S = 16
ENDLESS = (
    "--config=configs/quickstart.py:debug", "--config.duration=1000000 steps",
    "--config.log.every=5 steps", "--config.checkpoint.every=1000000 steps",
    "--config.evals.test.every=1000000 steps", f"--config.job.heartbeat_s={HEARTBEAT_S}",
    "--config.job.step_deadline_s=8",
)  # fmt: skip


def endless(tmp_path, *words, **kwargs):
    return Job(tmp_path, *ENDLESS, f"--workdir={tmp_path / 'run'}", *words, **kwargs)


def verdict(job, i):
    """Messages of the watchdog of process i."""
    found = re.findall(r"^watchdog: process .*$", job.said(i), re.MULTILINE)
    assert found, job.everything()
    return "\n".join(found)


def check_that_others_name(victim, job):
    others = [i for i in range(len(job.processes)) if i != victim]
    assert job.codes(others) == [1] * len(others), job.everything()
    gone = f"process {victim} is lost"
    if victim == 0:
        gone += "|process 0, the coordinator, is unreachable"
    for i in others:
        assert re.search(gone, verdict(job, i)), job.everything()
        assert re.search(r"step \d+, phase (step|leave)", verdict(job, i)), job.everything()


# Without process 0, which keeps the store, the others see nothing.
@pytest.mark.parametrize("victim", [1, 0])
def test_when_one_is_killed_the_others_end_and_name_it(tmp_path, victim):
    with endless(tmp_path, devices=1) as job:
        job.wait_until_said(0, "step 10/")
        job.signal(victim, KILL)
        since = time.monotonic()
        check_that_others_name(victim, job)
        assert time.monotonic() - since < HEARTBEAT_S


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_stopped_the_others_end_and_name_it(tmp_path, victim):
    with endless(tmp_path) as job:
        job.wait_until_said(0, "step 10/")
        job.signal(victim, STOP)
        check_that_others_name(victim, job)
        assert 'train.py", line' in job.said(1 - victim)  # the stacks


def test_a_loader_that_hangs_is_named_with_its_process(tmp_path):
    with endless(tmp_path, own={1: ("loader:30", ())}) as job:
        assert job.codes() == [1, 1], job.everything()
        for i in range(2):
            said = verdict(job, i)
            # On a busy machine, a late watchdog may count as lost.
            named = r"process 1 (has not passed|is lost .*, last seen at) step 29"
            assert re.search(named, said), said
        assert 'faulty_run.py", line' in job.said(1)  # where it hangs


def test_a_process_that_hangs_in_a_step_is_named(tmp_path):
    with endless(tmp_path, "--config.job.inject=hang:process=1:step=10") as job:
        assert job.codes() == [1, 1], job.everything()
        for i in range(2):
            named = r"process 1 (has not given its devices|is lost .*, last seen at) step 10"
            assert re.search(named, verdict(job, i)), verdict(job, i)


def test_processes_that_do_not_run_the_same_end_before_the_first_step(tmp_path):
    own = {1: ("code", ("--config.optimizer.peak_lr=0.002",))}
    with endless(tmp_path, devices=1, own=own) as job:
        assert job.codes() == [2, 2], job.everything()
        for i in range(2):
            said = job.said(i)
            assert "--config.optimizer.peak_lr: 0.0015 on process 0; 0.002 on process 1" in said, (
                said
            )
            assert "'other' on process 1" in said
            assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_in_one_replica_is_found_before_it_is_saved(tmp_path):
    words = ("--config.checkpoint.every=5 steps", "--config.job.inject=flip:weight:device=3:step=7")
    with endless(tmp_path, *words) as job:
        assert job.codes() == [1, 1], job.everything()
        for i in range(2):
            said = job.said(i)
            found = r"params/\S+: device \d+ of process 1 / device 0 of process 0, device 1"
            assert re.search(found, said), said
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved == ["5"]


def test_another_program_is_found_before_the_first_step(tmp_path):
    with endless(tmp_path, own={1: ("program", ())}) as job:
        assert job.codes() == [2, 2], job.everything()
        assert "lowered step: " in job.said(0) and "on process 1" in job.said(0)


@pytest.mark.parametrize(("victim", "number"), [(0, KILL), (2, KILL), (0, STOP), (3, STOP)])
def test_of_four_the_others_name_the_one_that_is_lost(tmp_path, victim, number):
    with endless(tmp_path, num_processes=4, devices=1) as job:
        job.wait_until_said(0, "step 10/")
        job.signal(victim, number)
        check_that_others_name(victim, job)
