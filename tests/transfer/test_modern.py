"""Models of 2023 to 2026: what the libraries compute from their files, and the files themselves."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from published import random_model
from safetensors.numpy import load_file, save_file

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.main import main
from vit_jax.transfer import load_pretrained, read_pretrained, save_pretrained
from vit_jax.transfer.known_weights import PARITY, WEIGHTS

TIMM = ("timm_clip", "timm_deit3", "timm_dinov2", "timm_dinov2_swiglu", "timm_dinov3",
        "timm_dinov3_plus", "timm_eva02", "timm_eva02_small", "timm_siglip", "timm_siglip_gap",
        "vit5", "meta_dinov3")  # fmt: skip
HF = ("hf_dinov2", "hf_dinov2_swiglu", "hf_dinov2_with_registers",
      "hf_dinov2_with_registers_classifier", "hf_dinov3", "hf_dinov3_swiglu", "hf_siglip",
      "hf_siglip_text", "hf_clip")  # fmt: skip
# Written with timm's names, as a tower alone, and with the prefix of the tower.
NOT_WRITTEN = ("meta_dinov3", "hf_siglip_text", "hf_clip")
TOLERANCE = 2e-5  # of the largest value: another GELU or epsilon differs by 8e-5 or more


def source_of(golden, name):
    return golden / name if name.startswith("hf") else golden / f"{name}.safetensors"


def outputs(model, variables, images):
    """What the library's model gives too: {"tokens", "features", "logits"}."""

    def run(model, images):
        tokens = model.tokens(images)
        features = model.represent(tokens)
        return {
            "tokens": tokens,
            "features": features,
            "logits": features if model.num_classes is None else model.head(features),
        }

    return jax.jit(lambda values: model.apply(values, images, method=run))(variables)


def assert_parity(ours, expected, name, tolerance=TOLERANCE):
    distance = np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max()
    assert distance < tolerance, f"{name}: {distance:.1e} of the largest value"


# Positions of each kind, resampled as each library does; other models share one of these kinds, and
# are compared at their own size.
RESAMPLED = ("timm_clip", "timm_deit3", "timm_dinov2", "timm_dinov3", "timm_eva02", "timm_siglip",
             "vit5", "hf_dinov2_with_registers", "hf_dinov3", "hf_siglip")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        pytest.param(
            name, suffix,
            marks=() if (name in RESAMPLED) == bool(suffix) else pytest.mark.slow,
        )
        for name in TIMM + HF
        for suffix in ("", "_resampled")
    ],
)  # fmt: skip
def test_parity_at_both_sizes(golden, name, suffix):
    io = golden / name / "io.npz" if name in HF else golden / f"{name}.io.npz"
    with np.load(io) as expected:
        images = expected[f"image{suffix}"]
        size = images.shape[1:3]
        model, variables = load_pretrained(source_of(golden, name), image_size=size)
        found = outputs(model, variables, images)
        if name == "vit5":  # whose registers come last
            first = 1 + model.registers
            cls, registers, patches = np.split(found["tokens"], [1, first], axis=1)
            found["tokens"] = np.concatenate([cls, patches, registers], axis=1)
        compared = [key for key in found if key + suffix in expected]
        assert {"tokens", "features"} <= {*compared}
        for key in compared:
            # On another machine sums round differently than in the table.
            assert_parity(found[key], expected[key + suffix], key + suffix, 4 * PARITY[name])


def test_images_of_any_shape_of_siglip_2(golden):
    with np.load(golden / "hf_siglip2/io.npz") as expected:
        for i in range(3):
            images = expected[f"image_{i}"]
            model, variables = load_pretrained(golden / "hf_siglip2", image_size=images.shape[1:3])
            found = outputs(model, variables, images)
            is_patch = expected["pixel_attention_mask"][i] == 1
            assert_parity(found["tokens"][0], expected["tokens"][i][is_patch], "tokens")
            assert_parity(found["features"][0], expected["features"][i], "features")


