"""Steps kept in the memory of the hosts, and restored by jobs that have lost some of it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_compilation import flags_for
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from started_job import free_address

from vit_jax.checkpoints import memory
from vit_jax.devices.mesh import make_mesh

SPECS = {
    "split": P("fsdp"),
    "both": P("data", "fsdp"),
    "small": P(),
    "half": P(None, "data"),
}
SHAPES = {"split": (12, 5), "both": (4, 24), "small": (3,), "half": (2, 12)}


def make_state(step, **axes):
    mesh = make_mesh(**{"replica": 1, "data": 1, "fsdp": 1, "tensor": 1} | axes)
    state = {}
    for name, shape in SHAPES.items():
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + step
        dtype = jnp.bfloat16 if name == "half" else jnp.float32
        sharding = NamedSharding(mesh, SPECS[name])
        state[name] = jax.make_array_from_callback(
            shape, sharding, values.astype(dtype).__getitem__
        )
    return state


def target_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_equal(found, expected):
    for name, leaf in expected.items():
        assert found[name].sharding == leaf.sharding and found[name].dtype == leaf.dtype
        for a, b in zip(found[name].addressable_shards, leaf.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), name


@pytest.fixture
def kept(tmp_path):
    return memory.Memory("run", tmp_path)


def test_two_steps_are_kept_and_restored_on_another_mesh(kept, tmp_path):
    for step in (10, 20, 30):
        kept.save(step, make_state(step, data=4, fsdp=2), {"note": step})
    folder = next(tmp_path.glob("vit_jax-*/run/process-0"))
    assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]
    assert folder.parents[1].stat().st_mode & 0o077 == 0
    for axes in ({"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 4}, {"fsdp": 1, "data": 1}):
        expected = make_state(30, **axes, **({"tensor": 8} if sum(axes.values()) == 2 else {}))
        state, meta = kept.restore(target_of(expected), 30)
        assert_equal(state, expected)
        assert (meta["note"], meta["step"]) == (30, 30)
    assert kept.restore(target_of(expected), 31) is None
    kept.drop_after(20)
    assert kept.restore(target_of(expected), 0)[1]["step"] == 20
    kept.remove()
    assert kept.restore(target_of(expected), 0) is None


def test_a_damaged_step_gives_way_to_the_one_before(kept, tmp_path, caplog):
    state = make_state(10, data=4, fsdp=2)
    for step in (10, 20):
        kept.save(step, make_state(step, data=4, fsdp=2), {})
    pieces = next(tmp_path.glob("vit_jax-*/run/process-0/20/pieces"))
    data = bytearray(pieces.read_bytes())
    data[100] ^= 4
    pieces.write_bytes(data)
    found, meta = kept.restore(target_of(state), 0)
    assert meta["step"] == 10
    assert_equal(found, state)
    assert "is damaged: its checksum differs" in caplog.text
    (pieces.parents[1] / "10/index.json").write_text("{")
    assert kept.restore(target_of(state), 0) is None


def test_a_folder_that_others_can_open_is_neither_read_nor_written(kept, tmp_path, caplog):
    state = make_state(10, data=4, fsdp=2)
    kept.save(10, state, {})
    (tmp_path / f"vit_jax-{os.getuid()}").chmod(0o755)
    assert kept.restore(target_of(state), 0) is None
    assert "is not read" in caplog.text
    kept.save(10, state, {})
    assert "step 10 is not kept in" in caplog.text and "only this user can open" in caplog.text


PROCESS = """
import os, shutil, sys
import jax
from jax.experimental.multihost_utils import sync_global_devices
from vit_jax.checkpoints import memory
sys.path[:0] = sys.argv[4:]
from test_memory import assert_equal, make_state, target_of

root, address, i = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 3, i)
folder = f"{root}/host-{i}"
os.makedirs(folder)
kept, state = memory.Memory("run", folder), make_state(20, data=2, fsdp=3)
kept.save(10, make_state(10, data=2, fsdp=3), {})
kept.save(20, state, {"by": i})
sync_global_devices("saved")
for lost, expected in ((None, 20), (0, 20), (1, None)):
    if i == lost:
        shutil.rmtree(folder)
        os.makedirs(folder)
    sync_global_devices(f"lost {lost}")
    found = kept.restore(target_of(state), 0)
    if expected is None:
        assert found is None
    else:
        assert_equal(found[0], state)
        assert found[1]["step"] == 20 and found[1]["by"] == (0 if lost is None else 1)
jax.distributed.shutdown()
"""


def test_a_process_whose_host_is_lost_gets_its_shards_from_its_neighbour(tmp_path):
    """Each process has a host of its own; without two neighbours no step is whole."""
    address, here = free_address(), os.path.dirname(__file__)
    words = [str(here), os.path.dirname(here)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, tmp_path, address, str(i), *words],
            env=os.environ | {"XLA_FLAGS": flags_for(2)}, stderr=subprocess.PIPE, text=True,
        )
        for i in range(3)
    ]  # fmt: skip
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 3, "\n".join(said)
