"""How a run is laid out over 8 virtual devices."""

import functools
import logging
import math
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_vit import random_params
from read_settings import make_optimizer, settings_of
from short_objective import objective_of

from vit_jax.base import tree
from vit_jax.config import FAMILIES, OPTIMIZERS, base_config
from vit_jax.devices import sharding
from vit_jax.devices.mesh import BATCH_AXES, make_mesh
from vit_jax.devices.sharding import (
    bytes_per_device,
    constrain,
    gradient_shardings,
    state_shardings,
)
from vit_jax.experiment.experiment import make_experiment, with_shardings
from vit_jax.experiment.state import TrainState, init_state
from vit_jax.experiment.step import make_train_step
from vit_jax.models import create_model
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.objectives.contract import ObjectiveOutput
from vit_jax.planning.hlo import Program
from vit_jax.run.watch.layer_norms import layer_norms_program, watched
from vit_jax.transfer.fit import unstack_layers

pytestmark = pytest.mark.usefixtures("small_moments_are_split")

STEPS, BATCH, DEPTH = 4, 16, 2
LAYOUTS = {
    "one device": {"data": 1},
    "data 8": {"data": 8},
    "fsdp 8": {"fsdp": 8},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "replica 2, fsdp 4": {"replica": 2, "fsdp": 4},
}


def mesh_of(layout):
    sizes = {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | LAYOUTS[layout]
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def small_config(**model):
    c = base_config()
    c.global_batch_size, c.duration = BATCH, f"{STEPS} steps"
    c.model.name, c.model.pool = "ViT-mu/4", "gap"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 32, DEPTH, 64, 4
    c.data.name, c.data.image_size, c.data.ops = "synthetic", 16, "flip"
    c.data.num_classes, c.data.num_examples = 8, 64
    c.optimizer.peak_lr, c.optimizer.weight_decay = 3e-2, 0.1
    # Adam divides rounding by rounding where a gradient is zero, unless eps is larger than both.
    c.optimizer.eps, c.optimizer.grad_clip_norm = 1e-3, 1.0
    for key, value in model.items():
        c.model[key] = value
    return c


def make_batch(step, abstract_batch):
    rng = np.random.default_rng(step)
    size, *shape = abstract_batch["image"].shape
    batch = {
        "image": rng.integers(0, 256, (size, *shape), np.uint8),
        "label": rng.integers(0, 8, size, np.int32),
        "mask": (rng.random(size) < 0.8).astype(np.float32),
        "id": np.arange(size, dtype=np.int32),
    }
    return {k: jax.device_put(v, abstract_batch[k].sharding) for k, v in batch.items()}


@functools.cache
def trained(layout):
    """(losses and gradient norms, final state) with every kind of noise there is."""
    noise = {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.1}
    config, mesh = small_config(scan=True, **noise), mesh_of(layout)
    experiment = make_experiment(settings_of(config), mesh)
    history = []
    with jax.set_mesh(mesh):
        state = experiment.init()
        for step in range(STEPS):
            batch = make_batch(step, experiment.abstract_batch)
            state, metrics = experiment.train_step(state, batch)
            history.append(metrics)
    return jax.device_get(history), state


def laid_out(layout):
    """The state's shapes with their layout; nothing is compiled."""
    experiment = make_experiment(settings_of(small_config(scan=True)), mesh_of(layout))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        experiment.abstract_state,
        experiment.shardings,
    )


def shape_of_share(leaf):
    return leaf.sharding.shard_shape(leaf.shape)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data 8", marks=pytest.mark.slow),
        pytest.param("fsdp 8", marks=pytest.mark.slow),
        "data 2, fsdp 2, tensor 2",
    ],
)
def test_every_layout_trains_alike(layout):
    expected, reference = trained("one device")
    history, state = trained(layout)
    losses = [metrics["loss"] for metrics in expected]
    assert max(losses) - min(losses) > 0.1  # there is something to agree on
    for step in range(STEPS):
        assert history[step].keys() == expected[step].keys()
        for name, value in expected[step].items():
            assert history[step][name] == pytest.approx(value, rel=1e-5), (step, name)
    assert state.step == STEPS
    for name, leaf in tree.flatten_names(jax.device_get(reference)).items():
        ours = np.asarray(tree.flatten_names(state)[name])
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(ours, leaf, rtol=0, atol=1e-4 * scale + 1e-7, err_msg=name)


