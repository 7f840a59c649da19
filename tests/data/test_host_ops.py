"""Host ops against NumPy and PIL."""

import functools
from unittest import mock

import numpy as np
import PIL.Image
import pytest
from images import encode, pil_rgb, smooth_image

from vit_jax.data import host_ops, parse_ops
from vit_jax.data.host_tf import tf
from vit_jax.data.images import formats
from vit_jax.data.order import fold_in


@functools.cache
def traced(string, shape, dtype):
    """The op as tf.data runs it; many calls are cheaper than one by one."""
    (op,), () = parse_ops(string, (16, 16))
    signature = [tf.TensorSpec(shape, dtype), tf.TensorSpec([2], tf.int64)]
    return tf.function(lambda image, key: op(image, key), signature, autograph=False)


def apply_at(string, image, positions):
    """What `apply` gives at each of many positions."""
    image = tf.constant(image)
    op = traced(string, (None, None, 3) if image.shape.rank else (), image.dtype)
    return [op(image, [0, position]).numpy() for position in positions]


def apply(string, image, position=0, image_size=(16, 16)):
    (op,), () = parse_ops(string, image_size)
    return op(tf.constant(image), tf.constant([0, position], tf.int64)).numpy()


ENCODED = {
    "RGB JPEG": encode(smooth_image()),
    "progressive JPEG": encode(smooth_image(), progressive=True),
    "grey JPEG": encode(smooth_image(), mode="L"),
    "CMYK JPEG": encode(smooth_image(), mode="CMYK", quality=95),
    "RGB PNG": encode(smooth_image(), "PNG"),
    "grey PNG": encode(smooth_image(), "PNG", mode="L"),
    "palette PNG": encode(smooth_image(), "PNG", mode="P"),
    "RGBA PNG": encode(smooth_image(), "PNG", mode="RGBA"),
    "grey and alpha PNG": encode(smooth_image(), "PNG", mode="LA"),
}


@pytest.mark.parametrize("encoded", ENCODED.values(), ids=ENCODED)
def test_decode_agrees_with_pil(encoded):
    image = apply("decode", encoded)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, pil_rgb(encoded))


def test_decode_leaves_pixels_alone():
    np.testing.assert_array_equal(apply("decode", smooth_image()), smooth_image())


@pytest.mark.parametrize("encoded", ENCODED.values(), ids=ENCODED)
def test_fused_inception_crop_equals_decoding_first(encoded):
    fused = apply_at("inception_crop", encoded, range(50))
    apart = apply_at("inception_crop", apply("decode", encoded), range(50))
    np.testing.assert_array_equal(fused, apart)
    assert fused[0].shape == (16, 16, 3)


LARGE = {
    "RGB": encode(smooth_image(241, 363), quality=95),
    "progressive": encode(smooth_image(241, 363), quality=95, progressive=True),
    "grey": encode(smooth_image(241, 363), mode="L", quality=95),
    "CMYK": encode(smooth_image(241, 363), mode="CMYK", quality=95),
}


