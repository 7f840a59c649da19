"""Published files of hybrids and of Big Transfer: goldens, and files of other shapes made here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from numpy_resnet import hybrid_tokens
from numpy_vit import random_params

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.models import create_model
from vit_jax.models.vit import ViT
from vit_jax.transfer import (
    FORMATS,
    find_writer,
    init_variables,
    load_pretrained,
    read_pretrained,
)
from vit_jax.transfer.fit import unstack_layers
from vit_jax.transfer.model_zoo import PUBLISHED


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(model, variables, images, method="__call__"):
    return model.apply(variables, images, method=method)


def assert_close(ours, expected, tolerance):
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("name", ["hybrid_root", "hybrid_resnet", "bit"])
def test_goldens(golden, name):
    model, variables = load_pretrained(golden / f"{name}.npz")
    with np.load(golden / f"{name}.io.npz") as io:
        assert_close(apply(model, variables, io["image"]), io["logits"], 1e-5)
        if "features" in io:
            assert_close(apply(model, variables, io["image"], "features"), io["features"], 1e-5)
        half = model.clone(dtype=jnp.dtype("bfloat16"), remat="full")
        assert_close(apply(half, variables, io["image"]), io["logits"], 0.05)


def test_what_the_goldens_tell_of_their_models(golden):
    model = read_pretrained(golden / "hybrid_root.npz").model
    assert (model.stages, model.stem_width, model.patch_size) == ((), 32, (8, 8))
    assert (model.image_size, model.grid, model.pool) == ((64, 64), (2, 2), "token")
    model = read_pretrained(golden / "hybrid_resnet.npz").model
    assert (model.stages, model.stem_width, model.patch_size) == ((1, 2), 32, (1, 1))
    assert (model.image_size, model.grid) == ((48, 48), (6, 6))
    spec = vit_jax.pretrained_spec(golden / "bit.npz")
    assert (spec.image_size, spec.mean, spec.std) == (None, (0.5,) * 3, (0.5,) * 3)


def changed(golden, tmp_path, name, change):
    """A golden whose names and arrays `change` changed."""
    path = tmp_path / "changed.npz"
    with np.load(golden / f"{name}.npz") as file:
        np.savez(path, **dict(change(i, key, file[key]) for i, key in enumerate(file.files)))
    return path


def test_layers_may_be_numbered(golden, tmp_path):
    def number(i, name, array):
        return name.replace("standardized_conv2d", f"standardized_conv2d_{i}"), array

    path = changed(golden, tmp_path, "bit", number)
    expected, found = read_pretrained(golden / "bit.npz"), read_pretrained(path)
    assert found.model == expected.model
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_norms_may_be_flat(golden, tmp_path):
    def flatten(i, name, array):
        return name, array.ravel() if "/gn" in f"/{name}" else array

    path = changed(golden, tmp_path, "hybrid_resnet", flatten)
    expected, found = read_pretrained(golden / "hybrid_resnet.npz"), read_pretrained(path)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("bit", "block2/unit01", "block2/unit03", "block2/unit01/a/group_norm/gamma: absent"),
        ("bit", "block1", "block3", "block1/unit01/a/group_norm/gamma: absent"),
        ("bit", "unit02/b/group_norm/gamma", "x", "unit02/b/group_norm/gamma: absent"),
        ("bit", "group_norm/beta", "group_norm/gamma_2", "gamma_2 (32,): unknown"),
        ("bit", "resnet/root_block", "resnet/root", "standardized_conv2d/kernel: absent"),
        ("hybrid_resnet", "unit1/conv_proj", "unit1/proj", "block1/unit1/conv_proj/kernel: absent"),
        ("hybrid_resnet", "block2/unit2", "block2/unit4", "block2/unit2/gn1/scale: absent"),
    ],
)  # fmt: skip
def test_what_is_amiss_is_named(golden, tmp_path, name, old, new, said):
    path = changed(golden, tmp_path, name, lambda i, key, array: (key.replace(old, new), array))
    with pytest.raises(InputError) as error:
        load_pretrained(path)
    assert str(path) in str(error.value) and said in str(error.value)


def test_another_head_and_size(golden):
    path = golden / "hybrid_resnet.npz"
    model, variables = load_pretrained(path, num_classes=3, image_size=(64, 80), scan=True)
    assert (model.grid, variables["params"]["pos_embedding"].shape) == ((8, 10), (1, 81, 32))
    images = np.random.default_rng(0).uniform(-1, 1, (1, 64, 80, 3)).astype(np.float32)
    expected = hybrid_tokens(model, unstack_layers(variables["params"]), images[0])
    assert_close(apply(model, variables, images, "tokens")[0], expected, 1e-5)
    model, variables = load_pretrained(golden / "bit.npz", num_classes=3, image_size=40)
    assert apply(model, variables, np.ones((1, 40, 40, 3), np.float32)).shape == (1, 3)
    with pytest.raises(InputError, match="resize them"):
        apply(model, variables, np.ones((1, 48, 48, 3), np.float32))


def test_starting_from_a_file(golden):
    source = read_pretrained(golden / "hybrid_resnet.npz")
    fields = {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": 2, "stem_width": 32}
    model = create_model("R26+ViT-mu/16", 3, 64, stages=(1, 2), scan=True, **fields)
    params, _ = init_variables(source, model)
    kernel = "stem/stage_1/layer_1/conv2/kernel"
    np.testing.assert_array_equal(params[kernel], source.params[kernel])
    assert params["pos_embedding"].shape == (1, 65, 32)
    with at_fault("model.name", "model.stages", "model.stem_width"):
        init_variables(source, create_model("BiT-R50x1", 3, 64))
    other = create_model("R26+ViT-mu/16", 3, 64, stages=(2, 2), **fields)
    with at_fault("model.stages"):
        init_variables(source, other)


@pytest.mark.parametrize("format", ["hf", "timm", "npz_v2"])
def test_formats_that_hold_neither(tmp_path, format):
    for name in ("R26+ViT-mu/16", "BiT-R50x1"):
        model = create_model(name, 3, 32, stages=(1,), stem_width=32)
        variables = {"params": random_params(model, jnp.zeros((1, 32, 32, 3)))}
        with pytest.raises(InputError, match=f"npz or stablehlo: it is an? {type(model).__name__}"):
            vit_jax.save_pretrained(tmp_path / "model", model, variables, format)


@pytest.mark.parametrize(
    "fields",
    [{"pos_embed": "sincos_2d"}, {"pos_embed_class_token": False}, {"gelu": "exact"},
     {"pool": "map"}, {"pool": "gap", "class_token": True}],
)  # fmt: skip
def test_what_of_a_hybrid_no_format_of_arrays_holds(fields):
    model = create_model("R26+ViT-mu/16", 3, 32, **fields)
    with pytest.raises(InputError, match="--format=npz cannot hold this model; export it as stab"):
        find_writer("npz", model, epath.Path("x.npz"), "--format=")


def test_formats_refuse_families_that_they_do_not_know():
    class Other(ViT):
        pass

    model = create_model("ViT-mu/16", 3, 32)
    other = Other(
        3, (32, 32), (16, 16), model.width, 1, num_heads=model.num_heads, mlp_dim=model.mlp_dim
    )
    for name in ("npz", "npz_v2", "hf", "timm", "t2t"):
        assert FORMATS[name].check(other) == ["it is an Other"], name


def test_every_published_name_is_that_of_a_model():
    for name in PUBLISHED:
        create_model(name.partition("@")[0], None, 448)