def test_with_fsdp_no_device_holds_a_whole_matrix():
    named = tree.flatten_names(laid_out("fsdp 8")).items()
    kernels = {name: leaf for name, leaf in named if name.endswith("/kernel")}
    # Of q, k, v, out, up, down, embedding and head, each with two moments.
    assert len(kernels) == 3 * 8
    for name, leaf in kernels.items():
        assert math.prod(shape_of_share(leaf)) == leaf.size // 8, name


def test_tensor_axis_splits_heads_and_hidden_units():
    _, state = trained("data 2, fsdp 2, tensor 2")
    layers = state.params["encoder"]["layers"]
    for name in ("query", "key", "value"):
        assert layers["attention"][name]["kernel"].sharding.spec == P(None, "fsdp", "tensor")
    assert layers["attention"]["out"]["kernel"].sharding.spec == P(None, "tensor", "fsdp")
    assert shape_of_share(layers["mlp"]["up"]["kernel"]) == (DEPTH, 32 // 2, 64 // 2)
    assert shape_of_share(layers["mlp"]["down"]["kernel"]) == (DEPTH, 64 // 2, 32 // 2)
    assert shape_of_share(state.params["embedding"]["kernel"]) == (48, 32 // 2)
    assert shape_of_share(state.params["head"]["kernel"]) == (32 // 2, 8)


def test_the_optimizers_moments_lie_as_their_parameters_do_split_over_data_besides():
    _, state = trained("data 2, fsdp 2, tensor 2")
    params = tree.flatten_names(state.params)
    found = 0
    for name, leaf in tree.flatten_names(state.opt_state).items():
        for moment in ("direction/mu/", "direction/nu/"):
            if name.startswith(moment):
                param = params[name.removeprefix(moment)]
                ways = 2 if name.endswith("/kernel") else 1
                of_param, of_moment = (
                    x.sharding.devices_indices_map(x.shape) for x in (param, leaf)
                )
                for device, share in of_moment.items():
                    inside = np.zeros(leaf.shape, bool)
                    inside[share] = True
                    assert inside.sum() * ways == inside[of_param[device]].size, name
                    assert inside[of_param[device]].sum() == inside.sum(), name
                found += 1
    assert found == 2 * len(params)


def test_no_two_devices_keep_the_same_moments_though_both_have_the_parameter():
    for name, leaf in tree.flatten_names(laid_out("data 8")).items():
        copies = 1 if name.startswith("opt_state/") and name.endswith("/kernel") else 8
        assert shape_of_share(leaf) == leaf.shape or copies == 1, name
        assert np.prod(shape_of_share(leaf)) * 8 == copies * leaf.size, name


def test_moments_of_small_parameters_stay_whole_and_need_no_exchange(monkeypatch):
    monkeypatch.setattr(sharding, "SPLIT_FROM", 1 << 16)
    for shape, share in (((256, 256), (256, 32)), ((128, 256), (128, 256))):
        state = {"opt_state": {"out": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}}
        (found,) = jax.tree.leaves(state_shardings(state, mesh_of("data 8")))
        assert found.shard_shape(shape) == share

    config = small_config(scan=False, depth=1)
    mesh = make_mesh(replica=1, data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        hlo = make_experiment(settings_of(config), mesh).lower().compile().as_text()
    results = re.findall(r" = ([^=]*?) all-gather(?:-start)?\(", hlo)
    of_metrics = 1  # the logits, which top_k takes whole
    assert sum(len(re.findall(r"\[", kind)) for kind in results) == of_metrics


# Few parameters, large activations: whoever moves activations between devices is found out.
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collective_bytes(hlo):
    """Bytes of the larger of input and output, on one device, of each collective of a program.

    Those in a loop count once, those in groups of one device not at all.
    """
    return sum(each.size for each in Program(hlo).collectives())


def compile_step(layout, scan, accum_steps=1):
    config = small_config(scan=scan)
    config.optimizer.accum_steps = accum_steps
    config.global_batch_size, config.data.image_size = 256, 64
    mesh = mesh_of(layout)
    experiment = make_experiment(settings_of(config), mesh)
    with jax.set_mesh(mesh):
        step = experiment.train_step.lower(experiment.abstract_state, experiment.abstract_batch)
    return experiment, step.compile()


compiled = functools.cache(compile_step)


@pytest.mark.parametrize(
    ("layout", "scan"),
    [
        pytest.param("data 8", True, marks=pytest.mark.slow),
        pytest.param("fsdp 8", True, marks=pytest.mark.slow),
        pytest.param("fsdp 8", False, marks=pytest.mark.slow),
        ("replica 2, fsdp 4", True),
    ],
)
def test_a_step_moves_weights_between_devices_and_no_activations(layout, scan):
    experiment, step = compiled(layout, scan)
    params = 4 * experiment.num_params
    activation = 4 * 256 * 256 * 32  # of width 32, of the whole batch
    assert activation / 8 > 6 * params  # a device's share
    assert params / 2 < collective_bytes(step.as_text()) < 3 * params


@functools.cache
def gradients(layout, accum_steps):
    """The gradients of a batch before they are clipped, and the program that computes them.

    Masked rows are shared unequally by devices and by microbatches; one device has no other.
    """
    config, mesh = small_config(depth=1), mesh_of(layout)
    config.data.image_size, config.optimizer.accum_steps = 8, accum_steps
    experiment = make_experiment(settings_of(config), mesh)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), experiment.abstract_state)
    params = {name: 0.3 * rng.standard_normal(leaf.shape, np.float32)
              for name, leaf in tree.flatten_names(state.params).items()}  # fmt: skip
    state = state.replace(params=tree.unflatten_names(params))
    batch = make_batch(0, experiment.abstract_batch)
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], np.float32)
    batch["mask"] = jax.device_put(mask, batch["mask"].sharding)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, experiment.shardings)
        seen = experiment.step_with(watched(experiment.tx))
        step = jax.jit(
            lambda state, batch: seen(state, batch)[0].opt_state[0],
            out_shardings=experiment.shardings.params,
        ).lower(state, batch).compile()  # fmt: skip
        return tree.flatten_names(step(state, batch)), step


