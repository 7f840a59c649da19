import copy
import pathlib
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from hand_made import EVERY, OF_SPLIT, OF_SPLITS, digit_pixels, make_inputs, run_on_features
from read_settings import settings_of
from sklearn import metrics
from sklearn.datasets import load_digits

from vit_jax.base.errors import InputError
from vit_jax.config import EVALUATORS, SplitKey, base_config, classification, knn
from vit_jax.config.evals import make_entry
from vit_jax.config.text import load_config
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import check_outputs, evaluate, make_evaluators
from vit_jax.evaluators.classification import Classification
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.evaluators.fewshot import FewShot, draw_support
from vit_jax.evaluators.knn import Knn
from vit_jax.evaluators.linear_probe import LinearProbe
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.metrics import bins
from vit_jax.run.setup.validation import find_faults


def batch(logits, label, mask=None):
    """A batch whose images are used as logits."""
    mask = np.ones(len(logits)) if mask is None else mask
    return {
        "image": np.asarray(logits, np.float32),
        "label": np.asarray(label),
        "mask": np.asarray(mask, np.float32),
    }


def bind(*batches, loss="softmax"):
    config = base_config()
    config.loss.name = loss
    return Classification(**OF_SPLIT).bind(make_inputs(batches, settings=settings_of(config)))


def run(*batches, loss="softmax"):
    result = bind(*batches, loss=loss)(1.0)
    absent = set() if batches[0]["image"].shape[1] > 5 else {"top5"}
    assert {*result} == {*Classification(**OF_SPLIT).reports()} - absent
    return result


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def calibration_error(logits, labels, loss_name="softmax"):
    """Bin by bin, as the paper defines it."""
    logits = np.asarray(logits, np.float64)
    p = np.exp(log_softmax(logits)) if loss_name == "softmax" else 1 / (1 + np.exp(-logits))
    confidence, right = p.max(-1), p.argmax(-1) == labels
    error = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


LOGITS = np.array([[4.0, 1, 0, 0, 0, 0], [0, 3, 2, 1, -1, -2], [0, 1, 2, 3, 4, 5]])


def test_metrics_of_flips_are_those_of_the_mean_of_both_logits():
    """A pixel for each class: the mirror image has the logits of the classes in reverse order."""
    evaluator = Classification(**OF_SPLIT, flips=True, by_class=True, metrics=("top1", "loss"))
    labels = np.array([0, 1, 5])
    one = batch(LOGITS[:, None, :, None], labels)
    source = types.SimpleNamespace(num_classes=6, class_names=None)
    inputs = make_inputs([one], source=lambda: source, apply=lambda state, x: x[:, 0, :, 0])
    found = evaluator.bind(inputs)(1.0)
    mean = (LOGITS + LOGITS[:, ::-1]) / 2
    for end, logits in (("", LOGITS), ("_flips", mean)):
        right = logits.argmax(axis=1) == labels
        loss = -log_softmax(logits)[range(3), labels].mean()
        assert found[f"top1{end}"] == pytest.approx(right.mean())
        assert found[f"loss{end}"] == pytest.approx(loss, rel=1e-5)
        assert found[f"accuracy{end}/1"] == right[1]
    assert found["top1"] != found["top1_flips"]
    declared = {"top1", "loss", "top1_flips", "loss_flips", "num_examples", "accuracy/*"}
    assert {*evaluator.reports()} == declared | {"accuracy_flips/*"}
    lacking = Classification(**OF_SPLIT, flips=True).lacking
    assert {*lacking({"split": types.SimpleNamespace(num_classes=4)})} == {"top5", "top5_flips"}


def test_metrics_of_one_batch():
    result = run(batch(LOGITS, [0, 3, 0]))
    expected = -log_softmax(LOGITS)[[0, 1, 2], [0, 3, 0]].mean()
    np.testing.assert_allclose(result.pop("loss"), expected, rtol=1e-6)
    del result["ece"], result["macro_top1"], result["macro_f1"]  # below
    assert {type(value) for value in result.values()} == {float, int}  # for JSON
    assert result == {"top1": pytest.approx(1 / 3), "top5": pytest.approx(2 / 3), "num_examples": 3}


