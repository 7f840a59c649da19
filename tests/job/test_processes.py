"""The processes of a job give the results of one process, and compare their inputs first."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from finished_run import final_state, rows
from started_job import TERMINATE, Job

from vit_jax.base.errors import InputError
from vit_jax.config import sections
from vit_jax.job import processes
from vit_jax.job.lock import Lock
from vit_jax.job.processes import (
    PreemptionGuard,
    ProcessError,
    agree,
    check_devices,
    start,
)
from vit_jax.run.setup import workdir as run_workdir
from vit_jax.run.setup.agreement import compare_findings
from vit_jax.run.setup.workdir import StoredRun, agree_on_run, locked

JOB = sections.Job()

# With Adam's usual eps the noise of gradients that are zero in exact arithmetic is scaled up.
RUN = ("--config=configs/quickstart.py:debug", "--config.mesh.fsdp=2",
       "--config.optimizer.eps=1e-3", "--num_devices=4")  # fmt: skip


def finished(folder, *words, **kwargs):
    """Outputs of a job that succeeds."""
    folder.mkdir(exist_ok=True)
    with Job(folder, *RUN, f"--workdir={folder}/run", *words, **kwargs) as job:
        assert set(job.codes()) == {0}, job.everything()
        return [job.said(i) for i in range(len(job.outputs))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    finished(folder, num_processes=1, devices=4)
    return folder / "run"


def check_same_end(found, expected, steps=40):
    """Metrics and state equal to float tolerance, counts exactly."""
    (step, state), (last, expected_state) = final_state(found), final_state(expected)
    assert step == last == steps
    for name, leaf in expected_state.items():
        np.testing.assert_allclose(state[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
    for mine, other in zip(rows(found), rows(expected), strict=True):
        assert mine.keys() == other.keys()
        np.testing.assert_allclose(list(mine.values()), list(other.values()), rtol=1e-3)
        assert mine.get("test/num_examples", 360) == 360
        assert mine.get("test/top1") == other.get("test/top1")


def check_who_wrote(run, outputs, starts=1, steps=40):
    """Only process 0 writes rows and logs; every process writes its part of a checkpoint."""
    last = f"step {steps}/{steps}"
    assert f"{len(outputs)} host(s)" in outputs[0] and last in outputs[0]
    assert not any(last in output for output in outputs[1:])
    assert len([*run.glob("events.out.tfevents.*")]) == starts
    parts = [path.name for path in (run / f"checkpoints/{steps}/state").glob("ocdbt.process_*")]
    assert sorted(parts) == [f"ocdbt.process_{i}" for i in range(len(outputs))]


def test_a_device_in_each_of_two_processes_gives_what_two_in_one_process_do(tmp_path):
    for folder, num_processes in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
        own = {"num_processes": num_processes, "devices": 2 // num_processes}
        # Without fsdp, the two processes join their gradients.
        outputs = finished(
            folder, "--num_devices=2", "--config.mesh.fsdp=1", "--config.duration=10 steps", **own
        )
    check_same_end(tmp_path / "two/run", tmp_path / "one/run", steps=10)
    check_who_wrote(tmp_path / "two/run", outputs, steps=10)


@pytest.mark.slow
def test_two_processes_end_where_one_does(alone, tmp_path):
    """One is told to stop: both save the same step and later resume from it.

    After that, one spends longer in a slow phase than the deadline of a step.
    """
    with Job(tmp_path, *RUN, f"--workdir={tmp_path}/run") as job:
        job.wait_until_said(0, "start: from scratch")
        job.signal(1, TERMINATE)
        assert job.codes() == [75, 75], job.everything()
        stopped = [job.said(i).split("stopped by SIGTERM at ")[1].split(";")[0] for i in range(2)]
    assert stopped[0] == stopped[1]
    outputs = finished(
        tmp_path,
        "--config.job.step_deadline_s=6",
        own={1: ("slow:9", ())},
    )
    assert f"start: resumed at {stopped[0]}" in outputs[0]
    check_same_end(tmp_path / "run", alone)
    check_who_wrote(tmp_path / "run", outputs, starts=2)


@pytest.mark.slow
def test_four_processes_end_where_one_does(alone, tmp_path):
    outputs = finished(tmp_path, num_processes=4, devices=1)
    check_same_end(tmp_path / "run", alone)
    check_who_wrote(tmp_path / "run", outputs)


class Store:
    """The state of `jax.distributed`, for threads that stand in for processes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key):
        return self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


