from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_vit
import pytest
from cheap_tracing import ContextOfMany, traced_once
from numpy_vit import float64, random_params

from vit_jax.base import tree
from vit_jax.models import dot_product
from vit_jax.models.attention import Attention
from vit_jax.models.block_ops import multiply_on_cpu
from vit_jax.models.dot_product import choose_attention, dot_product_attention
from vit_jax.models.dropout import draw_kept, threefry_bytes
from vit_jax.models.gelu import GELU
from vit_jax.models.layers import Encoder, EncoderBlock, Mlp

B, N, D, H, F = 3, 5, 12, 3, 20
KEYS = {"dropout": jax.random.key(7)}


def train(module, params, *args, **kwargs):
    """What `module` gives in training."""
    return jax.jit(lambda p: module.apply({"params": p}, *args, rngs=KEYS, **kwargs))(params)


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


X_BND = normal(B, N, D)


def assert_same(ours, reference, tolerance=2e-6):
    scale = np.abs(reference).max()
    np.testing.assert_allclose(ours, reference, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("shape", [(B, D), (B, N, D)])
def test_gradients_of_the_product_on_cpus(shape):
    x, kernel, g = normal(*shape, seed=1), normal(D, F, seed=2), normal(*shape[:-1], F, seed=3)
    y, gradients = jax.vjp(multiply_on_cpu, x, kernel)
    plain_y, plain_gradients = jax.vjp(jnp.dot, x, kernel)
    for ours, plain in zip((y, *gradients(g)), (plain_y, *plain_gradients(g)), strict=True):
        assert_same(ours, plain)
    assert "transpose[" in str(jax.make_jaxpr(plain_gradients)(g))
    assert "transpose[" not in str(jax.make_jaxpr(gradients)(g))


BY_JAX = {
    "tanh": partial(jax.nn.gelu, approximate=True),
    "exact": partial(jax.nn.gelu, approximate=False),
    "quick": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize(
    ("form", "gated"), [("tanh", False), ("exact", False), ("quick", False), ("silu", True)]
)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_gelu_with_gate_and_dropout_is_that_of_jax(form, gated, dropped, dtype):
    x, g = jnp.linspace(-6, 6, 1001).astype(dtype), normal(1001).astype(dtype)
    kept = jnp.arange(1001) % 3 > 0 if dropped else None
    args = (x, normal(1001, seed=1).astype(dtype)) if gated else (x,)

    def by_jax(x, *others):
        y = BY_JAX[form](x.astype(jnp.float32))
        for other in others:
            y *= other.astype(jnp.float32)
        return (jnp.where(kept, y * (256 / 192), 0) if dropped else y).astype(dtype)

    expected, vjp = jax.vjp(by_jax, *args)
    found, our_vjp = jax.vjp(lambda x, other=None: GELU[form](x, other, kept, 0.25), *args)
    assert found.dtype == our_vjp(g)[0].dtype == dtype
    tolerance = 6e-6 if dtype == jnp.float32 else 2e-2
    assert_same(found.astype(jnp.float32), expected.astype(jnp.float32), tolerance=tolerance)
    for ours, theirs in zip(our_vjp(g), vjp(g), strict=True):
        assert_same(ours.astype(jnp.float32), theirs.astype(jnp.float32), tolerance=tolerance)


def test_attention_of_queries_over_other_tokens():
    queries_BMD = normal(B, 2, D, seed=1)
    attention = Attention(num_heads=H)
    params = random_params(attention, queries_BMD, X_BND)
    ours = jax.jit(attention.apply)({"params": params}, queries_BMD, X_BND)
    for i in range(B):
        expected = numpy_vit.attention(float64(params), queries_BMD[i], X_BND[i], H)
        assert_same(ours[i], expected)


def test_attention_survives_scores_that_overflow_exp():
    q = jnp.full((1, 2, 1, 4), 100.0)
    k = jnp.stack([jnp.full(4, 100.0), jnp.full(4, -100.0)])[None, :, None]
    v = jnp.asarray([[1.0], [2.0]])[None, :, None]
    assert dot_product_attention(q, k, v).ravel().tolist() == [1.0, 1.0]


def test_attention_dropout_zeroes_weights_and_keeps_their_expectation():
    tokens, rate = 64, 0.25
    q, k = normal(4, tokens, 2, 8), normal(4, tokens, 2, 8, seed=1)
    identity = jnp.broadcast_to(jnp.eye(tokens)[:, None], (4, tokens, 2, tokens))
    kept = dot_product_attention(q, k, identity)
    mask = draw_kept(threefry_bytes, jax.random.key(0), rate, (4, 2, tokens, tokens), (None,) * 4)
    dropped = dot_product_attention(q, k, identity, kept_BHNM=mask, dropout=rate)
    zero = np.asarray(dropped == 0)
    assert zero.mean() == pytest.approx(rate, abs=0.01)  # of 32,768 weights: 4 sigma
    np.testing.assert_allclose(dropped[~zero], kept[~zero] / (1 - rate), rtol=1e-5)


def plain_attention(q, k, v, bias, kept, rate):
    """As the paper writes it; differentiated by JAX."""
    weights = jax.nn.softmax(jnp.einsum("bnhk,bmhk->bhnm", q, k) / q.shape[-1] ** 0.5 + bias)
    return jnp.einsum("bhnm,bmhk->bnhk", jnp.where(kept, weights / (1 - rate), 0), v)


ATTENTIONS = [choose_attention("cpu"), choose_attention("tpu")]


def test_attention_is_chosen_by_platform():
    # By whole steps: docs/explanation/attention.md.
    chosen = {platform: choose_attention(platform) for platform in ("cpu", "gpu", "tpu")}
    heads_first, plain = dot_product.dot_product_attention, dot_product.plain_attention
    assert chosen == {"cpu": heads_first, "gpu": heads_first, "tpu": plain}


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize(("rate", "biased"), [(0.0, False), (0.25, True)])
def test_attention_gradients_are_those_of_the_plain_form(rate, biased, attend):
    q, g = normal(2, N, H, 4), normal(2, N, H, 6, seed=3)  # fewer queries than keys
    k, v = normal(2, N + 2, H, 4, seed=1), normal(2, N + 2, H, 6, seed=2)
    bias = normal(2, H, N, N + 2, seed=4) if biased else None
    kept = jax.random.bernoulli(jax.random.key(0), 1 - rate, (2, H, N, N + 2))
    dropped = {"kept_BHNM": kept, "dropout": rate} if rate else {}

    def ours(q, k, v, bias):
        return attend(q, k, v, bias_BHNM=bias, **dropped)

    def plain(q, k, v, bias):
        return plain_attention(q, k, v, bias if biased else 0.0, kept, rate)

    @partial(jax.jit, static_argnums=0)
    def out_and_gradients(form, *args):
        out, vjp = jax.vjp(form, *args)
        return out, vjp(g)

    expected, expected_grads = out_and_gradients(plain, q, k, v, bias)
    for form in (ours, jax.checkpoint(ours)):
        out, grads = out_and_gradients(form, q, k, v, bias)
        assert_same(out, expected)
        assert (grads[3] is not None) == biased
        for found, grad in zip(grads[: 3 + biased], expected_grads, strict=False):
            assert_same(found, grad)


def test_attention_gradients_in_bfloat16_are_near_and_of_its_dtype():
    q, k, v, g = (normal(2, 64, H, 8, seed=i) for i in range(4))

    @jax.jit
    def gradients(q, k, v):
        out, vjp = jax.vjp(dot_product_attention, q, k, v)
        return vjp(g.astype(out.dtype))

    halves = (x.astype(jnp.bfloat16) for x in (q, k, v))
    for found, grad in zip(gradients(*halves), gradients(q, k, v), strict=True):
        assert found.dtype == jnp.bfloat16
        assert_same(found.astype(jnp.float32), grad, tolerance=0.02)


def test_switches_of_a_block():
    """LayerNorm of queries and keys, factors of the branches; neither has parameters when off."""
    block = EncoderBlock(num_heads=H, mlp_dim=F, qk_norm=True, layer_scale=1e-4)
    params = random_params(block, X_BND, 0.0, False)
    ours, _ = jax.jit(block.apply, static_argnums=3)({"params": params}, X_BND, 0.0, False)
    for i in range(B):
        assert_same(ours[i], numpy_vit.encoder_block(float64(params), X_BND[i], H, "tanh"))

    off = random_params(EncoderBlock(num_heads=H, mlp_dim=F), X_BND, 0.0, False)
    initial = jax.jit(lambda key: block.init(key, X_BND, 0.0, False))(jax.random.key(0))["params"]
    off, initial = tree.flatten_names(off), tree.flatten_names(initial)
    added = {name: initial[name] for name in initial.keys() - off.keys()}
    assert {name: leaf.shape for name, leaf in added.items()} == {
        "attention/query_norm/scale": (D // H,), "attention/key_norm/scale": (D // H,),
        "scale_attention/scale": (D,), "scale_mlp/scale": (D,),
    }  # fmt: skip
    for name, leaf in added.items():
        np.testing.assert_allclose(leaf, 1.0 if "norm" in name else 1e-4, rtol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_parallel_block(norm):
    block = EncoderBlock(
        num_heads=H, mlp_dim=F, parallel=True, norm=norm, qk_norm=True, qkv_bias=False
    )
    params = random_params(block, X_BND, 0.0, False)
    ours, _ = jax.jit(block.apply, static_argnums=3)({"params": params}, X_BND, 0.0, False)
    for i in range(B):
        expected = numpy_vit.encoder_block(float64(params), X_BND[i], H, "tanh", norm)
        assert_same(ours[i], expected)
    # One norm; it has a bias unless it is rms. Queries, keys and values have none, all else has.
    without_bias = {"attention/query", "attention/key", "attention/value"}
    without_bias |= {"attention/query_norm", "attention/key_norm"}
    without_bias |= {"norm"} if norm == "rms" else set()
    names = set(tree.flatten_names(params))
    layers = {name.rpartition("/")[0] for name in names}
    assert layers == without_bias | {"norm", "attention/out", "mlp/up", "mlp/down"}
    assert {layer for layer in layers if f"{layer}/bias" not in names} == without_bias


def shares(values):
    """{value: how often, of 1}."""
    found, counts = np.unique(np.round(np.asarray(values, np.float64), 5), return_counts=True)
    return dict(zip(found.tolist(), (counts / counts.sum()).tolist(), strict=True))


def test_mlp_drops_after_each_of_its_layers():
    rate, x_BND = 0.25, jnp.zeros((20, 50, 16))
    mlp = Mlp(mlp_dim=16, dropout=rate)
    identity, ones = np.eye(16, dtype=np.float32), np.ones(16, np.float32)
    params = {
        "up": {"kernel": 0 * identity, "bias": 30 * ones},  # GELU(30) = 30
        "down": {"kernel": identity, "bias": 2 * ones},
    }
    out = train(mlp, params, x_BND, train=True)
    kept = 1 - rate
    expected = {
        0.0: rate,  # the second dropped it
        round(2 / kept, 5): kept * rate,  # only the first did, before the second layer's bias
        round((30 / kept + 2) / kept, 5): kept**2,
    }
    assert shares(out) == pytest.approx(expected, abs=0.02)
    assert shares(mlp.apply({"params": params}, x_BND)) == {32.0: 1.0}


def constant_branch_params(block, x_BND, *, attention, mlp):
    """Parameters that make the two branches of a block constant."""
    params = jax.tree.map(np.zeros_like, random_params(block, x_BND, 0.0, False))
    params["attention"]["out"]["bias"] += attention
    params["mlp"]["down"]["bias"] += mlp
    return params


def test_block_drops_after_the_output_projection_of_attention():
    rate, x_BND = 0.25, jnp.ones((20, 50, 16))
    block = EncoderBlock(num_heads=2, mlp_dim=4, dropout=rate)
    params = constant_branch_params(block, x_BND, attention=3.0, mlp=0.0)
    out, _ = train(block, params, x_BND, 0.0, True)
    expected = {1.0: rate, 1.0 + 3.0 / (1 - rate): 1 - rate}
    assert shares(out) == pytest.approx(expected, abs=0.02)


def test_stochastic_depth_drops_each_branch_of_whole_examples():
    rate, x_BND = 0.25, jnp.zeros((4000, 2, 4))
    block = EncoderBlock(num_heads=2, mlp_dim=4, stochastic_depth=True)
    params = constant_branch_params(block, x_BND, attention=3.0, mlp=6.0)
    out = np.asarray(train(block, params, x_BND, rate, True)[0])
    assert (out == out[:, :1, :1]).all()
    kept = 1 - rate
    expected = {0.0: rate**2, 4.0: kept * rate, 8.0: kept * rate, 12.0: kept**2}
    assert shares(out[:, 0, 0]) == pytest.approx(expected, abs=0.03)  # 4 sigma
    assert out.mean() == pytest.approx(9.0, rel=0.04)
    evaluated, _ = jax.jit(block.apply, static_argnums=3)({"params": params}, x_BND, rate, False)
    assert shares(evaluated) == {9.0: 1.0}


@pytest.mark.parametrize(("scan", "uniform"), [(False, False), (True, False), (True, True)])
def test_stochastic_depth_grows_linearly_from_zero(scan, uniform):
    depth, x_BND = 3, jnp.zeros((2000, 1, 8))
    encoder = Encoder(depth, num_heads=2, mlp_dim=4, stochastic_depth=0.8, uniform_depth=uniform,
                      scan=scan)  # fmt: skip
    params = jax.tree.map(np.zeros_like, random_params(encoder, x_BND))
    params["norm"]["scale"] += 1
    for i in range(depth):  # layer i raises channel i
        if scan:
            params["layers"]["mlp"]["down"]["bias"][i, i] = 1
        else:
            params[f"layer_{i}"]["mlp"]["down"]["bias"][i] = 1
    out = train(encoder, params, x_BND, train=True)[:, 0]
    raised = np.asarray(out[:, :depth] > out[:, -1:]).mean(axis=0)
    rates = [0.2, 0.2, 0.2] if uniform else [1.0, 0.6, 0.2]
    np.testing.assert_allclose(raised, rates, atol=0.045)  # 4 sigma


@pytest.mark.parametrize("scan", [False, True])
def test_layers_draw_apart(scan):
    x_BND = jnp.zeros((1000, 1, 8)).at[..., -1].set(1.0)
    encoder = Encoder(2, num_heads=2, mlp_dim=4, dropout=0.5, scan=scan)
    params = jax.tree.map(np.zeros_like, random_params(encoder, x_BND))
    params["norm"]["scale"] += 1
    for i in range(2):  # layer i adds i + 1 to channel 0, dropout makes that 0 or 2 (i + 1)
        if scan:
            params["layers"]["mlp"]["down"]["bias"][i, 0] = i + 1
        else:
            params[f"layer_{i}"]["mlp"]["down"]["bias"][0] = i + 1
    out = train(encoder, params, x_BND, train=True)[:, 0]
    added = (out[:, 0] - out[:, 1]) / (out[:, -1] - out[:, 1])  # the last norm undone
    expected = {0.0: 0.25, 2.0: 0.25, 4.0: 0.25, 6.0: 0.25}
    assert shares(jnp.round(added, 3)) == pytest.approx(expected, abs=0.06)  # 4 sigma


class Constant(NamedTuple):
    """An initialiser that is a method."""

    value: float

    def init(self, key, shape):
        return jnp.full(shape, self.value)


def test_cheap_tracing_keeps_initialisers_and_threads_apart():
    """What conftest.py does to Flax and JAX hides no difference between two parameters."""

    def filled(value, dtype=None):
        return lambda key, shape, *, add=0: jnp.full(shape, value + add, dtype)

    given = [filled(1), filled(1.0), filled(1, jnp.int8), Constant(2.0).init, Constant(3.0).init]
    found = [traced_once(init, 1)(jax.random.key(0), (1,)) for init in given]
    assert [x.dtype.name for x in found] == ["int32", "float32", "int8", "float32", "float32"]
    assert [float(x[0]) for x in found] == [1, 1, 1, 2, 3]
    assert traced_once(filled(1), 1) is traced_once(filled(1), 1)
    context = ContextOfMany(object)
    with ThreadPoolExecutor(1) as other:
        assert context() is context() is not other.submit(context).result()
