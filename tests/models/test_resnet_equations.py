"""BiT's ResNets and the stems of hybrids against the same equations in NumPy, float64."""

import functools

import jax
import numpy as np
import numpy_resnet
import pytest
from numpy_vit import random_params

from vit_jax.models import create_model
from vit_jax.models.resnet import BIT, HYBRID, group_norm

CONVENTIONS = {"bit": BIT, "hybrid": HYBRID}
TINY = {"stages": (1, 2), "stem_width": 32}
TINY_VIT = {"width": 32, "depth": 1, "mlp_dim": 48, "num_heads": 2}


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_standardised_kernels(kind):
    """They are as small as what the conventions add, where these differ by a third."""
    kernel = 1 + np.random.default_rng(0).standard_normal((3, 3, 8, 4))
    kernel = (1e-5 * kernel).astype(np.float32)
    found = CONVENTIONS[kind].standardize(kernel)
    expected = numpy_resnet.standardize(kernel.astype(np.float64), kind)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_group_norm(kind):
    """Of a variance as small as BiT's epsilon, ten times the hybrid's."""
    rng = np.random.default_rng(0)
    x_HWC = (np.sqrt(1e-5) * rng.standard_normal((5, 3, 64))).astype(np.float32)
    norm = group_norm(CONVENTIONS[kind], np.float32, "norm")
    params = random_params(norm, x_HWC[None])
    expected = numpy_resnet.group_norm(params, x_HWC.astype(np.float64), kind)
    found = norm.apply({"params": params}, x_HWC[None])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@functools.partial(jax.jit, static_argnums=0)
def tokens_of(model, params, images):
    return model.apply({"params": params}, images, method="tokens")


def assert_tokens(model, num_tokens, image_size, expected):
    images = np.random.default_rng(1).uniform(-1, 1, (1, *image_size, 3)).astype(np.float32)
    params = random_params(model, images)
    assert all(np.all(leaf) for leaf in jax.tree.leaves(params))
    expected = expected(params, images[0].astype(np.float64))
    assert expected.shape == (num_tokens, model.width)
    found = tokens_of(model, params, images)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_bit():
    model = create_model("BiT-R50x1", 3, (33, 50), **TINY)
    assert model.grid == (5, 7)
    assert_tokens(model, 5 * 7, (33, 50), numpy_resnet.bit_tokens)


@pytest.mark.parametrize(
    ("name", "fields", "num_tokens"),
    [
        pytest.param("R26+ViT-mu/16", TINY, 8 * 10, marks=pytest.mark.slow),
        ("R26+ViT-mu/16", TINY | {"patch_size": (4, 2)}, 2 * 5),
        ("R+ViT-mu/8", {"stem_width": 32}, 4 * 5),
    ],
)
def test_a_hybrid(name, fields, num_tokens):
    model = create_model(name, 3, (64, 80), **TINY_VIT, **fields)
    expected = functools.partial(numpy_resnet.hybrid_tokens, model)
    assert_tokens(model, model.num_prefix_tokens + num_tokens, (64, 80), expected)