@pytest.fixture
def on_each(monkeypatch):
    """on_each(*calls): run all at once, like processes; return each one's error or None."""
    store, number = Store(), threading.local()
    monkeypatch.setattr(processes, "client", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: number.value)
    monkeypatch.setattr(run_workdir, "_SHARED_WITHIN_S", 0.2)

    def on_each(*calls, num_processes=None):
        monkeypatch.setattr(jax, "process_count", lambda: num_processes or len(calls))
        raised = [None] * len(calls)
        monkeypatch.setattr(processes, "_next_comparison", lambda: 0)

        def call(i):
            number.value = i
            try:
                calls[i]()
            except (InputError, ProcessError) as e:
                raised[i] = e

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    return on_each


def test_processes_that_agree_go_on(on_each):
    def compare():
        agree("config and software", {"seed": 0, "packages": ("jax", "0.10")}, timeout_s=5)

    assert on_each(*[compare] * 3) == [None] * 3


def test_every_difference_is_told_with_its_processes_everywhere(on_each):
    facts = [{"seed": 0, "batch": 8, "jax": "1"} for _ in range(4)]
    facts[2]["seed"], facts[3]["jax"] = 1, "2"
    del facts[0]["batch"]
    calls = [lambda f=f: agree("config and software", f, timeout_s=5) for f in facts]
    for error in on_each(*calls):
        assert isinstance(error, InputError)
        assert str(error).splitlines() == [
            "the processes differ in config and software: 3 faults",
            "  batch: missing on process 0; 8 on processes 1, 2, 3",
            "  jax: '1' on processes 0, 1, 2; '2' on process 3",
            "  seed: 0 on processes 0, 1, 3; 1 on process 2",
        ]


def test_weights_that_are_not_the_same_are_told(on_each):
    ours = {"head/bias": np.zeros(3, np.float32)}
    theirs = {"head/bias": np.float32([0, 0, 1e-30])}
    calls = [functools.partial(compare_findings, JOB, {}, p) for p in (ours, theirs, ours)]
    for error in on_each(*calls):
        assert isinstance(error, InputError)
        assert re.search("weights read: .* on processes 0, 2; .* on process 1", str(error))


def test_weights_that_are_the_same(on_each):
    params = {"head/bias": np.zeros(3, np.float32)}
    assert on_each(*[lambda: compare_findings(JOB, {}, params)] * 2) == [None, None]


def test_what_process_0_finds_is_said_to_all(on_each):
    found = []

    def find():
        assert jax.process_index() == 0
        return ["é\n", 1]

    def hear():
        found.append(processes.say_to_all("it", find, timeout_s=5))

    assert on_each(*[hear] * 3) == [None] * 3
    assert found == [["é\n", 1]] * 3


def test_what_process_0_refuses_all_refuse(on_each, tmp_path):
    """As when another job trains in the workdir."""
    workdir = epath.Path(tmp_path)
    (workdir / "config.json").write_text("begun")
    first = Lock(workdir)
    errors = on_each(*[lambda: agree_on_run(workdir, 5)] * 3)
    assert [type(error) for error in errors] == [InputError] * 3
    assert len({str(error) for error in errors}) == 1
    assert "has been training there" in str(errors[2])
    first.release()

    def lock(text):
        with locked(workdir, StoredRun(text), JOB):
            pass

    processes.client().values.clear()
    assert on_each(*[lambda: lock("begun")] * 2) == [None] * 2
    processes.client().values.clear()
    for error in on_each(*[lambda: lock("")] * 2):
        assert "another job has begun a run there meanwhile" in str(error)
    assert [path.name for path in workdir.iterdir()] == ["config.json"]


def test_who_does_not_come_is_named(on_each):
    errors = on_each(
        lambda: agree("the program", {}, timeout_s=0.2),
        lambda: agree("the program", {}, timeout_s=0.2),
        num_processes=4,
    )
    for error in errors:
        assert isinstance(error, ProcessError)
        assert str(error).startswith("processes 2, 3 did not reach the comparison of the program")


def test_without_its_coordinator_a_process_does_not_wait_for_ever(on_each, monkeypatch):
    monkeypatch.setattr(processes, "_VERDICT_S", 0.2)
    _, error = on_each(lambda: None, lambda: agree("the program", {}, timeout_s=0.2))
    assert str(error).startswith("process 0 did not reach the comparison of the program")


@pytest.mark.parametrize("exists", [True, False])
def test_one_workdir_is_seen_by_all_and_left_as_it_was(on_each, tmp_path, exists):
    workdir = epath.Path(tmp_path) / "run"
    if exists:
        workdir.mkdir()

    def lock():
        with locked(workdir, StoredRun(), JOB):
            assert jax.process_index() or (workdir / "held_by.json").exists()

    assert on_each(lock, lock) == [None, None]
    assert workdir.exists() == exists and not [*workdir.glob("*")]