@pytest.mark.parametrize(
    ("layout", "accum_steps", "shapes"),
    [
        pytest.param(
            "data 8", 1, {"u8[2,8,8,3]", "f32[32,64]", "f32[64,32]"}, marks=pytest.mark.slow
        ),
        ("data 2, fsdp 2, tensor 2", 2, {"u8[4,8,8,3]", "f32[16,32]", "f32[32,16]"}),
    ],
)
def test_gradients_before_clipping_are_those_of_one_device_and_of_the_whole_batch(
    layout, accum_steps, shapes
):
    """Leaf by leaf; copies of a leaf on several devices have equal bits."""
    expected, _ = gradients("one device", 1)
    found, step = gradients(layout, accum_steps)
    assert np.sqrt(sum(np.square(g).sum() for g in expected.values())) > 1.5  # clipping would act
    for name, gradient in expected.items():
        atol = 1e-5 * np.abs(gradient).max() + 1e-7
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)
        copies = {}
        for shard in found[name].addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert {len(copy) for copy in copies.values()} == {1}, name
    text = step.as_text()
    (arguments,) = re.findall(r"entry_computation_layout={\((.*?)\)->", text)
    assert shapes <= set(re.findall(r"\w+\[[\d,]+\]", arguments))  # images, kernels of the MLP
    moved = re.findall(r"\w+\[([\d,]+)\]", " ".join(COLLECTIVE.findall(text)))
    assert moved and not any(shape.endswith(",8,8,3") for shape in moved)  # no image


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_gradients_can_be_given_a_sharding(accum_steps):
    mesh = mesh_of("data 2, fsdp 2, tensor 2")
    shardings = {"a": NamedSharding(mesh, P(None, "fsdp")), "b": None}

    def loss(params, model_state, batch, rng):
        outputs = batch["image"] @ params["a"] + params["b"]
        return ObjectiveOutput(outputs.sum(), batch["mask"].sum(), {}, model_state)

    with jax.set_mesh(mesh):
        step = make_train_step(
            objective_of(loss), watched(optax.identity()), lambda batch, keys: batch, 0,
            accum_steps=accum_steps, shardings=shardings,
        )  # fmt: skip
        params = {"a": jnp.ones((4, 8)), "b": jnp.ones((1, 8))}
        state = TrainState(jnp.zeros((), jnp.int32), params, {}, ())
        batch = {"image": jnp.ones((8, 4)), "mask": jnp.ones(8)}
        grads, _ = jax.jit(step)(state, batch)[0].opt_state
    assert grads["a"].sharding.spec == P(None, "fsdp")
    np.testing.assert_allclose(grads["a"], 1.0)


