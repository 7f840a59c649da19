"""The linear probe against scikit-learn's logistic regression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from test_fewshot import Pixels, State, digit_pixels, make_batches

from vit_jax.config import SplitKey, base_config, linear_probe
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.errors import InputError
from vit_jax.evaluators import linear_probe as linear_probe_lib
from vit_jax.evaluators import make_evaluators
from vit_jax.evaluators.linear_probe import Classifier, LinearProbe, fit
from vit_jax.run.validation import find_faults

RNG = np.random.default_rng(0)
START = Classifier(jnp.zeros((6, 3)), jnp.zeros(3))


def noisy(num_examples, spread=1.0):
    """Features around three corners, with various means and scales, and labels."""
    labels = RNG.choice(3, num_examples, p=[0.6, 0.3, 0.1]).astype(np.int32)
    features = np.eye(6)[labels] + spread * RNG.standard_normal((num_examples, 6))
    return (features * [1, 10, 1, 0.1, 1, 1] + 5).astype(np.float32), labels


@pytest.mark.parametrize("l2", [1e-3, 0.1])
def test_the_fit_is_that_of_scikit_learn(l2):
    """From any start, and with any values in rows that do not count."""
    x, labels = noisy(80)
    x = np.float32((x - x.mean(axis=0)) / x.std(axis=0))
    expected = LogisticRegression(C=1 / (l2 * 60), tol=1e-8, max_iter=10_000)
    expected.fit(np.float64(x[:60]), labels[:60])
    counts = np.float32(np.arange(80) < 60)
    far = Classifier(START.kernel_DC + 1.0, START.bias_C - 1.0)
    for start in (START, far):
        found, left = fit(x, labels, counts, l2, start)
        assert left <= 1e-5
        np.testing.assert_allclose(found.kernel_DC, expected.coef_.T, atol=2e-3)
        # Only differences of biases matter.
        bias = found.bias_C - found.bias_C.mean()
        np.testing.assert_allclose(
            bias, expected.intercept_ - expected.intercept_.mean(), atol=2e-3
        )


@pytest.mark.slow
def test_a_fit_that_is_not_finished_is_said(monkeypatch, caplog):
    monkeypatch.setattr(linear_probe_lib, "_MAX_STEPS", 2)
    fit.clear_cache()
    evaluate(noisy(60), noisy(9), l2=(1e-3,))
    fit.clear_cache()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "l2=0.001 did not converge" in record.message
    caplog.clear()
    features, labels = noisy(60)
    features[3, 2] = np.nan
    evaluate((features, labels), noisy(9), l2=(1e-3,))
    assert "the fit with l2=0.001 is not finite" in caplog.text


def evaluate(train, test, *, l2, mesh=None, broken=()):
    evaluator = LinearProbe(
        lambda state, image: state * image,
        train_batches=lambda: make_batches(*train, broken)(np.arange(len(train[1]))),
        test_batches=lambda: make_batches(*test)(np.arange(len(test[1]))),
        num_classes=3,
        mesh=mesh or make_mesh(replica=1, data=-1, fsdp=1, tensor=1),
        l2=l2,
    )
    result = evaluator.run(jnp.float32(1.0))
    assert result.keys() == evaluator.metrics.keys()
    return result


def scikit_learn(train, test, l2):
    scaler = StandardScaler().fit(np.float64(train[0]))
    model = LogisticRegression(C=1 / (l2 * len(train[1])), tol=1e-8, max_iter=10_000)
    model.fit(scaler.transform(np.float64(train[0])), train[1])
    return model.score(scaler.transform(np.float64(test[0])), test[1])


def test_the_weight_is_chosen_on_held_out_training_images():
    """Not on the test images, which would choose another weight here."""
    train, test = noisy(61), noisy(80)
    weights = (1e-3, 0.03, 1.0)
    held_out = np.isin(np.arange(61), np.random.default_rng(0).permutation(61)[:6])
    scores = {}
    for l2 in weights:
        scaler = StandardScaler().fit(np.float64(train[0]))
        model = LogisticRegression(C=1 / (l2 * 55), tol=1e-8, max_iter=10_000)
        model.fit(scaler.transform(np.float64(train[0][~held_out])), train[1][~held_out])
        scores[l2] = model.score(
            scaler.transform(np.float64(train[0][held_out])), train[1][held_out]
        )
    result = evaluate(train, test, l2=weights)
    assert result["held_out_top1"] == pytest.approx(max(scores.values()))
    assert scores[result["l2"]] == max(scores.values())
    assert result["top1"] == pytest.approx(scikit_learn(train, test, result["l2"]), abs=0.02)


def test_broken_images_are_left_out():
    (features, labels), test = noisy(84), noisy(40)
    broken = np.arange(0, 84, 4)
    whole = np.setdiff1d(np.arange(84), broken)  # 63: compiled as the 61 above, both padded to 64
    found = evaluate((features, labels), test, l2=(0.1,), broken=broken)
    assert found == evaluate((features[whole], labels[whole]), test, l2=(0.1,))
    with pytest.raises(InputError, match=r"^train_split: none of the images"):
        evaluate((features, labels), test, l2=(0.1,), broken=np.arange(84))


def test_weights_that_cannot_be():
    c = base_config()
    c.evals.probe = linear_probe(train_split="train", test_split="test", every="1 epochs")
    c.evals.probe.l2 = (1e-3, 0.0)
    assert "evals.probe.l2=(0.001, 0.0): needs positive numbers, e.g. 1e-4,1e-2" in find_faults(c)


PROJECTION = RNG.standard_normal((192, 20)).astype(np.float32)


def run_on_digits(mesh):
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size = 64, "digits", 8
    c.data.mean, c.data.std = (0.0,) * 3, (1.0,) * 3
    splits = {"train_split": "train", "test_split": "test", "every": "1 epochs"}
    c.evals.probe = linear_probe(**splits, l2=(0.1,))
    sources = {
        SplitKey("digits", s, None): make_source("digits", split=s, image_size=(8, 8))
        for s in ("train", "test")
    }
    with jax.set_mesh(mesh):
        return make_evaluators(c, parse_preprocessing(c), Pixels(), mesh, sources)["probe"].run(
            State(PROJECTION, {})
        )


def test_digits_over_eight_devices():
    """With 1,437 images, which do not divide over eight devices."""
    result = run_on_digits(make_mesh(replica=1, data=4, fsdp=2, tensor=1))
    features, labels = digit_pixels().reshape(-1, 192) @ PROJECTION, load_digits().target
    held_out = np.arange(len(labels)) % 5 == 0
    expected = scikit_learn(
        (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out]), 0.1
    )
    assert result == {"top1": pytest.approx(expected, abs=1.5 / 360)}
    assert 0.7 < result["top1"] < 1
