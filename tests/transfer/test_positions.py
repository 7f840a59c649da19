"""Positions of every kind, from a run into other models, sizes and formats."""

import logging

import jax
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from finished_run import check_same_arrays
from numpy_vit import random_params
from opened import config_json

from vit_jax.base import tree
from vit_jax.checkpoints.checkpoint import Checkpoints
from vit_jax.config import base_config
from vit_jax.models import create_model
from vit_jax.transfer import init_variables, read_pretrained, with_image_size
from vit_jax.transfer.export import export
from vit_jax.transfer.fit import stack_layers
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.resample import resample_axis, resample_grid, resample_offsets

SIZES = {"width": 8, "depth": 2, "mlp_dim": 4, "num_heads": 2}
OLD, NEW = (3, 4), (5, 2)
KINDS = [
    ("learned_1d", "layers"),
    ("learned_2d", "stem"),
    ("learned_2d", "layers"),
    ("relative", None),
    ("relative", "layers_shared"),
]


def make(kind, place, family="ViT", **fields):
    fields = SIZES | {"pos_embed": kind, "pos_embed_at": place} | fields
    model = create_model(f"{family}-mu/2", 3, (2 * OLD[0], 2 * OLD[1]), **fields)
    params = random_params(model, np.zeros((1, *model.image_size, 3), np.float32))
    return Pretrained("made", model, tree.flatten_names(params), Spec(None, "antialiased"))


def expected_table(name, table, prefix, convention):
    if name.endswith("pos_embedding"):
        return resample_grid(table, OLD, NEW, convention=convention)
    if name.endswith("/rows"):
        return resample_axis(table, OLD[0], NEW[0], convention=convention)
    if name.endswith("/columns"):
        return resample_axis(table, OLD[1], NEW[1], convention=convention)
    if name.endswith("/offsets"):
        return resample_offsets(table, OLD, NEW, convention=convention)
    if name.endswith(("to_patches", "from_patches")):
        return np.stack([
            resample_grid(row[None], OLD, NEW, convention=convention)[0] for row in table
        ])  # fmt: skip
    return table


@pytest.mark.parametrize(
    ("kind", "place", "family"),
    [*((*kind, "ViT") for kind in KINDS), ("learned_1d", "layers", "DeiT"),
     ("relative", None, "DeiT")],
)  # fmt: skip
def test_every_table_of_every_layer_is_resampled(kind, place, family, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    made = make(kind, place, family)
    prefix = made.model.num_prefix_tokens
    found = with_image_size(made, (2 * NEW[0], 2 * NEW[1]), resize="half_pixel")
    assert caplog.text.count("resampled (half_pixel") == 1
    layers = 1 if place in ("stem", "layers_shared") else 2
    tables = [name for name in made.params if "pos_embedding" in name]
    assert len(tables) == layers * {"learned_1d": 1, "learned_2d": 3, "relative": 4}[kind]
    for name, array in made.params.items():
        expected = expected_table(name, array, prefix, "half_pixel")
        np.testing.assert_array_equal(found.params[name], expected, err_msg=name)
    images = np.zeros((1, 2 * NEW[0], 2 * NEW[1], 3), np.float32)
    variables = {"params": tree.unflatten_names(found.params)}
    jax.eval_shape(found.model.apply, variables, images)


def test_the_same_grid_is_left_alone(caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    made = make("relative", None)
    found = with_image_size(made, made.model.image_size)
    for name, array in made.params.items():
        assert found.params[name] is array
    assert not caplog.records


def test_tables_of_layers_are_stacked_for_a_model_that_scans():
    made = make("learned_2d", "layers")
    found, _ = init_variables(made, made.model.clone(scan=True), keep_head=True)
    expected = tree.flatten_names(stack_layers(tree.unflatten_names(made.params)))
    assert found.keys() == expected.keys()
    assert found["encoder/layers/pos_embedding/rows"].shape == (2, 1, OLD[0], 4)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_another_place_is_another_architecture():
    made = make("learned_1d", "layers_shared")
    for place in (None, "stem"):
        model = made.model.clone(pos_embed_at=place)
        with at_fault("model.pos_embed_at"):
            init_variables(made, model)
    at_stem = make("learned_1d", None)
    init_variables(at_stem, at_stem.model.clone(pos_embed_at="stem"))


def test_other_kinds_do_not_fit():
    made = make("learned_2d", "layers_shared")
    with at_fault("model.pos_embed"):
        init_variables(made, made.model.clone(pos_embed="relative"))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param("learned_1d", "layers", marks=pytest.mark.slow),
        pytest.param("learned_2d", "layers_shared", marks=pytest.mark.slow),
        ("relative", None),
    ],
)
def test_a_run_is_read_as_it_was_saved(tmp_path, kind, place):
    made, c = make(kind, place), base_config()
    c.model.name, c.model.pos_embed, c.model.pos_embed_at = "ViT-mu/2", kind, place
    c.model.scan = True
    for field, value in SIZES.items():
        c.model[field] = value
    c.data.image_size, c.data.num_classes = made.model.image_size, 3
    (tmp_path / "config.json").write_text(config_json(c))
    (tmp_path / "classes.json").write_text("null")
    checkpoints = Checkpoints(epath.Path(tmp_path) / "checkpoints", keep_last=1, keep_every=None)
    params = stack_layers(tree.unflatten_names(made.params))
    checkpoints.save(1, {"params": params}, {})
    checkpoints.close()
    found = read_pretrained(tmp_path)
    assert found.model == made.model
    check_same_arrays(found.params, made.params)


@pytest.mark.parametrize(
    ("kind", "place"),
    [pytest.param("learned_2d", "layers", marks=pytest.mark.slow), ("relative", None)],
)
def test_a_program_has_positions(tmp_path, kind, place):
    made = make(kind, place, depth=1)
    receipt = export(made, tmp_path / "model.stablehlo", "stablehlo")  # which compares the logits
    assert receipt["model"]["pos_embed"] == kind
    assert receipt["model"]["pos_embed_at"] == place
