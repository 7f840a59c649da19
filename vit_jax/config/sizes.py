"""A schedule of image sizes: data.image_size="96, 128 at 40 %, 160 at 80 %".

A stage is a part of the run with one image size and one share of patches that training encodes. The
last size is the largest: the learned positions have its grid, and evaluations, exports and
predictions use it.

Sources: Tan and Le 2021 (arXiv:2104.00298), section 4, which also calls these parts stages; Liu et
al. 2022 (arXiv:2208.07220), for patches that are left out until the last epochs.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.base.errors import InputError
from vit_jax.config.durations import split_duration

EXAMPLE = "96, 128 at 40 %, 160 at 80 %"
ONE_SIZE = "for one size an int or (height, width)"


class Stage(NamedTuple):
    """Consecutive steps of a run with one program.

    size: (height, width), in pixels.
    keeps_all: whether `model.keep_tokens_until` has passed.
    steps: its steps, counted from 0.
    batch: images per step, over all devices.
    first: number of images before it, which is the position of its first image.
    drawn: the key of a number that is drawn for each step, and its value; empty: none is.
    percent: of all steps, if they are drawn.
    """

    size: tuple[int, int]
    keeps_all: bool
    steps: range
    batch: int
    first: int
    drawn: tuple[str, int] | tuple[()] = ()
    percent: int = 100


class Stages(tuple[Stage, ...]):
    """The stages of a run, in their order."""

    def find(self, steps: int) -> int:
        """The number of the stage, from 0, of the step that follows `steps` others."""
        return bisect.bisect_right([stage.steps.start for stage in self], steps) - 1

    def images(self, steps: int) -> int:
        """The images of the first `steps` steps: the position of the first image that follows."""
        stage = self[self.find(steps)]
        return stage.first + (steps - stage.steps.start) * stage.batch

    def steps_in(self, stage: int, steps: int) -> int:
        """How many of the first `steps` steps the stage of that number has."""
        own = self[stage].steps
        return len(range(own.start, min(steps, own.stop)))

    def needed(self, start: int) -> int:
        """The first stage that has a step after the first `start` ones."""
        return self.find(start)

    def loads(self, start: int) -> set[int]:
        """The numbers of the steps, from 1, that are the first of their program after `start`."""
        return {start + 1, *(stage.steps.start + 1 for stage in self)}

    def firsts(self, stage: int, steps: range) -> Sequence[int]:
        """The position of the first image of each of those `steps` that the stage has."""
        own, batch = self[stage].steps, self[stage].batch
        start, stop = max(steps.start, own.start), min(steps.stop, own.stop)
        return range(self.images(start), self.images(start) + (stop - start) * batch, batch)


def make_stages(
    sizes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    batches: Sequence[int],
    steps: int,
    keep_until: int | None,
) -> Stages:
    """The stages of a run of `steps` steps; steps after `keep_until` encode all patches.

    Args:
      sizes: (height, width) in pixels, in the order of the run.
      starts: steps before each size.
      batches: images per step at each size, over all devices.
      keep_until: steps that encode `model.keep_tokens` of the patches; None: all do.

    Raises:
      InputError: one of several stages has no step.
    """
    first, stages = 0, []
    for size, start, end, batch in zip(sizes, starts, [*starts[1:], steps], batches, strict=True):
        if len(sizes) > 1 and end <= start:
            raise InputError(
                f"data.image_size: {size[0]} pixels would begin after step {start:,} and end after "
                f"step {end:,}, in a run of {steps:,} steps; set a longer --config.duration, or "
                "for a new run starts that rise within it"
            )
        whole = end if keep_until is None else min(max(keep_until, start), end)
        for part, keeps_all in ((range(start, whole), False), (range(whole, end), True)):
            if part or (start == end and not keeps_all):
                stages.append(Stage(size, keeps_all, part, batch, first))
                first += len(part) * batch
    return Stages(stages)


def split_sizes(text: str) -> list[tuple[int, str]]:
    """[(96, "0 steps"), (128, "40 %"), (160, "80 %")] of "96, 128 at 40 %, 160 at 80 %"."""
    first, *later = text.split(",")
    parts = [part.partition(" at ") for part in later]
    return [(int(first), "0 steps"), *((int(size), start.strip()) for size, _, start in parts)]


def find_fault_of_sizes(text: str) -> str | None:
    """The fault of a schedule; None: it has none."""
    if not re.fullmatch(r"\s*\d{1,4}\s*(,\s*\d{1,4} +at [^,]+)+", text):
        return f'needs sizes with their starts, such as "{EXAMPLE}", or {ONE_SIZE}'
    for size, start in split_sizes(text):
        if re.fullmatch(r"[\d.]+", start):
            said = f'"{size} at {start}"'
            return f'{said} has no unit; write {said[:-1]} %", or steps, epochs or examples'
        try:
            split_duration(start, "", shares=True)
        except InputError as e:
            return f'"{size} at {start}"{str(e).removeprefix(f"={start!r}")}'
    sizes, starts = zip(*split_sizes(text), strict=True)
    shares = [float(start[:-1]) for start in starts if re.fullmatch(r"\d+(\.\d+)? *%", start)]
    if not _rises([0, *sizes]):
        return "sizes must rise: evaluations and learned positions have the last one"
    return None if _rises([0, *shares, 100]) else "shares must rise, between 0 and 100 %"


def _rises(numbers: Sequence[float]) -> bool:
    return all(before < after for before, after in itertools.pairwise(numbers))


def with_starts(text: str, in_steps: Callable[[str], int]) -> str:
    """The schedule with its starts in steps: "96, 128 at 400 steps"."""
    (first, _), *later = split_sizes(text)
    return ", ".join([f"{first}", *(f"{size} at {in_steps(at)} steps" for size, at in later)])
