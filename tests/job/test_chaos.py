"""Faults by `job.inject`: their forms, and one job of two processes that meets most of them."""

import re

import chaos
import pytest

from vit_jax.base.errors import InputError
from vit_jax.run.watch.faults import FAULTS, check_places, parse_faults


def test_every_fault_is_read_as_it_is_written():
    faults = parse_faults(" , ".join(FAULTS))
    assert [fault.text for fault in faults] == [*FAULTS]
    assert {fault.step for fault in faults} == {12}
    assert [fault.place for fault in faults] == [3] * 3 + [1] * 6 + [0] * 3
    assert [fault.seconds for fault in faults if fault.seconds] == [5, -3600, 0.2]
    kinds = {fault.kind for fault in faults if not fault.is_flip}
    assert kinds == chaos.KINDS.keys() | {"hang"}  # in schedules a long stop ends in the same way


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
