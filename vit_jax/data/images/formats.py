"""Formats of image files: which are read, how they become pixels, and why one cannot.

TensorFlow decodes JPEG and PNG files, of JPEGs also a window only, at their size or at a half, a
quarter or an eighth. Pillow decodes the rest: WebP, BMP, the first frame of a GIF or TIFF, CMYK
JPEGs, and images that their EXIF orientation turns. These become BMP bytes, or PNG bytes if they
have alpha or 16-bit grey, so that later stages know three formats only.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np
from etils import epy

from vit_jax.data.host_tf import tf
from vit_jax.data.retries import are_sure, read_in_python, retried

with epy.lazy_imports():
    import PIL.Image
    import PIL.ImageFile

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_PNG = b"\x89PNG\r\n\x1a\n"
_DEPTH_AT = 24  # the byte of a PNG that has the bits of a value
# EXIF data begin so in a JPEG, and in a PNG. In a JPEG they are looked for near the beginning:
# behind it a thumbnail might hold these bytes, at the cost of time. A PNG has them anywhere.
_EXIF = rb"Exif\x00\x00", rb"eXIf"
_EXIF_WITHIN = 1 << 16
_ORIENTATION = 0x0112  # the tag's number
# Orientation -> how Pillow undoes it, by number: Image.Transpose.FLIP_LEFT_RIGHT and so on. Its
# `exif_transpose` writes all tags anew, which fails for the odd tags of some cameras.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
_32_BITS = ("I", "F")  # Pillow's modes
_SET_RANGE = "set --config.data.pixel_range=LOW,HIGH, or save it with 8 or 16 bits"

_RATIOS = (1, 2, 4, 8)  # at which libjpeg decodes, from the low frequencies of 8 x 8 pixels
_DCT_METHOD = "INTEGER_ACCURATE"  # as PIL; TensorFlow's default is off by up to 10 and no faster
_MARGIN = 2  # extra columns decoded on each side; without them chroma differs at the edges
_SPARE = 2  # as `reducing_gap` of Pillow


class Reading(NamedTuple):
    """How the bytes of an image file become pixels.

    exif: whether the image is turned as its EXIF orientation says.
    channels: of the pixels that `to_pixels` will be asked for.
    pixel_range: of values of 16 or 32 bits: those that become 0 and 255; None: the high byte of 16
      bits is taken, and 32 bits are refused.
    decoding: see `data.decoding`.
    """

    exif: bool = True
    channels: int = 3
    pixel_range: tuple[float, ...] | None = None
    decoding: int = 2

    def takes(self, image: PIL.Image.Image, encoded: bytes) -> bool:
        """Whether TensorFlow decodes the bytes of `image` as asked, if they need no turning."""
        if image.format == "PNG":
            shallow, opaque = encoded[_DEPTH_AT] < 8, "transparency" not in image.info
            wrong_alpha = shallow and opaque and self.channels == 4 and self.decoding > 1
            return not (wrong_alpha or (is_deep_png(encoded) and self.pixel_range))
        return image.format == "JPEG" and (image.mode != "CMYK" or self.decoding < 2)


USUAL = Reading()


def is_deep_png(encoded: bytes) -> bool:
    """Whether the values of a PNG have 16 bits; False for other formats."""
    return encoded.startswith(_PNG) and encoded[_DEPTH_AT : _DEPTH_AT + 1] == b"\x10"


def read_image(path: tf.Tensor, reading: Reading, missing: Container[bytes] = ()) -> tf.Tensor:
    """The image in the file `path` as JPEG, PNG or BMP bytes; see `as_known_format`.

    missing: paths without a file from the start, for which nobody waits.
    """

    def read(path: bytes | np.ndarray) -> np.ndarray:
        path = _bytes_of(path)
        file = pathlib.Path(os.fsdecode(path))
        return np.array(
            file.read_bytes() if path in missing else retried(file.read_bytes, file), object
        )

    encoded = read_in_python(read, path) if are_sure() else tf.io.read_file(path)
    return as_known_format(tf.ensure_shape(encoded, []), reading)


def _bytes_of(scalar: bytes | np.ndarray) -> bytes:
    """What TensorFlow hands to Python: bytes, or an array of one object."""
    return scalar if isinstance(scalar, bytes) else scalar.item()


def as_known_format(encoded: tf.Tensor, reading: Reading = USUAL) -> tf.Tensor:
    """`encoded` bytes of an image, a scalar string, as JPEG, PNG or BMP bytes.

    Bytes that hold no image become empty, which no decoder takes.
    """
    is_png = tf.strings.substr(encoded, 0, len(_PNG)) == _PNG
    is_jpeg = tf.io.is_jpeg(encoded)
    plain = is_jpeg | is_png
    # What `Reading.takes` may refuse.
    depths = [b"\1", b"\2", b"\4"] * (reading.channels == 4) + [b"\x10"] * bool(reading.pixel_range)
    if depths:
        beginning = tf.strings.join(
            [tf.strings.substr(encoded, 0, _DEPTH_AT + 1), bytes(_DEPTH_AT + 1)]
        )
        plain &= ~(is_png & tf.reduce_any(tf.strings.substr(beginning, _DEPTH_AT, 1) == depths))
    if reading.decoding > 1:
        plain &= tf.cond(
            is_jpeg, lambda: tf.image.extract_jpeg_shape(encoded)[2] != 4, lambda: True
        )
    if reading.exif:
        within = tf.where(is_png, tf.int32.max, _EXIF_WITHIN)
        rest = beginning = tf.strings.substr(encoded, 0, within)
        for mark in _EXIF:  # a search for constant text takes a sixth of the time of a match
            rest = tf.strings.regex_replace(rest, mark, b"", replace_global=False)
        plain &= tf.strings.length(rest) == tf.strings.length(beginning)

    def convert(encoded: bytes | np.ndarray) -> np.ndarray:
        # An array of bytes would lose NULs at its end.
        return np.array(to_known_format(_bytes_of(encoded), reading), object)

    converted = tf.cond(
        plain,
        lambda: encoded,
        lambda: tf.numpy_function(convert, [encoded], tf.string, stateful=False),
    )
    return tf.ensure_shape(converted, [])


def to_known_format(encoded: bytes, reading: Reading = USUAL) -> bytes:
    """As `as_known_format`, of bytes and by Pillow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of large images
            image = PIL.Image.open(io.BytesIO(encoded))
            if reading.takes(image, encoded) and _turn_of(image, reading.exif) is None:
                return encoded
            return as_file(image, reading)
    except Exception:  # Pillow's decoders raise what they like of broken files
        return b""


