"""The stages of a schedule of image sizes: their experiments, and what is refused."""

import pathlib
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import meshes_on, prepare, train_and_evaluate
from at_fault import at_fault

from vit_jax.config.text import apply_overrides, load_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.diagnosis.benchmarks.step import made_up_batch
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.stages import make_stage
from vit_jax.run.setup.validation import find_faults

pytestmark = pytest.mark.usefixtures("one_device")

WORDS = {
    "duration": "12 steps",
    "schedule.warmup": "2 steps",
    "global_batch_size": "32",
    "model.patch_size": "2",
    "data.ops": "resize|flip",
    "evals.test.ops": "resize",
    "data.image_size": "4, 6 at 25 %, 8 at 7 steps",
    "data.image_size_keeps": "tokens",
    "optimizer.ema_decay": "0.9",
}


def make_config(**words):
    config = load_config("quickstart:debug")
    assert not apply_overrides(config, [*(WORDS | words).items()])
    return config


@pytest.mark.usefixtures("without_checks")
def test_eight_devices_compute_as_one(one_device, tmp_path):
    """A step of the size before the last, with the batch that keeps the tokens."""
    settings = prepare(make_config(), tmp_path).settings

    def take_a_step(devices):
        mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1, devices=devices)
        whole = make_experiment(settings, mesh)
        with jax.set_mesh(mesh):
            first, second = (make_stage(s, mesh, (), whole) for s in settings.by_stage[:-1])
            assert made_up_batch(first, 10)["image"].shape == (128, 4, 4, 3)
            batch = made_up_batch(second, 10)
            assert batch["image"].shape == (56, 6, 6, 3)
            state, metrics = second.train_step(whole.init(), batch)
            return jax.device_get((metrics["loss"], state.params, state.ema))

    (loss, *params), (loss_of_eight, *params_of_eight) = map(
        take_a_step, (one_device[:1], one_device)
    )
    np.testing.assert_allclose(loss_of_eight, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, params_of_eight)


OBJECTIVES = [
    ("mae:debug", 6), ("masked_patches:debug", 6), ("dino:debug", 6), ("dinov2:debug", 6),
    ("dinov3:debug,gram", 6), ("lejepa:debug", 4), ("siglip:debug", 16), ("distillation:debug", 4),
    ("deit:DeiT-S/16,debug", 16), ("efficientnet:EfficientNet-B0,debug", 32),
]  # fmt: skip
QUICK = "mae:debug", "dino:debug", "siglip:debug"  # a decoder, several views, texts


def with_half_the_size(file, first):
    config = load_config(file)
    if config.model.name == "ViT-mu/4" and first == 6:
        config.model.patch_size = 2
    config.data.ops = "" if config.data.global_ops else "resize|flip"
    config.data.global_ops = config.data.global_ops.replace("pad_crop", "resize|pad_crop")
    config.data.image_size = f"{first}, {config.data.image_size} at 50 %"
    assert not find_faults(config)
    return config


@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize(
    ("file", "first"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow)
     for case in OBJECTIVES],
)  # fmt: skip
def test_every_objective_has_one_state_for_all_sizes(tmp_path, file, first):
    run = prepare(with_half_the_size(file, first), tmp_path)
    [earlier] = run.earlier
    with jax.set_mesh(run.mesh):
        state, _ = jax.eval_shape(earlier.train_step, *earlier.arguments)
    assert shapes_of(state) == shapes_of(run.experiment.abstract_state)
    assert next(iter(earlier.batch.crops.values())).size == (first, first)


def shapes_of(state):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "without_checks")
def test_a_step_of_student_and_teacher_is_that_of_models_of_its_size(tmp_path):
    """Positions of 4 x 4 patches, resampled by hand to 3 x 3, in parameters and their average."""
    config = with_half_the_size("dino:debug", 6)
    run = prepare(config, tmp_path / "both")
    config.data.image_size = 6
    for entry in config.evals.values():
        entry.ops = "resize"
    alone = prepare(config, tmp_path / "alone").experiment

    def resized(params):
        table = params["pos_embedding"]
        prefix, width = table.shape[1] - 16, table.shape[2]
        patches = table[:, prefix:].reshape(1, 4, 4, width)
        patches = jax.image.resize(patches, (1, 3, 3, width), "cubic", antialias=False)
        patches = patches.reshape(1, 9, width)
        table = jnp.concatenate([table[:, :prefix], patches], axis=1)
        return jax.tree.map(jnp.copy, params | {"pos_embedding": table})  # a step donates its state

    with jax.set_mesh(run.mesh):
        state, [batch] = run.experiment.init(), run.batches(range(1))
        assert batch["global_views"].shape[2:4] == (6, 6)
        params = state.params | {"pos_embedding": 9 * state.params["pos_embedding"]}
        ema = state.ema | {"pos_embedding": 9 * state.ema["pos_embedding"][..., ::-1]}
        by_hand = alone.init().replace(params=resized(params), ema=resized(ema))
        _, expected = alone.train_step(by_hand, batch)
        _, found = run.earlier[0].train_step(state.replace(params=params, ema=ema), batch)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "first"), OBJECTIVES)
def test_every_objective_trains(tmp_path, file, first):
    config = with_half_the_size(file, first)
    config.duration, config.schedule.warmup = "12 steps", "1 steps"
    assert train_and_evaluate(config, tmp_path)["step"] == 12


def test_a_schedule_may_have_the_quotes_of_a_sweep():
    config = load_config("quickstart:debug")
    assert not apply_overrides(config, [("data.image_size", "'4, 8 at 50 %'")])
    assert config.data.image_size == "4, 8 at 50 %"


REFUSED = pathlib.Path(__file__).with_name("refused_runs.txt").read_text().splitlines()


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_refuses(one_device, tmp_path, case, request):
    words, key = case.split("  ->  ")
    given = dict(word.split("=", 1) for word in shlex.split(words))
    if key != "data.ops":  # found by a check of images
        request.getfixturevalue("without_checks")
    with meshes_on(one_device), at_fault(key):  # all eight
        prepare(make_config(**{"data.image_size_keeps": "batch"} | given), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_positions_in_the_state_of_an_objective_are_refused(tmp_path):
    config = with_half_the_size("dinov2:debug", 6)
    config.objective.gram_weight, config.objective.gram_every = 1.0, "5 steps"
    with at_fault("data.image_size"):
        prepare(config, tmp_path)
