import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from read_settings import make_loss
from short_objective import objective_of

from vit_jax.devices.flops import count_flops
from vit_jax.evaluators import evaluate
from vit_jax.experiment.accumulation import accumulate
from vit_jax.experiment.schedules import make_ema_decay
from vit_jax.experiment.state import TrainState, init_state, start_from
from vit_jax.experiment.step import make_train_step
from vit_jax.models import create_model
from vit_jax.objectives.contract import ObjectiveOutput, RunFacts, Term
from vit_jax.objectives.supervised import Supervised
from vit_jax.run.watch.layer_norms import make_layer_norms, watched

B = 4
IMAGES = np.arange(B * 2 * 2 * 3, dtype=np.uint8).reshape(B, 2, 2, 3)
BATCH = {"image": IMAGES, "label": np.arange(B), "mask": np.array([1, 1, 0, 1], np.float32)}


def to_float(batch, row_keys):
    del row_keys
    return batch | {"image": batch["image"].astype(jnp.float32)}


def linear_objective(params, model_state, batch, rng):
    """A model that predicts weight * mean of the image; `model_state` counts calls."""
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


def make_step(seed=0, transform=to_float, objective=linear_objective, tx=None, **fields):
    tx = tx or optax.sgd(0.01)
    return jax.jit(make_train_step(objective_of(objective), tx, transform, seed, **fields))


def test_a_step_by_hand():
    state, metrics = make_step()(state_at(0), BATCH)
    mean = IMAGES.astype(np.float64).mean(axis=(1, 2, 3))
    rows = BATCH["mask"] == 1
    residual = (0.5 * mean - BATCH["label"])[rows]
    gradient = (2 * residual * mean[rows]).sum() / 3
    assert metrics["loss"] == pytest.approx((residual**2).sum() / 3)
    assert metrics["grad_norm"] == pytest.approx(abs(gradient))
    assert metrics["masked"] == 1
    assert metrics["rows"] == 1  # sums are divided by the weight, once
    assert state.params["weight"] == pytest.approx(0.5 - 0.01 * gradient)
    assert state.step == 1
    assert state.model_state == {"calls": 1}


@pytest.mark.parametrize("fields", [{}, {"accum_steps": 2}])
def test_sam_takes_the_gradient_where_the_loss_is_higher(fields):
    """Of (w m - l)^2 in w, whose gradient's sign decides where that is; the second pass counts."""
    state, metrics = make_step(sam_radius=0.2, **fields)(state_at(0), BATCH)
    mean = IMAGES.astype(np.float64).mean(axis=(1, 2, 3))
    rows = BATCH["mask"] == 1

    def gradient(weight):
        return (2 * (weight * mean - BATCH["label"]) * mean)[rows].sum() / rows.sum()

    second = gradient(0.5 + 0.2 * np.sign(gradient(0.5)))
    assert abs(second / gradient(0.5) - 1) > 0.01
    assert state.params["weight"] == pytest.approx(0.5 - 0.01 * second)
    assert metrics["loss"] == make_step(**fields)(state_at(0), BATCH)[1]["loss"]
    assert metrics["grad_norm"] == pytest.approx(abs(second))
    assert state.model_state == {"calls": fields.get("accum_steps", 1)}


KEY = jax.random.key(0)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_batch_that_is_masked_altogether_changes_nothing(accum_steps):
    step = make_step(accum_steps=accum_steps)
    state, metrics = step(state_at(3), BATCH | {"mask": np.zeros(B, np.float32)})
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert state.params["weight"] == 0.5
    assert state.step == 4


def draws(seed, step, *, weight=0.5, size=B):
    """(random numbers of the rows, of the model) in one step."""

    def transform(batch, row_keys):
        noise = jax.vmap(jax.random.uniform)(row_keys)
        images = jnp.zeros(batch["image"].shape, jnp.float32) + noise[:, None, None, None]
        return batch | {"image": images}

    def objective(params, model_state, batch, rng):
        out = linear_objective(params, model_state, batch, rng)
        noise = {f"row_{i}": batch["image"][i, 0, 0, 0] * size for i in range(size)}
        return out._replace(metric_sums=out.metric_sums | noise)

    batch = {
        "image": np.zeros((size, 2, 2, 3), np.uint8),
        "label": np.arange(size),
        "mask": np.ones(size, np.float32),
    }
    step_fn = make_step(seed, transform, objective)
    metrics = {
        name: float(value) for name, value in step_fn(state_at(step, weight), batch)[1].items()
    }
    return [metrics[f"row_{i}"] for i in range(size)], metrics["model_draw"]


def test_randomness_depends_on_seed_and_step_only():
    rows, model = draws(0, 5)
    assert (rows, model) == draws(0, 5, weight=-2.0)
    for other in (draws(0, 6), draws(1, 5)):
        assert not set(rows) & set(other[0])
        assert model != other[1]
    assert len({*rows, model}) == B + 1  # different for every row, and for the model


