"""A run that is killed and started again ends as if it had never been killed, bit for bit."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from finished_run import final_state, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = pathlib.Path(__file__).parents[2]
KILLED = ROOT / "tests" / "killed_run.py"


def environment():
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def start(*words, **kwargs):
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **kwargs,
    )


def finish(*words):
    """The exit code and output of a process."""
    process = start(*words)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def arguments(config, workdir):
    return f"--config=configs/{config}", f"--workdir={workdir}"


def complete(config, workdir):
    code, output = finish("-m", "vit_jax.main", *arguments(config, workdir))
    assert code == 0, output
    return output


def events(workdir):
    """(tag, step, value) of all scalars, as TensorBoard reads them, but for the clock's."""
    accumulator = EventAccumulator(str(workdir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [
        (tag, event.step, event.value)
        for tag in sorted(accumulator.Tags()["scalars"])
        if not tag.startswith("time/")
        for event in accumulator.Scalars(tag)
    ]


def assert_same_run(found, expected):
    (step, state), (expected_step, expected_state) = final_state(found), final_state(expected)
    assert step == expected_step
    assert state.keys() == expected_state.keys()
    for name, leaf in expected_state.items():
        assert np.asarray(state[name]).tobytes() == np.asarray(leaf).tobytes(), name
    assert rows(found) == rows(expected)
    assert events(found) == events(expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    complete("quickstart.py:debug", workdir)
    return workdir


# 40 steps; a row each 5, an evaluation each 20, a save each 10.
# What was saved is certain to be whole only once the next save has begun.
SOME_MOMENTS = ("rows:3", "stopped:20")
ALL_MOMENTS = ("startup", "step:8", "save:1", "rows:3", "save:1", "events:5", "evaluation:1",
               "stopped:20", "evaluation:2")  # fmt: skip


@pytest.mark.parametrize(
    "moments",
    [SOME_MOMENTS, pytest.param(ALL_MOMENTS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_killed_at_any_moment_the_run_ends_bit_identical(uninterrupted, tmp_path, moments):
    for moment in moments:
        code, output = finish(KILLED, moment, *arguments("quickstart.py:debug", tmp_path))
        assert code == -signal.SIGKILL, f"{moment}: {output}"
        if moment.startswith("rows"):
            assert not (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    output = complete("quickstart.py:debug", tmp_path)
    assert "start: resumed at step" in output
    assert_same_run(tmp_path, uninterrupted)


def test_sigterm_saves_and_exits_75_and_the_run_goes_on(uninterrupted, tmp_path):
    process = start("-m", "vit_jax.main", *arguments("quickstart.py:debug", tmp_path))
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 5/40"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, output
    assert "stopped by SIGTERM at step" in output
    output = complete("quickstart.py:debug", tmp_path)
    assert "start: resumed at step" in output
    assert_same_run(tmp_path, uninterrupted)


def test_started_again_after_the_end_nothing_changes(uninterrupted):
    def picture():
        return {
            p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
            for p in sorted(uninterrupted.rglob("*"))
        }

    before = picture()
    assert "finished before" in complete("quickstart.py:debug", uninterrupted)
    assert picture() == before


@pytest.mark.slow
def test_quickstart_killed_ten_times(tmp_path):
    """Kills between 10 % and 90 % of the way, two of them while a save is held in flight."""
    expected, found = tmp_path / "uninterrupted", tmp_path / "killed"
    complete("quickstart.py", expected)
    draw = random.Random(0)
    kill_at = sorted(draw.randint(200, 1800) for _ in range(10))
    for i, step in enumerate(kill_at):
        moment = "save:1" if i in (3, 7) else f"step:{step}"
        code, output = finish(KILLED, moment, *arguments("quickstart.py", found))
        assert code == -signal.SIGKILL, f"{moment}: {output}"
        print(moment, [line for line in output.splitlines() if line.startswith("start:")])
    complete("quickstart.py", found)
    assert_same_run(found, expected)


@pytest.mark.slow
def test_quickstart_killed_from_outside_at_random_times(tmp_path):
    """The same with a SIGKILL by the clock, wherever the run then is."""
    expected, found = tmp_path / "uninterrupted", tmp_path / "killed"
    complete("quickstart.py", expected)
    draw = random.Random(1)
    for _ in range(5):
        process = start("-m", "vit_jax.main", *arguments("quickstart.py", found))
        time.sleep(draw.uniform(3.0, 18.0))
        process.kill()
        process.communicate()
    complete("quickstart.py", found)
    assert_same_run(found, expected)
