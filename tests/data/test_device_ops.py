"""Device ops and the value range."""

import colorsys
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from vit_jax.base.errors import InputError
from vit_jax.data import make_device_transform, order, parse_ops, to_value_range
from vit_jax.data.batch import Crops
from vit_jax.data.colour_ops import ColorJitter, turn_hue
from vit_jax.data.device_ops import Pairs, symmetric_beta
from vit_jax.data.host_tf import tf
from vit_jax.data.preprocessing import Views, parse_view_ops
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_train_step
from vit_jax.objectives.contract import Objective, ObjectiveOutput

B, C = 64, 10
RNG = np.random.default_rng(0)
BATCH = {
    "image": RNG.integers(0, 256, (B, 4, 6, 3), np.uint8),
    "label": RNG.integers(0, C, B, np.int32),
    "mask": np.ones(B, np.float32),
    "id": np.arange(B, dtype=np.int32),
}
HALF = (0.5, 0.5, 0.5)
PIXELS = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # values are the pixels


@functools.cache
def row_keys(rows=B):
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.jit(lambda: fold_in(jax.random.key(0), jnp.arange(rows)))()


@functools.cache
def transform(string, mean=HALF, std=HALF, distance=1, num_classes=C):
    _, device_ops = parse_ops(string, (4, 6))
    return jax.jit(
        make_device_transform(device_ops, mean, std, num_classes=num_classes, distance=distance)
    )


def of_rows(batch, rows):
    return {key: leaf[rows] for key, leaf in batch.items()}


def black(size, height, width):
    """A batch of black images, of two classes in turn."""
    return {
        "image": np.zeros((size, height, width, 3), np.uint8),
        "label": np.arange(size, dtype=np.int32) % 2,
        "mask": np.ones(size, np.float32),
        "id": np.arange(size, dtype=np.int32),
    }


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


def test_value_range():
    pixels = np.array([[0, 255, 51]], np.uint8)
    np.testing.assert_array_equal(to_value_range(pixels, HALF, HALF)[0, :2], [-1, 1])
    values = to_value_range(pixels, (0.1, 0.2, 0.3), (0.5, 0.25, 0.2))
    np.testing.assert_allclose(values, [[-0.2, 3.2, -0.5]], rtol=1e-6)
    assert values.dtype == jnp.float32


def test_without_ops_only_the_images_change():
    after = transform("")(BATCH, row_keys())
    expected = BATCH | {"image": to_value_range(BATCH["image"], HALF, HALF)}
    np.testing.assert_allclose(after["image"], expected["image"], rtol=0, atol=1e-6)
    assert_same(after | {"image": 0}, expected | {"image": 0})
    assert after["label"].dtype == jnp.int32


SQUARE = BATCH | {"image": RNG.integers(0, 256, (B, 5, 5, 3), dtype=np.uint8)}


@pytest.mark.parametrize(
    ("op", "batch", "axis", "turns"),
    [
        ("flip", BATCH, 2, (0,)),
        ("vertical_flip", BATCH, 1, (0,)),
        ("rotate90", BATCH, None, (0, 2)),
        ("rotate90", SQUARE, None, (0, 1, 2, 3)),
    ],
)
def test_images_are_flipped_or_turned_in_equal_shares(op, batch, axis, turns):
    before, after = transform("")(batch, row_keys()), transform(op)(batch, row_keys())
    assert_same(before | {"image": 0}, after | {"image": 0})
    images = np.asarray(before["image"])
    forms = [np.rot90(images, turn, (1, 2)) for turn in turns]
    forms += [] if axis is None else [np.flip(images, axis)]
    found = [(form == np.asarray(after["image"])).all((1, 2, 3)) for form in forms]
    assert np.sum(found, axis=0).tolist() == [1] * B  # each image is one of them
    assert all(0.5 * B / len(forms) < of_form.sum() < 1.6 * B / len(forms) for of_form in found)


