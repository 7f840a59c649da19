"""Faults by `job.inject`: their forms, and one job of two processes that meets most of them."""

import re
import types

import chaos
import numpy as np
import pytest
from etils import epath
from fake_clock import FakeClock

from vit_jax.base.errors import InputError
from vit_jax.run.watch import injected, watchers
from vit_jax.run.watch.faults import FAULTS, check_places, parse_faults


def test_every_fault_is_read_as_it_is_written():
    faults = parse_faults(" , ".join(FAULTS))
    assert [fault.text for fault in faults] == [*FAULTS]
    assert {fault.step for fault in faults} == {12}
    assert [fault.place for fault in faults] == [3] * 3 + [1] * 8 + [0] * 3
    assert [fault.seconds for fault in faults if fault.seconds] == [5, 5, -3600, 0.2]
    kinds = {fault.kind for fault in faults if not fault.is_flip}
    # In schedules a long stop ends as a hang does.
    assert kinds == chaos.KINDS.keys() | {"hang", "slow", "lose"}


def test_a_fault_of_a_process_is_made_by_the_clock_or_by_chance():
    text = "kill:process=1:every=60s,slow:process=0:every=8s:seed=3:seconds=0.5"
    by_clock, by_chance = parse_faults(text)
    assert (by_clock.kind, by_clock.place, by_clock.every, by_clock.seed) == ("kill", 1, 60, None)
    assert (by_chance.kind, by_chance.every, by_chance.seconds) == ("slow", 8, 0.5)
    check_places(text, 4, 2, {"duration": 40})
    by_clock = by_clock._replace(times=[1000, 1070])
    assert [by_clock.is_due(1, now) for now in (1129.9, 1130)] == [False, True]
    waits = []
    for seed in range(300):
        later = by_chance._replace(seed=f"{seed}", times=[0])
        due = [later.is_due(1, now) for now in range(80)]
        assert due == [later.is_due(9, now) for now in range(80)] == sorted(due)
        waits.append(due.count(False))
    assert 7 < np.mean(waits) < 9 and 7 < np.std(waits) < 9  # both are the mean if exponential
    again = [by_chance._replace(times=[0] * n).is_due(1, 8) for n in range(1, 21)]
    assert 0 < sum(again) < 20  # each time has its own wait


def test_a_repeated_fault_goes_on_after_a_restart(tmp_path, monkeypatch):
    """The run is started at 1000 s, and again at 1100 s; each step takes 20 s."""
    clock, made = FakeClock(), []
    monkeypatch.setattr(watchers, "time", types.SimpleNamespace(time=clock))
    monkeypatch.setattr(injected.time, "sleep", lambda s: made.append((clock.now, s)))
    monkeypatch.setattr(injected, "began_at", lambda _: (1000, -1))
    text = "slow:process=0:every=50s:seconds=7,slow:process=0:step=2:seconds=3"
    job = types.SimpleNamespace(inject=text, compile_deadline_s=1)
    run = types.SimpleNamespace(
        workdir=epath.Path(tmp_path), settings=types.SimpleNamespace(job=job)
    )
    for _ in range(2):
        step = watchers.inject(run, injected.faults_left(run))(lambda *args: args)
        for number in range(1, 6):
            clock.now += 20
            assert step(number, "state", "batch") == (number, "state", "batch")
    assert made == [(1040, 3), (1060, 7), (1120, 7), (1180, 7)]
    first, _ = text.split(",")
    assert (tmp_path / "injected" / first).read_text().split() == ["1060.0", "1120.0", "1180.0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill:process=2:step=40", "the run has processes 0 to 1"),
        ("flip:weight:device=4:step=40", "the run has devices 0 to 3"),
        ("cut:process=1:step=41", "the run has steps 1 to 40"),
        ("flip:gradient:device=3:step=12", "only a replay meets it"),
        ("flip:gradient:device=3:step=10,flip:activation:device=1:step=10", "two flips for one"),
        ("flip:gradient:device=3:step=10,flip:weight:device=3:step=40", None),
    ],
)
def test_a_fault_that_the_run_does_not_meet_is_refused(text, says):
    durations = {"duration": 40, "job.replay_every": 5}
    if says is None:
        check_places(text, 4, 2, durations)
        return
    with pytest.raises(InputError, match=re.escape(f"job.inject={text!r}: {says}")):
        check_places(text, 4, 2, durations)


def test_schedules_are_drawn_from_their_number():
    schedules = [chaos.draw(number) for number in range(100)]
    assert schedules == [chaos.draw(number) for number in range(100)]
    assert {schedule.processes for schedule in schedules} == {1, 2, 3, 4}
    made = [fault for schedule in schedules for fault in parse_faults(schedule.faults)]
    assert {fault.kind for fault in made} == chaos.KINDS.keys()


@pytest.mark.slow
def test_a_job_that_meets_faults_of_all_kinds_ends_with_the_same_bits(tmp_path):
    faults = ("slow_disk:process=1:step=2:seconds=0.05", "clock:process=0:step=4:seconds=86400",
              "full_disk:process=1:step=7", "cut:process=1:step=16", "damage:process=0:step=24",
              "stop:process=0:step=32:seconds=20", "term:process=1:step=36")  # fmt: skip
    words = ("--config.checkpoint.every=5 steps",)
    result = chaos.follow(chaos.Schedule(0, 2, words, ",".join(faults)), tmp_path)
    assert result["equal"], (tmp_path / "0/output").read_text()
    assert sorted(result["made"]) == sorted(faults)
    causes = [start["cause"] for start in result["starts"]]
    assert causes[:4] == ["full_disk", "cut", "damage", "stop"]
    by_hand = [start["code"] for start in result["starts"]]
    assert by_hand[:4] == [2, 1, None, 1]  # None: by the launcher
