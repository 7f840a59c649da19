"""Spikes: the rule by hand, and runs with a poisoned batch."""

import functools
import io
import json
import math
import pathlib
import re
import shlex
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import train_and_evaluate
from etils import epath
from finished_run import check_same_end, final_state, rows
from PIL import Image
from read_settings import settings_of

from vit_jax.base.pictures import Pictures
from vit_jax.checkpoints.history import read_history
from vit_jax.config import Settings
from vit_jax.config.sizes import make_stages
from vit_jax.config.stored import read_stored
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.experiment.schedules import schedule_of
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_inputs
from vit_jax.main import main
from vit_jax.models.patches import row_keys
from vit_jax.objectives.contract import Objective, ObjectiveOutput, Term
from vit_jax.objectives.forward import apply_in_training
from vit_jax.run import loop
from vit_jax.run.setup.branch import branch
from vit_jax.run.watch import ledger, spikes
from vit_jax.run.watch.guards import NonFiniteError
from vit_jax.run.watch.row_losses import make_row_losses

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")
ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.py") + ":debug"
POISONED = 27  # the step, in the second epoch


def make_config(rule, **overrides):
    """40 steps, rows each 5, saves each 10."""
    config = load_config(QUICKSTART)
    words = {"optimizer.on_spike": rule, "evals.test": "None", **overrides}
    assert not apply_overrides(config, list(words.items()))
    return config


def poisoned(loss, step=POISONED):
    """In the place of `compile_step`: the update of a batch with one record is `loss`."""

    def compiled(run):
        size = run.settings.run.global_batch_size
        record = int(np.asarray(run.order(np.arange(step * size - 1, step * size)))[0])

        @jax.jit
        def train_step(state, batch):
            mean = batch["id"].mean() / 1e4
            found = jnp.where((batch["id"] == record).any() & (state.step > 22), loss, 1 + mean)
            moved = found * state.opt_state.get("lowered_rate", 1.0)
            params = jax.tree.map(lambda p: p + moved, state.params)
            state = state.replace(step=state.step + 1, params=params)
            return state, {"loss": found, "grad_norm": mean, "masked": jnp.float32(0)}

        return train_step

    return compiled


def test_the_limit_by_hand():
    assert spikes.limit([1.0] * 19) == math.inf
    assert spikes.limit([2.0] * 20) == pytest.approx(2 + 8 * 0.02 * 2)
    # The median is 1.5; half of the values lie within 0.5 of it.
    assert spikes.limit([1.0, 2.0] * 15) == pytest.approx(1.5 + 8 * 1.4826 * 0.5)


@pytest.mark.parametrize(
    ("rule", "loss"), [("lower", "nan"), pytest.param("skip", "50", marks=pytest.mark.slow)]
)
def test_a_poisoned_batch_is_left_out_whenever_the_run_was_killed(
    rule, loss, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "compile_step", poisoned(float(loss)))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = train_and_evaluate(make_config(rule), whole)
    assert summary["step"] == 40
    (row,) = [row for row in rows(whole) if "train/spike_loss" in row]
    assert row["step"] == POISONED
    assert row["train/spike_loss"] == (None if loss == "nan" else 50)
    step, state = final_state(whole)
    assert step == state["step"] == 40 and np.isfinite(state["params/head/bias"]).all()
    rates = {row["step"]: row["train/lr"] for row in rows(whole) if "train/lr" in row}
    plain = schedule_of(Settings.read(read_stored(whole).resolved))
    lowered = 0.5 if rule == "lower" else 1.0
    assert rates[25] == pytest.approx(float(plain(24)))
    assert rates[30] == pytest.approx(lowered * float(plain(29)))
    if rule == "lower":
        assert state["opt_state/lowered_rate"] == 0.5

    assert ledger.add_up(read_history(whole))["lost"] > 0

    evidence = json.loads((whole / f"spikes/{POISONED}.json").read_text())
    assert len(evidence["rows"]["id"]) == len(evidence["losses"]) == 64
    assert np.isfinite(evidence["losses"]).all() and "grad_norm/head" in evidence["norms"]
    assert evidence["losses"][evidence["shown"][0]] == max(evidence["losses"])
    image = Image.open(io.BytesIO((whole / f"spikes/{POISONED}.png").read_bytes()))
    assert image.size == (64, 64)  # 8 x 8 digits of 8 x 8 pixels

    branch(whole / "checkpoints/30", tmp_path / "branch", "constant")
    now = read_stored(tmp_path / "branch").resolved
    first = lowered * float(schedule_of(settings_of(now))(30))
    assert first == pytest.approx(now.optimizer.peak_lr) == pytest.approx(rates[30])
    assert now.schedule.lowered == lowered

    class KilledError(Exception):
        pass

    # Once before the spike, whose window is saved at step 20, and once after it.
    for until in (25, 35):

        def kill(step, *_, until=until):
            if step == until:
                raise KilledError

        with pytest.raises(KilledError):
            train_and_evaluate(make_config(rule), killed, callbacks=[kill])
    train_and_evaluate(make_config(rule), killed)
    check_same_end(killed, whole)


def test_without_a_rule_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "compile_step", poisoned(float("nan")))
    with pytest.raises(NonFiniteError, match=f"^step {POISONED}: loss is nan"):
        train_and_evaluate(make_config("None"), tmp_path)