def as_file(image: PIL.Image.Image, reading: Reading) -> bytes:
    """An image as BMP bytes, or PNG bytes if it has alpha or 16-bit grey.

    Raises: as `to_known_mode`, or whatever Pillow raises of a broken file.
    """
    if image.format == "TIFF" and not reading.exif:
        image.getexif()[_ORIENTATION] = 1  # Pillow turns it when it loads it
    pixels = to_known_mode(image, reading)  # first: looking for a PNG's EXIF data loads its pixels
    if (turn := _turn_of(image, reading.exif)) is not None:
        pixels = pixels.transpose(PIL.Image.Transpose(turn))
    buffer = io.BytesIO()
    # A BMP takes a tenth of the time of an uncompressed PNG.
    pixels.save(buffer, "BMP" if pixels.mode == "RGB" else "PNG", compress_level=0)
    return buffer.getvalue()


def _turn_of(image: PIL.Image.Image, exif: bool) -> int | None:
    """How to undo the EXIF orientation; None: there is none, or Pillow does on loading."""
    if image.format == "TIFF" or not exif:
        return None
    return _TURNS.get(image.getexif().get(_ORIENTATION, 1))


class RangeError(ValueError):
    """The range of an image's values is unknown, or cannot be scaled; the text has the remedy."""


