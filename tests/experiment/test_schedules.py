import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from read_settings import make_schedule, settings_of

from vit_jax.base.errors import InputError
from vit_jax.config import SCHEDULES, base_config
from vit_jax.config.durations import check_duration, parse_duration
from vit_jax.experiment.schedules import half_cosine, schedule_of


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0 steps", 0),
        ("1 step", 1),
        ("1e4 steps", 10_000),
        ("10_000 steps", 10_000),
        ("1 epoch", 10),
        ("0.25 epochs", 3),  # 2.5 steps: halves up
        ("149 examples", 1),
        ("150 examples", 2),
        ("  5e2   examples ", 5),
    ],
)
def test_duration(text, steps):
    kwargs = {"num_examples": 1000, "global_batch_size": 100, "key": "duration"}
    assert parse_duration(text, **kwargs) == steps
    check_duration(text, key="duration")


@pytest.mark.parametrize(
    ("text", "num_examples", "global_batch_size", "steps"),
    [
        ("90 epochs", 1_281_167, 1024, 112_603),  # 112602.57
        ("2.01 epochs", 50, 1, 101),  # 100.5; in binary floats 100.49999999999999
        ("5e9 examples", 1, 3, 1_666_666_667),
    ],
)
def test_duration_is_exact(text, num_examples, global_batch_size, steps):
    sizes = {"num_examples": num_examples, "global_batch_size": global_batch_size}
    assert parse_duration(text, **sizes, key="duration") == steps


@pytest.mark.parametrize(
    ("text", "duration", "steps"),
    [
        ("5 %", "40 epochs", 34),
        ("5%", "2 epochs", 2),
        ("10 %", "2.5 epochs", 4),
        ("0 %", "1 epoch", 0),
    ],
)
def test_a_share_is_of_the_run_before_rounding(text, duration, steps):
    """17 examples in batches of 1: a twentieth of 40 epochs are 2 epochs, 34 steps."""
    sizes = {"num_examples": 17, "global_batch_size": 1, "key": "schedule.warmup"}
    assert parse_duration(text, **sizes, duration=duration) == steps
    check_duration(text, key="schedule.warmup")
    with at_fault("duration"):
        check_duration(text, key="duration", form="length")


def test_a_run_has_as_many_steps_as_its_state_counts():
    sizes = {"num_examples": 3, "global_batch_size": 1, "key": "duration"}
    assert parse_duration("2147483647 steps", **sizes) == 2**31 - 1
    with at_fault("duration"):
        parse_duration("1e9 epochs", **sizes)


RUN = {"peak_lr": 0.5, "total_steps": 100, "warmup_steps": 20}


OWN = {"rsqrt": {"timescale": 60}, "power": {"timescale": 30}, "exponential": {"timescale": 60}}


