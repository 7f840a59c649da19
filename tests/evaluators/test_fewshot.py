"""Few-shot evaluation against scikit-learn's ridge regression, on 1, 8 devices and 2 processes."""

import functools
import json
import logging
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_vit import random_params
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from vit_jax.config import SplitKey, base_config, fewshot
from vit_jax.data import image_batch, make_source
from vit_jax.data.pipeline import host_eval_batches
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.data.sources import read_labels
from vit_jax.devices.mesh import make_mesh
from vit_jax.errors import InputError
from vit_jax.evaluators import make_evaluators
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


def test_both_forms_agree():
    """More features than examples: the form that `ridge` uses then, and the other one."""
    x, y = RNG.standard_normal((30, 80)), RNG.standard_normal((30, 6))
    primal = np.linalg.solve(x.T @ x + 0.5 * np.eye(80), x.T @ y)
    np.testing.assert_allclose(ridge(x, y, 0.5), primal, rtol=0, atol=1e-10)


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


def make_batches(features, labels, broken=()):
    """record ids -> padded batches of four, whose images are the features."""

    def batches(record_ids):
        for start in range(0, len(record_ids), 4):
            ids = record_ids[start : start + 4]
            padding = 4 - len(ids)
            yield {
                "image": np.pad(features[ids], ((0, padding), (0, 0)), constant_values=7.0),
                "label": np.pad(labels[ids], (0, padding), constant_values=1),
                "id": np.pad(ids, (0, padding), constant_values=-1),
                "mask": np.pad(~np.isin(ids, broken), (0, padding)).astype(np.float32),
            }

    return batches


def evaluate(
    features, labels, test, *, broken=(), broken_tests=(), shots=(2,), l2=(1.0,), num_draws=3
):
    support = make_batches(features, labels, broken)
    tests = make_batches(*test, broken_tests)
    evaluator = FewShot(
        lambda state, image: state * image,
        labels=lambda: labels,
        support_batches=support,
        test_batches=lambda: tests(np.arange(len(test[1]))),
        num_classes=3,
        gathered=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        shots=shots,
        l2=l2,
        num_draws=num_draws,
    )
    result = evaluator.run(jnp.float32(1.0))
    assert result.keys() == evaluator.metrics.keys()
    return result


def clusters(num_examples, spread):
    """Features around three corners, and labels."""
    labels = RNG.integers(0, 3, num_examples).astype(np.int32)
    noise = spread * RNG.standard_normal((num_examples, 4))
    return (np.eye(4)[labels] + noise).astype(np.float32), labels


def test_mean_and_deviation_over_the_draws():
    (features, labels), test = clusters(60, 0.4), clusters(50, 0.4)
    result = evaluate(features, labels, test, shots=(1, 3))
    assert result.keys() == {
        "1shot_top1", "1shot_top1_std", "3shot_top1", "3shot_top1_std",
    }  # fmt: skip
    for shots in (1, 3):
        top1 = []
        for seed in range(3):
            ids = draw_support(labels, 3, 3, seed)[:, :shots].ravel()
            scores = scikit_learn_scores(features[ids], labels[ids], test[0], 1.0, 3)
            top1.append((scores.argmax(axis=1) == test[1]).mean())
        assert len(set(top1)) > 1
        assert result[f"{shots}shot_top1"] == pytest.approx(np.mean(top1), abs=1e-12)
        assert result[f"{shots}shot_top1_std"] == pytest.approx(np.std(top1, ddof=1), abs=1e-12)


def test_one_draw_has_no_deviation():
    (features, labels), test = clusters(60, 0.1), clusters(9, 0.1)
    assert evaluate(features, labels, test, num_draws=1) == {"2shot_top1": 1.0}


def test_of_several_weights_the_best_counts():
    (features, labels), test = clusters(90, 0.5), clusters(200, 0.5)
    weights = (1e-3, 1.0, 1e3)
    alone = [evaluate(features, labels, test, shots=(5,), l2=(w,)) for w in weights]
    result = evaluate(features, labels, test, shots=(5,), l2=weights)
    top1 = [r["5shot_top1"] for r in alone]
    assert len(set(top1)) > 1
    assert result.pop("5shot_l2") == weights[np.argmax(top1)]
    assert result == alone[np.argmax(top1)]


