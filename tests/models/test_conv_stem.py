"""ViTC: a Transformer on the map of a few convolutions."""

import jax
import numpy as np
import pytest
from at_fault import at_fault
from numpy_vit import dense, encoder_block, float64, layer_norm, random_params

from vit_jax.models import create_model
from vit_jax.objectives.patches import check_patches
from vit_jax.transfer.shapes import abstract_params

# The paper's table of models: width, layers, MLP, channels of the stem; millions of parameters.
SIZES = {
    "ViTC-1GF": (192, 11, 576, (24, 48, 96, 192)),
    "ViTC-4GF": (384, 11, 1152, (48, 96, 192, 384)),
    "ViTC-18GF": (768, 11, 3072, (64, 128, 128, 256, 256, 512)),
    "ViTC-36GF": (1024, 13, 4096, (64, 128, 128, 256, 256, 512)),
}
MILLIONS = {"ViTC-1GF": 4.6, "ViTC-4GF": 17.8, "ViTC-18GF": 81.6, "ViTC-36GF": 167.8}


def by_hand(name):
    """(parameters, multiply-adds): four convolutions halve the map, and the last one is 1 x 1."""
    width, depth, mlp_dim, stem = SIZES[name]
    params = macs = 0
    channels, side = 3, 224
    for after in stem:
        side //= 1 if after == channels else 2
        params += 9 * channels * after + 2 * after
        macs += 9 * channels * after * side**2
        channels = after
    assert side == 14
    tokens = side**2 + 1
    params += (channels + 1) * width + (tokens + 1) * width + 2 * width + (width + 1) * 1000
    macs += side**2 * channels * width + width * 1000
    block = 4 * (width**2 + width) + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    block_macs = tokens * width * (4 * width + 2 * mlp_dim + 2 * tokens)
    return params + depth * block, macs + depth * block_macs


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    params = sum(leaf.size for leaf in abstract_params(create_model(name)).values())
    assert round(params / 1e6, 1) == MILLIONS[name]


def convolve(kernel, x_HWC, stride):
    """3 x 3, over zeros beyond the edges."""
    padded = np.pad(x_HWC, ((1, 1), (1, 1), (0, 0)))
    rows, columns = (range(0, side, stride) for side in x_HWC.shape[:2])
    return np.array(
        [[np.einsum("ijc,ijcd->d", padded[y : y + 3, x : x + 3], kernel) for x in columns]
         for y in rows]
    )  # fmt: skip


SMALL = {"width": 12, "depth": 1, "mlp_dim": 16, "num_heads": 2, "pool": "gap"}


def test_model_by_hand():
    """Strides of 2, 1 and 2, and patches of 2 x 1 positions of the map, in NumPy."""
    stem = {"patch_size": (8, 4), "stem_channels": (6, 6, 10)}
    model = create_model("ViTC-1GF", 5, (16, 8), **stem, **SMALL)
    images = np.random.default_rng(0).normal(size=(2, 16, 8, 3)).astype(np.float32)
    params = random_params(model, images)
    p = float64(params)
    expected = []
    for x_HWC in images:
        for i, stride in enumerate((2, 1, 2)):
            x_HWC = convolve(p["stem"][f"conv_{i}"]["kernel"], x_HWC, stride)
            x_HWC = np.maximum(layer_norm(p["stem"][f"norm_{i}"], x_HWC), 0)
        assert x_HWC.shape == (4, 2, 10)
        patches_NP = x_HWC.reshape(2, 2, 2, 10).transpose(0, 2, 1, 3).reshape(4, 20)
        x_ND = dense(p["embedding"], patches_NP) + p["pos_embedding"][0]
        x_ND = encoder_block(p["encoder"]["layer_0"], x_ND, 2, "tanh")
        expected.append(dense(p["head"], layer_norm(p["encoder"]["norm"], x_ND).mean(axis=0)))
    found = jax.jit(model.apply)({"params": params}, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert (model.grid, model.token_stride, model.stem_stride) == ((2, 2), (8, 4), 4)


def test_the_channels_of_a_stem_are_several():
    with at_fault("stem_channels"):
        create_model("ViTC-1GF", image_size=32, num_classes=5, stem_channels=24)


def test_a_token_sees_more_than_its_patch():
    """So its pixels cannot be hidden; tokens can be dropped after the stem."""
    model = create_model("ViTC-1GF", None, 32, **SMALL, keep_tokens=0.5)
    with at_fault("objective.name"):
        check_patches(model, "mae")
    assert (model.num_tokens, model.num_tokens_in_training) == (4, 2)
