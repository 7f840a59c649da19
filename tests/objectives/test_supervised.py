import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from read_settings import make_loss, settings_of

from vit_jax.config import LOSSES, base_config
from vit_jax.experiment.state import TrainState
from vit_jax.models import create_model
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.losses import Loss, balanced_weights, hits
from vit_jax.objectives.metrics import training_metrics
from vit_jax.objectives.supervised import Supervised

RNG = np.random.default_rng(0)
B, C = 6, 5
LOGITS_BC = (3 * RNG.standard_normal((B, C))).astype(np.float32)
LABELS_B = np.array([0, 4, 2, 2, 1, 3], np.int32)
MULTI_BC = (RNG.random((B, C)) < 0.5).astype(np.float32)
MIXED_BC = RNG.dirichlet(np.ones(C), B).astype(np.float32)
LABELS = {"int": LABELS_B, "multi-label": MULTI_BC, "mixed": MIXED_BC}


def reference_loss(name, logits_C, target_C, label_smoothing):
    target_C = (1 - label_smoothing) * target_C + label_smoothing / C
    logits_C = logits_C.astype(np.float64)
    if name == "softmax":
        log_p_C = logits_C - np.log(np.exp(logits_C).sum())
        return -(target_C * log_p_C).sum()
    p_C = 1 / (1 + np.exp(-logits_C))
    return -(target_C * np.log(p_C) + (1 - target_C) * np.log(1 - p_C)).sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", LABELS)
def test_losses(name, label_smoothing, kind):
    labels = LABELS[kind]
    targets_BC = np.eye(C)[labels] if labels.ndim == 1 else labels.astype(np.float64)
    ours = make_loss(name, label_smoothing)(LOGITS_BC, labels)
    expected = [
        reference_loss(name, logits_C, target_C, label_smoothing)
        for logits_C, target_C in zip(LOGITS_BC, targets_BC, strict=True)
    ]
    np.testing.assert_allclose(ours, expected, rtol=2e-5)


def test_a_loss_of_the_whole_batch_is_refused(monkeypatch):
    """Masked images would count."""

    class Mean(Loss):
        def __call__(self, logits_BC, labels, label_smoothing):
            return jnp.square(logits_BC).mean()

    monkeypatch.setitem(LOSSES, "mine", Mean)
    with at_fault("loss.name"):
        jax.eval_shape(make_loss("mine"), LOGITS_BC, LABELS_B)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_certain_logits_are_finite(name):
    logits = jnp.asarray([[1e4, -1e4], [-1e4, 1e4]])
    loss = make_loss(name)
    assert loss(logits, jnp.asarray([0, 1])).tolist() == [0.0, 0.0]
    wrong = jax.grad(lambda x: loss(x, jnp.asarray([1, 0])).sum())(logits)
    assert np.isfinite(wrong).all()


def test_hits_of_int_labels():
    logits = np.array([[3, 2, 1], [3, 2, 1], [1, 2, 3]], np.float32)
    labels = np.array([0, 1, 0], np.int32)
    assert hits(logits, labels).tolist() == [1, 0, 0]
    assert hits(logits, labels, k=2).tolist() == [1, 1, 0]
    assert hits(logits, labels, k=5).tolist() == [1, 1, 1]  # more than there are classes


def test_hits_any_of_the_right_classes():
    logits = np.array([[3, 2, 1], [3, 2, 1], [3, 2, 1]], np.float32)
    labels = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], np.float32)
    assert hits(logits, labels).tolist() == [1, 0, 0]


def test_hits_of_mixed_labels_are_of_the_class_that_weighs_most():
    logits = np.array([[3, 2, 1]] * 4, np.float32)
    labels = np.array([[0.7, 0.3, 0], [0.3, 0.7, 0], [0.5, 0.5, 0], [0, 0.4, 0.6]], np.float32)
    assert hits(logits, labels).tolist() == [1, 0, 1, 0]
    assert hits(logits, labels, k=2).tolist() == [1, 1, 1, 0]


