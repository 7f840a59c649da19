"""Published weights for pictures in their own shape: NaFlex of timm and of SigLIP 2."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finished_run import check_same_arrays
from numpy_vit import random_params
from safetensors.numpy import load_file

from vit_jax import create_model
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.base.tree import flatten_names
from vit_jax.data.native import PatchRule
from vit_jax.transfer import huggingface, load_pretrained, read_pretrained
from vit_jax.transfer.export import export
from vit_jax.transfer.pretrained import Pretrained, Spec, preparation

TOLERANCE = 2e-5  # of the largest value


def outputs(model, variables, pictures):
    """(tokens, features, the model's output)."""

    def run(model, pictures):
        return model.tokens(pictures), model.features(pictures), model(pictures)

    return jax.jit(lambda values: model.apply(values, pictures, method=run))(variables)


def assert_parity(ours, theirs):
    assert np.abs(np.asarray(ours) - theirs).max() < TOLERANCE * np.abs(theirs).max()


def pictures_of(patches, grids):
    cut = np.asarray(patches).reshape(*patches.shape[:2], 16, 16, 3)
    return Pictures(jnp.asarray(cut), jnp.asarray(grids, jnp.int32))


@pytest.mark.parametrize("name", ["timm_naflex", "timm_naflex_rope", "timm_naflex_siglip"])
def test_parity_with_timm(golden, name):
    model, variables = load_pretrained(golden / f"{name}.safetensors")
    with np.load(golden / f"{name}.io.npz") as expected:
        valid = expected["patch_valid"]
        grids = (expected["patch_coord"] * valid[..., None]).max(axis=1) + 1
        pictures = pictures_of(expected["patches"], grids)
        tokens, features, logits = outputs(model, variables, pictures)
        own = np.pad(valid, ((0, 0), (model.num_prefix_tokens, 0)), constant_values=True)
        assert_parity(np.asarray(tokens)[own], expected["tokens"][own])
        assert_parity(features, expected["features"])
        assert_parity(logits, expected["logits"])


def test_parity_with_siglip_2(golden):
    model, variables = load_pretrained(golden / "hf_siglip2", max_tokens=18)
    assert model.num_tokens == 18
    with np.load(golden / "hf_siglip2/io.npz") as expected:
        pictures = pictures_of(expected["pixel_values"], expected["spatial_shapes"])
        tokens, features, _ = outputs(model, variables, pictures)
        own = expected["pixel_attention_mask"] > 0
        assert_parity(np.asarray(tokens)[own], expected["tokens"][own])
        assert_parity(features, expected["features"])


def exported(path, most, output, format):
    """The folder of a model with `max_tokens`, its arrays and the model that they give."""
    source = read_pretrained(path)
    spec = source.spec._replace(exif=False, pixel_range=(0, 4095))
    source = source._replace(model=source.model.clone(max_tokens=most), spec=spec)
    assert export(source, output, format)["read_back"]["largest_logit_difference"] == 0
    found = read_pretrained(output)
    assert found.model == source.model
    assert found.spec.rule == PatchRule((16, 16), most)
    assert preparation(found.spec, None) == ("decode", found.spec.rule)
    assert (found.spec.exif, found.spec.pixel_range) == (False, (0, 4095))
    return load_file(output / "model.safetensors"), found


def test_transformers_gets_a_siglip_2(golden, tmp_path):
    """The arrays and the keys that it saved; tests of others show its outputs of these."""
    path, output = golden / "hf_siglip2", tmp_path / "out"
    arrays, _ = exported(path, 18, output, "hf")
    expected = load_file(path / "model.safetensors")
    check_same_arrays(arrays, expected)
    theirs, ours = (json.loads((p / "config.json").read_text()) for p in (path, output))
    ours |= {"attention_dropout": 0.0, "transformers_version": theirs["transformers_version"]}
    assert ours == theirs
    pixels = json.loads((output / "preprocessor_config.json").read_text())
    assert pixels["image_processor_type"] == "Siglip2ImageProcessor"
    assert (pixels["patch_size"], pixels["max_num_patches"]) == (16, 18)


@pytest.mark.parametrize("name", ["timm_naflex", "timm_naflex_siglip"])
def test_timm_gets_a_naflexvit(golden, tmp_path, name):
    arrays, _ = exported(golden / f"{name}.safetensors", 40, tmp_path / "out", "timm")
    expected = load_file(golden / f"{name}.safetensors")
    check_same_arrays(arrays, expected)
    theirs = json.loads((golden / f"{name}.json").read_text())
    ours = json.loads((tmp_path / "out/config.json").read_text())
    assert ours["architecture"] == theirs["architecture"]
    args = {key: ours["model_args"].get(key) for key in theirs["model_args"]}
    assert args == theirs["model_args"] | {"num_classes": args["num_classes"]}
    assert ours["num_classes"] == theirs["num_classes"]


@pytest.mark.slow
def test_timm_gets_a_class_token_without_a_position(tmp_path):
    sizes = {"width": 32, "depth": 1, "mlp_dim": 48, "num_heads": 2, "patch_size": 4}
    model = create_model("ViT-Ti/4", 5, (12, 16), **sizes, max_tokens=9, gelu="exact", registers=2)
    params = flatten_names(random_params(model, jnp.zeros((1, 12, 16, 3))))
    spec = Spec((12, 16), "antialiased", ops="decode", rule=PatchRule((4, 4), 9))
    source = Pretrained("mine", model, params, spec)
    export(source, tmp_path / "out", "timm")
    found = read_pretrained(tmp_path / "out")
    assert found.model.max_tokens == 9
    patches = np.random.default_rng(0).normal(size=(2, 9, 4, 4, 3)).astype(np.float32)
    pictures = Pictures(jnp.asarray(patches), jnp.asarray([[2, 4], [3, 1]], jnp.int32))
    assert_parity(
        found.model.apply(found.variables, pictures),
        np.asarray(model.apply(source.variables, pictures)),
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"patch_size": 8}, "embeds.proj.weight: 768 values a patch are not 8 x 8 x 3"),
        ({"pos_embed_ar_preserving": True}, "pos_embed_ar_preserving=True is not supported"),
        ({"rope_type": "mixed"}, "model.safetensors.*rope_type='mixed' is not supported"),
        ({"max_tokens": 9}, "interpolation='bicubic': needs bilinear, because max_tokens=9"),
        (
            {"pos_embed_interp_mode": "area"},
            "model.safetensors.*pos_embed_interp_mode='area' is not supported; needs bilinear or",
        ),
    ],
)
def test_what_computes_otherwise_is_refused(golden, tmp_path, changes, fault):
    config = json.loads((golden / "timm_naflex_rope.json").read_text())
    config["max_tokens"] = changes.pop("max_tokens", None)
    config["model_args"] |= changes
    config["pretrained_cfg"]["interpolation"] = "bicubic"
    (tmp_path / "model.json").write_text(json.dumps(config))
    weights = (golden / "timm_naflex_rope.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=fault):
        load_pretrained(tmp_path / "model.safetensors")


@pytest.fixture
def siglip_2(golden, tmp_path):
    """Writes a preprocessor_config.json beside the golden model; gives the folder."""

    def write(stated):
        path = shutil.copytree(golden / "hf_siglip2", tmp_path / "siglip2")
        (path / "preprocessor_config.json").write_text(json.dumps(stated))
        return path

    return write


PATCHES = {"image_processor_type": "Siglip2ImageProcessor"}


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ({"do_resize": False}, "do_resize=False: needs true"),
        ({"resample": 3}, "resample=3: needs 2"),
        ({"patch_size": 8}, "patch_size=8: needs 16, the model's"),
        ({"ops": "decode|resize(32)"}, "resize.* would change the shape of pictures"),
        ({"image_processor_type": "SiglipImageProcessor", "resample": 1}, "resample=1: needs 0"),
    ],
)
def test_pixels_of_patches_that_cannot_be_made_are_refused(siglip_2, caplog, stated, fault):
    source = read_pretrained(siglip_2(PATCHES | stated))
    assert "only the weights can be used" in caplog.text
    with pytest.raises(InputError, match=fault):
        preparation(source.spec, None)


