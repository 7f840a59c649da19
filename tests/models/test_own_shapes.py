"""Pictures in their own shape: a padded batch of them computes as each image alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_vit import random_params
from padded import MOST, PATCH, as_pictures

from vit_jax import create_model
from vit_jax.base.errors import InputError
from vit_jax.devices.kernels import tpu_forms
from vit_jax.devices.mesh import make_mesh
from vit_jax.models.dot_product import dot_product_attention, plain_attention
from vit_jax.models.patches import count_kept_of, draw_among
from vit_jax.planning.kernel_cycles import has_kernel
from vit_jax.transfer.resample import resample_grid

GRIDS = ((2, 5), (3, 3), (1, 1))
SIZES = {"width": 32, "depth": 1, "mlp_dim": 48, "num_heads": 2, "patch_size": PATCH}


def make_images():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(1, r * PATCH, c * PATCH, 3)).astype(np.float32) for r, c in GRIDS]


def make(image_size=(12, 12), **fields):
    model = create_model("ViT-Ti/4", 5, image_size, **SIZES | fields)
    return model, {"params": random_params(model, jnp.zeros((1, 12, 12, 3)))}


def alone(model, variables, image):
    """What the model of that image size gives, with learned positions resampled to its grid."""
    size = image.shape[1:3]
    params, new = dict(variables["params"]), model.clone(image_size=size)
    if "pos_embedding" in params:
        convention = {"bilinear": "linear_antialiased", "bicubic": "antialiased"}[model.pos_filter]
        tables = np.asarray(params["pos_embedding"])
        params["pos_embedding"] = resample_grid(tables, model.grid, new.grid, convention=convention)
    return jax.jit(new.apply)({"params": params}, image)


MODELS = {
    "token": {"registers": 2},
    "gap": {"pool": "gap", "norm_pooled": True, "pos_filter": "bicubic", "scan": True, "depth": 2},
    "map": {"pool": "map", "pos_embed_class_token": False, "remat": "full"},
    "token_gap": {"pool": "token_gap", "pos_embed": "sincos_2d", "qk_norm": True},
    "shared": {"pool": "gap", "pos_embed": "sincos_2d", "pos_embed_at": "layers_shared"},
    "turned": {"pos_embed": "none", "rotary": "normalised", "registers": 1, "pool": "gap"},
    "counted": {"pos_embed": "none", "rotary": "indices", "rotary_side": 7.0, "registers": 4,
                "rotary_registers": 50.0},
}  # fmt: skip


QUICK = ("gap", "counted")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]
)
def test_a_padded_batch_is_its_images_one_by_one(name):
    model, variables = make(**MODELS[name], max_tokens=MOST)
    images = make_images()
    found = jax.jit(model.apply)(variables, as_pictures(images, padding=9.0))
    for logits, image in zip(found, images, strict=True):
        np.testing.assert_allclose(logits, alone(model, variables, image)[0], atol=2e-5)
    assert not np.allclose(found[0], found[1], atol=1e-2)


def test_padding_gets_no_gradient():
    model, variables = make(pool="gap")
    pictures = as_pictures(make_images())

    def loss(patches):
        return (model.apply(variables, pictures._replace(patches=patches)) ** 2).sum()

    grads = np.abs(jax.jit(jax.grad(loss))(pictures.patches)).max(axis=(2, 3, 4))
    is_patch = np.arange(MOST)[None] < np.asarray(pictures.counts)[:, None]
    assert (grads[is_patch] > 0).all()
    assert (grads[~is_patch] == 0).all()


@pytest.mark.parametrize("attend", [dot_product_attention, plain_attention])
def test_only_the_first_keys_count(attend):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 2, 4)).astype(np.float32)
    few = np.array([4, 6], np.int32)
    found = attend(q, k, v, num_keys_B=few)
    expected = [attend(q[:1], k[:1, :4], v[:1, :4]), attend(q[1:], k[1:], v[1:])]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-6)


def test_dropped_tokens_are_each_pictures_own():
    counts, num, share = jnp.array([1, 4, 7, 10]), 10, 0.5
    kept = count_kept_of(counts, num, share)
    assert kept.tolist() == [1, 2, 4, 5]
    drawn = np.asarray(draw_among(jax.random.key(0), counts, num, share))
    assert drawn.shape == (4, 5)
    for row, count, number in zip(drawn, counts, kept, strict=True):
        own = row[: int(number)]
        assert (np.diff(own) > 0).all()
        assert own.max() < count
        assert len({*row}) == 5  # no patch twice, padding included
    other = np.asarray(draw_among(jax.random.key(1), counts, num, share))
    assert (drawn != other).any()


def test_training_that_keeps_some_tokens_ignores_padding():
    model, variables = make(pool="gap", keep_tokens=0.5, max_tokens=MOST)
    assert model.num_tokens_in_training == 6
    options = {"train": True, "rngs": {"dropout": jax.random.key(0)}}
    apply = jax.jit(lambda pictures: model.apply(variables, pictures, **options))
    found, other = (apply(as_pictures(make_images(), padding)) for padding in (0.0, 9.0))
    np.testing.assert_allclose(found, other, atol=2e-5)
    whole = jax.jit(model.apply)(variables, as_pictures(make_images()))
    assert not np.allclose(found, whole, atol=1e-3)


def test_what_needs_one_size_says_so():
    with pytest.raises(InputError, match="pos_embed='learned_2d', pos_embed_at='stem': pictures"):
        make(pos_embed="learned_2d", max_tokens=MOST)
    with pytest.raises(InputError, match="name: a AxialViT takes images of one size"):
        create_model("Axial-ViT-B/16", 5, 32, max_tokens=4)
    model, variables = make(pool="gap")
    pictures = as_pictures(make_images())
    with pytest.raises(InputError, match=r"pictures in patches of \(4, 4, 1\): this model needs"):
        model.apply(variables, pictures._replace(patches=pictures.patches[..., :1]))


@pytest.mark.parametrize("form", ["attention", pytest.param("rows", marks=pytest.mark.slow)])
def test_forms_with_kernels_count_the_same_keys(form, interpreted_kernels):
    model, variables = make(pool="gap", max_tokens=MOST)
    with jax.set_mesh(make_mesh(replica=1, data=-1, fsdp=1, tensor=1, devices=jax.devices()[:1])):
        ops = tpu_forms(model, jax.sharding.get_mesh())[form]
        program = jax.jit(model.clone(ops=ops).apply).trace(variables, as_pictures(make_images()))
        assert has_kernel(program.jaxpr.jaxpr, "short_attention_forward")
        found = program.lower().compile()(variables, as_pictures(make_images()))
    expected = jax.jit(model.apply)(variables, as_pictures(make_images()))
    np.testing.assert_allclose(found, expected, atol=2e-5)
