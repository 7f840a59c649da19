"""The metrics of evaluators and of training, our own and a plug-in's, against NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from hand_made import OF_SPLIT, digit_pixels, make_inputs
from jax.sharding import PartitionSpec
from read_settings import settings_of
from sklearn import metrics as sklearn_metrics
from sklearn.datasets import load_digits

from vit_jax.base.errors import InputError
from vit_jax.config import METRICS, SplitEvaluator, SplitKey, key, plugins
from vit_jax.config.metric_names import find_direction
from vit_jax.config.text import load_config
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import batch_sharding, make_mesh
from vit_jax.devices.sharding import place
from vit_jax.evaluators import make_evaluators
from vit_jax.evaluators.classification import Classification
from vit_jax.experiment.experiment import make_experiment
from vit_jax.main import main
from vit_jax.objectives.losses import as_targets, hits
from vit_jax.objectives.metrics import Metric, training_metrics
from vit_jax.run.setup.validation import find_faults


def metrics_of(config):
    settings = settings_of(config)
    return training_metrics(settings.log, settings.loss, settings.data)


class Brier(Metric):
    """The mean squared distance of probabilities and labels."""

    better = "lower"

    def rows(self, logits_BC, batch, task):
        targets_BC = as_targets(batch["label"], logits_BC.shape[1])
        return jnp.square(task.probabilities(logits_BC) - targets_BC).sum(axis=1)


class Worst(Metric):
    """The accuracy on the class that fares worst; its sums are split over devices."""

    def rows(self, logits_BC, batch, task):
        shown_BC = as_targets(batch["label"], logits_BC.shape[1])
        shown_BC = jax.lax.with_sharding_constraint(shown_BC, PartitionSpec(None, "fsdp"))
        return {"images": shown_BC, "correct": shown_BC * hits(logits_BC, batch["label"])[:, None]}

    def finish(self, sums):
        seen_C = sums["images"] > 0
        return (sums["correct"][seen_C] / sums["images"][seen_C]).min()


class Tuned(Metric):
    """A metric with a key."""

    power: int = key(2, "of the distance")


NAMES = ("my_worst", "top1", "macro_top1", "macro_f1", "my_brier")


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(METRICS, "my_brier", Brier)
    monkeypatch.setitem(METRICS, "my_worst", Worst)
    c = load_config("quickstart:debug")
    c.data.num_classes, c.data.num_examples = 10, 1437
    return c


def by_numpy(logits, labels):
    logits = np.asarray(logits, np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predicted = logits.argmax(axis=1)
    right = predicted == labels
    by_class = [right[labels == c].mean() for c in np.unique(labels)]
    return {
        "my_brier": np.square(p - np.eye(10)[labels]).sum(axis=1).mean(),
        "my_worst": min(by_class),
        "top1": right.mean(),
        "macro_top1": np.mean(by_class),
        "macro_f1": sklearn_metrics.f1_score(labels, predicted, average="macro"),
    }


@pytest.mark.parametrize("accum_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_plug_in_s_metrics_in_training_and_in_an_evaluator(config, accum_steps):
    """On 8 devices; rows of the training batch and of the split's last batch are masked."""
    config.log.metrics = config.evals.test.metrics = NAMES
    config.evals.test.batch_size, config.optimizer.accum_steps = 64, accum_steps
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    experiment = make_experiment(settings_of(config), mesh)
    source = make_source("digits", split="test", image_size=(8, 8))
    sources = {SplitKey("digits", "test", None): source}
    pixels, labels = digit_pixels(), load_digits().target.astype(np.int32)
    mask = np.random.default_rng(0).random(64) < 0.7
    batch = {"image": np.rint(255 * pixels[:64]).astype(np.uint8), "label": labels[:64],
             "mask": mask.astype(np.float32), "id": np.arange(64, dtype=np.int32)}  # fmt: skip
    batch = {name: place(batch[name], batch_sharding(mesh)) for name in experiment.abstract_batch}
    with jax.set_mesh(mesh):
        state = experiment.init()
        kernel = state.params["head"]["kernel"]
        state.params["head"]["kernel"] = place(
            np.random.default_rng(3).normal(size=kernel.shape).astype(np.float32), kernel.sharding
        )
        logits = jax.jit(experiment.model.apply)({"params": state.params}, 2 * pixels - 1)
        settings = settings_of(config)
        parsed = parse_preprocessing(settings)
        evaluator = make_evaluators(settings, parsed, experiment.model, mesh, sources)["test"]
        evaluated = evaluator(state)
        _, logged = experiment.train_step(state, batch)
    logits = np.asarray(logits)
    assert evaluated.pop("num_examples") == 360
    assert [*evaluated] == [*NAMES]
    assert evaluated == pytest.approx(by_numpy(logits[::5], labels[::5]), rel=1e-5)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(logged))
    found = metrics_of(config).finish(jax.device_get(logged))
    expected = by_numpy(logits[:64][mask], labels[:64][mask])
    assert {name: found[name] for name in NAMES} == pytest.approx(expected, rel=1e-5)


PLUG_IN = """
from vit_jax.config import METRICS
from vit_jax.objectives.metrics import Metric


class Batches(Metric):
    better = "lower"

    def rows(self, logits_BC, batch, task):
        return {"loss": task.loss(logits_BC, batch["label"])}

    def finish(self, sums):
        return sums["loss"].item() / 64  # an array of NumPy


METRICS["my_batches"] = Batches
"""


