"""LoRA adapters: their equation, their parameters, and their merging."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import state_shardings
from vit_jax.models import create_model
from vit_jax.models.dense import LoraProduct
from vit_jax.transfer import load_pretrained, save_pretrained
from vit_jax.transfer.fit import merge_adapters, unstack_layers

SIZES = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2}
IMAGES = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)), jnp.float32)


def make(name="ViT-Ti/8", **fields):
    model = create_model(name, 5, 16, **SIZES | fields)
    return model, jax.jit(model.init)(jax.random.key(0), IMAGES)["params"]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params):
    return model.apply({"params": params}, IMAGES)


def randomised(params):
    """`params` with no leaf of zeros."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    drawn = [0.2 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, drawn)


def test_equation():
    layer = LoraProduct(6, rank=2)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    p = randomised(layer.init(jax.random.key(0), x)["params"])
    assert {name: leaf.shape for name, leaf in p.items()} == {
        "kernel": (4, 6), "bias": (6,), "lora_a": (4, 2), "lora_b": (2, 6),
    }  # fmt: skip
    expected = x @ (p["kernel"] + p["lora_a"] @ p["lora_b"])
    found, bias = layer.apply({"params": p}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bias, p["bias"])


@pytest.mark.parametrize(
    ("name", "scan"),
    [("ViT-Ti/8", False), pytest.param("DeiT-Ti/8", True, marks=pytest.mark.slow)],
)
def test_a_new_adapter_changes_nothing_bit_by_bit(name, scan):
    model, params = make(name, scan=scan, lora_rank=4)
    plain, plain_params = make(name, scan=scan)
    named = tree.flatten_names(params)
    base = {n: named.pop(n) for n in tree.flatten_names(plain_params)}
    assert {n.rpartition("attention/")[2] for n in named} == {
        f"{layer}/lora_{factor}" for layer in ("query", "value") for factor in "ab"
    }
    head = {n: jnp.ones_like(x) for n, x in base.items() if n.startswith("head")}
    params = tree.unflatten_names(base | named | head)
    plain_params = tree.unflatten_names(base | head)
    logits = jax.jit(model.apply)({"params": params}, IMAGES)
    assert np.ptp(logits[:, 0]) > 0
    np.testing.assert_array_equal(jax.jit(plain.apply)({"params": plain_params}, IMAGES), logits)


def test_scanned_equals_unrolled_equals_merged():
    model, params = make(lora_rank=4, scan=True)
    params = randomised(params)
    logits = logits_of(model, params)
    unrolled = unstack_layers(jax.tree.map(np.asarray, params))
    model = model.clone(scan=False)
    np.testing.assert_allclose(logits_of(model, unrolled), logits, atol=1e-5)
    plain, merged = merge_adapters(model, tree.flatten_names(unrolled))
    assert plain.lora_rank is None and not any("lora" in name for name in merged)
    merged = tree.unflatten_names(merged)
    np.testing.assert_allclose(logits_of(plain, merged), logits, atol=1e-5)


@pytest.mark.parametrize("format", ["npz", "timm"])
def test_it_is_saved_merged(format, tmp_path):
    model, params = make(lora_rank=4, scan=True)
    params = randomised(params)
    path = tmp_path / "m.npz" if format == "npz" else tmp_path / "m"
    save_pretrained(path, model, {"params": params}, format=format)
    found, variables = load_pretrained(path)
    assert found.lora_rank is None
    expected = logits_of(model, params)
    np.testing.assert_allclose(logits_of(found, variables["params"]), expected, atol=1e-5)
    with at_fault("lora_rank"):
        load_pretrained(path, lora_rank=4)


def test_adapters_are_sharded_like_their_kernel():
    mesh = make_mesh(replica=1, data=2, fsdp=2, tensor=2)
    model = create_model("ViT-Ti/8", 5, 16, **SIZES, lora_rank=4, scan=True)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    specs = {n: s.spec for n, s in tree.flatten_names(state_shardings(shapes, mesh)).items()}
    layer = "params/encoder/layers/attention/query"
    assert specs[f"{layer}/kernel"] == P(None, "fsdp", "tensor")
    assert specs[f"{layer}/lora_a"] == P(None, "fsdp")
    assert specs[f"{layer}/lora_b"] == P(None, None, "tensor")
