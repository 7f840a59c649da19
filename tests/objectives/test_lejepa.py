"""SIGReg in cases that are known, and LeJEPA's loss from its terms."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy_vit import random_params
from scipy.integrate import quad

from vit_jax.config import OBJECTIVES
from vit_jax.models import create_model
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.lejepa import LeJepa, features_of_views
from vit_jax.objectives.sigreg import draw_directions, sigreg

RNG = np.random.default_rng(0)
EXPECTED = np.sqrt(2 * np.pi) * (1 - 1 / np.sqrt(3))  # of standard normal samples


def by_integration(x):
    """The statistic of numbers x (N,), integrated by scipy."""

    def integrand(t):
        found = np.exp(1j * t * x).mean()
        return abs(found - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)

    return len(x) * quad(integrand, -5, 5)[0]


def test_normal_samples_are_near_zero_and_others_are_not():
    samples = np.random.default_rng(1).standard_normal((16, 1024, 8)).astype(np.float32)
    directions = draw_directions(jax.random.key(0), 8, 64)
    np.testing.assert_allclose(np.linalg.norm(directions, axis=0), 1, rtol=1e-5)
    of = jax.jit(sigreg)
    found = [of(x, directions) for x in samples]  # constant rows would have 419
    assert np.mean(found) == pytest.approx(EXPECTED, rel=0.25)
    x = samples[0]
    for other in (2 * x, x + 1, x * (np.arange(8) > 3)):
        assert of(other.astype(np.float32), directions) > 10 * EXPECTED


@pytest.mark.parametrize("place", [0.0, 0.7, -2.0])
def test_constant_rows_have_the_statistic_that_scipy_integrates(place):
    """Of rows at 0 it is N sqrt(2 pi) (1 - sqrt(2) + 1 / sqrt(3)), up to the tails."""
    x = np.full((32, 1), place, np.float32)
    found = float(sigreg(x, jnp.ones((1, 1))))
    assert found == pytest.approx(by_integration(x[:, 0]), rel=1e-3)
    if place == 0:
        known = 32 * np.sqrt(2 * np.pi) * (1 - np.sqrt(2) + 1 / np.sqrt(3))
        assert found == pytest.approx(known, rel=1e-3)


def test_the_mean_over_directions_without_masked_rows():
    x = RNG.standard_normal((20, 3)) + np.array([0.5, 0, 0])
    directions, mask = draw_directions(jax.random.key(1), 3, 4), np.arange(20) % 4 > 0
    expected = np.mean([by_integration(np.float64(x[mask] @ d)) for d in np.asarray(directions).T])
    found = jax.jit(sigreg)(jnp.float32(x), directions, jnp.float32(mask))
    assert found == pytest.approx(expected, rel=1e-3)


MODEL = create_model(
    "ViT-mu/4", None, 8, width=8, depth=1, mlp_dim=8, num_heads=2, pool="gap"
)  # fmt: skip


BATCH = {
    "global_views": RNG.uniform(-1, 1, (6, 2, 8, 8, 3)).astype(np.float32),
    "local_views": RNG.uniform(-1, 1, (6, 3, 4, 4, 3)).astype(np.float32),
    "mask": np.float32([1, 1, 1, 1, 1, 0]),
}


def objective_of(**own):
    small = {"directions": 16, "head_width": 12, "embedding_width": 6}
    setting = RunFacts((), (), shapes={name: leaf.shape for name, leaf in BATCH.items()})
    return OBJECTIVES.make({"name": "lejepa", **small, **own}).bind(MODEL, None, setting)


def embedded(head, x):
    """The head's embeddings of features (V, B, D), in NumPy."""
    for i in range(2):
        x, norm = x @ head[f"hidden_{i}"]["kernel"], head[f"norm_{i}"]
        spread = np.sqrt(x.var(axis=(0, 1)) + 1e-5)
        x = np.maximum((x - x.mean(axis=(0, 1))) / spread * norm["scale"] + norm["bias"], 0)
    return x @ head["out"]["kernel"] + head["out"]["bias"]


@pytest.mark.slow
def test_the_loss_is_that_of_its_parts_and_masked_rows_do_not_count():
    objective = objective_of(sigreg_weight=0.2)
    images = np.zeros((1, 8, 8, 3), np.float32)
    params = jax.tree.map(jnp.asarray, random_params(MODEL, images))
    own, _ = jax.jit(objective.init)(jax.random.key(1))
    state, rng = SimpleNamespace(model_state={}), jax.random.key(2)

    @jax.jit
    def compiled(batch):
        return objective.loss(params | {"objective": own}, state, batch, None, rng)

    out = compiled(BATCH)
    features = jax.jit(lambda views: features_of_views(MODEL, params, views, rng))
    views = [BATCH["global_views"], BATCH["local_views"]]
    x = np.concatenate([features(v) for v in views], axis=1)
    z = embedded(jax.tree.map(np.asarray, own["head"]), x[:5].swapaxes(0, 1).astype(np.float64))
    prediction = np.square(z - z[:2].mean(0)).mean()
    directions = np.asarray(draw_directions(jax.random.fold_in(rng, 1), 6, 16))
    statistic = np.mean([by_integration(of_view @ d) for of_view in z for d in directions.T])
    assert out.terms["prediction"].mean == pytest.approx(prediction, rel=1e-4)
    assert out.terms["sigreg"].mean == pytest.approx(statistic, rel=1e-3)
    assert out.loss == pytest.approx(0.8 * prediction + 0.2 * statistic, rel=1e-3)
    other = {key: leaf[[0, 1, 2, 3, 4, 0]] for key, leaf in BATCH.items()} | {"mask": BATCH["mask"]}
    assert compiled(other).loss == pytest.approx(float(out.loss), rel=1e-5)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    assert compiled(split).loss == pytest.approx(float(out.loss), rel=1e-5)  # the global batch
    assert objective.couples_rows and {*objective.needs} <= {*BATCH}


def test_what_it_cannot_train():
    """A view that cannot be compared with another, and a model with constants."""
    setting = RunFacts((), (), shapes={"global_views": (6, 1, 8, 8, 3), "mask": (6,)})
    with at_fault("data.num_global"):
        LeJepa().bind(MODEL, None, setting)
    with at_fault("objective.name"):
        LeJepa().bind(create_model("T2T-ViT-7", None, 32), None, setting)