@pytest.mark.parametrize("name", [n for n in TIMM + HF if n not in NOT_WRITTEN])
def test_a_golden_is_written_bit_for_bit(golden, tmp_path, name):
    source, format = source_of(golden, name), "hf" if name in HF else "timm"
    pretrained = read_pretrained(source)
    variables = {"params": tree.unflatten_names(pretrained.params)}
    save_pretrained(tmp_path / name, pretrained.model, variables, format, pretrained.spec)
    theirs = load_file(source / "model.safetensors" if name in HF else source)
    ours = load_file(tmp_path / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        if not key.endswith("mask_token"):  # which no tower uses
            assert ours[key].tobytes() == array.tobytes(), key
    again = read_pretrained(tmp_path / name)
    assert (again.model, again.spec) == (pretrained.model, pretrained.spec)


def test_authors_names_give_the_same_model(golden, tmp_path):
    """The authors' DINOv3, which alone masks the biases of keys, is written as timm's."""
    pretrained = read_pretrained(golden / "meta_dinov3.safetensors")
    assert pretrained.model.qkv_bias
    assert not pretrained.model.key_bias
    variables = {"params": tree.unflatten_names(pretrained.params)}
    save_pretrained(tmp_path / "timm", pretrained.model, variables, "timm", pretrained.spec)
    again = read_pretrained(tmp_path / "timm")
    assert again.model == pretrained.model
    for key, array in pretrained.params.items():
        np.testing.assert_array_equal(again.params[key], array)


def changed(golden, tmp_path, name, change=lambda arrays: None, **args):
    """A copy of a golden in timm's form with other arrays or `model_args`."""
    arrays = load_file(golden / f"{name}.safetensors")
    change(arrays)
    save_file(arrays, tmp_path / "made.safetensors")
    config = json.loads((golden / f"{name}.json").read_text())
    config["model_args"] |= args
    (tmp_path / "made.json").write_text(json.dumps(config))
    return tmp_path / "made.safetensors"


def test_pixels_that_fill_no_patch_are_left_out(golden, tmp_path):
    """As of SigLIP's So400m/14 at 384 px, which has 27 x 27 patches."""
    source = changed(golden, tmp_path, "timm_siglip", img_size=70)
    pretrained = read_pretrained(source)
    assert pretrained.model.image_size == pretrained.spec.image_size == (64, 64)


def test_published_periods_are_rounded_to_bfloat16(golden, tmp_path):
    import ml_dtypes

    def round_periods(arrays):
        periods = arrays["rope_embed.periods"].astype(ml_dtypes.bfloat16)
        arrays["rope_embed.periods"] = periods.astype(np.float32)

    source = changed(golden, tmp_path, "meta_dinov3", round_periods)
    assert read_pretrained(source).model.rotary_dtype == "bfloat16"
    assert read_pretrained(golden / "meta_dinov3.safetensors").model.rotary_dtype == "float32"


def test_periods_of_another_base_are_refused(golden, tmp_path):
    source = changed(golden, tmp_path, "meta_dinov3", pos_embed_rope_base=50)
    with pytest.raises(InputError, match=r"rope_embed\.periods: not the periods of base 50"):
        read_pretrained(source)


def test_a_bias_mask_of_another_form_is_refused(golden, tmp_path):
    def unmask(arrays):
        arrays["blocks.0.attn.qkv.bias_mask"][:] = 1

    with pytest.raises(InputError, match=r"bias_mask: needs zeros for the keys"):
        read_pretrained(changed(golden, tmp_path, "meta_dinov3", unmask))


def test_models_without_registers_keep_their_kind(golden, tmp_path):
    def unregister(arrays):
        for name in [n for n in arrays if re.search(r"reg_token|storage_tokens|rope_reg", n)]:
            del arrays[name]

    none = {"n_storage_tokens": 0, "num_reg_tokens": 0, "num_registers": 0}
    for name in ("timm_dinov3", "meta_dinov3", "vit5"):
        source = changed(golden, tmp_path, name, unregister, **none)
        model, own = read_pretrained(source).model, read_pretrained(source_of(golden, name)).model
        assert model == own.clone(registers=0, rotary_registers=None)


def test_frequencies_of_absent_registers_are_refused(golden, tmp_path):
    source = changed(golden, tmp_path, "vit5", lambda arrays: arrays.pop("reg_token"))
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.rope_reg\.freqs \(.*\): unknown"):
        read_pretrained(source)


def test_empty_registers_are_none(golden, tmp_path):
    """As transformers stores those of a Dinov2WithRegisters without any."""
    shutil.copytree(golden / "hf_dinov2_with_registers", tmp_path / "made")
    arrays = load_file(tmp_path / "made/model.safetensors")
    arrays["embeddings.register_tokens"] = np.zeros((1, 0, 48), np.float32)
    save_file(arrays, tmp_path / "made/model.safetensors")
    config = json.loads((tmp_path / "made/config.json").read_text()) | {"num_register_tokens": 0}
    (tmp_path / "made/config.json").write_text(json.dumps(config))
    pretrained = read_pretrained(tmp_path / "made")
    assert (pretrained.model.registers, pretrained.spec.resize) == (0, "antialiased")


def test_the_classifier_of_siglip_takes_the_mean_of_the_patches(golden, tmp_path):
    shutil.copytree(golden / "hf_siglip", tmp_path / "made")
    arrays = load_file(tmp_path / "made/model.safetensors")
    kernel = np.random.default_rng(0).standard_normal((7, 48)).astype(np.float32)
    arrays |= {"classifier.weight": kernel, "classifier.bias": np.ones(7, np.float32)}
    save_file(arrays, tmp_path / "made/model.safetensors")
    with np.load(golden / "hf_siglip/io.npz") as expected:
        model, variables = load_pretrained(tmp_path / "made")
        logits = model.apply(variables, expected["image"])
        wanted = expected["tokens"].mean(1) @ kernel.T + 1
    assert_parity(logits, wanted, "logits")


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("timm_clip", "vit_pe_core_base_patch16_224"),
        ("timm_dinov3", "vit_mediumd_patch16_rope_reg1_gap_256"),
        ("timm_deit3", "vit_base_patch16_rpn_224"),
        ("timm_siglip", "eva02_enormous_patch14_clip_224"),
    ],
)
def test_architectures_that_compute_otherwise_are_refused(golden, tmp_path, name, architecture):
    source = changed(golden, tmp_path, name)
    config = json.loads(source.with_suffix(".json").read_text()) | {"architecture": architecture}
    source.with_suffix(".json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{architecture}, of timm, which is not supported"):
        read_pretrained(source)