def test_sums_are_divided_once():
    """Not a mean of batch means: three of four correct, in batches of three and one."""
    wrong = batch(LOGITS[:1], [3])
    right = batch(LOGITS[:1].repeat(3, 0), [0, 0, 0])
    result = run(right, wrong)
    assert (result["top1"], result["num_examples"]) == (0.75, 4)
    losses = -log_softmax(LOGITS[0])[[0, 0, 0, 3]]
    np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-6)


@pytest.mark.parametrize("label", [0, 5])
def test_padding_never_counts(label):
    """Whether the padded rows are right or wrong."""
    plain = run(batch(LOGITS[:2], [0, 3]))
    padded = run(batch(np.concatenate([LOGITS[:2], 9 * LOGITS[:2]]), [0, 3, label, label],
                       [1, 1, 0, 0]))  # fmt: skip
    assert padded == pytest.approx(plain, rel=1e-6)
    assert plain["top1"] == 0.5


def test_masked_examples_do_not_count():
    result = run(batch(LOGITS, [0, 0, 5], [1, 0, 1]), batch(LOGITS, [0, 1, 5], [0, 1, 0]))
    assert (result["top1"], result["top5"], result["num_examples"]) == (1.0, 1.0, 3)
    with pytest.raises(NothingToMeasureError, match="split: none of the images"):
        run(batch(LOGITS, [0, 1, 2], [0, 0, 0]))


@pytest.mark.parametrize("num_classes", [1, 5])
def test_few_classes_have_no_top5(num_classes):
    result = run(batch(LOGITS[:, :num_classes], [0, 0, 0]))
    assert result["top1"] == pytest.approx(1.0 if num_classes == 1 else 1 / 3)


def test_label_with_several_classes():
    """A hit is any of them."""
    targets = np.array([[0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 1]], np.float32)
    result = run(batch(LOGITS, targets), loss="sigmoid")
    assert (result["top1"], result["top5"]) == (pytest.approx(1 / 3), 1.0)


def test_means_over_classes():
    """As scikit-learn has them, over batches with masked rows; one class has no image."""
    rng = np.random.default_rng(1)
    logits, labels = rng.standard_normal((200, 7)), rng.choice([0, 0, 0, 1, 2, 4, 5, 6], 200)
    mask = rng.random(200) < 0.7
    logits[:, 3] -= 9
    batches = [batch(logits[s], labels[s], mask[s]) for s in (np.s_[:90], np.s_[90:])]
    names = ("a", "b/c", "ä [*]", "none", "x\n", "same", "same")
    source = types.SimpleNamespace(name="own", num_classes=7, class_names=names)
    inputs = make_inputs(batches, source=lambda: source)
    found = Classification(**OF_SPLIT, by_class=True).bind(inputs)(1.0)
    true, predicted = labels[mask], logits[mask].argmax(axis=1)
    assert found["macro_top1"] == pytest.approx(metrics.balanced_accuracy_score(true, predicted))
    f1 = metrics.f1_score(true, predicted, average="macro")
    assert found["macro_f1"] == pytest.approx(f1)
    recall = metrics.recall_score(true, predicted, average=None)
    keys = ["accuracy/a", "accuracy/b/c", "accuracy/ä [*]", "accuracy/x\n", "accuracy/same (5)",
            "accuracy/same (6)"]  # fmt: skip
    of_classes = [found[key] for key in found if "/" in key]
    assert [key for key in found if "/" in key] == keys and of_classes == pytest.approx(recall)
    source.num_classes = 1_001
    with pytest.raises(InputError, match="by_class=True: own has 1,001 classes"):
        Classification(**OF_SPLIT, by_class=True).bind(inputs)


