"""The length of a run by the number of its examples."""

import pytest

from vit_jax.experiment.finetune_length import bit
from vit_jax.run.setup.recipes import hyper_rule

_SIZE = (300, 400)


@pytest.mark.parametrize("num_examples", [1, 700, 19_999, 256_000, 499_999, 512_000, 2_000_000])
def test_with_a_batch_of_512_it_is_bits_rule(num_examples):
    rule = hyper_rule(num_examples, _SIZE)
    assert bit(num_examples, 512) == (rule.steps, rule.warmup, 0.003)


def test_bits_rule():
    found = [hyper_rule(n, _SIZE)[2:] for n in (19_999, 20_000, 499_999, 500_000)]
    middle = (10_000, 500, (3_000, 6_000, 9_000), 0.1)
    assert found[0] == (500, 100, (200, 300, 400), None)
    assert found[1] == found[2] == middle
    assert found[3] == (20_000, 500, (6_000, 12_000, 18_000), 0.1)


@pytest.mark.parametrize(
    ("num_examples", "batch", "length"),
    [
        (200, 64, (500, 100, 0.003)),  # few: BiT's number of steps
        (3_200, 64, (1_000, 200, 0.003)),  # 20 passes over the data
        (19_999, 64, (4_000, 500, 0.003)),  # as many examples as 500 steps of 512
        (20_000, 64, (6_250, 500, 0.003)),
        (1_000_000, 64, (160_000, 500, 0.003)),
        (200, 16, (500, 100, 0.03 * 16 / 512)),  # a noisy batch lowers the rate
    ],
)
def test_smaller_batches(num_examples, batch, length):
    assert bit(num_examples, batch) == length


def test_more_examples_never_train_shorter():
    steps = [bit(n, 64).steps for n in range(1_000, 600_000, 997)]
    assert steps == sorted(steps)