@pytest.mark.parametrize("ops", ["flip", "vertical_flip|rotate90", "erase(0.5)"])
def test_what_a_row_gets_depends_on_its_key_only(ops):
    together = transform(ops)(BATCH, row_keys())
    reverse = transform(ops)(of_rows(BATCH, np.s_[::-1]), row_keys()[::-1])
    assert_same(together, of_rows(reverse, np.s_[::-1]))


def test_each_op_of_a_string_draws_for_itself():
    once, thrice = (transform(ops)(BATCH, row_keys()) for ops in ("flip", "flip|flip|flip"))
    assert not np.array_equal(once["image"], thrice["image"])


def test_an_op_that_gives_no_batch_is_named(monkeypatch):
    (flip,) = parse_ops("flip", (4, 6))[1]
    for made, of in ((BATCH["image"], "ndarray"), ({"image": BATCH["image"]}, "dict")):
        monkeypatch.setattr(type(flip), "__call__", lambda *_, made=made: made)
        with pytest.raises(InputError, match=f"'flip' gives {of}; .* gives the whole batch"):
            make_device_transform([flip], HALF, HALF, num_classes=C)(BATCH, row_keys())


# Random erasing.


def boxes(changed):
    """(areas, heights, widths) of what is True in (B, H, W); each must be a full rectangle."""
    rows, columns = changed.any(2), changed.any(1)
    for mark in (rows, columns):  # without gaps
        edges = np.diff(np.pad(mark, [(0, 0), (1, 1)]).astype(int), axis=1)
        assert ((edges == 1).sum(1) <= 1).all()
    areas, heights, widths = changed.sum((1, 2)), rows.sum(1), columns.sum(1)
    np.testing.assert_array_equal(areas, heights * widths)
    return areas, heights, widths


@pytest.fixture(scope="module")
def erased():
    """(what was erased (B, H, W), the values after), of 1,000 black images."""
    after = transform("erase(0.25)", **PIXELS)(black(1000, 36, 48), row_keys(1000))["image"]
    after = np.asarray(after)
    return (after > 0.5).any(-1), after


def test_a_quarter_of_the_images_is_erased_in_part(erased):
    changed, _ = erased
    # A pixel's noise is black in one of 256^3: a rectangle shows whole.
    areas, heights, widths = boxes(changed)
    hit = areas > 0
    assert 0.21 < hit.mean() < 0.29
    share = areas[hit] / (36 * 48)
    assert 0.015 < share.min() < 0.04 and 0.37 < share.max() < 0.41
    assert abs(share.mean() - 0.21) < 0.02  # uniform from 0.02 to 0.4
    aspect = heights[hit] / widths[hit]
    assert 0.25 < aspect.min() < 0.4 and 2.5 < aspect.max() < 3.7
    assert abs(np.log(aspect).mean()) < 0.15
    where = changed[hit].mean(0)  # how often each pixel is erased
    for edge in (where[0], where[-1], where[:, 0], where[:, -1]):
        assert 0 < edge.mean() < where[15:21, 21:27].mean() / 2


def test_what_is_erased_becomes_uniform_noise(erased):
    changed, after = erased
    for channel in range(3):
        values = np.round(after[changed][:, channel]).astype(int)
        counts = np.bincount(values, minlength=256)
        assert len(counts) == 256
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert abs(np.corrcoef(after[changed].T) - np.eye(3)).max() < 0.02


def test_erased_area_is_as_asked_even_where_the_aspect_has_to_yield():
    after = transform("erase(1, 0.9, 0.95)", **PIXELS)(black(200, 16, 64), row_keys(200))["image"]
    areas, _, _ = boxes((np.asarray(after) > 0.5).any(-1))
    assert 0.8 < areas.min() / (16 * 64) <= areas.max() / (16 * 64) <= 1


# Mixing.


def partner(row, distance):
    """By hand: within 2 D rows, j and j + D."""
    block, place = divmod(row, 2 * distance)
    return block * 2 * distance + (place + distance if place < distance else place - distance)


