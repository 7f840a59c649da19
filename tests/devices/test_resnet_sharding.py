"""How ResNets and hybrids are laid out over 8 virtual devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_vit import random_params
from test_sharding import count_constraints

from vit_jax.base import tree
from vit_jax.devices.mesh import BATCH_AXES, make_mesh
from vit_jax.devices.sharding import bytes_per_device, constrain, state_shardings
from vit_jax.experiment.experiment import with_shardings
from vit_jax.models import create_model
from vit_jax.planning.hlo import Program
from vit_jax.transfer.shapes import abstract_params

BATCH = 16
TINY_VIT = {"width": 32, "depth": 1, "mlp_dim": 64, "num_heads": 8, "pool": "gap"}
MODELS = {
    "BiT": ("BiT-R50x1", {"stages": (1, 1), "stem_width": 32}),
    "scanned BiT": ("BiT-R50x1", {"stages": (1, 3), "stem_width": 32, "scan": True}),
    "hybrid": ("R26+ViT-mu/16", TINY_VIT | {"stages": (1, 1), "stem_width": 32}),
}
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "tensor 8": {"tensor": 8},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def mesh_of(layout):
    return make_mesh(**({"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | MESHES[layout]))


def model_of(kind, **fields):
    name, sizes = MODELS[kind]
    return create_model(name, 8, 32, **sizes, **fields)


def gradient(model, params, images, target):
    return jax.grad(lambda p: (target * model.apply({"params": p}, images)).sum())(params)


@functools.cache
def on_one_device(kind):
    """Parameters, images, the gradient of what is multiplied with the logits, and that gradient."""
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (BATCH, 32, 32, 3)).astype(np.float32)
    target = rng.standard_normal((BATCH, 8)).astype(np.float32)
    params = random_params(model_of(kind), images)
    grads = jax.jit(functools.partial(gradient, model_of(kind)))(params, images, target)
    return params, images, target, jax.device_get(grads)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("BiT", "fsdp 8", marks=slow),
        pytest.param("hybrid", "tensor 8", marks=slow),
        pytest.param("BiT", "data 2, fsdp 2, tensor 2", marks=slow),
        pytest.param("hybrid", "data 2, fsdp 2, tensor 2", marks=slow),
        pytest.param("BiT", "tensor 8", marks=slow),
        pytest.param("scanned BiT", "fsdp 8", marks=slow),
        pytest.param("scanned BiT", "data 2, fsdp 2, tensor 2", marks=slow),
        pytest.param("hybrid", "fsdp 8", marks=slow),
    ],
)
def test_every_layout_computes_alike(kind, layout):
    params, images, target, expected = on_one_device(kind)
    mesh = mesh_of(layout)
    with jax.set_mesh(mesh):
        shardings = state_shardings(params, mesh)
        split = jax.device_put(params, shardings)
        of_batch = NamedSharding(mesh, P(BATCH_AXES))
        batch = jax.device_put((images, target), of_batch)
        model = model_of(kind, constrain=constrain)
        step = jax.jit(functools.partial(gradient, model), out_shardings=shardings)
        step = step.lower(split, *batch).compile()
        found = step(split, *batch)
    held = {device: 0 for device in jax.devices()}
    for leaf in jax.tree.leaves(split):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert bytes_per_device(split) == max(held.values())
    for name, grad in tree.flatten_names(expected).items():
        ours = np.asarray(tree.flatten_names(found)[name])
        # That of keys' biases is zero but for rounding.
        atol = 1e-4 * max(np.abs(grad).max(), 0.01)
        np.testing.assert_allclose(ours, grad, rtol=0, atol=atol, err_msg=name)
    if layout == "fsdp 8":  # weights go round, activations do not
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        moved = sum(each.size * each.count for each in Program(step.as_text()).collectives())
        assert whole < moved < 3.5 * whole


@pytest.mark.parametrize("layout", ["fsdp 8", "tensor 8"])
@pytest.mark.parametrize(
    "name",
    ["BiT-R50x1", "R26+ViT-S/32", pytest.param("BiT-R152x4", marks=slow)],
)
def test_no_device_holds_much_of_the_parameters(name, layout, caplog):
    shapes = tree.unflatten_names(abstract_params(create_model(name)))
    split = with_shardings(shapes, mesh_of(layout))
    assert not caplog.records
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    # Over tensor neither projections nor the head are split.
    most = {"fsdp 8": 0.13, "tensor 8": 0.32}[layout]
    assert bytes_per_device(split) < most * whole


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("kind", "of_more"), [("BiT", 0), ("hybrid", 2 + 6), ("scanned BiT", 2 * (3 + 3))]
)
def test_every_activation_is_constrained(kind, of_more, remat):
    # The root's map; of each of two units both inner ones and the sum; of a hybrid's ViT as of
    # others. And before they are used the kernels, of the root and of units with projections. The
    # two scanned units have no projection.
    model = model_of(kind, remat=remat, constrain=constrain)
    images = jax.ShapeDtypeStruct((BATCH, 32, 32, 3), jnp.float32)
    with jax.set_mesh(mesh_of("data 2, fsdp 2, tensor 2")):
        params = jax.eval_shape(model.init, jax.random.key(0), images)
        jaxpr = jax.make_jaxpr(model.apply)(params, images).jaxpr
    assert count_constraints(jaxpr) == 1 + 3 * 2 + of_more + 1 + 4 * 2
