"""k nearest neighbours against scikit-learn, on hand-made batches and on the digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from test_fewshot import PROJECTION, Pixels, State, digit_pixels, make_batches

from vit_jax.config import SplitKey, base_config, knn
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.errors import InputError
from vit_jax.evaluators import knn as knn_module
from vit_jax.evaluators import make_evaluators
from vit_jax.evaluators.knn import Knn
from vit_jax.run.validation import find_faults

RNG = np.random.default_rng(0)


def evaluate(train, test, *, broken=(), num_neighbours=(5,), temperature=0.07):
    evaluator = Knn(
        lambda state, image: state * image,
        train_batches=lambda: make_batches(*train, broken)(np.arange(len(train[1]))),
        test_batches=lambda: make_batches(*test)(np.arange(len(test[1]))),
        num_classes=3,
        gathered=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        num_neighbours=num_neighbours,
        temperature=temperature,
    )
    result = evaluator.run(jnp.float32(1.0))
    assert result.keys() == evaluator.metrics.keys()
    return result


def scikit_learn(train, test, k, temperature):
    """The same vote; its distances are 1 - cosine."""
    neighbours = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / temperature)
    )
    neighbours.fit(np.float64(train[0]), train[1])
    return (neighbours.predict(np.float64(test[0])) == test[1]).mean()


def noisy(num_examples):
    """Features of various lengths around three directions, and labels."""
    labels = RNG.integers(0, 3, num_examples).astype(np.int32)
    features = np.eye(6)[labels] + 0.8 * RNG.standard_normal((num_examples, 6))
    return (features * RNG.uniform(0.1, 10, (num_examples, 1))).astype(np.float32), labels


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_the_vote_is_that_of_scikit_learn(temperature, monkeypatch):
    """In blocks of several test images, the last one shorter."""
    monkeypatch.setattr(knn_module, "_SIMILARITIES_AT_ONCE", 90 * 17)
    train, test = noisy(90), noisy(200)
    result = evaluate(train, test, num_neighbours=(1, 4, 30), temperature=temperature)
    assert len(set(result.values())) == 3
    for k in (1, 4, 30):
        assert result[f"{k}nn_top1"] == scikit_learn(train, test, k, temperature)


def test_near_neighbours_weigh_more():
    """One very near against two less near neighbours: the temperature decides who wins."""
    train = np.float32([[1, 0], [0.8, 0.6], [0.8, -0.6]]), np.int32([0, 1, 1])
    test = np.float32([[3, 0]]), np.int32([0])
    assert evaluate(train, test, num_neighbours=(3,), temperature=0.1) == {"3nn_top1": 1.0}
    assert evaluate(train, test, num_neighbours=(3,), temperature=10.0) == {"3nn_top1": 0.0}


def test_fewer_images_than_neighbours_all_vote():
    train, test = noisy(7), noisy(30)
    found = evaluate(train, test, num_neighbours=(7, 100))
    assert found["100nn_top1"] == found["7nn_top1"] == scikit_learn(train, test, 7, 0.07)


def test_broken_images_are_no_neighbours():
    (features, labels), test = noisy(60), noisy(30)
    broken = np.arange(0, 60, 3)
    whole = np.setdiff1d(np.arange(60), broken)
    found = evaluate((features, labels), test, broken=broken)
    assert found == evaluate((features[whole], labels[whole]), test)
    with pytest.raises(InputError, match=r"^train_split: none of the images"):
        evaluate((features, labels), test, broken=np.arange(60))


def test_choices_that_cannot_be():
    c = base_config()
    c.evals.near = knn(train_split="train", test_split="test", every="1 epochs")
    c.evals.near.num_neighbours, c.evals.near.temperature = (10, 0), 0.0
    faults = [fault for fault in find_faults(c) if "near" in fault]
    assert faults == [
        "evals.near.num_neighbours=(10, 0): needs positive ints, e.g. 10,20,200",
        "evals.near.temperature=0.0: needs a positive number, e.g. 0.07",
    ]


def run_on_digits(mesh):
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size = 64, "digits", 8
    c.data.mean, c.data.std = (0.0,) * 3, (1.0,) * 3
    c.evals.near = knn(train_split="train", test_split="test", every="1 epochs")
    c.evals.near.num_neighbours = (10, 200)
    sources = {
        SplitKey("digits", s, None): make_source("digits", split=s, image_size=(8, 8))
        for s in ("train", "test")
    }
    with jax.set_mesh(mesh):
        return make_evaluators(c, parse_preprocessing(c), Pixels(), mesh, sources)["near"].run(
            State(PROJECTION, {})
        )


def test_digits_over_eight_devices():
    result = run_on_digits(make_mesh(replica=1, data=4, fsdp=2, tensor=1))
    features, labels = digit_pixels().reshape(-1, 192) @ PROJECTION, load_digits().target
    held_out = np.arange(len(labels)) % 5 == 0
    train, test = (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])
    expected = {f"{k}nn_top1": scikit_learn(train, test, k, 0.07) for k in (10, 200)}
    assert result == pytest.approx(expected, abs=1e-12)
    assert 0.8 < result["200nn_top1"] < result["10nn_top1"] < 1


def test_only_as_many_neighbours_as_there_are_images():
    c = base_config()
    c.global_batch_size, c.data.name, c.data.image_size = 64, "synthetic", 8
    c.evals.near = knn(train_split="train", test_split="test", every="1 epochs")
    source = make_source(
        "synthetic", split="train", image_size=(8, 8), num_classes=2, num_examples=15
    )
    sources = {SplitKey("synthetic", s, None): source for s in ("train", "test")}
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)

    def make():
        return make_evaluators(c, parse_preprocessing(c), Pixels(), mesh, sources)["near"]

    assert make()._num_neighbours == (10,)
    c.evals.near.num_neighbours = (20, 100)
    with pytest.raises(InputError, match=r"near\.num_neighbours=\(20, 100\): .* 15 images"):
        make()