def test_a_workdir_that_is_not_shared_is_told(on_each, tmp_path):
    mine, other = (epath.Path(tmp_path) / name for name in ("mine", "other"))

    def lock(workdir):
        with locked(workdir, StoredRun(), JOB):
            raise AssertionError

    for error in on_each(*(functools.partial(lock, workdir) for workdir in (mine, other))):
        assert isinstance(error, InputError)
        assert "--workdir: 'shared' on process 0; '" in str(error)
        assert f"{other} on " in str(error) and "another folder than on process 0" in str(error)
    assert not mine.exists() and not other.exists()


class Cluster:
    """A cluster in the form of JAX's description."""

    name = "slurm"

    def __init__(self, count):
        self._count = count

    def get_process_count(self):
        if isinstance(self._count, Exception):
            raise self._count
        return self._count


@pytest.fixture
def started(monkeypatch):
    """started(cluster, ...): the arguments that JAX is started with; None if it is not."""

    def started(count, coordinator=None, num_processes=None, process_id=None):
        found = None if count is None else Cluster(count)
        monkeypatch.setattr(processes, "find_cluster", lambda: found)
        calls = []
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs))
        )
        start(coordinator, num_processes, process_id, join_deadline_s=60, heartbeat_s=30)
        return calls[0] if calls else None

    return started


def test_where_the_processes_come_from(started):
    assert started(None) is None
    assert started(None, num_processes=1) is None
    assert started(1) is None  # a cluster with one task
    assert started(None, "localhost:1234", 1, 0) is None  # so that it may be stopped for long
    assert started(Exception("no permission"), num_processes=1) is None

    (coordinator, num_processes, process_id), options = started(4)
    assert (coordinator, num_processes, process_id) == (None, None, None)  # JAX asks the cluster
    assert options["cluster_detection_method"] is None
    assert options["heartbeat_timeout_seconds"] == 30
    assert started(4, num_processes=4) == started(4)

    arguments, options = started(None, "localhost:1234", 2, 1)
    assert arguments == ("localhost:1234", 2, 1)
    assert options["cluster_detection_method"] == "deactivate"
    assert started(4, "localhost:1234", 2, 1) == started(None, "localhost:1234", 2, 1)


@pytest.mark.parametrize(
    ("count", "given", "said"),
    [
        (None, {"num_processes": 2}, "--num_processes=2: the job has 1; start as many"),
        (8, {"num_processes": 16}, "--num_processes=16: the job has 8"),
        (None, {"coordinator": "localhost:1", "process_id": 0}, "--num_processes: missing; give"),
        (None, {"coordinator": "localhost:1", "num_processes": 2}, "--process_id: missing; give"),
        (None, {"coordinator": "localhost:1", "num_processes": 2, "process_id": 2},
         "--process_id=2: must be from 0 to 1, since --num_processes=2"),
        (RuntimeError("forbidden"), {}, "--num_processes: slurm does not give the number of "
         "processes (RuntimeError: forbidden); give --num_processes=1"),
    ],
)  # fmt: skip
def test_what_is_asked_for_must_be_there(started, count, given, said):
    with pytest.raises(InputError) as error:
        started(count, **given)
    assert str(error.value).startswith(said)


def test_devices_that_are_not_there_are_told():
    check_devices(None)
    check_devices(8)
    with at_fault("--num_devices"):
        check_devices(16)


def test_sigterm_is_noticed_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionGuard() as guard:
        assert not guard.should_stop(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.should_stop(1)
        assert guard.should_stop(2)
    assert signal.getsignal(signal.SIGTERM) == before
    with PreemptionGuard() as guard:
        assert not guard.should_stop(0)


@pytest.mark.parametrize("others", [[0, 1], [0, 0]])
def test_ctrl_c_in_one_of_several_processes_interrupts_all(monkeypatch, others):
    """Otherwise a launcher would restart those that only got SIGTERM from JAX."""
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    shared = processes.multihost_utils
    monkeypatch.setattr(shared, "reached_preemption_sync_point", lambda step: step == 7)
    monkeypatch.setattr(shared, "process_allgather", lambda mine: np.array(others))
    with PreemptionGuard() as guard:
        assert not guard.should_stop(6) and not guard.interrupted
        assert guard.should_stop(7)
        assert guard.interrupted == any(others)


def test_ctrl_c_is_noticed_and_a_second_one_ends_at_once():
    """In a process of its own, which the second one ends as the shell would see it."""
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever a shell has set
        "from vit_jax.job.processes import PreemptionGuard\n"
        "with PreemptionGuard() as guard:\n"
        "    assert not guard.should_stop(0)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert guard.should_stop(1) and guard.interrupted\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "Ctrl-C: saves after this step" in done.stderr and "Traceback" not in done.stderr