MODEL = create_model("ViT-mu/4", C, 8, dropout=0.2)
IMAGES = RNG.uniform(-1, 1, (B, 8, 8, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(lambda: MODEL.init(jax.random.key(0), IMAGES))["params"]
    return jax.tree.map(
        lambda leaf: (0.1 * RNG.standard_normal(leaf.shape)).astype(np.float32), shapes
    )


def metrics_of(several=False):
    """What a run logs by default."""
    config = base_config()
    config.data.multi_label = several
    settings = settings_of(config)
    return training_metrics(settings.log, settings.loss, settings.data)


@jax.jit
def sums_and_gradients(params, batch, rng):
    facts = RunFacts((), (), metrics=metrics_of().rows)
    objective = Supervised().bind(MODEL, make_loss("softmax", 0.1), facts)

    def loss_sum(params):
        out = objective.loss(params, TrainState(0, params, {}, ()), batch, None, rng)
        return out.loss_sum, out

    grads, out = jax.grad(loss_sum, has_aux=True)(params)
    return out, grads


KEY = jax.random.key(3)


def batch_of(mask, images=IMAGES, labels=LABELS_B):
    return {"image": images, "label": labels, "mask": np.asarray(mask, np.float32)}


@pytest.mark.parametrize("several", [False, True])
def test_several_labels_have_no_top1(params, several):
    facts = RunFacts((), (), metrics=metrics_of(several).rows)
    objective = Supervised().bind(MODEL, make_loss("sigmoid"), facts)
    labels = np.eye(C, dtype=np.float32)[LABELS_B]
    batch, state = batch_of(np.ones(B), labels=labels), TrainState(0, params, {}, ())
    out = jax.eval_shape(objective.loss, params, state, batch, None, KEY)
    assert ("top1" in out.metric_sums) is not several


def test_masked_rows_count_for_nothing(params):
    mask = [1, 0, 1, 1, 0, 0]
    out, grads = sums_and_gradients(params, batch_of(mask), KEY)
    masked = np.equal(mask, 0)
    images = np.where(masked[:, None, None, None], 100 * IMAGES[::-1], IMAGES)
    labels = np.where(masked, (LABELS_B + 1) % C, LABELS_B)
    other, other_grads = sums_and_gradients(params, batch_of(mask, images, labels), KEY)
    jax.tree.map(np.testing.assert_array_equal, out, other)
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)
    assert out.weight_sum == 3
    # The values of those rows do count where the mask is 1.
    seen, _ = sums_and_gradients(params, batch_of(np.ones(B), images, labels), KEY)
    assert abs(seen.loss_sum - out.loss_sum) > 0.1


def test_sums_add_over_the_rows(params):
    whole, _ = sums_and_gradients(params, batch_of(np.ones(B)), KEY)
    rows = [sums_and_gradients(params, batch_of(row), KEY)[0] for row in np.eye(B)]
    assert sum(row.loss_sum for row in rows) == pytest.approx(float(whole.loss_sum), rel=1e-5)
    assert sum(row.metric_sums["top1"] for row in rows) == whole.metric_sums["top1"]
    apply = jax.jit(functools.partial(MODEL.apply, train=True))
    logits = apply({"params": params}, IMAGES, rngs={"dropout": KEY})
    assert whole.metric_sums["top1"] == (np.argmax(logits, axis=1) == LABELS_B).sum()
    expected = make_loss("softmax", 0.1)(logits, LABELS_B).sum()
    assert whole.loss_sum == pytest.approx(float(expected), rel=1e-5)


def test_a_batch_that_is_masked_altogether(params):
    out, grads = sums_and_gradients(params, batch_of(np.zeros(B)), KEY)
    assert out.loss_sum == out.weight_sum == out.metric_sums["top1"] == 0
    for leaf in jax.tree.leaves(grads):
        assert (leaf == 0).all()


def test_class_weights():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    labels = np.array([0, 2, 1, 0])
    weights = np.array([0.5, 2.0, 4.0])
    plain = np.asarray(make_loss("softmax")(logits, labels))
    found = make_loss("softmax", class_weights="0.5,2,4")(logits, labels)
    np.testing.assert_allclose(found, plain * weights[labels], rtol=1e-6)

    targets = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], np.float32)
    x = logits.astype(np.float64)
    positive, negative = np.logaddexp(0, -x), np.logaddexp(0, x)
    expected = (weights * targets * positive + (1 - targets) * negative).sum(axis=1)
    found = make_loss("sigmoid", class_weights="0.5,2,4")(logits, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_mixed_image_may_have_the_whole_of_both_classes():
    logits = RNG.normal(size=(2, 3)).astype(np.float32)
    mixed, whole = np.array([[0.7, 0, 0.3], [0, 1, 0]]), np.array([[1, 0, 1], [0, 1, 0]])
    expected = make_loss("sigmoid")(logits, jnp.asarray(whole, jnp.float32))
    found = make_loss("sigmoid", whole_targets=True)(logits, jnp.asarray(mixed, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.allclose(make_loss("sigmoid")(logits, jnp.asarray(mixed, jnp.float32)), expected)


def test_balanced_weights():
    counts = np.array([6, 3, 1, 0])
    by_class = balanced_weights(counts, 10, True)
    np.testing.assert_allclose(by_class, [10 / 24, 10 / 12, 2.5, 1])
    np.testing.assert_allclose(balanced_weights(counts, 10, False), [4 / 6, 7 / 3, 9, 1])
