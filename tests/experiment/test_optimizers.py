import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_fault import at_fault
from read_settings import make_optimizer, settings_of

from vit_jax.base import tree
from vit_jax.config import OPTIMIZERS, base_config
from vit_jax.experiment.optimizers import lower_rate, make_average
from vit_jax.experiment.optimizers.layers import over_layers
from vit_jax.transfer.fit import stack_layers, unstack_layers

STEPS = 5
WEIGHT_DECAY, B1, B2, EPS, MOMENTUM = 0.3, 0.8, 0.95, 1e-3, 0.7
CAP = 0.6  # of adafactor's decay rate, which reaches it at the fourth step


def learning_rate(step):
    return 0.1 * (step + 1)


def random_params(seed):
    rng = np.random.default_rng(seed)
    return {
        "dense/kernel": rng.normal(size=(3, 2)).astype(np.float32),
        "dense/bias": rng.normal(size=2).astype(np.float32),
        "layer_0/wide/kernel": rng.normal(size=(32, 40)).astype(np.float32),
        "layer_0/tall/kernel": rng.normal(size=(40, 32)).astype(np.float32),
    }


PARAMS = random_params(0)
GRADS = [random_params(1 + step) for step in range(STEPS)]


def trained(tx, params=PARAMS, all_grads=GRADS):
    params = tree.unflatten_names(jax.tree.map(jnp.asarray, params))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grads in all_grads:
        updates, state = update(tree.unflatten_names(grads), state, params)
        params = optax.apply_updates(params, updates)
    return tree.flatten_names(params)


def assert_close(found, expected, rtol, atol=0.0):
    for leaf, p in expected.items():
        np.testing.assert_allclose(found[leaf], p, rtol, atol, err_msg=leaf)


def clipped(grads, max_norm):
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    return {name: g * min(1, max_norm / norm) for name, g in grads.items()}


def adamw_direction(grads, memory, name, step, p=None):
    m, v = memory.get(name, (0, 0))
    m = B1 * m + (1 - B1) * grads[name]
    v = B2 * v + (1 - B2) * grads[name] ** 2
    memory[name] = m, v
    return m / (1 - B1 ** (step + 1)) / (np.sqrt(v / (1 - B2 ** (step + 1))) + EPS)


def sgd_direction(grads, memory, name, step, p=None):
    m = grads[name] + MOMENTUM * memory.get(name, 0)
    memory[name] = m
    return m


def rmsprop_direction(grads, memory, name, step, p=None):
    m, v = memory.get(name, (0, 1))
    v = B2 * v + (1 - B2) * grads[name] ** 2
    m = MOMENTUM * m + grads[name] / np.sqrt(v + EPS)
    memory[name] = m, v
    return m


def lion_direction(grads, memory, name, step, p=None):
    m = memory.get(name, 0)
    memory[name] = B2 * m + (1 - B2) * grads[name]
    return np.sign(B1 * m + (1 - B1) * grads[name])


def adafactor_direction(grads, memory, name, step, p=None):
    g = grads[name].astype(np.float64)
    m, v, row, column = memory.get(name, (0, 0, 0, 0))
    b = min(CAP, 1 - (step + 1) ** -0.8)
    v = b * v + (1 - b) * g**2
    if name in ("layer_0/wide/kernel", "layer_0/tall/kernel"):
        row = b * row + (1 - b) * (g**2).mean(axis=1)
        column = b * column + (1 - b) * (g**2).mean(axis=0)
        m = B1 * m + (1 - B1) * g / np.sqrt(np.outer(row, column) / row.mean())
    else:
        m = B1 * m + (1 - B1) * g / np.sqrt(v)
    memory[name] = m, v, row, column
    return m


def lars_direction(grads, memory, name, step, p):
    g = grads[name].astype(np.float64)
    if g.ndim > 1:
        g *= 1e-3 * np.linalg.norm(p) / np.linalg.norm(g)
    m = g + MOMENTUM * memory.get(name, 0)
    memory[name] = m
    return m


