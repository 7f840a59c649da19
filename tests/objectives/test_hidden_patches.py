"""Masked patches and masked autoencoders: published values, targets by hand, devices."""

import dataclasses
import functools
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_fault import at_fault
from etils import epath
from numpy_vit import random_params
from PIL import Image
from read_settings import settings_of
from tpu_form import fastest_on_tpu

from vit_jax.base import tree
from vit_jax.config import OBJECTIVES, base_config
from vit_jax.devices.kernels import has_kernels
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators.reconstruction import ReconstructionLoss
from vit_jax.experiment.experiment import make_experiment
from vit_jax.models import create_model
from vit_jax.models.patches import extract_patches, row_keys, take, take_once
from vit_jax.objectives.contract import RunFacts, as_it_is
from vit_jax.objectives.mae import Mae, _Mae
from vit_jax.objectives.masked_patches import (
    Corruption,
    _MaskedPatches,
    colours,
    corrupt,
    draw_corruption,
    pixels_of,
)
from vit_jax.objectives.patches import Reconstruction
from vit_jax.transfer.names import read_rows
from vit_jax.transfer.source import Source
from vit_jax.transfer.timm import vit_rows

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden/loss_mae.npz")
SETTING = RunFacts((0.5, 0.4, 0.3), (0.2, 0.3, 0.5))
RNG = np.random.default_rng(0)


def read_vit(arrays, model):
    """The parameters of a ViT in arrays with timm's names."""
    source = Source(epath.Path("golden"))
    source.arrays = arrays
    return read_rows(vit_rows(model), source, model)


def golden_mae(norm_pixels):
    """The objective and the parameters of the golden file."""
    config = json.loads(str(GOLDEN["config"]))
    sizes = {"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 4}
    model = create_model("ViT-mu/8", None, 32, gelu="exact", **sizes)
    keys = Mae(
        mask_ratio=config["mask_ratio"], norm_pixels=norm_pixels, decoder_width=24,
        decoder_depth=1, decoder_heads=3, decoder_mlp_dim=48,
    )  # fmt: skip
    mae = _Mae(model, keys)
    weights = {k.partition("/")[2]: GOLDEN[k] for k in GOLDEN if k.startswith("weights/")}
    own = {name: leaf for name, leaf in weights.items() if "decoder" not in name}
    mask_token = own.pop("mask_token")
    params = read_vit(own, model)
    # The decoder's blocks are those of a ViT without patches.
    of_blocks = {
        name.removeprefix("decoder_").replace("decoder_", ""): leaf
        for name, leaf in weights.items()
        if name.startswith(("decoder_blocks", "decoder_norm"))
    }
    like = create_model(
        "ViT-mu/8", None, 32, width=24, depth=1, mlp_dim=48, num_heads=3, pos_embed="none",
        pool="gap",
    )  # fmt: skip
    no_patches = {"weight": np.zeros((24, 3, 8, 8)), "bias": np.zeros(24)}
    of_blocks |= {f"patch_embed.proj.{name}": leaf for name, leaf in no_patches.items()}
    decoder = read_vit(of_blocks, like) | {
        "mask_token": mask_token,
        "embedding/kernel": weights["decoder_embed.weight"].T,
        "embedding/bias": weights["decoder_embed.bias"],
        "head/kernel": weights["decoder_pred.weight"].T,
        "head/bias": weights["decoder_pred.bias"],
    }
    return mae, tree.unflatten_names(params | {f"objective/{k}": v for k, v in decoder.items()})


def by_kernels(module):
    return module.clone(ops=fastest_on_tpu(module, mesh_of(1)))


@pytest.mark.parametrize(
    ("suffix", "in_form"),
    [("", as_it_is), pytest.param("_norm_pix", by_kernels, marks=pytest.mark.slow)],
)
def test_published_loss_of_mae(suffix, in_form, interpreted_kernels):
    mae, params = golden_mae(bool(suffix))
    mae = dataclasses.replace(mae, in_form=in_form)
    assert has_kernels(mae.decoder) == (in_form is by_kernels)
    order = np.argsort(GOLDEN["noise"], axis=1)

    @jax.jit
    def find(params):
        def loss(params):
            loss_B, found = mae.predict(params, GOLDEN["image"], order)
            return loss_B.mean(), found

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, found), grads = find(params)
    np.testing.assert_allclose(loss, GOLDEN[f"loss{suffix}"], rtol=2e-5)
    assert mae.count_visible() == 4
    if not suffix:
        expected = np.take_along_axis(GOLDEN["pred"], order[:, 4:, None], axis=1)
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    kernel = np.asarray(grads["embedding"]["kernel"]).reshape(8, 8, 3, 32).transpose(3, 2, 0, 1)
    for name, leaf in (
        ("patch_kernel", kernel), ("mask_token", grads["objective"]["mask_token"]),
    ):  # fmt: skip
        expected = GOLDEN[f"grad_{name}{suffix}"]
        np.testing.assert_allclose(leaf, expected, atol=2e-5 * np.abs(expected).max())
    grads.pop("pos_embedding")  # fixed
    np.testing.assert_allclose(optax.tree.norm(grads), GOLDEN[f"grad_norm{suffix}"], rtol=2e-5)


