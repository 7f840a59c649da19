"""Published `.npz` files: goldens, and files of other shapes made here."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import numpy_vit
import pytest
import scipy.ndimage
from at_fault import at_fault
from published import as_scanned, as_void, publish, random_model

import vit_jax
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.models import create_model
from vit_jax.transfer import init_variables, load_pretrained, read_pretrained


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(model, params, images, method="__call__"):
    return model.apply({"params": params}, images, method=method)


def logits_of(model, variables, images):
    return np.asarray(apply(model, variables["params"], images))


def assert_close(ours, expected, tolerance=1e-5):
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_what_a_golden_tells_of_its_model(golden):
    model, variables = vit_jax.load_pretrained(golden / "vit_pretrained.npz")
    expected = create_model(
        "ViT-mu/4", 21, 16, width=32, depth=3, num_heads=2, hidden_head=True,
        mlp_dim=variables["params"]["encoder"]["layer_0"]["mlp"]["up"]["bias"].size,
    )  # fmt: skip
    assert model == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}


def make_file(
    tmp_path,
    *,
    num_classes=5,
    image_size=12,
    change=lambda arrays: arrays,
    variant="first",
    **fields,
):
    """(path of a published file, its model, its parameters, images)."""
    model, variables = random_model(num_classes=num_classes, image_size=image_size, **fields)
    images = np.random.default_rng(1).uniform(-1, 1, (2, *model.image_size, 3)).astype(np.float32)
    params = variables["params"]
    path = tmp_path / "published.npz"
    np.savez(path, **change(publish(params, model, variant)))
    return path, model, params, images


@pytest.mark.parametrize(
    "fields",
    [
        {"patch_size": (2, 6), "image_size": (4, 12)},  # patches and image alike: a square grid
        {"depth": 12, "width": 8, "num_heads": 4, "mlp_dim": 6},  # layers 10 and 11 sort after 1
        {"num_heads": 1, "image_size": 4},
        {"num_classes": None},
        {"pool": "gap"},
        {"pool": "gap", "hidden_head": True, "num_classes": 1},
    ],
    ids=["non-square patch", "deep", "one patch", "no head", "mean-pooled", "one class"],
)
def test_files_of_other_shapes(tmp_path, fields):
    path, model, params, _ = make_file(tmp_path, **fields)
    loaded, variables = load_pretrained(path)
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)


def test_bfloat16_leaves_come_as_two_bytes_without_a_type(tmp_path):
    def halve(arrays):
        return {name: as_void(array) for name, array in arrays.items()}

    path, _, params, _ = make_file(tmp_path, change=halve)
    with np.load(path) as file:
        assert file["cls"].dtype == np.dtype("V2")
    _, variables = load_pretrained(path)
    for leaf, original in zip(
        jax.tree.leaves(variables["params"]), jax.tree.leaves(params), strict=True
    ):
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, original.astype(jnp.bfloat16).astype(np.float32))


def test_other_classes_reset_the_whole_head(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    path, _, params, images = make_file(tmp_path, hidden_head=True)
    model, variables = load_pretrained(path, num_classes=7)
    assert (model.num_classes, model.hidden_head) == (7, False)
    named = tree.flatten_names(variables["params"])
    assert not [name for name in named if name.startswith("head_hidden")]
    assert named["head/kernel"].shape == (24, 7)
    assert not named["head/kernel"].any()
    assert not named["head/bias"].any()
    for name, leaf in tree.flatten_names(params).items():
        if not name.startswith("head"):
            np.testing.assert_array_equal(named[name], leaf, err_msg=name)
    assert jax.eval_shape(model.apply, variables, images).shape == (2, 7)
    assert "the head is initialised anew" in caplog.text


@pytest.mark.parametrize(("image_size", "grid"), [((8, 20), (2, 5)), (20, (5, 5)), (12, (3, 3))])
@pytest.mark.parametrize("pool", ["token", "gap"])
def test_another_image_size_resamples_the_positions(tmp_path, caplog, image_size, grid, pool):
    caplog.set_level(logging.INFO, "vit_jax")
    path, _, params, _ = make_file(tmp_path, pool=pool)
    model, variables = load_pretrained(path, image_size=image_size)
    assert model.grid == grid
    prefix = int(pool == "token")
    old = params["pos_embedding"][0]
    zoomed = scipy.ndimage.zoom(
        old[prefix:].reshape(3, 3, 24), (grid[0] / 3, grid[1] / 3, 1), order=1
    )
    expected = np.concatenate([old[:prefix], zoomed.reshape(-1, 24)])
    found = variables["params"]["pos_embedding"]
    np.testing.assert_allclose(found[0], expected, atol=2e-6)
    assert ("position embedding resampled (corner_aligned)" in caplog.text) == (grid != (3, 3))
    assert found.shape[1] == prefix + grid[0] * grid[1]


def test_fields_of_the_model(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    path, plain, params, images = make_file(tmp_path)
    fields = {"scan": True, "remat": "dots", "dropout": 0.1, "dtype": jnp.bfloat16}
    model, variables = load_pretrained(path, **fields)
    assert (model.scan, model.remat, model.dropout) == (True, "dots", 0.1)
    assert model.dtype == jnp.dtype("bfloat16")
    assert "layers stacked" in caplog.text
    layers = variables["params"]["encoder"]["layers"]
    assert layers["mlp"]["up"]["kernel"].shape == (2, 24, 40)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}
    assert_close(logits_of(model, variables, images), apply(plain, params, images), 0.1)


def said(function, *args, **kwargs):
    with pytest.raises(InputError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_faulty_fields(tmp_path):
    path, _, _, _ = make_file(tmp_path)
    for fields in ({"pol": "gap"}, {"pool": "mean"}, {"dtype": "float8"}, {"image_size": "12"}):
        with at_fault(*fields):
            load_pretrained(path, **fields)
    assert "does not divide" in said(load_pretrained, path, image_size=13)


def test_misfits_are_one_error_naming_all(tmp_path):
    path, _, _, _ = make_file(tmp_path)
    text = said(load_pretrained, path, depth=3, mlp_dim=32, pool="gap")
    for part in (
        str(path),
        "class_token (1, 1, 24): the model has no such parameter",
        "encoder/layer_2/norm_mlp/scale (24,): absent from the source",
        "encoder/layer_0/mlp/up/kernel: (24, 40) in the source, (24, 32) in the model",
        "encoder/layer_1/mlp/down/kernel: (40, 24) in the source, (32, 24) in the model",
        "pos_embedding: (1, 10, 24) in the source, (1, 9, 24) in the model",
    ):
        assert part in text


def test_a_layer_that_is_missing_is_named(tmp_path):
    def drop(arrays):
        return {name: a for name, a in arrays.items() if "encoderblock_1/" not in name}

    path, _, _, _ = make_file(tmp_path, depth=3, change=drop)
    text = said(load_pretrained, path)
    assert "layer 1 is absent; fetch" in text


def test_init_variables_leave_out_the_whole_head_unless_it_is_kept(tmp_path):
    path, model, params, _ = make_file(tmp_path, hidden_head=True)
    expected = tree.flatten_names(params)
    kept, _ = init_variables(read_pretrained(path), model, keep_head=True)
    assert kept.keys() == expected.keys()
    text = said(init_variables, read_pretrained(path), model.clone(num_classes=9), keep_head=True)
    assert "head/bias: (" in text and "in the source, (9,) in the model" in text
    for changed in ({}, {"num_classes": 9}, {"hidden_head": False}, {"num_classes": None}):
        found, _ = init_variables(read_pretrained(path), model.clone(**changed))
        assert found.keys() == {n for n in expected if not n.startswith("head")}
        for name, leaf in found.items():
            np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def add(**arrays):
    return lambda published: published | arrays


def test_a_mixture_of_the_variants_is_refused(tmp_path):
    def rename(arrays):
        old = "Transformer/posembed_input/pos_embedding"
        return {"pos_embedding" if n == old else n: a for n, a in arrays.items()}

    path, _, _, _ = make_file(tmp_path, pool="gap", change=rename)
    text = said(load_pretrained, path)
    assert "Transformer/posembed_input/pos_embedding: absent" in text


LATER = {
    "mean-pooled": {"pool": "gap"},
    "attention-pooled": {"pool": "map", "hidden_head": True},
    "token": {"pool": "token", "pos_embed_class_token": False},
    "mean-pooled, sin-cos": {"pool": "gap", "pos_embed": "sincos_2d"},
    "attention-pooled, sin-cos, no head": {
        "pool": "map", "pos_embed": "sincos_2d", "num_classes": None,
    },
    "token, sin-cos": {"pool": "token", "pos_embed": "sincos_2d"},
}  # fmt: skip


def later(tmp_path, **fields):
    return make_file(tmp_path, variant="later", **fields)


@pytest.mark.parametrize("fields", LATER.values(), ids=LATER)
@pytest.mark.parametrize("change", [dict, as_scanned], ids=["plain", "scanned"])
def test_the_later_variant(tmp_path, fields, change):
    path, model, params, _ = later(tmp_path, change=change, **fields)
    loaded, variables = load_pretrained(path)
    fixed = fields.get("pos_embed") == "sincos_2d"
    assert loaded == (model.clone(image_size=None) if fixed else model)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)


def test_the_class_token_takes_up_its_position(tmp_path, caplog):
    caplog.set_level("INFO", "vit_jax")
    _, model, params, images = make_file(tmp_path)
    vit_jax.save_pretrained(tmp_path / "later.npz", model, {"params": params}, "npz_v2")
    assert "the class token's entry is written as part of the token" in caplog.text
    loaded, variables = load_pretrained(tmp_path / "later.npz")
    assert loaded == model.clone(pos_embed_class_token=False)
    expected = logits_of(model, {"params": params}, images)
    np.testing.assert_array_equal(logits_of(loaded, variables, images), expected)


def test_positions_without_a_class_entry_are_resampled_whole(tmp_path):
    path, _, params, _ = later(tmp_path, pool="token", pos_embed_class_token=False)
    model, variables = load_pretrained(path, image_size=(8, 20))
    zoomed = scipy.ndimage.zoom(
        params["pos_embedding"].reshape(3, 3, 24), (2 / 3, 5 / 3, 1), order=1
    )
    assert model.grid == (2, 5)
    np.testing.assert_allclose(
        variables["params"]["pos_embedding"][0], zoomed.reshape(-1, 24), atol=2e-6
    )


def test_without_positions_the_model_takes_the_size_of_its_images(tmp_path):
    path, model, params, _ = later(tmp_path, pool="token", pos_embed="sincos_2d")
    loaded, variables = load_pretrained(path)
    for size in ((12, 12), (8, 20)):
        images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
        expected = [numpy_vit.vit(model, params, image)["__call__"] for image in images]
        assert_close(logits_of(loaded, variables, images), np.stack(expected))
    assert "4 does not divide the image's height 10" in said(
        logits_of, loaded, variables, np.zeros((1, 10, 12, 3), np.float32)
    )
    assert "needs (B, H, W, 3)" in said(
        logits_of, loaded, variables, np.zeros((1, 12, 12, 4), np.float32)
    )
    fixed, variables = load_pretrained(path, image_size=(8, 20))
    assert fixed.image_size == (8, 20)
    assert_close(logits_of(fixed, variables, images), np.stack(expected))


def test_learned_positions_need_an_image_size(tmp_path):
    path, _, _, _ = later(tmp_path, pool="gap", pos_embed="sincos_2d")
    assert "image_size=None: pos_embed='learned_1d'" in said(
        load_pretrained, path, pos_embed="learned_1d"
    )


def test_init_variables_refuse_a_class_token_with_another_place(tmp_path):
    path, model, _, _ = later(tmp_path, pool="token", pos_embed_class_token=False)
    text = said(init_variables, read_pretrained(path), model.clone(pos_embed_class_token=True))
    assert "model.pos_embed_class_token=True, but False in the source" in text


@pytest.mark.parametrize("place", ["params/", "opt/target/", "params/img/"])
def test_a_model_below_other_names(tmp_path, caplog, place):
    """As a training state, or beside a text tower; what is left out is said."""
    caplog.set_level(logging.INFO, "vit_jax")

    def nest(arrays):
        others = {"opt/state/step": np.ones(()), "params/txt/head/bias": np.ones(3)}
        return {place + name: array for name, array in arrays.items()} | others

    path, model, params, _ = later(tmp_path, pool="map", change=nest)
    if place == "params/":  # a text tower beside it is no optimizer's state: not to be guessed
        assert "txt/head/bias (3,): unknown" in said(load_pretrained, path)
        return
    loaded, variables = load_pretrained(path)
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    assert f"is read from {place}; 2 other arrays are ignored" in caplog.text


class Trap:
    """Its pickle, when loaded, creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_never_loaded(tmp_path):
    trap = tmp_path / "sprung"
    objects = np.array([Trap(trap)], dtype=object)
    path, _, _, _ = make_file(tmp_path, change=add(extra=objects))
    assert "not a readable .npz" in said(load_pretrained, path)
    np.save(tmp_path / "alone.npy", objects, allow_pickle=True)
    alone = (tmp_path / "alone.npy").rename(tmp_path / "alone.npz")
    assert "not a readable .npz" in said(load_pretrained, alone)
    assert not trap.exists()
    np.load(alone, allow_pickle=True)  # the trap works
    assert trap.exists()


def test_sources_that_are_none(tmp_path):
    assert "no such file or directory" in said(load_pretrained, tmp_path / "none.npz")
    text = said(load_pretrained, tmp_path)
    assert "known: a workdir" in text