def lamb_direction(grads, memory, name, step, p, decay=0.0):
    d = adamw_direction(grads, memory, name, step) + decay * p
    return d * np.linalg.norm(p) / np.linalg.norm(d) if name.endswith("kernel") else d


def muon_direction(grads, memory, name, step, p=None):
    if not name.startswith("layer_"):
        return adamw_direction(grads, memory, name, step)
    m = grads[name] + MOMENTUM * memory.get(name, 0)
    memory[name] = m
    u = grads[name].astype(np.float64) + MOMENTUM * m
    x = u / np.linalg.norm(u)
    for _ in range(5):
        a = x.T @ x
        x = 3.4445 * x + x @ (-4.775 * a + 2.0315 * a @ a)
    return 0.2 * np.sqrt(max(x.shape)) * x


EQUATIONS = {
    "adamw": (adamw_direction, {"b1": B1, "b2": B2, "eps": EPS}),
    "sgd": (sgd_direction, {"momentum": MOMENTUM}),
    "rmsprop": (rmsprop_direction, {"momentum": MOMENTUM, "b2": B2, "eps": EPS}),
    "lion": (lion_direction, {"b1": B1, "b2": B2}),
    "adafactor": (adafactor_direction, {"b1": B1, "b2": CAP}),
    "lars": (lars_direction, {"momentum": MOMENTUM}),
    "lamb": (lamb_direction, {"b1": B1, "b2": B2, "eps": EPS}),
    "muon": (muon_direction, {"b1": B1, "b2": B2, "eps": EPS, "momentum": MOMENTUM}),
}


OF_OWN_TESTS = ("lamb", "schedule_free")  # where more follows the weight decay


@pytest.mark.parametrize(
    ("name", "grad_clip_norm"),
    [("adamw", None), *((name, 1.5) for name in OPTIMIZERS if name not in OF_OWN_TESTS)],
)
def test_equation(name, grad_clip_norm):
    direction, numbers = EQUATIONS[name]
    expected, memory = {name: p.astype(np.float64) for name, p in PARAMS.items()}, {}
    for step, grads in enumerate(GRADS):
        grads = clipped(grads, grad_clip_norm or np.inf)
        for leaf, p in expected.items():
            d = direction(grads, memory, leaf, step, p)
            decay = WEIGHT_DECAY if leaf.endswith("kernel") else 0
            expected[leaf] = p - learning_rate(step) * (d + decay * p)
    tx = make_optimizer(
        name,
        schedule=learning_rate,
        weight_decay=WEIGHT_DECAY,
        grad_clip_norm=grad_clip_norm,
        momentum_dtype="float32",
        **numbers,
    )
    assert_close(trained(tx), expected, rtol=2e-5, atol=2e-6)


def golden(optimizer):
    """{"start", "grad1", "step1", ...: {name: array}} of the published optimizer, and its numbers.

    Leaves get the names and the axes (in, out) of kernels of one layer.
    """
    file = np.load(pathlib.Path(__file__).parents[1] / f"golden/opt_{optimizer}.npz")
    found = {}
    for name, array in file.items():
        of, _, leaf = name.rpartition("/")
        if array.ndim > 1:
            axes = (1, 0) if array.ndim == 2 else (2, 3, 1, 0)
            leaf, array = f"{leaf}/kernel", array.transpose(axes)
        found.setdefault(of, {})[f"layer_0/{leaf}"] = array
    return found, json.loads(str(file["config"]))


def same_with_golden(tx, arrays, variant=""):
    """Every step that there is of a variant; leaves that it leaves out are not compared."""
    steps = [step for step in (1, 2, 3) if f"{variant}step{step}" in arrays]
    assert steps
    for step in steps:
        found = trained(tx, arrays["start"], [arrays[f"grad{1 + i}"] for i in range(step)])
        assert_close(found, arrays[f"{variant}step{step}"], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("variant", "clips"), [("", 1.0), ("noclip/", None)])
