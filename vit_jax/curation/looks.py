"""One look at each picture: its PDQ hash, its size and its colours.

Source of the hash: Facebook, "The TMK+PDQF video-hashing algorithm and the PDQ image-hashing
algorithm", 2019 (github.com/facebook/ThreatExchange). Here the mean over each of 64 x 64 areas
takes the place of its filter. Pictures of fewer than 64 pixels a side have little to compare.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vit_jax.curation.pictures import Rule, read_pictures, read_values
from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels

_SIDE, _KEPT = 64, 16  # of the grey image, and of its lowest frequencies
_FREQUENCIES = np.arange(1, _KEPT + 1)
_DCT = np.sqrt(2 / _SIDE) * np.cos(
    np.pi / (2 * _SIDE) * np.outer(_FREQUENCIES, 2 * np.arange(_SIDE) + 1)
)
_LEAST_QUALITY = 50  # a flatter picture has a hash of noise
_AT_ONCE = 1024
_SHOWN = 128  # pixels of the shorter side
_LUMA = (0.299, 0.587, 0.114)


class Looks(NamedTuple):
    """Records start, start + 1, ... of a split; rows of pictures that cannot be read are 0.

    hashes: uint64 (n, 2, 4), of each picture and of its mirror image; 0 for flat pictures.
    facts: float64 (n, 3 + 2 C): height, width, bytes as stored (of arrays, of their pixels), and
      the means of each channel and of its squares, of values in [0, 1].
    label: int32 (n,), -1 for none; or float32 (n, C).
    """

    hashes: np.ndarray
    facts: np.ndarray
    label: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        return self.facts[:, 0] > 0


def look_at(source: Source, start: int, stop: int) -> Looks:
    """Looks at the records start, ..., stop - 1; raises ReadError if a file fails."""
    number, shape = stop - start, (source.num_classes,) * source.has_label_vectors
    found = Looks(
        np.zeros((number, 2, 4), np.uint64),
        np.zeros((number, 3 + 2 * source.channels)),
        np.full((number, *shape), 0.0 if shape else -1, np.float32 if shape else np.int32),
    )
    for first in range(start, stop, _AT_ONCE):
        ids, grey = np.arange(first, min(first + _AT_ONCE, stop)), dict[int, np.ndarray]()
        for record, (luma, facts, label) in read_values(source, ids, _look):
            grey[record - start] = luma
            found.facts[record - start], found.label[record - start] = facts, label
        if grey:
            found.hashes[[*grey]] = pdq(np.stack([*grey.values()]))
    return found


def _look(image: tf.Tensor, channels: int, _: object) -> tuple[tf.Tensor, tf.Tensor]:
    """(luma of 64 x 64 areas, float32; the `Looks.facts`)."""
    pixels = to_pixels(image, channels)
    size = tf.strings.length(image) if image.dtype == tf.string else tf.size(image)
    small = tf.image.resize(pixels, (_SIDE, _SIDE), "area")
    weights = tf.constant(_LUMA if channels in (3, 4) else [1 / channels] * channels)
    luma = tf.tensordot(small[..., : weights.shape[0]], weights, 1)
    values = tf.cast(pixels, tf.float32) / 255
    moments = tf.reduce_mean(values, (0, 1)), tf.reduce_mean(tf.square(values), (0, 1))
    facts = tf.concat([tf.cast([*tf.unstack(tf.shape(pixels)[:2]), size], tf.float32), *moments], 0)
    return luma, facts


def small_pictures(source: Source, ids: np.ndarray) -> dict[int, bytes]:
    """{id: JPEG, or PNG with alpha} of the records `ids` that can be read, to be looked at."""
    rule = Rule(_SHOWN, "jpeg" if source.channels <= 3 else "png", 85)
    return {found.record: found.image for found in read_pictures(source, np.unique(ids), rule)}


def pdq(luma: np.ndarray) -> np.ndarray:
    """The hashes of images and of their mirror images; 0 if an image is too flat.

    The 16 x 16 lowest frequencies but the mean are compared with their median.

    Args:
      luma: (n, 64, 64), in [0, 255].

    Returns:
      uint64 (n, 2, 4).
    """
    waves = _DCT @ luma.astype(np.float64) @ _DCT.T
    both = np.stack([waves, waves * (-1.0) ** _FREQUENCIES], 1).reshape(len(luma), 2, -1)
    bits = both > np.median(both, -1, keepdims=True)
    hashes = np.packbits(bits, -1).view(np.uint64)
    return hashes * (quality(luma) >= _LEAST_QUALITY)[:, None, None].astype(np.uint64)


def quality(luma: np.ndarray) -> np.ndarray:
    """PDQ's measure of how much an image varies, (n,): 0 is flat, 100 much."""
    steps = [np.abs(np.trunc(np.diff(luma, axis=axis) * 100 / 255)) for axis in (1, 2)]
    return np.minimum(sum(step.sum((1, 2)) for step in steps) // 90, 100)
