"""Pictures in their own shape: the rule of their grids, their pixels, and their batches."""

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from at_fault import at_fault

from vit_jax.base.pictures import Pictures
from vit_jax.config import Settings, base_config
from vit_jax.data import (
    host_batches,
    host_eval_batches,
    image_batch,
    make_source,
    order,
    to_value_range,
)
from vit_jax.data.device_ops import make_device_transform
from vit_jax.data.host_tf import tf
from vit_jax.data.native import PatchRule, mirror
from vit_jax.data.ops import parse_ops
from vit_jax.data.preprocessing import rule_of
from vit_jax.models.patches import extract_patches

RULE = PatchRule((4, 4), 6)


@pytest.mark.parametrize("most_rows", [160, pytest.param(10**6, marks=pytest.mark.slow)])
def test_the_grids_are_those_of_three_libraries(golden, most_rows):
    with np.load(golden / "naflex_grids.npz") as expected:
        rows = [*zip(expected["table"], expected["grid"], strict=True)]
    for (*sides, patch, most), grid in rows[:: 1 + len(rows) // most_rows]:
        found = PatchRule((int(patch),) * 2, int(most)).grid_of(tf.constant(sides))
        assert [*found.numpy()] == [*grid], (sides, patch, most)


def test_pixels_are_those_of_transformers(golden):
    """But for 9 % that Pillow 13, which resizes heights first where they shrink more, rounds up."""
    with np.load(golden / "naflex_images.npz") as expected:
        patch, most = (int(expected[key]) for key in ("patch_size", "max_num_patches"))
        for i in range(3):
            image, rule = tf.constant(expected[f"image_{i}"]), PatchRule((patch, patch), most)
            found = rule.cut(image, tf.zeros([2], tf.int64))
            assert [*found["grid"].numpy()] == [*expected["spatial_shapes"][i]]
            count = int(expected["pixel_attention_mask"][i].sum())
            pixels = (expected["pixel_values"][i] + 1) * 127.5
            ours = found["image"].numpy().reshape(most, -1)
            distance = abs(ours[:count] - pixels[:count])
            assert distance.max() < 1.01
            assert (distance > 0.5).mean() < 0.1
            assert not ours[count:].any()


@pytest.mark.parametrize("axis", [1, 2])
def test_a_mirrored_picture_is_the_picture_of_the_mirrored_image(axis):
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 12, 3), np.uint8)
    patches = np.asarray(extract_patches(images, (4, 4))).reshape(2, 6, 4, 4, 3)
    padded = np.pad(patches, ((0, 0), (0, 2), (0, 0), (0, 0), (0, 0)), constant_values=7)
    pictures = Pictures(jnp.asarray(padded), jnp.asarray([[2, 3], [2, 3]], jnp.int32))
    found = mirror(pictures, axis)
    expected = extract_patches(np.flip(images, axis), (4, 4))
    np.testing.assert_array_equal(found.patches[:, :6].reshape(2, 6, -1), expected)


def test_flips_of_pictures_draw_as_those_of_images():
    images = np.random.default_rng(0).integers(0, 255, (8, 8, 8, 3), np.uint8)
    keys, rest = jax.random.split(jax.random.key(0), 8), {"mask": jnp.ones(8)}
    flip = make_device_transform(parse_ops("flip", (8, 8))[1], (0.5,), (0.5,), num_classes=2)
    patches = extract_patches(images, (4, 4)).reshape(8, 4, 4, 4, 3)
    pictures = Pictures(patches, jnp.full((8, 2), 2, jnp.int32))
    found = flip({"image": pictures, **rest}, keys)["image"].patches
    flipped = flip({"image": jnp.asarray(images), **rest}, keys)["image"]
    assert (np.asarray(flipped) != to_value_range(images, (0.5,), (0.5,))).any()
    np.testing.assert_array_equal(found.reshape(8, 4, -1), extract_patches(flipped, (4, 4)))