@pytest.mark.parametrize("distance", [1, 3])
def test_pairs(distance):
    rows = np.arange(24)
    expected = [partner(row, distance) for row in rows]
    np.testing.assert_array_equal(Pairs(distance).swapped(rows), expected)
    np.testing.assert_array_equal(Pairs(distance).firsts(rows), np.minimum(rows, expected))


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", order.ORDERS)
def test_a_record_meets_another_in_every_epoch(name, repeats):
    n, records, epochs = 512, 32, 12
    how = {"global_batch_size": records * repeats, "repeats": repeats}
    streams = 4 if name == "chunk" else None
    data_order = order.make_order(name, [n], 0, chunk_size=16, streams=streams, **how)
    ids = data_order(tf.range(epochs * n * repeats, dtype=tf.int64)).numpy()
    pairs = Pairs(order.pair_distance(name, streams, **how))
    met = np.concatenate([pairs.swapped(b) for b in ids.reshape(-1, records * repeats)])
    assert (met != ids).mean() > 0.99
    assert (met // 16 == ids // 16).mean() < 0.1  # of one chunk, and often of one class
    partners = [len(set(met[ids == record])) for record in range(n)]
    assert np.mean(partners) > 0.75 * epochs and min(partners) > epochs / 3


@pytest.mark.parametrize("distance", [1, 2])
def test_mixup_by_hand(distance):
    after = transform("mixup(0.8)", **PIXELS, distance=distance)(BATCH, row_keys())
    images, labels = np.asarray(after["image"]), np.asarray(after["label"])
    assert (images.dtype, labels.dtype, labels.shape) == (np.float32, np.float32, (B, C))
    own_labels = np.eye(C)[BATCH["label"]]
    for row in range(B):
        other = partner(row, distance)
        if BATCH["label"][row] == BATCH["label"][other]:
            continue
        share = labels[row, BATCH["label"][row]]
        assert 0.5 <= share <= 1
        assert share == labels[other, BATCH["label"][other]]  # one lambda for both
        for mixed, own in ((images, BATCH["image"]), (labels, own_labels)):
            by_hand = share * own[row].astype(float) + (1 - share) * own[other]
            np.testing.assert_allclose(mixed[row], by_hand, rtol=0, atol=1e-3 if own.ndim > 2 else
                                       1e-6)  # fmt: skip
    assert len(np.unique(labels.max(1))) > 20


def shares(ops, height=40, width=50):
    """What each of 2,000 rows keeps of its own: of its label, and of its pixels (H, W)."""
    batch = black(2000, height, width)
    batch["image"][::2] = 255  # each pair: white of class 0, black of class 1
    after = transform(ops, num_classes=2)(batch, row_keys(2000))
    own_label = np.asarray(after["label"])[np.arange(2000), batch["label"]]
    white = np.asarray(after["image"])[..., 0] / 2 + 0.5
    return own_label, np.where(batch["label"][:, None, None] == 0, white, 1 - white)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_s_lambdas_are_of_the_beta_distribution(alpha):
    own_label, own_pixels = shares(f"mixup({alpha})", 1, 1)
    np.testing.assert_allclose(own_pixels[:, 0, 0], own_label, atol=1e-6)
    np.testing.assert_array_equal(own_label[::2], own_label[1::2])
    draws = np.random.default_rng(0).beta(alpha, alpha, 10**5)
    assert scipy.stats.ks_2samp(own_label[::2], np.maximum(draws, 1 - draws)).pvalue > 1e-3


def numpy_cutmix(alpha, shape, number):
    """The share of its own label that cutmix leaves, as its paper draws it."""
    rng = np.random.default_rng(0)
    height, width = shape
    ratio = np.sqrt(1 - rng.beta(alpha, alpha, number))
    inner = []
    for side in (height, width):
        cut = (side * ratio).astype(int) // 2
        middle = rng.integers(0, side, number)
        inner.append(np.minimum(middle + cut, side) - np.maximum(middle - cut, 0))
    return 1 - inner[0] * inner[1] / (height * width)


def test_cutmix_replaces_a_box_and_mixes_labels_by_its_area():
    own_label, own_pixels = shares("cutmix(1.0)")
    assert set(np.unique(own_pixels)) == {0, 1}
    areas, heights, widths = boxes(own_pixels == 0)
    np.testing.assert_allclose(own_label, 1 - areas / (40 * 50), atol=1e-6)
    np.testing.assert_array_equal(own_pixels[::2], own_pixels[1::2])  # the same box in both
    drawn = numpy_cutmix(1.0, (40, 50), 10**5)
    assert scipy.stats.ks_2samp(own_label[::2], drawn).pvalue > 1e-3
    whole = (own_pixels[:, [0, -1]] == 1).all((1, 2)) & (own_pixels[:, :, [0, -1]] == 1).all((1, 2))
    whole &= areas > 200
    ratio = (heights / 40)[whole] / (widths / 50)[whole]
    assert whole.sum() > 100 and abs(ratio - 1).max() < 0.2  # shaped like the image


def test_mixup_or_cutmix_draws_one_for_each_pair():
    own_label, own_pixels = shares("mixup_or_cutmix(0.8, 1.0)")
    even = np.ptp(own_pixels.reshape(len(own_pixels), -1), axis=1) < 1e-6
    hit = own_label < 0.99  # else there is little to see of either
    is_mixup = even & (own_pixels[:, 0, 0] < 0.999)
    assert 0.42 < is_mixup[hit].mean() < 0.58
    np.testing.assert_array_equal(is_mixup[::2], is_mixup[1::2])
    np.testing.assert_allclose(own_pixels.mean((1, 2)), own_label, atol=1e-5)
    draws = np.random.default_rng(0).beta(0.8, 0.8, 10**5)
    folded = np.maximum(draws, 1 - draws)
    found = own_label[::2][is_mixup[::2]]
    assert scipy.stats.ks_2samp(found, folded[folded < 0.999]).pvalue > 1e-3
    found = own_label[::2][~is_mixup[::2] & hit[::2]]
    drawn = numpy_cutmix(1.0, (40, 50), 10**5)
    assert scipy.stats.ks_2samp(found, drawn[drawn < 0.99]).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 1.0, 8.0])
