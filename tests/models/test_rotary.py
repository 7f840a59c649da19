"""Rotary positions and registers, and a model with all blocks of today at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_vit import random_params

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.devices.flops import count_flops
from vit_jax.devices.sharding import rule_of
from vit_jax.models import create_model
from vit_jax.models.rotary import turn
from vit_jax.transfer.fit import stack_layers, unstack_layers

SIZES = {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2}
# Every block of 2023 to 2026 that models can have at once.
ALL = {
    "registers": 4, "pre_norm": True, "patch_bias": False, "key_bias": False, "norm": "rms",
    "gated_mlp": True, "mlp_norm": True, "gelu": "silu", "qk_norm": True, "layer_scale": 0.5,
    "rotary": "indices", "rotary_registers": 50.0, "lora_rank": 2, "pool": "token_gap",
}  # fmt: skip
IMAGES = np.random.default_rng(0).standard_normal((2, 8, 12, 3)).astype(np.float32)


def make(num_classes=5, **fields):
    return create_model("ViT-mu/4", num_classes, (8, 12), **(SIZES | fields))


def test_queries_and_keys_are_turned_as_complex_numbers():
    rng = np.random.default_rng(1)
    x_BNHK = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    angles_NA = rng.uniform(0, 6, (3, 4)).astype(np.float32)
    turns_1NK = np.concatenate([np.cos(angles_NA), np.sin(angles_NA)], axis=1)[None]
    z = (x_BNHK[..., :4] + 1j * x_BNHK[..., 4:]) * np.exp(1j * angles_NA)[None, :, None]
    found = turn(x_BNHK, turns_1NK)
    np.testing.assert_allclose(found, np.concatenate([z.real, z.imag], axis=3), atol=1e-6)


@pytest.mark.parametrize("kind", ["indices", "normalised"])
def test_logits_depend_on_offsets_alone(kind):
    model = make(rotary=kind, registers=1)
    turns_1NK = model.turns((3, 4), 2, 1, 8)
    assert turns_1NK.shape == (1, 14, 8)
    np.testing.assert_array_equal(turns_1NK[0, :2], [[1, 1, 1, 1, 0, 0, 0, 0]] * 2)
    q, k = np.random.default_rng(2).standard_normal((2, 1, 14, 1, 8)).astype(np.float32)
    q, k = (turn(np.broadcast_to(x[:, :1], x.shape), turns_1NK)[0, 2:, 0] for x in (q, k))
    logits = np.einsum("nk,mk->nm", q, k).reshape(3, 4, 3, 4)
    for row in range(2):
        for column in range(3):  # one down and one right, wherever the query is
            np.testing.assert_allclose(
                logits[row, column, row + 1, column + 1], logits[0, 0, 1, 1], atol=1e-5
            )
    assert abs(logits[0, 0, 1, 0] - logits[0, 0, 0, 1]) > 1e-3  # rows are not columns


def test_a_side_scales_indices_and_registers_have_a_grid_of_their_own():
    plain, scaled = make(rotary="indices"), make(rotary="indices", rotary_side=16)
    turns, at_16 = plain.turns((16, 16), 1, 0, 8), scaled.turns((16, 16), 1, 0, 8)
    np.testing.assert_array_equal(turns, at_16)
    small = scaled.turns((8, 8), 1, 0, 8)[0, 1:].reshape(8, 8, 8)
    np.testing.assert_allclose(small, at_16[0, 1:].reshape(16, 16, 8)[::2, ::2], atol=1e-6)
    own = make(rotary="indices", rotary_registers=50.0, registers=4, rotary_base=50.0)
    found = own.turns((4, 4), 5, 4, 8)[0]
    np.testing.assert_array_equal(found[1:5], found[5:].reshape(4, 4, 8)[:2, :2].reshape(4, 8))


def test_training_changes_coordinates_for_all_images_alike():
    changes = {"rotary_shift": 0.5, "rotary_jitter": 1.5, "rotary_rescale": 2.0}
    for key, most in changes.items():
        model = make(rotary="normalised", **{key: most})
        assert model.is_random
        turns = [model.turns((2, 3), 1, 0, 8, jax.random.key(i)) for i in range(2)]
        still = model.turns((2, 3), 1, 0, 8)
        assert turns[0].shape == still.shape
        assert all(np.abs(t[0, 1:] - still[0, 1:]).max() > 0.05 for t in turns)
        assert np.abs(turns[0] - turns[1]).max() > 0.05
    model = make(rotary="normalised", **changes)
    params = {"params": random_params(model, IMAGES)}
    in_training = jax.jit(
        lambda key: model.apply(params, IMAGES, train=True, rngs={"dropout": key})
    )
    trained = [in_training(jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(trained[0], trained[1])
    assert np.abs(trained[0] - trained[2]).max() > 1e-4
    assert np.abs(trained[0] - jax.jit(model.apply)(params, IMAGES)).max() > 1e-4


@functools.cache
def params_of_all():
    return random_params(make(**ALL), IMAGES)


def test_kept_patches_take_their_turns_along():
    model, order = make(**ALL), jnp.array([[3, 0, 5, 1, 4, 2]] * 2)

    def encode(model, keep):
        return model.encode(model.embed(IMAGES), keep=keep)

    apply = jax.jit(functools.partial(model.apply, {"params": params_of_all()}, method=encode))
    expected, found = apply(None), apply(order)
    prefix = model.num_prefix_tokens
    assert prefix == 5
    np.testing.assert_allclose(found[:, prefix:], expected[:, prefix:][:, order[0]], atol=2e-5)
    np.testing.assert_allclose(found[:, :prefix], expected[:, :prefix], atol=2e-5)
    few = apply(order[:, :2])
    assert few.shape == (2, prefix + 2, 16)
    assert np.abs(few[:, prefix:] - found[:, prefix : prefix + 2]).max() > 1e-3


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_scanned_is_unrolled(remat):
    def loss(model, params):
        return jnp.square(model.apply({"params": params}, IMAGES)).sum()

    def gradient(model, params):
        return jax.jit(jax.grad(functools.partial(loss, model)))(params)

    params = params_of_all()
    expected = gradient(make(**ALL), params)
    scanned = make(**ALL, scan=True, remat=remat)
    found = unstack_layers(gradient(scanned, stack_layers(params)))
    expected, found = tree.flatten_names(expected), tree.flatten_names(found)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = np.abs(grad).max()
        assert scale > 0, name
        np.testing.assert_allclose(found[name], grad, atol=1e-4 * scale, err_msg=name)


def test_every_parameter_has_its_place():
    params = tree.flatten_names(params_of_all())
    new = {"register_tokens", "embedding_norm/scale", "encoder/layer_0/mlp/gate/kernel",
           "encoder/layer_1/mlp/norm/scale"}  # fmt: skip
    assert new <= params.keys()
    assert {"embedding/bias", "encoder/layer_0/attention/key/bias"}.isdisjoint(params)
    assert [name for name in params if rule_of(name) is None] == []
    assert tree.parts(params_of_all()) == [
        "embedding",
        "encoder/layer_0",
        "encoder/layer_1",
        "head",
    ]
    assert {tree.part_of("register_tokens"), tree.part_of("embedding_norm/scale")} == {"embedding"}
    assert rule_of("encoder/layer_0/mlp/gate/kernel") == ("fsdp", "tensor")


@pytest.mark.parametrize(
    "fields", [ALL | {"lora_rank": None}, {"pool": "token_gap", "keep_tokens": 0.5}]
)
def test_flops_by_sizes_are_those_of_the_program(fields):
    model = make(**fields)
    params = {name: leaf for name, leaf in random_params(model, IMAGES).items()}
    rngs = {"dropout": jax.random.key(0)}

    def loss(params, images):
        return model.apply({"params": params}, images, train=True, rngs=rngs).sum()

    assert count_flops(jax.grad(loss), params, IMAGES[:1]) == model.flops_by_sizes


def test_an_axial_vit_has_no_registers_and_no_turns():
    with pytest.raises(InputError, match="an Axial-ViT has only the tokens of its grid"):
        create_model("Axial-ViT-B/16", registers=4)
