import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import tree
from vit_jax.config import InputError
from vit_jax.optimizers import OPTIMIZERS, make_optimizer

STEPS = 5
WEIGHT_DECAY, B1, B2, EPS, MOMENTUM = 0.3, 0.8, 0.95, 1e-3, 0.7


def learning_rate(step):
    return 0.1 * (step + 1)


def random_params(seed):
    rng = np.random.default_rng(seed)
    return {
        "dense/kernel": rng.normal(size=(3, 2)).astype(np.float32),
        "dense/bias": rng.normal(size=2).astype(np.float32),
    }


PARAMS = random_params(0)
GRADS = [random_params(1 + step) for step in range(STEPS)]


def run(tx):
    params = tree.unflatten_names(jax.tree.map(jnp.asarray, PARAMS))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grads in GRADS:
        updates, state = update(tree.unflatten_names(grads), state, params)
        params = optax.apply_updates(params, updates)
    return tree.flatten_names(params)


def clipped(grads, max_norm):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    return {name: g * min(1, max_norm / norm) for name, g in grads.items()}


def adamw_direction(grads, memory, name, step):
    m, v = memory.get(name, (0, 0))
    m = B1 * m + (1 - B1) * grads[name]
    v = B2 * v + (1 - B2) * grads[name] ** 2
    memory[name] = m, v
    return m / (1 - B1 ** (step + 1)) / (np.sqrt(v / (1 - B2 ** (step + 1))) + EPS)


def sgd_direction(grads, memory, name, step):
    memory[name] = grads[name] + MOMENTUM * memory.get(name, 0)
    return memory[name]


@pytest.mark.parametrize("grad_clip_norm", [None, 1.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equation(name, grad_clip_norm):
    direction = {"adamw": adamw_direction, "sgd": sgd_direction}[name]
    expected, memory = {name: p.astype(np.float64) for name, p in PARAMS.items()}, {}
    for step, grads in enumerate(GRADS):
        grads = clipped(grads, grad_clip_norm or np.inf)
        for leaf, p in expected.items():
            d = direction(grads, memory, leaf, step)
            decay = WEIGHT_DECAY if leaf == "dense/kernel" else 0
            expected[leaf] = p - learning_rate(step) * (d + decay * p)
    tx = make_optimizer(
        name,
        schedule=learning_rate,
        weight_decay=WEIGHT_DECAY,
        grad_clip_norm=grad_clip_norm,
        b1=B1,
        b2=B2,
        eps=EPS,
        momentum=MOMENTUM,
    )
    actual = run(tx)
    for leaf, p in expected.items():
        np.testing.assert_allclose(actual[leaf], p, rtol=2e-5, atol=1e-6, err_msg=leaf)


def test_adamw_is_that_of_optax():
    ours = run(make_optimizer("adamw", schedule=learning_rate, weight_decay=0.1))
    theirs = run(
        optax.adamw(learning_rate, weight_decay=0.1, mask=lambda p: tree.mask(p, ".*/kernel"))
    )
    for leaf, p in theirs.items():
        np.testing.assert_allclose(ours[leaf], p, rtol=1e-6, err_msg=leaf)


def test_weight_decay_on_chooses_the_leaves():
    zero_grads = jax.tree.map(jnp.zeros_like, PARAMS)
    tx = make_optimizer(
        "sgd", schedule=lambda step: 0.5, weight_decay=0.2, weight_decay_on="dense/b.*"
    )
    updates, _ = tx.update(zero_grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["dense/bias"], -0.1 * PARAMS["dense/bias"], rtol=1e-6)
    assert not updates["dense/kernel"].any()


def test_state_is_named_alike_with_and_without_clipping():
    def names(grad_clip_norm):
        tx = make_optimizer("adamw", schedule=learning_rate, grad_clip_norm=grad_clip_norm)
        return list(tree.flatten_names(tx.init(PARAMS)))

    assert names(None) == names(1.0)
    assert "direction/mu/dense/kernel" in names(None)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"name": "adam"}, ["optimizer.name='adam'", "adamw"]),
        ({"name": "x"}, ["optimizer.name='x'", "adamw, sgd"]),
        ({"weight_decay": -0.1}, ["optimizer.weight_decay=-0.1"]),
        ({"grad_clip_norm": 0.0}, ["optimizer.grad_clip_norm=0.0", "None"]),
        ({"weight_decay_on": "*kernel"}, ["optimizer.weight_decay_on='*kernel'"]),
        ({"weight_decay": 0.1, "weight_decay_on": "kernel"}, ["'kernel'", "dense/bias"]),
    ],
)
def test_faults_name_the_keys(change, parts):
    with pytest.raises(InputError) as error:
        make_optimizer(**({"name": "adamw", "schedule": learning_rate} | change)).init(PARAMS)
    assert all(part in str(error.value) for part in parts)
