"""Axial-ViT: its equations."""

import re

import jax
import numpy as np
from at_fault import at_fault
from formulas import SIZES
from numpy_vit import dense, encoder_block, float64, layer_norm, patches, random_params

from vit_jax.inference.layers import attention_weights
from vit_jax.models import create_model

RNG = np.random.default_rng(0)


def by_hand(name):
    """(parameters, multiply-adds): each block twice, with weights in rows, then in columns."""
    variant, patch = re.fullmatch(r"Axial-ViT-(\w+)/(\d+)", name).groups()
    width, depth, mlp_dim, _ = SIZES[variant]
    patch, side = int(patch), 224 // int(patch)
    tokens = side**2
    block = 4 * (width**2 + width) + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    params = (3 * patch**2 + 1 + tokens) * width + 2 * depth * block + 2 * width
    macs = tokens * 3 * patch**2 * width + width * 1000
    macs += 2 * depth * tokens * width * (4 * width + 2 * mlp_dim + 2 * side)
    return params + (width + 1) * 1000, macs


def test_axial_blocks_by_hand():
    """Attention in the rows, an MLP, attention in the columns, an MLP: in NumPy, line by line."""
    sizes = {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2}
    model = create_model("Axial-ViT-B/32", 5, (16, 24), patch_size=8, **sizes)
    images = RNG.normal(size=(2, 16, 24, 3)).astype(np.float32)
    params = random_params(model, images)
    p = float64(params)
    expected = []
    for image in images:
        x_ND = dense(p["embedding"], patches(image, (8, 8))) + p["pos_embedding"][0]
        for i in range(2):
            x_YXD, layer = x_ND.reshape(2, 3, 16), p["encoder"][f"layer_{i}"]
            for y in range(2):
                x_YXD[y] = encoder_block(layer["row"], x_YXD[y], 2, "tanh")
            for x in range(3):
                x_YXD[:, x] = encoder_block(layer["column"], x_YXD[:, x], 2, "tanh")
            x_ND = x_YXD.reshape(6, 16)
        x_D = layer_norm(p["encoder"]["norm"], x_ND).mean(axis=0)
        expected.append(dense(p["head"], x_D))
    found = jax.jit(model.apply)({"params": params}, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    anything = model.clone(image_size=None, pos_embed="sincos_2d")
    of_any = {name: leaf for name, leaf in params.items() if name != "pos_embedding"}
    shapes = jax.eval_shape(anything.apply, {"params": of_any}, images[:, :8])
    assert shapes.shape == (2, 5)
    with at_fault("output"):
        attention_weights(model, params, images)