@pytest.fixture
def pictures(tmp_path):
    """Five pictures: tall, wide, grey, one of a pixel, and a file that is broken."""
    folder = tmp_path / "all"
    sizes = {"a": (40, 10), "b": (9, 30), "c": (16, 16), "d": (1, 1)}
    for name, size in sizes.items():
        values = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
        image = PIL.Image.fromarray(values).convert("L" if name == "c" else "RGB")
        (folder / "train" / "x").mkdir(parents=True, exist_ok=True)
        image.save(folder / "train" / "x" / f"{name}.png")
    (folder / "train" / "x" / "e.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    return folder


def test_a_batch_of_files_keeps_shapes_and_masks_what_is_broken(pictures):
    source = make_source("folder", split="train", image_size=(8, 8), data_dir=pictures)
    spec = image_batch(3, (8, 8), parse_ops("decode", (8, 8))[0], rule=RULE)
    assert spec.arrays()["image"].patches.shape == (3, 6, 4, 4, 3)
    batches = [*host_eval_batches(source, spec, rows=np.arange(3))]
    grids = np.concatenate([batch["grid"] for batch in batches])
    assert grids.tolist() == [[4, 1], [1, 4], [2, 2], [2, 2], [1, 1], [1, 1]]
    masks = np.concatenate([batch["mask"] for batch in batches])
    assert masks.tolist() == [1, 1, 1, 1, 0, 0]
    tall = batches[0]["image"][0]
    assert tall[:4].any(axis=(1, 2, 3)).all()
    assert not tall[4:].any()


def test_a_row_of_training_depends_on_seed_and_position_only(pictures):
    source = make_source("folder", split="train", image_size=(8, 8), data_dir=pictures)
    spec = image_batch(4, (8, 8), parse_ops("decode", (8, 8))[0], rule=RULE)
    whole = [*host_batches(source, spec, steps=range(0, 3), seed=3, rows=np.arange(4))]
    part = [*host_batches(source, spec, steps=range(2, 3), seed=3, rows=np.arange(1, 3))]
    for key, rows in part[0].items():
        np.testing.assert_array_equal(rows, whole[2][key][1:3], key)


def test_a_packed_picture_has_the_patches_of_its_place(pictures):
    source = make_source("folder", split="train", image_size=(8, 8), data_dir=pictures)
    rule = RULE._replace(pack=(1, 2, 6))
    spec = image_batch(6, (8, 8), parse_ops("decode", (8, 8))[0], rule=rule)
    whole = [*host_batches(source, spec, steps=range(0, 5), seed=3, rows=np.arange(6))]
    part = [*host_batches(source, spec, steps=range(2, 3), seed=3, rows=np.arange(3, 6))]
    for key, rows in part[0].items():
        np.testing.assert_array_equal(rows, whole[2][key][3:], key)
    grids, ids, mask = (np.concatenate([b[key] for b in whole]) for key in ("grid", "id", "mask"))
    times = np.bincount(ids)  # each picture once in each epoch
    assert len(times) == source.num_examples
    assert times.max() - times.min() <= 1
    sides = {0: (40, 10), 1: (9, 30), 2: (16, 16), 3: (1, 1)}
    for i, (grid, record) in enumerate(zip(grids, ids, strict=True)):
        most = rule.pack[i % 3]
        expected = rule.grid_of(tf.constant(sides[record]), most) if mask[i] else (1, 1)
        assert [*grid] == [*np.asarray(expected)]
    assert all(len({*np.flatnonzero(ids == record) % 3}) > 1 for record in {*ids})


def test_rows_are_turned_by_seed_and_row():
    positions = tf.range(4 * 10**6, 4 * 10**6 + 400, dtype=tf.int64)
    turned = order.turn_rows(positions, 4, seed=5)
    assert (tf.sort(turned) == positions).numpy().all()
    assert (turned // 4 == positions // 4).numpy().all()
    np.testing.assert_array_equal(order.place_in_row(turned, 4, tf.constant(5)), positions % 4)
    counts = np.bincount((turned % 4).numpy()[::4], minlength=4)  # of the first places
    assert counts.min() > 10
    assert (turned != order.turn_rows(positions, 4, seed=6)).numpy().any()


def test_images_in_memory_become_pictures_too():
    source = make_source("digits", split="test", image_size=(8, 8))
    spec = image_batch(8, (8, 8), rule=RULE)
    batch = next(host_eval_batches(source, spec, rows=np.arange(8)))
    assert batch["image"].shape == (8, 6, 4, 4, 3)
    assert batch["grid"].tolist() == [[2, 2]] * 8
    plain = next(host_eval_batches(source, image_batch(8, (8, 8)), rows=np.arange(8)))
    expected = extract_patches(plain["image"], (4, 4)).reshape(8, 4, 4, 4, 3)
    np.testing.assert_array_equal(batch["image"][:, :4], expected)


def test_without_a_run_there_is_no_rule():
    config = base_config()
    assert rule_of(Settings.of(config).data) is None
    config.data.max_tokens = 16
    with at_fault("data.max_tokens"):
        rule_of(Settings.of(config).data)
