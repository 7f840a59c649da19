"""The steps at which a run logs, evaluates and saves."""

from vit_jax import config as config_lib
from vit_jax.config.durations import parse_durations
from vit_jax.run.build import Timetable


def make_timetable(keep_every):
    config = config_lib.base_config()
    config.global_batch_size, config.data.num_examples = 8, 80
    config.duration = "100 steps"
    config.log.every, config.checkpoint.every = "40 steps", "10 steps"
    config.checkpoint.keep_every = keep_every
    for name, every in {"test": "25 steps", "few": "60 steps"}.items():
        config.evals[name] = config_lib.classification(split="test", every=every)
    return Timetable(parse_durations(config))


def steps(due):
    return [step for step in range(1, 101) if due(step)]


def test_a_run_saves_also_at_the_multiples_of_keep_every():
    tens = list(range(10, 101, 10))
    assert steps(make_timetable(None).saves) == tens
    assert steps(make_timetable("33 steps").saves) == sorted([*tens, 33, 66, 99])
    assert steps(make_timetable("20 steps").saves) == tens


def test_at_the_last_step_everything_is_due():
    timetable = make_timetable(None)
    assert steps(timetable.logs) == [40, 80, 100]
    found = {step: timetable.evaluators(step) for step in steps(timetable.evaluators)}
    assert found == {25: ["test"], 50: ["test"], 60: ["few"], 75: ["test"], 100: ["few", "test"]}
