"""Colours of patch features whose components are known, and the images that are written."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hand_made import OF_SPLIT, make_inputs
from PIL import Image

from vit_jax.base.pictures import Pictures
from vit_jax.evaluators import patch_features
from vit_jax.evaluators.patch_features import PatchFeatures, as_colours
from vit_jax.experiment.state import TrainState

AXES = np.eye(5, dtype=np.float32)


def bind(features, images, mask, folder, num_images):
    """On one batch, whose patches have `features` (B, R, S, D) of the state and the images."""
    inputs = make_inputs(
        [{"image": images, "mask": mask}],
        model=types.SimpleNamespace(tokens=None),
        maps=features,
        folder=epath.Path(folder),
        source=lambda: types.SimpleNamespace(num_examples=len(mask)),
    )
    return PatchFeatures(**OF_SPLIT, num_images=num_images).bind(inputs)


def test_colours_are_the_components_from_least_to_most():
    steps = np.arange(12, dtype=np.float32).reshape(1, 3, 4, 1)  # features on one line
    (colours,), share = as_colours(7 + steps * AXES[2])
    assert share == pytest.approx(1)
    assert colours[..., 0].ravel().tolist() == np.linspace(0, 255, 12).round().tolist()
    assert (colours[..., 1:] == 128).all()

    x = np.random.default_rng(0).standard_normal((2, 6, 6, 5)) * [0.1, 4, 2, 1, 0.1]
    colours, share = as_colours([x[0], x[1, :4]])  # maps of two shapes
    assert [map.shape for map in colours] == [(6, 6, 3), (4, 6, 3)]
    assert share == pytest.approx(21 / 21.02, rel=2e-4)
    for channel, axis in enumerate((1, 2, 3)):  # by falling variance
        shown = np.concatenate([map[..., channel].ravel() for map in colours])
        found = np.corrcoef(shown, x.reshape(-1, 5)[:60, axis])[0, 1]
        assert abs(found) > 0.95, channel


def test_images_show_each_readable_image_beside_its_features_once_a_step(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 1), np.uint8)
    mask = np.array([1, 0, 1, 1], np.float32)

    def features(state, images):  # patches of 4 x 4: their first pixel, and a constant
        first = images[:, ::4, ::4, :1]
        return jnp.concatenate([first, first * 0 + 1], axis=-1)

    measure = bind(features, images, mask, tmp_path, 4)
    state = TrainState(np.int32(3), {}, {}, {})
    assert measure(state) == {"share": pytest.approx(1)}
    (path,) = (tmp_path / "patch_features").iterdir()
    pixels = np.asarray(Image.open(path))
    assert path.name == "own_00000003.png" and pixels.shape == (3 * 100 + 4, 2 * 100 + 4, 3)
    shown = pixels[4:100:12, 4:100:12]
    assert (shown == images[0]).all()  # enlarged by 12, grey as three channels
    second = pixels[104:200:12, 104:200:12, 0]  # image 1 is broken, so this is image 2
    values = images[2, ::4, ::4, 0].astype(float)
    assert np.corrcoef(second[::4, ::4].ravel(), values.ravel())[0, 1] > 0.999
    assert (second[:4, :4] == second[0, 0]).all()

    path.unlink()
    measure(state)  # the same step, such as with the raw weights
    assert list(path.parent.iterdir()) == []
    measure(state.replace(step=np.int32(4)))
    assert [path.name for path in path.parent.iterdir()] == ["own_00000004.png"]


@pytest.mark.parametrize(("channels", "shown"), [(1, [0, 0, 0]), (3, [0, 1, 2]), (4, [0, 1, 2])])
def test_only_the_rows_with_images_are_gathered(channels, shown, tmp_path, monkeypatch):
    images = np.arange(8 * 4 * 4 * channels, dtype=np.uint8).reshape(8, 4, 4, channels)
    mask = (np.arange(8) < 2).astype(np.float32)
    scale = {"factor": np.float32(np.nan)}

    def features(state, images):
        return images[:, ::2, ::2, :1] * state.params["factor"]

    gathered = []
    monkeypatch.setattr(patch_features, "fetch", lambda found: gathered.extend(found) or gathered)
    measure = bind(features, images, mask, tmp_path, 2)
    averaged = TrainState(np.int32(1), scale, {}, {})  # its features are not finite
    assert np.isnan(measure(averaged)["share"])
    assert {len(part) for found in gathered for part in found} == {2}
    monkeypatch.undo()
    measure(averaged.replace(params={"factor": np.float32(1)}))
    assert list(tmp_path.iterdir()) == []  # nor does the table show other weights
    measure(TrainState(np.int32(2), {"factor": np.float32(1)}, {}, {}))
    pixels = np.asarray(Image.open(tmp_path / "patch_features/own_00000002.png"))
    size = (pixels.shape[0] - 4) // 2 - 4
    assert (
        pixels[4 : 4 + size : size // 4, 4 : 4 + size : size // 4] == images[0][..., shown]
    ).all()


def test_pictures_keep_their_shape_and_padding_counts_nowhere(tmp_path):
    grids = np.array([(1, 3), (2, 1)], np.int32)
    patches = np.random.default_rng(2).integers(0, 256, (2, 4, 96, 96, 3), np.uint8)

    def features(state, pictures):
        first = pictures.patches[:, :, :1, :1].astype(jnp.float32)
        padding = np.arange(4)[None] >= pictures.counts[:, None]
        return pictures._replace(patches=jnp.where(padding[..., None, None, None], jnp.nan, first))

    pictures = Pictures(jnp.asarray(patches), jnp.asarray(grids))
    measure = bind(features, pictures, np.ones(2, np.float32), tmp_path, 2)
    assert measure(TrainState(np.int32(1), {}, {}, {})) == {"share": pytest.approx(1)}
    pixels = np.asarray(Image.open(tmp_path / "patch_features/own_00000001.png"))
    assert pixels.shape == (4 + 96 + 4 + 192 + 4, 2 * (288 + 4) + 4, 3)
    wide, tall = pixels[4:100, 4:292], pixels[104:296, 4:292]
    assert (wide == np.concatenate(patches[0, :3], axis=1)).all()
    assert (tall[:, :96] == np.concatenate(patches[1, :2])).all() and (tall[:, 96:] == 255).all()
    found = pixels[4:100, 296:584:96], pixels[104:296:96, 296:392]
    assert (found[0] == found[0][:1]).all() and (found[1] == found[1][:, :1]).all()
    values = patches[0, :3, 0, 0][None], patches[1, :2, 0, 0][:, None]
    for shown, expected in zip((found[0][:1], found[1][:, :1]), as_colours(values)[0], strict=True):
        assert (shown == expected).all()
