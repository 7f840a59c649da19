"""Products in float32 of narrow operands."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.dense import multiply_to_float32


def test_a_product_in_float32_has_narrow_operands_also_in_its_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 5, 64), (64, 96), (2, 5, 96))
    x, kernel, grad = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)

    def gradients(multiply, x, kernel):
        found, pull_back = jax.vjp(multiply, x, kernel)
        return found, *pull_back(grad)

    found = gradients(multiply_to_float32, x, kernel)
    assert [each.dtype for each in found] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    wide = gradients(jnp.matmul, x.astype(jnp.float32), kernel.astype(jnp.float32))
    np.testing.assert_allclose(found[0], wide[0], rtol=1e-5, atol=1e-4)
    for narrow, expected in zip(found[1:], wide[1:], strict=True):
        far = jnp.linalg.norm(narrow - expected) / jnp.linalg.norm(expected)
        assert 1e-4 < far < 5e-3
    text = str(jax.make_jaxpr(lambda *of: gradients(multiply_to_float32, *of))(x, kernel))
    dots = [line for line in text.splitlines() if "dot_general" in line and " = " in line]
    assert len(dots) == 3
    assert [line.split(":")[1][:4] for line in dots] == ["f32[", "bf16", "bf16"], text