def test_three_bit_colours_by_hand():
    pixels = np.array([[0, 31.9, 32], [255, 128, 96], [64, 0, 255]])
    np.testing.assert_array_equal(colours(pixels), [1, 7 * 64 + 4 * 8 + 3, 2 * 64 + 7])
    every = jnp.arange(512)
    np.testing.assert_array_equal(colours(pixels_of(every, 3)), every)
    np.testing.assert_array_equal(pixels_of(jnp.array([65]), 3), [[48, 16, 48]])


def masked(target, **fields):
    model = create_model("ViT-mu/8", 5, (16, 24), width=16, mlp_dim=32, **fields)
    return _MaskedPatches(model, SETTING, 0.5, target)


@pytest.mark.parametrize("target", ["mean_colour", "small_patch", "pixels"])
def test_targets_of_masked_patches(target):
    """Perfect scores for colours counted by hand give no loss; equal scores give log K."""
    objective = masked(target)
    pixels = RNG.integers(0, 256, (2, 16, 24, 3))
    images = ((pixels / 255 - SETTING.mean) / SETTING.std).astype(np.float32)
    order = np.array([[4, 0, 5, 1, 2, 3], [1, 2, 3, 0, 4, 5]])
    corruption = Corruption(order, None, None)
    side = {"mean_colour": 1, "small_patch": 4}.get(target)
    wanted = []
    for b in range(2):
        for patch in order[b, :3]:
            top, left = 8 * (patch // 3), 8 * (patch % 3)
            box = pixels[b, top : top + 8, left : left + 8]
            if side is None:
                wanted.append(images[b, top : top + 8, left : left + 8].ravel())
                continue
            step = 8 // side
            for i in range(side):
                for j in range(side):
                    part = box[i * step : (i + 1) * step, j * step : (j + 1) * step]
                    r, g, blue = (int(mean // 32) for mean in part.mean(axis=(0, 1)))
                    wanted.append(r * 64 + g * 8 + blue)
    if side is None:
        perfect = np.reshape(wanted, (2, 3, -1)).astype(np.float32)
        loss, _ = jax.jit(lambda x: objective.compare(x, images, corruption))(perfect + 0.5)
        np.testing.assert_allclose(loss, 0.25, rtol=1e-5)
        return
    perfect = 100 * np.eye(512, dtype=np.float32)[np.reshape(wanted, (2, 3, -1))].reshape(2, 3, -1)
    compare = jax.jit(lambda scores: objective.compare(scores, images, corruption))
    loss, metrics = compare(perfect)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_array_equal(metrics["colour_top1"], 1)
    loss, _ = compare(0 * perfect)
    np.testing.assert_allclose(loss, np.log(512), rtol=1e-5)


def test_half_of_the_patches_are_corrupted_by_the_shares_of_the_paper():
    x = np.tile(np.arange(1.0, 1001.0, dtype=np.float32).reshape(1, 1000, 1), (8, 1, 1))

    @jax.jit
    def corrupted(key):
        found = draw_corruption(row_keys(key, 8), 1000)
        return found, corrupt(x, found, jnp.zeros((1, 1, 1)), 500)

    found, y = jax.device_get(corrupted(jax.random.key(0)))
    is_mask, is_own = y == 0, y == x
    np.testing.assert_allclose(is_mask.mean(), 0.5 * 0.8, atol=0.01)
    np.testing.assert_allclose((~is_mask & ~is_own).mean(), 0.5 * 0.1, atol=0.01)
    assert (~is_own).sum(axis=1).max() <= 500
    assert (np.asarray(found.other) != np.arange(1000)).all()
    assert len({tuple(order[:5]) for order in np.asarray(found.order)}) == 8


def config_of(name):
    c = base_config()
    c.model.name, c.model.pool = "ViT-mu/2", "gap"
    c.data.name, c.data.image_size, c.data.num_classes = "synthetic", 8, 4
    c.data.num_examples, c.data.ops = 16, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 8, "10 steps", 0.1
    c.optimizer.name, c.schedule.name = "sgd", "constant"
    c.objective.name = name
    if name == "mae":
        c.objective.decoder_width, c.objective.decoder_depth = 16, 1
        c.objective.decoder_heads = 2
    return c


def mesh_of(devices):
    side = 2 if devices == 8 else 1
    return make_mesh(replica=1, data=side, fsdp=side, tensor=side, devices=jax.devices()[:devices])


def test_a_step_on_masked_patches_is_traced_on_a_mesh(caplog):
    mesh = mesh_of(8)
    ours, supervised = (
        make_experiment(settings_of(config_of(name)), mesh)
        for name in ("masked_patches", "supervised")
    )
    with jax.set_mesh(mesh):
        assert 1 < ours.flops_per_image / supervised.flops_per_image < 2  # the head
        _, metrics = ours.trace().out_info
    assert metrics["loss"].shape == () and not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "masked_patches"])
def test_every_mesh_takes_the_same_step(name):
    config = config_of(name)
    batch = {
        "image": RNG.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8),
        "label": np.zeros(8, np.int32),
        "mask": np.array([1, 1, 1, 1, 1, 1, 0, 1], np.float32),
        "id": np.arange(8, dtype=np.int32),
    }
    found = []
    for mesh in map(mesh_of, (1, 8)):
        experiment = make_experiment(settings_of(config), mesh)
        with jax.set_mesh(mesh):
            placed = {
                key: jax.device_put(leaf, experiment.abstract_batch[key].sharding)
                for key, leaf in batch.items()
            }
            state, metrics = experiment.train_step(experiment.init(), placed)
            found.append(jax.device_get((state.params, metrics)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), *found)
    if name == "mae":
        # A quarter of the patches through the same encoder, all through a decoder of half the width
        supervised = make_experiment(settings_of(config_of("supervised")), mesh)
        with jax.set_mesh(mesh):
            assert experiment.flops_per_image < supervised.flops_per_image


