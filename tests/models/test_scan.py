"""The layers' forms, scanned and unrolled, with each remat policy, compute one and the same."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_vit import random_params

from vit_jax.base import tree
from vit_jax.devices.flops import count_flops
from vit_jax.models import create_model
from vit_jax.models.block_ops import BlockOps, multiply_on_cpu
from vit_jax.transfer.fit import stack_layers, unstack_layers
from vit_jax.transfer.shapes import abstract_params

DEPTH, TX = 3, optax.adamw(0.1, eps=1e-3, weight_decay=0.1)
RNG = np.random.default_rng(1)
IMAGES = RNG.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
LABELS = jnp.arange(4)


def make(*, scan, remat="none", **fields):
    sizes = {"width": 16, "depth": DEPTH, "mlp_dim": 24, "num_heads": 2}
    return create_model("ViT-mu/4", 5, 8, scan=scan, remat=remat, **(sizes | fields))


UNROLLED_PARAMS = random_params(make(scan=False), IMAGES)
# Moments as in the middle of a run, none of them zero.
MOMENTS = [
    jax.tree.map(np.abs, random_params(make(scan=False), IMAGES, seed=seed)) for seed in (2, 3)
]


def loss_and_logits(model, params, images=IMAGES):
    logits = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean(), logits


def update(model, params, moments):
    """What a step of Adam makes of `params`, everything by unrolled names."""
    grads, logits = jax.grad(functools.partial(loss_and_logits, model), has_aux=True)(params)
    state = TX.init(params)
    first, second = moments
    state = (state[0]._replace(count=jnp.int32(7), mu=first, nu=second), *state[1:])
    updates, state = TX.update(grads, state, params)
    out = {"grads": grads, "updates": updates, "mu": state[0].mu, "nu": state[0].nu}
    if model.scan:
        out = {name: unstack_layers(leaves) for name, leaves in out.items()}
    return tree.flatten_names(out | {"logits": logits})


@functools.cache
def computed(scan, remat):
    updated = jax.jit(functools.partial(update, make(scan=scan, remat=remat)))
    convert = stack_layers if scan else lambda params: params
    return jax.device_get(updated(convert(UNROLLED_PARAMS), [convert(m) for m in MOMENTS]))


@pytest.mark.parametrize(
    ("scan", "remat"),
    [
        (True, "full"),
        *(pytest.param(scan, remat, marks=pytest.mark.slow)
          for scan, remat in ((False, "dots"), (False, "full"), (True, "none"), (True, "dots"))),
    ],
)  # fmt: skip
def test_same_logits_gradients_updates_and_optimizer_state(scan, remat):
    expected, found = computed(False, "none"), computed(scan, remat)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        # The keys' bias has no gradient (softmax does not see it): rounding is all there is.
        floor = 1e-3 if name.endswith("key/bias") else 0.0
        tolerance = 1e-5 * max(np.abs(leaf).max(), floor)
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=tolerance, err_msg=name)


def test_stacking_is_undone_and_fits_the_scanned_model():
    stacked = stack_layers(UNROLLED_PARAMS)
    shapes = abstract_params(make(scan=True))
    found = tree.flatten_names(stacked)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in shapes.items()}
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), UNROLLED_PARAMS)


def kept_for_backward(scan, remat, remat_layers=None):
    """Bytes that the forward pass hands to the backward pass, the parameters left out."""
    model = make(scan=scan, remat=remat, remat_layers=remat_layers, mlp_dim=64)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        random_params(model, IMAGES),
    )
    images = jax.ShapeDtypeStruct((32, 8, 8, 3), jnp.float32)

    def residuals(params, images):
        return jax.vjp(lambda p: model.apply({"params": p}, images), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, params, images))
    sizes = {leaf.shape for leaf in jax.tree.leaves(params)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.shape not in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_less(scan):
    none, dots, full = (kept_for_backward(scan, remat) for remat in ("none", "dots", "full"))
    # Of a block: full keeps its input, dots the outputs of six dense layers as well.
    tokens = 32 * 5 * 4 * DEPTH  # bytes of a number per token and layer
    assert full < dots < none
    assert full < 3 * 16 * tokens
    assert dots - full >= (4 * 16 + 64) * tokens


@pytest.mark.slow
def test_each_layer_with_remat_keeps_as_much_less():
    kept = [kept_for_backward(False, "full", layers) for layers in range(DEPTH + 1)]
    assert kept[0] == kept_for_backward(False, "none")
    assert kept[DEPTH] == kept_for_backward(False, "full")
    assert {before - after for before, after in itertools.pairwise(kept)} == {kept[0] - kept[1]}
    assert kept[0] > kept[1]


@pytest.mark.parametrize("multiply", [jnp.dot, multiply_on_cpu])
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_remat_computes_again_what_it_does_not_keep(scan, multiply):
    def flops(remat, layers=None):
        ops = BlockOps(multiply=multiply)
        model = make(scan=scan, remat=remat, remat_layers=layers, ops=ops)
        params = tree.unflatten_names(abstract_params(model))
        return count_flops(jax.grad(lambda p: loss_and_logits(model, p)[0]), params)

    batch, tokens, width, mlp_dim = 4, 5, 16, 24
    products = 2 * 2 * batch * tokens * tokens * width  # q k^T and A v
    dense = 2 * batch * tokens * (3 * width * width + width * width + width * mlp_dim)
    assert flops("dots") - flops("none") == DEPTH * products
    # The block's last product, `down`, is not needed again.
    assert flops("full") - flops("none") == DEPTH * (products + dense)


def make_resnet(kind, *, scan, remat="none"):
    sizes = {"stages": (4,), "stem_width": 32}
    if kind == "BiT":
        return create_model("BiT-R50x1", 4, 32, scan=scan, remat=remat, **sizes)
    sizes |= {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2}
    return create_model("R26+ViT-mu/16", 4, 32, scan=scan, remat=remat, patch_size=4, **sizes)


def gradients_of_resnet(kind, *, scan, remat="none"):
    """Logits and gradients by unrolled names, and how many convolutions the gradient has."""
    model, plain = (make_resnet(kind, scan=s, remat=remat) for s in (scan, False))
    images = np.random.default_rng(1).uniform(-1, 1, (4, 32, 32, 3)).astype(np.float32)
    params = random_params(plain, images)
    stacked = scan and kind == "hybrid"
    params = stack_layers(params) if stacked else params
    gradient = jax.jit(jax.grad(functools.partial(loss_and_logits, model), has_aux=True))
    traced = gradient.trace(params, images)
    grads, logits = gradient(params, images)
    found = tree.flatten_names(unstack_layers(grads) if stacked else grads)
    return found | {"logits": logits}, str(traced.jaxpr).count("= conv_general_dilated")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "remat"),
    [("BiT", "none"), ("BiT", "dots"), ("BiT", "full"), ("hybrid", "none"), ("hybrid", "full")],
)
def test_scanned_units_of_a_resnet_compute_the_same(kind, remat):
    expected, convolutions = gradients_of_resnet(kind, scan=False)
    found, scanned = gradients_of_resnet(kind, scan=True, remat=remat)
    assert found.keys() == expected.keys()
    assert any("stage_0/layer_3/conv2" in name for name in found)
    for name, leaf in expected.items():
        floor = 1e-3 if name.endswith("key/bias") else 0.0
        tolerance = 1e-4 * max(np.abs(leaf).max(), floor)
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=tolerance, err_msg=name)
    # Two units of three convolutions are not written out, each with two gradients. A BiT's backward
    # pass does not need the projection and the last convolution again.
    again = {"BiT": 2 + 2, "hybrid": 4 + 3}[kind] if remat == "full" else 0
    assert scanned == convolutions - 2 * 3 * 3 + again
