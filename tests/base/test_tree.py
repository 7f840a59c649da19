import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest

from vit_jax.base import tree

PARAMS = {
    "head": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)},
    "block_0": {"mlp": {"kernel": jnp.ones((2, 2))}},
}


@flax.struct.dataclass
class State:
    step: int
    params: dict
    opt_state: tuple


def test_names_of_params():
    assert list(tree.flatten_names(PARAMS)) == ["block_0/mlp/kernel", "head/bias", "head/kernel"]
    assert tree.leaf_names(PARAMS)["head"]["bias"] == "head/bias"


def test_names_of_a_whole_state():
    state = State(0, PARAMS, optax.adam(1e-3).init(PARAMS))
    named = tree.flatten_names(state)
    assert named["params/head/bias"] is PARAMS["head"]["bias"]
    assert {"step", "opt_state/0/count", "opt_state/0/mu/block_0/mlp/kernel"} <= named.keys()
    assert len(named) == len(jax.tree.leaves(state))
    assert jax.tree.structure(tree.leaf_names(state)) == jax.tree.structure(state)


def test_unflatten_undoes_flatten():
    assert tree.unflatten_names(tree.flatten_names(PARAMS)) == PARAMS


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        (".*/kernel", {"head/kernel", "block_0/mlp/kernel"}),
        ("head", set()),  # the whole name must match
        ("head/.*", {"head/kernel", "head/bias"}),
    ],
)
def test_mask(pattern, chosen):
    mask = tree.mask(PARAMS, pattern)
    assert {name for name, on in tree.flatten_names(mask).items() if on} == chosen
    assert jax.tree.structure(mask) == jax.tree.structure(PARAMS)


SCANNED = {
    "class_token": jnp.ones((1, 1, 2)),
    "embedding": {"bias": jnp.ones(2)},
    "encoder": {
        "layers": {"mlp": {"kernel": jnp.ones((12, 2, 3))}},
        "norm": {"scale": jnp.ones(2)},
    },
    "head": {"bias": jnp.ones(3)},
}


def test_parts_stand_in_the_order_of_the_forward_pass():
    layers = [f"encoder/layer_{i}" for i in range(12)]
    assert tree.parts(SCANNED) == ["embedding", *layers, "head"]
    names = ["class_token", "embedding/bias", "encoder/layer_11/mlp/kernel", "encoder/norm/scale"]
    assert [tree.part_of(name) for name in names] == [
        "embedding", "embedding", "encoder/layer_11", "head",
    ]  # fmt: skip
    assert tree.part_of("pos_embedding/rows") == "embedding"
    assert tree.part_of("encoder/layer_1/pos_embedding/offsets") == "encoder/layer_1"
    assert tree.parts(PARAMS) == ["head"]


def test_layers_are_chosen_by_their_unrolled_names():
    found = tree.flatten_names(tree.map_layers(lambda name: name.count("1"), SCANNED))
    kernel = found.pop("encoder/layers/mlp/kernel")
    assert kernel.shape == (12, 1, 1)
    assert kernel.ravel().tolist() == [0, 1, *[0] * 8, 1, 2]
    assert set(found.values()) == {0}


def test_mask_goes_by_unrolled_names():
    chosen = tree.flatten_names(tree.mask(SCANNED, r"encoder/layer_(0|11)/.*|head/bias"))
    assert chosen["encoder/layers/mlp/kernel"].ravel().tolist() == [True, *[False] * 10, True]
    assert chosen["encoder/layers/mlp/kernel"].shape == (12, 1, 1)
    assert [name for name, on in chosen.items() if on is True] == ["head/bias"]
    stacked = tree.flatten_names(tree.mask(SCANNED, "encoder/layers/.*"))
    assert not stacked["encoder/layers/mlp/kernel"].any()