def test_a_stated_norm_has_its_own_epsilon(golden, tmp_path):
    source = changed(golden, tmp_path, "meta_dinov3", norm_layer="layernorm")
    assert read_pretrained(source).model.norm_eps == 1e-6
    source = changed(golden, tmp_path, "meta_dinov3", norm_layer="batchnorm")
    with pytest.raises(InputError, match="norm_layer='batchnorm'"):
        read_pretrained(source)


def test_dinov2_of_its_authors_is_resampled_by_their_rule(golden, tmp_path):
    def as_authors(arrays):
        arrays["mask_token"] = np.zeros((1, 48), np.float32)
        arrays["pos_embed"] = np.zeros((1, 17, 48), np.float32)
        del arrays["reg_token"]

    source = changed(golden, tmp_path, "timm_dinov2", as_authors)
    source.with_suffix(".json").write_text(json.dumps({"model_args": {"num_heads": 3}}))
    pretrained = read_pretrained(source)
    assert pretrained.spec.resize == "half_pixel_surplus"
    assert pretrained.spec.mean == (0.485, 0.456, 0.406)


def test_positions_of_registers_are_added_to_them(golden, tmp_path):
    """timm's models give positions to all tokens before the patches, or to none."""
    added = np.random.default_rng(0).standard_normal((1, 5, 48)).astype(np.float32)

    def place(arrays):
        arrays["pos_embed"] = np.concatenate([added, arrays["pos_embed"]], axis=1)

    source = changed(golden, tmp_path, "timm_dinov2", place)
    own, pretrained = (read_pretrained(s) for s in (source_of(golden, "timm_dinov2"), source))
    assert pretrained.model.pos_embed_class_token
    np.testing.assert_array_equal(pretrained.params["pos_embedding"][:, :1], added[:, :1])
    found = pretrained.params["register_tokens"]
    np.testing.assert_array_equal(found, own.params["register_tokens"] + added[:, 1:])
    # timm would give the registers positions as soon as the class token has one.
    save_pretrained(tmp_path / "written", pretrained.model, pretrained.variables, "timm")
    written = read_pretrained(tmp_path / "written")
    assert not written.model.pos_embed_class_token
    class_token = own.params["class_token"] + added[:, :1]
    np.testing.assert_array_equal(written.params["class_token"], class_token)