def test_the_step_and_the_norms_of_layers_give_gradients_their_sharding(monkeypatch):
    mesh = mesh_of("data 2, fsdp 2, tensor 2")

    def constraints():
        experiment = make_experiment(settings_of(small_config(scan=True)), mesh)
        with jax.set_mesh(mesh):
            steps = (experiment.train_step, layer_norms_program(experiment))
            traced = [step.trace(*experiment.arguments).jaxpr.jaxpr for step in steps]
            return [count_constraints(jaxpr) for jaxpr in traced]

    before = constraints()
    every = lambda params, mesh: params  # noqa: E731
    monkeypatch.setattr("vit_jax.experiment.experiment.gradient_shardings", every)
    for plain, constrained in zip(before, constraints(), strict=True):
        assert constrained > plain


def test_on_tpus_gradients_are_sharded_like_their_parameters():
    mesh = mesh_of("data 2, fsdp 2, tensor 2")
    split, whole = NamedSharding(mesh, P("tensor", "fsdp")), NamedSharding(mesh, P())
    params = {"kernel": split, "bias": whole}

    def found(platform, data=2, fsdp=2):
        devices = np.array([types.SimpleNamespace(platform=platform)])
        shape = {"data": data, "fsdp": fsdp}
        return gradient_shardings(params, types.SimpleNamespace(devices=devices, shape=shape))

    assert found("tpu") == {"kernel": split, "bias": None}
    assert found("gpu") is found("tpu", data=1) is found("tpu", fsdp=1) is None


@pytest.mark.slow
def test_constraints_that_do_nothing_are_noticed(monkeypatch):
    monkeypatch.setattr("vit_jax.experiment.model.constrain", lambda x, axes: x)
    experiment, step = compile_step("fsdp 8", True)
    assert collective_bytes(step.as_text()) > 100 * 4 * experiment.num_params
    assert constraints_in_forward() == 0


@pytest.mark.parametrize(
    "layout",
    [
        "replica 2, fsdp 4",
        pytest.param("data 8", marks=pytest.mark.slow),
        pytest.param("data 2, fsdp 2, tensor 2", marks=pytest.mark.slow),
    ],
)
def test_the_state_is_donated(layout):
    experiment, step = compiled(layout, True)
    state = bytes_per_device(experiment.abstract_state)
    assert step.memory_analysis().alias_size_in_bytes >= state


def test_bytes_per_device():
    _, state = trained("data 2, fsdp 2, tensor 2")
    held = {device: 0 for device in jax.devices()}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert bytes_per_device(state) == max(held.values())


def count_constraints(jaxpr):
    count = 0
    for eqn in jaxpr.eqns:
        inner = sum(map(count_constraints, jaxprs_in_params(eqn.params)))
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += repeats * inner + (eqn.primitive.name == "sharding_constraint")
    return count


def constraints_in_forward(**fields):
    mesh = mesh_of("data 2, fsdp 2, tensor 2")
    model = make_experiment(settings_of(small_config(**fields)), mesh).model
    images = jax.ShapeDtypeStruct((BATCH, 16, 16, 3), jnp.float32)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(model.init, jax.random.key(0), images)
        return count_constraints(jax.make_jaxpr(model.apply)(params, images).jaxpr)


FORMS = [
    {"scan": False},
    pytest.param({"scan": True}, marks=pytest.mark.slow),
    {"scan": True, "remat": "full"},
]


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_every_activation_is_constrained(fields):
    # Patches, tokens; in a block q, k, v, the hidden units and both sums.
    assert constraints_in_forward(**fields) == 2 + 6 * DEPTH


