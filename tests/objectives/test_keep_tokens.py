"""Training on a share of the patches: what the encoder sees, and that every loss follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from jax.sharding import NamedSharding, PartitionSpec
from numpy_vit import random_params

from vit_jax.config import OBJECTIVES
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.state import TrainState
from vit_jax.models import create_model
from vit_jax.models.patches import draw_patches
from vit_jax.models.watched import Outputs, watch
from vit_jax.objectives import masked_patches
from vit_jax.objectives.contract import RunFacts, Teacher
from vit_jax.objectives.features import Features, parse_features
from vit_jax.objectives.losses import cross_entropy

RNG = np.random.default_rng(0)
B, SIZE = 8, (16, 24)  # 4 x 6 patches
IMAGES = RNG.normal(size=(B, *SIZE, 3)).astype(np.float32)
RNGS = {"dropout": jax.random.key(3)}


def network(keep_tokens=1.0, num_classes=5, **fields):
    fields = {"width": 16, "mlp_dim": 16, "depth": 1} | fields
    return create_model("ViT-mu/4", num_classes, SIZE, keep_tokens=keep_tokens, **fields)


def with_head(model):
    """Parameters whose head is not zero."""
    return random_params(model, IMAGES[:1])


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "gap"},
        {"registers": 2, "rotary": "indices", "pos_embed": "none"},
        {"pos_embed_at": "layers_shared", "scan": True, "depth": 2},
    ],
    ids=["mean", "registers_and_rotary", "positions_in_layers"],
)
def test_training_sees_the_drawn_patches_and_evaluation_all(fields):
    model = network(0.3, **fields)
    variables = {"params": with_head(model)}

    def by_hand(model, images, keep):
        return model.represent(model.encode(model.embed(images), keep=keep))

    @jax.jit
    def in_training(variables):
        with watch() as outputs:
            found = model.apply(variables, IMAGES, method="features", train=True, rngs=RNGS)
        return found, outputs.keep, model.apply(variables, IMAGES, outputs.keep, method=by_hand)

    found, keep, wanted = jax.device_get(in_training(variables))
    assert keep.shape == (B, 7) and (np.diff(keep, axis=1) > 0).all()
    assert len({tuple(row) for row in keep}) == B
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    whole = network(**fields)
    logits = (jax.jit(each.apply)(variables, IMAGES) for each in (model, whole))
    np.testing.assert_array_equal(*logits)
    assert model.num_tokens == whole.num_tokens and model.is_random and not whole.is_random


def test_the_patches_of_a_row_are_the_same_on_every_mesh():
    model = network(0.5)
    variables, mesh = {"params": with_head(model)}, make_mesh(data=8, fsdp=1)

    @jax.jit
    def logits(images):
        return model.apply(variables, images, train=True, rngs=RNGS)

    split = jax.device_put(IMAGES, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_allclose(logits(split), logits(IMAGES), atol=2e-6)
    kept = draw_patches(jax.random.key(0), 1000, 24, 0.5)
    shares = np.bincount(np.asarray(kept).ravel(), minlength=24) / 1000
    assert kept.shape == (1000, 12) and np.abs(shares - 0.5).max() < 0.06


VIEWS = {
    "global_views": np.stack([IMAGES, IMAGES[::-1]], axis=1),
    "local_views": RNG.normal(size=(B, 2, 8, 12, 3)).astype(np.float32),
}
BATCH = {"image": IMAGES, "label": np.arange(B) % 5, "mask": np.ones(B, np.float32), **VIEWS}
OF_VIEWS = {
    "num_prototypes": 12, "head_width": 8, "bottleneck": 4, "patch_weight": 1.0,
    "koleo_weight": 0.1, "gram_weight": 0.5, "gram_every": "3 steps",
}  # fmt: skip
TASKS = {
    "supervised": {},
    "lejepa": {"directions": 8, "head_width": 8},
    "masked_patches": {"target": "pixels"},
    "self_distillation": OF_VIEWS,
    "distillation": {"teacher": "t", "mode": "features", "features": "pooled, tokens, 0:0",
                     "weight": 1.0},
}  # fmt: skip


def loss_of(name, keep_tokens, batch=BATCH, num_classes=5):
    """loss(params, changed) -> the sums of an objective, and parameters for it."""
    model = network(keep_tokens, num_classes)
    taught = network(num_classes=3, width=8)
    variables = {"params": with_head(taught)}
    teacher = Teacher("t", 1.0, taught, variables, (0.5,) * 3, (0.5,) * 3, same_classes=False)
    facts = RunFacts(
        (0.5,) * 3, (0.5,) * 3, (teacher,) if name == "distillation" else (),
        {key: leaf.shape for key, leaf in batch.items()}, {"objective.gram_every": 3},
    )  # fmt: skip
    objective = OBJECTIVES.make({"name": name, **TASKS[name]}).bind(model, cross_entropy, facts)
    params = dict(with_head(model))
    own, state = jax.jit(objective.init)(jax.random.key(2)) if objective.init else ({}, {})
    params["objective"] = own
    ema = jax.tree.map(lambda x: 1.1 * x, params)
    state = TrainState(jnp.int32(0), params, {}, (), ema, {}, state)

    def loss(params, changed):
        return objective.loss(params, state, batch | changed, (variables,), jax.random.key(1))

    return loss, params


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("supervised", "masked_patches") else pytest.mark.slow)
     for name in TASKS],
)  # fmt: skip
def test_a_share_that_keeps_every_patch_changes_no_loss(name):
    """23.9 of 24 patches are 24: all go the way of patches that are chosen."""
    (found, params), (wanted, _) = (loss_of(name, share) for share in (0.996, 1.0))
    each = (
        jax.jit(jax.value_and_grad(lambda params, sums=sums: sums(params, {}).loss))(params)
        for sums in (found, wanted)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), *each)


@pytest.mark.parametrize(
    "name",
    ["supervised", "masked_patches", pytest.param("self_distillation", marks=pytest.mark.slow)],
)
def test_a_patch_that_is_left_out_counts_nowhere(name, monkeypatch):
    """No gradient reaches its pixels; where a corrupted patch becomes another, that is seen."""
    kept = jnp.asarray([0, 3, 5, 8, 9, 14, 20, 22])

    def draw_patches(rng, rows, num, share):
        return jnp.tile(kept if num == 24 else jnp.arange(2), (rows, 1))

    monkeypatch.setattr("vit_jax.models.contract.draw_patches", draw_patches)
    monkeypatch.setattr(masked_patches, "_TO_MASK", 1.0)
    loss, params = loss_of(name, 1 / 3)
    key = "global_views" if name == "self_distillation" else "image"
    slopes = jax.jit(jax.grad(lambda x: loss(params, {key: x}).loss))(jnp.asarray(BATCH[key]))
    rows = np.abs(slopes).reshape(-1, 4, 4, 6, 4, 3).sum(axis=(0, 2, 4, 5)).ravel()
    assert rows[kept].all() and not np.delete(rows, kept).any()


def test_a_row_whose_corrupted_patches_are_not_seen_has_no_weight(monkeypatch):
    monkeypatch.setattr(
        "vit_jax.models.contract.draw_patches", lambda _, rows, *__: jnp.zeros((rows, 1), int)
    )
    loss, params = loss_of("masked_patches", 0.04)
    whole = jax.jit(lambda params: loss(params, {}))(params)
    of_rows = jax.jit(jax.vmap(lambda mask: loss(params, {"mask": mask}).weight_sum))
    weights = of_rows(jnp.eye(B)).tolist()
    assert {*weights} == {0.0, 1.0} and whole.weight_sum == sum(weights)
    seen = jax.jit(lambda mask: loss(params, {"mask": mask}))(np.float32(weights))
    np.testing.assert_allclose(whole.loss, seen.loss, rtol=1e-5)


def test_features_of_the_patches_that_are_seen_are_compared():
    student, teacher = network(0.5, None), network(num_classes=None, width=8)
    of = Teacher("t", 1.0, teacher, {}, (0.5,) * 3, (0.5,) * 3)
    features = Features(student, [of], parse_features("tokens"), "cosine")
    own, _ = features.init(jax.random.key(0))
    x_BND, y_BND = (RNG.normal(size=(2, 25, d)).astype(np.float32) for d in (16, 8))
    keep = jnp.asarray([[1, 4, 7], [0, 22, 23]])
    seen = np.take_along_axis(x_BND[:, 1:], np.asarray(keep)[:, :, None], axis=1)
    tokens = jnp.concatenate([x_BND[:, :1], seen], axis=1)
    found = features(own, None, Outputs(tokens=tokens, keep=keep), [(None, Outputs(tokens=y_BND))])
    layer = jax.tree.map(np.asarray, own["adapter_0_0"])
    for row in range(2):
        x = seen[row] @ layer["kernel"] + layer["bias"]
        y = y_BND[row, 1:][np.asarray(keep[row])]
        cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        np.testing.assert_allclose(found["tokens"][row], 1 - cosines.mean(), atol=1e-5)


def test_models_and_objectives_that_need_all_patches_refuse_a_share():
    with at_fault("keep_tokens"):
        network(0.5, pos_embed="relative")
    with at_fault("keep_tokens"):
        network(0.0)
    with at_fault("model.keep_tokens"):
        OBJECTIVES.make({"name": "mae"}).bind(network(0.5, None), None, RunFacts((), ()))
