"""Stored numbers of the twins, and the command that compares runs with them."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.devices import kernels
from vit_jax.errors import InputError
from vit_jax.experiment.layer_norms import norms_by_group
from vit_jax.insight import reference, trace, twins
from vit_jax.insight.reference import Departure, Reference
from vit_jax.insight.trace import Trace
from vit_jax.main import main
from vit_jax.models.dot_product import dot_product_attention
from vit_jax.objectives import supervised

TWIN = twins.TWINS["quickstart"]
MADE_WITH = {"config": TWIN.config, "overrides": TWIN.overrides}
STORED = Reference(
    MADE_WITH,
    {"loss": [2.0, 1.0], "param_norm/head/bias": [0.0, 0.5]},
    {"train/loss": {10: [1.0, 1.1, 0.9, 1.0, 1.0]}},
)


def test_first_steps_agree_to_a_thousandth():
    agreeing = Trace({"loss": [2.0019, 0.9991], "param_norm/head/bias": [5e-7, 0.5]}, {})
    assert reference.compare_first_steps(STORED, agreeing) == []
    off, where, step = reference.largest_difference(STORED, agreeing)
    assert (round(off, 6), where, step) == (0.00095, "loss", 1)

    left = Trace({"loss": [2.0, math.nan], "param_norm/head/bias": [0.0, 0.501]}, {})
    found = reference.compare_first_steps(STORED, left)
    assert [(d.step, d.name) for d in found] == [(2, "loss"), (2, "param_norm/head/bias")]
    assert str(found[1]).startswith("param_norm/head/bias is 0.501 (+0.20%), outside 0.4")

    renamed = Trace({"loss": [2.0, 1.0], "param_norm/head/b": [0.0, 0.5]}, {})
    texts = [str(d) for d in reference.compare_first_steps(STORED, renamed)]
    assert texts == ["param_norm/head/b has no stored values", "param_norm/head/bias is missing"]

    shorter = Trace({"loss": [2.0], "param_norm/head/bias": [0.0]}, {})  # of a shorter run
    found = reference.compare_first_steps(STORED, shorter)
    assert [(d.step, str(d)) for d in found] == [
        (2, "loss is missing"), (2, "param_norm/head/bias is missing")
    ]  # fmt: skip
    assert reference.largest_difference(STORED, shorter)[0] == 0


def test_the_band_is_the_prediction_interval_of_a_further_seed():
    values = [1.0, 1.1, 0.9, 1.0, 1.0]  # s = sqrt(0.02 / 4), t of 4 degrees at 0.9995 = 8.6103
    low, high = reference.band(values)
    half = 8.6103 * math.sqrt(0.005) * math.sqrt(1.2)
    assert (low, high) == pytest.approx((1 - half, 1 + half), rel=1e-4)
    assert reference.band([2.0] * 5) == pytest.approx((1.98, 2.02))
    inside, outside = (Trace({}, {"train/loss": {10: v}}) for v in (high - 1e-6, high + 1e-6))
    assert reference.compare_curve(STORED, inside) == []
    (left,) = reference.compare_curve(STORED, outside)
    assert left == Departure(10, "train/loss", high + 1e-6, low, high)


def test_norms_of_groups_are_those_of_parts_and_kinds_also_of_scanned_layers():
    params = {
        "encoder": {"layers": {"mlp": {"kernel": jnp.array([[3.0, 4.0], [6.0, 8.0]])}}},
        "head": {"kernel": jnp.array([[1.0]]), "bias": jnp.array([2.0])},
    }
    assert norms_by_group(params, trace.group_of) == {
        "encoder/layer_0/kernel": 5.0,
        "encoder/layer_1/kernel": 10.0,
        "head/kernel": 1.0,
        "head/bias": 2.0,
    }


def test_numbers_of_the_data_are_of_all_pictures_and_of_the_labels():
    views = np.array([[1, 3], [5, 7]], np.uint8)
    batch = {"global_views": views, "label": np.eye(3)[[2, 1]], "mask": np.ones(2)}
    assert trace._data_numbers(batch) == {"data/global_views": 4.0, "data/label": 1.5}


def test_stored_numbers_are_read_as_written_and_only_for_the_twin_they_are_of(tmp_path):
    reference.write(STORED, "quickstart", tmp_path)
    assert reference.read("quickstart", TWIN, tmp_path) == STORED
    other = TWIN._replace(overrides=TWIN.overrides | {"duration": "300 steps"})
    with pytest.raises(InputError, match="check --record quickstart"):
        reference.read("quickstart", other, tmp_path)
    with pytest.raises(InputError, match="no stored numbers"):
        reference.read("pretrain", TWIN, tmp_path)


def test_every_twin_is_valid_and_stored_numbers_are_of_its_settings():
    recorded = {path.stem for path in reference.FOLDER.iterdir()}
    assert "quickstart" in recorded and recorded <= twins.TWINS.keys()
    for twin in twins.TWINS.values():
        twins.twin_config(twin, 0)
    for name in recorded:
        stored = reference.read(name, twins.TWINS[name])
        steps = {len(values) for values in stored.first_steps.values()}
        assert steps == {trace.FIRST_STEPS}, name
        points = [values for curve in stored.curve.values() for values in curve.values()]
        assert {len(values) for values in points} == {len(reference.SEEDS)}, name


def test_command(monkeypatch, capsys):
    """The exit code and the step are those of the comparison; overrides reach the run."""
    asked = []

    def fake_trace(config, *, curve):
        asked.append(config)
        return Trace({"loss": [2.0] * 6 + [config.optimizer.peak_lr * 1000] * 14}, {})

    stored = Reference({}, {"loss": [2.0] * 6 + [1.5] * 14}, {})
    monkeypatch.setattr(reference, "read", lambda name, twin: stored)
    monkeypatch.setattr(trace, "trace_run", fake_trace)
    words = ["check", "quickstart", "--first_steps"]
    assert main(words) == 0
    assert "quickstart: first steps: inside 0.1%" in capsys.readouterr().out
    assert main([*words, "--config.optimizer.peak_lr=0.0045"]) == 1
    out = capsys.readouterr().out
    assert "LEFT at step 7, the first of 14 values" in out and "(+200.00%)" in out
    assert asked[0].mesh.platform == "cpu"

    monkeypatch.setattr(reference, "is_recorded", lambda name: name == "augreg")
    monkeypatch.setattr(trace, "trace_run", lambda config, *, curve: Trace({}, {}))
    assert main(["check", "--all", "--first_steps"]) == 1
    out, err = capsys.readouterr()
    assert "augreg: first steps: LEFT at step 1" in out and "loss is missing" in out
    assert "quickstart" not in out and "not recorded: quickstart, " in err

    assert main(["check", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "AugReg" in listed and "\nmasked_patches  masked patches: " in listed
    for words, said in (
        (["check"], "--list"),
        (["check", "quickstrt"], "quickstart"),
        (["check", "quickstart", "--record", "--config.seed=1"], "--record"),
        (["check", "cifar10", "--data_dir=/absent", "--first_steps", "--config.seed=x"], "seed"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def without_scale(q_BNHK, *others, **fields):
    return dot_product_attention(q_BNHK * q_BNHK.shape[-1] ** 0.5, *others, **fields)


def labels_of_the_next_row(labels, num_classes):
    return jax.nn.one_hot(jnp.roll(labels, 1), num_classes)


SABOTAGES = {
    "learning rate times 3": ({"optimizer.peak_lr": "0.009"}, ()),
    "no weight-decay mask": ({"optimizer.weight_decay_on": ".*"}, ()),
    "shifted labels": ({}, (supervised, "as_targets", labels_of_the_next_row)),
    "attention without its scale": (
        {},
        (kernels, "choose_attention", lambda platform: without_scale),
    ),
}


@pytest.mark.slow
def test_sabotages_leave_the_first_steps(monkeypatch, one_device):
    """Numbers of this process are compared with each other: the tests draw cheaper randomness."""
    twin = twins.TWINS["pretrain"]

    def first_steps(overrides=()):
        return trace.trace_run(twins.twin_config(twin, 0, overrides), curve=False)

    stored = Reference({}, first_steps().first_steps, {})
    assert reference.compare_first_steps(stored, first_steps()) == []
    for name, (overrides, patch) in SABOTAGES.items():
        with monkeypatch.context() as patched:
            if patch:
                patched.setattr(*patch)
            found = first_steps([*overrides.items()])
        assert reference.compare_first_steps(stored, found), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [*filter(reference.is_recorded, twins.TWINS)])
def test_twin(name, request):
    """Every twin still gives its stored numbers; .ci/full runs this."""
    words = []
    if twins.TWINS[name].data != "digits":
        words = [f"--data_dir={request.getfixturevalue('shared_data')}"]
    command = [sys.executable, "-m", "vit_jax.main", "check", name, *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert ended.returncode == 0, ended.stdout + ended.stderr
