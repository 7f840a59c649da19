"""Patch sizes drawn for each step: the embedding and the positions resized inside it."""

import pathlib

import jax
import numpy as np
import pytest
from asked import prepare, train_and_evaluate, train_with_stops
from at_fault import at_fault
from finished_run import check_same_end, final_state

from vit_jax.base.tree import flatten_names, unflatten_names
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.models.contract import about
from vit_jax.models.patches import resize_kernel
from vit_jax.objectives.other_sizes import at_patch_size
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.fit import check_architecture, fit

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "flexi.npz"
WORDS = {
    "duration": "10 steps",
    "schedule.warmup": "2 steps",
    "log.every": "1 steps",
    "evals.test": "None",
    "checkpoint.every": "100 steps",
    "global_batch_size": "16",
    "model.patch_size": "2",
    "model.patch_sizes": "2@0.5, 4@0.3, 1@0.2",
}


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def published(golden, tmp_path_factory):
    """The file of the golden model, read."""
    path = tmp_path_factory.mktemp("flexi") / "flexi.npz"
    arrays = {k.removeprefix("weights/"): golden[k] for k in golden if k.startswith("weights/")}
    np.savez(path, **arrays)
    return read_pretrained(str(path))


def make_config(**words):
    config = load_config("quickstart:debug")
    assert not apply_overrides(config, [*(WORDS | words).items()])
    return config


def test_kernels_are_resized_as_published(golden):
    kernel = golden["kernel"].reshape(-1, 2)
    names = [name for name in golden if name.startswith("kernel_")]
    assert len(names) == 10
    for name in names:
        found = resize_kernel(kernel, (32, 32), golden[name].shape[:2])
        # The reference inverts in float32.
        np.testing.assert_allclose(found.reshape(golden[name].shape), golden[name], atol=1e-5)


@pytest.mark.parametrize(
    "patches", [3, 5, *(pytest.param(each, marks=pytest.mark.slow) for each in (6, 8, 12))]
)
def test_a_released_model_gives_its_logits_at_every_patch_size(golden, published, patches):
    side = 96 // patches
    images = golden["image"][:, : patches * side, : patches * side]
    model = published.model.clone(image_size=images.shape[1:3], patch_size=(side, side))
    check_architecture(published, model)
    params, _ = fit(published, model, reset_head=False, resize="linear_antialiased")
    logits = jax.jit(model.apply)({"params": unflatten_names(params)}, images)
    np.testing.assert_allclose(logits, golden[f"logits_seqhw{patches}"], atol=2e-5)


@pytest.mark.parametrize("side", [28, 56])
def test_a_step_resizes_as_a_file_is_read(published, side):
    model = published.model
    assert (model.image_size, model.grid) == ((224, 224), (7, 7))
    smaller = model.clone(patch_size=(side, side))
    expected, _ = fit(published, smaller, reset_head=False, resize="linear_antialiased")
    found = at_patch_size(model, unflatten_names(published.params), (side, side))
    found = flatten_names(found)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")
def test_a_run_goes_on_within_each_patch_size(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = train_and_evaluate(make_config(), whole)
    run = prepare(make_config(), whole)
    assert summary["images_seen"] == 160
    assert [about(e.model).num_patches for e in run.experiments] == [64, 4, 16]
    order = [run.settings.stages.find(step) for step in range(10)]
    assert sorted(order) == [0] * 2 + [1] * 3 + [2] * 5
    kernel = final_state(whole)[1]["params/embedding/kernel"]
    assert kernel.shape[0] == 2 * 2 * 3
    stops = (order.index(0) + 1, order.index(1) + 1)
    train_with_stops(make_config(), parts, stops, monkeypatch)
    check_same_end(parts, whole)


@pytest.mark.parametrize(
    "words",
    [
        {"data.image_size": "4, 8 at 50 %", "data.ops": "resize"},
        {"model.keep_tokens_until": "5 steps"},
    ],
)
def test_a_run_has_one_schedule(words, tmp_path):
    with at_fault("model.patch_sizes"):
        prepare(make_config(**words, **{"model.keep_tokens": "0.5"}), tmp_path)