@pytest.mark.parametrize("encoded", LARGE.values(), ids=LARGE)
def test_scaled_decode_is_near_the_mean_and_keeps_twice_the_size(encoded):
    full = apply("decode", encoded)
    for op, ratio in (
        ("scaled_decode((61, 8))", 1),
        ("scaled_decode(60)", 2),
        ("scaled_decode((8, 45))", 4),
        ("scaled_decode((8, 46))", 2),
        ("scaled_decode(crop=0.5, size=7)", 8),
    ):
        scaled = apply(op, encoded)
        height, width = 241 // ratio, 363 // ratio
        assert scaled.shape == (-(-241 // ratio), -(-363 // ratio), 3), op
        blocks = full[: height * ratio, : width * ratio].astype(float)
        mean = blocks.reshape(height, ratio, width, ratio, 3).mean((1, 3))
        differences = np.abs(scaled[:height, :width] - mean)
        assert differences.max() <= (5 if ratio > 1 else 0) and differences.mean() < 0.6


@pytest.mark.parametrize("encoded", LARGE.values(), ids=LARGE)
def test_a_window_of_a_scaled_jpeg_is_cut_from_it(encoded):
    begins = np.random.default_rng(0).integers(0, (100, 150), (20, 2))
    for ratio in (2, 4, 8):
        scaled = formats.decode_jpeg(encoded, ratio=ratio).numpy()
        for top, left in begins.tolist():
            window = (top, left, 241 - 100, 363 - 150)
            cut = formats.decode_window(encoded, (241, 363, 3), window, ratio)
            rows, columns = (
                slice(begin // ratio, -(-(begin + length) // ratio))
                for begin, length in zip(window[:2], window[2:], strict=True)
            )
            np.testing.assert_array_equal(cut, scaled[rows, columns])


def test_scaled_inception_crop_is_near_the_crop_of_the_full_jpeg():
    arguments, small = "(20, area_min=0.3, antialias=True)", encode(smooth_image())
    full = apply_at(f"inception_crop{arguments}", LARGE["RGB"], range(30))
    scaled = apply_at(f"scaled_inception_crop{arguments}", LARGE["RGB"], range(30))
    differences = np.abs(np.stack(full).astype(int) - np.stack(scaled))
    assert 0.1 < differences.mean() < 3 and differences.max() < 30
    np.testing.assert_array_equal(  # too small to be scaled
        apply_at("scaled_inception_crop(31)", small, range(10)),
        apply_at("inception_crop(31)", small, range(10)),
    )


def test_inception_crop_windows():
    y, x = np.mgrid[:256, :256].astype(np.uint8)
    coordinates = np.stack([y, x, 0 * x], -1)
    windows = []
    op = "inception_crop(64, area_min=0.2, area_max=0.6)"
    for crop in apply_at(op, coordinates, range(200)):
        top_left, bottom_right = crop[0, 0, :2].astype(float), crop[-1, -1, :2].astype(float)
        height, width = (bottom_right - top_left) * 64 / 63
        windows.append([height * width / 256**2, width / height, *(top_left + bottom_right) / 2])
    area, aspect, *centre = np.array(windows).T
    assert 0.18 < area.min() < 0.25 and 0.55 < area.max() < 0.62
    assert 0.72 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.38
    assert np.std(centre) > 20 and abs(np.mean(centre) - 127.5) < 10


def test_resize_rounds():
    image = np.array([[0, 255]], np.uint8)[..., None].repeat(3, -1)
    resized = apply("resize((1, 4))", image)  # 0, 63.75, 191.25, 255 before rounding
    np.testing.assert_array_equal(resized[0, :, 0], [0, 64, 191, 255])


@pytest.mark.parametrize("size", [(20, 30), (33, 47), (20, 120), (100, 200)])
def test_antialiased_resize_agrees_with_pil(size):
    image = smooth_image()
    expected = PIL.Image.fromarray(image).resize(size[::-1], PIL.Image.BILINEAR)
    resized = apply(f"resize({size}, antialias=True)", image)
    np.testing.assert_allclose(resized.astype(int), np.asarray(expected), atol=1)


def test_antialias_acts_only_where_a_side_shrinks():
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    for size, same in [((61, 90), True), ((20, 120), False)]:
        plain, smooth = (apply(f"resize({size}, antialias={a})", image) for a in (False, True))
        assert np.array_equal(plain, smooth) == same


@pytest.mark.parametrize(
    ("size", "shape", "expected"),
    [
        ("20", (60, 90), (20, 30)), ("20", (61, 30), (41, 20)), ("20", (10, 10), (20, 20)),
        ("(20, 30)", (60, 90), (20, 30)), ("(20, 30)", (90, 60), (45, 30)),
        ("(20, 30)", (40, 60), (20, 30)),
    ],
)  # fmt: skip
def test_resize_small_keeps_the_aspect_and_covers_the_size_tightly(size, shape, expected):
    assert apply(f"resize_small({size})", smooth_image(*shape)).shape == (*expected, 3)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(50, 37), (61, 80), (91, 119)])
def test_torchvision_resize_agrees_with_pil(filter, size):
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3)).astype(np.uint8)
    by_number = {"bilinear": PIL.Image.BILINEAR, "bicubic": PIL.Image.BICUBIC}[filter]
    expected = np.asarray(PIL.Image.fromarray(noise).resize(size[::-1], by_number)).astype(int)
    found = apply(f"torchvision_resize({size}, {filter!r})", noise)
    assert np.abs(found - expected).max() <= 2
    assert (found != expected).mean() < 0.05


