import numpy as np
import numpy_vit
import pytest

from vit_jax.models.position import sincos_2d


@pytest.mark.parametrize(("grid", "width"), [((2, 3), 8), ((4, 1), 16), ((5, 5), 64)])
def test_sincos_is_sin_x_cos_x_sin_y_cos_y(grid, width):
    ours = sincos_2d(grid, width)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, numpy_vit.sincos(grid, width), atol=1e-6)


def test_sincos_by_hand():
    # Grid 2 x 2, frequencies 1 and 1/10000; the second patch is at x = 1, y = 0.
    expected = [np.sin(1), np.sin(1e-4), np.cos(1), np.cos(1e-4), 0, 0, 1, 1]
    np.testing.assert_allclose(sincos_2d((2, 2), 8)[1], expected, atol=1e-7)
