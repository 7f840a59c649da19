import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from vit_jax.transfer.resample import CONVENTIONS, resample_grid

GRIDS = [
    ((4, 4), (8, 8)),
    ((4, 4), (7, 5)),
    ((7, 5), (4, 4)),
    ((14, 14), (3, 5)),
    ((2, 3), (9, 3)),
    ((6, 5), (2, 11)),
]
WIDTH = 3


def random_grid(grid, prefix=0):
    shape = (1, prefix + grid[0] * grid[1], WIDTH)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def resample(pos_embedding, old, new, convention, prefix=0):
    out = resample_grid(pos_embedding, old, new, prefix=prefix, convention=convention)
    assert out.dtype == np.float32
    assert out.shape == (1, prefix + new[0] * new[1], WIDTH)
    return out


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_corner_aligned_is_spline_zoom_of_order_1(old, new):
    grid = random_grid(old)
    factors = (new[0] / old[0], new[1] / old[1], 1)
    expected = scipy.ndimage.zoom(grid.reshape(*old, WIDTH), factors, order=1)
    ours = resample(grid, old, new, "corner_aligned")
    np.testing.assert_allclose(ours.reshape(*new, WIDTH), expected, atol=2e-6)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_antialiased_is_pillows_bicubic(old, new):
    grid = random_grid(old)
    channels = [
        Image.fromarray(channel).resize(new[::-1], Image.Resampling.BICUBIC)
        for channel in np.moveaxis(grid.reshape(*old, WIDTH), -1, 0)
    ]
    expected = np.stack([np.asarray(channel) for channel in channels], axis=-1)
    ours = resample(grid, old, new, "antialiased")
    np.testing.assert_allclose(ours.reshape(*new, WIDTH), expected, atol=2e-6)


def test_the_conventions_differ():
    grid = random_grid((4, 4))
    made = [resample(grid, (4, 4), (7, 5), convention) for convention in CONVENTIONS]
    assert len(made) == 2
    assert np.abs(made[0] - made[1]).max() > 0.05


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_prefix_tokens_are_untouched(convention):
    grid = random_grid((4, 4), prefix=2)
    out = resample(grid, (4, 4), (3, 5), convention, prefix=2)
    np.testing.assert_array_equal(out[:, :2], grid[:, :2])
    alone = resample(grid[:, 2:], (4, 4), (3, 5), convention)
    np.testing.assert_array_equal(out[:, 2:], alone)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("new", [(1, 1), (1, 4), (9, 2), (30, 30)])
def test_a_constant_stays_one(convention, new):
    grid = np.full((1, 12, WIDTH), 3.0, np.float32)
    np.testing.assert_allclose(resample(grid, (3, 4), new, convention), 3.0, rtol=1e-6)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("grid", [(4, 4), (1, 5)])
def test_the_same_grid_stays(convention, grid):
    old = random_grid(grid)
    np.testing.assert_allclose(resample(old, grid, grid, convention), old, atol=1e-6)
