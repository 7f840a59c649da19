"""Kernels of a program: how many there are, and the bundles in the compiler's schedules."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from tpu_form import fastest_on_tpu

from vit_jax.devices import kernels
from vit_jax.devices.chips import find_slice
from vit_jax.devices.flops import jaxpr_flops, program_flops
from vit_jax.devices.mesh import make_mesh
from vit_jax.models import create_model
from vit_jax.planning import kernel_cycles
from vit_jax.planning.kernel_cycles import count_bundles, count_cycles, find_kernels
from vit_jax.planning.targets import Target

SIZES = {"width": 128, "depth": 3, "mlp_dim": 128, "num_heads": 2}
TARGET = Target(find_slice("v5e:2x2"))


@functools.cache
def gradients(mesh: Mesh, num_images: int = 4, **fields):
    """The jaxpr of a small model's gradients, with kernels."""
    model = create_model("ViT-Ti/16", 5, 32, dtype="bfloat16", **(SIZES | fields))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    model = model.clone(ops=fastest_on_tpu(model, mesh))
    images = jax.ShapeDtypeStruct((num_images, 32, 32, 3), jnp.float32)
    with jax.set_mesh(mesh):
        grad = jax.grad(lambda params, images: model.apply(params, images).sum())
        return jax.jit(grad).trace(params, images).jaxpr.jaxpr


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(replica=1, data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])


@pytest.mark.parametrize(
    ("fields", "passes"),
    [({}, 1), ({"scan": True}, 1), ({"remat": "full"}, 2), ({"scan": True, "remat": "full"}, 2)],
    ids=str,
)
def test_kernels_are_counted_as_often_as_they_run(mesh, fields, passes):
    found = {call.name: call.count for call in find_kernels(gradients(mesh, **fields))}
    assert found == {"short_attention_forward": 3 * passes, "short_attention_backward": 3}


@pytest.mark.parametrize(
    ("fields", "again"),
    [({}, 0), ({"scan": True, "remat": "full"}, 3), ({"remat": "full", "remat_layers": 2}, 2)],
    ids=str,
)
def test_layers_that_are_recomputed_run_their_kernels_of_rows_again(
    mesh, fields, again, monkeypatch
):
    """All but the forward pass of the MLP, as nothing reads its output."""
    monkeypatch.setitem(kernels._VMEM_MIB, "cpu", 128)
    jaxpr = gradients(mesh, 64, **fields)
    found = {}
    for call in find_kernels(jaxpr):
        found[call.name] = found.get(call.name, 0) + call.count
    assert found.pop("mlp_forward") == 3
    assert found == {
        "projections_forward": 3 + again,
        "projections_backward": 3,
        "short_attention_forward": 3 + again,
        "short_attention_backward": 3,
        "mlp_backward": 3,
    }
    product = 2 * (64 * 8) * 128 * 128  # 64 images of 5 tokens and their padding
    without = program_flops(gradients(mesh, 64))
    attention = 4 * 64 * 8**2 * 128
    assert program_flops(jaxpr) - without == again * (5 * product + attention)


def test_flops_of_kernels_are_those_of_their_products(mesh):
    calls = {call.name: call for call in find_kernels(gradients(mesh))}
    one_product = 2 * 2 * 8 * 8 * 128  # two images of 8 tokens on a device
    for name, products in {"short_attention_forward": 2, "short_attention_backward": 5}.items():
        eqn = calls[name].eqn
        grid = eqn.params["grid_mapping"].grid
        assert grid == (2, 1)
        assert 2 * jaxpr_flops(eqn.params["jaxpr"]) == products * one_product


def test_cycles_are_bundles_or_bytes_whichever_takes_longer(mesh, monkeypatch):
    calls = find_kernels(gradients(mesh))
    monkeypatch.setattr(kernel_cycles, "_bundles", lambda calls, target: [7] * len(calls))
    rows = {row["name"]: row for row in count_cycles(calls, TARGET)}
    moved = 4 * 2 * 8 * 128 * 2 * 1.5e9 / 819e9  # q, k, v and the output of two images
    assert rows["short_attention_forward"]["cycles"] == int(3 * moved)
    assert rows["short_attention_forward"]["bound_by"] == "hbm"
    monkeypatch.setattr(kernel_cycles, "_bundles", lambda calls, target: [999] * len(calls))
    rows = {row["name"]: row for row in count_cycles(calls, TARGET)}
    assert rows["short_attention_backward"]["cycles"] == 3 * 2 * 999


def test_without_schedules_a_warning_says_so(mesh, monkeypatch, caplog):
    calls = find_kernels(gradients(mesh))
    monkeypatch.setattr(kernel_cycles, "_bundles", lambda calls, target: [None] * len(calls))
    assert all(row["cycles"] == 0 for row in count_cycles(calls, TARGET))
    assert "no schedule" in caplog.text


def test_bundles_are_the_lines_of_a_schedule():
    text = "== UNITS:\n 1 2\n== UTILIZATION:\n  0 1 0\n  2 0 1\n\n  3 4 5\n"
    assert count_bundles(text) == 3


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_compiler_compiles_every_kernel_and_gives_its_schedule(mesh, topology):
    forms = [{}, {"width": 160}, {"num_heads": 16}, {"patch_size": 1}]  # widths 64, 80, 8; long
    calls = [call for fields in forms for call in find_kernels(gradients(mesh, **fields))]
    assert len(calls) > 8
    for row in count_cycles(calls, Target(find_slice(topology))):
        assert row["bundles"] > 10 and row["cycles"] > 0
