"""Pictures in their own shape are measured, in a padded batch, as each by a model of its size."""

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy_vit import random_params
from PIL import Image

from vit_jax import create_model, figures, predict
from vit_jax.base.tree import flatten_names
from vit_jax.data.images.given import open_images
from vit_jax.data.native import PatchRule
from vit_jax.inference.saved import write_features, write_predictions
from vit_jax.insight import plots
from vit_jax.insight.measured import alignment, gram_matrix, measure, norm_table
from vit_jax.transfer import with_image_size
from vit_jax.transfer.pretrained import Pretrained, Spec

pytestmark = pytest.mark.usefixtures("one_device")

SIZES = ((30, 40), (56, 40), (20, 90), (33, 33), (2, 3), (90, 14))  # the second one is grey
MODELS = {
    "class token": {"registers": 2, "rotary": "normalised"},
    "mean": {"pool": "gap"},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        image = Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8))
        image.convert("L" if i == 1 else "RGB").save(folder / f"{i}.png")
    (folder / "3.png").write_bytes(b"not an image")
    return [str(folder / f"{i}.png") for i in range(len(SIZES))]


def make(**fields):
    fields = {"width": 16, "depth": 2, "mlp_dim": 16, "num_heads": 2, "max_tokens": 14} | fields
    model = create_model("ViT-Ti/8", 3, (24, 24), **fields)
    params = flatten_names(random_params(model, jnp.zeros((1, 24, 24, 3))))
    spec = Spec((24, 24), "antialiased", ops="decode", rule=PatchRule((8, 8), 14))
    return Pretrained("mine", model, params, spec)


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_pictures_are_measured_as_alone(case, paths):
    native = make(**MODELS[case])
    prefix, layers = native.model.num_prefix_tokens, range(native.model.depth)
    found = measure(native, open_images(paths), examples=9, batch_size=8, shown=8)
    features, dense, weights = (
        predict(paths, native, output=what) for what in ("features", "dense", "attention")
    )
    read = [i for i in range(len(paths)) if i != 3]
    assert found.names == [paths[i] for i in read] and len(found.images) == len(read)
    of_patches, of_prefix = [[] for _ in layers], [[] for _ in layers]
    for i, (record, image) in enumerate(zip(read, found.images, strict=True)):
        model = with_image_size(native, image.shape[:2], "linear_antialiased")
        alone = measure(model, open_images([image]), examples=1, batch_size=1, shown=1)
        for name in ("images", "features"):
            assert_near(getattr(found, name)[i], getattr(alone, name)[0])
        for name, values in vars(found.attention).items():
            assert_near(values[i], getattr(alone.attention, name)[0])
        assert_near(features[record], predict([image], model, output="features")[0])
        assert_near(dense[record], alone.features[0])
        assert weights[record].shape[1:] == (alone.norms[0].shape[1],) * 2
        assert_near(weights[record].sum(axis=2), 1)
        for layer in layers:
            of_patches[layer].append(alone.norms[layer][0, prefix:])
            of_prefix[layer].append(alone.norms[layer][0, :prefix])
    table = norm_table(found, prefix, 1.2)
    for layer in layers:
        norms = np.concatenate(of_patches[layer])
        assert_near(table["median"][layer], np.median(norms))
        assert table["outlier_share"][layer] == np.mean(norms > 1.2 * np.median(norms))
        assert prefix == 0 or table["prefix"][layer] == pytest.approx(np.mean(of_prefix[layer]))
    if case == "mean":
        pooled = [predict(paths, native, output="features", layer=i)[read] for i in layers]
        means = np.stack([gram_matrix(jnp.asarray(x)) for x in pooled])
        assert_near(alignment(found.grams, found.grams), alignment([means], [means]))
    assert all(np.isnan(own[3]).all() for own in (features, dense, weights))


def test_files_of_pictures(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "as_file", lambda figure, form: b"")  # drawing has its own tests
    native = make(registers=2)
    figures(native, tmp_path, paths, names=["heads", "features", "entropy"], shown=3, batch_size=4)
    dense = predict(paths, native, output="dense")
    with np.load(tmp_path / "heads.npz") as heads, np.load(tmp_path / "features.npz") as features:
        assert heads["attention_2"].shape == (2, 2, 2, 7) and heads["image_2"].shape == (16, 56, 3)
        assert features["components_1"].shape == (*dense[0].shape[:2], 3)
    source, how = open_images(paths), {"what": "dense", "batch_size": 4}
    write_features(native, source, tmp_path / "dense.npz", **how)
    write_predictions(native, source, tmp_path / "dense", "--features", **how)
    halves = np.load(tmp_path / "dense/part_00000.npy")
    grids = pq.read_table(tmp_path / "dense/part_00000.parquet")["grid"].to_pylist()
    with np.load(tmp_path / "dense.npz") as file:
        assert (
            file["grid"].tolist() == grids
            and file["valid"].tolist() == [True] * 3 + [False] + [True] * 2
        )
        assert grids[3] == [0, 0] and dense[3].shape == (1, 1, 16) and np.isnan(dense[3]).all()
        for whole, half, own, (r, c) in zip(file["features"], halves, dense, grids, strict=True):
            assert_near(whole[: r * c], own.reshape(-1, 16)[: r * c])
            assert r == c == 0 or own.shape == (r, c, 16)
            np.testing.assert_allclose(half, whole, rtol=1e-3, atol=1e-3)
            assert np.isnan(whole[r * c :]).all()
