"""Every mode of every format becomes the pixels that Pillow makes of it, by each way to read it."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
from tar_files import write_tar

from vit_jax.data import image_batch, make_source, parse_ops
from vit_jax.data.images.formats import Reading
from vit_jax.data.images.given import image_files
from vit_jax.data.pipeline import host_eval_batches
from vit_jax.transfer.pretrained import Spec, load_image

pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # Pillow's

HEIGHT, WIDTH = 12, 16
Y, X = np.mgrid[:HEIGHT, :WIDTH]
RGB = np.stack([16 * X, 20 * Y, 8 * (X + Y)], -1).astype(np.uint8)
ALPHA = (17 * X).astype(np.uint8)
GREY = (8 * (X + Y) + X).astype(np.uint8)
GREY_16 = GREY * np.uint16(257) + 3
RGB_16 = RGB * np.uint16(257) + np.uint16(3)
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Pillow compares the transparent value of these with values that it has rescaled.
BY_VALUE = {f"PNG grey {depth} tRNS": GREY_16 >> (16 - depth) for depth in (1, 2, 4, 16)}
BY_VALUE["PNG RGB 16 tRNS"] = RGB_16


def png(depth, colour_type, values, **chunks):
    """A PNG of `values` (h, w) or (h, w, c), with all depths that Pillow does not write."""
    rows = values.reshape(len(values), -1)
    if depth == 16:
        lines = [row.astype(">u2").tobytes() for row in rows]
    else:
        bits = (rows[..., None] >> np.arange(depth)[::-1] & 1).astype(np.uint8)
        lines = [np.packbits(row).tobytes() for row in bits]
    header = struct.pack(">IIBBBBB", values.shape[1], len(values), depth, colour_type, 0, 0, 0)
    content = {
        "IHDR": header,
        **chunks,
        "IDAT": zlib.compress(b"\0" + b"\0".join(lines)),
        "IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind.encode() + data
        + struct.pack(">I", zlib.crc32(kind.encode() + data))
        for kind, data in content.items()
    )  # fmt: skip


def saved(image, file_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def without_adobe(jpeg):
    at = jpeg.index(b"\xff\xee")
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4]) :]


def as_ycck(jpeg):
    at = jpeg.index(b"Adobe") + 11
    return jpeg[:at] + b"\2" + jpeg[at + 1 :]


def transparent(*value):
    return struct.pack(f">{len(value)}H", *map(int, value))


def make_kinds():
    rgba = PIL.Image.fromarray(np.dstack([RGB, ALPHA]))
    cmyk = PIL.Image.frombytes("CMYK", rgba.size, rgba.tobytes())
    deep = PIL.Image.fromarray(GREY_16)
    images = {m: rgba.convert(m) for m in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "YCbCr")}
    images |= {"CMYK": cmyk, "I;16": deep}
    images["I;16B"] = PIL.Image.frombytes("I;16B", deep.size, GREY_16.astype(">u2").tobytes())
    kinds = {
        f"{file_format} {mode}": saved(images[mode], file_format, **options)
        for file_format, modes, options in (
            ("PNG", "1 L LA P RGB RGBA I;16", {}),
            ("JPEG", "L RGB", {}),
            ("TIFF", "1 L LA P PA RGB RGBA CMYK YCbCr I;16 I;16B", {}),
            ("WEBP", "L RGB RGBA", {"lossless": True}),
            ("BMP", "1 L P RGB RGBA", {}),
            ("GIF", "1 L P RGB RGBA", {}),
        )
        for mode in modes.split()
    }
    adobe = saved(cmyk, "JPEG", quality=95)
    kinds |= {"JPEG CMYK": adobe, "JPEG CMYK without Adobe": without_adobe(adobe)}
    kinds |= {
        "JPEG YCCK": as_ycck(adobe),
        "GIF transparent": saved(images["P"], "GIF", transparency=5),
    }
    kinds["JPEG of RGB"] = saved(images["RGB"], "JPEG", keep_rgb=True)
    for depth in (1, 2, 4, 8, 16):
        values = GREY_16 >> (16 - depth)
        kinds[f"PNG grey {depth}"] = png(depth, 0, values)
        kinds[f"PNG grey {depth} tRNS"] = png(depth, 0, values, tRNS=transparent(values[5, 5]))
        if depth < 16:
            palette = np.random.default_rng(depth).integers(0, 256, (1 << depth, 4), np.uint8)
            colours, alphas = palette[:, :3].tobytes(), palette[:, 3].tobytes()
            kinds[f"PNG palette {depth}"] = png(depth, 3, values, PLTE=colours)
            kinds[f"PNG palette {depth} tRNS"] = png(depth, 3, values, PLTE=colours, tRNS=alphas)
    alpha_16 = ALPHA * np.uint16(257)
    kinds["PNG RGB tRNS"] = png(8, 2, RGB, tRNS=transparent(*RGB[5, 5]))
    kinds["PNG RGB 16"] = png(16, 2, RGB_16)
    kinds["PNG RGB 16 tRNS"] = png(16, 2, RGB_16, tRNS=transparent(*RGB_16[5, 5]))
    kinds["PNG RGBA 16"] = png(16, 6, np.dstack([RGB_16, alpha_16]))
    kinds["PNG LA 16"] = png(16, 4, np.dstack([GREY_16, alpha_16]))
    return kinds


KINDS = make_kinds()
if int(PIL.__version__.partition(".")[0]) < 13:  # reads four bytes a pixel where there are three
    del KINDS["TIFF YCbCr"]


def by_pillow(kind, channels):
    """Pillow's conversion, but for the high byte of 16-bit grey, and for `BY_VALUE`."""
    image = PIL.Image.open(io.BytesIO(KINDS[kind]))
    image.load()
    if image.mode.startswith("I;16"):
        image = PIL.Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    pixels = np.array(image.convert(MODES[channels])).reshape(HEIGHT, WIDTH, channels)
    if channels == 4 and kind in BY_VALUE:
        values = BY_VALUE[kind].reshape(HEIGHT, WIDTH, -1)
        pixels[..., 3] = np.where((values == values[5, 5]).all(-1), 0, 255)
    return pixels


