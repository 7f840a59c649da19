"""Images of 16 bits whose values use fewer, as a microscope's with 12."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import is_deep_png
from vit_jax.data.order import spread

_SAMPLE = 8  # images of a source
_FEWER = (8, 10, 12, 14)  # bits


def unused_bits(images: Iterable[bytes]) -> tuple[str, str] | None:
    """The fault of the values of `images`, JPEG, PNG or BMP bytes, and the remedy.

    None unless some have 16 bits, and none of these has a value of more than 14.
    """
    largest = max(map(_largest, filter(is_deep_png, images)), default=0)
    bits = next((bits for bits in _FEWER if largest >> bits == 0), None)
    if not largest or bits is None:
        return None
    found = f"16-bit images have values up to {largest:,} of 65,535, so they read nearly black"
    return found, f"set --config.data.pixel_range=0,{(1 << bits) - 1} for {bits} bits"


def unused_bits_of(source: Source) -> tuple[str, str] | None:
    """`unused_bits` of some images of `source`, evenly spaced."""

    def stored() -> Iterator[bytes]:
        for record in spread(_SAMPLE, source.num_examples):
            with contextlib.suppress(tf.errors.OpError, UnicodeDecodeError):  # of broken records
                yield source.read(tf.constant(record, tf.int64))["image"].numpy()

    return unused_bits(stored()) if source.encoded else None


def _largest(image: bytes) -> int:
    """The largest value of a PNG but for its alpha; 0 of a broken one."""
    with contextlib.suppress(tf.errors.OpError):
        values = tf.io.decode_png(image, dtype=tf.uint16).numpy()
        return int(values[..., : values.shape[-1] - 1 | 1].max())
    return 0
