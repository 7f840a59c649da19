"""The steps at which a run logs, evaluates and saves."""

from vit_jax.run.build import Timetable


def make_timetable(keep_every):
    durations = {"duration": 100, "log.every": 40, "checkpoint.every": 10}
    of_evals = {"evals.few.every": 60, "evals.test.every": 25}
    return Timetable({**durations, "checkpoint.keep_every": keep_every, **of_evals})


def steps(due):
    return [step for step in range(1, 101) if due(step)]


def test_a_run_saves_also_at_the_multiples_of_keep_every():
    tens = list(range(10, 101, 10))
    assert steps(make_timetable(None).saves) == tens
    assert steps(make_timetable(33).saves) == sorted([*tens, 33, 66, 99])
    assert steps(make_timetable(20).saves) == tens


def test_at_the_last_step_everything_is_due():
    timetable = make_timetable(None)
    assert steps(timetable.logs) == [40, 80, 100]
    found = {step: timetable.evaluators(step) for step in steps(timetable.evaluators)}
    assert found == {25: ["test"], 50: ["test"], 60: ["few"], 75: ["test"], 100: ["few", "test"]}