def test_the_logits_of_relative_positions_are_constrained_too():
    assert constraints_in_forward(pos_embed="relative", scan=True) == 2 + 7 * DEPTH


def test_the_pooling_head_is_constrained_too():
    assert constraints_in_forward(pool="map") == 2 + 6 * DEPTH + 4


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_the_backward_pass_keeps_the_constraints(fields):
    mesh = mesh_of("fsdp 8")
    experiment = make_experiment(settings_of(small_config(**fields)), mesh)
    with jax.set_mesh(mesh):
        step = jax.make_jaxpr(experiment.train_step)(
            experiment.abstract_state, experiment.abstract_batch
        )
    forward = 2 + 6 * DEPTH
    assert count_constraints(step.jaxpr) >= 2 * forward


def test_constrain_splits_the_batch_over_its_axes():
    mesh = mesh_of("data 2, fsdp 2, tensor 2")
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: constrain(2 * x, ("batch", None, "tensor")))(jnp.ones((8, 3, 4)))
    assert shape_of_share(x) == (8 // 4, 3, 4 // 2)
    assert (np.asarray(x) == 2).all()


def test_constrain_needs_a_mesh():
    with pytest.raises(RuntimeError, match=r"jax\.set_mesh"):
        jax.jit(lambda x: constrain(x, ("batch", None)))(jnp.ones((8, 8)))


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_what_cannot_be_split_is_named_once_and_replicated(caplog):
    state = {
        "up": {"kernel": jnp.zeros((8, 9)), "bias": jnp.zeros(9)},
        "down": {"kernel": jnp.zeros((8, 8))},
        "stranger": jnp.zeros((16, 16)),
        "number": jnp.zeros(()),
        "placeholder": jnp.zeros(1),  # Adafactor's, of the scale of logits
    }
    shardings = state_shardings(state, mesh_of("data 2, fsdp 2, tensor 2"))
    assert shardings["up"]["kernel"].spec == P("fsdp")
    assert shardings["stranger"].spec == shardings["up"]["bias"].spec == P()
    assert shardings["down"]["kernel"].spec == P("tensor", "fsdp")
    (message,) = warnings_of(caplog)
    assert message.splitlines()[1:] == [
        "  stranger (16, 16): no rule",
        "  up/kernel (8, 9): axis 1 does not divide by tensor=2",
    ]


def test_a_family_says_how_names_of_its_own_are_split(monkeypatch, caplog):
    class Own(nn.Module):
        split_params = (("stranger", ("fsdp", "tensor")), ("own/kernel", (None, "tensor")))

    monkeypatch.setitem(FAMILIES, "Own", Own)
    state = {"stranger": jnp.zeros((16, 16)), "own": {"kernel": jnp.zeros((3, 8, 8))}}
    shardings = state_shardings(state, mesh_of("data 2, fsdp 2, tensor 2"))
    assert shardings["stranger"].spec == P("fsdp", "tensor")
    assert shardings["own"]["kernel"].spec == P(None, None, "tensor")
    assert not warnings_of(caplog)


def test_one_device_needs_no_warning(caplog):
    state_shardings({"stranger": jnp.zeros((16, 16))}, mesh_of("one device"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("variant", "optimizer", "pool"),
    [
        ("mu", "adamw", "token"),
        ("22B", "adamw", "token"),
        ("B", "sgd", "map"),
        *(
            pytest.param(variant, "adamw", "token", marks=pytest.mark.slow)
            for variant in VIT_VARIANTS
            if variant not in ("mu", "22B")
        ),
    ],
)
def test_every_leaf_of_every_variant_has_a_rule(variant, optimizer, pool, caplog):
    model = create_model(f"ViT-{variant}/14", 1000, pool=pool, hidden_head=True, scan=True)
    tx = make_optimizer(optimizer, schedule=lambda step: 0.1, weight_decay=0.1)
    shapes = jax.eval_shape(lambda: init_state(model, tx, (224, 224), 0))
    split = with_shardings(shapes, mesh_of("fsdp 8"))
    assert not caplog.records
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert bytes_per_device(split) < 0.25 * whole


@pytest.mark.parametrize(
    ("kind", "place", "scan"),
    [("learned_1d", "layers", False), ("learned_2d", "layers", True), ("relative", "layers", False),
     ("relative", "layers_shared", True)],
)  # fmt: skip
def test_tables_of_positions_have_a_rule(kind, place, scan, caplog):
    model = create_model("DeiT-B/16", 1000, depth=2, scan=scan, pos_embed=kind, pos_embed_at=place)
    tx = make_optimizer("adafactor", schedule=lambda step: 0.1, layer_decay=0.5)
    shapes = jax.eval_shape(lambda: init_state(model, tx, (224, 224), 0, with_ema=True))
    shardings = tree.flatten_names(state_shardings(shapes, mesh_of("data 2, fsdp 2, tensor 2")))
    assert not caplog.records
    tables = {leaf.spec for name, leaf in shardings.items() if "pos_embedding" in name}
    assert tables == {P()}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("relative", None),
        pytest.param("relative", "layers_shared", marks=pytest.mark.slow),
        pytest.param("learned_2d", "layers", marks=pytest.mark.slow),
    ],
)
def test_positions_are_learned_alike_over_the_mesh(kind, place):
    """Relative logits are split as the heads are; no collective is as large as a part of them."""
    mesh = mesh_of("data 2, fsdp 2, tensor 2")
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (BATCH, 32, 32, 3)).astype(np.float32)
    sizes = {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": 4, "pool": "gap", "scan": True}
    plain = create_model("ViT-mu/4", 8, 32, pos_embed=kind, pos_embed_at=place, **sizes)
    params = random_params(plain, images, scale=0.1)
    target = rng.standard_normal((BATCH, 8)).astype(np.float32)

    def grads(model, params, images):
        return jax.grad(lambda p: (target * model.apply({"params": p}, images)).sum())(params)

    expected = jax.jit(functools.partial(grads, plain))(params, images)
    with jax.set_mesh(mesh):
        split = jax.device_put(params, state_shardings(params, mesh))
        batch = jax.device_put(images, NamedSharding(mesh, P(BATCH_AXES)))
        model = plain.clone(constrain=constrain)
        step = jax.jit(functools.partial(grads, model)).lower(split, batch).compile()
        found = step(split, batch)
    moved = re.findall(r"f32\[([\d,]+)\]", " ".join(COLLECTIVE.findall(step.as_text())))
    logits = BATCH // 4 * 2 * 64**2  # of 2 of 4 heads
    assert max(math.prod(map(int, shape.split(","))) for shape in moved) < logits / 2
    for name, grad in tree.flatten_names(expected).items():
        ours = np.asarray(tree.flatten_names(found)[name])
        np.testing.assert_allclose(ours, grad, rtol=0, atol=2e-5 * np.abs(grad).max() + 1e-6)


def test_rules_are_about_whole_parts_of_names():
    shapes = {"ahead": {"kernel": jnp.zeros((8, 8))}, "head": {"kernel": jnp.zeros((8, 8))}}
    shardings = state_shardings(shapes, mesh_of("fsdp 8"))
    assert shardings["head"]["kernel"].spec == P("fsdp")
    assert shardings["ahead"]["kernel"].spec == P()


@pytest.mark.parametrize(
    ("name", "scan"), [("adafactor", False), *((name, True) for name in OPTIMIZERS)]
)
def test_every_optimizers_state_is_split(name, scan, caplog):
    model = create_model("ViT-B/16", 1000, depth=2, scan=scan, qk_norm=True, layer_scale=0.1)
    half = {"momentum_dtype": "bfloat16"} if name != "schedule_free" else {}
    tx = make_optimizer(name, schedule=lambda step: 0.1, freeze="embedding/.*", **half)
    shapes = jax.eval_shape(lambda: init_state(model, tx, (224, 224), 0, with_ema=True))
    split = with_shardings(shapes, mesh_of("fsdp 8"))
    assert not caplog.records
    for part in (split.opt_state, split.ema):
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        assert bytes_per_device(part) < 0.16 * whole
    assert split.ema == split.params


@functools.cache
def muon_update(layout, form):
    """The compiled update of 4 layers, and the unrolled parameters after two updates."""
    mesh, rng = mesh_of(layout), np.random.default_rng(0)
    model = create_model("ViT-mu/4", 8, 32, width=48, depth=4, mlp_dim=96, num_heads=4, scan=True)
    tx = make_optimizer("muon", schedule=lambda step: 0.1, weight_decay=0.1)
    shapes = jax.eval_shape(lambda: init_state(model, tx, (32, 32), 0)).params
    params, *grads = (
        jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
        for _ in range(3)
    )
    params, *grads = map(form, (params, *grads))

    def update(state, grads):
        updates, moments = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}

    with jax.set_mesh(mesh):
        state = {"params": params, "opt_state": tx.init(params)}
        shardings = state_shardings(state, mesh)
        state, *grads = jax.device_put((state, *grads), (shardings, *[shardings["params"]] * 2))
        compiled = jax.jit(update, out_shardings=shardings).lower(state, grads[0]).compile()
        for each in grads:
            state = compiled(state, each)
    params = jax.device_get(state["params"])
    return Program(compiled.as_text()), params if form is unstack_layers else unstack_layers(params)


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        pytest.param("data 8", unstack_layers, marks=pytest.mark.slow),
        pytest.param("fsdp 8", dict, marks=pytest.mark.slow),
        ("data 2, fsdp 2, tensor 2", dict),
    ],
)
def test_no_device_orthogonalises_what_another_does(layout, form, capfd):
    alone, expected = muon_update("one device", dict)
    program, found = muon_update(layout, form)
    assert "rematerialization" not in capfd.readouterr().err  # the compiler found each exchange
    whole = alone.products()
    assert whole.total() == 15 * 4 * (4 + 2)  # of 4 squares and 2 wide kernels in each layer
    assert {kind: 8 * count for kind, count in program.products().items()} == whole
    jax.tree.map(
        lambda ours, leaf: np.testing.assert_allclose(ours, leaf, atol=2e-5), found, expected
    )


