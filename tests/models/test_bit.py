"""BiT: its parameters, and images of any size."""

import re

import jax
import jax.numpy as jnp
from at_fault import at_fault
from formulas import STAGES, resnet
from numpy_vit import random_params

from vit_jax.models import create_model


def by_hand(name):
    """(parameters, multiply-adds) of the model called `name`."""
    layers, factor = re.fullmatch(r"BiT-R(\d+)x(\d)", name).groups()
    params, macs, channels, _ = resnet(STAGES[layers], 64 * int(factor), 224, is_bit=True)
    return params + (channels + 1) * 1000, macs + channels * 1000


def test_a_resnet_takes_images_of_any_size():
    model = create_model("BiT-R50x1", 3, None, stages=(1,), stem_width=32)
    params = {"params": random_params(model, jnp.zeros((1, 32, 32, 3)))}
    for size in ((32, 32), (40, 57)):
        assert jax.eval_shape(model.apply, params, jnp.zeros((2, *size, 3))).shape == (2, 3)
    with at_fault("image_size"):
        create_model("ViT-mu/4", 3, None)
