"""A checkpoint from any number of devices and processes can be resumed with any other."""

import functools
import json
import os
import subprocess
import sys

import asked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from cheap_compilation import flags_for
from etils import epath
from finished_run import check_same_arrays, final_state, rows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from started_job import ROOT, Job, said_by_two

import vit_jax
from vit_jax.checkpoints import checkpoint
from vit_jax.config.stored import read_config
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.inference import evaluate
from vit_jax.main import main
from vit_jax.run import loop
from vit_jax.run.setup import opener


def train_on(workdir, devices, *, until=None, **mesh):
    """Train in this process on some of its devices; save and stop after step `until`."""
    config = load_config("configs/quickstart.py:debug")
    # Adam's usual eps would amplify the noise of gradients that are exactly zero in theory.
    overrides = {"optimizer.eps": "1e-3", "optimizer.ema_decay": "0.9"}
    overrides |= {f"mesh.{axis}": str(size) for axis, size in mesh.items()}
    assert apply_overrides(config, list(overrides.items())) == []
    with asked.meshes_on(jax.devices()[:devices]) as patch:
        patch.chdir(ROOT)
        patch.setattr(loop.PreemptionGuard, "should_stop", lambda self, step: step == until)
        if until is None:
            asked.train_and_evaluate(config, workdir)
        else:
            with pytest.raises(loop.Preempted, match=f"step {until}"):
                asked.train_and_evaluate(config, workdir)


@pytest.mark.slow
def test_a_run_goes_on_over_other_devices_meshes_and_processes(tmp_path):
    unbroken, moved = tmp_path / "unbroken", tmp_path / "moved"
    train_on(unbroken, 8, fsdp=8)
    train_on(moved, 8, until=8, fsdp=8)
    train_on(moved, 4, until=15, fsdp=2, tensor=2)
    train_on(moved, 1, until=25)
    words = (
        "--config=configs/quickstart.py:debug", f"--workdir={moved}", "--config.mesh.fsdp=4",
        "--config.optimizer.eps=1e-3", "--config.optimizer.ema_decay=0.9",
    )  # fmt: skip
    with Job(tmp_path, *words, devices=4) as job:
        assert job.codes() == [0, 0], job.everything()
        assert "start: resumed at step 25" in job.said(0)

    (step, found), (last, expected) = final_state(moved), final_state(unbroken)
    assert step == last == 40
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
    by_step = {row["step"]: row for row in rows(moved) if "train/loss" in row}
    wanted = {row["step"]: row for row in rows(unbroken) if "train/loss" in row}
    assert list(by_step) == list(wanted) == list(range(5, 41, 5))
    for step, row in wanted.items():
        for name, value in row.items():
            assert by_step[step][name] == pytest.approx(value, rel=1e-3), (step, name)


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["true", "false"])
def test_processes_begin_with_the_weights_of_a_run(tmp_path, scan):
    """Each reads its part, also of layers that only one of the two runs scans."""
    words = ["--config=configs/quickstart.py:debug", "--config.duration=1 steps",
             "--config.schedule.warmup=0 steps"]  # fmt: skip
    assert main([*words, f"--workdir={tmp_path / 'source'}", "--config.model.scan=true"]) == 0
    words += [f"--workdir={tmp_path / 'tuned'}", f"--config.init_from={tmp_path / 'source'}",
              "--config.init_head=kept", "--config.optimizer.peak_lr=0", "--config.mesh.fsdp=8",
              f"--config.model.scan={scan}"]  # fmt: skip
    with Job(tmp_path, *words, devices=4) as job:
        assert job.codes(timeout_s=600) == [0, 0], job.everything()
    found, expected = (vit_jax.load_pretrained(tmp_path / name)[1] for name in ("tuned", "source"))
    check_same_arrays(found, expected)


@pytest.mark.usefixtures("without_checks")
def test_what_auto_chose_for_its_devices_goes_on_on_others(tmp_path, monkeypatch):
    """It is evaluated and resumed with a mesh of their own, unless the user sets one."""
    config = load_config("quickstart:debug")
    own = {"duration": "1 steps", "schedule.warmup": "0 steps", "global_batch_size": "8",
           "model.depth": "1", "evals.test.batch_size": "360"}  # fmt: skip
    assert apply_overrides(config, list(own.items())) == []
    monkeypatch.setattr(loop, "compile_step", asked.count_steps())
    split, found = {"mesh.data": -1, "mesh.fsdp": 2}, []

    def on(devices):
        make = functools.partial(make_mesh, devices=jax.devices()[:devices])
        monkeypatch.setattr(opener, "make_mesh", make)
        monkeypatch.setattr(evaluate, "make_mesh", make)
        monkeypatch.setattr(jax, "device_count", lambda: devices)

    def made(settings, mesh, *args):
        found.append((mesh.size, mesh.shape["fsdp"]))
        return make_experiment(settings, mesh, *args)

    monkeypatch.setattr(evaluate, "make_experiment", made)
    on(2)
    asked.train_and_evaluate(config, tmp_path, choose_layout=lambda s, mesh: s.with_values(split))
    assert read_config(epath.Path(tmp_path)).mesh.fsdp == 2
    scores = vit_jax.evaluate(tmp_path)
    on(1)
    assert vit_jax.evaluate(tmp_path)["test/loss"] == pytest.approx(scores["test/loss"], rel=1e-5)
    assert found == [(2, 2), (1, 1)]
    assert asked.prepare(config, tmp_path).mesh.size == 1
    with at_fault("mesh.replica"):
        vit_jax.evaluate(tmp_path, overrides={"mesh.fsdp": 2})


