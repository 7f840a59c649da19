import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from at_fault import at_fault
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vit_jax.devices import mesh as mesh_lib
from vit_jax.devices.mesh import (
    accelerators_on_host,
    batch_sharding,
    check_accum_steps,
    check_batch_size,
    make_mesh,
    start_backend,
)


def mesh_of(replica=1, data=1, fsdp=1, tensor=1, devices=None):
    return make_mesh(replica=replica, data=data, fsdp=fsdp, tensor=tensor, devices=devices)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, -1, 1, 1), (1, 8, 1, 1)),
        ((2, 2, 1, -1), (2, 2, 1, 2)),
        ((1, 1, 8, 1), (1, 1, 8, 1)),
        ((1, -1, 8, 1), (1, 1, 8, 1)),
    ],
)
def test_mesh_of_all_devices(sizes, expected):
    mesh = mesh_of(*sizes)
    assert dict(mesh.shape) == dict(
        zip(("replica", "data", "fsdp", "tensor"), expected, strict=True)
    )
    assert mesh.axis_types == (AxisType.Auto,) * 4  # Linen needs it
    assert set(mesh.devices.flat) == set(jax.devices())


def test_mesh_of_some_devices():
    some = jax.devices()[2:6]
    assert set(mesh_of(data=-1, fsdp=2, devices=some).devices.flat) == set(some)


@pytest.mark.parametrize(
    "sizes",
    [(1, 3, 1, 1), (1, 1, 2, 2), (1, -1, 3, 1), (1, -1, 16, 1), (-1, -1, 1, 1), (1, 0, 1, 1),
     (1, 1, -2, 1)],
)  # fmt: skip
def test_faulty_meshes(sizes):
    with at_fault("mesh.replica"):  # the first of four
        mesh_of(*sizes)


def test_the_batch_is_split_over_all_axes_but_tensor():
    sharding = batch_sharding(mesh_of(replica=2, fsdp=2, tensor=2))
    assert sharding.spec == P(("replica", "data", "fsdp"))
    batch = jax.device_put(np.arange(8), sharding)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2,)}


@pytest.mark.parametrize("size", [4, 8, 400])
def test_a_batch_that_the_mesh_splits(size):
    check_batch_size(mesh_of(data=2, fsdp=2, tensor=2), size, "global_batch_size")


@pytest.mark.parametrize(("size", "remedy"), [(6, 4), (3, 4), (0, 4), (-4, 4), (11, 8)])
def test_a_batch_that_it_does_not_split(size, remedy):
    with at_fault("evals.test.batch_size") as error:
        check_batch_size(mesh_of(data=2, fsdp=2, tensor=2), size, "evals.test.batch_size")
    assert str(error.value).endswith(f"try {remedy}")


def test_microbatches_are_parts_of_each_devices_rows():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)  # 4 ways
    for accum_steps in (1, 2, 3, 6):
        check_accum_steps(mesh, 24, accum_steps)
    for accum_steps, remedy in [(4, 3), (5, 3), (12, 6)]:
        with at_fault("optimizer.accum_steps") as error:
            check_accum_steps(mesh, 24, accum_steps)
        assert "choose other mesh sizes" in str(error.value)  # a run that goes on keeps accum_steps
        assert str(error.value).endswith(f"for a new run, optimizer.accum_steps={remedy}")


@pytest.fixture
def no_accelerators(monkeypatch):
    monkeypatch.setattr(mesh_lib, "accelerators_on_host", lambda: [])


@pytest.mark.parametrize(("platform", "extra"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_a_platform_that_is_not_there(platform, extra, no_accelerators):
    with at_fault("mesh.platform") as error:
        start_backend(platform)
    assert f"'.[{extra}]'" in str(error.value)


@pytest.mark.parametrize("platform", ["cpu", None])
def test_a_platform_that_is_there(platform, no_accelerators):
    start_backend(platform)
    assert jax.default_backend() == "cpu"


def test_an_accelerator_that_is_left_unused_is_named(monkeypatch, caplog):
    monkeypatch.setattr(mesh_lib, "accelerators_on_host", lambda: ["NVIDIA GPU"])
    start_backend("cpu")  # asked for: nothing to say
    assert not caplog.records
    start_backend()
    (record,) = caplog.records
    assert "this host has: NVIDIA GPU" in record.getMessage()


def test_accelerators_show_by_their_device_files(monkeypatch):
    files = {"/dev/nvidia[0-9]*": ["/dev/nvidia0"], "/dev/vfio/[0-9]*": ["/dev/vfio/3"]}
    monkeypatch.setattr(mesh_lib.glob, "glob", lambda pattern: files.get(pattern, []))
    assert accelerators_on_host() == ["NVIDIA GPU", "TPU"]
    files.clear()
    assert accelerators_on_host() == []


SLICES = """
import sys
from jax.experimental import topologies
from vit_jax.base.errors import InputError
from vit_jax.devices.mesh import make_mesh

devices = topologies.get_topology_desc("v5e:2x4", "tpu", num_slices=2).devices
for replica, data, fsdp in [(None, -1, 2), (4, -1, 2), (1, -1, 2), (-1, 2, 2)]:
    try:
        mesh = make_mesh(replica=replica, data=data, fsdp=fsdp, tensor=1, devices=devices)
        slices = [len({device.slice_index for device in part.flat}) for part in mesh.devices]
        print(tuple(mesh.shape.values()), slices)
    except InputError as e:
        print(e)
"""


def test_each_slice_holds_whole_replicas():
    pytest.importorskip("libtpu")
    env = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    job = subprocess.run([sys.executable, "-c", SLICES], env=env, capture_output=True, text=True)
    assert job.stdout.splitlines() == [
        "(2, 4, 2, 1) [1, 1]",
        "(4, 2, 2, 1) [1, 1, 1, 1]",
        "mesh.replica=1: there are 2 slices, and each must hold whole replicas; set "
        "--config.mesh.replica=2 or a multiple of it",
        "(4, 2, 2, 1) [1, 1, 1, 1]",
    ], job.stderr  # fmt: skip