@pytest.mark.parametrize("shape", [(60, 80, 3), (2, 900, 3)])  # the second is made as a window
@pytest.mark.parametrize("size", [(53, 37), (91, 119)])
def test_torchvision_resize_to_the_nearest_pixel_is_pils(shape, size):
    """But for pixels in the middle between two."""
    noise = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    expected = PIL.Image.fromarray(noise).resize(size[::-1], PIL.Image.NEAREST)
    found = apply(f"torchvision_resize({size}, 'nearest')", noise)
    assert (found != expected).any(axis=-1).mean() < 0.05


@pytest.mark.parametrize(
    ("shape", "arguments", "expected"),  # of torchvision 0.28.0 and timm 1.0.31
    [
        ((103, 151), "35", (35, 51)),  # 51.3
        ((151, 103), "35", (51, 35)),
        ((60, 95), "33", (33, 52)),  # 52.25
        ((60, 95), "(33, 40)", (33, 40)),
        ((103, 151), "(53, 40), cover=True", (53, 78)),  # 77.7
        ((151, 103), "(53, 40), cover=True", (59, 40)),  # 58.6
        ((64, 41), "(32, 8), cover=True", (32, 20)),  # 20.5
        ((64, 43), "(32, 8), cover=True", (32, 22)),  # 21.5
    ],
)
def test_torchvision_resize_takes_its_sizes(shape, arguments, expected):
    image = np.zeros((*shape, 3), np.uint8)
    assert apply(f"torchvision_resize({arguments})", image).shape == (*expected, 3)


