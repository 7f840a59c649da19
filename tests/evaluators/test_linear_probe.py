"""The linear probe against scikit-learn's logistic regression."""

import jax.numpy as jnp
import numpy as np
import pytest
from hand_made import OF_SPLITS, digit_splits, run_on_digits, run_on_features
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from vit_jax.config import linear_probe
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import linear_probe as linear_probe_lib
from vit_jax.evaluators.linear_probe import Classifier, LinearProbe, fit

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


def evaluate(train, test, *, l2):
    return run_on_features(LinearProbe(**OF_SPLITS, l2=l2), train, test)


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
    kept, held = ([column[rows] for column in train] for rows in (~held_out, held_out))
    scores = {l2: scikit_learn(kept, held, l2) for l2 in weights}
    result = evaluate(train, test, l2=weights)
    assert result["held_out_top1"] == pytest.approx(max(scores.values()))
    assert scores[result["l2"]] == max(scores.values())
    assert result["top1"] == pytest.approx(scikit_learn(train, test, result["l2"]), abs=0.02)


@pytest.mark.slow
def test_digits_over_eight_devices():
    """With 1,437 images, which do not divide over eight devices."""
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    result = run_on_digits(linear_probe(**OF_SPLITS, l2=(0.1,)), mesh)
    expected = scikit_learn(*digit_splits(), 0.1)
    assert result == {"top1": pytest.approx(expected, abs=1.5 / 360)}
    assert 0.7 < result["top1"] < 1
