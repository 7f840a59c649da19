"""TPU kernels in Pallas' interpreter, with its race detector, against float64."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.block_ops import (
    add_bias_on_tpu,
    add_bias_plainly,
    repeat_in_order,
    repeat_plainly,
)
from vit_jax.models.dot_product import plain_attention
from vit_jax.models.dropout import drop, most_kept
from vit_jax.models.kernels import long_attention, mlp, projections, short_attention
from vit_jax.models.kernels.rows import Blocks
from vit_jax.models.packing import attend_apart
from vit_jax.models.rotary import turn


@pytest.fixture(autouse=True)
def interpreted():
    """Kernels run in the interpreter, exactly; a race between their copies fails the test."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params), jax.default_matmul_precision("highest"):
        yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def assert_same_vjp(ours, exact, args, grads, tolerance):
    """Outputs and gradients of `ours` in float32 are those of `exact` in float64.

    A gradient that is 0, that of the keys' biases, is compared with the size of the others of its
    shape, which are sums of as many terms.
    """

    def of(fn, dtype):
        def run(args, grads):
            out, vjp = jax.vjp(fn, *args)
            return out, vjp(grads)

        cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), (args, grads))
        return jax.tree.leaves(jax.jit(run)(*cast))

    found = of(ours, jnp.float32)
    with jax.enable_x64(True):
        expected = of(exact, jnp.float64)
    assert len(found) == len(expected)
    for x, reference in zip(found, expected, strict=True):
        size = np.abs(reference).max()
        if size < 1e-9:
            size = max(np.abs(other).max() for other in expected if other.shape == reference.shape)
        scale = max(size, 1.0)
        np.testing.assert_allclose(x, reference, rtol=0, atol=tolerance * scale)


def split(x, num_heads):
    return x.reshape(*x.shape[:-1], num_heads, -1)


@pytest.mark.parametrize(
    ("tokens", "num_keys", "heads", "width", "tables"),
    [
        (24, 17, 3, 64, 2),  # two groups of an odd number of heads, padding, turns of each image
        (136, (130, 3), 2, 8, 0),  # each image has a number of keys of its own
        *(
            pytest.param(*sizes, 0, marks=pytest.mark.slow)
            for sizes in (
                (24, 17, 3, 64),
                (24, (24, 7), 3, 64),
                (136, 130, 2, 8),
                (16, 13, 2, 88),
                (16, 9, 4, 64),
                (16, 16, 2, 72),
                (8, 5, 1, 80),
                (8, 8, 1, 104),
                (8, 1, 2, 128),
            )
        ),
    ],
)
def test_short_attention(tokens, num_keys, heads, width, tables):
    """Without rotary positions (no tables), with one table for all images, or one of each."""
    angles = np.random.default_rng(7).uniform(0, 6, (tables, tokens, width // 2))
    turns = np.float32(np.concatenate([np.cos(angles), np.sin(angles)], axis=2))
    turns_BKN = np.swapaxes(turns, 1, 2) if tables else None
    qkv = tuple(normal(2, tokens, heads * width, seed=i) for i in range(3))
    biases = tuple(normal(heads * width, seed=i) for i in range(3, 6))
    counts = np.arange(tokens)[None, :, None] < np.broadcast_to(num_keys, 2)[:, None, None]
    grad = normal(2, tokens, heads * width, seed=6) * counts  # nothing flows into padding
    of_all, num_keys_B = num_keys, None
    if isinstance(num_keys, tuple):
        of_all, num_keys_B = tokens, jnp.asarray(num_keys, jnp.int32)

    def ours(qkv, biases):
        sizes = short_attention.Sizes(heads, of_all)
        out = short_attention.attention(qkv, biases, turns_BKN, num_keys_B, sizes)
        return jnp.where(counts, out, 0)

    def exact(qkv, biases):
        q, k, v = (split(add_bias_plainly(x, b), heads) for x, b in zip(qkv, biases, strict=True))
        if tables:
            q, k = turn(q, turns), turn(k, turns)
        out = plain_attention(q, k[:, :of_all], v[:, :of_all], num_keys_B=num_keys_B)
        return jnp.where(counts, out.reshape(2, tokens, heads * width), 0)

    assert_same_vjp(ours, exact, (qkv, biases), grad, tolerance=1e-5)


def test_short_attention_of_several_pictures_in_a_row():
    """As the pictures apart, with turns, over a tail of padding."""
    parts, num_keys, tokens = ((2, 8), (1, 16)), jnp.asarray([8, 3, 13, 1, 5, 16]), 40
    angles = np.random.default_rng(7).uniform(0, 6, (2, tokens, 32))
    turns = jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=2), jnp.float32)
    qkv = tuple(normal(2, tokens, 128, seed=i) for i in range(3))
    biases = tuple(normal(128, seed=i) for i in range(3, 6))
    places = np.concatenate([np.arange(n) for m, n in parts for _ in range(m)])
    numbers = np.repeat(np.asarray(num_keys).reshape(2, 3), [8, 8, 16], axis=1)
    counts = np.pad(places < numbers, ((0, 0), (0, 8)))[..., None]

    def ours(qkv, biases):
        sizes = short_attention.Sizes(2, tokens, parts)
        turns_BKN = jnp.swapaxes(turns, 1, 2)
        out = short_attention.attention(qkv, biases, turns_BKN, num_keys, sizes)
        return jnp.where(counts, out, 0)

    def exact(qkv, biases):
        q, k, v = (split(add_bias_plainly(x, b), 2) for x, b in zip(qkv, biases, strict=True))
        given = turn(q, turns), turn(k, turns), v
        attend = lambda *args: plain_attention(*args[:3], num_keys_B=args[3])  # noqa: E731
        out = attend_apart(attend, parts, given, num_keys)
        return jnp.where(counts, out.reshape(2, tokens, 128), 0)

    grad = normal(2, tokens, 128, seed=6) * counts
    assert_same_vjp(ours, exact, (qkv, biases), grad, tolerance=1e-5)


