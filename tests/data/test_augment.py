"""RandAugment's operations against PIL, and what RandAugment draws."""

import functools

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import scipy.stats
from images import smooth_image

from vit_jax.data import augment, parse_ops
from vit_jax.data.host_tf import tf

GREY = (128, 128, 128)
CENTRE = (0.6, 0.3)  # row and column
WAYS = ((7.5, 1), (15, -1))  # magnitude and direction

RNG = np.random.default_rng(0)
IMAGES = {
    "photograph-like": smooth_image(224, 224),
    "wide": smooth_image(61, 140, seed=1),
    "grey": smooth_image(47, 33, seed=2)[..., :1].repeat(3, -1),
    "narrow range": 60 + smooth_image(20, 30, seed=3) // 4,
    "one colour": np.full((9, 8, 3), 77, np.uint8),
    "noise": RNG.integers(0, 256, (37, 61, 3), np.uint8),
    **{f"{h} x {w}": RNG.integers(0, 256, (h, w, 3), np.uint8)
       for h, w in [(1, 1), (1, 7), (2, 5), (5, 2), (3, 3), (8, 8)]},
}  # fmt: skip


def affine(image, *coefficients):
    return image.transform(
        image.size, PIL.Image.AFFINE, coefficients, PIL.Image.NEAREST, fillcolor=GREY
    )


def enhance(image, kind, m):
    return getattr(PIL.ImageEnhance, kind)(image).enhance(0.1 + 0.18 * m)


def pil_cutout(image, half):
    (width, height), (y, x) = image.size, CENTRE
    y, x = int(y * height), int(x * width)
    image = image.copy()
    image.paste(GREY, (x - half, y - half, x + half, y + half))
    return image


# What each operation is in PIL's words at magnitude m, in the direction s, of width w, height h.
PIL_OPERATIONS = {
    "AutoContrast": lambda i, m, s, w, h: PIL.ImageOps.autocontrast(i),
    "Equalize": lambda i, m, s, w, h: PIL.ImageOps.equalize(i),
    "Invert": lambda i, m, s, w, h: PIL.ImageOps.invert(i),
    "Rotate": lambda i, m, s, w, h: i.rotate(s * 3 * m, PIL.Image.NEAREST, fillcolor=GREY),
    "Posterize": lambda i, m, s, w, h: PIL.ImageOps.posterize(i, min(max(int(0.4 * m), 1), 8)),
    "Solarize": lambda i, m, s, w, h: PIL.ImageOps.solarize(i, int(25.6 * m)),
    "SolarizeAdd": lambda i, m, s, w, h: i.point(
        [min(v + int(11 * m), 255) if v < 128 else v for v in range(256)] * 3
    ),
    "Color": lambda i, m, s, w, h: enhance(i, "Color", m),
    "Contrast": lambda i, m, s, w, h: enhance(i, "Contrast", m),
    "Brightness": lambda i, m, s, w, h: enhance(i, "Brightness", m),
    "Sharpness": lambda i, m, s, w, h: enhance(i, "Sharpness", m),
    "ShearX": lambda i, m, s, w, h: affine(i, 1, s * 0.03 * m, 0, 0, 1, 0),
    "ShearY": lambda i, m, s, w, h: affine(i, 1, 0, 0, s * 0.03 * m, 1, 0),
    "TranslateX": lambda i, m, s, w, h: affine(i, 1, 0, s * round(m * w * 10 / 224), 0, 1, 0),
    "TranslateY": lambda i, m, s, w, h: affine(i, 1, 0, 0, 0, 1, s * round(m * h * 10 / 224)),
    "Cutout": lambda i, m, s, w, h: pil_cutout(i, int(m * min(h, w) * 4 / 224)),
}
BLENDS = ("AutoContrast", "Color", "Contrast", "Brightness", "Sharpness")


@functools.cache
def graph(name):
    """The operation as tf.data runs it, for images of any size."""
    signature = [tf.TensorSpec((None, None, 3), tf.uint8), *2 * [tf.TensorSpec((), tf.float32)]]
    return tf.function(
        lambda image, m, sign: augment.operate(name, image, m, sign, CENTRE),
        signature,
        autograph=False,  # as randaugment has it
    )


