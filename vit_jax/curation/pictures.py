"""Pictures as a prepared set stores them: JPEG or PNG bytes, read from any source."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.contract import Source
from vit_jax.data.elements import PARALLEL_CALLS, Elements
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.ops import parse_ops
from vit_jax.data.records import stored_values
from vit_jax.data.resizing import halves_up
from vit_jax.data.retries import sure_reads

_PNG = b"\x89PNG"
_AT_ONCE = 64  # pictures that pass from TensorFlow to Python together


class Picture(NamedTuple):
    """A picture that can be read.

    record: its id in the source.
    image: its bytes, JPEG or PNG.
    label: int32 (), or float32 (C,).
    size: (height, width) of the stored picture.
    """

    record: int
    image: bytes
    label: np.ndarray
    size: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How pictures are encoded; files that already are as asked keep their bytes.

    side: the shorter side of larger pictures, in pixels; smaller ones keep their size.
    encoding: jpeg or png; None: JPEGs become JPEGs, all others PNGs.
    quality: of new JPEGs, 1 to 100.
    """

    side: int | None = None
    encoding: str | None = None
    quality: int = 95

    def encode(
        self, image: tf.Tensor, channels: int, was_jpeg: Callable[[], tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """(bytes, int32 (height, width)) of a source's image, encoded or uint8 pixels.

        was_jpeg: whether the stored file is a JPEG, also where its reader turned it by EXIF.

        Raises: an error of TensorFlow if the image cannot be decoded.
        """
        if image.dtype != tf.string:
            return self._encode_anew(image, channels, tf.constant(False))
        is_jpeg = tf.io.is_jpeg(image)
        is_png = tf.strings.substr(image, 0, len(_PNG)) == _PNG
        kept = {None: is_jpeg | is_png, "jpeg": is_jpeg, "png": is_png}[self.encoding]
        if self.side is not None:
            kept &= ~self._is_large(image)
        return tf.cond(
            kept,
            lambda: (image, _sides(image)),
            lambda: self._encode_anew(image, channels, is_jpeg | was_jpeg()),
        )

    def _is_large(self, image: tf.Tensor) -> tf.Tensor:
        sides = tf.shape(image)[:2] if image.dtype != tf.string else tf.cond(
            tf.io.is_jpeg(image),
            lambda: tf.image.extract_jpeg_shape(image)[:2],
            lambda: _sides(image),
        )  # fmt: skip
        return tf.reduce_min(sides) > self.side

    def _encode_anew(
        self, image: tf.Tensor, channels: int, is_jpeg: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if channels != 3:  # the ops decode to three
            image = to_pixels(image, channels)
        pixels = self._shrunk(image)
        jpeg = functools.partial(tf.io.encode_jpeg, pixels, quality=self.quality)
        if channels > 3 or self.encoding == "png":
            return tf.io.encode_png(pixels), tf.shape(pixels)[:2]
        as_jpeg = is_jpeg | (self.encoding == "jpeg")
        return tf.cond(as_jpeg, jpeg, lambda: tf.io.encode_png(pixels)), tf.shape(pixels)[:2]

    def _shrunk(self, image: tf.Tensor) -> tf.Tensor:
        """The pixels of `image`; its shorter side has at most `side` of them.

        A pixel becomes the mean of the area that it covers, as img2dataset shrinks by default.
        """
        if self.side is None:
            return to_pixels(image)
        decode = parse_ops(f"scaled_decode({self.side})", (self.side, self.side))[0][0]

        def shrunk() -> tf.Tensor:
            pixels = decode(image, tf.zeros([2], tf.int64))
            sides = tf.shape(pixels)[:2]
            shorter = tf.reduce_min(sides)
            size = (sides * self.side + shorter // 2) // shorter
            return halves_up(tf.image.resize(pixels, size, "area"))

        return tf.cond(self._is_large(image), shrunk, lambda: to_pixels(image))


def _sides(image: tf.Tensor) -> tf.Tensor:
    """int32 (height, width) of JPEG, PNG or BMP bytes, which are decoded in one step."""
    return tf.shape(tf.io.decode_image(image, expand_animations=False))[:2]


def read_pictures(source: Source, ids: np.ndarray, rule: Rule) -> Iterator[Picture]:
    """The records `ids`, int64 (n,), in this order; those that cannot be decoded are left out.

    Raises: ReadError if a file that was there cannot be read.
    """
    for record, (image, size, label) in read_values(source, ids, rule.encode):
        yield Picture(record, image, label, (int(size[0]), int(size[1])))


# Two tensors for an image, encoded or uint8 pixels, its number of channels, and `Rule.encode`'s
# `was_jpeg`.
Values = Callable[[tf.Tensor, int, Callable[[], tf.Tensor]], tuple[tf.Tensor, tf.Tensor]]


def read_values(
    source: Source, ids: np.ndarray, values_of: Values
) -> Iterator[tuple[int, Sequence[Any]]]:
    """(id, [*values_of(image, channels), label]) of the records `ids`, as `read_pictures`."""
    expected = iter(ids.tolist())
    for found in _read(source, ids, values_of, careful=False):
        is_other = functools.partial(operator.ne, found[0])
        if missing := [*itertools.takewhile(is_other, expected)]:
            yield from _read(source, np.array(missing), values_of, careful=True)
        yield found
    if missing := [*expected]:
        yield from _read(source, np.array(missing), values_of, careful=True)


def _read(
    source: Source, ids: np.ndarray, values_of: Values, *, careful: bool
) -> Iterator[tuple[int, Sequence[Any]]]:
    """As `read_values`; failed reads are tried again only with `careful`, which takes longer."""
    files = source.record_files

    def is_named_jpeg(record: int) -> np.ndarray:
        name = source.file_names(record, record + 1)[0] if source.file_names else ""
        return np.array(name.lower().endswith((".jpg", ".jpeg")))

    def value(stored: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with sure_reads() if careful else contextlib.nullcontext():
            example = files.parse(stored, record) if files else source.read(record)

        def was_jpeg() -> tf.Tensor:
            if files is not None:
                return tf.io.is_jpeg(stored)
            return tf.ensure_shape(tf.numpy_function(is_named_jpeg, [record], tf.bool), [])

        is_whole = tf.debugging.Assert(example["mask"] > 0, [record])
        with tf.control_dependencies([is_whole]):
            return *values_of(example["image"], source.channels, was_jpeg), example["label"]

    @tf.autograph.experimental.do_not_convert  # which takes as long as 1,000 small pictures
    def make() -> tf.data.Dataset:
        chosen = tf.data.Dataset.from_tensor_slices(ids).batch(_AT_ONCE)
        if files is not None:
            found = stored_values(files, chosen, value)
        else:
            records = chosen.unbatch().map(lambda i: (i, value("", i)), PARALLEL_CALLS)
            found = records.ignore_errors()
        return found.batch(_AT_ONCE)

    for records, values in Elements(make()):
        yield from zip(records.tolist(), zip(*values, strict=True), strict=True)