def test_short_attention_goes_through_heads_in_blocks(monkeypatch):
    monkeypatch.setattr(short_attention, "MOST_SCORES", 2 * 16 * 16)
    layout = short_attention._Layout.of(jnp.zeros((2, 16, 384)), short_attention.Sizes(6, 16))
    assert layout.grid == (2, 3) and len(layout.heads) == 2
    test_short_attention(16, 13, 6, 64, 1)


def test_padding_of_short_attention_is_finite_and_gets_no_gradient():
    qkv = tuple(jnp.asarray(normal(1, 16, 64, seed=i), jnp.float32) for i in range(3))
    biases = (jnp.zeros(64),) * 3

    def attend(qkv):
        return short_attention.attention(qkv, biases, None, None, short_attention.Sizes(1, 9))

    out, vjp = jax.vjp(attend, qkv)
    assert np.isfinite(out).all()
    for grad in vjp(jnp.ones_like(out).at[:, 9:].set(0))[0]:
        assert not np.asarray(grad[:, 9:]).any() and np.asarray(grad[:, :9]).any()


@pytest.mark.slow
def test_short_attention_in_bfloat16_is_nearer_than_the_plain_form():
    q, k, v, g = (jnp.asarray(normal(1, 64, 128, seed=i), jnp.float32) for i in range(4))
    biases = (jnp.zeros(128),) * 3

    def errors(attend, dtype):
        out, vjp = jax.vjp(attend, *(x.astype(dtype) for x in (q, k, v)))
        exact, exact_vjp = jax.vjp(plain, q, k, v)
        pairs = zip((out, *vjp(g.astype(dtype))), (exact, *exact_vjp(g)), strict=True)
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]

    def ours(*qkv):
        return short_attention.attention(qkv, biases, None, None, short_attention.Sizes(2, 64))

    def plain(*qkv):
        return plain_attention(*(split(x, 2) for x in qkv)).reshape(1, 64, 128)

    for kernel, by_xla in zip(errors(ours, jnp.bfloat16), errors(plain, jnp.bfloat16), strict=True):
        assert kernel < max(by_xla, 0.004)