def test_broken_images_are_left_out():
    """As if they did not exist; without images of the support set less is learnt."""
    (features, labels), test = clusters(60, 0.2), clusters(30, 0.2)
    broken = draw_support(labels, 3, 2, 0)[:, 0]
    other = features.copy()
    other[broken] = 1e6
    assert evaluate(features, labels, test, broken=broken) == evaluate(
        other, labels, test, broken=broken
    )


@pytest.mark.parametrize("has", ["no images", "broken images"])
@pytest.mark.parametrize("key", ["train_split", "test_split"])
def test_a_split_of_which_nothing_can_be_read_is_refused(key, has):
    splits = {"train_split": clusters(60, 0.2), "test_split": clusters(30, 0.2)}
    broken = dict.fromkeys(splits, ())
    if has == "no images":
        splits[key] = tuple(column[:0] for column in splits[key])
    else:
        broken[key] = np.arange(60)
    with pytest.raises(InputError, match=f"^{key}: none of the images .* can be read"):
        evaluate(
            *splits["train_split"], splits["test_split"],
            broken=broken["train_split"], broken_tests=broken["test_split"],
        )  # fmt: skip


def test_a_draw_of_which_nothing_can_be_read_is_refused():
    (features, labels), test = clusters(60, 0.2), clusters(30, 0.2)
    broken = draw_support(labels, 3, 1, seed=1)
    with pytest.raises(InputError, match=r"^train_split: none of the images"):
        evaluate(features, labels, test, broken=broken, shots=(1, 5))


def test_a_class_with_too_few_images_gives_what_it_has(caplog):
    features, labels = clusters(60, 0.1)
    labels[labels == 2] = 0
    labels[:1], features[:1] = 2, np.eye(4)[2]
    test = clusters(30, 0.01)
    result = evaluate(features, labels, test, shots=(5,))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "1 of 3 classes have fewer than 5 images" in record.getMessage()
    assert 0 < result["5shot_top1"] <= 1


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"shots": ()}, "shots=(): needs positive ints"),
        ({"shots": (5, 0)}, "shots=(5, 0): needs positive ints"),
        ({"shots": (1.5,)}, "shots=(1.5,): needs positive ints"),
        ({"l2": (0.0,)}, "l2=(0.0,): needs positive numbers"),
        ({"l2": 1024.0}, "l2=1024.0: needs positive numbers"),
        ({"num_draws": 0}, "num_draws=0: needs a positive int"),
    ],
)
def test_choices_that_cannot_be(choices, says):
    with pytest.raises(InputError) as error:
        evaluate(*clusters(6, 0.1), clusters(6, 0.1), **choices)
    assert says in str(error.value)


# On the digits, through the data pipeline


def test_labels_are_read_alone():
    source = make_source("digits", split="train", image_size=(8, 8))
    expected = np.delete(load_digits().target, np.s_[::5])
    np.testing.assert_array_equal(read_labels(source, 0, 1437), expected)
    np.testing.assert_array_equal(read_labels(source, 100, 107), expected[100:107])
    assert read_labels(source, 5, 5).shape == (0,)


def test_chosen_records_are_read_in_their_order():
    source = make_source("digits", split="train", image_size=(8, 8))
    ids = np.array([1000, 3, 77, 4, 500])
    batches = list(
        host_eval_batches(source, image_batch(4, (8, 8)), rows=np.arange(4), record_ids=ids)
    )
    found = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}
    np.testing.assert_array_equal(found["id"], [*ids, -1, -1, -1])
    np.testing.assert_array_equal(found["mask"], [1, 1, 1, 1, 1, 0, 0, 0])
    images = np.delete(load_digits().images, np.s_[::5], axis=0)[ids]
    np.testing.assert_array_equal(found["image"][:5, ..., 0], np.rint(images * (255 / 16)))


