"""Which device a number that is not finite comes from."""

import functools
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from asked import count_steps, train_and_evaluate

from vit_jax.checkpoints.replicas import DivergedError
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.run import loop
from vit_jax.run.watch import blame
from vit_jax.run.watch.guards import NonFiniteError
from vit_jax.run.watch.replay import name_places

pytestmark = pytest.mark.usefixtures("never_with_checks", "experiments_made_once")
QUICKSTART = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


@pytest.mark.parametrize(
    ("own", "turned", "says", "is_device"),
    [
        ([], [], "All devices get finite numbers", False),
        ([2], [2], "device 2 of process 0 is the only one that gets numbers", True),
        ([2], [], "device 2 of process 0 is the only one", True),
        ([], [1], "device 1 of process 0 is the only one", True),
        ([2], [3], "The rows of device 2 of process 0 cause it on another device too", False),
        ([3], [0], "The rows of device 3", False),
        ([2], [1], "Several devices", False),
        ([0, 1, 2, 3], [0, 1, 2, 3], "Several devices", False),
    ],
)
def test_what_moves_with_the_rows_and_what_stays(own, turned, says, is_device):
    mesh = make_mesh(replica=1, data=4, fsdp=1, tensor=1, devices=jax.devices()[:4])
    places = name_places(mesh)

    def norms(bad):
        values = np.ones(4)
        values[bad] = np.nan
        return {"loss": np.ones(4), "kernel": values}

    said, found = blame.judge(places, norms(own), norms(turned))
    assert said.startswith(says) and found == is_device


def restore_with_nan(restore_step, path, abstract_state):
    """As `restore_step`, but the copies of the parameters on device 3 are not finite."""
    state, meta = restore_step(path, abstract_state)

    def damage(leaf):
        shards = [
            jax.device_put(np.full(shard.data.shape, np.nan, leaf.dtype), shard.device)
            if shard.device.id == 3
            else shard.data
            for shard in leaf.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return state.replace(params=jax.tree.map(damage, state.params)), meta


@pytest.mark.parametrize("device", [None, 3])
def test_a_run_names_the_device(tmp_path, monkeypatch, device):
    poisoned = count_steps(lambda step: math.nan if step == 6 else 1.0)
    monkeypatch.setattr(loop, "compile_step", poisoned)
    if device is not None:
        bad = functools.partial(restore_with_nan, blame.restore.restore_step)
        monkeypatch.setattr(blame.restore, "restore_step", bad)
    config = load_config(QUICKSTART)
    words = {"duration": "8 steps", "evals.test": "None", "checkpoint.every": "5 steps"}
    assert not apply_overrides(config, list(words.items()))
    kind = NonFiniteError if device is None else DivergedError
    with pytest.raises(kind, match=r"^step 7: loss is nan; ") as error:
        train_and_evaluate(config, tmp_path)
    assert "--config.job.replay_every='1 steps'" in str(error.value)
    path = tmp_path / "diverged.json"
    if device is None:
        assert json.loads(path.read_text())["error"] == str(error.value)
        assert "All devices get finite numbers for it from the last save" in str(error.value)
    else:
        assert not path.exists()
        assert "device 3 of process 0 is the only one that gets numbers" in str(error.value)
        assert "The last save, of step 5, is good" in str(error.value)