def by_batches(source):
    spec = image_batch(
        len(KINDS), (HEIGHT, WIDTH), parse_ops("decode|central_crop", (HEIGHT, WIDTH))[0]
    )
    (batch,) = host_eval_batches(source, spec, rows=np.arange(len(KINDS)))
    assert batch["mask"].all()
    return batch["image"]


def by_files(folder, channels):
    paths = [str(folder / f"{i:02}.png") for i in range(len(KINDS))]
    return by_batches(image_files(paths, Reading(channels=channels)))


def by_tar(folder, channels):
    where = {"data_dir": folder / "tar", "image_size": (HEIGHT, WIDTH)}
    return by_batches(make_source("tar", split="train", **where, channels=channels))


def by_load_image(folder, channels):
    zeros, ones = (0.0,) * channels, (1.0,) * channels
    spec = Spec(None, "antialiased", zeros, ones, channels=channels)
    images = [load_image(folder / f"{i:02}.png", spec) for i in range(len(KINDS))]
    return np.rint(255 * np.stack(images)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("modes")
    files = {f"{i:02}.png": encoded for i, encoded in enumerate(KINDS.values())}
    for name, encoded in files.items():
        (root / name).write_bytes(encoded)
    write_tar(root / "tar/train-0000.tar", [*files.items()])
    return root


@pytest.mark.parametrize("route", [by_files, by_tar, by_load_image])
@pytest.mark.parametrize("channels", MODES)
def test_pixels_are_those_of_pillow(folder, channels, route):
    """In grey one level may differ: decoders round otherwise."""
    for kind, found in zip(KINDS, route(folder, channels), strict=True):
        allowed = 1 if channels == 1 else 0
        expected = by_pillow(kind, channels).astype(int)
        np.testing.assert_allclose(found.astype(int), expected, rtol=0, atol=allowed, err_msg=kind)