def assert_as_pil(name, image, magnitude, sign):
    height, width, _ = image.shape
    pil_image = PIL.Image.fromarray(image)
    expected = PIL_OPERATIONS[name](pil_image, magnitude, sign, width, height)
    found = graph(name)(image, magnitude, sign).numpy()
    np.testing.assert_allclose(
        found.astype(int), np.asarray(expected), rtol=0, atol=1 if name in BLENDS else 0
    )


@pytest.mark.parametrize("name", PIL_OPERATIONS)
def test_operation_agrees_with_pil(name):
    for image in IMAGES.values():
        for magnitude, sign in WAYS:
            assert_as_pil(name, image, magnitude, sign)
    for magnitude, sign in ((7.5, -1), (15, 1)):
        assert_as_pil(name, IMAGES["noise"], magnitude, sign)


def test_every_operation_is_tested_and_changes_what_it_should():
    assert augment.OPERATIONS.keys() == PIL_OPERATIONS.keys()
    image = IMAGES["noise"] // 2 + 90
    for name in augment.OPERATIONS:
        assert (augment.operate(name, image, 7.5).numpy() != image).mean() > 0.02, name


def test_the_two_operations_that_fade_as_the_magnitude_grows():
    image = IMAGES["noise"]
    np.testing.assert_array_equal(augment.operate("Solarize", image, 10), image)
    np.testing.assert_array_equal(augment.operate("Posterize", image, 20), image)
    np.testing.assert_array_equal(augment.operate("Solarize", image, 0), 255 - image)
    np.testing.assert_array_equal(augment.operate("Posterize", image, 0), image // 128 * 128)


def test_the_published_contrast_blends_with_the_number_of_pixels():
    """As of github.com/tensorflow/tpu: sum(histogram) / 256, where the values' mean was meant."""
    small, large = IMAGES["noise"], np.full((300, 300, 3), 90, np.uint8)
    for image in (small, large):
        height, width, _ = image.shape
        grey = min(height * width // 256, 255)
        exact = np.clip(grey + 1.45 * (image.astype(float) - grey), 0, 255)
        found = augment.operate("Contrast", image, 7.5, published_contrast=True).numpy()
        np.testing.assert_allclose(found, exact, atol=1)
    (op,), () = parse_ops("randaugment(1, 7.5, published_contrast=True)", (8, 8))
    drawn = {op(large, [0, i]).numpy().tobytes() for i in range(60)}
    assert found.tobytes() in drawn


def randaugment(arguments, image):
    (op,), () = parse_ops(f"randaugment({arguments})", (8, 8))
    return lambda key: op(image, key)


def keys(number):
    return tf.data.Dataset.range(number).map(lambda position: tf.stack([tf.constant(7, tf.int64),
                                                                        position]))  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """drawn(arguments): what 1,500 keys draw: operation, sign, row, column, magnitude, a layer."""

    def write(number, image, m, sign, centre):
        values = [tf.cast(number, tf.float32), sign, *tf.unstack(centre), m * 10]
        layer = tf.reduce_sum(tf.cast(image[:, 0, 0] > 0, tf.int32))
        coded = tf.stack([values[0] + 1, values[1] + 1, *(v * 250 for v in values[2:4]),
                          values[4] * 8])  # fmt: skip
        row = tf.saturate_cast(tf.round(coded), tf.uint8)
        return tf.tensor_scatter_nd_update(image, [[layer]], [tf.stack([row] * 3, 1)])

    operations = {
        str(i): functools.partial(write, i) for i in range(16)
    }  # each writes down what it is given, in a row of the image
    monkeypatch.setattr(augment, "OPERATIONS", operations)

    def draw(arguments):
        blank = tf.zeros((3, 5, 3), tf.uint8)
        images = next(iter(keys(1500).map(randaugment(arguments, blank)).batch(1500))).numpy()
        coded = images[..., 0].astype(float)
        number, sign, row, column, magnitude = np.moveaxis(coded, -1, 0)
        return number - 1, sign - 1, row / 250, column / 250, magnitude / 8

    return draw


@pytest.mark.slow
def test_randaugment_draws_each_operation_alike(drawn):
    number, sign, row, column, magnitude = drawn("2, 15")
    assert (number[:, 2] == -1).all()  # two layers, not three
    for layer in (0, 1):
        counts = np.bincount(number[:, layer].astype(int), minlength=16)
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
        assert 0.46 < (sign[:, layer] == 1).mean() < 0.54
        assert set(sign[:, layer]) == {-1, 1}
        for share in (row, column):
            assert scipy.stats.kstest(share[:, layer], "uniform").pvalue > 1e-3
    assert (magnitude[:, :2] == 15).all()
    together = np.histogram2d(number[:, 0], number[:, 1], bins=16)[0]
    assert scipy.stats.chi2_contingency(together).pvalue > 1e-3  # layers draw apart


@pytest.mark.slow
def test_randaugment_draws_magnitudes_about_that_given(drawn):
    *_, magnitude = drawn("1, 2, magnitude_std=2")
    found, expected = magnitude[:, 0], np.maximum(np.random.default_rng(0).normal(2, 2, 10**5), 0)
    assert abs(found.mean() - expected.mean()) < 0.15 and abs(found.std() - expected.std()) < 0.1
    assert abs((found == 0).mean() - (expected < 1 / 16).mean()) < 0.03  # none is below 0


def test_autoaugment_draws_each_pair_alike_and_each_operation_at_its_rate(drawn, monkeypatch):
    """The operations of one policy of two pairs write down what they are given."""
    pairs = ((("0", 1.0, 4), ("1", 0.5, 2)), (("1", 0.0, 9), ("2", 0.75, 10)))
    monkeypatch.setattr(augment, "AUTOAUGMENT_V0", pairs)
    (op,), () = parse_ops("autoaugment", (8, 8))
    blank = tf.zeros((3, 5, 3), tf.uint8)
    images = next(iter(keys(1500).map(lambda key: op(blank, key)).batch(1500))).numpy()[..., 0]
    first, second = ((images[:, row, :] * 1.0) for row in (0, 1))
    of_first = first[:, 0] == 1  # operation "0" is written as 1
    assert 0.45 < of_first.mean() < 0.55
    assert set(first[of_first, 4] / 8) == {4} and set(second[of_first, 0]) == {0, 2}
    assert 0.44 < (second[of_first, 0] == 2).mean() < 0.56
    others = first[~of_first]  # "1" is never drawn, so "2" writes into the first row
    assert set(others[:, 0]) == {0, 3} and 0.69 < (others[:, 0] == 3).mean() < 0.81
    drawn_2 = others[others[:, 0] == 3]
    assert set(drawn_2[:, 4] / 8) == {10} and set(drawn_2[:, 1] - 1) == {-1, 1}


def test_the_policy_of_autoaugment_is_25_pairs_of_known_operations():
    assert len(augment.AUTOAUGMENT_V0) == 25
    steps = [step for pair in augment.AUTOAUGMENT_V0 for step in pair]
    assert {name for name, _, _ in steps} <= augment.OPERATIONS.keys()
    assert all(0 <= rate <= 1 for _, rate, _ in steps)
    assert {m for name, _, m in steps if "Translate" in name} == {2.5 * 9}
    assert all(0 <= m <= 10 for name, _, m in steps if "Translate" not in name)


def test_randaugment_gives_the_same_whatever_the_threads_and_keeps_the_static_shape():
    image = tf.constant(smooth_image(31, 45))
    key = tf.TensorSpec([2], tf.int64)
    op = tf.function(randaugment("2, 15", image), [key], autograph=False)

    def drawn(parallel):
        dataset = keys(64).map(op, parallel, deterministic=True)
        assert dataset.element_spec.shape == (31, 45, 3)
        return np.stack(list(dataset.as_numpy_iterator()))

    alone = drawn(1)
    np.testing.assert_array_equal(alone, drawn(8))
    assert len({image.tobytes() for image in alone}) > 50  # some operations draw nothing