def test_lamb_is_the_published_one(variant, clips):
    arrays, numbers = golden("lamb")
    tx = make_optimizer("lamb", schedule=lambda step: numbers["lr"],
                        weight_decay=numbers["weight_decay"], grad_clip_norm=clips)  # fmt: skip
    same_with_golden(tx, arrays, variant)


def test_lamb_lets_a_head_leave_0():
    def head(name):
        params = {"head/kernel": np.zeros((3, 2), np.float32)} | PARAMS
        grads = [{"head/kernel": PARAMS["dense/kernel"]} | grads for grads in GRADS]
        return trained(make_optimizer(name, schedule=learning_rate, eps=EPS), params, grads)

    np.testing.assert_array_equal(head("lamb")["head/kernel"], head("adamw")["head/kernel"])


@pytest.mark.parametrize(
    ("variant", "lr", "own"),
    [("", 0.02, {"match_rms": False, "adamw_rate": 0.015}), ("match_rms/", 0.02, {})],
)
def test_muon_is_the_published_one(variant, lr, own):
    arrays, numbers = golden("muon")
    assert numbers["aux"]["lr"] == pytest.approx(0.015 * lr)
    eps = OPTIMIZERS.find("muon").declared()["eps"]  # no step shows it: gradients are far larger
    assert eps.default == numbers["aux"]["eps"]
    tx = make_optimizer("muon", schedule=lambda step: lr, weight_decay=numbers["weight_decay"],
                        weight_decay_on=".*", **own)  # fmt: skip
    same_with_golden(tx, arrays, variant)


@pytest.mark.parametrize("on_spike", [None, "lower"])
def test_schedule_free_follows_its_equations(on_spike):
    """As algorithm 1 of the paper, with a warm-up from 0; frozen leaves are their own average.

    A spike before the fourth update halves the steps of z.
    """
    average_share, rates = 0.8, np.array([0.0, 0.1, 0.2, 0.2, 0.1])
    freeze = "dense/bias"
    tx = make_optimizer("schedule_free", schedule=lambda step: jnp.asarray(rates)[step], b2=B2,
                        eps=EPS, weight_decay=WEIGHT_DECAY, average_share=average_share,
                        freeze=freeze, on_spike=on_spike)  # fmt: skip
    config = base_config()
    config.optimizer.name = "schedule_free"
    keep_of = make_average(settings_of(config).optimizer, STEPS)
    params = tree.unflatten_names(jax.tree.map(jnp.asarray, PARAMS))
    state, found_x = tx.init(params), params
    x, y, z = ({name: p.astype(np.float64) for name, p in PARAMS.items()} for _ in range(3))
    v, weights, lowered = dict.fromkeys(PARAMS, 0), 0.0, 1.0
    for step, grads in enumerate(GRADS):
        if on_spike and step == 3:  # z is ahead of y by now
            state, lowered = lower_rate(state), 0.5
        updates, state = tx.update(tree.unflatten_names(grads), state, params)
        params = optax.apply_updates(params, updates)
        keep = keep_of(step, state)
        found_x = optax.incremental_update(params, found_x, 1 - keep)
        weight = rates[: step + 1].max() ** 2
        weights += weight
        c = weight / weights if weights else 0.0
        for name in PARAMS.keys() - {freeze}:
            v[name] = B2 * v[name] + (1 - B2) * grads[name].astype(np.float64) ** 2
            d = grads[name] / (np.sqrt(v[name] / (1 - B2 ** (step + 1))) + EPS)
            d += WEIGHT_DECAY * y[name] * name.endswith("kernel")
            z[name] -= lowered * rates[step] * d
            x[name] = (1 - c) * x[name] + c * z[name]
            y[name] = (1 - average_share) * z[name] + average_share * x[name]
        for found, expected in ((params, y), (found_x, x)):
            for name, leaf in tree.flatten_names(found).items():
                np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-6)


