"""Numbers drawn for each step: data.max_tokens="128@0.3, 256@0.5, 576@0.2", model.patch_sizes.

Each number has a program of its own. The steps come in blocks, in which each number has just its
share of the steps, in an order drawn from the seed. So the program of a step, and the position of
its first image, are functions of the seed and of the number of the step.

Source: patch sizes drawn in training, Beyer et al. 2022 (arXiv:2212.08013), section 3.
"""

import functools
import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.config.sizes import Stage, Stages

# Examples of what is drawn.
TOKENS = "128@0.3, 256@0.5, 576@0.2"  # of `data.max_tokens`
PATCHES = "16@0.5, 32@0.5"  # of `model.patch_sizes`
LARGEST = 16384


def split_draws(value: int | str) -> list[tuple[int, int]]:
    """[(128, 30), (256, 50), (576, 20)], numbers and percent, of TOKENS; the numbers rise."""
    if not isinstance(value, str):
        return [(value, 100)]
    parts = [part.partition("@") for part in value.split(",")]
    return sorted((int(number), round(100 * float(share))) for number, _, share in parts)


def find_fault_of_draws(value: Any, example: str = TOKENS) -> str | None:
    """The fault of a number, or of numbers that are drawn, such as `example`; None: it has none."""
    if type(value) is int and 1 <= value <= LARGEST:
        return None
    form = r"\s*\d{1,5}@0?\.\d+\s*(,\s*\d{1,5}@0?\.\d+\s*)+"
    if not (isinstance(value, str) and re.fullmatch(form, value)):
        return (
            f"needs an int from 1 to {LARGEST}, such as {split_draws(example)[0][0]}, or numbers "
            f'with their shares of the steps, such as "{example}"'
        )
    shares = [float(part.partition("@")[2]) for part in value.split(",")]
    draws = split_draws(value)
    if not all(1 <= number <= LARGEST for number, _ in draws):
        return f"needs numbers from 1 to {LARGEST}"
    if len({number for number, _ in draws}) < len(draws):
        return "names a number twice"
    whole = all(abs(100 * share - round(100 * share)) < 1e-6 for share in shares)
    if not whole or sum(percent for _, percent in draws) != 100 or draws[0][1] == 0:
        return f"needs shares of whole hundredths that add up to 1; they add up to {sum(shares):g}"
    return None


class DrawnStages(Stages):
    """A stage for each number; `order_of` has the steps of each.

    seed: of the run.
    """

    seed = 0

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """The stages of the steps of a block, in no order."""
        unit = math.gcd(*(stage.percent for stage in self))
        return [i for i, stage in enumerate(self) for _ in range(stage.percent // unit)]

    def order_of(self, block: int) -> list[int]:
        """The stage of each step of a block."""
        return [self._numbers[i] for i in _order(self.seed, block, len(self._numbers))]

    def find(self, steps: int) -> int:
        block, at = divmod(steps, len(self._numbers))
        return self.order_of(block)[at]

    def steps_in(self, stage: int, steps: int) -> int:
        blocks, rest = divmod(steps, len(self._numbers))
        return blocks * self._numbers.count(stage) + self.order_of(blocks)[:rest].count(stage)

    def images(self, steps: int) -> int:
        return sum(stage.batch * self.steps_in(i, steps) for i, stage in enumerate(self))

    def needed(self, start: int) -> int:
        return 0

    def loads(self, start: int) -> set[int]:
        steps = range(start, start + 2 * len(self._numbers))
        return {next(s for s in steps if self.find(s) == i) + 1 for i in range(len(self))}

    def firsts(self, stage: int, steps: range) -> Sequence[int]:
        found, position = [], self.images(steps.start)
        for step in steps:
            i = self.find(step)
            if i == stage:
                found.append(position)
            position += self[i].batch
        return found


@functools.lru_cache(maxsize=8)
def _order(seed: int, block: int, steps: int) -> list[int]:
    """The steps of a block in the order of the seed."""

    def key(i: int) -> bytes:
        return hashlib.sha256(f"{seed} {block} {i}".encode()).digest()

    return sorted(range(steps), key=key)


def make_draws(
    key: str,
    draws: Sequence[tuple[int, int]],
    size: tuple[int, int],
    batches: Sequence[int],
    steps: int,
    seed: int,
) -> DrawnStages:
    """The stages of the `draws` of a `key`, as `split_draws` gives them.

    Args:
      size: `data.image_size`.
      batches: pictures of a step with each number, over all devices.
      steps: of the run.
    """
    stages = DrawnStages(
        Stage(size, False, range(steps), batch, 0, (key, number), percent)
        for (number, percent), batch in zip(draws, batches, strict=True)
    )
    stages.seed = seed
    return stages