def test_symmetric_beta(alpha):
    draws = jax.jit(jax.vmap(symmetric_beta, (0, None)))(row_keys(20_000), alpha)
    draws = np.asarray(draws, np.float64)
    assert draws.min() >= 0 and draws.max() <= 1
    assert abs(draws.mean() - 0.5) < 0.012
    np.testing.assert_allclose(draws.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.03)
    inner = (draws > 1e-3) & (draws < 1 - 1e-3)  # nearer to 0 and 1 float32 is coarse
    beta = scipy.stats.beta(alpha, alpha)
    low, high = beta.cdf([1e-3, 1 - 1e-3])
    np.testing.assert_allclose(inner.mean(), high - low, atol=0.012)
    within = (beta.cdf(draws[inner]) - low) / (high - low)
    assert scipy.stats.kstest(within, "uniform").pvalue > 1e-3


def test_a_masked_row_is_nobody_s_partner():
    mask = np.ones(B, np.float32)
    mask[[3, 10, 11, 40]] = 0
    mix = transform("mixup_or_cutmix(8.0, 1.0)", **PIXELS)
    after = mix(BATCH | {"mask": mask}, row_keys())
    for row in (2, 41):
        np.testing.assert_allclose(after["image"][row], BATCH["image"][row], atol=1e-3)
        np.testing.assert_array_equal(after["label"][row], np.eye(C)[BATCH["label"][row]])
    np.testing.assert_array_equal(after["mask"], mask)
    others = np.setdiff1d(np.arange(B), [2, 3, 10, 11, 40, 41])
    unmasked = of_rows(mix(BATCH, row_keys()), others)
    assert_same(of_rows(after, others), unmasked)  # a mask is nothing to other pairs


def test_without_mixing_a_batch_need_not_be_made_of_pairs():
    odd = of_rows(BATCH, np.s_[:63])
    assert transform("flip")(odd, row_keys(63))["image"].shape[0] == 63


# On several devices.