def test_l2_passes_through_the_root_and_the_momentum():
    """As TensorFlow's RMSProp does to a loss with l2 / 2 |p|^2, at a constant learning rate."""
    expected, memory = {name: p.astype(np.float64) for name, p in PARAMS.items()}, {}
    for step, grads in enumerate(GRADS):
        for leaf, p in expected.items():
            l2 = 0.2 if leaf.endswith("kernel") else 0
            coupled = {leaf: grads[leaf] + l2 * p}
            expected[leaf] = p - 0.1 * rmsprop_direction(coupled, memory, leaf, step)
    numbers = {"momentum": MOMENTUM, "b2": B2, "eps": EPS}
    actual = trained(make_optimizer("rmsprop", schedule=lambda step: 0.1, l2=0.2, **numbers))
    assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    params = tree.unflatten_names(PARAMS)
    plain = make_optimizer("sgd", schedule=lambda step: 0.1).init(params)
    assert "l2" not in plain  # as states are stored since before there was an l2


def same_with_optax(name, theirs, **numbers):
    ours = trained(make_optimizer(name, schedule=learning_rate, **numbers))
    assert_close(ours, trained(theirs), rtol=1e-6)


def kernels(params):
    return tree.mask(params, ".*/kernel")


def test_own_numbers_are_those_of_the_papers():
    """Table 3 of ViT for adamw; for the others the pseudo-code of their papers."""
    adamw = optax.adamw(learning_rate, 0.9, 0.999, 1e-8, weight_decay=0.1, mask=kernels)
    same_with_optax("adamw", adamw, weight_decay=0.1)
    lion = optax.lion(learning_rate, 0.9, 0.99, weight_decay=0.1, mask=kernels)
    same_with_optax("lion", lion, weight_decay=0.1)
    same_with_optax("sgd", optax.sgd(learning_rate, momentum=0.9))


FIRST_MOMENT = r"direction/.*\b(mu|trace|momentum/ema)/.*"


WITH_MOMENTUM = [
    name for name in OPTIMIZERS if "momentum_dtype" in OPTIMIZERS.find(name).declared()
]


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_momentum_in_half_the_bytes(name):
    def dtypes(momentum_dtype):
        tx = make_optimizer(name, schedule=learning_rate, momentum_dtype=momentum_dtype)
        named = tree.flatten_names(tx.init(tree.unflatten_names(PARAMS)))
        return {leaf: x.dtype for leaf, x in named.items() if x.ndim}

    full, half, own = dtypes("float32"), dtypes("bfloat16"), dtypes(None)
    assert own == (half if name == "adafactor" else full)
    assert set(full.values()) == {jnp.dtype("float32")}
    changed = {leaf for leaf in full if full[leaf] != half[leaf]}
    assert {half[leaf] for leaf in changed} == {jnp.dtype("bfloat16")}
    # All first moments, and nothing else.
    assert changed == {leaf for leaf in full if re.fullmatch(FIRST_MOMENT, leaf)}
    assert len(changed) == len(PARAMS)


class HalfMemory(dict):
    """Store the first moments, and nothing else, in bfloat16."""

    def __setitem__(self, name, moments):
        first, *others = moments if isinstance(moments, tuple) else (moments,)
        first = np.float32(first).astype(jnp.bfloat16).astype(np.float32)
        super().__setitem__(name, (first, *others) if others else first)


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_arithmetic_on_a_momentum_in_half_the_bytes(name):
    """As in NumPy, where only stored values are rounded to bfloat16.

    The gradients are constant, so that the error of a factor accumulates.
    """
    direction, numbers = EQUATIONS[name]
    tx = make_optimizer(name, schedule=lambda step: 1.0, momentum_dtype="bfloat16", **numbers)
    params, grads = tree.unflatten_names(PARAMS), tree.unflatten_names(GRADS[0])
    state, update, memory = tx.init(params), jax.jit(tx.update), HalfMemory()
    for step in range(100):
        updates, state = update(grads, state, params)
        directions = {
            leaf: direction(GRADS[0], memory, leaf, step, p) for leaf, p in PARAMS.items()
        }
    updates, state = tree.flatten_names(updates), tree.flatten_names(state)
    moments = {k: m for k, m in state.items() if re.fullmatch(FIRST_MOMENT, k)}
    for leaf in PARAMS:
        (moment,) = (np.float32(m) for k, m in moments.items() if k.endswith(leaf))
        stored = memory[leaf][0] if isinstance(memory[leaf], tuple) else memory[leaf]
        for found, expected in ((-updates[leaf], directions[leaf]), (moment, stored)):
            # If the last bit of float32 differs, bfloat16 may round the other way.
            same = np.isclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
            assert same.mean() > 0.99, leaf