def test_objectives_that_couple_rows_have_no_loss_by_row():
    class Coupled:
        couples_rows = True

    batch = {"image": np.zeros((3, 2, 2, 3), np.uint8), "id": np.arange(3), "mask": np.ones(3)}
    found = make_row_losses(Coupled, lambda batch, keys: batch, 0)(TrainState(0, {}, {}, {}), batch)
    assert np.isnan(found["loss"]).all() and found["rows"].tolist() == [0, 1, 2]


class Normed(nn.Module):
    """Differences from the mean of the batch."""

    has_batch_statistics = True

    def __call__(self, x_B, *, train, mask):
        return x_B - (mask * x_B).sum() / mask.sum()


def loss_of_batch(params, state, batch, frozen, rng, *, factor=lambda mask: mask):
    """Has batch statistics, draws for each row, and a second term."""
    x_B, _ = apply_in_training(Normed(), params, {}, batch, rng)
    draw_B = jax.vmap(jax.random.uniform)(row_keys(rng, len(x_B)))
    loss_B, factor_B, weight = x_B**2 + draw_B, factor(batch["mask"]), batch["mask"].sum()
    further = Term((factor_B * batch["image"]).sum(), weight, 0.5)
    return ObjectiveOutput((factor_B * loss_B).sum(), weight, {}, {}, {"further": further})


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_losses_by_row_are_those_of_the_step(accum_steps):
    images, mask = jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1.0, 1.0, 0.0, 1.0])
    batch = {"image": images[:, None, None, None], "id": jnp.arange(4), "mask": mask}
    state = TrainState(jnp.int32(0), {}, {}, {})

    def transform(batch, keys):
        return batch | {"image": batch["image"].reshape(-1)}

    _, key = make_inputs(transform, 0)(state, batch)

    def losses_by(factor):
        objective = Objective(functools.partial(loss_of_batch, factor=factor))
        program = make_row_losses(objective, transform, 0, accum_steps=accum_steps)
        return program(state, batch)["loss"]

    expected = np.zeros(4)
    for i in range(accum_steps):
        rows = np.arange(i, 4, accum_steps)
        of_part = key if accum_steps == 1 else jax.random.fold_in(key, i)
        draws = jax.vmap(jax.random.uniform)(row_keys(of_part, len(rows)))
        x = images[rows] - np.average(images[rows], weights=mask[rows])
        expected[rows] = mask[rows] * (x**2 + draws + 0.5 * images[rows])
    np.testing.assert_allclose(losses_by(lambda mask: mask), expected, rtol=1e-5)
    assert np.isnan(losses_by(lambda mask: 1.0 * (mask > 0))).all()  # not its mean


@pytest.mark.parametrize("key", ["features", "image"])
def test_features_and_pictures_in_their_own_shape_have_losses_but_no_png(key):
    x = jnp.arange(4.0)
    pictures = Pictures(x[:, None, None, None, None], jnp.ones((4, 2), jnp.int32))
    batch = {"features": x[:, None]} if key == "features" else {"image": pictures}
    batch |= {"id": jnp.arange(4), "mask": jnp.ones(4)}

    def loss(params, state, batch, frozen, rng):
        (array, *_) = jax.tree.leaves(batch[key])
        sums = (batch["mask"] * array.reshape(4)).sum()
        return ObjectiveOutput(sums, batch["mask"].sum(), {}, {}, {})

    state = TrainState(jnp.int32(0), {}, {}, {})
    found = make_row_losses(Objective(loss), lambda batch, keys: batch, 0)(state, batch)
    assert [*found] == ["id", "mask", "loss", "rows"]
    np.testing.assert_allclose(found["loss"], x, rtol=1e-6)


def spikes_of(sizes, starts):
    """Of a run of 100 steps with stages of these sizes of images."""
    settings = settings_of(make_config("skip"))
    vars(settings)["stages"] = make_stages(sizes, starts, [8] * len(sizes), 100, None)
    run = types.SimpleNamespace(settings=settings, workdir=epath.Path("runs/a"))
    found = spikes.Spikes(run, (), {})
    found._kept = 0, None
    return found


def test_a_stage_begins_with_no_good_steps():
    """The loss of larger images, or of all patches, is no spike beside those of smaller ones."""

    found = spikes_of([(4, 4), (8, 8)], [0, 30])
    steps = [(n, {"loss": 1.0 if n <= 30 else 5.0, "grad_norm": 1.0}) for n in range(1, 61)]
    assert found.find(steps) is None
    assert found.find([(61, {"loss": 9.0, "grad_norm": 1.0})]) == 61


def test_spikes_that_follow_each_other_end_the_run():
    found = spikes_of([(8, 8)], [0])
    bad = {"loss": math.nan, "grad_norm": 1.0}
    for step in range(1, 11):
        assert found.find([(step, bad)]) == step
    with pytest.raises(NonFiniteError, match="11 spikes in 100 steps"):
        found.find([(11, bad)])
    assert found.find([(step, bad) for step in range(1, 11)]) is None  # decided already


@pytest.mark.slow  # 20 s
def test_the_documented_command_shows_a_spike(tmp_path, capsys):
    text = (ROOT / "docs/how_to/trust.md").read_text().replace("\\\n", "")
    (command,) = re.findall("^vit_jax (.*runs/spike.*)$", text, re.MULTILINE)
    words = shlex.split(command.replace("runs/spike", str(tmp_path)))
    assert main(words) == 0
    assert [*(tmp_path / "spikes").glob("*.json")] and "a spike: loss" in capsys.readouterr().out
