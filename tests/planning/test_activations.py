"""What is kept and exchanged of a ResNet's activations, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.config import base_config
from vit_jax.data.known import fill_in_sizes
from vit_jax.models import create_model
from vit_jax.planning.activations import activation_bytes, resnet_units, tensor_exchanges
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.targets import Target
from vit_jax.topologies import find_slice

# An image of 32 x 64 pixels; after the root, of 32 channels, a map of 8 x 16; two units of 32 and
# 128 channels, then one of half the resolution and twice the width.
PIXELS, POSITIONS = 32 * 64, 8 * 16
UNITS = [  # positions and channels in, positions out, channels within
    (POSITIONS, 32, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS // 4, 64),
]
PROJECTED = [True, False, True]
ROOT = 3 * PIXELS + 32 * PIXELS // 4


def make(name, remat="none", **fields):
    fields |= {"remat": remat, "stages": (2, 1), "stem_width": 32, "dtype": jnp.bfloat16}
    return create_model(name, 10, (32, 64), **fields)


def inputs(unit):
    return unit[0] * unit[1]


def middle(unit):
    return (unit[0] + unit[2]) * unit[3]


def output(unit):
    return unit[2] * 4 * unit[3]


def test_units():
    found = [
        (unit.positions_in, unit.width_in, unit.positions_out, unit.width)
        for unit in resnet_units(make("BiT-R50x1"))
    ]
    assert found == UNITS
    assert [unit.has_projection for unit in resnet_units(make("BiT-R50x1"))] == PROJECTED


def test_activations_of_a_bit():
    # Of a unit without remat its input and that normalised, and two convolutions' outputs, each
    # normalised too; in the end the last map and that normalised. Two bytes each.
    whole = [2 * inputs(unit) + 2 * middle(unit) for unit in UNITS]
    ends = ROOT + 2 * output(UNITS[-1])
    assert activation_bytes(make("BiT-R50x1")) == 2 * (ends + sum(whole))
    kept = sum(map(inputs, UNITS))
    assert activation_bytes(make("BiT-R50x1", "full")) == 2 * (ends + kept + max(whole))


def test_activations_of_a_hybrid():
    of_vit = activation_bytes(create_model("ViT-mu/8", 10, (32, 64), dtype=jnp.bfloat16))
    model = make("R26+ViT-mu/16")  # on a map of stride 8: as many tokens
    # Of a unit without remat its input, and what its convolutions give, two of them normalised.
    whole = [
        inputs(unit) + 2 * middle(unit) + output(unit) * (1 + projected)
        for unit, projected in zip(UNITS, PROJECTED, strict=True)
    ]
    root = ROOT + 32 * PIXELS // 4  # and normalised
    assert activation_bytes(model) - of_vit == 2 * (root + sum(whole))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R26+ViT-mu/16"])
def test_dots_keeps_what_is_in_between(name):
    full, dots, none = (activation_bytes(make(name, remat)) for remat in ("full", "dots", "none"))
    assert full < dots
    assert full < none


def test_exchanges_over_the_tensor_axis():
    reduced, gathered = sum(map(output, UNITS)), sum(unit[0] * unit[3] for unit in UNITS)
    exchanges = {"all-reduce": (3, 2 * reduced), "all-gather": (3, 2 * gathered)}
    assert tensor_exchanges(make("BiT-R50x1")) == exchanges
    tokens, width = 1 + 4 * 8, 32
    of_hybrid = tensor_exchanges(make("R26+ViT-mu/16"))
    assert of_hybrid["all-gather"] == exchanges["all-gather"]
    assert of_hybrid["all-reduce"] == (3 + 2, 2 * (reduced + 2 * tokens * width))
    of_vit = tensor_exchanges(create_model("ViT-mu/8", 10, (32, 64)))
    assert of_vit == {"all-reduce": (2, 4 * 2 * tokens * width), "all-gather": (0, 0)}


def test_a_calculated_plan():
    c = base_config()
    c.model.name, c.model.stages, c.model.stem_width = "R26+ViT-mu/16", (1, 1), 32
    c.data.name, c.data.image_size, c.data.ops = "imagenet2012", 32, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 2, 2, 2
    figures = calculate_plan(fill_in_sizes(c), Target(find_slice("H100:8")))
    flops = figures["flops"]
    assert flops["model_per_image_by_sizes"] is None
    # The gradient by the pixels is not asked for.
    forward = 2 * flops["forward_macs_per_image"]
    root = 2 * 16 * 16 * 7 * 7 * 3 * 32
    assert flops["model_per_image_by_jaxpr"] == 3 * forward - root
    assert ("all-gather", ["tensor"]) in [(r["kind"], r["axes"]) for r in figures["collectives"]]
    assert jax.tree.all(jax.tree.map(lambda size: size >= 0, figures["memory_bytes"]))