RESTORE = """
import json, sys
import asked
import jax
import jax.numpy as jnp
import tensorstore
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec as P
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.devices.mesh import make_mesh

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
directory, shapes = sys.argv[3], json.loads(sys.argv[4])
mesh = make_mesh(replica=1, data=1, fsdp=8, tensor=1)
target = {
    name: {
        key: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
        for key, (shape, spec) in leaves.items()
    }
    for name, leaves in shapes.items()
}


def bytes_read():
    metric = "/tensorstore/kvstore/file/bytes_read"
    found = tensorstore.experimental_collect_matching_metrics(metric)
    return found[0]["values"][0]["value"] if found else 0


before = bytes_read()
state, _ = restore.restore_newest(epath.Path(directory), target, partial=True)
shards = sum(s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
print(json.dumps({"shards": shards, "read": bytes_read() - before}))
"""


@pytest.mark.slow
def test_each_process_reads_its_part_of_the_parameters_alone(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {
        "up": ((2, 256, 2048), (None, "fsdp")),
        "down": ((2, 2048, 256), (None, None, "fsdp")),
        "out": ((512, 1024), (None, "fsdp")),
    }
    params = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, (s, _) in shapes.items()}
    state = {"params": params, "opt_state": jax.tree.map(jnp.sin, params)}
    with_devices = NamedSharding(make_mesh(replica=1, data=1, fsdp=1, tensor=1,
                                           devices=jax.devices()[:1]), P())  # fmt: skip
    checkpoints = checkpoint.Checkpoints(epath.Path(tmp_path), keep_last=2, keep_every=None)
    checkpoints.save(1, jax.device_put(state, with_devices), {"data_fingerprint": ""})
    checkpoints.close()

    for output in said_by_two(RESTORE, tmp_path, json.dumps({"params": shapes}), devices=4):
        numbers = json.loads(output.splitlines()[-1])  # gloo prints first
        assert numbers["shards"] == sum(x.nbytes for x in params.values()) / 2
        # Compression saves 7 % of random float32 values.
        assert 0.8 * numbers["shards"] < numbers["read"] < 1.2 * numbers["shards"]


MEMORY = """
import json, pathlib, sys, threading, time
import asked
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec as P
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.devices.mesh import make_mesh


def resident():
    return 4096 * int(pathlib.Path("/proc/self/statm").read_text().split()[1])


def growth(work):
    before, peak, done = resident(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    return result, peak - before


directory = epath.Path(sys.argv[1])
mesh = make_mesh(replica=1, data=1, fsdp=8, tensor=1)
sharding = NamedSharding(mesh, P(None, "fsdp"))
make = jax.jit(
    lambda key: {str(i): jax.random.normal(jax.random.fold_in(key, i), (8, 1024, 1024))
                 for i in range(16)},
    out_shardings=sharding,
)
state = jax.block_until_ready(make(jax.random.key(0)))
size = sum(leaf.nbytes for leaf in state.values())
target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
)
checkpoints = checkpoint.Checkpoints(directory, keep_last=2, keep_every=None)


def save(step):
    checkpoints.save(step, state, {"data_fingerprint": ""})
    checkpoints.wait()


save(1)  # what is compiled and imported at the first save stays
_, saving = growth(lambda: save(2))
checkpoints.close()
del state


def read():
    return jax.block_until_ready(restore.restore_newest(directory, target))


read()
_, restoring = growth(read)
print(json.dumps({"saving": saving / size, "restoring": restoring / size}))
"""


@pytest.mark.slow
def test_saving_holds_one_copy_more_and_restoring_no_more_than_two(tmp_path):
    job = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "checkpoints"],
        env=os.environ | {"XLA_FLAGS": flags_for(8), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    copies = json.loads(job.stdout.splitlines()[-1])
    print(copies)
    assert copies["saving"] < 1.15
    assert copies["restoring"] < 2.0