class State(NamedTuple):
    """The parts of a state that evaluators read."""

    params: Any
    model_state: Any


class Pixels:
    """A model whose features are the product of its parameters and the pixels."""

    def apply(self, variables, images, train, method):
        assert (train, method) == (False, "features")
        return images.reshape(len(images), -1) @ variables["params"]


PROJECTION = np.random.default_rng(0).standard_normal((192, 40)).astype(np.float32)


def run_on_digits(batch_size, mesh, model=None, params=PROJECTION):
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size = 24, "digits", 8
    c.data.mean, c.data.std = (0.0,) * 3, (1.0,) * 3
    c.evals.few = fewshot(
        train_split="train", test_split="test", every="1 epochs", shots=(1, 5),
        batch_size=batch_size,
    )  # fmt: skip
    sources = {
        SplitKey("digits", s, None): make_source("digits", split=s, image_size=(8, 8))
        for s in ("train", "test")
    }
    with jax.set_mesh(mesh):
        evaluators = make_evaluators(c, parse_preprocessing(c), model or Pixels(), mesh, sources)
        return evaluators["few"].run(State(params, {}))


def scikit_learn_on_digits(features):
    """{metric: value} from the features (1797, D) of all digits."""
    labels = load_digits().target
    held_out = np.arange(len(labels)) % 5 == 0
    train, train_labels = features[~held_out], labels[~held_out]
    results = {}
    for shots in (1, 5):
        top1 = []
        for seed in range(3):
            ids = draw_support(train_labels, 10, 5, seed)[:, :shots].ravel()
            scores = scikit_learn_scores(
                train[ids], train_labels[ids], features[held_out], 1024.0, 10
            )
            top1.append((scores.argmax(axis=1) == labels[held_out]).mean())
        results[f"{shots}shot_top1"] = np.mean(top1)
        results[f"{shots}shot_top1_std"] = np.std(top1, ddof=1)
    return results


def digit_pixels():
    """All digits as float32 (1797, 8, 8, 3) in [0, 1]."""
    grey = np.rint(load_digits().images * (255 / 16)) / 255
    return np.repeat(grey[..., None], 3, axis=-1).astype(np.float32)


def test_digits_over_eight_devices():
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    results = [run_on_digits(batch_size, mesh) for batch_size in (None, 64)]
    assert results[0] == results[1]
    expected = scikit_learn_on_digits(digit_pixels().reshape(-1, 192) @ PROJECTION)
    assert results[0] == pytest.approx(expected, abs=1e-12)
    assert 0.3 < results[0]["1shot_top1"] < results[0]["5shot_top1"] < 1


def test_features_are_what_the_head_gets():
    """For a ViT: those before its hidden head layer."""
    model = create_model("ViT-mu/4", 10, 8, hidden_head=True, num_heads=2, mlp_dim=32)
    pixels = digit_pixels()
    params = random_params(model, pixels)
    features = jax.jit(functools.partial(model.apply, method="features"))
    expected = scikit_learn_on_digits(np.asarray(features({"params": params}, pixels)))
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    assert run_on_digits(None, mesh, model, params) == pytest.approx(expected, abs=1e-12)


PROGRAM = """
import json, sys, jax
process_id, port = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, process_id)
from vit_jax.devices.mesh import make_mesh
import test_fewshot
print(json.dumps(test_fewshot.all_on_digits(make_mesh(replica=1, data=4, fsdp=1, tensor=1))))
"""


def all_on_digits(mesh):
    """Results of each evaluator that learns from features."""
    import test_knn
    import test_linear_probe

    found = [run_on_digits(None, mesh)]
    return found + [test.run_on_digits(mesh) for test in (test_knn, test_linear_probe)]


@pytest.mark.slow
def test_two_processes_find_the_same_as_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = f"import sys; sys.path = {sys.path}" + PROGRAM
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(i), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    both = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    alone = all_on_digits(make_mesh(replica=1, data=4, fsdp=1, tensor=1, devices=jax.devices()[:4]))
    assert both == [alone, alone]
