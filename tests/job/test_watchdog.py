"""The watchdog's decisions, with a fake clock and a fake board."""

import math
import re
import threading

import pytest

from vit_jax.config import base_config
from vit_jax.job import watchdog
from vit_jax.job.watchdog import Report, Watchdog, step_deadline

DEADLINES = {"start": 100.0, "compile": 100.0, "step": 20.0, "evaluation": 200.0, "save": 50.0}


class Others:
    """A board on which the test publishes reports of other processes."""

    def __init__(self, reports):
        self.reports, self.mine, self.running = reports, None, set(reports)
        self.reachable = True

    def publish(self, report, timeout_s=None):
        self.mine = report

    def read(self, name, timeout_s):
        if not self.reachable:
            return None
        reports = self.reports | {0: self.mine}
        return reports if name == "report" else {i: r for i, r in reports.items() if r.failure}

    def tick(self):
        for i in self.running:
            r = self.reports[i]
            self.reports[i] = Report(r.beat + 1, r.phase, r.step, r.waited_s + 1, r.failure)


class Run:
    """Process 0; a second passes at each tick."""

    def __init__(self, **others):
        self.now, self.ended = 0.0, []
        self.board = Others({int(i[1:]): Report(1, *place) for i, place in others.items()})
        self.watchdog = Watchdog(
            deadlines=DEADLINES,
            process=0,
            num_processes=1 + len(others),
            board=self.board if others else None,
            end=self.ended.append,
            clock=lambda: self.now,
        )

    def wait(self, seconds):
        """Tick until the watchdog ends the run; return the time it took, infinite if it did not."""
        for second in range(seconds):
            self.now += self.watchdog.interval_s
            self.board.tick()
            self.watchdog.tick()
            if self.ended:
                return second + 1
        return math.inf


@pytest.mark.parametrize("phase", ["compile", "evaluation", "save"])
def test_every_phase_has_its_own_deadline(phase):
    run = Run()
    run.watchdog.arrive(7)
    with run.watchdog.phase(phase):
        assert DEADLINES[phase] < run.wait(300) <= DEADLINES[phase] + 2
    assert run.ended == [f"no progress: step 7, phase {phase}, for {DEADLINES[phase] + 1:.0f} s"]


def test_a_run_that_moves_is_never_ended():
    run = Run(p1=("step", 0, 0.0))
    for step in range(40):
        run.watchdog.arrive(step)
        run.board.reports[1] = Report(run.board.reports[1].beat, "step", step, 0.0)
        assert run.wait(19) == math.inf
        with run.watchdog.phase("evaluation"):
            assert run.wait(199) == math.inf
        assert run.wait(19) == math.inf  # counted from the end of the evaluation


@pytest.mark.parametrize(
    ("steps", "is_sent", "said"),
    [
        ((7, 5), False, "process 2 has not passed step 5, phase step, for 2.*; the others wait for "
         "it, the first at step 7$"),
        ((7,), True, "process 1 has not given its devices step 7, phase step, for 2"),
        ((7,), False, "all processes have arrived, but none makes progress: step 7"),
    ],
    ids=["behind", "not given", "all have arrived"],
)  # fmt: skip
def test_the_one_that_holds_up_a_step_is_named(steps, is_sent, said):
    run = Run(**{f"p{i}": ("step", step, 0.0) for i, step in enumerate(steps, 1)})
    run.watchdog.arrive(7)
    if is_sent:
        run.watchdog.send()
    assert 20 < run.wait(100) < 25
    assert re.match(said, run.ended[0])


def test_one_that_evaluates_may_take_its_time_and_the_others_wait():
    run = Run(p1=("evaluation", 6, 0.0))
    run.watchdog.arrive(7)
    assert 200 < run.wait(300) < 210
    assert "process 1 has not passed step 6, phase evaluation" in run.ended[0]


def test_one_that_is_silent_is_lost_and_named_before_the_one_that_is_behind():
    run = Run(p1=("step", 6, 0.0), p2=("step", 6, 0.0))
    run.watchdog.arrive(7)
    run.board.running = {1}
    assert 20 < run.wait(100) < 25
    lost = "process 2 is lost (killed, stopped or without network), last seen at step 6, phase step"
    assert run.ended[0].startswith(lost) and "process 1" not in run.ended[0]


def test_one_that_has_heard_of_nobody_does_not_say_that_it_is_lost_itself():
    run = Run(p1=("step", 6, 0.0))
    run.watchdog.arrive(7)  # since its last tick
    said = run.watchdog.describe_others()
    assert said.startswith("process 1 is lost") and "process 0" not in said
    assert "this process: step 7, phase step, for 0 s" in said


def test_one_that_is_silent_while_it_compiles_is_left_to_the_heartbeat_of_jax():
    run = Run(p1=("compile", -1, 0.0))
    run.watchdog.arrive(7)
    run.board.running = set()
    assert run.wait(90) == math.inf
    assert "process 1 is lost" in run.watchdog.describe_others()  # if JAX aborts


def test_a_coordinator_that_does_not_answer_is_named():
    run = Run(p1=("step", 7, 0.0))
    run.watchdog.arrive(7)
    run.wait(3)
    run.board.reachable = False
    assert 15 < run.wait(100) < 25
    assert run.ended[0].startswith("process 0, the coordinator, is unreachable; this process: ")


def test_what_another_ends_for_is_told():
    run = Run(p1=("step", 7, 0.0, "InputError: data.split='x': no such split"))
    run.watchdog.arrive(7)
    run.board.running = set()  # it has ended, but it is not lost
    assert 8 < run.wait(100) < 12  # time for the same error to be found here
    assert run.ended[0].startswith(
        "process 1 is ending, at step 7, phase step, for 0 s: InputError: data.split='x'"
    )
    assert "lost" not in run.ended[0]


def test_time_in_which_the_process_did_not_run_does_not_count():
    run = Run()
    run.watchdog.arrive(7)
    for _ in range(5):
        assert run.wait(3) == math.inf
        run.now += 10_000  # stopped by Ctrl-Z, or the machine asleep
    assert run.wait(100) <= 20


def test_a_step_must_be_found_late_before_jax_ends_the_run():
    job = base_config().job
    assert step_deadline(job, num_processes=2) <= 0.75 * job.heartbeat_s
    assert step_deadline(job, num_processes=1) == 3600  # nobody waits, and CPUs may be slow
    job.step_deadline_s = 5.0
    assert step_deadline(job, num_processes=2) == step_deadline(job, num_processes=1) == 5


def test_an_abort_while_a_process_ends_by_itself_still_names_the_lost_one(monkeypatch, capsys):
    """The collective fails, and JAX aborts before the others have been described."""
    run = Run(p1=("step", 7, 0.0))
    run.watchdog.fail("JaxRuntimeError: connection reset by peer", 1)
    monkeypatch.setattr(watchdog, "_has_spoken", threading.Event())
    monkeypatch.setattr(watchdog, "_coordinator_listens", lambda: False)
    assert watchdog._speak_on_abort(run.watchdog) == 1
    assert "process 0, the coordinator, is unreachable" in capsys.readouterr().err
    watchdog._has_spoken.set()
    assert watchdog._speak_on_abort(run.watchdog) == 1
    assert capsys.readouterr().err == ""
