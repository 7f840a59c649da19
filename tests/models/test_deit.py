import re

import jax
import numpy as np
import numpy_vit
import pytest
from formulas import SIZES as VIT_SIZES
from formulas import vit_macs, vit_params
from numpy_vit import dense, random_params
from read_settings import make_loss

from vit_jax.experiment.state import TrainState
from vit_jax.models import create_model
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.supervised import Supervised
from vit_jax.transfer.fit import stack_layers

SIZES = {"width": 16, "depth": 1, "mlp_dim": 24, "num_heads": 2}
IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, 4, 12, 3)).astype(np.float32)


def by_hand(name):
    """(parameters, multiply-adds) of the model called `name`: one more token, position and head."""
    variant, patch = re.fullmatch(r"DeiT-(\w+)/(\d+)", name).groups()
    size, sizes = (int(patch),) * 2, {"grid": (224 // int(patch),) * 2, "num_classes": 1000}
    width = VIT_SIZES[variant][0]
    params = vit_params(variant, size, **sizes) + 2 * width + (width + 1) * 1000
    return params, vit_macs(variant, size, prefix=2, num_heads=2, **sizes)


def small(num_classes=5, **fields):
    return create_model("DeiT-mu/2", num_classes, (4, 12), **(SIZES | fields))


def test_it_follows_the_equations():
    """With scanned layers; goldens have unrolled ones."""
    plain = small()
    params = random_params(plain, IMAGES)
    tokens = [numpy_vit.vit(plain, params, image)["tokens"] for image in IMAGES]
    heads = {
        "class": [dense(params["head"], t[0]) for t in tokens],
        "distillation": [dense(params["head_distillation"], t[1]) for t in tokens],
    }
    model, params = small(scan=True), stack_layers(params)
    apply = jax.jit(model.apply, static_argnames=("train", "method"))
    features = [t[:2].mean(axis=0) for t in tokens]
    found = apply({"params": params}, IMAGES, method="features")
    np.testing.assert_allclose(found, features, atol=1e-5)
    mean = np.mean(list(heads.values()), axis=0)
    np.testing.assert_allclose(apply({"params": params}, IMAGES), mean, atol=1e-5)
    named = apply({"params": params}, IMAGES, train=True)
    assert named.keys() == heads.keys()
    for name, logits in heads.items():
        np.testing.assert_allclose(named[name], logits, atol=1e-5)


def test_without_second_head_the_class_token_is_classified():
    model = small(distillation_head=False)
    params = random_params(model, IMAGES)
    assert "head_distillation" not in params
    expected = [numpy_vit.vit(model, params, image)["__call__"] for image in IMAGES]
    found = jax.jit(model.apply, static_argnames="train")({"params": params}, IMAGES, train=True)
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)


def test_a_label_trains_both_heads():
    model, label = small(), np.array([1, 4])
    params = random_params(model, IMAGES)
    batch = {"image": IMAGES, "label": label, "mask": np.ones(2, np.float32)}
    loss = make_loss("softmax")
    state = TrainState(0, params, {}, ())
    objective = Supervised().bind(model, loss, RunFacts((), ()))
    out = objective.loss(params, state, batch, None, jax.random.key(0))
    heads = model.apply({"params": params}, IMAGES, train=True)
    expected = np.mean([loss(logits, label).sum() for logits in heads.values()])
    assert float(out.loss_sum) == pytest.approx(float(expected), rel=1e-5)