# A stack of layers

LAYERS = 4


def layer_leaves(rng):
    return {
        "norm/scale": rng.normal(size=36).astype(np.float32),
        "mlp/kernel": rng.normal(size=(32, 36)).astype(np.float32),
    }


def unrolled(seed, depth=LAYERS):
    rng = np.random.default_rng(seed)
    layers = {f"encoder/layer_{i}/{k}": v for i in range(depth)
              for k, v in layer_leaves(rng).items()}  # fmt: skip
    embedding = rng.normal(size=(48, 36)).astype(np.float32)
    head = rng.normal(size=(36, 33)).astype(np.float32)
    norm = rng.normal(size=36).astype(np.float32)
    rest = {"embedding/kernel": embedding, "head/kernel": head, "encoder/norm/scale": norm}
    return layers | rest


def stacked(named):
    return tree.flatten_names(stack_layers(tree.unflatten_names(named)))


def unstacked(named):
    return tree.flatten_names(unstack_layers(tree.unflatten_names(named)))


@pytest.mark.parametrize(
    ("name", "weight_decay_on"),
    [("adamw", ".*/kernel"), *((name, "encoder/layer_1/.*/kernel") for name in OPTIMIZERS)],
)
def test_a_stack_of_layers_is_updated_as_its_layers_are(name, weight_decay_on):
    tx = make_optimizer(
        name, schedule=learning_rate, weight_decay=0.1, layer_decay=0.9, grad_clip_norm=1.0,
        momentum_dtype="float32" if name in WITH_MOMENTUM else None,
        freeze="encoder/layer_(0|2)/.*|embedding/.*", weight_decay_on=weight_decay_on,
    )  # fmt: skip
    params, all_grads = unrolled(0), [unrolled(1 + i) for i in range(3)]
    expected = trained(tx, params, all_grads)
    found = unstacked(trained(tx, stacked(params), [stacked(g) for g in all_grads]))
    assert found.keys() == expected.keys()
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_stacks_of_several_depths_are_updated_as_each_alone():
    rng = np.random.default_rng(0)

    def stack(depth):
        return {"encoder": {"layers": {"kernel": rng.normal(size=(depth, 40, 33)).astype("f")}}}

    tx = over_layers(optax.scale_by_factored_rms(min_dim_size_to_factor=32))
    image, text = stack(3), stack(2) | {"head": rng.normal(size=(40, 40)).astype("f")}
    params = image | {"objective": {"text": text}}
    grads = [jax.tree.map(lambda x: x * rng.uniform(0.5, 2), params) for _ in range(2)]
    found, state = [], tx.init(params)
    for each in grads:
        updates, state = tx.update(each, state, params)
        found.append(updates)
    for own, take in (
        (image, lambda x: {"encoder": x["encoder"]}), (text, lambda x: x["objective"]["text"]),
    ):  # fmt: skip
        alone = tx.init(own)
        assert "v_row" in str(alone.layers) and not isinstance(alone.layers, dict)
        for each, updates in zip(grads, found, strict=True):
            expected, alone = tx.update(take(each), alone, own)
            jax.tree.map(np.testing.assert_array_equal, take(updates), expected)


