"""Every loss on fixed arrays: its equation in NumPy, under jit and vmap, and its gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from read_settings import make_loss
from scipy.special import expit, log_softmax, softmax

from vit_jax.objectives.distillation import soft_loss
from vit_jax.objectives.features import cosine_distance, smooth_l1
from vit_jax.objectives.gram import gram_distance
from vit_jax.objectives.koleo import koleo
from vit_jax.objectives.prototypes import cross_entropies, patch_entropies
from vit_jax.objectives.sigreg import sigreg


def waves(*shape, phase=0.0):
    """Numbers from -1 to 1 without a pattern."""
    return np.sin(7.3 * np.arange(np.prod(shape)) + phase).reshape(shape)


LOGITS, OTHER = waves(4, 3), waves(4, 3, phase=1.0)
LABELS = np.array([2, 0, 1, 1])
ONE_HOT = np.eye(3)[LABELS]
SMOOTH = 0.9 * ONE_HOT + 0.1 / 3
TARGETS = softmax(waves(2, 2, 3), axis=2)  # of 2 global views
VIEWS = waves(2, 4, 3)  # of the student
PATCHES, HIDDEN = waves(2, 3, 4), np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def dino():
    """Over pairs of different views, by loops."""
    pairs = [(g, v) for g in range(2) for v in range(4) if g != v]
    losses = [-(TARGETS[:, g] * log_softmax(VIEWS[:, v] / 0.2, axis=1)).sum(1) for g, v in pairs]
    return np.mean(losses, axis=0)


def ibot():
    each = -(softmax(PATCHES[::-1], 2) * log_softmax(PATCHES / 0.2, axis=2)).sum(2)
    return (each * HIDDEN).sum(1) / HIDDEN.sum(1)


def nearest():
    x = unit(LOGITS)
    distance = np.linalg.norm(x[:, None] - x[None], axis=2) + 9 * np.eye(4)
    return -np.log(distance.min(1))


def gram():
    x, y = unit(PATCHES), unit(PATCHES[::-1])
    return np.square(x @ x.swapaxes(1, 2) - y @ y.swapaxes(1, 2)).mean((1, 2))


def integral():
    """By the trapezoidal rule with 17 points, for the directions of the axes."""
    t = np.linspace(-5, 5, 17)
    normal = np.exp(-(t**2) / 2)
    found = np.exp(1j * t[:, None, None] * LOGITS).mean(1)
    values = np.abs(found - normal[:, None]) ** 2 * normal[:, None]
    return 4 * np.trapezoid(values, t, axis=0).mean()


def huber():
    """Smooth L1, quadratic up to 2, of a teacher's features of mean 0 and variance 1."""
    wanted = (OTHER - OTHER.mean(1, keepdims=True)) / np.sqrt(OTHER.var(1, keepdims=True) + 1e-6)
    gap = np.abs(LOGITS - wanted)
    return np.where(gap < 2, gap**2 / 4, gap - 1).mean(1)


class Case(NamedTuple):
    """A loss as a function of one array, that array, and its value."""

    loss: object
    at: np.ndarray
    value: object


def loss_of(name, **own):
    return lambda logits: make_loss(name, 0.1, **own)(logits, LABELS)


p, q = softmax(OTHER / 2, axis=1), log_softmax(LOGITS / 2, axis=1)
CASES = {
    "softmax": Case(loss_of("softmax"), LOGITS, -(SMOOTH * log_softmax(LOGITS, axis=1)).sum(1)),
    "z_loss": Case(
        loss_of("softmax", z_loss=0.2), LOGITS,
        -(SMOOTH * log_softmax(LOGITS, axis=1)).sum(1) + 0.2 * np.log(np.exp(LOGITS).sum(1)) ** 2,
    ),
    "sigmoid": Case(
        loss_of("sigmoid"), LOGITS,
        -(SMOOTH * np.log(expit(LOGITS)) + (1 - SMOOTH) * np.log(expit(-LOGITS))).sum(1),
    ),
    "dino": Case(lambda x: cross_entropies(x, TARGETS, 0.2), VIEWS, dino()),
    "ibot": Case(
        lambda x: patch_entropies(x, softmax(PATCHES[::-1], 2), HIDDEN, 0.2), PATCHES, ibot()
    ),
    "koleo": Case(lambda x: koleo(x, np.ones(4), 4), LOGITS, nearest()),
    "gram": Case(lambda x: gram_distance(x, PATCHES[::-1]), PATCHES, gram()),
    "sigreg": Case(lambda x: sigreg(x, np.eye(3)), LOGITS, integral()),
    "soft": Case(lambda x: soft_loss(x, np.log(p), 2.0), LOGITS, 4 * (p * (np.log(p) - q)).sum(1)),
    "cosine": Case(
        lambda x: cosine_distance(x, OTHER), LOGITS,
        1 - (unit(LOGITS) * unit(OTHER)).sum(1),
    ),
    "smooth_l1": Case(lambda x: smooth_l1(x, OTHER), LOGITS, huber()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_equation_under_jit_and_vmap_and_its_gradients(name):
    loss, at, value = CASES[name]
    loss = jax.jit(loss)  # the operations one by one would be compiled one by one
    at = jnp.asarray(at, jnp.float32)
    np.testing.assert_allclose(loss(at), value, rtol=2e-5, atol=2e-6)
    several = jnp.stack([at, 0.5 * at, -at])
    singly = [loss(x) for x in several]
    np.testing.assert_allclose(jax.vmap(loss)(several), singly, rtol=2e-5, atol=2e-6)
    check_grads(loss, (at,), order=1, modes=["rev"], eps=1e-2, rtol=1e-2, atol=1e-2)
