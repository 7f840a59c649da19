"""Files of images: formats and modes as Pillow reads them, EXIF, and what is skipped."""

import io
import logging
import os
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from at_fault import at_fault
from images import encode, pil_rgb, smooth_image, write_images

from vit_jax.base.errors import shown
from vit_jax.data import make_source, parse_ops
from vit_jax.data.host_tf import tf
from vit_jax.data.images import formats
from vit_jax.data.images.given import open_images

ORIENTATION = 0x0112


def decode(encoded, exif=True):
    """In a data set, as the pipeline does."""
    (op,), () = parse_ops("decode", (16, 16))
    one = tf.data.Dataset.from_tensors(encoded)
    return next(
        one.map(
            lambda e: op(formats.as_known_format(e, formats.Reading(exif)), None)
        ).as_numpy_iterator()
    )


def animated(file_format):
    frames = [PIL.Image.fromarray(smooth_image(seed=seed)) for seed in range(2)]
    buffer = io.BytesIO()
    frames[0].save(buffer, file_format, save_all=True, append_images=frames[1:], lossless=True)
    return buffer.getvalue()


# test_modes.py has the others.
KINDS = {
    "WebP": encode(smooth_image(), "WEBP"),
    "animated WebP": animated("WEBP"),
    "animated GIF": animated("GIF"),
    "compressed TIFF": encode(smooth_image(), "TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("encoded", KINDS.values(), ids=KINDS)
def test_formats_and_modes_agree_with_pillow(encoded):
    np.testing.assert_array_equal(decode(encoded), pil_rgb(encoded))


def oriented_exif(orientation):
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def oriented(orientation, file_format, **options):
    return encode(smooth_image(), file_format, exif=oriented_exif(orientation), **options)


@pytest.mark.parametrize(
    ("file_format", "orientation"),
    [*(("JPEG", orientation) for orientation in range(1, 9)), ("PNG", 6), ("WEBP", 5), ("TIFF", 8)],
)
def test_images_are_turned_as_exif_says(file_format, orientation):
    encoded = oriented(orientation, file_format)
    stored = PIL.Image.open(io.BytesIO(encoded))
    assert stored.getexif()[ORIENTATION] == orientation
    upright = np.asarray(PIL.ImageOps.exif_transpose(stored).convert("RGB"))
    np.testing.assert_array_equal(decode(encoded), upright)
    assert (upright.shape == (90, 60, 3)) == (orientation > 4)
    if file_format in ("JPEG", "PNG"):
        assert np.array_equal(decode(encoded, exif=False), pil_rgb(encoded))


def test_an_image_whose_exif_has_odd_values_is_turned_too():
    """A signed resolution unit, which Pillow reads, but cannot write again."""
    tags = struct.pack("<HHII", ORIENTATION, 3, 1, 6) + struct.pack("<HHIi", 0x0128, 9, 1, -1)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
    odd = encode(smooth_image(), "JPEG", exif=exif)
    np.testing.assert_array_equal(decode(odd), decode(oriented(6, "JPEG")))


def test_exif_can_be_ignored_in_a_tiff():
    assert decode(oriented(6, "TIFF"), exif=False).shape == (60, 90, 3)
    compressed = oriented(6, "TIFF", compression="tiff_lzw")
    assert decode(compressed, exif=False).shape == (60, 90, 3)
    assert decode(compressed).shape == (90, 60, 3)


def test_exif_is_found_behind_the_pixels_of_a_png():
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    end = encode(noise, "PNG")[-12:]
    upright, turned = (encode(noise, "PNG", exif=e) for e in (b"", oriented_exif(6)))
    chunk = turned[turned.index(b"eXIf") - 4 :][: len(turned) - len(upright)]
    moved = upright.removesuffix(end) + chunk + end
    assert moved.index(b"eXIf") > 1 << 17
    np.testing.assert_array_equal(decode(moved), decode(turned))
    assert decode(moved).shape == (300, 200, 3)


def test_images_that_are_too_large_for_pillow_are_named(tmp_path):
    large = encode(np.zeros((14_000, 14_000), np.uint8), "TIFF", "1", compression="group4")
    assert formats.to_known_format(large) == b""
    (tmp_path / "large.tif").write_bytes(large)
    assert "178 megapixels" in formats.why_file_unreadable(tmp_path / "large.tif")


def test_jpeg_and_png_bytes_are_passed_on_as_they_are():
    for encoded in (encode(smooth_image()), encode(smooth_image(), "PNG"), oriented(1, "JPEG")):
        assert formats.as_known_format(tf.constant(encoded)).numpy() == encoded


@pytest.mark.parametrize(
    "broken",
    [b"", b"<!DOCTYPE html><html>", encode(smooth_image(), "WEBP")[:40],
     encode(np.ones((4, 4), np.float32), "TIFF"), oriented(6, "JPEG")[:300]],
    ids=["empty", "page", "half a WebP", "32 bit", "half a JPEG"],
)  # fmt: skip
def test_what_is_no_image_cannot_be_decoded(broken):
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode(broken)


def test_modes_in_memory_are_taken_as_from_files_or_named():
    grey = np.full((8, 8), 200, np.uint8)
    alpha = PIL.Image.fromarray(grey).convert("LA").convert("La")
    deep = PIL.Image.frombytes("I;16B", (8, 8), (grey.astype(">u2") << 8).astype(">u2").tobytes())
    source = open_images([alpha, deep])
    for i in range(2):
        np.testing.assert_array_equal(decode(source.read(i)["image"].numpy())[0, 0], [200] * 3)
    for kind in (np.int32, np.float32):
        with at_fault("images[0]"):
            open_images(PIL.Image.fromarray(grey.astype(kind)))


def test_names_are_shown_in_print():
    assert shown("été/日本 [x].jpg") == "été/日本 [x].jpg"
    assert shown(os.fsdecode(b"a\xff\n.jpg")) == r"a\udcff\n.jpg"


def test_what_is_skipped_is_counted_and_named(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "vit_jax")
    for name in ("a/1.jpg", "a/2.heic", "a/3.HEIC", "b/4.png", "b/.5.jpg", "b/README",
                 "a/__MACOSX/1.jpg", "a/.cache/1.jpg", "6.jpg", "7.jpg", "8.jpg", "9.jpg",
                 "0.jpg", "__MACOSX/a/1.jpg", "a.0123.index.npz"):  # fmt: skip
        write_images(tmp_path, {name: encode(smooth_image())})
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "b/pipe.jpg")
    for split in ("train", "val"):
        source = make_source("folder", split=split, data_dir=tmp_path, image_size=(8, 8))
        assert source.class_names == ("a", "b", "empty")
    skipped, beside = (message for message in caplog.messages if ": skipped " in message)
    for what in ("2 .heic (a/", "1 .jpg that is no file (b/pipe.jpg)", "1 hidden (b/.5.jpg)",
                 "1 without extension (b/RE", "convert the others"):  # fmt: skip
        assert what in skipped
    assert "index" not in skipped
    assert "5 beside the folders of the classes (" in beside
    assert "put each into the folder of its class" in beside and "convert" not in beside
    (ignored,) = (message for message in caplog.messages if ": ignored " in message)
    assert "__MACOSX, a/.cache, a/__MACOSX" in ignored
    (empty,) = (message for message in caplog.messages if "hold no image" in message)
    assert empty.endswith("classes hold no image: empty")
