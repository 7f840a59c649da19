"""Device ops and the value range."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import make_device_transform, parse_ops, to_value_range

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 4, 4, 3), np.uint8)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(64))
HALF = (0.5, 0.5, 0.5)


def transform(string, mean=HALF, std=HALF):
    _, device_ops = parse_ops(string, (4, 4))
    apply = jax.jit(make_device_transform(device_ops, mean, std, num_classes=10))
    return lambda images, keys: apply({"image": images}, keys)["image"]


def test_value_range():
    pixels = np.array([[0, 255, 51]], np.uint8)
    np.testing.assert_array_equal(to_value_range(pixels, HALF, HALF)[0, :2], [-1, 1])
    values = to_value_range(pixels, (0.1, 0.2, 0.3), (0.5, 0.25, 0.2))
    np.testing.assert_allclose(values, [[-0.2, 3.2, -0.5]], rtol=1e-6)
    assert values.dtype == jnp.float32


def test_flip_exchanges_left_and_right_in_half_of_the_rows():
    before, after = transform("")(IMAGES, KEYS), transform("flip")(IMAGES, KEYS)
    flipped = [not np.array_equal(b, a) for b, a in zip(before, after, strict=True)]
    assert 16 < sum(flipped) < 48
    for b, a, was_flipped in zip(before, after, flipped, strict=True):
        np.testing.assert_array_equal(a, b[:, ::-1] if was_flipped else b)


def test_flip_depends_on_the_row_s_key_only():
    together = transform("flip")(IMAGES, KEYS)
    reverse = transform("flip")(IMAGES[::-1], KEYS[::-1])[::-1]
    np.testing.assert_array_equal(together, reverse)


def test_flip_is_the_same_on_any_sharding():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    sharded = transform("flip")(jax.device_put(IMAGES, sharding), jax.device_put(KEYS, sharding))
    np.testing.assert_array_equal(sharded, transform("flip")(IMAGES, KEYS))


def test_each_op_of_a_string_draws_for_itself():
    once, thrice = transform("flip")(IMAGES, KEYS), transform("flip|flip|flip")(IMAGES, KEYS)
    assert not np.array_equal(once, thrice)
