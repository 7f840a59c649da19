"""A killed and restarted run ends with the same bits as an uninterrupted one."""

import os
import random
import re
import signal
import tempfile
import time

import pytest
from finished_run import check_same_end, final_state
from forked import ROOT, Forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

KILLED = ROOT / "tests" / "killed_run.py"


MAIN = ("-m", "vit_jax.main")


def start(program, *words, output):
    return Forked(program, words, output, {})


def finish(program, *words):
    """Exit code and output of a process."""
    with tempfile.NamedTemporaryFile("r") as output:
        code = start(program, *words, output=output.name).wait(timeout=600)
        return code, output.read()


def kill(moment, config, workdir, *more):
    """Train until the moment of killed_run.py, or the fault of `job.inject`; return the output."""
    words = (*arguments(config, workdir), *more)
    if ":process=" in moment:
        code, output = finish(MAIN, *words, f"--config.job.inject={moment}")
    else:
        code, output = finish(KILLED, moment, *words)
    assert code == -signal.SIGKILL, f"{moment}: {output}"
    return output


def arguments(config, workdir):
    return f"--config=configs/{config}", f"--workdir={workdir}"


def complete(config, workdir, *more):
    code, output = finish(MAIN, *arguments(config, workdir), *more)
    assert code == 0, output
    return output


def events(workdir):
    """(tag, step, value) of all scalars, as TensorBoard reads them, without those of the clock."""
    accumulator = EventAccumulator(str(workdir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [
        (tag, event.step, event.value)
        for tag in sorted(accumulator.Tags()["scalars"])
        if not tag.startswith("time/")
        for event in accumulator.Scalars(tag)
    ]


def assert_same_run(found, expected):
    check_same_end(found, expected)
    assert events(found) == events(expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    complete("quickstart.py:debug", workdir)
    return workdir


# 40 steps; a row each 5, an evaluation with its row each 20, a save each 10.
# A save is certain to be complete only once the next one has begun.
SOME_MOMENTS = ("damage:process=0:step=31",)
ALL_MOMENTS = ("startup", "kill:process=0:step=8", "save:1", "rows:3", "save:1", "events:5",
               "evaluation:1", "stopped:20", "evaluation:2")  # fmt: skip


@pytest.mark.parametrize(
    "moments",
    [SOME_MOMENTS, pytest.param(ALL_MOMENTS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_killed_at_any_moment_the_run_ends_bit_identical(uninterrupted, tmp_path, moments):
    for moment in moments:
        kill(moment, "quickstart.py:debug", tmp_path)
        if moment.startswith(("rows", "damage")):
            assert not (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    output = complete("quickstart.py:debug", tmp_path)
    assert "start: resumed at step" in output
    if "damage" in moments[0]:
        text = r"checkpoints/[23]0 is invalid(?s:.)*step [12]0 is taken instead"
        assert re.search(text, output), output
    assert_same_run(tmp_path, uninterrupted)


OTHER_RUNS = {
    # 20 steps, a save each 10, an evaluation at the end. It trains its tokenizer.
    "captions": (("words.py:debug",), ("startup", "kill:process=0:step=8",
                 "kill:process=0:step=14", "save:1", "evaluation:1")),
    # Steps 21 to 40 have images of another size.
    "sizes": (("quickstart.py:debug", "--config.model.patch_size=2", "--config.data.ops=resize",
               "--config.evals.test.ops=resize", "--config.data.image_size=4, 8 at 50 %"),
              ("kill:process=0:step=14", "kill:process=0:step=33")),
    # Views, hidden patches, centres and the teacher go on as if nothing had happened.
    "dino": (("dinov2.py:own_head,debug", "--config.checkpoint.every=5 steps"),
             ("startup", "kill:process=0:step=3", "rows:1", "kill:process=0:step=8", "save:1",
              "kill:process=0:step=12", "rows:1", "kill:process=0:step=14", "events:1",
              "kill:process=0:step=19")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_another_run_killed_at_any_moment_ends_bit_identical(tmp_path, name):
    (config, *more), moments = OTHER_RUNS[name]
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    complete(config, unbroken, *more)
    for moment in moments:
        kill(moment, config, killed, *more)
    assert "start: resumed at step" in complete(config, killed, *more)
    assert_same_run(killed, unbroken)
    for file in unbroken.glob("tokenizer/*"):
        assert (killed / "tokenizer" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_sigterm_saves_and_exits_75(tmp_path):
    """The run goes on from there as from `stopped:20`, on two processes in test_processes."""
    os.mkfifo(tmp_path / "output")
    workdir, output = tmp_path / "run", ""
    process = start(MAIN, *arguments("quickstart.py:debug", workdir), output=tmp_path / "output")
    with open(tmp_path / "output") as lines:
        for line in lines:
            output += line
            if line.startswith("step 5/40"):
                process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, output
    step, _ = final_state(workdir)
    assert f"stopped by SIGTERM at step {step}; saved" in output
    assert not (workdir / "summary.json").exists()


@pytest.mark.slow
def test_started_again_after_the_end_nothing_changes(uninterrupted):
    def snapshot():
        return {
            p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
            for p in sorted(uninterrupted.rglob("*"))
        }

    before = snapshot()
    assert "already finished" in complete("quickstart.py:debug", uninterrupted)
    assert snapshot() == before


@pytest.mark.slow
def test_quickstart_killed_ten_times(tmp_path):
    """Kills between 10 % and 90 % of the run, two of them while a save is held in flight."""
    expected, found = tmp_path / "uninterrupted", tmp_path / "killed"
    complete("quickstart.py", expected)
    draw = random.Random(0)
    kill_at = sorted(draw.randint(200, 1800) for _ in range(10))
    for i, step in enumerate(kill_at):
        moment = "save:1" if i in (3, 7) else f"kill:process=0:step={step}"
        output = kill(moment, "quickstart.py", found)
        print(moment, [line for line in output.splitlines() if line.startswith("start:")])
    complete("quickstart.py", found)
    assert_same_run(found, expected)


@pytest.mark.slow
def test_quickstart_killed_from_outside_at_random_times(tmp_path):
    """The same with SIGKILL at random times."""
    expected, found = tmp_path / "uninterrupted", tmp_path / "killed"
    complete("quickstart.py", expected)
    draw = random.Random(1)
    for _ in range(5):
        process = start(MAIN, *arguments("quickstart.py", found), output=tmp_path / "output")
        time.sleep(draw.uniform(1.0, 12.0))
        process.kill()
        process.wait()
    complete("quickstart.py", found)
    assert_same_run(found, expected)
