"""A contact sheet of a config's augmentations on its own images."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures, cut_out
from vit_jax.config.sections import Data
from vit_jax.data import Source, augment, make_device_transform, order, parse_ops
from vit_jax.data.batch import decode_early, image_crops
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.ops import DeviceOp, HostOp
from vit_jax.data.preprocessing import rule_of_training

_ROWS = 4  # one training image each
_SAMPLES = 5
_MAGNITUDES = (5, 15)
_DEVICE_OPS = ("mixup(8.0)", "cutmix(1.0)", "erase(1.0)")
_CHANGES_IN_A_BAND = 16
_CELL, _GAP, _LINE, _FONT_SIZE = 112, 4, 15, 12  # pixels

Column = tuple[str, Sequence[np.ndarray]]  # heading of two lines, and one image per row


def draw_contact_sheet(d: Data, seed: int, source: Source, output: epath.PathLike) -> None:
    """Write a PNG with a row for each of four training images and a column for each augmentation.

    The first column shows the whole image, the next five draws of all of `data.ops`, as in
    training. The others show the image after the host ops of `data.ops` before `randaugment` (after
    all host ops if there is no `randaugment`): as it is; after each operation of RandAugment at
    magnitudes 5 and 15; after five draws of randaugment(2, 15); and after MixUp, CutMix and erasing
    with strong parameters. Without three channels there are no columns of RandAugment, and without
    images of one size none of MixUp, CutMix and erasing, which need it. Columns wrap into bands.

    Args:
      d, seed: of a resolved config.
      source: the training data.
      output: the PNG's path; an existing file is overwritten.

    Raises:
      InputError: `data.ops` do not suit the images, or are empty because only views have ops.
    """
    original, *changed = make_columns(d, seed, source)
    sheet = draw_bands(
        f"{d.name} {d.split}; data.ops: {d.ops}",
        [
            [original, *changed[i : i + _CHANGES_IN_A_BAND]]
            for i in range(0, len(changed), _CHANGES_IN_A_BAND)
        ],
    )
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    files.write_whole(files.absolute(output), buffer.getvalue())


def make_columns(d: Data, seed: int, source: Source) -> list[Column]:
    """The sheet's columns in order; each has one image, uint8 (h, w, c), for each of four records.

    Args:
      d, seed: of a resolved config.
      source: the training split.
    """
    size = d.image_size
    host_ops, device_ops = parse_ops(d.ops, size)
    crops = image_crops("data.ops", size, host_ops, rule_of_training(d))
    crops.check(source)
    names = [op.name for op in host_ops]
    before = host_ops[: names.index("randaugment")] if "randaugment" in names else host_ops
    records, whole, read = zip(*(_first_readable(source, i) for i in range(_ROWS)), strict=True)
    rule, resize = crops.rule, parse_ops("resize", size)[0]

    def keys_of(sample: int) -> tf.Tensor:
        return order.keys(tf.range(_ROWS, dtype=tf.int64) + _ROWS * sample, seed)

    def on_host(
        ops: Sequence[HostOp], images: Sequence[tf.Tensor], sample: int = 0
    ) -> list[np.ndarray]:
        keys = keys_of(sample)
        for i, op in enumerate(ops):
            images = [op(image, order.fold_in(keys[j], i)) for j, image in enumerate(images)]
        return [image.numpy() for image in images]

    def join(images: Sequence[np.ndarray], sample: int) -> Images:
        if rule is None:
            for image in images:
                crops.check_made(image.shape, source.channels)
            return jnp.asarray(np.stack(images))
        cut = [rule.cut(image, key) for image, key in zip(images, keys_of(sample), strict=True)]
        return Pictures(*(np.stack([one[name] for one in cut]) for name in ("image", "grid")))

    def on_device(ops: Sequence[DeviceOp]) -> Callable[..., Sequence[np.ndarray]]:
        mean, std = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)
        transform = jax.jit(make_device_transform(ops, mean, std, num_classes=d.num_classes))

        def apply(images: Sequence[np.ndarray], sample: int = 0) -> list[np.ndarray]:
            batch: dict[str, Any] = {
                "image": join(images, sample),
                "label": jnp.zeros(_ROWS, jnp.int32),
                "mask": jnp.ones(_ROWS),
                "id": jnp.asarray(records, jnp.int32),
            }
            row_keys = jax.random.split(jax.random.key(seed + sample), _ROWS)
            changed = jax.device_get(transform(batch, row_keys)["image"])
            return [np.round(image).astype(np.uint8) for image in cut_out(changed)]

        return apply

    columns: list[Column] = [("original\n", whole)]
    finish = on_device(device_ops)
    for i in range(_SAMPLES):
        columns.append((f"data.ops\ndraw {i + 1}", finish(on_host(host_ops, read, i), i)))
    originals: Sequence[np.ndarray]
    if rule is None:
        originals = on_host([*before, *resize], read)
    else:
        originals = on_device(())(on_host(before, read))
    columns.append(("before\nrandaugment", originals))
    for name in augment.OPERATIONS if source.channels == 3 else ():
        for magnitude in _MAGNITUDES:
            changed = [augment.operate(name, image, magnitude).numpy() for image in originals]
            columns.append((f"{name}\nmagnitude {magnitude}", changed))
    (randaugment,), _ = parse_ops("randaugment(2, 15)", size)
    for i in range(_SAMPLES if source.channels == 3 else 0):
        changed = on_host([randaugment], originals, i)
        columns.append((f"randaugment\n(2, 15), draw {i + 1}", changed))
    for op in _DEVICE_OPS if rule is None else ():
        columns.append((f"{op}\n", on_device(parse_ops(op, size)[1])(originals)))
    return columns


def _first_readable(source: Source, row: int) -> tuple[int, np.ndarray, tf.Tensor]:
    """The record that a row of the sheet shows, its pixels, and what host ops start from.

    Each row takes the first readable record after its quarter of the split begins.

    Raises:
      InputError: if no such record can be decoded.
    """
    for record in range(row * source.num_examples // _ROWS, source.num_examples):
        try:
            example = source.read(tf.constant(record, tf.int64))
            pixels = to_pixels(example["image"], source.channels)
        except tf.errors.OpError:
            continue
        if example["mask"] > 0:
            return record, pixels.numpy(), decode_early(source, example["image"])
    raise InputError(f"data.name={source.name!r}: no image of {source.split} can be decoded")


def draw_bands(title: str, bands: Sequence[Sequence[Column]]) -> Image.Image:
    """Draw the columns of each band side by side, and the bands one below the other."""
    font = ImageFont.load_default(_FONT_SIZE)
    step = _CELL + _GAP
    band_height = 3 * _LINE + _ROWS * step
    width = _GAP + step * max(len(band) for band in bands)
    sheet = Image.new("RGB", (width, 2 * _LINE + band_height * len(bands)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP), title, "black", font)
    for i, band in enumerate(bands):
        for j, (heading, images) in enumerate(band):
            left, top = _GAP + j * step, 2 * _LINE + i * band_height
            draw.multiline_text((left, top), heading, "black", font, spacing=1)
            for row, image in enumerate(images):
                # Small images by the nearest pixel, so that single pixels show.
                kinds = Image.Resampling
                how = kinds.LANCZOS if max(image.shape) > _CELL else kinds.NEAREST
                pixels = image[..., 0] if image.shape[-1] == 1 else image
                cell = ImageOps.contain(Image.fromarray(pixels), (_CELL, _CELL), how)
                sheet.paste(cell, (left, top + 2 * _LINE + _GAP + row * step))
    return sheet
