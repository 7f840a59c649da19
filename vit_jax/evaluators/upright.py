"""Targets of pixels, turned with the images that EXIF turns."""

import functools
import pathlib

import numpy as np
from PIL import Image

from vit_jax.base.errors import few, shown
from vit_jax.data.images.files import warn_once
from vit_jax.data.images.formats import turn_of
from vit_jax.data.retries import retried
from vit_jax.evaluators.inputs import EvalInputs


class Upright:
    """Turns a target that shows the pixels of its image as they are stored.

    A target with an EXIF orientation of its own is turned by it. Any other target is turned with
    its image if it is tall and the turned image is wide, or the reverse. If its shape cannot show
    this (a square, a mirrored image, an image turned by 180 degrees), it is not turned, and `warn`
    counts it. With `data.exif=false` no target is turned, and `warn` counts those that are upright
    beside stored pixels.
    """

    def __init__(self, inputs: EvalInputs):
        self._exif = inputs.settings.data.exif
        self._turns = {key: functools.cache(s.turn) for key, s in inputs.sources.items()}
        self._unsure: set[pathlib.Path] = set()
        self._upright: set[pathlib.Path] = set()

    def __call__(
        self, target_HW: np.ndarray, file: pathlib.Path, split_key: str, record: int
    ) -> np.ndarray:
        """The target in `file` as its image, a record of a split, is shown."""
        if not self._exif:
            turn = self._turns[split_key](record)
            if turn and turn.swaps and _tallness(target_HW.shape) * _tallness(turn.size) > 0:
                self._upright.add(file)
            return target_HW
        content = retried(file.read_bytes, file) if file.suffix.lower() == ".png" else b""
        own = turn_of(content) if b"eXIf" in content else None
        turn = own or self._turns[split_key](record)
        if turn is None or turn.transpose is None:
            return target_HW
        if own is None:
            alike = _tallness(target_HW.shape) * _tallness(turn.size)
            if not (turn.swaps and alike):
                self._unsure.add(file)
            if not turn.swaps or alike >= 0:
                return target_HW
        places = np.arange(target_HW.size, dtype=np.int32).reshape(target_HW.shape)
        turned = Image.fromarray(places).transpose(Image.Transpose(turn.transpose))
        return target_HW.ravel()[np.asarray(turned)]

    def warn(self) -> None:
        """Warn once of targets that do not fit their images, or whose shape does not show it."""
        if self._upright:
            names = few(map(shown, sorted(self._upright)))
            warn_once(
                f"targets: with data.exif=false {len(self._upright):,} images are wide where their "
                f"targets are tall, or the reverse: {names}; leave out data.exif=false, or turn "
                "the targets to the stored pixels"
            )
        if self._unsure:
            names = few(map(shown, sorted(self._unsure)))
            warn_once(
                f"targets: EXIF turns the images of {len(self._unsure):,} targets whose shape does "
                f"not show whether they need it too: {names}; they are taken as "
                "upright. If they show the stored pixels, give them the EXIF orientation of their "
                "images, or set --config.data.exif=false"
            )


def _tallness(shape: tuple[int, ...]) -> int:
    """1 for tall, -1 for wide, 0 for a square; `shape`: (height, width)."""
    return int(np.sign(shape[0] - shape[1]))
