"""Hybrids: a ResNet whose map a Transformer reads."""

import re

import pytest
from formulas import STAGES, resnet, vit_macs, vit_params

from vit_jax.models import create_model, token_stride


def by_hand(name):
    """(parameters, multiply-adds) of the model called `name`."""
    layers, variant, patch = re.fullmatch(r"R(\d*)\+ViT-(\w+)/(\d+)", name).groups()
    stages = STAGES[layers] if layers else ()
    if layers and patch == "16":
        stages = (*stages[:2], stages[2] + stages[3])
    params, macs, channels, side = resnet(stages, 64, 224, is_bit=False)
    on_map = 1 if layers else int(patch) // 2
    size, sizes = (on_map,) * 2, {"grid": (side // on_map,) * 2, "channels": channels}
    params += vit_params(variant, size, num_classes=1000, **sizes)
    return params, macs + vit_macs(variant, size, num_classes=1000, **sizes)


@pytest.mark.parametrize(
    ("name", "patch_size", "stages", "stride"),
    [
        ("R+ViT-S/32", (16, 16), (), 64),
        ("R50+ViT-S/16", (1, 1), (3, 4, 9), 16),
        ("R50+ViT-S/32", (1, 1), (3, 4, 6, 3), 32),
        ("R50+ViT-S/48", (3, 3), (3, 4, 9), 48),
        ("R50+ViT-S/64", (2, 2), (3, 4, 6, 3), 64),
        ("R101+ViT-L/16", (1, 1), (3, 4, 26), 16),
    ],
)
def test_free_combinations(name, patch_size, stages, stride):
    model = create_model(name, None, (stride, 3 * stride))
    assert (model.patch_size, model.stages) == (patch_size, stages)
    assert model.token_stride == token_stride(name) == (stride, stride)
    assert model.grid == (1, 3)
