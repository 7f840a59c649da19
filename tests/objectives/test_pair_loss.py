"""The loss over all pairs: published values, the whole matrix on one device, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.devices.mesh import batch_sharding, make_mesh
from vit_jax.models.text import unit
from vit_jax.objectives.pairs import LOSSES, Features, PairLoss, Rows, keys_of

MESHES = [{}, {"data": 4, "fsdp": 2}, {"tensor": 2}, {"replica": 2, "data": 2, "fsdp": 2}]


def gradients(loss, features, rows):
    of = jax.jit(jax.value_and_grad(lambda features: loss(features, rows), has_aux=True))
    return of(features)


def whole(name, ignores, features, mask, texts):
    """(loss, values of rows) from the whole matrix; `texts`: which are equal."""
    logits = features.scale * features.images @ features.texts.T + features.bias
    row, both = jnp.eye(len(mask)), mask[:, None] * mask[None]
    same = (texts[:, None] == texts[None]) * both * (1 - row)
    counts = both - same if ignores else both
    if name == "sigmoid":
        total = (counts * jnp.log1p(jnp.exp(jnp.where(row > 0, -logits, logits)))).sum()
    else:
        exps = counts * jnp.exp(logits)
        norms = sum(jnp.log(exps.sum(axis) + 1 - mask) for axis in (0, 1)) / 2
        total = (mask * (norms - jnp.diag(logits))).sum()
    rivals = jnp.where((both - same - row) > 0, logits, -1e30)
    right = [mask * (jnp.diag(logits) > rivals.max(axis)) for axis in (1, 0)]
    return total, (*right, same.max(axis=0))


@pytest.mark.parametrize(
    ("name", "ignores"),
    [
        ("sigmoid", False),
        ("softmax", True),
        pytest.param("sigmoid", True, marks=pytest.mark.slow),
        pytest.param("softmax", False, marks=pytest.mark.slow),
    ],
)
def test_rounds_equal_the_whole_matrix_on_one_device(name, ignores):
    rng = np.random.default_rng(0)
    images, other = (unit(rng.standard_normal((32, 16), np.float32)) for _ in range(2))
    features = Features(images, unit(images + other), np.float32(7), np.float32(-1))
    mask, ids = np.ones(32, np.float32), rng.integers(0, 9, (32, 5))
    mask[[3, 8, 24, 25, 26, 27]] = 0  # the last: all of a device
    ids[7], ids[20], ids[9], ids[31], ids[8] = ids[30], ids[30], ids[10], ids[10], ids[1]
    texts = np.array([{tuple(row): i for i, row in enumerate(ids)}[tuple(row)] for row in ids])
    expected = gradients(lambda f, _: whole(name, ignores, f, mask, texts), features, None)
    (_, of_rows), grads = expected
    assert [float(x.sum()) > 0 for x in of_rows] == [True] * 3 and of_rows[2].sum() == 6
    assert not np.any(grads.texts[8]) and np.all(mask[8] * of_rows[0] == 0)
    loss, rows = PairLoss(name, ignores), Rows(mask, keys_of(jnp.asarray(ids)))
    found = [gradients(loss, features, rows)]
    for sizes in MESHES:
        mesh = make_mesh(**sizes)
        with jax.set_mesh(mesh):
            found.append(gradients(loss, features, rows))

    def near(x, y):
        # Softmax's gradient with respect to the bias is 0: 26 ones less 26 ones, in two orders.
        rounding = 26 * np.finfo(np.float32).eps if np.ndim(x) == 0 else 2e-6
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=rounding)

    for each in found:
        jax.tree.map(near, jax.tree.leaves(each), jax.tree.leaves(expected))


@pytest.mark.parametrize("name", LOSSES)
def test_published_values(golden, name):
    known = np.load(golden / f"loss_{'siglip' if name == 'sigmoid' else 'clip'}.npz")
    given = {"image_features", "text_features", "logit_scale", "logit_bias"} & {*known}
    args = {key: jnp.asarray(known[key]).reshape(-1)[0] for key in given if key[:5] == "logit"}
    args |= {key: known[key] for key in given if key not in args}

    def of(args):
        scale, bias = jnp.exp(args["logit_scale"]), args.get("logit_bias", jnp.zeros(()))
        towers = (unit(args[f"{side}_features"]) for side in ("image", "text"))
        number = len(args["image_features"])
        rows = Rows(jnp.ones(number), jnp.arange(number)[:, None])
        return PairLoss(name)(Features(*towers, scale, bias), rows)[0] / number

    loss, grads = jax.jit(jax.value_and_grad(of))(args)
    np.testing.assert_allclose(loss, known["loss"], rtol=1e-6)
    for key, grad in grads.items():
        expected = known[f"grad_{key}"].reshape(grad.shape)
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_memory_of_a_device_does_not_grow_with_their_number(name):
    """128 rows each; a block of all pairs, or all texts, would take twice as much on 8."""
    found = {}
    for number in (4, 8):
        mesh = make_mesh(devices=jax.devices()[:number])
        split, rows = batch_sharding(mesh), 128 * number
        args = [jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=split)] * 2
        args += [jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=split)]

        def loss(images, texts, mask):
            keys = jnp.zeros((len(mask), 2), jnp.uint32)
            features = Features(images, texts, jnp.ones(()), jnp.ones(()))
            return PairLoss(name)(features, Rows(mask, keys))[0]

        with jax.set_mesh(mesh):
            program = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(split, split))
            found[number] = program.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert found[8] < 1.01 * found[4]


def test_masked_batch_has_no_loss_and_no_nan():
    rng = np.random.default_rng(0)
    images = unit(rng.standard_normal((8, 4), np.float32))
    features = Features(images, images, np.float32(10), np.float32(0))
    for name in LOSSES:
        (loss, _), grads = gradients(PairLoss(name), features, Rows(np.zeros(8), np.zeros((8, 2))))
        assert loss == 0 and not any(np.any(x) for x in grads)