@pytest.mark.parametrize(
    ("width", "num_keys"),
    [(80, (131,)), (80, (131, 60)), pytest.param(64, 131, marks=pytest.mark.slow)],
)
def test_long_attention(width, num_keys, monkeypatch):
    """The interpreter with the race detector takes one image only; the other one takes more."""
    tokens, images = 136, np.size(num_keys)
    given = num_keys if isinstance(num_keys, int) else jnp.asarray(num_keys, jnp.int32)
    qkv = tuple(normal(images, tokens, 1, width, seed=i) for i in range(3))
    counts = np.arange(tokens)[None, :, None, None] < np.reshape(num_keys, (-1, 1, 1, 1))
    grad = normal(images, tokens, 1, width, seed=3) * counts
    if images > 1:
        make = partial(long_attention.splash.make_splash_mha, interpret=True)
        monkeypatch.setattr(long_attention.splash, "make_splash_mha", make)

    def ours(*qkv):
        return jnp.where(counts, long_attention.attention(*qkv, given), 0)

    def exact(*qkv):
        num_keys_B = jnp.broadcast_to(given, images)
        return jnp.where(counts, plain_attention(*qkv, num_keys_B=num_keys_B), 0)

    with pltpu.force_tpu_interpret_mode(None) if images > 1 else nullcontext():
        assert_same_vjp(ours, exact, qkv, grad, tolerance=5e-6)


def test_bias_and_its_gradient():
    args, grad = (normal(2, 5, 7), normal(7, seed=1)), normal(2, 5, 7, seed=2)
    assert_same_vjp(add_bias_on_tpu, add_bias_plainly, args, grad, tolerance=1e-6)
    x = jnp.ones((4, 100, 8), jnp.bfloat16)
    _, vjp = jax.vjp(add_bias_on_tpu, x, jnp.ones(8))
    assert vjp(x)[1].tolist() == [400.0] * 8  # bfloat16 would stop counting at 256


def test_repeated_tokens_and_their_gradient():
    args, grad = (normal(1, 5, 7),), normal(3, 5, 7, seed=2)
    forms = (
        lambda x: repeat_in_order(x, 3, x.dtype, lambda grad: grad),
        lambda x: jnp.tile(repeat_plainly(x, 3, x.dtype), (3, 1, 1)),
    )
    assert_same_vjp(*forms, args, grad, tolerance=1e-6)
    _, vjp = jax.vjp(lambda x: repeat_in_order(x, 400, jnp.bfloat16, abs), jnp.ones((1, 2, 8)))
    assert (vjp(jnp.ones((400, 2, 8), jnp.bfloat16))[0] == 400).all()  # summed in float32


