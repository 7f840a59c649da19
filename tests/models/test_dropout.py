"""Dropout: its masks on CPUs and on accelerators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import BATCH_AXES, make_mesh
from vit_jax.devices.random_bytes import draw_bytes_by_device
from vit_jax.models.dropout import Dropout, draw_kept, kept_share, threefry_bytes

KEY = jax.random.key(3)
AXES = ("batch", None, "tensor")


def mesh_of(**axes):
    axes = {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | axes
    return make_mesh(**axes, devices=jax.devices()[: np.prod(list(axes.values()))])


def draws():
    """{name: a way to draw bytes}."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    return {
        "threefry": threefry_bytes,
        "by device": lambda *args: draw_bytes_by_device(*args, mesh),
    }


def test_rates_are_rounded_to_256_levels():
    shares = {rate: 256 * kept_share(rate) for rate in (0.1, 0.5, 0.2, 0.001, 0.9999)}
    assert shares == {0.1: 230, 0.5: 128, 0.2: 205, 0.001: 256, 0.9999: 1}


@pytest.mark.parametrize("name", ["threefry", "by device"])
def test_masks_keep_each_value_by_itself(name):
    shape, draw = (64, 50, 96), draws()[name]
    kept_by = jax.jit(lambda key: draw_kept(draw, key, 0.1, shape, AXES))
    kept = np.asarray(kept_by(KEY))
    assert kept.mean() == pytest.approx(230 / 256, abs=0.003)  # 5 sigma of 307,200 values
    for axis in range(3):
        neighbours = np.take(kept, range(1, shape[axis]), axis) & np.take(
            kept, range(shape[axis] - 1), axis
        )
        assert neighbours.mean() == pytest.approx((230 / 256) ** 2, abs=0.004), axis
    other = np.asarray(kept_by(jax.random.key(4)))
    assert (kept & other).mean() == pytest.approx((230 / 256) ** 2, abs=0.004)


def test_what_is_kept_keeps_the_expectation():
    x = jnp.ones((64, 50, 96), jnp.bfloat16)
    out = Dropout(0.1).apply({}, x, AXES, train=True, rngs={"dropout": KEY})
    assert out.dtype == x.dtype
    assert set(np.unique(out.astype(jnp.float32))) == {0, float(jnp.bfloat16(256 / 230))}
    exact = Dropout(0.1).apply({}, x.astype(jnp.float32), AXES, train=True, rngs={"dropout": KEY})
    assert set(np.unique(exact)) == {0, np.float32(256 / 230)}
    assert (Dropout(0.1).apply({}, x, AXES) == x).all()


def test_bytes_on_a_cpu_are_those_of_the_generator():
    place = np.arange(6, dtype=np.uint32)
    words = threefry_2x32(jax.random.key_data(KEY), np.concatenate([np.zeros_like(place), place]))
    of_calls = np.stack(np.split(np.asarray(words), 2), axis=-1)
    found = threefry_bytes(KEY, (2, 20), AXES[:2])  # 3 calls a row; 4 bytes of the last are unused
    assert (found == of_calls.view(np.uint8).reshape(2, 24)[:, :20]).all()


def test_on_cpus_every_mesh_draws_the_same():
    mesh, shape = mesh_of(data=2, fsdp=2, tensor=2), (8, 5, 16)
    sharding = NamedSharding(mesh, P(BATCH_AXES, None, "tensor"))
    drawn = jax.jit(lambda key: threefry_bytes(key, shape, AXES), out_shardings=sharding)
    text = drawn.lower(KEY).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "collective"))
    assert (drawn(KEY) == threefry_bytes(KEY, shape, AXES)).all()


def test_devices_draw_apart_where_they_hold_other_values():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)

    def shares(axes, shape):
        draw = jax.jit(lambda key: draw_bytes_by_device(key, shape, axes, mesh))
        drawn = draw(KEY)
        assert (drawn == draw(KEY)).all()
        return {bytes(np.asarray(shard.data)) for shard in drawn.addressable_shards}

    assert len(shares(AXES, (8, 5, 16))) == 8
    assert len(shares(("batch", None, None), (8, 5, 16))) == 4  # alike over tensor
    assert len(shares(AXES, (8, 5, 15))) == 4  # tensor does not divide 15


def test_a_device_that_computes_its_own_rows_draws_its_own_bytes():
    mesh, shape = mesh_of(data=8), (2, 5, 16)

    def of_rows(_):
        key = jax.random.fold_in(KEY, jax.lax.axis_index("data"))
        return draw_bytes_by_device(key, shape, AXES, mesh)

    rows = jnp.zeros(8)
    drawn = jax.shard_map(of_rows, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(rows)
    assert drawn.shape == (16, 5, 16)
    assert len({bytes(np.asarray(shard.data)) for shard in drawn.addressable_shards}) == 8


def test_keys_of_other_generators_draw_too():
    for name, draw in draws().items():
        drawn = draw(jax.random.key(0, impl="rbg"), (8, 5, 16), AXES)
        assert drawn.shape == (8, 5, 16) and len(np.unique(drawn)) > 100, name
