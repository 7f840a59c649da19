"""Few-shot evaluation against scikit-learn's ridge regression, on 1, 8 devices and 2 processes."""

import functools
import json

import jax
import numpy as np
import pytest
from hand_made import OF_SPLITS, digit_pixels, digit_splits, run_on_digits, run_on_features
from numpy_vit import random_params
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from started_job import said_by_two

from vit_jax.base.errors import InputError
from vit_jax.config import fewshot, knn, linear_probe
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators.fewshot import FewShot, draw_support, predict, ridge
from vit_jax.models import create_model

RNG = np.random.default_rng(0)


# Which examples are drawn


def test_a_draw_has_so_many_of_each_class():
    labels = RNG.integers(0, 7, 500)
    drawn = draw_support(labels, 7, 12, seed=3)
    assert drawn.shape == (7, 12)
    assert len(np.unique(drawn)) == 84
    np.testing.assert_array_equal(labels[drawn], np.repeat(np.arange(7), 12).reshape(7, 12))


def test_a_draw_is_a_function_of_the_labels_and_the_seed():
    labels = RNG.integers(0, 7, 500)
    drawn = [draw_support(labels, 7, 5, seed) for seed in (0, 1, 0)]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert (drawn[0] != drawn[1]).any(axis=1).all()
    np.testing.assert_array_equal(draw_support(labels, 7, 2, 0), drawn[0][:, :2])


def test_every_example_of_a_class_is_as_likely():
    labels = np.repeat([0, 1], 10)
    counts = np.zeros(20)
    for seed in range(2000):
        counts[draw_support(labels, 2, 3, seed)] += 1
    np.testing.assert_allclose(counts / 2000, 0.3, atol=0.05)


def test_a_draw_from_a_class_that_has_too_few():
    drawn = draw_support(np.array([2, 0, 2, 2, 0]), 4, 3, seed=0)
    assert [sorted(row.tolist()) for row in drawn] == [
        [-1, 1, 4], [-1, -1, -1], [0, 2, 3], [-1, -1, -1],
    ]  # fmt: skip


# Least squares


@pytest.mark.parametrize(("num_examples", "width"), [(30, 80), (80, 30), (40, 40), (1, 5)])
@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 2.0**10])
def test_ridge_is_that_of_scikit_learn(num_examples, width, l2):
    x, y = RNG.standard_normal((num_examples, width)), RNG.standard_normal((num_examples, 6))
    expected = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(x, y).coef_.T
    found = ridge(x, y, l2)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_weight_lost_in_rounding_is_refused():
    x = np.repeat(1e3 * RNG.standard_normal((4, 9)), 2, axis=0)
    with pytest.raises(InputError, match=r"l2=1e-13: too small.*larger"):
        ridge(x, np.ones((8, 2)), 1e-13)


@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")
def test_features_of_a_diverged_model_do_not_stop_the_evaluation():
    support, labels = np.full((6, 4), np.nan, np.float32), np.arange(6) % 2
    (found,) = predict(support, labels, support, num_classes=2, l2=(1.0,))
    assert found.shape == (6,)


def scikit_learn_scores(support, labels, test, l2, num_classes):
    """The same classifier, built from scikit-learn."""
    scaler = StandardScaler().fit(support.astype(np.float64))
    scaler.scale_ = np.sqrt(scaler.var_) + 1e-5

    def whiten(x):
        return np.hstack([scaler.transform(x.astype(np.float64)), np.full((len(x), 1), 100.0)])

    targets = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    model = Ridge(alpha=l2, fit_intercept=False, solver="cholesky")
    return model.fit(whiten(support), targets).predict(whiten(test))