EVERY_OP = "flip|vertical_flip|rotate90|erase(0.25)|mixup_or_cutmix(0.8, 1.0)"
COLLECTIVE = re.compile(r"= .* (?:all-reduce|all-gather|all-to-all|collective-permute|"
                        r"reduce-scatter)(?:-start)?\(")  # fmt: skip


def sharded_over(axes):
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    return jax.sharding.NamedSharding(mesh, jax.P(tuple(a for a in axes if a != "tensor")))


def test_the_same_bits_on_one_device_and_on_eight():
    sharding = sharded_over({"data": 8})
    augment = transform(EVERY_OP, distance=2)
    shards = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), (BATCH, row_keys()))
    assert_same(augment(*shards), augment(BATCH, row_keys()))


def objective_of_mean(params, state, batch, frozen, rng):
    """Of one parameter: nothing of an image's size passes between devices for its sake."""
    loss = params * batch["image"].mean((1, 2, 3)) * batch["label"][:, 0]
    return ObjectiveOutput(loss.sum(), batch["mask"].sum(), {}, state.model_state)


def test_a_step_moves_no_image_between_devices():
    _, device_ops = parse_ops(EVERY_OP, (32, 32))
    augment = make_device_transform(device_ops, HALF, HALF, num_classes=C, distance=2)
    tx = optax.sgd(0.1)
    step = make_train_step(Objective(objective_of_mean), tx, augment, seed=0)
    sharding = sharded_over({"data": 2, "fsdp": 2, "tensor": 2})
    shapes = {"image": ((B, 32, 32, 3), jnp.uint8), "label": ((B,), jnp.int32),
              "mask": ((B,), jnp.float32), "id": ((B,), jnp.int32)}  # fmt: skip
    batch = {k: jax.ShapeDtypeStruct(*v, sharding=sharding) for k, v in shapes.items()}
    state = TrainState(jnp.int32(0), jnp.float32(1), {}, tx.init(jnp.float32(1)))
    with jax.set_mesh(sharding.mesh):
        text = jax.jit(step, in_shardings=(None, sharding)).lower(state, batch).compile().as_text()
    found = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    assert found  # the gradient's, of one number, and the weight's
    for line in found:
        assert re.search(r"= \(?(?:f32\[\][, ]*)+\)? ", line), line


def test_the_search_for_collectives_sees_images_that_meet_across_devices():
    """With pairs that lie on two devices there is something to find."""
    sharding = sharded_over({"data": 8})
    augment = transform("mixup(0.2)", distance=8)
    arguments = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), (BATCH, row_keys()))
    text = augment.lower(*arguments).compile().as_text()
    assert COLLECTIVE.search(text)


def test_hue_turns_as_in_colorsys():
    pixels = RNG.integers(0, 256, (20, 3)).astype(np.float32)
    pixels[:4] = [[7, 7, 7], [0, 0, 0], [255, 255, 0], [9, 200, 200]]
    expected = []
    for red, green, blue in pixels / 255:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        expected.append(colorsys.hsv_to_rgb((hue + 0.3) % 1, saturation, value))
    turned = turn_hue(list(pixels.T), jnp.float32(0.3))
    np.testing.assert_allclose(np.transpose(turned), 255 * np.array(expected), atol=1e-3)


