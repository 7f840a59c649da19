"""Checkpoints: damage is found and named, and the previous one is used."""

import gc
import json
import logging
import pathlib
import random
import shutil
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from read_settings import settings_of

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.checkpoints.checksums import _checksum, checksums
from vit_jax.checkpoints.seal import check_seal
from vit_jax.config import base_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.state import TrainState
from vit_jax.run.build import Timetable
from vit_jax.run.train import start_state

META = {"data_fingerprint": "abc", "seconds": 1.0}


def make_state(seed, shape=(16, 24)):
    a, b = jax.random.split(jax.random.key(seed))
    params = {"layer": {"kernel": jax.random.normal(a, shape), "bias": jnp.zeros(shape[1])}}
    moments = {"mu": params, "flags": jnp.array([True, False]), "half": jnp.ones(4, jnp.bfloat16)}
    return TrainState(jnp.int32(seed), params, {}, (moments, jax.random.bits(b, (5,))))


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
    )


@pytest.fixture
def directory(tmp_path):
    """Checkpoints 1 and 2, in a run whose name would be a pattern."""
    directory = epath.Path(tmp_path / "[1]*?" / "checkpoints")
    checkpoints = checkpoint.Checkpoints(directory, keep_last=2, keep_every=None)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), META)
    checkpoints.close()
    return directory


def restored_step(directory, **kwargs):
    state, meta = restore.restore_newest(directory, abstract(make_state(0)), **kwargs)
    for found, saved in zip(
        jax.tree.leaves(state), jax.tree.leaves(make_state(meta["step"])), strict=True
    ):
        np.testing.assert_array_equal(found, saved)
    return meta["step"]


def files_of(directory, step):
    return sorted(p for p in pathlib.Path(directory / str(step)).rglob("*") if p.is_file())


def test_the_newest_is_restored_bit_for_bit(directory):
    assert restored_step(directory) == 2


def test_a_save_that_has_failed_here_does_not_wait_for_the_other_processes(monkeypatch, tmp_path):
    waited = []
    checkpoints = checkpoint.Checkpoints(tmp_path, keep_last=2, keep_every=None)
    wait = lambda **barrier: waited.append(barrier)  # noqa: E731
    monkeypatch.setattr(checkpoint.ocp.multihost, "get_barrier_sync_fn", lambda: wait)
    with pytest.raises(OSError, match="full"):
        try:
            raise OSError("full")
        finally:
            checkpoints._wait_for_others(key="all have saved", timeout_ms=1)
    assert waited == []
    try:
        raise OSError("full")
    except OSError:  # the user trains again after an error
        checkpoints.save(1, make_state(1), META)
        checkpoints.close()
    assert waited


def test_no_directory_and_no_step_are_no_checkpoint(tmp_path):
    target = abstract(make_state(0))
    assert restore.restore_newest(epath.Path(tmp_path / "absent"), target) is None
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "pretrained.npz").write_bytes(b"")
    assert restore.restore_newest(epath.Path(tmp_path), target) is None


def test_a_missing_file_of_any_kind_is_named_and_the_step_moved_aside(directory, caplog):
    intact = directory.parent / "intact"
    shutil.copytree(directory, intact)
    for file in files_of(directory, 2):
        file.unlink()
        assert restored_step(directory, move_aside=True) == 1, file
        assert f"file {file.relative_to(directory / '2')} is missing" in caplog.text
        assert (directory / "invalid-2").exists() and not (directory / "2").exists()
        shutil.rmtree(directory)
        shutil.copytree(intact, directory)


