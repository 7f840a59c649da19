"""Runs on pictures in their own shape."""

import json

import jax
import numpy as np
import PIL.Image
import pytest
from asked import evaluate_model, prepare, train_and_evaluate, train_with_stops
from at_fault import at_fault
from finished_run import check_same_end, check_same_on_all_devices, rows
from started_job import Job

from vit_jax.base.errors import InputError
from vit_jax.config import REQUIRED_TO_EVALUATE
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.images import files
from vit_jax.data.images.given import open_images
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.stages import make_stage
from vit_jax.inference.parts import facts_of
from vit_jax.inference.predict import predict
from vit_jax.run.setup.validation import find_faults
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.pretrained import load_image

pytestmark = pytest.mark.usefixtures("never_with_checks", "experiments_made_once")

WORDS = {
    "duration": "8 steps",
    "schedule.warmup": "2 steps",
    "log.every": "1 steps",
    "evals.val.every": "8 steps",
    "evals.val.ops": "decode",
    "evals.test": "None",
    "checkpoint.every": "100 steps",
    "global_batch_size": "8",
    "model.depth": "1",
    "data.image_size": "None",
    "data.max_tokens": "8@0.5, 16@0.5",
    "data.ops": "decode|flip",
}
MASKED = {
    "objective__name": "mae", "objective__decoder_width": "32", "objective__decoder_depth": "1",
    "objective__decoder_heads": "2", "evals__val": "None", "optimizer__name": "sgd",
}  # fmt: skip
PACKED = {"data__max_tokens": "16", "data__pack": "4,4,8,16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tall and wide pictures, some of them grey, in odd numbers."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, number in (("train", 13), ("val", 3)):
        for name, (height, width) in {"tall": (40, 14), "wide": (15, 37)}.items():
            (folder / split / name).mkdir(parents=True)
            for i in range(number):
                values = rng.integers(0, 255, (height + i, width, 3), np.uint8)
                image = PIL.Image.fromarray(values).convert("L" if i % 3 == 2 else "RGB")
                image.save(folder / split / name / f"{i}.png")
    return folder


def words_for(folder, **overrides):
    words = WORDS | {key.replace("__", "."): value for key, value in overrides.items()}
    words["data.data_dir"] = str(folder)
    has_evaluator = words.get("evals.val") != "None"
    return {k: value for k, value in words.items() if has_evaluator or "evals.val." not in k}


@pytest.fixture(scope="module")
def make_config(folder):
    def make(**overrides):
        config = load_config("folder:debug")
        assert not apply_overrides(config, list(words_for(folder, **overrides).items()))
        assert not find_faults(config)
        return config

    return make


def evaluated(model, folder, words="classification", **overrides):
    """The results of `evaluate --init_from`, by a config with those overrides."""
    config = load_config(f"evaluate:folder,{words}")
    words = {"data.data_dir": str(folder), "global_batch_size": "8"}
    words |= {key.replace("__", "."): value for key, value in overrides.items()}
    assert not apply_overrides(config, list(words.items()))
    assert not find_faults(config, REQUIRED_TO_EVALUATE)
    return evaluate_model(config, model, by_user=words)


def test_a_row_stays_on_one_device(make_config, tmp_path):
    config = make_config(**PACKED | {"data__pack": "8,16"})
    with pytest.raises(InputError, match=r"data.pack=.*_batch_size=8 must be a multiple of 16; t"):
        prepare(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{}, PACKED | {"global_batch_size": "32"}, MASKED],
)
def test_eight_devices_compute_as_one(make_config, tmp_path, overrides):
    settings = prepare(make_config(**overrides), tmp_path).settings
    run = prepare(make_config(**overrides), tmp_path / "again")
    batches = [jax.device_get(batch) for batch in run.batches(range(3))]

    def take_steps(mesh):
        last = make_experiment(settings.by_stage[-1], mesh)
        with jax.set_mesh(mesh):
            few = (
                last
                if "data__pack" in overrides
                else make_stage(settings.by_stage[0], mesh, (), last)
            )
            state, losses = last.init(), []
            for step, batch in enumerate(batches):
                each = last if few is last else (few, last)[settings.stages.find(step)]
                put = jax.device_put(batch, each.in_shardings[1])
                state, metrics = each.train_step(state, put)
                losses.append(float(metrics["loss"]))
            return losses, jax.device_get(state.params)

    check_same_on_all_devices(take_steps, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, PACKED, MASKED], ids=["drawn", "packed", "mae"])
