"""Position embeddings: each kind, at each place, against plain NumPy."""

import functools

import jax
import numpy as np
import numpy_vit
import pytest
from numpy_vit import random_params

from vit_jax import tree
from vit_jax.models import create_model
from vit_jax.models.position import sincos_2d
from vit_jax.transfer.rules import stack_layers, unstack_layers

pytestmark = pytest.mark.usefixtures("cheap_compilation")

RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(-1, 1, (2, 4, 6, 3)).astype(np.float32)  # 2 x 3 patches
WEIGHTS = RNG.standard_normal((2, 7, 16))
# (pos_embed, pos_embed_at): all that go together.
KINDS = [
    ("none", None),
    *(
        (kind, place)
        for kind in ("learned_1d", "learned_2d", "relative", "sincos_2d")
        for place in ("stem", "layers", "layers_shared")
        if (kind, place) != ("relative", "stem")
    ),
]


def make(family="ViT", **fields):
    sizes = {"width": 16, "depth": 2, "mlp_dim": 8, "num_heads": 2}
    return create_model(f"{family}-mu/2", 3, (4, 6), **(sizes | fields))


@pytest.mark.parametrize(("grid", "width"), [((2, 3), 8), ((4, 1), 16), ((5, 5), 64)])
def test_sincos_is_sin_x_cos_x_sin_y_cos_y(grid, width):
    ours = sincos_2d(grid, width)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, numpy_vit.sincos(grid, width), atol=1e-6)


def test_sincos_by_hand():
    # Grid 2 x 2, frequencies 1 and 1/10000; the second patch is at x = 1, y = 0.
    expected = [np.sin(1), np.sin(1e-4), np.cos(1), np.cos(1e-4), 0, 0, 1, 1]
    np.testing.assert_allclose(sincos_2d((2, 2), 8)[1], expected, atol=1e-7)


MORE = [
    ("learned_1d", "layers", {"pos_embed_class_token": False}),
    ("learned_2d", "stem", {"family": "DeiT"}),
    ("relative", "layers_shared", {"family": "DeiT"}),
    ("relative", "layers", {"pos_embed_class_token": False, "qk_norm": True, "qkv_bias": False}),
    ("relative", None, {"pool": "gap", "parallel": True}),
]


@pytest.mark.parametrize(
    ("kind", "place", "fields"), [*((kind, place, {}) for kind, place in KINDS), *MORE]
)
def test_every_kind_at_every_place_follows_the_equations(kind, place, fields):
    model = make(pos_embed=kind, pos_embed_at=place, scan=True, **fields)
    params = random_params(model.clone(scan=False), IMAGES)
    expected = [numpy_vit.vit(model, params, image)["tokens"] for image in IMAGES]
    apply = jax.jit(functools.partial(model.apply, method="tokens"))
    found = apply({"params": stack_layers(params)}, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "place"), [("learned_2d", "layers"), ("relative", "layers_shared")]
)
def test_scanned_is_unrolled(kind, place):
    def run(scan, params):
        model = make(pos_embed=kind, pos_embed_at=place, scan=scan)

        def loss(params):
            tokens = model.apply({"params": params}, IMAGES, method="tokens")
            return (WEIGHTS * tokens).sum(), tokens

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    params = random_params(make(pos_embed=kind, pos_embed_at=place), IMAGES)
    params = {name: leaf for name, leaf in params.items() if name != "head"}
    expected_grads, expected = run(False, params)
    grads, found = run(True, stack_layers(params))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    found = tree.flatten_names(unstack_layers(grads))
    for name, grad in tree.flatten_names(expected_grads).items():
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=5e-5, err_msg=name)
        assert np.abs(grad).max() > 1e-3 or name.endswith("key/bias"), name
