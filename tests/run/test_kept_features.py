"""Training on features of a frozen model instead of images."""

import asked
import jax
import numpy as np
import pytest
from finished_run import check_same_end, rows

import vit_jax.data
from vit_jax.base.errors import InputError
from vit_jax.config.text import load_config
from vit_jax.diagnosis import doctor
from vit_jax.run import kept_features, loop
from vit_jax.run.kept_features import with_kept_features

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

SMALL = {"evals": {}, "data.num_examples": 64, "duration": "6 steps", "checkpoint.every": "2 steps",
         "log.every": "1 steps"}  # fmt: skip

KEYS = ("train/loss", "train/grad_norm", "train/scale")  # shares of a batch may turn by a row


def prepare(workdir, **keys):
    config = load_config("lit:debug")
    config.evals, config.data.num_examples = {}, 64
    config.update_from_flattened_dict(keys)
    return asked.prepare(config, workdir)


def loss_and_batch(run, state):
    batch = next(run.batches(range(1)))
    made = run.experiment.parts.transform(batch, jax.random.key(0))
    key = jax.random.key(1)
    compute = jax.jit(lambda p: run.experiment.objective.loss(p, state, made, None, key).loss)
    return float(compute(state.params)), batch


@pytest.mark.slow
def test_a_step_reads_kept_features_instead_of_images(tmp_path, monkeypatch):
    plain, asked_for = (prepare(tmp_path, **{"data.keep_features": keep}) for keep in (False, True))
    assert "image" not in asked_for.experiment.abstract_batch
    with jax.set_mesh(plain.mesh):
        state = plain.experiment.init()
        expected, batch = loss_and_batch(plain, state)
        run = with_kept_features(asked_for, state)
        found, kept = loss_and_batch(run, state)
        assert found == pytest.approx(expected, rel=2e-3) and "image" not in kept
        assert all(np.array_equal(kept[key], batch[key]) for key in ("id", "text", "mask"))
        x_BD = plain.experiment.model.apply(
            {"params": state.params}, plain.experiment.parts.transform(batch, None)["image"],
            method="features",
        )  # fmt: skip
        np.testing.assert_allclose(kept["features"], x_BD, rtol=2e-3, atol=1e-3)
        monkeypatch.setattr(kept_features, "_compute", None)  # the file is there
        (file,) = tmp_path.glob("features.*.npy")
        x_ND = np.load(file)
        x_ND[np.asarray(batch["id"])[0]] = np.nan
        np.save(file, x_ND)
        later = state.replace(step=state.step + 1)
        again = next(with_kept_features(asked_for, later).batches(range(1)))
        with pytest.raises(TypeError):  # at step 0 they are computed anew
            with_kept_features(asked_for, state)
    assert again["mask"][0] == 0 and again["mask"][1:].all()
    assert not np.isnan(again["features"]).any()
    specs = []
    monkeypatch.setattr(
        vit_jax.data, "host_eval_batches", lambda _, spec, rows: specs.append(spec) or ()
    )
    doctor.check_images(asked_for)
    assert [[*spec.crops] for spec in specs] == [["image"]]  # which the batches do not hold
    assert "no estimate" in doctor.estimate_time(asked_for).found


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("optimizer.freeze", None, "parameters of the model are trained"),
        ("model.dropout", 0.1, "differ from step to step"),
    ],
)
def test_a_model_that_changes_is_refused(tmp_path, key, value, says):
    with pytest.raises(InputError, match=f"data.keep_features=True: .*{says}"):
        prepare(tmp_path, **{"data.keep_features": True, key: value})


@pytest.mark.slow
def test_rows_are_those_of_images_also_after_a_kill(tmp_path):
    for name, keys in {"images": {}, "kept": {"data.keep_features": True}}.items():
        vit_jax.train("lit:debug", tmp_path / name, SMALL | keys)
    found, expected = (
        [row[key] for row in rows(tmp_path / name) for key in KEYS if key in row]
        for name in ("kept", "images")
    )
    assert len(found) == 18 and found == pytest.approx(expected, rel=5e-3)

    workdir, keys = tmp_path / "stopped", SMALL | {"data.keep_features": True}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(loop.Preempted):
        patch.setattr(loop.PreemptionGuard, "should_stop", lambda self, step: step == 3)
        vit_jax.train("lit:debug", workdir, keys)
    vit_jax.train("lit:debug", workdir, keys)
    check_same_end(workdir, tmp_path / "kept")
