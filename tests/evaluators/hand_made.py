"""Runs evaluators on hand-made batches, whose images are the model's outputs, and on the digits."""

import types
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from read_settings import settings_of, splits_of
from sklearn.datasets import load_digits

from vit_jax.config import base_config
from vit_jax.data import make_source
from vit_jax.data.host_tf import tf
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import make_evaluators

EVERY = {"every": "1 epochs"}
OF_SPLIT = EVERY | {"split": "test"}
OF_SPLITS = EVERY | {"train_split": "train", "test_split": "test"}
PROJECTION = np.random.default_rng(0).standard_normal((192, 40)).astype(np.float32)


class State(NamedTuple):
    """The parts of a state that evaluators read."""

    params: Any
    model_state: Any


class Pixels:
    """A model whose features are the product of its parameters and the pixels."""

    def apply(self, variables, images, train, method):
        assert (train, method) == (False, "features")
        return images.reshape(len(images), -1) @ variables["params"]


PIXELS = Pixels()


def make_inputs(batches, **given):
    """`EvalInputs` of a model whose outputs are the images times the state.

    `batches`: those of a pass, or split key, record ids -> batches.
    """
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    replicated = NamedSharding(mesh, PartitionSpec())
    number = None if callable(batches) or not batches else batches[0]["image"].shape[-1]
    inputs = types.SimpleNamespace(
        source=lambda key="split": types.SimpleNamespace(num_classes=number),
        name="own", settings=settings_of(base_config()), folder=None, see=None,
        image_size=(4, 4), batch_size=4,
        apply=lambda state, images, method="__call__": state * images,
        batches=batches if callable(batches) else lambda *_, **__: batches,
        mesh=mesh, replicated=replicated, jit=partial(jax.jit, out_shardings=replicated),
    )  # fmt: skip
    inputs.spread = lambda number: inputs.batches(record_ids=np.arange(number))
    inputs.__dict__.update(given)
    return inputs


def run(evaluator, batches, absent=(), **given):
    """What `evaluator` finds: all that it declares, except for what is `absent`."""
    result = evaluator.bind(make_inputs(batches, **given))(np.float32(1))
    assert {*result} == {*evaluator.reports()} - {*absent}
    return result


def make_batches(features, labels, broken=()):
    """Record ids, None for all -> padded batches of four, whose images are the features."""

    def batches(record_ids=None):
        record_ids = np.arange(len(labels)) if record_ids is None else record_ids
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


def run_on_features(evaluator, train, test, *, broken=(), broken_tests=(), **given):
    """What `evaluator` finds with (features, labels) of two splits, of three classes."""
    splits = {
        "train_split": make_batches(*train, broken),
        "test_split": make_batches(*test, broken_tests),
    }
    source = types.SimpleNamespace(
        num_classes=3, record_files=None, num_examples=len(train[1]), encoded=False,
        read=lambda ids: {"label": tf.gather(train[1], ids)},
    )  # fmt: skip

    def batches(split_key, record_ids=None):
        return splits[split_key](record_ids)

    return run(evaluator, batches, source=lambda key: source, **given)


def make_on_digits(entry, model, mesh, **sizes):
    """`entry` bound to the digits, or to `sizes` of synthetic data, with pixels in [0, 1]."""
    c = base_config()
    name = "synthetic" if sizes else "digits"
    c.global_batch_size, c.data.name, c.data.image_size = 24, name, 8
    c.data.mean, c.data.std = (0.0,) * 3, (1.0,) * 3
    c.evals.own = entry
    sources = {
        key: make_source(name, split=key.split, image_size=(8, 8), **sizes)
        for key in splits_of(c, "own").values()
    }
    return make_evaluators(
        settings_of(c), parse_preprocessing(settings_of(c)), model, mesh, sources
    )["own"]


def run_on_digits(entry, mesh, model=PIXELS, params=PROJECTION):
    """What the evaluator of `entry` finds on the digits."""
    with jax.set_mesh(mesh):
        return make_on_digits(entry, model, mesh)(State(params, {}))


def digit_pixels():
    """All digits as float32 (1797, 8, 8, 3) in [0, 1]."""
    grey = np.rint(load_digits().images * (255 / 16)) / 255
    return np.repeat(grey[..., None], 3, axis=-1).astype(np.float32)


def digit_splits(features=None):
    """(features, labels) of the digits that are trained on, and of those held out."""
    if features is None:
        features = digit_pixels().reshape(-1, 192) @ PROJECTION
    labels = load_digits().target
    held_out = np.arange(len(labels)) % 5 == 0
    return (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])
