"""Replays: flipped bits on virtual devices."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import prepare

from vit_jax import data
from vit_jax.checkpoints.replicas import DivergedError
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.devices.mesh import batch_sharding, make_mesh
from vit_jax.run.setup.validation import validate
from vit_jax.run.watch import replay
from vit_jax.run.watch.replay import inputs_program, replay_program
from vit_jax.run.watch.watchers import watched_step

QUICKSTART = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"
# With these, unlike 0.5, the end of the transform rounds.
IMAGENET = {"data.mean": "0.485,0.456,0.406", "data.std": "0.229,0.224,0.225"}


def prepare_run(workdir, **overrides):
    config = load_config(QUICKSTART)
    words = {"job.replay_every": "2 steps", "global_batch_size": "16", **IMAGENET, **overrides}
    validate(config, apply_overrides(config, list(words.items())), "config")
    return prepare(config, workdir)


def take_steps(run, number=2):
    """The numbers of the steps that were not stopped by a replay."""
    done = []
    with jax.set_mesh(run.mesh):
        state = run.experiment.init()  # with a head of zeros, which passes no gradients
        state = state.replace(params=jax.tree.map(lambda p: p + 0.01, state.params))
        batches = data.train_batches(
            run.train_source, run.experiment.batch, steps=range(number), seed=0,
            sharding=batch_sharding(run.mesh), data_order=run.order,
        )  # fmt: skip
        train_step = lambda *args: (args[0], {"loss": np.float32(0)})  # noqa: E731
        step = watched_step(run, lambda number: train_step, (), 1)
        for i, batch in enumerate(batches, 1):
            step(i, state, batch)
            done.append(i)
    return done


@pytest.mark.parametrize(
    ("what", "mesh", "pairs", "fewest"),
    [
        (None, "", [], 0),
        # The parameter stays where it is: device 3 computes its own rows and those of device 2.
        ("weight", "", [[2, 3], [3, 4]], 5),
        pytest.param("activation", "", [[3, 4]], 5, marks=pytest.mark.slow),
        pytest.param("gradient", "", [[3, 4]], 1, marks=pytest.mark.slow),
        # A place is a group of two devices; devices 2 and 3 are the second.
        pytest.param("activation", "fsdp", [[2, 3, 4, 5]], 5, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_caught_and_its_device_named(what, mesh, pairs, fewest, tmp_path):
    words = {"mesh.fsdp": "2"} if mesh else {}
    if what is None:
        assert take_steps(prepare_run(tmp_path)) == [1, 2]
        assert not (tmp_path / "replay").exists()
        return
    words["job.inject"] = f"flip:{what}:device=3:step=2"
    with pytest.raises(DivergedError, match=r"^step 2: a gradient computed twice differs") as error:
        take_steps(prepare_run(tmp_path, **words))
    evidence = json.loads((tmp_path / "replay/2.json").read_text())
    found = [
        [int(word.split()[1]) for group in difference["devices"] for word in group.split(", ")]
        for difference in evidence["differences"]
    ]
    assert found == pairs
    for difference in evidence["differences"]:
        leaves = difference["leaves"]
        assert len(leaves) >= fewest and (fewest > 1 or len(leaves) == 1)
        assert all(len({*leaf["checksums"]}) == 2 for leaf in leaves.values())
    is_named = "device 3 of process 0 takes part in all of them" in str(error.value)
    assert is_named == (len(pairs) > 1)


def test_other_steps_are_not_replayed_and_one_group_of_devices_is_said(tmp_path, caplog):
    words = {"job.inject": "flip:weight:device=3:step=1", "mesh.fsdp": "8"}
    assert take_steps(prepare_run(tmp_path, **words), number=1) == [1]
    assert "the same devices compute both gradients" in caplog.text


def test_without_a_fixed_order_of_sums_norms_are_compared(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(replay, "has_fixed_order", lambda run: False)
    monkeypatch.setattr(replay, "flip_bit", lambda x, where: jnp.where(where, 1e20, 1.0) * x)
    with pytest.raises(DivergedError, match=r"device 3 of process 0 and device 4 of process 0"):
        take_steps(prepare_run(tmp_path, **{"job.inject": "flip:gradient:device=3:step=2"}))
    assert "to compare bits, set --config.mesh.deterministic=true" in caplog.text


def test_rounding_is_no_difference():
    mesh = make_mesh(replica=1, data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    sums = {name: np.array([1, 2], np.uint32) for name in ("loss", "kernel", "bias")}
    other = {name: np.array([3, 4], np.uint32) for name in sums}

    def found(bias, kernel=1.0):
        norms = {"loss": np.ones(2), "kernel": np.ones(2), "bias": np.full(2, 1e-5)}
        turned = norms | {"kernel": np.full(2, kernel), "bias": np.full(2, bias)}
        return replay.find_differences(mesh, (sums, norms), (other, turned), by_bits=False)

    assert found(bias=3e-5, kernel=1.005) == []
    for given, leaf in [({"bias": 1e-3}, "bias"), ({"bias": 0.0, "kernel": np.nan}, "kernel")]:
        assert [[*place["leaves"]] for place in found(**given)] == [[leaf], [leaf]]


def test_the_program_of_a_replay_does_not_make_what_it_moves(tmp_path):
    """Otherwise XLA may round the rows that stay and those that move in different ways."""
    run = prepare_run(tmp_path)
    e, turned = run.experiment, jax.ShapeDtypeStruct((), bool)
    with jax.set_mesh(run.mesh):
        made = jax.eval_shape(inputs_program(e, run.mesh), *e.arguments)
        traced = replay_program(e, run.mesh).trace(e.abstract_state, *made, turned)
        program = traced.jaxpr.jaxpr
    (by_place,) = [eqn for eqn in program.eqns if eqn.primitive.name == "shard_map"]
    assert {*by_place.invars} <= {*program.invars, *program.constvars}
