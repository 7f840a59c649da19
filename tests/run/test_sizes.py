"""Runs with a schedule of image sizes."""

import json

import jax
import numpy as np
import optax
import pytest
from asked import count_steps, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath
from finished_run import check_same_end, final_state, rows

from vit_jax.config.stored import read_config
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.run import loop
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.watch.blame import compute_again

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")

# 3, then 4, then 5 steps.
SCHEDULE = "4, 6 at 25 %, 8 at 7 steps"
WORDS = {
    "duration": "12 steps",
    "schedule.name": "constant",
    "schedule.warmup": "2 steps",
    "log.every": "1 steps",
    "evals.test.every": "6 steps",
    "evals.test.ops": "resize",
    "checkpoint.every": "100 steps",
    "global_batch_size": "32",
    "model.patch_size": "2",
    "optimizer.accum_steps": "1",
    "data.ops": "resize|pad_crop(1)",
    "data.image_size": SCHEDULE,
}


def make_config(file="quickstart:debug", **overrides):
    config = load_config(file)
    words = WORDS | {key.replace("__", "."): value for key, value in overrides.items()}
    assert not apply_overrides(config, list(words.items()))
    assert not find_faults(config)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_device, never_with_checks, experiments_made_once):
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, train_and_evaluate(make_config(), workdir)


def by_hand(run):
    """The loss of each step: a model of each size, with positions resampled for it."""
    e, smoothing, losses = run.experiment, run.settings.loss.label_smoothing, []
    state = e.init()

    def loss_of(params, batch):
        images = (batch["image"] / 255.0 - 0.5) / 0.5
        size = images.shape[1]
        table = params["pos_embedding"]  # of 4 x 4 patches, after no class token
        grid = jax.image.resize(
            table.reshape(1, 4, 4, -1), (1, size // 2, size // 2, table.shape[2]),
            "cubic", antialias=False,
        )  # fmt: skip
        params = {**params, "pos_embedding": grid.reshape(1, -1, table.shape[2])}
        model = e.model.clone(image_size=(size, size))
        logits = model.apply({"params": params}, images, train=True)
        wanted = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), smoothing)
        return optax.softmax_cross_entropy(logits, wanted).mean()

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = e.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = state.params, state.opt_state
    for batch in run.batches(range(12)):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


def train_losses(workdir):
    return [row["train/loss"] for row in rows(workdir) if "train/loss" in row]


def test_each_step_is_that_of_a_model_of_its_size(finished):
    workdir, summary = finished
    run = prepare(make_config(), workdir)
    with jax.set_mesh(run.mesh):
        np.testing.assert_allclose(train_losses(workdir), by_hand(run), rtol=1e-4)
    assert summary["images_seen"] == 12 * 32
    sizes = [batch["image"].shape[1] for batch in run.batches(range(12))]
    assert sizes == [4] * 3 + [6] * 4 + [8] * 5
    # Evaluations, and whoever reads the run, take the last size.
    assert run.settings.data.image_size == (8, 8) and run.experiment.model.image_size == (8, 8)
    assert final_state(workdir)[1]["params/pos_embedding"].shape[1] == 16
    assert summary["test/num_examples"] == 360
    assert read_config(epath.Path(workdir)).data.image_size == "4, 6 at 3 steps, 8 at 7 steps"
    asked = json.loads((workdir / "config.json").read_text())["asked"]
    assert asked["data"]["image_size"] == SCHEDULE


@pytest.mark.slow
def test_a_run_goes_on_from_any_stage(finished, tmp_path, monkeypatch):
    """From within a stage and from where one ends; what it did before is not compiled again."""
    compiled, compile_step = [], loop.compile_step

    def note(run):
        compiled.append(run.experiment.model.image_size[0])
        return compile_step(run)

    monkeypatch.setattr(loop, "compile_step", note)
    for stops, sizes in ((3, [4, 6, 8]), (9, [6, 8])):
        monkeypatch.setattr(
            loop.PreemptionGuard, "should_stop", lambda _, step, at=stops: step == at
        )
        with pytest.raises(loop.Preempted):
            train_and_evaluate(make_config(), tmp_path)
        assert compiled == sizes
        compiled.clear()
    train_and_evaluate(make_config(), tmp_path)
    assert compiled == [8]
    check_same_end(tmp_path, finished[0])


@pytest.mark.slow
def test_what_watches_a_run_knows_the_size_of_a_step(tmp_path, finished, monkeypatch):
    """The norms by layer and replays; and what computes step 2 again from a later state."""
    words = {"log.by_layer": "true", "job.replay_every": "1 steps"}
    config = make_config(duration="4 steps", data__image_size="4, 8 at 50 %", **words)
    monkeypatch.setattr(loop, "compile_step", count_steps())
    train_and_evaluate(config, tmp_path)
    norms = [row[name] for row in rows(tmp_path) if (name := "train/grad_norm/head") in row]
    assert len(norms) == 4 and all(norms)
    run = prepare(make_config(), finished[0])
    with jax.set_mesh(run.mesh):
        own, turned = compute_again(run, 2, 12, ())
        np.testing.assert_array_equal(own["loss"], turned["loss"])