def test_pixels_of_patches_are_read_as_transformers_does(siglip_2):
    """Its defaults too; `exif` and `pixel_range` are ours."""
    scaled = {"rescale_factor": 1 / 51, "image_mean": 0.0, "image_std": [1.0] * 3}
    path = siglip_2(PATCHES | scaled | {"exif": False, "pixel_range": [0, 4095]})
    source = read_pretrained(path)
    spec = source.spec
    assert preparation(spec, None) == ("decode", PatchRule((16, 16), 256))
    assert source.model.max_tokens == 256
    assert (spec.mean, spec.std) == ((0.0,) * 3, (pytest.approx(0.2),) * 3)
    assert (spec.exif, spec.pixel_range) == (False, (0, 4095))


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_no_other_format_of_transformers_takes_pictures_in_their_own_shape(pool):
    model = create_model("ViT-mu/4", None, (16, 16), pool=pool, max_tokens=16)
    assert any("needs 'map'" in reason for reason in huggingface.check(model))


@pytest.mark.parametrize(
    ("format", "keeps"), [("stablehlo", False), ("npz", False), ("timm", True)]
)
def test_formats_of_one_size_leave_out_results_of_pictures(format, keeps, tmp_path, caplog):
    model = create_model("ViT-mu/4", 3, (16, 16), max_tokens=16)
    params = flatten_names(random_params(model, jnp.zeros((1, 16, 16, 3))))
    spec = Spec((16, 16), "antialiased", ops="decode", rule=PatchRule((4, 4), 16))
    results = {"val/top1": {"value": 0.5, "step": 3}}
    native = Pretrained("mine", model, params, spec, run={"results": results})
    output = tmp_path / ("model" if keeps else f"model.{format}")
    receipt = export(native, output, format)
    assert receipt["results"] == (results if keeps else {})
    pixels = receipt["preprocessing"]
    assert (pixels["ops"], pixels.get("max_tokens")) == (
        ("decode", 16) if keeps else ("decode|resize(antialias=True)", None)
    )
    if keeps:  # without these two, timm's architecture takes its own
        args = json.loads((output / "config.json").read_text())["model_args"]
        assert (args["reg_tokens"], args["init_values"]) == (0, None)
    card = next(tmp_path.rglob("*.md")).read_text()
    assert ("at most 16 patches of 4 x 4 pixels by `decode`" in card) is keeps
    assert ("16 x 16 pixels, to which pictures are squashed" in caplog.text) is not keeps
