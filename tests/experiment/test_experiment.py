"""From config to experiment: every key takes effect."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from read_settings import settings_of, teaching

from vit_jax.base import tree
from vit_jax.config import base_config
from vit_jax.data import make_device_transform, preprocessing
from vit_jax.devices.flops import count_flops
from vit_jax.devices.mesh import BATCH_AXES, make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.microbatches import choose_accum_steps, settle_microbatches
from vit_jax.models import model_of
from vit_jax.models.block_ops import unconstrained
from vit_jax.models.vit import ViT
from vit_jax.run.teachers import place_teachers, read_teachers
from vit_jax.transfer.shapes import abstract_params

SIZE, B, C = (4, 8), 4, 5


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def small_config(**model):
    c = base_config()
    c.global_batch_size, c.duration = B, "6 steps"
    c.model.name = "ViT-mu/2"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 8, 1, 12, 2
    for key, value in model.items():
        c.model[key] = value
    c.data.name, c.data.image_size = "synthetic", SIZE
    c.data.num_classes, c.data.num_examples = C, 8
    c.optimizer.peak_lr = 0.1
    return c


def make_batch(step):
    rng = np.random.default_rng(step)
    return {
        "image": rng.integers(0, 256, (B, *SIZE, 3), np.uint8),
        "label": rng.integers(0, C, B, np.int32),
        "mask": np.array([1, 1, 0, 1], np.float32),
        "id": np.arange(B, dtype=np.int32),
    }


def reference_loss(model, params, batch, config):
    """Written out from the keys of the config only."""
    mean, std = (np.reshape(np.float32(config.data[key]), (1, 1, 1, 3)) for key in ("mean", "std"))
    logits = model.apply({"params": params}, (jnp.float32(batch["image"]) / 255 - mean) / std)
    target = jnp.eye(C)[batch["label"]] * (1 - config.loss.label_smoothing)
    target += config.loss.label_smoothing / C
    loss_B = -(target * jax.nn.log_softmax(logits)).sum(axis=1)
    return (loss_B * batch["mask"]).sum() / batch["mask"].sum()


def test_every_number_of_a_recipe_reaches_the_update(mesh):
    config = small_config()
    config.data.mean, config.data.std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    config.loss.label_smoothing = 0.2
    config.optimizer.name, config.optimizer.momentum = "sgd", 0.8
    config.optimizer.weight_decay, config.optimizer.grad_clip_norm = 0.3, 0.5
    config.schedule.name, config.schedule.warmup = "linear", "1 epochs"  # of 2 steps
    experiment = make_experiment(settings_of(config), mesh)
    rates = [0.0, 0.05, 0.1, 0.075]  # peak 0.1, 2 of 6 steps of warm-up
    assert experiment.total_steps == 6
    np.testing.assert_allclose([experiment.schedule(i) for i in range(4)], rates, rtol=1e-6)

    grad = jax.jit(
        jax.grad(lambda p, batch: reference_loss(experiment.model, p, batch, config)),
    )
    with jax.set_mesh(mesh):
        state = experiment.init()
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
        params["head"]["kernel"] += 0.1 * np.random.default_rng(9).standard_normal((8, C))
        state = state.replace(params=jax.tree.map(jnp.float32, params))
        momentum = jax.tree.map(np.zeros_like, params)
        for step, rate in enumerate(rates):
            batch = make_batch(step)
            grads = grad(jax.tree.map(np.float32, params), batch)
            norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
            assert norm > 0.5  # clipping acts
            grads = jax.tree.map(lambda g, scale=0.5 / norm: scale * g, grads)
            momentum = jax.tree.map(lambda m, g: 0.8 * m + g, momentum, grads)
            # Only kernels decay, multiplied by the learning rate of the step.
            updates = jax.tree.map(
                lambda m, p, decays: m + 0.3 * decays * p,
                momentum,
                params,
                tree.mask(params, ".*/kernel"),
            )
            params = jax.tree.map(lambda p, u, rate=rate: p - rate * u, params, updates)
            state, metrics = experiment.train_step(state, batch)
            assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    found, expected = tree.flatten_names(state.params), tree.flatten_names(params)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, atol=2e-5, err_msg=name)


def taught_config():
    """A config of distillation from features."""
    config = small_config(scan=True, pool="gap", width=16)
    config.objective.name, config.objective.teacher = "distillation", "untrained:ViT-mu/2"
    config.objective.mode, config.objective.features = "features", "pooled,tokens"
    config.optimizer.name = "sgd"  # Adam would magnify rounding where a gradient is 0
    return config


def test_a_teacher_is_laid_out_like_parameters():
    """Its values stay the same; its forward pass counts as work."""
    config, mesh = taught_config(), make_mesh(replica=1, data=2, fsdp=2, tensor=2)
    teachers = read_teachers(*teaching(config))
    experiment = make_experiment(settings_of(config), mesh, teachers=teachers)
    with jax.set_mesh(mesh):
        frozen = place_teachers(teachers, experiment.abstract_frozen)
        text = str(experiment.lower().compiler_ir().operation)
    assert "stablehlo" in text
    found = tree.flatten_names(frozen)
    (teacher,) = teachers
    for name, leaf in tree.flatten_names(teacher.variables).items():
        np.testing.assert_array_equal(found[f"0/0/{name}"], leaf, err_msg=name)
    kernel = found["0/0/params/encoder/layers/mlp/up/kernel"]
    assert tuple(kernel.sharding.spec) == (None, "fsdp", "tensor")
    assert experiment.num_params == sum(x.size for x in abstract_params(experiment.model).values())
    supervised = make_experiment(settings_of(small_config(scan=True, pool="gap", width=16)), mesh)
    with jax.set_mesh(mesh):
        assert experiment.flops_per_image > 1.3 * supervised.flops_per_image


@pytest.mark.slow
def test_eight_devices_learn_from_a_teacher_as_one_does(mesh):
    config = taught_config()
    teachers, found = read_teachers(*teaching(config)), []
    for where in (mesh, make_mesh(replica=1, data=2, fsdp=2, tensor=2)):
        experiment = make_experiment(settings_of(config), where, teachers=teachers)
        with jax.set_mesh(where):
            frozen = place_teachers(teachers, experiment.abstract_frozen)
            batch = {
                name: jax.device_put(leaf, experiment.abstract_batch[name].sharding)
                for name, leaf in make_batch(0).items()
            }
            state, metrics = experiment.train_step(experiment.init(), batch, *frozen)
            found.append(jax.device_get((state.params, metrics)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *found)


def test_losses_and_model_fields_are_chosen_by_the_config(mesh):
    config = small_config(pool="gap", scan=True, dtype="bfloat16", head_bias=-10.0)
    config.loss.name = "sigmoid"
    experiment = make_experiment(settings_of(config), mesh)
    model = experiment.model
    assert (model.pool, model.scan, model.dtype) == ("gap", True, jnp.dtype("bfloat16"))
    assert (model.num_classes, model.image_size, model.patch_size) == (C, SIZE, (2, 2))
    with jax.set_mesh(mesh):
        _, metrics = experiment.train_step(experiment.init(), make_batch(0))
    # The head starts at zero, its bias at -10: one of C classes costs 10, the others nothing.
    assert float(metrics["loss"]) == pytest.approx(10, rel=1e-3)


def test_a_fields_default_is_the_familys(mesh):
    model = make_experiment(settings_of(small_config()), mesh).model
    assert (model.pool, model.scan, model.remat, model.dropout) == ("token", False, "none", 0.0)


def test_the_seed_makes_the_state(mesh):
    configs = small_config(), small_config()
    configs[1].seed = 1
    first, other = (make_experiment(settings_of(config), mesh) for config in configs)
    with jax.set_mesh(mesh):
        states = [experiment.init().params for experiment in (first, first, other)]
    jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
    kernels = [params["embedding"]["kernel"] for params in states]
    assert (kernels[0] != kernels[2]).mean() > 0.99


def test_abstract_arguments_are_those_of_a_step(mesh):
    experiment = make_experiment(settings_of(small_config()), mesh)
    with jax.set_mesh(mesh):
        state = experiment.init()
    batch = make_batch(0)

    def describe(x):
        return x.shape, jnp.dtype(x.dtype)

    assert jax.tree.map(describe, experiment.abstract_state) == jax.tree.map(describe, state)
    assert jax.tree.map(describe, experiment.abstract_batch) == jax.tree.map(describe, batch)
    assert jax.tree.map(lambda x: x.sharding, state) == experiment.shardings
    assert experiment.num_params == sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_flops_are_counted_without_what_remat_adds(mesh):
    counts = [
        make_experiment(settings_of(small_config(remat=remat, scan=scan)), mesh).flops_per_image
        for remat, scan in (("none", False), ("full", False), ("full", True))
    ]
    assert counts[0] == counts[1] == counts[2]
    model = make_experiment(settings_of(small_config()), mesh).model
    images = jax.ShapeDtypeStruct((1, *SIZE, 3), jnp.float32)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(model.init, jax.random.key(0), images)
        forward = count_flops(model.apply, params, images)
    assert 2.5 * forward < counts[0] < 3 * forward  # images have no gradient


def test_flops_of_gradients_that_nothing_learns_from_are_not_counted(mesh):
    everything, nothing_below = small_config(), small_config()
    nothing_below.optimizer.freeze = "(?!head/).*"
    learned, frozen = (make_experiment(settings_of(c), mesh) for c in (everything, nothing_below))
    forward = learned.forward_flops_per_image
    assert frozen.forward_flops_per_image == forward
    assert frozen.flops_per_image == forward + 2 * 8 * C  # of the head's kernel
    assert learned.flops_per_image > 2.5 * forward
    lora = small_config(lora_rank=1)
    lora.optimizer.freeze = "(?!head/|.*lora_).*"
    assert make_experiment(settings_of(lora), mesh).flops_per_image < 0.8 * learned.flops_per_image


@pytest.mark.parametrize(
    ("text", "steps"), [("3 steps", 3), ("5 epochs", 10), ("10 examples", 3), (None, None)]
)
def test_durations_in_steps(text, steps):
    config = small_config()
    config.checkpoint.keep_every = text
    assert settings_of(config).durations.get("checkpoint.keep_every") == steps


def test_every_faulty_duration_names_its_key():
    config = small_config()
    config.duration, config.log.every = "9", "5 %"
    config.schedule.warmup = "three steps"
    config.schedule.name, config.schedule.milestones = "multistep", "5 steps, 0 steps"
    with at_fault("duration", "schedule.warmup", "schedule.milestones"):
        settings_of(config)


def random_params(config, mesh):
    """Parameters in which no leaf is zero."""
    model = make_experiment(settings_of(config), mesh).model.clone(constrain=unconstrained)
    rng = np.random.default_rng(0)
    return tree.unflatten_names(
        {name: 0.3 * rng.standard_normal(leaf.shape, np.float32)
         for name, leaf in abstract_params(model).items()}
    )  # fmt: skip


def trained(config, mesh, params):
    """(parameters, metrics of the last step) after three steps from `params`."""
    experiment = make_experiment(settings_of(config), mesh)
    with jax.set_mesh(mesh):
        start = jax.tree.map(jax.device_put, params, experiment.shardings.params)
        state = experiment.init().replace(params=start)
        for step in range(3):
            batch = {k: np.concatenate([v] * 4) for k, v in make_batch(step).items()}
            batch["image"] = np.random.default_rng(step).permuted(batch["image"], axis=1)
            # The first of two microbatches counts 8 rows, the second 2.
            batch["mask"] = np.where(np.arange(4 * B) % 2, np.arange(4 * B) < 4, 1).astype("f")
            batch = jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), batch, experiment.abstract_batch
            )
            state, metrics = experiment.train_step(state, batch)
    return jax.device_get(tree.flatten_names(state.params)), jax.device_get(metrics)


def test_microbatches_on_many_devices_are_the_batch_on_one(mesh):
    """Microbatches have different numbers of masked rows."""
    config = small_config(scan=True)
    config.global_batch_size, config.optimizer.name = 4 * B, "sgd"
    params = random_params(config, mesh)
    expected, expected_metrics = trained(config, mesh, params)
    config.optimizer.accum_steps = 2
    many = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    found, metrics = trained(config, many, params)
    for name, leaf in expected.items():
        atol = 2e-5 * max(np.abs(leaf).max(), 1e-2)
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=atol, err_msg=name)
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4), key


def test_sizes_that_the_tensor_axis_does_not_divide_are_named(caplog):
    make_experiment(settings_of(small_config()), make_mesh(replica=1, data=2, fsdp=1, tensor=4))
    assert "mesh.tensor=4 does not divide model.num_heads=2: activations" in caplog.text


@pytest.mark.parametrize(
    ("name", "platform", "rows", "chosen"),
    [
        ("ViT-Ti/16", "cpu", 32, 8),
        ("ViT-S/16", "cpu", 16, 8),
        ("ViT-S/16", "cpu", 9, 9),  # two rows a part would do, but 2 does not divide 9
        ("ViT-L/16", "cpu", 4, 4),
        ("ViT-mu/16", "cpu", 8, 1),
        ("BiT-R50x1", "cpu", 32, 1),
        ("ViT-S/16", "gpu", 16, 1),
        ("ViT-L/16", "tpu", 64, 1),
        ("ViT-L/16", "tpu", 256, 4),
        ("ViT-B/16", "tpu", 256, 4),
        ("ViT-L/16", "tpu", 128, 2),
        ("ViT-B/16", "tpu", 128, 1),
        ("ViT-S/16", "tpu", 256, 1),
        ("ViT-H/14", "tpu", 64, 1),
        ("ViT-L/16", "tpu", 131, 1),  # only parts of one row
        ("BiT-R50x1", "tpu", 256, 1),
    ],
)
def test_parts_of_a_batch_stay_in_cache_or_in_vmem(name, platform, rows, chosen, monkeypatch):
    config = small_config(width=None, depth=None, mlp_dim=None, num_heads=None)
    config.model.name, config.data.image_size, config.model.dtype = name, 224, "bfloat16"
    devices, shape = np.array([types.SimpleNamespace(platform=platform)]), {"fsdp": 1, "tensor": 1}
    mesh = types.SimpleNamespace(devices=devices, shape=shape)

    def choose():
        settings = settings_of(config)
        model = model_of(settings.model, settings.data)
        return choose_accum_steps(settings.objective, model, mesh, rows)

    assert choose() == chosen
    if platform == "tpu":
        shape["fsdp"] = 2
        assert choose() == 1
        shape["fsdp"], config.data.image_size = 1, 2016  # few rows fit
        assert choose() == 1
        config.data.image_size = 224
    with monkeypatch.context() as patch:
        patch.setattr(ViT, "has_batch_statistics", True, raising=False)
        assert choose() == 1
    config.objective.name = "mae"  # hides other patches in other parts of a batch
    assert choose() == 1


def test_a_recorded_number_of_parts_changes_only_on_other_devices():
    settings = settings_of(small_config())
    model = model_of(settings.model, settings.data)
    for ways, number in ((1, 8), (4, 2)):
        mesh = types.SimpleNamespace(shape={axis: 1 for axis in BATCH_AXES} | {"data": ways})
        assert settle_microbatches(settings.objective, model, 24, mesh, recorded=8) == number


@pytest.mark.parametrize(
    ("order", "streams", "repeats", "num_examples", "distance"),
    [
        ("record", None, 1, 8, 1),
        (None, None, 2, 8, 2),  # as before a data set has filled in the config
        ("chunk", 4, 1, 8, 16),
        ("chunk", 2, 4, 8, 32),
        (None, 8, 1, 10**8, 8),
        ("chunk", None, 1, 8, 8),
    ],
)
def test_images_meet_those_of_other_records_and_streams(
    mesh, monkeypatch, order, streams, repeats, num_examples, distance
):
    found = []

    def spy(*args, distance, **kwargs):
        found.append(distance)
        return make_device_transform(*args, distance=distance, **kwargs)

    monkeypatch.setattr(preprocessing, "make_device_transform", spy)
    config = small_config()
    config.global_batch_size, config.data.num_examples = 64, num_examples
    config.data.order, config.data.streams, config.data.repeats = order, streams, repeats
    config.data.ops = "mixup(0.2)"
    settings = settings_of(config)
    data = dataclasses.replace(settings.data, order=order)
    make_experiment(dataclasses.replace(settings, data=data), mesh)
    assert found == [distance]
