"""The length and the learning rate of fine-tuning, from the number of training examples.

`bit` starts from BiT's HyperRule, which was made for batches of 512: 500 steps for fewer than
20,000 examples, 10,000 for fewer than 500,000, else 20,000, at a learning rate of 0.003. Own
images are often few, and trained on one device, so that its numbers are limits here:

    steps   = max(500, min(512 * (BiT's steps), 20 * num_examples) / batch)
    warm-up = min(500, steps / 5)
    rate    = min(0.003, 0.03 * batch / 512)

No run sees more examples than BiT's, or, beyond 500 steps, passes over the data more than 20 times.
With a batch of 512 the rule is BiT's for fewer than 20,000 examples, for 256,000 to 500,000, and
from 512,000 on. The rate is not scaled with the batch until it reaches the noise (rate / batch) of
the largest rate in table 4 of the ViT paper, 0.03 with a batch of 512.

Sources: Kolesnikov et al. 2019 (arXiv:1912.11370), section 3.3; Dosovitskiy et al. 2020
(arXiv:2010.11929), table 4; the limits are our choice.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

BIT_BATCH = 512
BIT_LR = 0.003
_MOST_EPOCHS = 20
_LARGEST_LR = 0.03  # with a batch of 512


class Length(NamedTuple):
    """The length of a run and its learning rate, as config keys call them."""

    steps: int
    warmup_steps: int
    peak_lr: float


def bit_steps(num_examples: int) -> int:
    """Steps of BiT's HyperRule for batches of 512."""
    if num_examples < 20_000:
        return 500
    return 10_000 if num_examples < 500_000 else 20_000


def bit_warmup(steps: int) -> int:
    """Steps of warm-up: 100 of 500 and 500 of 10,000, as in BiT's HyperRule."""
    return min(500, steps // 5)


def bit(num_examples: int, batch_size: int) -> Length:
    """The rule at the top of this module."""
    most = min(BIT_BATCH * bit_steps(num_examples), _MOST_EPOCHS * num_examples)
    steps = max(500, math.ceil(most / batch_size))
    rate = min(BIT_LR, _LARGEST_LR * batch_size / BIT_BATCH)
    return Length(steps, bit_warmup(steps), rate)


# schedule.rule -> function of (number of examples, global batch size).
RULES: dict[str, Callable[[int, int], Length]] = {"bit": bit}
