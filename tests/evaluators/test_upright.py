"""Targets of images that EXIF turns: which are turned too, and which are counted."""

import types

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from vit_jax.data import keep_subset, make_source
from vit_jax.evaluators.upright import Upright

TALL, WIDE = (6, 4), (4, 6)  # (height, width)


def write(path, pixels, orientation=None):
    exif = PIL.Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels).save(path, exif=exif)


def values(shape):
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


def upright(folder, stored, orientation, target, file, suffix=".png", exif=True):
    """The target of an image of shape `stored`, and whether it is counted as unsure."""
    turning = upright_of(folder, stored, orientation, suffix, exif)
    found = turning(target, file, "split", 0)
    return found, bool(turning._unsure)


def upright_of(folder, stored, orientation, suffix=".png", exif=True):
    write(folder / "images" / f"picture{suffix}", values((*stored, 3)), orientation)
    source = make_source("unlabelled", split="all", data_dir=folder / "images", image_size=(4, 4))
    settings = types.SimpleNamespace(data=types.SimpleNamespace(exif=exif))
    inputs = types.SimpleNamespace(settings=settings, sources={"split": keep_subset(source, "1")})
    return Upright(inputs)


def by_pillow(target, orientation):
    image = PIL.Image.fromarray(target)
    image.getexif()[0x0112] = orientation
    return np.asarray(PIL.ImageOps.exif_transpose(image))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_targets_of_stored_pixels_are_turned_where_their_shape_shows_it(
    tmp_path, orientation, suffix
):
    target = values(WIDE)
    found, unsure = upright(tmp_path, WIDE, orientation, target, tmp_path / "t.npy", suffix)
    expected = by_pillow(target, orientation) if orientation > 4 else target
    np.testing.assert_array_equal(found, expected)
    assert unsure == (orientation in (2, 3, 4))


@pytest.mark.parametrize(
    ("stored", "orientation", "shape", "turned", "unsure"),
    [(WIDE, 6, TALL, False, False),  # upright already
     (WIDE, 6, (2, 3), True, False),  # smaller than the image
     ((4, 4), 6, (4, 4), False, True), (WIDE, 6, (4, 4), False, True),
     (WIDE, None, TALL, False, False), (WIDE, 77, TALL, False, False)],
)  # fmt: skip
def test_shapes_decide(tmp_path, stored, orientation, shape, turned, unsure):
    target = values(shape)
    found = upright(tmp_path, stored, orientation, target, tmp_path / "t.npy")
    expected = by_pillow(target, orientation) if turned else target
    np.testing.assert_array_equal(found[0], expected)
    assert found[1] == unsure


@pytest.mark.parametrize(("orientation", "shape"), [(6, TALL), (6, WIDE), (3, TALL), (None, TALL)])
def test_upright_targets_beside_stored_pixels_are_counted(tmp_path, orientation, shape):
    target = values(shape)
    turning = upright_of(tmp_path, WIDE, orientation, exif=False)
    found = turning(target, tmp_path / "t.npy", "split", 0)
    np.testing.assert_array_equal(found, target)
    assert len(turning._upright) == ((orientation, shape) == (6, TALL))


@pytest.mark.parametrize(("own", "of_image"), [(3, 6), (6, 3), (1, 6), (8, None)])
def test_a_target_follows_its_own_orientation(tmp_path, own, of_image):
    target = values(WIDE)
    write(tmp_path / "target.png", target, own)
    found, unsure = upright(tmp_path, WIDE, of_image, target, tmp_path / "target.png")
    np.testing.assert_array_equal(found, by_pillow(target, own))
    assert not unsure


def test_nothing_is_turned_where_images_are_not(tmp_path):
    found, _ = upright(tmp_path, WIDE, 6, values(WIDE), tmp_path / "t.npy", exif=False)
    np.testing.assert_array_equal(found, values(WIDE))
