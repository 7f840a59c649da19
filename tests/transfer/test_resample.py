import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from vit_jax.transfer.resample import (
    CONVENTIONS,
    resample_axis,
    resample_grid,
    resample_offsets,
)

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
    out = resample_grid(pos_embedding, old, new, convention=convention)
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


# Those that leave a grid of the same size as it is.
IDENTITIES = [name for name, convention in CONVENTIONS.items() if not convention.surplus]


def cubic(x):
    """The kernel with a = -0.75."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@pytest.mark.parametrize(
    ("convention", "surplus"), [("half_pixel", 0), ("half_pixel_surplus", 0.1)]
)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_half_pixel_is_a_cubic_kernel_over_repeated_edges(old, new, convention, surplus):
    grid = random_grid(old)
    expected = grid.reshape(*old, WIDTH).astype(np.float64)
    for axis in (0, 1):
        rows = np.moveaxis(expected, axis, 0)
        made = []
        for i in range(new[axis]):
            place = (i + 0.5) * old[axis] / (new[axis] + surplus) - 0.5
            near = range(int(np.floor(place)) - 1, int(np.floor(place)) + 3)
            made.append(sum(cubic(place - j) * rows[np.clip(j, 0, old[axis] - 1)] for j in near))
        expected = np.moveaxis(np.stack(made), 0, axis)
    ours = resample(grid, old, new, convention)
    np.testing.assert_allclose(ours.reshape(*new, WIDTH), expected, atol=2e-6)


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


@pytest.mark.parametrize("convention", IDENTITIES)
@pytest.mark.parametrize("grid", [(4, 4), (1, 5)])
def test_the_same_grid_stays(convention, grid):
    old = random_grid(grid)
    np.testing.assert_allclose(resample(old, grid, grid, convention), old, atol=1e-6)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_tables_of_rows_and_columns_are_resampled_as_what_they_add_is(old, new, convention):
    rng = np.random.default_rng(0)
    rows, columns = (rng.standard_normal((1, n, WIDTH)).astype(np.float32) for n in old)
    added = (rows[:, :, None] + columns[:, None]).reshape(1, -1, WIDTH)
    new_rows, new_columns = (
        resample_axis(table, o, n, convention=convention)
        for table, o, n in zip((rows, columns), old, new, strict=True)
    )
    assert new_rows.shape == (1, new[0], WIDTH)
    assert new_rows.dtype == np.float32
    found = (new_rows[:, :, None] + new_columns[:, None]).reshape(1, -1, WIDTH)
    np.testing.assert_allclose(found, resample(added, old, new, convention), atol=2e-6)


def random_offsets(grid):
    shape = (2 * grid[0] * grid[1] - 1, WIDTH)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def pairs(grid):
    """(raster offset, dy, dx) of every pair of patches."""
    places = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    return [
        (q - k, yq - yk, xq - xk)
        for q, (yq, xq) in enumerate(places)
        for k, (yk, xk) in enumerate(places)
    ]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_offsets_are_the_mean_of_their_pairs_interpolated_in_the_image(old, new):
    offsets = random_offsets(old)
    by_place = np.zeros((2 * old[0] - 1, 2 * old[1] - 1, WIDTH))
    for offset, dy, dx in pairs(old):
        vector = offsets[old[0] * old[1] - 1 + offset]
        by_place[old[0] - 1 + dy, old[1] - 1 + dx] = vector
    # Corners on corners: a new step is (old - 1) / (new - 1) old ones.
    lie = [
        (o - 1) * (1 + np.arange(1 - n, n) / max(n - 1, 1)) for o, n in zip(old, new, strict=True)
    ]
    interpolated = np.stack(
        [
            scipy.ndimage.map_coordinates(channel, np.meshgrid(*lie, indexing="ij"), order=1)
            for channel in np.moveaxis(by_place, -1, 0)
        ],
        axis=-1,
    )
    seen = {}
    for offset, dy, dx in pairs(new):
        seen.setdefault(offset, []).append(interpolated[new[0] - 1 + dy, new[1] - 1 + dx])
    expected = [np.mean(seen[offset], axis=0) for offset in sorted(seen)]
    ours = resample_offsets(offsets, old, new, convention="corner_aligned")
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parametrize("convention", IDENTITIES)
def test_offsets_keep_what_they_tell(convention):
    old, new = (6, 5), (9, 8)
    same = resample_offsets(random_offsets(old), old, old, convention=convention)
    np.testing.assert_allclose(same, random_offsets(old), atol=1e-6)
    ones = np.ones((59, WIDTH), np.float32)
    found = resample_offsets(ones, old, new, convention=convention)
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)


def test_offsets_by_the_edges_of_the_image():
    """Twice the patches: half an old offset, between the old ones."""
    offsets = np.arange(-3.0, 4.0, dtype=np.float32)[:, None]
    found = resample_offsets(offsets, (1, 4), (1, 8), convention="antialiased")[:, 0]
    np.testing.assert_allclose(found[3:-3], np.arange(-4, 5) / 2, atol=1e-6)