def test_adafactor_not_mapped_over_layers_would_differ(monkeypatch):
    # Enough layers for a stack of vectors to look like a matrix worth factoring.
    params, *all_grads = (stacked(unrolled(seed, depth=40)) for seed in range(3))
    mapped = trained(make_optimizer("adafactor", schedule=learning_rate), params, all_grads)
    monkeypatch.setattr("vit_jax.experiment.optimizers.optimizers.over_layers", lambda tx: tx)
    naive = trained(make_optimizer("adafactor", schedule=learning_rate), params, all_grads)
    for leaf in ("encoder/layers/norm/scale", "encoder/layers/mlp/kernel"):
        assert np.abs(mapped[leaf] - naive[leaf]).max() > 1e-2, leaf
    np.testing.assert_array_equal(mapped["embedding/kernel"], naive["embedding/kernel"])

    def seventh(named):
        return {"kernel": named["encoder/layers/mlp/kernel"][7]}

    alone = trained(
        make_optimizer("adafactor", schedule=learning_rate),
        seventh(params),
        [seventh(grads) for grads in all_grads],
    )
    np.testing.assert_allclose(seventh(mapped)["kernel"], alone["kernel"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [stacked, dict])
def test_rates_and_decays_of_layers_and_of_the_patch_embedding(form):
    named = unrolled(0)
    tx = make_optimizer("sgd", schedule=lambda step: 0.5, layer_decay=0.8, embedding_rate=0.2,
                        weight_decay=0.2, weight_decay_on="encoder/layer_0/.*/kernel")  # fmt: skip
    params = tree.unflatten_names(form(named))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    updates = tree.flatten_names(updates)
    updates = unstacked(updates) if form is stacked else updates
    for name, update in updates.items():
        if name.startswith("encoder/layer_"):
            index = int(name.split("/")[1].removeprefix("layer_")) + 1
        else:
            index = 0 if name.startswith("embedding") else LAYERS + 1
        rate = 0.5 * 0.8 ** (LAYERS + 1 - index) * (0.2 if index == 0 else 1.0)
        decay = 0.2 if name == "encoder/layer_0/mlp/kernel" else 0.0
        np.testing.assert_allclose(update, -rate * (1 + decay * named[name]), rtol=1e-5)


def test_weight_decay_moves_by_half_a_cosine_and_the_patch_embedding_learns_slowly():
    params = {"embedding/kernel": 2.0, "embedding/bias": 2.0, "head/kernel": 2.0, "token": 2.0,
              "objective/embedding/kernel": 2.0}  # fmt: skip
    params = tree.unflatten_names({name: jnp.full(3, value) for name, value in params.items()})
    grads = jax.tree.map(jnp.ones_like, params)
    tx = make_optimizer("sgd", schedule=lambda step: 0.5, momentum=0.0, weight_decay=0.04,
                        weight_decay_end=0.4, total_steps=4, embedding_rate=0.2,
                        head_decay=100.0)  # fmt: skip
    state, update = tx.init(params), jax.jit(tx.update)
    for way in (0, (1 - 0.5**0.5) / 2, 0.5, (1 + 0.5**0.5) / 2, 1):  # shares, at steps 0 to 4
        updates, state = update(grads, state, params)
        decayed = -0.5 * (1 + 2 * (0.04 + way * 0.36))
        wanted = {"embedding/kernel": 0.2 * decayed, "embedding/bias": 0.2 * -0.5, "token": -0.5,
                  "head/kernel": 100 * decayed + 99 * 0.5,
                  "objective/embedding/kernel": decayed}  # fmt: skip
        for name, found in tree.flatten_names(updates).items():
            np.testing.assert_allclose(found, wanted[name], rtol=1e-6, err_msg=name)


FREEZE = "embedding/.*|encoder/layer_(0|3)/.*|encoder/layer_\\d+/norm/.*"


@pytest.mark.parametrize(
    ("name", "form"), [("adamw", dict), *((name, stacked) for name in OPTIMIZERS)]
)
def test_what_is_frozen_keeps_every_bit(name, form):
    params = unrolled(0)
    for p in params.values():
        p.flat[0], p.flat[1] = -0.0, 0.0
    numbers = {"schedule": learning_rate, "weight_decay": 0.1, "weight_decay_on": ".*"}
    tx = make_optimizer(name, **numbers, freeze=FREEZE, grad_clip_norm=1.0)
    found = trained(tx, form(params), [form(unrolled(1 + i)) for i in range(2)])
    found = unstacked(found) if form is stacked else found
    frozen = {leaf for leaf in params if re.fullmatch(FREEZE, leaf)}
    assert len(frozen) == 1 + LAYERS + 2
    for leaf, p in params.items():
        same = np.asarray(found[leaf]).view(np.uint32) == p.view(np.uint32)
        assert same.all() if leaf in frozen else not same.all(), leaf


def test_what_is_frozen_whole_has_no_state():
    tx = make_optimizer("adamw", schedule=learning_rate, freeze=FREEZE)
    state = tree.flatten_names(tx.init(tree.unflatten_names(stacked(unrolled(0)))))
    moments = {leaf.split("/mu/")[1] for leaf in state if "/mu/" in leaf}
    assert moments == {"encoder/layers/mlp/kernel", "encoder/norm/scale", "head/kernel"}


@pytest.mark.parametrize("form", [stacked, dict])
def test_the_norm_that_is_clipped_leaves_the_frozen_out(form):
    params, grads = unrolled(0), unrolled(1)
    learning = {leaf: g for leaf, g in grads.items() if not re.fullmatch(FREEZE, leaf)}
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in learning.values()))
    tx = make_optimizer("sgd", schedule=lambda step: 1.0, freeze=FREEZE, grad_clip_norm=0.5)
    params = tree.unflatten_names(form(params))
    updates, _ = tx.update(tree.unflatten_names(form(grads)), tx.init(params), params)
    np.testing.assert_allclose(
        tree.flatten_names(updates)["head/kernel"], -0.5 / norm * grads["head/kernel"], rtol=1e-5
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_shrink_weights_by_rate_times_decay(name):
    """But those of LAMB, whose decay is as large as the weights, and with every rate of a leaf."""
    named = unrolled(0, depth=2)
    params = tree.unflatten_names(named)
    tx = make_optimizer(name, schedule=lambda step: 0.5, weight_decay=0.25, grad_clip_norm=1.0,
                        layer_decay=0.5, embedding_rate=0.25, head_decay=2.0)  # fmt: skip
    state = jax.jit(tx.init)(params)
    updates, _ = jax.jit(tx.update)(jax.tree.map(np.zeros_like, params), state, params)
    decay = 1.0 if name == "lamb" else 0.25
    shares = {"embedding/kernel": decay / 32, "encoder/layer_0/mlp/kernel": decay / 4,
              "encoder/layer_1/mlp/kernel": decay / 2, "head/kernel": 0.5}  # fmt: skip
    for leaf, update in tree.flatten_names(updates).items():
        shrunk = -0.5 * shares.get(leaf, 0.0) * named[leaf]
        np.testing.assert_allclose(update, shrunk, rtol=1e-6 * (name == "lamb"), err_msg=leaf)


def test_state_is_named_alike_with_and_without_clipping():
    def names(grad_clip_norm):
        tx = make_optimizer("adamw", schedule=learning_rate, grad_clip_norm=grad_clip_norm)
        return list(tree.flatten_names(tx.init(PARAMS)))

    assert names(None) == names(1.0)
    assert "direction/mu/dense/kernel" in names(None)


@pytest.mark.parametrize(
    "change",
    [{"layer_decay": 0.9}, {"freeze": "encoder"}, {"freeze": ".*"},
     {"weight_decay_on": "kernel", "weight_decay": 0.1}],
)  # fmt: skip
def test_faults_that_only_the_parameters_show(change):
    params = {name: p for name, p in PARAMS.items() if "layer_" not in name}
    with at_fault(f"optimizer.{next(iter(change))}"):
        make_optimizer(**({"name": "adamw", "schedule": learning_rate} | change)).init(params)