def test_two_processes_give_the_run_of_one(folder, tmp_path, overrides):
    words = words_for(folder, **overrides)
    flags = ["--config=folder:debug", *(f"--config.{key}={v}" for key, v in words.items())]
    losses = []
    for number in (1, 2):
        workdir = tmp_path / f"{number}"
        workdir.mkdir()
        how = {"num_processes": number, "devices": 2 // number}
        with Job(workdir, *flags, f"--workdir={workdir}/run", **how) as job:
            assert {*job.codes()} == {0}, job.everything()
        losses.append([row["train/loss"] for row in rows(workdir / "run") if "train/loss" in row])
    assert len(losses[0]) == 8
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.usefixtures("one_device")
def test_a_run_goes_on_within_each_number_of_tokens(
    make_config, folder, tmp_path, monkeypatch, caplog
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = train_and_evaluate(make_config(), whole)
    run = prepare(make_config(), whole)
    order = [run.settings.stages.find(step) for step in range(8)]
    assert summary["images_seen"] == sum((16, 8)[i] for i in order)
    assert summary["val/num_examples"] == 6
    assert run.settings.data.patch_size == (8, 8)
    assert run.settings.data.image_size == (32, 32)  # 4 x 4 patches
    shapes = [batch["image"].shape for batch in run.batches(range(8))]
    assert shapes == [((16, 8), (8, 16))[i] + (8, 8, 3) for i in order]
    stops = sorted({order.index(i) + 1 for i in (0, 1)})
    train_with_stops(make_config(), parts, stops, monkeypatch)
    check_same_end(parts, whole)
    with at_fault("data.max_tokens"):
        prepare(make_config(data__max_tokens="16"), whole)
    # Predictions, and evaluations by a config, see the pictures as the run's evaluation does.
    paths = sorted((folder / "val").rglob("*.png"))
    found = predict([*map(str, paths)], whole, output="probabilities")
    smoothed = np.where(np.arange(2)[None] == np.repeat([0, 1], 3)[:, None], 0.95, 0.05)
    loss = -(smoothed * np.log(found)).sum(axis=1).mean()
    np.testing.assert_allclose(loss, summary["val/loss"], rtol=1e-5)
    model = read_pretrained(str(whole))
    found = evaluated(model, folder)["classification/loss"]
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert " 16 patches " in facts_of(model, open_images([*map(str, paths)]))["ops"]
    with at_fault("evals.classification.ops"):
        evaluated(model, folder, evals__classification__ops="decode|resize")
    # A size makes all pictures squares, even the size of the positions.
    monkeypatch.setattr(files, "_said", set())
    squares = np.stack([load_image(path, model.spec) for path in paths])
    assert caplog.text.count("load_image: the model takes pictures in their own shape") == 1
    logits = jax.jit(model.model.apply)(model.variables, squares)
    found = predict([*map(str, paths)], whole, output="logits", image_size=32)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    loss = -(smoothed * jax.nn.log_softmax(logits)).sum(axis=1).mean()
    found = evaluated(model, folder, data__image_size="32")["classification/loss"]
    np.testing.assert_allclose(found, loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_packed_run_goes_on(make_config, tmp_path, monkeypatch, caplog):
    """Its rows are those of the batches of one pass, also behind a stop."""
    config = make_config(**PACKED, duration="6 steps", evals__val__every="6 steps")
    whole = tmp_path / "whole"
    with caplog.at_level("INFO"):
        train_with_stops(config, whole, [3], monkeypatch)
    assert json.loads((whole / "summary.json").read_text())["images_seen"] == 48
    packed = "training packs 4 into each row of 32 patches: 4, 4, 8, 16; of pictures 3:4, 18.8% is"
    assert packed in caplog.text
    run = prepare(config, whole)
    assert run.settings.optimizer.accum_steps == 1
    found = [row for row in rows(whole) if "train/padding" in row]
    for batch, row in zip(run.batches(range(6)), found, strict=True):
        counts = np.asarray(batch["image"].counts)
        assert (counts.reshape(2, 4) <= (4, 4, 8, 16)).all()
        np.testing.assert_allclose(row["train/padding"], 1 - counts.sum() / 64, rtol=1e-5)
    with at_fault("data.pack"):
        prepare(make_config(**PACKED | {"data__pack": "4,4,16,8"}), whole)
    with at_fault("optimizer.accum_steps"):
        prepare(make_config(**PACKED, optimizer__accum_steps="2"), tmp_path / "other")