def test_color_jitter_changes_in_a_random_order():
    """As one change after another: brightness, contrast, saturation and hue, in the order drawn."""
    op = ColorJitter(probability=1.0, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    image = RNG.integers(0, 256, (6, 4, 3)).astype(np.float32)
    change, turn, hues = jax.jit(op.change), jax.jit(turn_hue), set()
    for key in jax.random.split(jax.random.key(0), 24):
        factor_key, order_key, _ = jax.random.split(key, 3)
        draws = jax.random.uniform(factor_key, (4,), minval=-1.0)
        order, planes = jax.random.permutation(order_key, 4).tolist(), [*np.moveaxis(image, -1, 0)]
        for which in order:
            grey = sum(w * x for w, x in zip((0.299, 0.587, 0.114), planes, strict=True))
            other = (0.0, grey.mean(), grey, 0.0)[which]
            factor = 1 + (0.4, 0.4, 0.2, 0.0)[which] * draws[which]
            changed = [other + factor * (x - other) for x in planes]
            changed = turn(planes, 0.1 * draws[3]) if which == 3 else changed
            planes = [np.clip(x, 0, 255) for x in changed]
        np.testing.assert_allclose(change(image, key), np.stack(planes, -1), atol=0.01)
        hues.add(order.index(3))
    assert hues == {0, 1, 2, 3}


def test_colour_ops_change_colours_as_they_say():
    big = BATCH | {"image": RNG.integers(0, 256, (B, 8, 8, 3), np.uint8)}
    image = big["image"].astype(np.float32)

    def change(ops):
        return np.asarray(transform(ops, **PIXELS)(big, row_keys())["image"])

    grey = change("greyscale(0.5)")
    is_grey = np.ptp(grey, axis=-1).max((1, 2)) < 1e-3
    assert 20 < is_grey.sum() < 44
    np.testing.assert_allclose(grey[~is_grey], image[~is_grey], atol=1e-3)
    inverted = change("solarize(1.0, 100)")
    np.testing.assert_allclose(inverted, np.where(image >= 100, 255 - image, image), atol=1e-3)
    blurred = change("blur(1.0, 2.0, 2.0)")
    assert 0.01 < blurred.var() / image.var() < 0.2
    np.testing.assert_allclose(change("blur(1.0, 0.01, 0.01)"), image, atol=1e-3)
    jittered = change("color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)")
    kept = np.abs(jittered - image).max((1, 2, 3)) < 1e-3
    assert 4 < kept.sum() < 24 and jittered.min() >= -1e-3 and jittered.max() <= 255.001
    brighter = change("color_jitter(1.0, 0.4, 0, 0, 0)") / np.maximum(image, 1)
    factors = np.median(brighter[image.min(-1) > 0].reshape(-1, 3), axis=1)
    assert 0.6 <= factors.min() < 0.7 and 1.2 < factors.max() <= 1.4001


def test_three_augment_makes_a_third_grey_inverted_or_blurred():
    images = RNG.integers(0, 256, (1, 8, 8, 3), np.uint8).repeat(300, axis=0)
    batch = {"image": images, "label": np.zeros(300, np.int32), "mask": np.ones(300, np.float32)}
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(2), jnp.arange(300))
    changed = np.asarray(transform("three_augment", **PIXELS)(batch, keys)["image"])
    is_grey = np.ptp(changed, axis=-1).max((1, 2)) < 1e-3
    inverted = np.where(images >= 128, 255.0 - images, images)
    is_inverted = np.abs(changed - inverted).max((1, 2, 3)) < 1e-3
    others = changed[~is_grey & ~is_inverted]
    blurred = np.abs(others - images[: len(others)]).mean((1, 2, 3)) > 1e-3
    assert blurred.mean() > 0.8  # a blur of 0.1 pixels changes nothing
    np.testing.assert_allclose(others.mean((1, 2, 3)), images[0].mean(), rtol=0.05)
    for number in (is_grey.sum(), is_inverted.sum(), len(others)):
        assert 76 < number < 124


def test_each_view_has_its_own_ops_and_draws():
    ops = parse_view_ops("flip; greyscale(1.0)|flip", (4, 6), 3, "data.global_ops")
    views = Views(Crops("data.global_ops", (4, 6), (), 0), [device for _, device in ops])
    made = make_device_transform((), **PIXELS, num_classes=C, views={"global_views": views})
    images = np.repeat(BATCH["image"][:, None], 3, axis=1)
    batch = {key: leaf for key, leaf in BATCH.items() if key != "image"}
    found = jax.jit(made)(batch | {"global_views": images}, row_keys())["global_views"]
    assert found.shape == images.shape and found.dtype == jnp.float32
    colours = np.ptp(np.asarray(found), axis=-1).max((2, 3)) > 1
    assert colours[:, 0].all() and not colours[:, 1:].any()
    _, second, third = np.asarray(found).swapaxes(0, 1)
    assert 10 < (np.abs(second - third).max((1, 2, 3)) > 1).sum() < 54