@pytest.mark.parametrize("name", ["cosine", "multistep"])
def test_one_that_starts_later_is_moved(name):
    def make(start):
        milestones = [start + 50, start + 70] if name == "multistep" else ()
        spans = {"warmup_steps": 10, "cooldown_steps": 20, "milestones": milestones}
        return make_schedule(name, peak_lr=2.0, total_steps=start + 100, start=start, **spans)

    steps = np.arange(101)
    np.testing.assert_allclose(make(30)(steps + 30), make(0)(steps), rtol=1e-6)
    assert make(30)(29) == 0
    with at_fault("duration"):
        make_schedule(name, peak_lr=2.0, total_steps=30, start=30)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_is_linear_from_zero(name):
    schedule = make_schedule(name, **RUN, **OWN.get(name, {}))
    for step in range(21):
        np.testing.assert_allclose(schedule(step), 0.5 * step / 20, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "at_40", "at_100"),
    [
        ("constant", 0.5, 0.5),
        ("linear", 0.375, 0.0),
        ("cosine", 0.25 * (1 + math.cos(math.pi / 4)), 0.0),
        ("rsqrt", 0.5 * math.sqrt(60 / 80), 0.5 * math.sqrt(60 / 140)),
        ("power", 0.5, 0.5 * (80 / 30) ** -0.51),
    ],
)
def test_decay(name, at_40, at_100):
    schedule = make_schedule(name, **RUN, **OWN.get(name, {}))
    np.testing.assert_allclose(schedule(40), at_40, rtol=1e-6)
    np.testing.assert_allclose(schedule(100), at_100, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(schedule(120), schedule(100))


def test_a_cosine_may_end_above_zero():
    schedule = make_schedule("cosine", **RUN, end_share=0.1)
    for step, share in ((20, 1.0), (60, 0.55), (100, 0.1), (120, 0.1)):
        np.testing.assert_allclose(schedule(step), 0.5 * share, rtol=1e-6)
    c = base_config()
    c.schedule.end_share, c.optimizer.peak_lr = 0.1, 0.5
    c.schedule.warmup, c.duration, c.data.num_examples = "20 steps", "100 steps", 1
    c.global_batch_size, c.model.name, c.data.num_classes = 1, "ViT-Ti/16", 1
    c.data.name, c.data.image_size = "digits", 16
    np.testing.assert_allclose(schedule_of(settings_of(c))(60), 0.275, rtol=1e-6)


def test_multistep_divides_by_ten_from_each_milestone_on():
    run = {"peak_lr": 0.3, "total_steps": 500, "warmup_steps": 100}
    schedule = make_schedule("multistep", **run, milestones=(200, 300, 400))
    at = {100: 0.3, 199: 0.3, 200: 0.03, 299: 0.03, 300: 0.003, 400: 0.0003, 500: 0.0003}
    for step, lr in at.items():
        np.testing.assert_allclose(schedule(step), lr, rtol=1e-5)


def test_exponential_falls_by_three_percent_at_each_step_of_the_stair():
    schedule = make_schedule("exponential", **RUN, timescale=24)
    at = {20: 0, 43: 0, 44: 1, 67: 1, 68: 2, 100: 3}
    for step, stairs in at.items():
        np.testing.assert_allclose(schedule(step), 0.5 * 0.97**stairs, rtol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_cooldown_multiplies_the_last_steps_down_to_zero(name):
    run = RUN | OWN.get(name, {})
    plain, cooled = make_schedule(name, **run), make_schedule(name, **run, cooldown_steps=40)
    for step in (0, 10, 60):
        np.testing.assert_array_equal(cooled(step), plain(step))
    for step in (70, 90, 100, 120):
        factor = max(0, 100 - step) / 40
        factor = 1 - math.sqrt(1 - factor) if name == "wsd" else factor
        np.testing.assert_allclose(cooled(step), plain(step) * factor, rtol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_starts_at_the_peak(name):
    assert make_schedule(name, peak_lr=0.5, total_steps=10, **OWN.get(name, {}))(0) == 0.5


@pytest.mark.parametrize("name", SCHEDULES)
def test_float32_scalar_under_jit(name):
    schedule = make_schedule(name, **RUN, **OWN.get(name, {}), cooldown_steps=10)
    lr = jax.jit(schedule)(jnp.int32(95))
    assert (lr.shape, lr.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(lr, schedule(95), rtol=1e-6)


def test_a_run_may_be_all_warmup():
    schedule = make_schedule("linear", peak_lr=1.0, total_steps=4, warmup_steps=4)
    assert [float(schedule(step)) for step in range(4)] == [0, 0.25, 0.5, 0.75]


def test_half_a_cosine_has_the_values_of_dino():
    """last - (last - first) (cos(pi step / total) + 1) / 2: `cosine_scheduler` of its code."""
    for first, last in ((0.996, 1.0), (0.04, 0.4)):
        steps = {0: first, 25: 1 - (1 + 0.5**0.5) / 2, 50: 0.5, 100: last, 120: last}
        for step, value in steps.items():
            if 0 < step < 100:  # `value` is the share of the way
                value = first + value * (last - first)
            np.testing.assert_allclose(half_cosine(step, 100, first, last), value, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"name": "cosin"}, "schedule.name"),
        ({"warmup_steps": 101}, "schedule.warmup"),
        ({"cooldown_steps": 81}, "schedule.warmup"),  # and schedule.cooldown
        ({"total_steps": 0, "warmup_steps": 0}, "duration"),
        ({"name": "multistep", "milestones": (50, 50)}, "schedule.milestones"),
        ({"name": "multistep", "milestones": (20,)}, "schedule.milestones"),
        ({"name": "multistep", "milestones": (100,)}, "schedule.milestones"),
    ],
)
def test_faults_name_the_keys(change, key):
    with pytest.raises(InputError) as error:
        make_schedule(**({"name": "cosine"} | RUN | change))
    assert re.match(r"[\w.]*", str(error.value))[0] == key
