"""Each device reads its own part of the weights."""

import gc
import shutil
import weakref

import jax
import numpy as np
import pytest
from etils import epath

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.lazy import Lazy, stack
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.checkpoints.restore import split_over_all
from vit_jax.devices.sharding import place
from vit_jax.transfer import fit, read_pretrained


@pytest.fixture
def spied():
    """(an array (3, 8, 5), the same as Lazy, the sizes of the parts that were read)."""
    array, sizes = np.arange(120, dtype=np.float32).reshape(3, 8, 5), []

    def read(index):
        sizes.append(array[index].size)
        return array[index]

    return array, Lazy(array.shape, read), sizes


def test_only_parts_are_read(spied):
    array, lazy, sizes = spied
    np.testing.assert_array_equal(lazy.layer(2), array[2])
    np.testing.assert_array_equal(stack([lazy.layer(2), array[0]])[1:, :4], array[[0], :4])
    assert sizes == [40]  # nothing of the first layer of the stack
    np.testing.assert_array_equal(lazy[..., [2, 0]], array[..., [2, 0]])
    assert stack([lazy.layer(i) for i in range(3)]) is lazy
    assert stack([lazy.layer(0), lazy.layer(1)]).shape == (2, 8, 5)
    assert hash_params({"a": lazy}) == hash_params({"a": array})


def test_devices_read_their_parts(spied):
    array, lazy, sizes = spied
    placed = place(lazy, split_over_all(lazy))
    np.testing.assert_array_equal(placed, array)
    assert sizes == [15] * len(jax.devices())
    del sizes[:]
    place(lazy, split_over_all(jax.ShapeDtypeStruct((3,), np.float32)))  # a copy on each device
    assert sizes == [120]


def test_the_parts_that_devices_have_copied_are_let_go(spied):
    array, lazy, _ = spied
    parts = []

    def read(index):
        part = array[index].copy()
        parts.append(weakref.ref(part))
        return part

    gc.disable()
    try:
        placed = place(Lazy(array.shape, read), split_over_all(lazy))
    finally:
        gc.enable()
    owned = {shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards}
    alive = [part for ref in parts if (part := ref()) is not None]
    assert all(part.ctypes.data in owned for part in alive)  # JAX takes some instead of a copy


def test_a_run_gives_the_same_numbers(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "_GROUP_BYTES", 1000)
    expected, found = (read_pretrained(golden / "run_0_2_0", lazy=lazy) for lazy in (False, True))
    assert found.model == expected.model and found.run == expected.run
    assert found.params.keys() == expected.params.keys()
    for name, leaf in found.params.items():
        assert isinstance(leaf, Lazy) and leaf.agreed
        np.testing.assert_array_equal(leaf, expected.params[name], name)
    params = tree.unflatten_names(found.params)
    stacked = tree.flatten_names(fit.stack_layers(params, stack))
    wanted = tree.flatten_names(fit.stack_layers(tree.unflatten_names(expected.params)))
    for name, leaf in stacked.items():
        assert leaf.agreed
        np.testing.assert_array_equal(leaf, wanted[name], name)
    shutil.copytree(golden / "run_0_2_0", tmp_path / "run")
    for file in epath.Path(tmp_path / "run/checkpoints").glob("*/state/d/*"):
        file.write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .* is valid"):
        read_pretrained(tmp_path / "run", lazy=True)
