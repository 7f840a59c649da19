"""Numbers of tokens that are drawn: the program and the first position of every step."""

import collections

from vit_jax.config.drawn import find_fault_of_draws, make_draws, split_draws

TEXT = "16@0.3, 4@0.5, 8@0.2"


def make(seed=7, steps=95):
    draws = split_draws(TEXT)
    return make_draws("data.max_tokens", draws, (8, 8), [24, 12, 6], steps, seed)


def test_a_step_is_a_function_of_seed_and_number():
    stages, first = make(), 0
    assert [(s.drawn[1], s.percent, s.batch) for s in stages] == [
        (4, 50, 24),
        (8, 20, 12),
        (16, 30, 6),
    ]
    for step in range(95):
        assert stages.images(step) == first
        first += stages[stages.find(step)].batch
    drawn = [stages.find(step) for step in range(90)]
    assert drawn == [make(steps=10_000).find(step) for step in range(90)]
    assert drawn != [make(seed=8).find(step) for step in range(90)]
    assert make(seed=8).order_of(0) != make().order_of(0) == drawn[:10] != drawn[10:20]
    assert collections.Counter(drawn) == {0: 45, 1: 18, 2: 27}  # in every ten steps its share
    assert make(steps=10**9).images(10**9 - 1) > 10**10  # without a sum over the steps


def test_each_program_gets_its_own_steps():
    stages = make()
    for steps in (range(95), range(13, 77)):
        firsts = {i: [*stages.firsts(i, steps)] for i in range(3)}
        streams = {i: iter(found) for i, found in firsts.items()}
        for step in steps:
            assert next(streams[stages.find(step)]) == stages.images(step)
        assert not [left for stream in streams.values() for left in stream]
        counts = [
            stages.steps_in(i, steps.stop) - stages.steps_in(i, steps.start) for i in range(3)
        ]
        assert counts == [len(firsts[i]) for i in range(3)]
    assert stages.needed(40) == 0  # every program may come again
    for start in (0, 33):
        loads = stages.loads(start)
        assert len(loads) == 3
        assert {stages.find(number - 1) for number in loads} == {0, 1, 2}
        assert min(loads) == start + 1


def test_an_int_is_no_bool():
    assert find_fault_of_draws(256) is None and find_fault_of_draws(True)