def test_a_row_draws_by_its_place_in_the_global_batch():
    rows, _ = draws(0, 5)
    more, _ = draws(0, 5, size=2 * B)
    assert more[:B] == pytest.approx(rows, rel=1e-6)
    assert len(set(more)) == 2 * B


# Microbatches

UNEVEN = BATCH | {"mask": np.array([1, 0, 1, 0], np.float32)}  # all rows of one, none of the other


@pytest.mark.parametrize("batch", [BATCH, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("accum_steps", [2, 4])
def test_microbatches_add_up_to_the_batch(batch, accum_steps):
    def objective(params, model_state, batch, rng):
        del rng  # which differs
        return linear_objective(params, model_state, batch, KEY)

    expected_state, expected = make_step(objective=objective)(state_at(0), batch)
    state, metrics = make_step(objective=objective, accum_steps=accum_steps)(state_at(0), batch)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-6), name
    np.testing.assert_allclose(state.params["weight"], expected_state.params["weight"], rtol=1e-6)
    assert state.model_state == {"calls": accum_steps}  # one microbatch hands it to the next


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_gradients_in_parts_have_all_terms_of_the_loss(accum_steps):
    """Also of a single part, as a replay computes them."""
    rows = jnp.array([1.0, 1.0, 2.0, 4.0])

    def sums_of(params, state, batch, key):
        first, further = params["weight"] * batch["rows"].sum(), params["weight"] ** 2
        terms = {"further": Term(batch["rows"].sum() * further, batch["rows"].sum(), 3.0)}
        return ObjectiveOutput(first, jnp.float32(len(batch["rows"])), {}, {}, terms)

    state = TrainState(jnp.int32(0), {"weight": jnp.float32(5)}, {}, ())
    grads, sums = accumulate(sums_of, state, {"rows": rows}, KEY, accum_steps)
    assert grads["weight"] == pytest.approx(8 / 4 + 3 * 2 * 5)
    assert sums.loss == pytest.approx(5 * 8 / 4 + 3 * 25)


def test_microbatches_are_strided_and_draw_apart():
    """Microbatch i has the rows i, i + A, ... and the key fold_in(key, i)."""

    def objective(params, model_state, batch, rng):
        out = linear_objective(params, model_state, batch, rng)
        number = batch["label"][0]  # of the microbatch, if its first row has the same number
        strided = (batch["label"] == number + 3 * jnp.arange(2)).all()
        draws = {f"draw_{i}": jax.random.uniform(rng) * (number == i) * 6 for i in range(3)}
        return out._replace(metric_sums=draws | {"strided": 2.0 * strided})

    batch = {"image": np.zeros((6, 2, 2, 3), np.uint8), "label": np.arange(6),
             "mask": np.ones(6, np.float32)}  # fmt: skip
    _, metrics = make_step(7, objective=objective, accum_steps=3)(state_at(5), batch)
    _, key = jax.random.split(jax.random.fold_in(jax.random.key(7), 5))
    assert metrics["strided"] == 1
    for i in range(3):
        expected = jax.random.uniform(jax.random.fold_in(key, i))
        assert metrics[f"draw_{i}"] == pytest.approx(float(expected), rel=1e-6)


# The running average


def test_running_average_by_hand():
    step = make_step(ema_decay=make_ema_decay(0.25))
    state = start_from(state_at(0), {"weight": jnp.float32(0.5)})
    expected = 0.5
    for i in range(5):
        state, _ = step(state, BATCH)
        decay = min(0.25, (1 + i) / (10 + i))  # 0.1, 0.18, then 0.25
        expected = decay * expected + (1 - decay) * float(state.params["weight"])
        assert state.ema["weight"] == pytest.approx(expected, rel=1e-6)
    assert state.ema["weight"] != state.params["weight"]


def test_the_momentum_of_a_teacher_follows_half_a_cosine_without_a_ramp():
    step = make_step(ema_decay=make_ema_decay(0.9, 1.0, total_steps=4))
    state = start_from(state_at(0), {"weight": jnp.float32(0.5)})
    for keep in (0.9, 1 - 0.05 * (1 + 0.5**0.5), 0.95, 1 - 0.05 * (1 - 0.5**0.5), 1.0):
        before = float(state.ema["weight"])
        state, _ = step(state, BATCH)
        after = keep * before + (1 - keep) * float(state.params["weight"])
        assert state.ema["weight"] == pytest.approx(after, rel=1e-5)
        assert abs(before - state.params["weight"]) > 0.01  # else any momentum would do


def test_the_model_state_is_averaged_too_and_evaluated_with_the_average():
    def objective(params, model_state, batch, rng):
        out = linear_objective(params, model_state, batch, rng)
        return out._replace(model_state=out.model_state | {"mean": model_state["mean"] + 1})

    start = state_at(0)
    start = start.replace(model_state=start.model_state | {"mean": jnp.float32(2)})
    state = start_from(start, start.params)
    state, _ = make_step(objective=objective, ema_decay=make_ema_decay(0.25))(state, BATCH)
    average = state.ema_model_state
    assert float(average["mean"]) == pytest.approx(0.1 * 2 + 0.9 * 3)
    assert (average["calls"], average["calls"].dtype) == (1, jnp.int32)

    def measure(state):
        assert (state.ema, state.ema_model_state) == ({}, {})
        weight, mean = state.params["weight"], state.model_state["mean"]
        return {"weight": float(weight), "mean": float(mean), "num_examples": 2}

    found = evaluate("val", measure, state)
    assert found["val/num_examples"] == 2 and "val/num_examples_raw" not in found
    assert (found["val/mean"], found["val/mean_raw"]) == (pytest.approx(2.9), 3)
    assert found["val/weight"] == float(state.ema["weight"])


def test_the_average_begins_at_the_parameters_in_arrays_of_its_own():
    model, tx = create_model("ViT-mu/4", 3, (8, 12)), optax.sgd(0.1)
    state = jax.jit(lambda: init_state(model, tx, (8, 12), 0, with_ema=True))()
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)