def test_factored_moments_keep_what_is_left_of_their_parameters_layout():
    model = create_model("ViT-B/16", 1000, depth=2, scan=True)
    tx = make_optimizer("adafactor", schedule=lambda step: 0.1)
    shapes = jax.eval_shape(lambda: init_state(model, tx, (224, 224), 0))
    shardings = state_shardings(shapes, mesh_of("data 2, fsdp 2, tensor 2"))
    state = shardings.opt_state["direction"].layers["second_moment"]
    rows, columns = state.v_row["encoder"]["layers"], state.v_col["encoder"]["layers"]
    for layer in ("query", "out"):  # square: rows are means over the last axis
        kernel = shardings.params["encoder"]["layers"]["attention"][layer]["kernel"].spec
        assert rows["attention"][layer]["kernel"].spec == P(None, kernel[1])
        assert columns["attention"][layer]["kernel"].spec == P(None, kernel[2])
    for layer in ("up", "down"):  # rows have the width D, columns the hidden width F
        assert rows["mlp"][layer]["kernel"].spec == P(None, "fsdp")
        assert columns["mlp"][layer]["kernel"].spec == P(None, "tensor")
    whole = state.v["encoder"]["layers"]
    assert {leaf.spec for leaf in jax.tree.leaves(whole)} == {P()}  # vectors, and mere places

    square = {"kernel": jnp.zeros((64, 64))}
    tx = make_optimizer("adafactor", schedule=lambda step: 0.1)
    grads = {"kernel": jnp.zeros((64, 64)).at[5].set(1.0)}
    _, state = tx.update(grads, tx.init(square), square)
    found = state["direction"].others["second_moment"]
    assert found.v_row["kernel"][5] == pytest.approx(1.0)
    np.testing.assert_allclose(found.v_col["kernel"], 1 / 64)


@pytest.mark.slow
def test_microbatches_take_less_memory_and_move_no_images():
    _, whole = compiled("replica 2, fsdp 4", True)
    experiment, step = compile_step("replica 2, fsdp 4", True, accum_steps=4)
    temporaries = [s.memory_analysis().temp_size_in_bytes for s in (whole, step)]
    assert temporaries[1] < 0.3 * temporaries[0]
    # The text holds the loop over microbatches once.
    params = 4 * experiment.num_params
    assert params / 2 < collective_bytes(step.as_text()) < 3 * params