class Turn(NamedTuple):
    """How an image is turned by its EXIF orientation.

    transpose: the number of Pillow's Transpose; None: it stays as it is stored.
    swaps: whether its sides swap.
    size: (height, width) afterwards.
    """

    transpose: int | None
    swaps: bool
    size: tuple[int, int]


def turn_of(encoded: bytes) -> Turn | None:
    """How the image in `encoded` is turned; None if nothing states its orientation."""
    image = PIL.Image.open(io.BytesIO(encoded))
    if (orientation := image.getexif().get(_ORIENTATION)) is None:
        return None
    swaps, as_turned = orientation in (5, 6, 7, 8), image.format == "TIFF"  # by Pillow
    size = image.size if swaps and not as_turned else image.size[::-1]
    return Turn(_TURNS.get(orientation), swaps, size)


def to_known_mode(image: PIL.Image.Image, reading: Reading) -> PIL.Image.Image:
    """The first frame in RGB or RGBA of 8 bits, as Pillow converts it, or in grey of 16 bits.

    Without a `pixel_range` grey keeps 16 bits; decoders take the high byte.

    Raises: RangeError, without a range for 32 bits, or with one for the colours of a TIFF.
    """
    if reading.pixel_range is not None and (values := _deep_values(image)) is not None:
        image = PIL.Image.fromarray(_scaled(values, *reading.pixel_range))
    if image.mode in _32_BITS:
        raise RangeError(f"its pixels have 32 bits, and nothing states their range; {_SET_RANGE}")
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint16)  # in this machine's order
        return PIL.Image.fromarray(grey if reading.decoding > 1 else (grey >> 8).astype(np.uint8))
    if image.mode == "La":  # Pillow converts it to this mode only
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _deep_values(image: PIL.Image.Image) -> np.ndarray | None:
    """The values of more than 8 bits, (h, w) or (h, w, channels); None if an image has none."""
    if image.mode in _32_BITS or image.mode.startswith("I;16"):
        return np.asarray(image)
    if not isinstance(image, PIL.ImageFile.ImageFile) or ";16" not in str(image.tile):
        return None
    # Pillow gives the high byte of colours only.
    if image.format != "PNG" or image.fp is None:
        raise RangeError("data.pixel_range takes colours of 16 bits from PNGs only; save it as one")
    image.fp.seek(0)
    return tf.io.decode_png(image.fp.read(), dtype=tf.uint16).numpy()


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """uint8: `low` and less become 0, `high` and more 255; alpha, the high byte."""
    shares = np.nan_to_num((values - np.float64(low)) / (high - low))
    pixels = np.rint(255 * shares.clip(0, 1)).astype(np.uint8)
    if values.shape[2:] in ((2,), (4,)):
        pixels[..., -1] = values[..., -1] >> 8
    return pixels


def why_file_unreadable(path: str | os.PathLike, reading: Reading = USUAL) -> str:
    """The reason why an image file cannot be read, and the remedy; "" if Pillow can."""
    try:
        return why_unreadable(pathlib.Path(path).read_bytes(), reading)
    except FileNotFoundError:
        return "there is no such file, or it is a link that leads to no file; restore it"
    except OSError as e:
        return f"{e.strerror}; check your rights"


def why_unreadable(encoded: bytes, reading: Reading = USUAL) -> str:
    """The reason why `encoded` bytes cannot be decoded, and the remedy; "" if Pillow can."""
    if not encoded:
        return "it is empty; copy it again"
    if re.match(rb"\s*<(!doctype html|html)", encoded, re.IGNORECASE):
        return "it is an HTML page; download the image itself"
    mode = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(encoded))
            mode = image.mode
            to_known_mode(image, reading).load()
    except RangeError as e:
        return str(e)
    except PIL.Image.DecompressionBombError:
        return "it has more than 178 megapixels, which Pillow refuses; save it smaller"
    except Exception:  # Pillow's decoders raise what they like of broken files
        if mode is None:
            return "it holds no image; needed: JPEG, PNG, WebP, BMP, GIF or TIFF"
        return "it is damaged; save it again"
    return ""