@pytest.mark.parametrize("num_examples", [20, 200])
def test_predictions_are_those_of_scikit_learn(num_examples):
    """With features of various means and scales, a constant one, and uneven classes."""
    labels = RNG.choice(5, num_examples, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    scale, shift = 10.0 ** RNG.uniform(-2, 2, 50), RNG.uniform(-5, 5, 50)

    def features(n):
        x = RNG.standard_normal((n, 50)) * scale + shift
        x[:, 7] = 3.0
        return x.astype(np.float32)

    support, test = features(num_examples), features(300)
    for l2, found in zip(
        (0.1, 1024.0),
        predict(support, labels, test, num_classes=5, l2=(0.1, 1024.0)),
        strict=True,
    ):
        scores = scikit_learn_scores(support, labels, test, l2, 5)
        assert np.diff(np.sort(scores))[:, -1].min() > 1e-8  # no tie
        np.testing.assert_array_equal(found, scores.argmax(axis=1))


# The evaluator, on hand-made batches


def evaluate(train, test, *, shots=(2,), l2=(1.0,), num_draws=3, **broken):
    evaluator = FewShot(**OF_SPLITS, shots=shots, l2=l2, num_draws=num_draws)
    return run_on_features(evaluator, train, test, **broken)


def clusters(num_examples, spread):
    """Features around three corners, and labels."""
    labels = RNG.integers(0, 3, num_examples).astype(np.int32)
    noise = spread * RNG.standard_normal((num_examples, 4))
    return (np.eye(4)[labels] + noise).astype(np.float32), labels


def expected(train, test, shots, l2, num_classes):
    """{metric: value} of three draws by scikit-learn."""
    results = {}
    for k in shots:
        top1 = []
        for seed in range(3):
            ids = draw_support(train[1], num_classes, max(shots), seed)[:, :k].ravel()
            scores = scikit_learn_scores(train[0][ids], train[1][ids], test[0], l2, num_classes)
            top1.append((scores.argmax(axis=1) == test[1]).mean())
        assert len(set(top1)) > 1
        results |= {f"{k}shot_top1": np.mean(top1), f"{k}shot_top1_std": np.std(top1, ddof=1)}
    return results


def test_mean_and_deviation_over_the_draws():
    train, test = clusters(60, 0.4), clusters(50, 0.4)
    result = evaluate(train, test, shots=(1, 3))
    assert result == pytest.approx(expected(train, test, (1, 3), 1.0, 3), abs=1e-12)


def test_of_several_weights_the_best_counts():
    train, test, weights = clusters(90, 0.5), clusters(200, 0.5), (1e-3, 1.0, 1e3)
    few = {"shots": (5,), "num_draws": 1}  # which have no deviation
    alone = [evaluate(train, test, **few, l2=(weight,)) for weight in weights]
    result = evaluate(train, test, **few, l2=weights)
    top1 = [r["5shot_top1"] for r in alone]
    assert len(set(top1)) > 1
    assert result.pop("5shot_l2") == weights[np.argmax(top1)]
    assert result == alone[np.argmax(top1)]


def test_a_draw_of_which_nothing_can_be_read_is_refused():
    (features, labels), test = clusters(60, 0.2), clusters(30, 0.2)
    broken = draw_support(labels, 3, 1, seed=1)
    with pytest.raises(InputError, match=r"^train_split: none of the images"):
        evaluate((features, labels), test, broken=broken, shots=(1, 5))


def test_a_class_with_too_few_images_gives_what_it_has(caplog):
    features, labels = clusters(60, 0.1)
    labels[labels == 2] = 0
    labels[:1], features[:1] = 2, np.eye(4)[2]
    test = clusters(30, 0.01)
    result = evaluate((features, labels), test, shots=(5,))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 of 3 classes have fewer than 5 images" in record.getMessage()
    assert 0 < result["5shot_top1"] <= 1


# On the digits, through the data pipeline


SHOTS = fewshot(**OF_SPLITS, shots=(1, 5))


def test_digits_over_eight_devices():
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    entries = [SHOTS, fewshot(**OF_SPLITS, shots=(1, 5), batch_size=64)]
    results = [run_on_digits(entry, mesh) for entry in entries]
    assert results[0] == results[1]
    assert results[0] == pytest.approx(expected(*digit_splits(), (1, 5), 1024.0, 10), abs=1e-12)
    assert 0.3 < results[0]["1shot_top1"] < results[0]["5shot_top1"] < 1


def test_features_are_what_the_head_gets():
    """For a ViT: those before its hidden head layer."""
    model = create_model("ViT-mu/4", 10, 8, hidden_head=True, num_heads=2, mlp_dim=32)
    pixels = digit_pixels()
    params = random_params(model, pixels)
    apply = jax.jit(functools.partial(model.apply, method="features"))
    splits = digit_splits(np.asarray(apply({"params": params}, pixels)))
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    found = run_on_digits(SHOTS, mesh, model, params)
    assert found == pytest.approx(expected(*splits, (1, 5), 1024.0, 10), abs=1e-12)


PROGRAM = """
import json, sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from vit_jax.devices.mesh import make_mesh
import test_fewshot
print(json.dumps(test_fewshot.all_on_digits(make_mesh(replica=1, data=4, fsdp=1, tensor=1))))
"""


def all_on_digits(mesh):
    """Results of each evaluator that learns from features."""
    entries = (
        SHOTS,
        knn(**OF_SPLITS, num_neighbours=(10, 200)),
        linear_probe(**OF_SPLITS, l2=(0.1,)),
    )
    return [run_on_digits(entry, mesh) for entry in entries]


@pytest.mark.slow
def test_two_processes_find_the_same_as_one():
    both = [json.loads(said.splitlines()[-1]) for said in said_by_two(PROGRAM, devices=2)]
    alone = all_on_digits(make_mesh(replica=1, data=4, fsdp=1, tensor=1, devices=jax.devices()[:4]))
    assert both == [alone, alone]
