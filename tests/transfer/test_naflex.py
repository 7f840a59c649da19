"""Published weights for pictures in their own shape: NaFlex of timm and of SigLIP 2."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.transfer import load_pretrained

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


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"patch_size": 8}, "embeds.proj.weight: 768 values a patch are not 8 x 8 x 3"),
        ({"pos_embed_ar_preserving": True}, "pos_embed_ar_preserving=True is not supported"),
        ({"rope_type": "mixed"}, "model.safetensors.*rope_type='mixed' is not supported"),
        (
            {"pos_embed_interp_mode": "area"},
            "model.safetensors.*pos_embed_interp_mode='area' is not supported; needs bilinear or",
        ),
    ],
)
def test_what_computes_otherwise_is_refused(golden, tmp_path, changes, fault):
    config = json.loads((golden / "timm_naflex_rope.json").read_text())
    config["model_args"] |= changes
    (tmp_path / "model.json").write_text(json.dumps(config))
    weights = (golden / "timm_naflex_rope.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=fault):
        load_pretrained(tmp_path / "model.safetensors")