@pytest.mark.parametrize(
    ("name", "model", "own", "key"),
    [
        ("mae", {"pos_embed": "relative"}, {}, "objective.name"),
        ("mae", {}, {"mask_ratio": 0.99}, "objective.mask_ratio"),
        ("masked_patches", {"name": "BiT-R50x1"}, {}, "objective.name"),
        ("masked_patches", {}, {"target": "small_patch"}, "objective.target"),
    ],
)
def test_refused_models(name, model, own, key):
    fields = {"name": "ViT-mu/2"} | model
    network = create_model(fields.pop("name"), 4, 8, **fields)
    with at_fault(key):
        OBJECTIVES.make({"name": name, **own}).bind(network, None, SETTING)


@pytest.mark.parametrize("name", ["mae", "masked_patches"])
def test_reconstruction_keeps_what_the_model_sees(name):
    model = create_model("ViT-mu/2", None, 8)
    own = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2} if name == "mae" else {}
    objective = OBJECTIVES.make({"name": name, **own}).bind(model, None, SETTING)
    images = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)
    params = random_params(model, images)
    params["objective"], _ = jax.jit(objective.init)(jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 2)
    found = jax.jit(objective.reconstruct)(params, images, keys)
    hidden, restored, own = (
        np.asarray(extract_patches(jnp.asarray(x), (2, 2)))
        for x in (found.hidden, found.restored, images)
    )
    is_hidden = (hidden == 0).all(axis=2)
    assert (is_hidden.sum(axis=1) == (12 if name == "mae" else 8)).all()
    np.testing.assert_array_equal(hidden[~is_hidden], own[~is_hidden])
    np.testing.assert_array_equal(restored[~is_hidden], own[~is_hidden])
    assert (restored[is_hidden] != own[is_hidden]).all() and found.loss_B.shape == (2,)


def test_a_reconstruction_is_measured_by_image_and_drawn_once_a_step(tmp_path):
    def batch(ids, mask):
        image = np.full((2, 4, 4, 3), 200, np.uint8)
        return {"image": image, "id": np.array(ids), "mask": np.array(mask, np.float32)}

    def reconstruct(params, images, id_B):
        return Reconstruction(params * id_B, 0 * images, images // 2)

    batches = [batch([1, 2], [1, 1]), batch([6, 9], [1, 0])]
    inputs = SimpleNamespace(
        name="own", folder=epath.Path(tmp_path), batches=lambda: batches,
        spread=lambda number: [batches[0] | {"mask": np.array([1, 0])}],
        jit=jax.jit,
    )  # fmt: skip
    evaluator = ReconstructionLoss(split="test", every="1 epochs", num_images=1)
    measure = evaluator.bind_to(inputs, reconstruct)
    state = SimpleNamespace(step=np.int32(7), params=np.float32(2))
    found = measure(state)
    assert found == {"loss": 2 * (1 + 2 + 6) / 3, "num_examples": 3}
    assert found.keys() == evaluator.reports().keys()
    path = tmp_path / "reconstructions/own_00000007.png"
    table = np.asarray(Image.open(path))
    assert table.shape == (96 + 8, 3 * 100 + 4, 3)
    np.testing.assert_array_equal(table[50, [0, 50, 102, 150, 250], 0], [255, 0, 255, 100, 200])
    path.unlink()
    measure(state)  # the raw weights of the same step
    assert not list(path.parent.iterdir())


def test_patches_that_are_taken_once_have_gradients_without_sums():
    """On GPUs sums of a scatter have no fixed order."""
    x_BND = jax.random.normal(jax.random.key(0), (2, 9, 3))
    which_BM = jax.vmap(lambda key: jax.random.permutation(key, 9)[:4])(
        jax.random.split(jax.random.key(1))
    )

    def total(take):
        return lambda x_BND: jnp.square(take(x_BND, which_BM)).sum()

    found, expected = (jax.grad(total(f)) for f in (take_once, take))
    np.testing.assert_array_equal(found(x_BND), expected(x_BND))
    eqns = jax.make_jaxpr(found)(x_BND).jaxpr.eqns
    (scatter,) = [eqn for eqn in eqns if eqn.primitive.name == "scatter-add"]
    assert scatter.params["unique_indices"]