# Frozen parameters, and norms by layer

LAYERS_PARAMS = {
    "embedding": {"kernel": jnp.full((2, 3), 2.0)},
    "encoder": {
        "layers": {"kernel": jnp.arange(12.0).reshape(2, 2, 3)},
        "norm": {"scale": jnp.zeros(3)},
    },
}


def norms_of_layers(**fields):
    """A step of sgd with rate 0.5 on the sum of the parameters, where layer 1 counts 3 times."""

    def objective(params, model_state, batch, rng):
        layers = params["encoder"]["layers"]["kernel"]
        sums = layers[0].sum() + 3 * layers[1].sum() + params["embedding"]["kernel"].sum()
        sums += params["encoder"]["norm"]["scale"].sum()
        return ObjectiveOutput(sums * batch["mask"].sum(), batch["mask"].sum(), {}, model_state)

    tx = optax.sgd(0.5)
    state = TrainState(jnp.int32(0), LAYERS_PARAMS, {}, tx.init(LAYERS_PARAMS))
    step = make_train_step(objective_of(objective), watched(tx), to_float, 0, **fields)
    return jax.jit(make_layer_norms(step))(state, BATCH)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_norms_by_layer(accum_steps):
    metrics = norms_of_layers(accum_steps=accum_steps)
    root = np.sqrt(6)
    params = {"embedding": 2 * root, "encoder/layer_0": np.sqrt(55), "encoder/layer_1":
              np.sqrt(451), "head": 0.0}  # fmt: skip
    grads = {"embedding": root, "encoder/layer_0": root, "encoder/layer_1": 3 * root,
             "head": np.sqrt(3)}  # fmt: skip
    for part in params:
        update = 0.5 * grads[part]
        ratio = update / params[part] if params[part] else 0.0
        found = [metrics[f"{kind}/{part}"] for kind in
                 ("grad_norm", "param_norm", "update_norm", "update_ratio")]  # fmt: skip
        np.testing.assert_allclose(found, [grads[part], params[part], update, ratio], rtol=1e-6)
    assert len(metrics) == 4 * len(params)


def test_what_is_frozen_has_no_gradient():
    metrics = norms_of_layers(freeze="embedding/.*|encoder/layer_1/.*")
    assert metrics["grad_norm/embedding"] == metrics["grad_norm/encoder/layer_1"] == 0
    assert metrics["grad_norm/encoder/layer_0"] == pytest.approx(np.sqrt(6))

    def objective(params, model_state, batch, rng):
        out = linear_objective({"weight": 2.0}, model_state, batch, rng)
        return out._replace(loss_sum=3 * (3 * params["a"] + 4 * params["b"]))

    params = {"a": jnp.float32(1), "b": jnp.float32(1)}
    state = TrainState(jnp.int32(0), params, {"calls": 0}, optax.sgd(0.01).init(params))
    for freeze, norm in ((None, 5), ("a", 4), ("b", 3)):
        _, metrics = make_step(objective=objective, freeze=freeze)(state, BATCH)
        assert metrics["grad_norm"] == pytest.approx(norm)


def test_gradients_of_what_is_frozen_whole_are_not_computed():
    model, tx = create_model("ViT-mu/4", 3, 8), optax.sgd(0.1)
    objective = Supervised().bind(model, make_loss("softmax"), RunFacts((), ()))
    state = jax.eval_shape(lambda: init_state(model, tx, (8, 8), 0))
    batch = {"image": np.zeros((B, 8, 8, 3), np.uint8), "label": np.zeros(B, np.int32),
             "mask": np.ones(B, np.float32)}  # fmt: skip

    def flops(freeze):
        step = make_train_step(objective, tx, to_float, 0, freeze=freeze)
        return count_flops(step, state, batch)

    forward = count_flops(model.apply, {"params": state.params}, jnp.zeros((B, 8, 8, 3)))
    head_kernel = 2 * B * 32 * 3
    assert flops("(embedding|encoder)/.*|class_token|pos_embedding") == forward + head_kernel
    assert flops(None) > 2.5 * forward