def to_pixels(image: tf.Tensor, channels: int = 3) -> tf.Tensor:
    """Decode JPEG, PNG or BMP bytes to uint8 (h, w, channels); pixels are returned unchanged.

    `channels` is 1, 3 or 4; a JPEG is opaque. A BMP has 3 channels, as made by `as_known_format`.
    """
    if image.dtype != tf.string:
        return image

    def from_others() -> tf.Tensor:
        return tf.cond(
            tf.strings.substr(image, 0, 2) == b"BM",
            lambda: with_channels(tf.io.decode_bmp(image, channels=3), channels),
            lambda: tf.io.decode_png(image, channels=channels),
        )

    return tf.cond(
        tf.io.is_jpeg(image),
        lambda: with_channels(decode_jpeg(image, min(channels, 3)), channels),
        from_others,
    )


def with_channels(image: tf.Tensor, channels: int) -> tf.Tensor:
    """uint8 pixels (..., 3) as grey (..., 1) or opaque (..., 4), or grey as (..., channels).

    Grey is 0.299 R + 0.587 G + 0.114 B, as Pillow and JPEG have it (ITU-R BT.601).
    """
    found = image.shape[-1]
    if found == channels:
        return image
    if found == 1:
        return tf.repeat(image, channels, axis=-1)
    if channels == 4:
        return tf.concat([image, tf.fill(tf.shape(image[..., :1]), np.uint8(255))], -1)
    grey = tf.tensordot(tf.cast(image, tf.float32), [0.299, 0.587, 0.114], 1)
    return tf.saturate_cast(tf.round(grey), tf.uint8)[..., None]


def decode_jpeg(encoded: tf.Tensor, channels: int = 3, ratio: int = 1) -> tf.Tensor:
    """JPEG bytes of (h, w) pixels -> uint8 (ceil(h / ratio), ceil(w / ratio), channels).

    With a `ratio` of 2, 4 or 8 this costs less, and nearly equals the mean of every `ratio` x
    `ratio` pixels.
    """
    return tf.io.decode_jpeg(encoded, channels=channels, ratio=ratio, dct_method=_DCT_METHOD)


def decode_window(encoded: tf.Tensor, shape: tf.Tensor, window: tuple, ratio: int = 1) -> tf.Tensor:
    """The pixels of a window of a JPEG, uint8 (height, width, 3); decodes only the window.

    Args:
      encoded: JPEG bytes.
      shape: (h, w, channels) of the image.
      window: (top, left, height, width) in the image's own pixels.
      ratio: as of `decode_jpeg`; the result is the smallest window of the smaller image that covers
        `window`, so it shows up to `ratio` - 1 more pixels of the image on each side.
    """
    top, left, height, width = window
    if ratio > 1:
        bottom, right = -(-(top + height) // ratio), -(-(left + width) // ratio)
        top, left = top // ratio, left // ratio
        height, width = bottom - top, right - left
    first = tf.maximum(left - _MARGIN, 0)
    last = tf.minimum(left + width + _MARGIN, -(-shape[1] // ratio))
    wider = tf.image.decode_and_crop_jpeg(
        encoded, [top, first, height, last - first], 3, ratio, dct_method=_DCT_METHOD
    )
    return wider[:, left - first : left - first + width]


def scaled_for(
    size: tuple[int, int], sides: tuple, decoded: Callable[[int], tf.Tensor]
) -> tf.Tensor:
    """decoded(ratio) at the largest ratio that leaves `sides` (h, w) at least twice `size`.

    At twice its size or more, an image resized to `size` shows little trace of the scaling.
    """
    height, width = (_SPARE * side for side in size)
    fits = [(sides[0] // ratio >= height) & (sides[1] // ratio >= width) for ratio in _RATIOS[1:]]
    index = tf.reduce_sum(tf.cast(tf.stack(fits), tf.int32))
    return tf.switch_case(index, [lambda ratio=ratio: decoded(ratio) for ratio in _RATIOS])