def test_torchvision_crop_rounds_halves_to_even():
    """Where torchvision 0.28.0 begins to crop 4 of 4, 5, ... 12 pixels."""
    begins = [
        apply("torchvision_crop(4)", np.arange(3 * n * n, dtype=np.int32).reshape(n, n, 3))[0, 0, 0]
        for n in range(4, 13)
    ]
    assert [begin // 3 % n for n, begin in enumerate(begins, 4)] == [0, 0, 1, 2, 2, 2, 3, 4, 4]


def test_central_crop():
    image = smooth_image(61, 90)
    np.testing.assert_array_equal(apply("central_crop", image), image[22:38, 37:53])
    padded = np.pad(smooth_image(10, 12), [(3, 3), (2, 2), (0, 0)])
    np.testing.assert_array_equal(apply("central_crop(pad=True)", smooth_image(10, 12)), padded)


@pytest.mark.parametrize("shape", [(15, 90), (90, 15), (15, 15), (10, 3)])
@pytest.mark.parametrize("op", ["central_crop", "random_crop"])
def test_a_crop_of_a_smaller_image_is_an_error(op, shape):
    for position in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            apply(op, smooth_image(*shape), position)


@pytest.mark.parametrize("op", ["resize", "resize_small"])
def test_a_resize_before_a_crop_follows_the_image_size(op):
    image = smooth_image(60, 90)
    np.testing.assert_array_equal(apply(f"{op}(crop=0.8)", image), apply(f"{op}(20)", image))
    np.testing.assert_array_equal(
        apply(f"{op}(crop=0.875)", image, image_size=(21, 28)), apply(f"{op}((24, 32))", image)
    )


@pytest.mark.parametrize(
    ("op", "shape", "pad", "size"),
    [
        ("random_crop((5, 7))", (6, 9), (0, 0), (5, 7)),
        ("random_crop((6, 9))", (6, 9), (0, 0), (6, 9)),
        ("random_crop((6, 7), pad=True)", (4, 9), (1, 0), (6, 7)),
        ("pad_crop(1)", (6, 9), (1, 1), (6, 9)),
    ],
)
def test_crops_at_random_take_every_window_that_there_is(op, shape, pad, size):
    image, (height, width) = smooth_image(*shape), size
    padded = np.pad(image, [(side, side) for side in (*pad, 0)])
    rows, columns = (n - part + 1 for n, part in zip(padded.shape, size, strict=False))
    windows = {
        padded[y : y + height, x : x + width].tobytes() for y in range(rows) for x in range(columns)
    }
    assert {crop.tobytes() for crop in apply_at(op, image, range(100))} == windows


@pytest.mark.parametrize("shape", [(300, 2), (3, 400), (1, 999), (999, 1), (20, 16), (24, 24)])
@pytest.mark.parametrize("ops", ["resize_small(24)|central_crop", "resize_small(25)|central_crop",
                                 "resize_small(27, True)|torchvision_crop",
                                 "resize_small(29)|random_crop"])  # fmt: skip
def test_the_crop_of_a_thin_image_is_made_without_the_whole(shape, ops, monkeypatch):
    """Bit for bit, of usual images too; without the window, 4000 x 1 becomes 96000 x 24."""
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    found, seed = [], tf.constant([3, 7], tf.int64)
    window = mock.Mock(wraps=host_ops._enlarged_window)
    monkeypatch.setattr(host_ops, "_enlarged_window", window)
    for thin in (0, 10**9):
        monkeypatch.setattr(host_ops, "_THIN", thin)
        resize, crop = parse_ops(ops, (24, 24))[0]
        found.append(crop(resize(image, seed), fold_in(seed, 1)).numpy())
        window.assert_called_once()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("shape", [(300, 2), (3, 400), (1, 999), (999, 1), (20, 16), (24, 24)])
@pytest.mark.parametrize("ops", ["torchvision_resize(24)|torchvision_crop",
                                 "torchvision_resize((25, 27), 'bicubic', True)|central_crop",
                                 "torchvision_resize(29)|random_crop"])  # fmt: skip
def test_torchvision_resize_makes_what_a_crop_keeps_of_a_thin_image(shape, ops, monkeypatch):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    found, sizes, seed = [], [], tf.constant([3, 7], tf.int64)
    resize, crop = parse_ops(ops, (24, 24))[0]
    resized = type(resize)._resized
    monkeypatch.setattr(
        type(resize), "_resized",
        lambda op, image, size: sizes.append(np.prod(size)) or resized(op, image, size),
    )  # fmt: skip
    for thin in (10**9, 0):
        monkeypatch.setattr(host_ops, "_THIN", thin)
        sizes.clear()
        found.append(crop(resize(image, seed), fold_in(seed, 1)).numpy())
    np.testing.assert_array_equal(*found)
    assert max(sizes) <= 30 * max(shape)  # and not its square


def test_no_resized_image_is_far_larger_than_its_crop(monkeypatch):
    sizes, bilinear = [], host_ops._bilinear

    def spy(image, size, antialias):
        sizes.append(np.prod(size))
        return bilinear(image, size, antialias)

    monkeypatch.setattr(host_ops, "_bilinear", spy)
    resize, _ = parse_ops("resize_small|central_crop", (24, 24))[0]
    for shape in ((4000, 1), (1, 4000), (200, 9), (20, 200), (24, 30)):
        shown = resize(np.zeros((*shape, 3), np.uint8), None).shape
        assert max([np.prod(shown) / 3, *sizes]) <= host_ops._THIN * 24 * 24
    assert sizes
