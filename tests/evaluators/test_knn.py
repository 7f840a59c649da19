"""k nearest neighbours against scikit-learn, on hand-made batches and on the digits."""

import types

import numpy as np
import pytest
from hand_made import (
    OF_SPLITS,
    PIXELS,
    digit_splits,
    make_inputs,
    make_on_digits,
    run_on_digits,
    run_on_features,
)
from read_settings import settings_of
from sklearn.neighbors import KNeighborsClassifier

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, knn
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import knn as knn_module
from vit_jax.evaluators.features import Features
from vit_jax.evaluators.knn import Knn

RNG = np.random.default_rng(0)


def evaluate(train, test, *, broken=(), num_neighbours=(5,), temperature=0.07):
    evaluator = Knn(**OF_SPLITS, num_neighbours=num_neighbours, temperature=temperature)
    return run_on_features(evaluator, train, test, broken=broken)


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


def test_fewer_readable_images_than_neighbours_all_vote():
    (features, labels), test = noisy(101), noisy(30)
    found = evaluate((features, labels), test, num_neighbours=(7, 100), broken=np.arange(7, 101))
    expected = scikit_learn((features[:7], labels[:7]), test, 7, 0.07)
    assert found["100nn_top1"] == found["7nn_top1"] == expected


def test_digits_over_eight_devices():
    mesh = make_mesh(replica=1, data=4, fsdp=2, tensor=1)
    result = run_on_digits(knn(**OF_SPLITS, num_neighbours=(10, 200)), mesh)
    expected = {f"{k}nn_top1": scikit_learn(*digit_splits(), k, 0.07) for k in (10, 200)}
    assert result == pytest.approx(expected, abs=1e-12)
    assert 0.8 < result["200nn_top1"] < result["10nn_top1"] < 1


def test_only_as_many_neighbours_as_there_are_images():
    absent = [f"{k}nn_top1" for k in (20, 100, 200)]
    run_on_features(Knn(**OF_SPLITS), noisy(15), noisy(9), absent=absent)
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    entry = knn(**OF_SPLITS, num_neighbours=(20, 100))
    with pytest.raises(InputError, match=r"own\.num_neighbours=\(20, 100\): .* 15 images"):
        make_on_digits(entry, PIXELS, mesh, num_classes=2, num_examples=15)


@pytest.mark.parametrize("data, labels, said", [("unlabelled", "folder", True),
                                                ("folder", "folder", False),
                                                ("unlabelled", "cifar10", False)])  # fmt: skip
def test_folders_of_a_run_without_labels_may_be_no_classes(data, labels, said, caplog):
    config = base_config()
    config.data.name = data
    source = types.SimpleNamespace(name=labels, num_examples=30, num_classes=2)
    inputs = make_inputs([], settings=settings_of(config), source=lambda key="split": source)
    with caplog.at_level("INFO", "vit_jax"):
        Knn(**OF_SPLITS).bind(inputs)
    assert ("evals.own: " in caplog.text and "only if the folders are" in caplog.text) == said


def test_pictures_show_the_most_similar_training_images_first():
    """Features on a circle: the similarity falls with the angle; record ids are not in order."""

    def on_circle(degrees, first):
        angle = np.deg2rad(degrees)
        x_ND = np.stack([np.cos(angle), np.sin(angle)], axis=1) * [[3.0], [0.1]][first > 0]
        ids = first + np.arange(len(degrees))[::-1]
        return Features(x_ND.astype(np.float32), np.zeros(len(ids), np.int32), ids)

    train, test = on_circle(10 * np.arange(20), 100), on_circle([41, 12], 0)
    images = {at: np.full((1, 1, 1), at, np.uint8) for at in (*train.id_N, *test.id_N)}
    inputs = types.SimpleNamespace(images=lambda _, ids: {at: images[at] for at in ids})
    drawn = knn_module._rows_to_draw(inputs, train, test)
    assert np.shape(drawn) == (2, 8, 1, 1, 1)
    of_degrees = {degrees: 119 - degrees // 10 for degrees in range(0, 200, 10)}
    expected = [[1, 40, 50, 30, 60, 20, 70, 10], [0, 10, 20, 0, 30, 40, 50, 60]]
    for row, (test_id, *degrees) in zip(np.array(drawn)[..., 0, 0, 0], expected, strict=True):
        assert row.tolist() == [test_id, *(of_degrees[d] for d in degrees)]
