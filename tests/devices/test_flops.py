from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from vit_jax.devices.flops import (
    Memory,
    count_flops,
    expected_memory,
    format_bytes,
    forward_macs,
    mfu,
)
from vit_jax.models import create_model


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def conv(x, kernel, *, strides, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        strides,
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def square(x):
    return x @ x


def square_sum(x):
    return square(x).sum()


SQUARE, X = 2 * 8**3, array(8, 8)  # FLOPs of an 8x8 matrix times itself


def test_batched_einsum():
    def attention(q_BNHD, k_BMHD):
        return jnp.einsum("bnhd,bmhd->bhnm", q_BNHD, k_BMHD)

    flops = count_flops(attention, array(2, 5, 3, 4), array(2, 7, 3, 4))
    assert flops == 2 * (2 * 3) * 5 * 7 * 4


def test_patch_embedding():
    flops = count_flops(
        lambda x, k: conv(x, k, strides=(4, 4)), array(2, 16, 16, 3), array(4, 4, 3, 10)
    )
    assert flops == 2 * (2 * 4 * 4) * (4 * 4 * 3) * 10


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradient_of_a_conv_costs_twice_the_conv(groups, stride):
    x, kernel = array(2, 8, 8, 6), array(3, 3, 6 // groups, 12)

    def forward(x, kernel):
        return conv(x, kernel, strides=(stride, stride), groups=groups)

    flops = count_flops(forward, x, kernel)
    assert flops == 2 * (2 * (8 // stride) ** 2 * 12) * (3 * 3 * 6 // groups)
    grad = jax.grad(lambda x, kernel: forward(x, kernel).sum(), argnums=(0, 1))
    assert count_flops(grad, x, kernel) == 3 * flops


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-mu/4", {}),
        ("ViT-mu/4", {"pool": "gap", "class_token": True}),
        ("ViT-mu/4", {"pool": "map", "hidden_head": True}),
        ("DeiT-mu/4", {}),
        ("DeiT-mu/4", {"distillation_head": False}),
    ],
)
def test_a_vit_by_its_sizes(name, fields):
    model = create_model(name, 10, (8, 12), **fields)
    embedding = 2 * 6 * (4 * 4 * 3) * model.width  # its gradient by the pixels is not asked for
    assert model.flops_by_sizes == 3 * 2 * forward_macs(model) - embedding


def test_gradient_of_an_mlp():
    def loss(params, x):
        for kernel in params:
            x = jax.nn.gelu(x @ kernel)
        return x.sum()

    params, x = [array(4, 16), array(16, 4)], array(3, 4)
    forward = 2 * 3 * 4 * 16
    # The gradient by the images is not asked for, so the first kernel's product is made twice.
    assert count_flops(jax.grad(loss), params, x) == (2 + 3) * forward


@pytest.mark.parametrize(
    ("fn", "products"),
    [
        (jax.jit(square), 1),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0], 6),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: square(square(x)), square, x), 2),
        (lambda x: jax.lax.fori_loop(0, 4, lambda _, c: square(c), x), 4),
        (lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c - 1, square(x)), 1),
        (jax.grad(square_sum), 3),
        (jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(square(x)).sum())(x)), 4),
        (lambda x: jax.vmap(square)(jnp.stack([x, x, x])), 3),
    ],
)
def test_inside_of(fn, products):
    assert count_flops(fn, X) == products * SQUARE


def test_inside_of_custom_rules():
    @jax.custom_jvp
    def with_jvp(x):
        return square(x)

    @jax.custom_vjp
    def with_vjp(x):
        return square(x)

    with_jvp.defjvp(lambda primals, tangents: (square(primals[0]), tangents[0]))
    with_vjp.defvjp(lambda x: (square(x), x), lambda x, g: (square(square(g)),))
    assert count_flops(with_jvp, X) == count_flops(with_vjp, X) == SQUARE
    assert count_flops(jax.grad(lambda x: with_vjp(x).sum()), X) == 3 * SQUARE


def test_shard_map_counts_every_device():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec("data")

    def product(axes):
        return jax.shard_map(
            lambda x, y: x @ y,
            mesh=mesh,
            in_specs=(rows, PartitionSpec()),
            out_specs=rows,
            axis_names=axes,
        )

    whole = 2 * 8 * 3 * 5
    assert count_flops(jax.jit(product({"data"})), array(8, 3), array(3, 5)) == whole
    # Split along `data` alone, every device of `tensor` does the same again.
    assert count_flops(product({"data", "tensor"}), array(8, 3), array(3, 5)) == 2 * whole


def test_work_that_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="while loop"):
        count_flops(lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, square, x), X)


def test_mfu():
    assert mfu(394e12, device_kind="TPU v5 lite", num_chips=4) == 0.5
    assert mfu(1.0, device_kind="cpu", num_chips=4) is None


def test_expected_memory():
    stats = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=80,
        alias_size_in_bytes=60,
        temp_size_in_bytes=7,
    )
    assert expected_memory(stats) == Memory(arguments=100, temporaries=7, total=127)


def test_expected_memory_of_a_program_with_a_donated_argument():
    x = jnp.ones((64, 64), jnp.float32)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    memory = expected_memory(compiled.memory_analysis())
    assert memory.arguments == x.nbytes
    assert memory.total == x.nbytes + memory.temporaries


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (2**19, "0.5 MiB"), (2**30, "1.00 GiB"), (13.25 * 2**30, "13.25 GiB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_counting_runs_nothing():
    def fails_when_run(x):
        return jax.pure_callback(lambda x: 1 / 0, array(8, 8), x) @ x

    assert count_flops(fails_when_run, X) == SQUARE
