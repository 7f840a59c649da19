"""Gradients exchanged by devices that each compute their own rows."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from read_settings import make_loss, settings_of
from short_objective import objective_of

from vit_jax.base import tree
from vit_jax.config import base_config
from vit_jax.devices import sharding
from vit_jax.devices.mesh import batch_sharding, make_mesh
from vit_jax.experiment import experiment
from vit_jax.experiment.exchange import Exchange, choose_exchange, join_devices, share_gradients
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_train_step
from vit_jax.models import create_model
from vit_jax.models.block_ops import PLAIN, RowKernels
from vit_jax.models.contract import Model
from vit_jax.models.layers import EncoderBlock
from vit_jax.models.vit import ViT
from vit_jax.objectives.contract import Objective, ObjectiveOutput, RunFacts, Term
from vit_jax.objectives.supervised import Supervised
from vit_jax.planning import hlo
from vit_jax.run.watch.layer_norms import watched

pytestmark = pytest.mark.usefixtures("small_moments_are_split")

SUPERVISED = Supervised().bind(Model(), make_loss("softmax"), RunFacts((), ()))
BY_ROWS = dataclasses.replace(PLAIN, rows=RowKernels(EncoderBlock, None, None))
WIDE = {"ops": BY_ROWS, "width": 128, "mlp_dim": 256, "dtype": jnp.bfloat16}
V5E = {"indices": (0,) * 16, "device_kind": "TPU v5e"}
WEIGHTS = {"a": np.arange(12.0).reshape(4, 3) / 7, "b": np.ones((1, 3)), "c": np.ones((1, 3))}
STATE = {"batch_stats": {"count": jnp.full((2,), 3.0)}}


def loss(params, model_state, batch, rng):
    """Of rows with different weights; one parameter counts for nothing."""
    del rng
    out = jnp.tanh(batch["image"] @ params["a"] + params["b"])
    rows = (batch["mask"][:, None] * out**2).sum()
    return ObjectiveOutput(rows, batch["mask"].sum(), {"top1": out[:, 0].sum()}, model_state)


def gradients_of(mesh, accum_steps, join=None, freeze=None):
    """The gradients, the metrics and the model's state of a step, and its program."""
    step = make_train_step(
        objective_of(loss), watched(optax.identity()), lambda batch, keys: batch, 0,
        accum_steps=accum_steps, join=join, freeze=freeze,
    )  # fmt: skip

    def found(state, batch):
        state, metrics = step(state, batch)
        metrics = {name: metrics[name] for name in metrics.keys() - {"masked", "grad_norm"}}
        return state.opt_state[0], metrics, state.model_state

    params = jax.tree.map(jnp.float32, WEIGHTS)
    state = TrainState(jnp.zeros((), jnp.int32), params, STATE, ())
    rng = np.random.default_rng(0)
    batch = {"image": rng.normal(size=(16, 4)), "mask": np.arange(16) % 3}
    batch = jax.device_put(jax.tree.map(np.float32, batch), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        compiled = jax.jit(found).lower(state, batch).compile()
    return compiled(state, batch), compiled.as_text()


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_joined_gradients_are_those_of_the_batch_in_one_exchange(accum_steps):
    mesh = make_mesh(replica=2, data=4, fsdp=1, tensor=1)
    join = functools.partial(join_devices, shardings=None, mesh=mesh)
    (grads, metrics, state), program = gradients_of(mesh, accum_steps, join)
    (expected, expected_metrics, _), _ = gradients_of(mesh, 1)
    assert program.count(" all-reduce(") == 1
    assert_equal_copies(grads)
    for name, value in expected.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert state["batch_stats"]["count"].tolist() == [3.0, 3.0]  # not added up


def assert_equal_copies(arrays):
    """The copies of a part of an array on several devices have equal bits."""
    for name, array in arrays.items():
        copies = {}
        for shard in array.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert {len(bits) for bits in copies.values()} == {1}, name


@pytest.mark.parametrize(
    ("accum_steps", "axis", "sums"), [(1, "data", 1), (2, "data", 1), (1, "fsdp", 2)]
)
def test_shared_gradients_are_those_of_the_batch_without_large_all_reduces(
    accum_steps, axis, sums, monkeypatch
):
    """Over fsdp the gradient of each share is then added over data."""
    monkeypatch.setitem(WEIGHTS, "a", np.arange(16.0).reshape(4, 4) / 7)
    monkeypatch.setitem(WEIGHTS, "b", np.ones((1, 4)))
    sizes = {"data": 4, "fsdp": 1} if axis == "data" else {"data": 2, "fsdp": 4}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(replica=1, tensor=1, devices=devices, **sizes)
    split = {"a": P(axis), "b": P(None, axis), "c": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in split.items()}
    join = functools.partial(share_gradients, shardings=shardings, model=Model())
    (grads, metrics, state), program = gradients_of(mesh, accum_steps, join)
    (expected, expected_metrics, _), _ = gradients_of(mesh, 1)
    assert program.count(" all-reduce(") == sums and program.count(" all-to-all(") == 2
    assert_equal_copies(grads)
    for name, value in expected.items():
        assert grads[name].sharding.is_equivalent_to(shardings[name], 2)
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    assert state["batch_stats"]["count"].tolist() == [3.0, 3.0]  # not added up


@pytest.mark.parametrize(
    ("joins", "freeze", "exchanges"),
    [(True, None, 1), (False, None, 2), (True, "b", 1), (True, "a", 0)],
)
def test_whole_gradients_of_microbatches_are_exchanged_once_a_step(joins, freeze, exchanges):
    """Of the gradients that are not 0 as their parameters are frozen."""
    mesh = make_mesh(replica=2, data=4, fsdp=1, tensor=1)
    shardings = dict.fromkeys(WEIGHTS, NamedSharding(mesh, P()))
    join = functools.partial(share_gradients, shardings=shardings, model=Model(), freeze=freeze)
    (grads, metrics, _), program = gradients_of(mesh, 2, join if joins else None, freeze)
    (expected, expected_metrics, _), _ = gradients_of(mesh, 1, freeze=freeze)
    for name, value in expected.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    sums = [each for each in hlo.Program(program).collectives() if each.kind == "all-reduce"]
    assert sum(each.count * (each.size >= 4 * 12) for each in sums) == exchanges


def test_chips_that_share_their_gradients_draw_their_own_values(monkeypatch):
    def drawn(params, model_state, batch, rng):
        value = jax.random.uniform(rng)
        return ObjectiveOutput(params["c"].sum() * value, 1.0, {"squares": value**2}, model_state)

    monkeypatch.setitem(globals(), "loss", drawn)
    mesh = make_mesh(replica=1, data=4, fsdp=1, tensor=1, devices=jax.devices()[:4])
    shardings = dict.fromkeys(WEIGHTS, NamedSharding(mesh, P()))
    join = functools.partial(share_gradients, shardings=shardings, model=Model())
    (grads, metrics, _), _ = gradients_of(mesh, 1, join)
    mean, squares = float(grads["c"][0, 0]), float(metrics["squares"])
    assert squares - mean**2 > 0.001


def test_chips_do_not_share_the_gradients_of_a_tiny_model(monkeypatch):
    monkeypatch.setattr(sharding, "SPLIT_FROM", 32 * 64 + 1)
    vit = create_model("ViT-Ti/4", 10, (8, 8), **SMALL)
    assert choose_exchange(vit, SUPERVISED, processes("tpu")) == Exchange()


def small_config():
    config = base_config()
    config.global_batch_size, config.duration = 16, "2 steps"
    config.model.update(SMALL | {"name": "ViT-mu/4", "pool": "gap", "dtype": "bfloat16"})
    config.data.name, config.data.image_size, config.data.ops = "synthetic", 8, "flip"
    config.data.num_classes, config.data.num_examples = 8, 64
    config.optimizer.peak_lr, config.optimizer.grad_clip_norm = 1e-3, 1.0
    return config


@functools.cache
def step_of_a_vit(splits, accum_steps):
    """The state after a step in bfloat16, and the norm of its gradient.

    `splits`: the axis along which devices keep shares; "whole": all have whole parameters; None:
    gradients are not shared.
    """
    share = functools.partial(
        share_gradients, model=create_model("ViT-mu/4", 8, 8, dtype="bfloat16")
    )
    shares = None if splits == "whole" else splits
    exchange = Exchange() if splits is None else Exchange(share, shares=shares)
    config, rng = small_config(), np.random.default_rng(0)
    config.optimizer.accum_steps = accum_steps
    fsdp = 4 if splits == "fsdp" else 1
    mesh = make_mesh(replica=1, data=8 // fsdp, fsdp=fsdp, tensor=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "choose_exchange", lambda *args: exchange)
        patch.setattr(experiment, "gradient_shardings", lambda params, mesh: params)  # as on TPUs
        made = experiment.make_experiment(settings_of(config), mesh)
        with jax.set_mesh(mesh):
            state = made.init()
            batch = {
                "image": rng.integers(0, 256, (16, 8, 8, 3), np.uint8),
                "label": rng.integers(0, 8, 16, np.int32),
                "mask": np.float32(np.arange(16) % 4 > 0),
                "id": np.arange(16, dtype=np.int32),
            }
            batch = jax.device_put(batch, batch_sharding(mesh))
            state, metrics = made.train_step(state, batch)
    return tree.flatten_names(state), float(metrics["grad_norm"])


@pytest.mark.parametrize(("accum_steps", "splits"), [(2, "data"), (2, "whole"), (2, "fsdp")])
def test_a_vit_in_bfloat16_learns_the_same_with_shared_gradients(accum_steps, splits):
    """Split parameters and moments are so by rows, those that its head uses in float32 too."""
    plain, norm = step_of_a_vit(None, 1)
    shared, norm_of_shared = step_of_a_vit(splits, accum_steps)
    assert norm_of_shared == pytest.approx(norm, rel=1e-2)
    for name, value in plain.items():
        error = np.linalg.norm(np.subtract(shared[name], value).ravel())
        assert error <= 2e-2 * np.linalg.norm(np.ravel(value)), name
        is_split = name.endswith("/kernel")
        is_split &= splits != "whole" or name.startswith("opt_state/")
        ways = value.size // math.prod(shared[name].sharding.shard_shape(value.shape))
        assert ways == ((4 if splits == "fsdp" else 8) if is_split else 1), name


def test_further_terms_are_not_exchanged(monkeypatch):
    """A device would divide them by the weight of its own rows."""
    mesh = make_mesh(replica=1, data=8, fsdp=1, tensor=1)
    term = Term(jnp.float32(1), jnp.float32(2), 1.0)
    plain = loss
    with_term = lambda *args: plain(*args)._replace(terms={"more": term})  # noqa: E731
    monkeypatch.setitem(globals(), "loss", with_term)
    with pytest.raises(AssertionError, match="the weights of its rows only"):
        gradients_of(mesh, 1, functools.partial(join_devices, shardings=None, mesh=mesh))


@pytest.mark.parametrize(
    ("shares", "mesh", "model"),
    [
        ("data", {}, {}),
        ("data", {}, {"dtype": jnp.bfloat16}),
        (None, {}, {"remat": "full"}),
        (None, {}, {"remat": "full", "ops": BY_ROWS}),
        ("data", V5E, {"remat": "full"} | WIDE),
        (None, V5E, {"remat": "full"} | WIDE | {"dtype": jnp.float32}),
        (None, V5E, {"remat": "full", "qk_norm": True} | WIDE),
        (None, V5E, {"remat": "full"} | WIDE | {"width": 2048, "mlp_dim": 16384}),
        (None, V5E, {"remat": "dots"} | WIDE),
        (None, {}, {"remat": "full"} | WIDE),
        ("data", {}, {"dropout": 0.1, "attention_dropout": 0.1}),
        (None, {}, {"stochastic_depth": 0.1}),
        (None, {}, {"head_batch_norm": True}),
        (None, {}, {"scan": True}),
        ("data", {"indices": (0,) * 64}, {}),
        (None, {"indices": (0,) * 128}, {}),
        ("data", {"indices": (0,) * 16, "device_kind": "TPU v5 lite"}, {}),
        (None, {"indices": (0,) * 32, "device_kind": "TPU v5 lite"}, {}),
        (None, {"indices": (0,) * 32, "device_kind": "TPU v5e", "data": 2, "fsdp": 16}, WIDE),
        (None, {"indices": (0,) * 128, "data": 1, "fsdp": 128}, WIDE),
        (None, {"replica": 2, "data": 1}, {}),
        ("fsdp", {"data": 1, "fsdp": 2}, {}),
        (None, {"indices": (0,) * 4, "replica": 2, "data": 1, "fsdp": 2}, WIDE),
        (None, V5E | {"replica": 2, "data": 1, "fsdp": 8}, WIDE),
        (None, {"indices": (0,) * 4, "data": 2, "fsdp": 2}, {}),
        ("fsdp", V5E | {"data": 4, "fsdp": 4}, {}),
        (None, {"indices": (0,) * 4, "data": 1, "fsdp": 2, "tensor": 2}, {}),
        (None, {"indices": (0,)}, {}),
    ],
)
def test_when_chips_share_their_gradients(shares, mesh, model):
    vit = create_model("ViT-Ti/4", 10, (8, 8), **{**SMALL, "dropout": 0.0, **model})
    exchange = choose_exchange(vit, SUPERVISED, processes("tpu", **mesh))
    assert exchange.shares == shares and (exchange.join is not None) == (shares is not None)
    frozen = choose_exchange(vit, SUPERVISED, processes("tpu", **mesh), freeze="head")
    assert frozen == Exchange()


@pytest.mark.parametrize(
    ("joins", "mesh", "model"),
    [
        (True, {}, {"remat": "full", "scan": True}),
        (True, {}, {"stochastic_depth": 0.1}),
        (True, {"replica": 2, "data": 1}, {}),
        (True, {"indices": (0,) * 32, "device_kind": "TPU v5 lite"}, {}),
        (False, {"platform": "gpu"}, {}),
        (False, {}, {"head_batch_norm": True}),
        (False, {"data": 1, "fsdp": 2}, {"scan": True}),
        (False, {"indices": (0,)}, {}),
    ],
)
def test_when_chips_add_the_gradients_of_all_microbatches_once(joins, mesh, model):
    vit = create_model("ViT-Ti/4", 10, (8, 8), **{**SMALL, **model})
    devices = processes(**{"platform": "tpu"} | mesh)
    exchange = choose_exchange(vit, SUPERVISED, devices, accum_steps=2)
    assert (exchange.join is not None) == joins and exchange.shares is None
    frozen = choose_exchange(vit, SUPERVISED, devices, "head", 2)
    assert (frozen.join is not None) == joins and frozen.shares is None


def processes(platform="cpu", indices=(0, 1), device_kind="TPU v4", **axes):
    about = {"platform": platform, "device_kind": device_kind}
    devices = [types.SimpleNamespace(process_index=i, **about) for i in indices]
    shape = {"replica": 1, "data": len(indices), "fsdp": 1, "tensor": 1} | axes
    assert math.prod(shape.values()) == len(indices)
    return types.SimpleNamespace(devices=np.array(devices), shape=shape)


SMALL = {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": 2}


@pytest.mark.parametrize(
    ("joins", "mesh", "model"),
    [
        (True, {}, {}),
        (True, {"replica": 2, "data": 1}, {}),
        (False, {"indices": (0, 0)}, {}),
        (False, {"platform": "gpu"}, {}),
        (False, {"data": 1, "fsdp": 2}, {}),
        (False, {"data": 1, "tensor": 2}, {}),
        (False, {}, {"dropout": 0.1}),
        (False, {}, {"attention_dropout": 0.1}),
        (False, {}, {"stochastic_depth": 0.1}),
        (False, {}, {"head_batch_norm": True}),
    ],
)
def test_when_processes_join_their_gradients(joins, mesh, model):
    vit = create_model("ViT-Ti/4", 10, (8, 8), **{**SMALL, "dropout": 0.0, **model})
    exchange = choose_exchange(vit, SUPERVISED, processes(**mesh))
    assert (exchange.join is not None) == joins and exchange.shares is None
    other = Objective(loss)  # which may have terms, states or passes of its own
    assert choose_exchange(vit, other, processes(**mesh)) == Exchange()


def test_processes_do_not_join_the_gradients_of_a_plugins_model():
    """It may draw random values of its own, which would be the same on every device."""

    class Other(ViT):
        pass

    fields = {"num_classes": 10, "image_size": (8, 8), "patch_size": (4, 4), "dropout": 0.0}
    assert choose_exchange(ViT(**SMALL, **fields), SUPERVISED, processes()) != Exchange()
    assert choose_exchange(Other(**SMALL, **fields), SUPERVISED, processes()) == Exchange()
