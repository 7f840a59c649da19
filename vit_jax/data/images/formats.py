"""Formats of image files: which are read, how they become pixels, and why one cannot.

TensorFlow decodes JPEG and PNG files, of JPEGs also a window only, at their size or at a half, a
quarter or an eighth. Pillow decodes the rest: WebP, BMP, the first frame of a GIF or TIFF, and
images that their EXIF orientation turns. These become BMP bytes, or PNG bytes if they have alpha,
so that later stages know three formats only.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
import warnings
from collections.abc import Callable

import numpy as np
from etils import epy

from vit_jax.data.host_tf import tf

with epy.lazy_imports():
    import PIL.Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_PNG = b"\x89PNG\r\n\x1a\n"
# EXIF data begin so in a JPEG, and in a PNG. In a JPEG they are looked for near the beginning:
# behind it a thumbnail might hold these bytes, at the cost of time. A PNG has them anywhere.
_EXIF = rb"Exif\x00\x00", rb"eXIf"
_EXIF_WITHIN = 1 << 16
_ORIENTATION = 0x0112  # the tag's number
# Orientation -> how Pillow undoes it, by number: Image.Transpose.FLIP_LEFT_RIGHT and so on. Its
# `exif_transpose` writes all tags anew, which fails for the odd tags of some cameras.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
_32_BITS = ("I", "F")  # Pillow's modes

_RATIOS = (1, 2, 4, 8)  # at which libjpeg decodes, from the low frequencies of 8 x 8 pixels
_DCT_METHOD = "INTEGER_ACCURATE"  # as PIL; TensorFlow's default is off by up to 10 and no faster
_MARGIN = 2  # extra columns decoded on each side; without them chroma differs at the edges
_SPARE = 2  # as `reducing_gap` of Pillow


def read_image(path: tf.Tensor, exif: bool = True) -> tf.Tensor:
    """The image in the file `path` as JPEG, PNG or BMP bytes; see `as_known_format`."""
    return as_known_format(tf.io.read_file(path), exif)


def as_known_format(encoded: tf.Tensor, exif: bool = True) -> tf.Tensor:
    """`encoded` bytes of an image, a scalar string, as JPEG, PNG or BMP bytes.

    `exif` turns the image as its EXIF orientation says. Bytes that hold no image become empty,
    which no decoder takes.
    """
    is_png = tf.strings.substr(encoded, 0, len(_PNG)) == _PNG
    plain = tf.io.is_jpeg(encoded) | is_png
    if exif:
        within = tf.where(is_png, tf.int32.max, _EXIF_WITHIN)
        rest = beginning = tf.strings.substr(encoded, 0, within)
        for mark in _EXIF:  # a search for constant text takes a sixth of the time of a match
            rest = tf.strings.regex_replace(rest, mark, b"", replace_global=False)
        plain &= tf.strings.length(rest) == tf.strings.length(beginning)

    def convert(encoded):
        # Bytes, or an array of one object; an array of bytes would lose NULs at its end.
        encoded = encoded if isinstance(encoded, bytes) else encoded.item()
        return np.array(to_known_format(encoded, exif), object)

    converted = tf.cond(
        plain,
        lambda: encoded,
        lambda: tf.numpy_function(convert, [encoded], tf.string, stateful=False),
    )
    return tf.ensure_shape(converted, [])


def to_known_format(encoded: bytes, exif: bool = True) -> bytes:
    """As `as_known_format`, of bytes and by Pillow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of large images
            image = PIL.Image.open(io.BytesIO(encoded))
            if image.format in ("JPEG", "PNG") and _turn_of(image, exif) is None:
                return encoded
            return as_file(image, exif)
    except Exception:  # Pillow's decoders raise what they like of broken files
        return b""


def as_file(image: PIL.Image.Image, exif: bool = True) -> bytes:
    """An image as BMP bytes, or PNG bytes if it has alpha; `exif` as in `as_known_format`.

    Raises: as `to_8_bit`, or whatever Pillow raises of a broken file.
    """
    turn, pixels = _turn_of(image, exif), to_8_bit(image)
    if turn is not None:
        pixels = pixels.transpose(PIL.Image.Transpose(turn))
    buffer = io.BytesIO()
    # A BMP takes a tenth of the time of an uncompressed PNG.
    pixels.save(buffer, "BMP" if pixels.mode == "RGB" else "PNG", compress_level=0)
    return buffer.getvalue()


def _turn_of(image: PIL.Image.Image, exif: bool) -> int | None:
    """How to undo the EXIF orientation; None: there is none, or Pillow does on loading."""
    if image.format == "TIFF":  # which Pillow turns when it loads them
        if not exif:
            image.getexif()[_ORIENTATION] = 1
        return None
    return _TURNS.get(image.getexif().get(_ORIENTATION, 1)) if exif else None


def to_8_bit(image: PIL.Image.Image) -> PIL.Image.Image:
    """The first frame in RGB or RGBA of 8 bits, as Pillow converts it.

    Of 16-bit grey the high byte is taken, as of a PNG's 16-bit colours; Pillow would clip at 255.

    Raises:
      ValueError: pixels of 32 bits, whose range nothing states.
    """
    if image.mode in _32_BITS:
        raise ValueError(f"pixels of mode {image.mode}, whose range is not stated")
    if image.mode.startswith("I;16"):
        high_bytes = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        image = PIL.Image.fromarray(high_bytes)
    if image.mode == "La":  # Pillow converts it to this mode only
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def why_file_unreadable(path: str | os.PathLike) -> str:
    """The reason why an image file cannot be read, and the remedy; "" if Pillow can."""
    try:
        return why_unreadable(pathlib.Path(path).read_bytes())
    except FileNotFoundError:
        return "there is no such file, or it is a link that leads to no file; restore it"
    except OSError as e:
        return f"{e.strerror}; check your rights"


def why_unreadable(encoded: bytes) -> str:
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
            image.load()
    except PIL.Image.DecompressionBombError:
        return "it has more than 178 megapixels, which Pillow refuses; save it smaller"
    except Exception:  # Pillow's decoders raise what they like of broken files
        if mode is None:
            return "it holds no image; needed: JPEG, PNG, WebP, BMP, GIF or TIFF"
        return "it is damaged; save it again"
    if mode in _32_BITS:
        return "its pixels have 32 bits, and nothing states their range; save it with 8 or 16 bits"
    return ""


def to_pixels(image: tf.Tensor, channels: int = 3) -> tf.Tensor:
    """Decode JPEG, PNG or BMP bytes to uint8 (h, w, channels); pixels are returned unchanged.

    `channels` is 1, 3 or 4; a JPEG has no fourth channel, so decoding it to 4 fails. A BMP has 3
    channels, as made by `as_known_format`.
    """
    if image.dtype != tf.string:
        return image

    def from_jpeg():
        if channels == 4:
            return tf.io.decode_png("", channels=4)  # fails when it is called
        return decode_jpeg(image, channels)

    def from_others():
        return tf.cond(
            tf.strings.substr(image, 0, 2) == b"BM",
            lambda: with_channels(tf.io.decode_bmp(image, channels=3), channels),
            lambda: tf.io.decode_png(image, channels=channels),
        )

    return tf.cond(tf.io.is_jpeg(image), from_jpeg, from_others)


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
