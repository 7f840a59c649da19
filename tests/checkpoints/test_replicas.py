import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.checkpoints.replicas import DivergedError, check_replicas
from vit_jax.devices.mesh import make_mesh


@pytest.fixture
def mesh():
    return make_mesh(replica=1, data=4, fsdp=2, tensor=1)


def make_state(mesh):
    values = {
        "z": (np.float32([1, 2, 3]), P()),
        "a": (np.arange(12, dtype=np.float32).reshape(6, 2), P("fsdp")),
        "m": (np.arange(16, dtype=np.float32), P(("data", "fsdp"))),  # no copies
        "step": (np.int32(7), P()),
    }
    return {
        name: jax.device_put(value, NamedSharding(mesh, spec))
        for name, (value, spec) in values.items()
    }


def flip(leaf, *devices):
    """`leaf` with the sign bit of its last number flipped on these devices."""
    shards = []
    for shard in leaf.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id in devices:
            data.reshape(-1).view(np.uint32)[-1] ^= 1 << 31
        shards.append(jax.device_put(data, shard.device, may_alias=False))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def test_equal_copies_are_passed(mesh):
    check_replicas(make_state(mesh), mesh)


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("z", [5], "5 / 0, 1, 2, 3, 4, 6, 7"),
        # The mesh is data 4 x fsdp 2, so that the second half lies on the odd devices.
        ("a", [3], "3 / 1, 5, 7"),
        ("step", [0, 1], "0, 1 / 2, 3, 4, 5, 6, 7"),
    ],
)
def test_a_copy_with_another_bit_is_named_with_its_device(mesh, name, devices, said):
    state = make_state(mesh)
    state[name] = flip(state[name], *devices)
    with pytest.raises(DivergedError) as error:
        check_replicas(state, mesh)
    said = re.sub(r"(\d+)", r"device \1 of process 0", said)
    assert str(error.value).splitlines()[1:] == [f"  {name}: {said}"]


def test_what_has_one_copy_can_not_diverge(mesh):
    state = make_state(mesh)
    state["m"] = flip(state["m"], 2)
    check_replicas(state, mesh)


def test_of_many_leaves_some_are_named_and_all_counted(mesh):
    state = make_state(mesh)
    many = {f"layer_{i:02d}": flip(state["z"], 1) for i in range(15)}
    with pytest.raises(
        DivergedError, match=r"copies of 15 arrays .*\n(  layer_0\d: [^\n]*\n?){10}$"
    ):
        check_replicas(many, mesh)
