"""Rows of several pictures: a packed batch computes as its pictures, each in a row of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_vit import random_params

from vit_jax import create_model
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.devices.kernels import tpu_forms
from vit_jax.devices.mesh import make_mesh
from vit_jax.models.dot_product import dot_product_attention, plain_attention
from vit_jax.models.packing import (
    attend_apart,
    cut_pictures,
    cut_rows,
    join_pictures,
    join_rows,
    spread,
)

PATCH, MOST, PACK = 2, 8, (3, 3, 6, 8)
GRIDS = ((1, 3), (2, 1), (2, 3), (4, 2), (1, 1), (3, 1), (1, 5), (2, 4))  # of two rows
PARTS = ((2, 3), (1, 6), (1, 8))
SIZES = {"width": 16, "depth": 1, "mlp_dim": 24, "num_heads": 2, "patch_size": PATCH}
MODELS = {
    "token": {"registers": 1, "remat": "full"},
    "gap": {"pool": "gap", "norm_pooled": True, "scan": True, "depth": 2},
    "map": {"pool": "map", "pos_embed": "sincos_2d", "pos_embed_at": "layers_shared"},
    "turned": {"pool": "gap", "pos_embed": "none", "rotary": "normalised", "registers": 1},
}  # fmt: skip


def make_pictures(padding=0.0):
    """A batch of pictures; `padding` fills the places behind the patches of each."""
    patches = np.random.default_rng(0).normal(size=(len(GRIDS), MOST, PATCH, PATCH, 3))
    counts = np.prod(GRIDS, axis=1)
    patches[np.arange(MOST)[None] >= counts[:, None]] = padding
    return Pictures(jnp.asarray(patches, jnp.float32), jnp.asarray(GRIDS, jnp.int32))


def make(**fields):
    model = create_model("ViT-Ti/2", 5, (6, 6), **SIZES | {"pack": PACK} | fields, max_tokens=MOST)
    return model, {"params": random_params(model, jnp.zeros((1, 6, 6, 3)))}


def in_training(model, **kwargs):
    """The logits in training, and the gradients of their squares."""

    def loss(variables, pictures):
        rngs = {"dropout": jax.random.key(0)}
        logits = model.apply(variables, pictures, train=True, rngs=rngs, **kwargs)
        return (logits**2).sum(), logits

    return jax.jit(jax.grad(loss, has_aux=True))


def check_close(found, expected):
    """Logits, and gradients: both to 1e-5 of the largest, as the gradient of a key's bias is 0."""
    for a, b in zip(found, expected, strict=True):
        largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(b))
        check = partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * largest)
        jax.tree.map(check, a, b)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "token" else pytest.mark.slow) for n in MODELS]
)
def test_a_packed_batch_is_its_pictures_one_by_one(name):
    model, variables = make(**MODELS[name])
    found = in_training(model)(variables, make_pictures(padding=9.0))
    alone = in_training(model.clone(pack=None))
    check_close(found, alone(variables, make_pictures()))
    if name == "gap":
        patches, grids = make_pictures()
        for i, logits in enumerate(found[1]):
            one = Pictures(patches[i : i + 1], grids[i : i + 1])
            np.testing.assert_allclose(logits, alone(variables, one)[1][0], atol=1e-5)