def test_calibration_error():
    """Over several batches with masked rows, which add neither hits nor confidence."""
    rng = np.random.default_rng(0)
    logits, labels = 2 * rng.standard_normal((300, 6)), rng.integers(0, 6, 300)
    mask = rng.random(300) < 0.8
    batches = [batch(logits[s], labels[s], mask[s]) for s in (np.s_[:100], np.s_[100:])]
    found = run(*batches)["ece"]
    assert found == pytest.approx(calibration_error(logits[mask], labels[mask]), abs=1e-6)
    assert found > 0.1


def test_bins_of_confidence():
    found = bins(jnp.array([0.0, 1e-6, 0.25, 0.5, 0.99, 1.0]))
    assert found.tolist() == [0, 0, 3, 7, 14, 14]


def test_state_is_an_argument():
    """The function uses its argument, not the state at compile time."""
    measure = bind(batch(LOGITS, [0, 1, 5]))
    assert [measure(sign)["top1"] for sign in (1.0, -1.0, 1.0)] == [1.0, 0.0, 1.0]


# On real data, over 8 devices


@pytest.fixture(scope="module")
def model_on_mesh():
    """(config, model, mesh of 8 devices, state) for a tiny model with a non-zero head."""
    c = load_config(f"{pathlib.Path(__file__).parents[2]}/configs/quickstart.py:debug")
    c.data.num_classes, c.data.num_examples = 10, 1437
    c.data.mean, c.data.std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    c.global_batch_size = 72  # divides 360
    c.evals.whole = classification(split="test", every="1 epochs")
    c.evals.test.batch_size = 64
    c.evals.larger = classification(split="test", every="1 epochs", batch_size=128)
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    experiment = make_experiment(settings_of(c), mesh)
    with jax.set_mesh(mesh):
        params = experiment.init().params
    kernel = params["head"]["kernel"]
    params["head"]["kernel"] = 3 * jax.random.normal(jax.random.key(3), kernel.shape)
    return c, experiment.model, mesh, TrainState(jnp.zeros((), jnp.int32), params, {}, ())


@pytest.mark.parametrize("loss_name", ["softmax", "sigmoid"])
def test_every_digit_counts_once(model_on_mesh, loss_name, monkeypatch, caplog):
    """Batch sizes that do and do not divide the split, against NumPy on the whole split."""
    pixels, labels = digit_pixels()[::5], load_digits().target[::5]
    config, model, mesh, state = model_on_mesh
    config = copy.deepcopy(config)
    config.loss.name = loss_name
    if loss_name == "sigmoid":  # what divides and what does not is the same for every loss
        del config.evals.larger, config.evals.whole
    test = make_source("digits", split="test", image_size=(8, 8))
    sources = {SplitKey("digits", "test", None): test}
    values = (pixels - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.4]
    declared = {name: "higher" for name in Classification(**OF_SPLIT).reports() if name != "ece"}
    monkeypatch.setattr(Classification, "reports", lambda self: declared)
    with jax.set_mesh(mesh):
        evaluators = make_evaluators(
            settings_of(config), parse_preprocessing(settings_of(config)), model, mesh, sources
        )
        results = {name: measure(state) for name, measure in evaluators.items()}
        logits = jax.jit(model.apply)({"params": state.params}, values.astype(np.float32))
    logits = np.asarray(logits, np.float64)
    said = [record.message for record in caplog.records]
    assert [text for text in said if "evals.test" in text] == [
        "evals.test reports 'ece', which its `reports` do not declare"
    ]

    # Rounding does not change the order of logits, so the counts below are exact.
    assert np.diff(np.sort(logits), axis=-1).min() > 1e-5
    right = np.argsort(-logits, axis=-1) == labels[:, None]
    targets = np.eye(10)[labels] * 0.9 + 0.01
    if loss_name == "softmax":
        losses = -(targets * log_softmax(logits)).sum(-1)
    else:
        losses = (np.logaddexp(0, logits) - targets * logits).sum(-1)
    assert 0 < right[:, 0].sum() < right[:, :5].sum() < 360

    assert results.keys() == ({"test", "larger", "whole"} if loss_name == "softmax" else {"test"})
    for result in results.values():
        assert result.keys() == {"top1", "top5", "loss", "ece", "num_examples", "macro_top1",
                                 "macro_f1"}  # fmt: skip
        f1 = metrics.f1_score(labels, logits.argmax(axis=-1), average="macro")
        assert result["macro_f1"] == pytest.approx(f1)
        assert result["num_examples"] == 360
        assert result["top1"] == right[:, 0].sum() / 360
        assert result["top5"] == right[:, :5].sum() / 360
        np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-5)
        ece = calibration_error(logits, labels, loss_name)
        assert 0.05 < ece == pytest.approx(result["ece"], abs=1e-6)