@pytest.mark.parametrize(
    ("gelu", "norm", "random", "gated", "keeps", "pieces"),
    [
        ("tanh", "layer", True, False, True, 3),
        ("exact", "rms", False, False, True, 1),
        pytest.param("silu", "layer", True, True, True, 1, marks=pytest.mark.slow),
        ("silu", "layer", True, True, False, 3),
        pytest.param("tanh", "rms", False, False, False, 1, marks=pytest.mark.slow),
    ],
)
def test_mlp(gelu, norm, random, gated, keeps, pieces):
    """The branch of two blocks of rows, with dropout and stochastic depth and without.

    `keeps`: its hidden units, or the backward pass computes them again; `pieces`: of these units.
    """
    R, D, F = 256, 128, 384
    spec = mlp.Spec(gelu, 0.3 if random else 0.0, norm, 1e-6, keeps, Blocks(R, 128, 2**27), pieces)
    draw = np.random.default_rng(0)
    drawn = mlp.Drawn()
    if random:
        bytes_RF, bytes_RD = (draw.integers(0, 256, (R, n), np.uint8) for n in (F, D))
        drawn = mlp.Drawn(bytes_RF, bytes_RD, np.float32(draw.uniform(0, 2, (R, 1))))
    shapes = [(D,), (D,), (D, F), (F,), (F, D), (D,), (D, F), (F,)][: 8 if gated else 6]
    params = tuple(normal(*shape, seed=i) * shape[0] ** -0.5 for i, shape in enumerate(shapes))

    def exact(x, params):
        scale, shift, up, up_bias, down, down_bias, *gate = (
            p if p.ndim == 2 else p[None] for p in params
        )
        centred = x - x.mean(1, keepdims=True) if norm == "layer" else x
        normed = centred / jnp.sqrt((centred**2).mean(1, keepdims=True) + 1e-6) * scale + shift
        y = normed @ up + up_bias
        if gated:
            y *= jax.nn.silu(normed @ gate[0] + gate[1])
        else:
            y = jax.nn.gelu(y, approximate=gelu == "tanh")
        if random:
            y = drop(y, drawn.bytes_RF <= most_kept(0.3), 0.3)
        y = y @ down + down_bias
        if random:
            y = drop(y, drawn.bytes_RD <= most_kept(0.3), 0.3) * drawn.factor_R1
        return x + y

    def ours(x, params):
        return mlp.mlp(x, mlp.Params(*params), drawn, spec)

    args = normal(R, D, seed=8), params
    tolerance = 2e-4 if gelu == "exact" else 2e-5
    assert_same_vjp(ours, exact, args, normal(R, D, seed=9), tolerance=tolerance)


def test_the_exact_gelu_of_a_kernel_is_near_enough():
    z = jnp.linspace(-40, 40, 160_001)
    share, slope = mlp._FORMS["exact"]
    assert np.abs(z * share(z) - jax.nn.gelu(z, approximate=False)).max() < 2.5e-5
    exact = jax.vmap(jax.grad(lambda z: jax.nn.gelu(z, approximate=False)))(z)
    assert np.abs(slope(z) - exact).max() < 4.5e-5
    assert not np.isnan(slope(jnp.float32([-3e38, 3e38]))).any()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_projections(norm):
    """Of two blocks of rows; x, which is returned, gets the gradients of both uses."""
    R, D = 256, 128
    spec = projections.Spec(norm, 1e-6, Blocks(R, 128, 2**27))
    layers = tuple((normal(D, D, seed=i) * D**-0.5, normal(D, seed=i + 3)) for i in range(3))
    norm_params = normal(D, seed=6), normal(D, seed=7)

    def exact(x, norm_params, layers):
        scale, shift = (p[None] for p in norm_params)
        centred = x - x.mean(1, keepdims=True) if norm == "layer" else x
        normed = centred / jnp.sqrt((centred**2).mean(1, keepdims=True) + 1e-6) * scale + shift
        return (*(normed @ kernel + bias[None] for kernel, bias in layers), x)

    args = normal(R, D, seed=8), norm_params, layers
    grads = tuple(normal(R, D, seed=9 + i) for i in range(4))
    ours = lambda *args: projections.project(*args, spec)  # noqa: E731
    assert_same_vjp(ours, exact, args, grads, tolerance=2e-5)


def test_rows_of_a_program_divide_all_and_fit_into_the_memory_of_a_core():
    def found(*sizes):
        blocks, pieces = mlp.find_blocks(*sizes)
        return blocks.block_rows, pieces

    MiB = 2**20
    assert found(64 * 200, 128 * MiB, 1024, 4096) == (512, 1)
    assert found(64 * 200, 64 * MiB, 768, 3072) == (320, 1)
    assert found(64 * 256, 128 * MiB, 1280, 5120) == (512, 2)
    for too_much in (
        (64 * 200, 128 * MiB, 4096, 16384),
        (8 * 25, 128 * MiB, 384, 1536),
        (64 * 200, 128 * MiB, 192, 768),
        (0, 128 * MiB, 384, 1536),
        (64 * 200, 0, 384, 1536),
    ):
        assert mlp.find_blocks(*too_much) is None