def test_a_longer_run_keeps_its_stages(finished):
    """They began at shares of the first length. A run with other sizes, or none, is refused."""
    workdir, _ = finished
    stages = prepare(make_config(duration="20 steps"), workdir).settings.stages
    assert [stage.steps for stage in stages] == [range(3), range(3, 7), range(7, 20)]
    for sizes in ("4, 8 at 25 %", "8"):
        with at_fault("data.image_size"):
            prepare(make_config(data__image_size=sizes), workdir)


def test_every_example_comes_once_in_an_epoch(tmp_path):
    """The first position of a step follows from the stages, wherever a run begins to read."""
    words = {"duration": "60 steps", "data__image_size": "4, 6 at 25 %, 8 at 50 %"}
    run = prepare(make_config(data__image_size_keeps="tokens", **words), tmp_path)
    stages, epoch = run.settings.stages, run.train_source.num_examples
    # (8 / 4)^2 = 4, and (8 / 6)^2 = 1.78, in quarters 1.75.
    batches = [128, 56, 32]
    assert [stage.batch for stage in stages] == batches
    by_step = [np.asarray(batch["id"]) for batch in run.batches(range(60))]
    assert [len(ids) for ids in by_step] == np.repeat(batches, [15, 15, 30]).tolist()
    firsts = np.cumsum([0, *map(len, by_step)]).tolist()
    assert [stages.images(step) for step in range(61)] == firsts
    ids = np.concatenate(by_step)
    np.testing.assert_array_equal(ids, run.order(np.arange(firsts[-1])))
    for i in range(firsts[-1] // epoch):
        assert sorted(ids[i * epoch : (i + 1) * epoch]) == [*range(epoch)]
    for step in (14, 15, 59):
        [batch] = run.batches(range(step, step + 1))
        np.testing.assert_array_equal(batch["id"], by_step[step])


@pytest.mark.slow
def test_the_last_steps_see_all_patches(tmp_path):
    """keep_tokens=0.5 until step 5: each step equals one with its share alone."""
    words = {"duration": "8 steps", "model.keep_tokens": "0.5"}
    until = words | {"model.keep_tokens_until": "5 steps"}
    run = prepare(make_config(**until, data__image_size="4, 8 at 3 steps"), tmp_path)
    kept = [(s.size[0], s.keeps_all, s.steps) for s in run.settings.stages]
    assert kept == [(4, False, range(3)), (8, False, range(3, 5)), (8, True, range(5, 8))]
    assert [e.model.keep_tokens for e in run.experiments] == [0.5, 0.5, 1.0]
    words["data.image_size"] = until["data.image_size"] = "8"
    train_and_evaluate(make_config(**until), tmp_path)
    run = prepare(make_config(**until), tmp_path)
    alone = {share: prepare(make_config(**words | {"model.keep_tokens": share}), tmp_path / share)
             for share in ("0.5", "1.0")}  # fmt: skip
    with jax.set_mesh(run.mesh):
        state, losses = run.experiment.init(), []
        for step, batch in enumerate(run.batches(range(8)), 1):
            each = alone["1.0" if step > 5 else "0.5"].experiment_of(step)
            state, metrics = each.train_step(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(train_losses(tmp_path), losses, rtol=1e-6)


def test_a_share_that_ends_before_the_first_step_is_that_of_no_step(tmp_path):
    words = {"model.keep_tokens": "0.5", "model.keep_tokens_until": "0 steps"}
    run = prepare(make_config(data__image_size="8", **words), tmp_path)
    [planned] = run.settings.by_stage
    assert planned.model.own.get("keep_tokens", 1.0) == run.experiment.model.keep_tokens == 1


def test_an_end_of_no_share_is_refused_with_all_other_faults():
    config = make_config()
    config.model.keep_tokens_until, config.model.pool = "2 steps", "none"
    faults = " ".join(find_faults(config))
    assert "model.keep_tokens_until='2 steps': needs" in faults and "pool" in faults


def test_a_run_that_ends_before_a_stage_is_refused(tmp_path):
    """A stored run may not change its stages, so the message names the duration."""
    words = {"data.image_size": "8", "model.keep_tokens": "0.5"}
    for key, stages in (
        ("data.image_size", {"data.image_size": "4, 8 at 9 steps"}),
        ("model.keep_tokens_until", {"model.keep_tokens_until": "8 steps"}),
    ):
        config = make_config(**words | {"duration": "8 steps"} | stages)
        with at_fault(key) as error:
            prepare(config, tmp_path)
        assert "set a longer --config.duration" in str(error.value)