@pytest.mark.parametrize("attend", [dot_product_attention, plain_attention])
def test_a_picture_attends_to_itself(attend):
    """The rows are longer than their parts, as kernels may need."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(x) for x in rng.normal(size=(3, 2, 21, 2, 4)).astype(np.float32)]
    num_keys = jnp.asarray([3, 2, 6, 8, 1, 3, 5, 8])

    def of_pictures(*arrays):
        *qkv, keys = arrays
        return attend(*qkv, num_keys_B=keys)

    found = np.asarray(attend_apart(of_pictures, PARTS, qkv, num_keys))
    assert found.shape == (2, 21, 2, 4)
    assert (found[:, 20:] == 0).all()
    owner = np.repeat(np.arange(4), PACK)
    place = np.concatenate([np.arange(n) for n in PACK])
    keys_RT = np.asarray(num_keys).reshape(2, 4)[:, owner]
    seen = (owner[:, None] == owner) & (place < keys_RT)[:, None]
    q, k, v = (np.asarray(x)[:, :20] for x in qkv)
    weights = np.exp(np.einsum("rnhk,rmhk->rhnm", q, k) / 2) * seen[:, None]
    weights /= weights.sum(axis=3, keepdims=True)
    expected = np.einsum("rhnm,rmhk->rnhk", weights, v)
    np.testing.assert_allclose(found[:, :20], expected, atol=1e-6)


def test_rows_are_cut_and_joined():
    rows = jnp.arange(2 * 20 * 2).reshape(2, 20, 2)
    cut = cut_rows(rows, PARTS)
    assert [x.shape for x in cut] == [(4, 3, 2), (2, 6, 2), (2, 8, 2)]
    assert cut[0][3].tolist() == rows[1, 3:6].tolist()
    assert (join_rows(cut, 2) == rows).all()
    values = jnp.arange(8)
    assert [x.tolist() for x in cut_pictures(values, PARTS)] == [[0, 1, 4, 5], [2, 6], [3, 7]]
    assert join_pictures(cut_pictures(values, PARTS), 2).tolist() == values.tolist()
    spread_R = spread(values[:, None] + 1, PARTS, 21)[..., 0]
    assert spread_R[1].tolist() == [5] * 3 + [6] * 3 + [7] * 6 + [8] * 8 + [0]


def test_a_batch_that_is_not_whole_rows_says_so():
    model, variables = make()
    few = jax.tree.map(lambda x: x[:6], make_pictures())
    with pytest.raises(InputError, match=r"pack=\(3, 3, 6, 8\): 6 pictures are not whole rows"):
        model.apply(variables, few, train=True)
    found = jax.eval_shape(model.apply, variables, few)  # evaluation packs nothing
    assert found.shape == (6, 5)
    assert model.num_tokens_in_training == 6  # (3 + 3 + 6 + 8) / 4, and the class token


@pytest.mark.slow
@pytest.mark.parametrize("form", ["attention", "rows"])
def test_forms_with_kernels_compute_the_same(form, interpreted_kernels):
    """Class tokens give pictures numbers of tokens that 8 does not divide."""
    model, variables = make(depth=2, stochastic_depth=0.5)
    with jax.set_mesh(make_mesh(replica=1, data=-1, fsdp=1, tensor=1, devices=jax.devices()[:1])):
        forms = tpu_forms(model, jax.sharding.get_mesh())
        found = in_training(model.clone(ops=forms[form]))(variables, make_pictures())
    check_close(found, in_training(model)(variables, make_pictures()))


@pytest.mark.slow
def test_kernels_in_bfloat16_are_as_near_as_the_plain_form(interpreted_kernels):
    model, variables = make(depth=2)
    exact = in_training(model)(variables, make_pictures())
    half = model.clone(dtype=jnp.bfloat16)
    with jax.set_mesh(make_mesh(replica=1, data=-1, fsdp=1, tensor=1, devices=jax.devices()[:1])):
        by_kernels = half.clone(ops=tpu_forms(half, jax.sharding.get_mesh())["rows"])
        found = in_training(by_kernels)(variables, make_pictures())

    def error(other):
        apart = jax.tree.map(jnp.subtract, other, exact)
        pairs = zip(apart, exact, strict=True)
        return [float(optax.tree.norm(x) / optax.tree.norm(y)) for x, y in pairs]

    plain = error(in_training(half)(variables, make_pictures()))
    assert all(a < 1.2 * b for a, b in zip(error(found), plain, strict=True))


@pytest.mark.slow
def test_random_draws_are_each_pictures_own():
    model, variables = make(pool="gap", stochastic_depth=0.5, uniform_depth=True)
    found = in_training(model)(variables, make_pictures())[1]
    whole = in_training(model.clone(stochastic_depth=0.0))(variables, make_pictures())[1]
    none = jax.tree_util.tree_map_with_path(
        lambda path, x: x * (path[-2].key not in ("out", "down")), variables
    )
    without = in_training(model)(none, make_pictures())[1]
    dropped = np.abs(found - without).max(axis=1) < 1e-5
    assert any(len({*of_row}) == 2 for of_row in dropped.reshape(2, 4).tolist())
    few = model.clone(stochastic_depth=0.0, keep_tokens=0.5)
    found, other = (in_training(few)(variables, make_pictures(p))[1] for p in (0.0, 9.0))
    np.testing.assert_allclose(found, other, atol=1e-5)
    assert not np.allclose(found, whole, atol=1e-3)