def test_registers_without_a_class_token_have_no_positions(tmp_path):
    """Where timm's `no_embed_class` is False, its model has positions for registers too."""
    model, variables = random_model("ViT-mu/4", registers=4, pool="gap")
    save_pretrained(tmp_path / "made", model, variables, "timm")
    args = json.loads((tmp_path / "made/config.json").read_text())["model_args"]
    assert args["no_embed_class"]
    assert not args["class_token"]
    assert read_pretrained(tmp_path / "made").model == model
    with pytest.raises(InputError, match="registers=4, but the format needs 0"):
        save_pretrained(tmp_path / "deit", *random_model("DeiT-mu/4", registers=4), "timm")


def test_dinov2_without_biases_is_no_eva(golden, tmp_path):
    def without_biases(arrays):
        for name in [name for name in arrays if name.endswith("qkv.bias")]:
            del arrays[name]

    source = changed(golden, tmp_path, "timm_dinov2_swiglu", without_biases, qkv_bias=False)
    assert read_pretrained(source).model.rotary is None


@pytest.mark.parametrize(
    ("name", "format", "fields", "fault"),
    [
        ("timm_dinov3", "timm", {"norm_eps": 1e-6}, "norm_eps=1e-06, but the format needs 1e-05"),
        ("timm_dinov3", "timm", {"class_token": None}, "class_token=False"),
        ("timm_eva02", "timm", {"rotary_side": None}, "rotary_side=None"),
        ("timm_deit3", "timm", {"patch_bias": False}, "patch_bias=False"),
        ("hf_dinov2", "hf", {"rotary": "indices"}, "rotary='indices'"),
        ("hf_siglip", "npz", {"key_bias": False}, "key_bias=False"),
    ],
)
def test_what_a_format_cannot_hold_is_named(golden, tmp_path, name, format, fields, fault):
    pretrained = read_pretrained(source_of(golden, name))
    model = pretrained.model.clone(**fields)
    path = tmp_path / ("made.npz" if format == "npz" else "made")
    with pytest.raises(InputError, match=fault):
        save_pretrained(path, model, {"params": {}}, format)
    assert not path.exists()


def test_known_weights_have_the_parity_of_a_golden(capsys):
    assert len({weights.name for weights in WEIGHTS}) == len(WEIGHTS) >= 10
    assert max(PARITY.values()) <= TOLERANCE / 4
    assert main(["models", "--weights", "siglip", "eva02_base"]) == 0
    rows = capsys.readouterr().out.splitlines()
    named = [weights.name for weights in WEIGHTS if "siglip" in weights.name]
    assert [row.split()[0] for row in rows[1:]] == [*named, "timm:eva02_base_patch14_224.mim_in22k"]
    assert rows[-1].split()[-6:] == ["B/14", "224", "CLIP", "gap", "MIT", "2e-06"]
    assert main(["models", "--weights", "vit-5"]) == 0
    *_, last, note = capsys.readouterr().out.splitlines()
    assert last.split()[0].endswith("vit5_large_patch16_224.pth") and ".safetensors" in note
    assert main(["models", "--weights", "dinov9"]) == 2
