import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.models import create_model
from vit_jax.objectives.supervised import ObjectiveOutput
from vit_jax.step import TrainState, init_state, make_train_step

pytestmark = pytest.mark.usefixtures("cheap_compilation")

B = 4
IMAGES = np.arange(B * 2 * 2 * 3, dtype=np.uint8).reshape(B, 2, 2, 3)
BATCH = {"image": IMAGES, "label": np.arange(B), "mask": np.array([1, 1, 0, 1], np.float32)}


def to_float(batch, row_keys):
    del row_keys
    return batch | {"image": batch["image"].astype(jnp.float32)}


def linear_objective(params, model_state, batch, frozen, rng):
    """Predicts a row's label as weight * the mean of its image; `model_state` counts calls."""
    del frozen
    prediction = params["weight"] * batch["image"].mean(axis=(1, 2, 3))
    loss = batch["mask"] * (prediction - batch["label"]) ** 2
    return ObjectiveOutput(
        loss_sum=loss.sum(),
        weight_sum=batch["mask"].sum(),
        metric_sums={
            "rows": batch["mask"].sum(),
            "model_draw": jax.random.uniform(rng) * batch["mask"].sum(),
        },
        model_state={"calls": model_state["calls"] + 1},
    )


def state_at(step, weight=0.5, tx=None):
    params = {"weight": jnp.float32(weight)}
    tx = tx or optax.sgd(0.01)
    return TrainState(jnp.int32(step), params, {"calls": jnp.int32(0)}, tx.init(params))


def make_step(seed=0, transform=to_float, objective=linear_objective, tx=None):
    return jax.jit(make_train_step(objective, tx or optax.sgd(0.01), transform, seed))


def test_a_step_by_hand():
    state, metrics = make_step()(state_at(0), BATCH)
    mean = IMAGES.astype(np.float64).mean(axis=(1, 2, 3))
    rows = BATCH["mask"] == 1
    residual = (0.5 * mean - BATCH["label"])[rows]
    gradient = (2 * residual * mean[rows]).sum() / 3
    assert metrics["loss"] == pytest.approx((residual**2).sum() / 3)
    assert metrics["grad_norm"] == pytest.approx(abs(gradient))
    assert metrics["rows"] == 1  # sums are divided by the weight, once
    assert state.params["weight"] == pytest.approx(0.5 - 0.01 * gradient)
    assert state.step == 1
    assert state.model_state == {"calls": 1}


def test_the_optimizer_gets_its_state_and_the_parameters():
    tx = optax.adamw(0.1, weight_decay=0.2)
    state = state_at(0, tx=tx)
    expected_params, opt_state = state.params, state.opt_state
    step = make_step(tx=tx)

    def loss(params):
        out = linear_objective(
            params, state.model_state, BATCH | {"image": jnp.float32(IMAGES)}, None, KEY
        )
        return out.loss_sum / out.weight_sum

    for _ in range(3):
        state, _ = step(state, BATCH)
        updates, opt_state = tx.update(jax.grad(loss)(expected_params), opt_state, expected_params)
        expected_params = optax.apply_updates(expected_params, updates)
    assert state.params["weight"] == pytest.approx(float(expected_params["weight"]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.opt_state,
                 opt_state)  # fmt: skip


KEY = jax.random.key(0)


def test_a_batch_that_is_masked_altogether_changes_nothing():
    state, metrics = make_step()(state_at(3), BATCH | {"mask": np.zeros(B, np.float32)})
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert state.params["weight"] == 0.5
    assert state.step == 4


def draws(seed, step, *, weight=0.5, size=B):
    """(what the rows draw, what the model draws) in one step."""

    def transform(batch, row_keys):
        noise = jax.vmap(jax.random.uniform)(row_keys)
        images = jnp.zeros(batch["image"].shape, jnp.float32) + noise[:, None, None, None]
        return batch | {"image": images}

    def objective(params, model_state, batch, frozen, rng):
        out = linear_objective(params, model_state, batch, frozen, rng)
        noise = {f"row_{i}": batch["image"][i, 0, 0, 0] * size for i in range(size)}
        return out._replace(metric_sums=out.metric_sums | noise)

    batch = {
        "image": np.zeros((size, 2, 2, 3), np.uint8),
        "label": np.arange(size),
        "mask": np.ones(size, np.float32),
    }
    run = make_step(seed, transform, objective)
    metrics = {name: float(value) for name, value in run(state_at(step, weight), batch)[1].items()}
    return [metrics[f"row_{i}"] for i in range(size)], metrics["model_draw"]


def test_randomness_depends_on_seed_and_step_only():
    rows, model = draws(0, 5)
    assert (rows, model) == draws(0, 5, weight=-2.0)
    for other in (draws(0, 6), draws(1, 5)):
        assert not set(rows) & set(other[0])
        assert model != other[1]
    assert len({*rows, model}) == B + 1  # every row its own, and the model too


def test_a_row_draws_by_its_place_in_the_global_batch():
    rows, _ = draws(0, 5)
    more, _ = draws(0, 5, size=2 * B)
    assert more[:B] == pytest.approx(rows, rel=1e-6)
    assert len(set(more)) == 2 * B


def test_the_teacher_reaches_the_objective():
    def objective(params, model_state, batch, frozen, rng):
        out = linear_objective(params, model_state, batch, None, rng)
        return out._replace(metric_sums={"teacher": 3 * frozen["value"]})

    _, metrics = make_step(objective=objective)(state_at(0), BATCH, {"value": jnp.float32(7)})
    assert metrics["teacher"] == 7


def test_the_state_at_the_start():
    model = create_model("ViT-mu/4", 3, (8, 12))
    tx = optax.adam(0.1)
    init = jax.jit(lambda seed: init_state(model, tx, (8, 12), seed), static_argnums=0)
    state, again, other = init(0), init(0), init(1)
    assert state.step == 0
    assert state.step.dtype == jnp.int32
    assert state.model_state == {}
    assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(state.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, state, again)
    kernels = [s.params["embedding"]["kernel"] for s in (state, other)]
    assert (kernels[0] != kernels[1]).mean() > 0.99