@pytest.mark.parametrize(
    "evaluator",
    [
        FewShot(**OF_SPLITS, shots=(2,), num_draws=1),
        Knn(**OF_SPLITS, num_neighbours=(5,)),
        LinearProbe(**OF_SPLITS, l2=(0.1,)),
    ],
    ids=lambda evaluator: type(evaluator).__name__,
)
def test_broken_images_are_neither_learnt_from_nor_tested(evaluator):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60).astype(np.int32)
    x = (np.eye(4)[labels] + 0.3 * rng.standard_normal((60, 4))).astype(np.float32)
    broken = np.union1d(draw_support(labels, 3, 1, seed=0), np.arange(0, 60, 4))
    other = x.copy()
    other[broken] = 1e6
    found = [
        run_on_features(evaluator, (z, labels), (z, labels), broken=broken, broken_tests=broken)
        for z in (x, other)
    ]
    assert found[0] == found[1] and max(found[0].values()) > 0.5
    for key, which in {"train_split": "broken", "test_split": "broken_tests"}.items():
        with pytest.raises(NothingToMeasureError, match=f"^{key}: none of the images"):
            run_on_features(evaluator, (x, labels), (x, labels), **{which: np.arange(60)})


def test_the_rank_needs_a_split():
    """run/faults.txt has other choices that cannot be."""
    c = base_config()
    c.evals.own = make_entry("rank", **EVERY, split=None)
    faults = [fault for fault in find_faults(c) if fault.startswith("evals")]
    assert [re.split("[:=]", fault)[0] for fault in faults] == ["evals.own.split"]


def test_evaluators_that_do_not_show_the_worth_of_features_take_several_labels_an_image():
    without = {name for name in EVALUATORS if not EVALUATORS.find(name).shows_worth}
    assert without == {"patch_features", "rank", "reconstruction"}
    assert {EVALUATORS.find(name).multi_label for name in without} == {None}


def test_a_fault_names_the_evaluator():
    def measure(state):
        raise InputError("train_split: none can be read", "test_split: none can be read")

    state = TrainState(jnp.int32(0), {}, {}, {})
    with pytest.raises(InputError) as error:
        evaluate("few", measure, state)
    assert error.value.faults == (
        "evals.few.train_split: none can be read", "evals.few.test_split: none can be read",
    )  # fmt: skip


class Odd(nn.Module):
    """A user's model: logits, but nothing called `features`; its tokens fail."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, images, *, train=False):
        return nn.Dense(self.num_classes)(images.reshape(len(images), -1))

    def tokens(self, images):
        return self.absent


class Several(Odd):
    def features(self, images, *, train=False):
        return images


def test_a_model_that_cannot_serve_an_evaluator_is_refused_by_shapes():
    c = base_config()
    c.evals.test = classification(split="test", every="1 epochs")
    check_outputs(settings_of(c).evals, Odd(), (8, 8))
    c.evals.near = knn(train_split="train", test_split="test", every="1 epochs")
    with pytest.raises(InputError, match=r"^evals\.near\.type='knn': needs features \(B, D\)"):
        check_outputs(settings_of(c).evals, Odd(), (8, 8))
    c.evals.nearer = c.evals.near
    with at_fault("evals.near.type", "evals.nearer.type"):
        check_outputs(settings_of(c).evals, Odd(), (8, 8))
    with pytest.raises(InputError, match=r"Several\.features gives \(1, 8, 8, 3\)"):
        check_outputs(settings_of(c).evals, Several(), (8, 8))