def test_a_shorter_file_and_one_flipped_bit_in_any_file_are_noticed(directory):
    draw = random.Random(0)
    for file in files_of(directory, 2):
        content = file.read_bytes()
        bit = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        for damaged in (flipped, content[: len(content) // 2]):
            file.write_bytes(damaged)
            assert restored_step(directory) == 1, (file, bit)
        file.write_bytes(content)
    assert restored_step(directory) == 2


def test_a_leaf_that_is_not_as_saved_is_noticed_without_the_seal(directory, monkeypatch, caplog):
    """Only the checksums of leaves protect large files, which have no digest."""
    monkeypatch.setattr(restore, "check_seal", lambda step_dir: None)
    meta_file = directory / "2" / "meta" / "metadata"
    meta = json.loads(meta_file.read_text())
    meta["checksums"]["params/layer/kernel"] ^= 1
    meta_file.write_text(json.dumps(meta))
    assert restored_step(directory) == 1
    assert "leaf params/layer/kernel is damaged" in caplog.text


def test_when_none_is_valid_the_run_is_refused_and_nothing_is_moved(directory):
    for step in (1, 2):
        (directory / str(step) / "meta" / "metadata").unlink()
    with pytest.raises(InputError, match=r"no checkpoint in .* is valid.*\n.*meta/metadata"):
        restore.restore_newest(directory, abstract(make_state(0)), move_aside=True)
    assert sorted(p.name for p in directory.iterdir()) == ["1", "2"]


def test_reading_follows_a_run_that_saves_and_deletes_meanwhile(directory, monkeypatch, caplog):
    """Readers have no lock: the seal is completed, and old steps are deleted, while they read."""
    read_seal = restore.check_seal

    def delete_then_check(step_dir):
        shutil.rmtree(directory / "1", ignore_errors=True)
        if step_dir.name == "2":
            (directory / "2").rename(directory / "3")
        read_seal(step_dir)

    monkeypatch.setattr(restore, "check_seal", delete_then_check)
    state, _ = restore.restore_newest(directory, abstract(make_state(0)))
    assert int(state.step) == 2 and "invalid" not in caplog.text


def test_a_file_that_comes_and_goes_while_the_seal_is_checked_is_none_of_it(directory, monkeypatch):
    gone = epath.Path(directory / "2" / ".seal.json.0.tmp")
    listed = type(gone).iterdir
    monkeypatch.setattr(
        type(gone), "iterdir", lambda path: [*listed(path), *[gone] * (path.name == "2")]
    )
    check_seal(epath.Path(directory / "2"))


def test_checksums_see_every_bit_and_every_place():
    state = make_state(0)
    reference = checksums(state)
    kernel = state.params["layer"]["kernel"]

    def changed(kernel):
        params = {"layer": state.params["layer"] | {"kernel": kernel}}
        found = checksums(state.replace(params=params))
        return {name for name in found if found[name] != reference[name]}

    assert changed(kernel) == set()
    draw = np.random.default_rng(0)
    for _ in range(32):
        bits = np.asarray(kernel).view(np.uint32).copy()
        i, j, bit = draw.integers(16), draw.integers(24), draw.integers(32)
        bits[i, j] ^= np.uint32(1 << bit)
        assert changed(jnp.asarray(bits.view(np.float32))) == {"params/layer/kernel"}
    swapped = kernel.at[0, 0].set(kernel[0, 1]).at[0, 1].set(kernel[0, 0])
    assert changed(swapped) == {"params/layer/kernel"}
    assert changed(kernel[::-1]) == {"params/layer/kernel"}
    zero = checksums({"x": jnp.zeros(3)})
    assert zero != checksums({"x": -jnp.zeros(3)})


def test_checksums_on_one_device_take_one_program_for_each_shape():
    """One program for all leaves took 1.2 CPU seconds longer at each start of the quickstart.

    On several devices programs that run at once can block each other, so there it is one.
    """
    state = {f"layer_{i}": {"kernel": jnp.ones((5, 7)), "bias": jnp.ones(7)} for i in range(6)}
    before = _checksum._cache_size()
    alone = checksums(state)
    assert len({*alone.values()}) == 2
    assert _checksum._cache_size() - before == 2
    mesh = make_mesh(replica=1, data=8, fsdp=1, tensor=1)
    assert checksums(jax.device_put(state, NamedSharding(mesh, P()))) == alone
    assert _checksum._cache_size() - before == 2


def test_checksums_and_restored_values_do_not_depend_on_the_mesh(directory):
    mesh = make_mesh(replica=1, data=2, fsdp=2, tensor=2)
    target = abstract(make_state(0), NamedSharding(mesh, P()))
    kernel = NamedSharding(mesh, P("fsdp", "tensor"))
    params = target.params["layer"]
    params["kernel"] = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=kernel)
    state, meta = restore.restore_newest(directory, target)
    assert meta["step"] == 2
    assert state.params["layer"]["kernel"].sharding == kernel
    assert checksums(state) == meta["checksums"]
    assert checksums(make_state(2)) == meta["checksums"]


def test_leaves_are_read_in_groups_the_largest_first_and_each_is_held_once(directory, monkeypatch):
    read, put, groups, copied, owned = restore._read_leaves, jax.device_put, [], [], set()

    def spy_on_put(x, *args, **kwargs):
        copied.extend([weakref.ref(x)] if isinstance(x, np.ndarray) else [])
        return put(x, *args, **kwargs)

    def spy_on_read(step_dir, target, names):
        groups.append(names)
        leaves = read(step_dir, target, names)
        owned.update(leaf.unsafe_buffer_pointer() for leaf in leaves.values())
        for _ in range(100):  # JAX copies in threads, and takes some instead of a copy
            alive = [x for x in (ref() for ref in copied) if x is not None]
            if all(x.ctypes.data in owned for x in alive):
                return leaves
            del alive
            time.sleep(0.05)
        raise AssertionError("a leaf is held twice")

    monkeypatch.setattr(restore, "_GROUP_BYTES", 100)
    monkeypatch.setattr(restore, "_read_leaves", spy_on_read)
    monkeypatch.setattr(jax, "device_put", spy_on_put)
    gc.disable()
    try:
        assert restored_step(directory) == 2
    finally:
        gc.enable()
    assert len(copied) == len(jax.tree.leaves(make_state(0)))
    kernels = ["opt_state/0/mu/layer/kernel", "params/layer/kernel"]
    assert sorted(name for [name] in groups[:2]) == kernels
    sizes = {name: leaf.nbytes for name, leaf in tree.flatten_names(make_state(0)).items()}
    assert max(sum(map(sizes.get, names)) for names in groups[2:]) <= sum(sizes.values()) // 16
    assert sorted(name for names in groups for name in names) == sorted(sizes)


def test_parameters_alone_can_be_restored(directory):
    target = {"params": abstract(make_state(0)).params}
    state, _ = restore.restore_newest(directory, target, partial=True)
    assert state.keys() == {"params"}
    np.testing.assert_array_equal(
        state["params"]["layer"]["kernel"], make_state(2).params["layer"]["kernel"]
    )


def test_a_state_with_other_leaves_is_refused_by_their_names(directory):
    target = abstract(make_state(2))
    more = target.replace(params=target.params | {"scale": target.params["layer"]["bias"]})
    with pytest.raises(InputError, match="leaf params/scale is missing"):
        restore.restore_newest(directory, more)
    fewer = target.replace(params={"layer": {"kernel": target.params["layer"]["kernel"]}})
    with pytest.raises(InputError, match="leaf params/layer/bias is not part of"):
        restore.restore_newest(directory, fewer)


def test_a_step_of_another_format_is_refused_and_none_before_it_is_taken(directory, monkeypatch):
    assert restore.read_meta(directory / "2")["format_version"] == restore.FORMAT_VERSION
    meta_of = restore.read_meta
    newer = {"format_version": restore.FORMAT_VERSION + 1}
    monkeypatch.setattr(
        restore, "read_meta", lambda step: meta_of(step) | (newer if step.name == "2" else {})
    )
    with pytest.raises(InputError, match="/checkpoints/2: format version 3;"):
        restore.restore_newest(directory, abstract(make_state(0)), move_aside=True)
    assert sorted(p.name for p in directory.iterdir()) == ["1", "2"]


def test_the_newest_and_the_multiples_of_keep_every_are_kept(tmp_path):
    """Even if no multiple of `checkpoint.every` is a multiple of `checkpoint.keep_every`."""
    every = {"checkpoint.every": 2, "checkpoint.keep_every": 5}
    timetable = Timetable({"duration": 16, **every})
    directory = epath.Path(tmp_path)
    checkpoints = checkpoint.Checkpoints(directory, keep_last=2, keep_every=timetable.keep_every)
    for step in range(1, 17):
        if timetable.saves(step):
            checkpoints.save(step, make_state(step), META)
    checkpoints.close()
    assert restore.saved_steps(directory) == [16, 15, 10, 5]


def test_another_order_of_data_is_refused(directory):
    assert restored_step(directory, fingerprint=META["data_fingerprint"]) == 2
    with pytest.raises(InputError, match="data set differs"):
        restored_step(directory, fingerprint="another")


def test_a_run_resumes_before_it_initialises_before_it_starts_anew(directory):
    params = {"layer/bias": np.arange(24, dtype=np.float32)}
    run = types.SimpleNamespace(
        workdir=directory.parent,
        settings=settings_of(base_config()),
        mesh=make_mesh(data=8, fsdp=1),
        fingerprint=META["data_fingerprint"],
        experiment=types.SimpleNamespace(
            abstract_state=abstract(make_state(0)), init=lambda: make_state(0)
        ),
        initial_params=params,
        initial_model_state={},
    )
    state, meta = start_state(run)
    assert int(state.step) == meta["step"] == 2
    directory.rmtree()
    state, meta = start_state(run)
    assert int(state.step) == 0 and not meta
    np.testing.assert_array_equal(state.params["layer"]["bias"], params["layer/bias"])
    run.initial_params = None
    state, meta = start_state(run)
    assert not meta and not np.any(state.params["layer"]["bias"])


def test_an_error_that_is_raised_too_is_not_logged_by_libraries(caplog):
    for name in ("absl", "asyncio"):
        logging.getLogger(name).error("saving failed", exc_info=OSError("full"))
        logging.getLogger(name).error("said once")
    assert caplog.messages == ["said once"] * 2
