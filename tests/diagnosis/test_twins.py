"""Stored numbers of the twins, and the command that compares runs with them."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import InputError
from vit_jax.devices import kernels
from vit_jax.diagnosis import trace, twins
from vit_jax.diagnosis.twins import Departure, Twin
from vit_jax.main import main
from vit_jax.models.dot_product import dot_product_attention
from vit_jax.objectives import losses
from vit_jax.run.watch.layer_norms import norms_by_group

STORED = Twin(
    "supervised ViT",
    "quickstart",
    {"duration": "200 steps"},
    {"jax": "0.10.2"},
    {"loss": [2.0, 1.0], "param_norm/head/bias": [0.0, 0.5]},
    {"train/loss at 10": [1.0, 1.1, 0.9, 1.0, 1.0]},
)


def places(**values):
    """{(step, name): value} of {name: values by step}."""
    return {(i + 1, name): x for name, found in values.items() for i, x in enumerate(found)}


def test_first_steps_agree_to_a_thousandth():
    limits = twins.first_limits(STORED)
    bias = "param_norm/head/bias"
    agreeing = places(**{"loss": [2.0019, 0.9991], bias: [5e-7, 0.5]})
    assert twins.find_departures(limits, agreeing) == []

    left = twins.find_departures(limits, places(**{"loss": [2.0, math.nan], bias: [0.0, 0.501]}))
    assert [(d.step, d.name) for d in left] == [(2, "loss"), (2, bias)]
    assert str(left[1]).startswith(f"{bias} is 0.501 (+0.20%), outside 0.4")

    renamed = twins.find_departures(limits, places(**{"loss": [2.0, 1.0], "b": [0.0, 0.5]}))
    assert [(d.step, d.name, d.value is None) for d in renamed] == [
        (1, "b", False), (1, bias, True), (2, "b", False), (2, bias, True)
    ]  # fmt: skip
    assert str(renamed[0]) == "b has no stored values" and str(renamed[1]) == f"{bias} is missing"

    shorter = places(**{"loss": [2.0], bias: [0.0]})  # of a shorter run
    left = twins.find_departures(limits, shorter)
    assert [(d.step, d.name, d.value) for d in left] == [(2, "loss", None), (2, bias, None)]


def test_the_band_is_the_prediction_interval_of_a_further_seed():
    values = [1.0, 1.1, 0.9, 1.0, 1.0]  # s = sqrt(0.02 / 4), t of 4 degrees at 0.9995 = 8.6103
    low, high = twins.band(values)
    half = 8.6103 * math.sqrt(0.005) * math.sqrt(1.2)
    assert (low, high) == pytest.approx((1 - half, 1 + half), rel=1e-4)
    assert twins.band([2.0] * 5) == pytest.approx((1.98, 2.02))
    limits, place = twins.curve_limits(STORED), (10, "train/loss")
    assert twins.find_departures(limits, {place: high - 1e-6}) == []
    (left,) = twins.find_departures(limits, {place: high + 1e-6})
    assert left == Departure(*place, high + 1e-6, low, high)


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


def test_numbers_of_the_data_are_of_all_images_and_of_the_labels():
    views = np.array([[1, 3], [5, 7]], np.uint8)
    batch = {"global_views": views, "label": np.eye(3)[[2, 1]], "mask": np.ones(2)}
    assert trace._data_numbers(batch) == {"data/global_views": 4.0, "data/label": 1.5}


def test_a_twin_is_read_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    twins.write_twin(STORED, "quickstart")
    assert twins.read_twin("quickstart") == STORED
    with pytest.raises(InputError, match="quickstart"):
        twins.read_twin("quickstrt")


def test_every_twin_is_valid_and_has_its_numbers():
    for name in twins.twin_names():
        twin = twins.read_twin(name)
        twins.twin_settings(twin, 0)
        assert {len(values) for values in twin.first_steps.values()} == {trace.FIRST_STEPS}, name
        assert {len(values) for values in twin.curve.values()} == {len(twins.SEEDS)}, name


def test_command(monkeypatch, capsys, tmp_path):
    """The exit code and the step are those of the comparison; overrides reach the run."""
    asked = []

    def fake_trace(configs, *, curve):
        asked.extend(configs)
        after = configs[0].optimizer.peak_lr * 1000
        return trace.Trace(places(loss=[2.0] * 6 + [after] * 14), {})

    quickstart = twins.read_twin("quickstart")
    stored = quickstart._replace(first_steps={"loss": [2.0] * 6 + [1.5] * 14})
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    monkeypatch.setattr(trace, "trace_runs", fake_trace)
    twins.write_twin(stored, "quickstart")
    words = ["check", "quickstart", "--first_steps"]
    assert main(words) == 0
    assert "quickstart: first steps: inside 0.1%" in capsys.readouterr().out
    assert main([*words, "--config.optimizer.peak_lr=0.0045"]) == 1
    out = capsys.readouterr().out
    assert "LEFT at step 7, the first of 14 values" in out and "(+200.00%)" in out
    assert asked[0].mesh.platform == "cpu"
    # A twin without numbers is a fault; the others still run.
    twins.write_twin(quickstart._replace(first_steps={}), "new")
    assert main(["check", "--all", "--first_steps"]) == 2
    out, err = capsys.readouterr()
    assert "quickstart: first steps: inside" in out and "--record new" in err

    assert main(["check", "--list"]) == 0
    assert capsys.readouterr().out.startswith("new         supervised ViT (quickstart)\n")


def without_scale(q_BNHK, *others, **fields):
    return dot_product_attention(q_BNHK * q_BNHK.shape[-1] ** 0.5, *others, **fields)


def labels_of_the_next_row(labels, num_classes):
    return jax.nn.one_hot(jnp.roll(labels, 1), num_classes)


SABOTAGES = {
    "learning rate times 3": ({"optimizer.peak_lr": "0.009"}, ()),
    "no weight-decay mask": ({"optimizer.weight_decay_on": ".*"}, ()),
    "shifted labels": ({}, (losses, "as_targets", labels_of_the_next_row)),
    "attention without its scale": (
        {},
        (kernels, "choose_attention", lambda platform: without_scale),
    ),
}


@pytest.mark.slow
def test_sabotages_leave_the_first_steps(monkeypatch, one_device):
    """Numbers of this process are compared with each other: the tests draw cheaper randomness."""
    twin = twins.read_twin("pretrain")

    def first_steps(overrides=()):
        asked = twins.twin_settings(twin, 0, overrides)
        return trace.trace_runs([asked], curve=False).first_steps

    # As limits, the numbers of one run: {name: its values at the steps in order}.
    values: dict[str, list[float]] = {}
    for (_, name), value in first_steps().items():
        values.setdefault(name, []).append(value)
    limits = twins.first_limits(twin._replace(first_steps=values))
    assert twins.find_departures(limits, first_steps()) == []
    for name, (overrides, patch) in SABOTAGES.items():
        with monkeypatch.context() as patched:
            if patch:
                patched.setattr(*patch)
            found = first_steps([*overrides.items()])
        assert twins.find_departures(limits, found), name


@pytest.mark.slow
@pytest.mark.parametrize("name", twins.twin_names())
def test_twin(name, request):
    """Every twin still gives its stored numbers; .ci/full runs this."""
    words = []
    if twins.read_twin(name).data != "digits":
        words = [f"--data_dir={request.getfixturevalue('shared_data')}"]
    command = [sys.executable, "-m", "vit_jax.main", "check", name, *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert ended.returncode == 0, ended.stdout + ended.stderr
