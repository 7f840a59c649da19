"""Text towers: which tokens the features of a text depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_vit import random_params

from vit_jax.models.text import Matcher, TextTower, unit

SIZES = {"vocabulary": 20, "length": 6, "width": 8, "depth": 2, "common_width": 5, "num_heads": 2,
         "mlp_dim": 16}  # fmt: skip
START, END, PAD = 17, 19, 3


@functools.cache
def read_by(**fields):
    """ids -> features of a tower of these fields."""
    tower = TextTower(**SIZES, **fields)
    variables = {"params": random_params(tower, jnp.zeros((1, 6), jnp.int32))}
    return functools.partial(jax.jit(tower.apply), variables)


def features(ids, **fields):
    return np.asarray(read_by(**fields)(jnp.asarray(ids)))


def assert_same(first, second, is_same=True):
    assert np.allclose(first, second, atol=1e-6) == is_same


def test_padding_behind_the_end_of_clip_does_not_matter():
    ids = np.array([[START, 4, 5, END, PAD, PAD]])
    found = features(ids, causal=True)
    assert found.shape == (1, 5)
    assert_same(features([[START, 4, 5, END, END, END]], causal=True), found)
    assert_same(features([[START, 4, 5, END]], causal=True), found)
    assert_same(features([[START, 4, 6, END, PAD, PAD]], causal=True), found, False)
    assert_same(features([[START, 6, 5, END, PAD, PAD]], causal=True), found, False)


def test_the_end_of_clip_is_the_largest_id_or_a_stated_one():
    ids = np.array([[START, 4, 5, 18, END, PAD]])
    largest = features(ids, causal=True)
    assert_same(features([[START, 4, 5, 18, END, 0]], causal=True), largest)
    at_5 = features(ids, causal=True, end_id=5)  # larger ids stand behind it
    assert_same(features([[START, 4, 5, 0, 0, 0]], causal=True, end_id=5), at_5)
    assert_same(at_5, largest, False)
    twice = features([[START, 5, 6, 5, 0, 0]], causal=True, end_id=5)
    assert_same(features([[START, 5, 7, 8, 9, 0]], causal=True, end_id=5), twice)
    none = features([[START, 4, 6, 7, 0, 0]], causal=True, end_id=5)  # position 0
    assert_same(features([[START, 8, 8, 8, 8, 8]], causal=True, end_id=5), none)


def test_padding_of_siglip_belongs_to_the_model():
    found = features([[4, 5, 1, 1, 1, 1]], causal=False)
    for other in ([[4, 5, 1, 0, 0, 0]], [[1, 1, 1, 1, 4, 5]], [[6, 5, 1, 1, 1, 1]]):
        assert_same(features(other, causal=False), found, False)


@pytest.mark.parametrize("image_width", [None, 7])
def test_logits_are_scaled_cosines(image_width):
    matcher = Matcher(TextTower(**SIZES, causal=False), image_width, has_bias=True)
    images = jax.random.normal(jax.random.key(1), (3, image_width or 5))
    ids = jnp.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    variables = matcher.init(jax.random.key(0), images, ids)
    params = variables["params"]
    assert np.isclose(np.exp(params["logit_scale"]), 10)
    texts = unit(matcher.apply(variables, ids, method="text_features"))
    projected = images if image_width is None else images @ params["image_head"]["kernel"]
    expected = 10 * unit(projected) @ texts.T - 10
    assert np.allclose(matcher.apply(variables, images, ids), expected, atol=1e-5)


def test_a_bounded_scale_can_fall_again_and_does_not_rise():
    matcher = Matcher(TextTower(**SIZES, causal=False), None, has_bias=False, max_scale=100)
    for log_scale, scale, rises, falls in ((4, np.exp(4), True, True), (5, 100, False, True)):
        assert matcher.scale_of(log_scale) == pytest.approx(scale, rel=1e-6)
        for sign, moves in ((-1, rises), (1, falls)):
            slope = jax.grad(lambda x, sign=sign: sign * matcher.scale_of(x))(float(log_scale))
            assert slope == pytest.approx(sign * scale * moves, rel=1e-5)


def test_rows_of_zeros_stay_zero_and_have_a_gradient():
    rows = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    assert np.allclose(unit(rows), [[0, 0], [0.6, 0.8]])
    assert np.isfinite(jax.grad(lambda x: unit(x).sum())(rows)).all()