@pytest.fixture
def forgotten():
    """Plug-ins and their metrics are forgotten after the test."""
    before, known = dict(METRICS), dict(plugins._PLUGINS)
    yield
    METRICS.clear()
    METRICS.update(before)
    plugins._PLUGINS.clear()
    plugins._PLUGINS.update(known)


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten", "never_with_checks")
def test_a_run_logs_and_keeps_the_best_by_a_plug_in_s_metric(tmp_path, json_of, monkeypatch):
    monkeypatch.chdir(tmp_path)
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    (tmp_path / "batches.py").write_text(PLUG_IN)
    assert main(["--config=quickstart:debug", "--config.plugins=batches.py", "--workdir=run",
                 "--config.log.metrics=my_batches",
                 "--config.evals.test.metrics=my_batches,loss",
                 "--config.duration=4 steps", "--config.log.every=2 steps",
                 "--config.schedule.warmup=0 steps", "--config.evals.test.every=2 steps",
                 "--config.checkpoint.keep_best=test/my_batches"]) == 0  # fmt: skip
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    logged = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    for row in logged:  # all 64 images of a batch count
        assert row["train/my_batches"] == pytest.approx(row["train/loss"], rel=1e-5)
        assert "train/top1" not in row
    tested = {row["step"]: row for row in rows if "test/loss" in row}
    for row in tested.values():
        assert row["test/my_batches"] == pytest.approx(row["test/loss"] * 360 / 64, rel=1e-5)
        assert "test/top1" not in row
    best = json.loads((tmp_path / "run/summary.json").read_text())["best"]
    assert best["test/my_batches"] == min(row["test/my_batches"] for row in tested.values())
    assert json_of("evaluate", "--workdir=run")["test/my_batches"] == tested[4]["test/my_batches"]


def test_names_are_checked_before_a_run(config, monkeypatch):
    config.log.metrics = config.evals.test.metrics = NAMES
    assert find_faults(config) == []
    assert find_direction(settings_of(config).evals, "test/my_brier") == "lower"
    config.log.metrics, config.evals.test.metrics = ("top2", "micro_f1"), ("mean_ap",)
    of_training, of_test = find_faults(config)
    assert of_training == "log.metrics='top2': did you mean top5?"
    assert of_test.startswith("evals.test.metrics='mean_ap': known: top1, top5, loss, ece, ")
    assert of_test.endswith(", my_brier, my_worst")
    config.log.metrics, config.evals.test.metrics = ("micro_f1",), None
    assert find_faults(config) == ["log.metrics='micro_f1': needs images with several labels"]
    monkeypatch.setitem(METRICS, "my_tuned", Tuned)
    config.log.metrics = ("my_tuned",)
    assert find_faults(config) == ["log.metrics='my_tuned': has keys, which no config can set"]
    config.log.metrics, config.objective.name = ("top1",), "mae"
    assert any(
        fault.startswith("log.metrics=('top1',): objective.name='mae' learns no labels")
        for fault in find_faults(config)
    )


def bound(evaluator, logits, labels):
    batch = {"image": logits, "label": labels, "mask": np.ones(len(logits), np.float32)}
    return evaluator.bind(make_inputs([batch]))


def test_three_classes_have_no_top5(config):
    logits, labels = np.eye(3, dtype=np.float32), np.array([0, 1, 1])
    assert "top5" not in bound(Classification(**OF_SPLIT), logits, labels)(1.0)
    with at_fault("metrics"):
        bound(Classification(**OF_SPLIT, metrics=("top1", "top5")), logits, labels)
    config.data.num_classes, config.log.metrics = 3, ("top5",)
    with pytest.raises(InputError, match=r"log\.metrics='top5': needs more than 5 classes; .* 3"):
        metrics_of(config)


@pytest.mark.filterwarnings("error")
def test_metrics_of_several_labels_in_training(config):
    """As scikit-learn has them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(30, 4)).astype(np.float32)
    labels = (rng.random((30, 4)) < 0.4).astype(np.float32)
    config.data.multi_label, config.loss.name = True, "sigmoid"
    config.loss.label_smoothing = 0.0
    assert metrics_of(config).parts == {}
    config.log.metrics = ("macro_f1", "micro_f1", "loss")
    metrics = metrics_of(config)
    rows = metrics.rows(jnp.asarray(logits), {"label": jnp.asarray(labels)})
    assert rows.keys() == {"macro_f1", "loss"}  # micro_f1 has the rows of macro_f1
    found = metrics.finish(jax.tree.map(lambda row: np.asarray(row).sum(axis=0), rows), 30)
    for average in ("macro", "micro"):
        expected = sklearn_metrics.f1_score(labels > 0, logits > 0, average=average)
        assert found[f"{average}_f1"] == pytest.approx(expected)
    zeros = dict.fromkeys(("images", "predictions", "correct"), np.zeros(4))
    assert np.isnan(metrics.parts["micro_f1"].finish(zeros))
    x = logits.astype(np.float64)
    expected = (np.logaddexp(0, x) - labels * x).sum(axis=1).mean()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_what_a_plug_in_for_version_0_2_0_declares_counts():
    class Old(SplitEvaluator):
        def metrics(self):
            return {"top1": "higher"}

    assert Old(**OF_SPLIT).reports() == {"top1": "higher"}
    assert SplitEvaluator(**OF_SPLIT).reports() is None
