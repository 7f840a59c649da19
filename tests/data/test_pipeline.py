"""Batches: the same bytes on any number of hosts, from any step; masks; coverage; arrays."""

import dataclasses
import itertools
import logging
import time

import jax
import numpy as np
import pytest
from at_fault import at_fault, refused_with
from images import encode, make_folder, smooth_image
from read_settings import settings_of

from vit_jax.config import base_config
from vit_jax.data import (
    BatchSpec,
    eval_batches,
    image_batch,
    loading,
    make_source,
    parse_ops,
    pipeline,
    read_labels,
    train_batches,
)
from vit_jax.data.batch import Crops
from vit_jax.data.device_ops import make_device_transform
from vit_jax.data.host_tf import tf
from vit_jax.data.preprocessing import Views, parse_view_ops, parse_views

DIGITS = {"image_size": (8, 8), "ops": "pad_crop(2)"}
FOLDER = {"image_size": (16, 16), "ops": "inception_crop|flip"}


@pytest.fixture(scope="module")
def digits():
    return make_source("digits", split="train", image_size=(8, 8))


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A folder of 27 training images, one of them broken."""
    root = make_folder(tmp_path_factory.mktemp("pets"), {"cat": 10, "dog": 10, "eel": 10})
    source = make_source("folder", split="train", data_dir=root, image_size=(16, 16))
    broken = root / source.record_name(4)
    broken.write_bytes(broken.read_bytes()[:300])
    return source


def train(
    source, *, image_size, ops, start_step=0, num_steps=3, rows=range(16), seed=0, views=None
):
    crops = {name: kind.crops for name, kind in (views or {}).items()}
    if ops or not views:
        crops |= image_batch(16, image_size, parse_ops(ops, image_size)[0]).crops
    steps = range(start_step, start_step + num_steps)
    spec = BatchSpec(16, crops)
    return list(pipeline.host_batches(source, spec, steps=steps, seed=seed, rows=np.array(rows)))


def views_of(num_global, num_local, ops):
    """Global views of 8 x 8 pixels and local ones of 4 x 4, by `ops` and then a random crop."""
    kinds = {
        "global_views": ("data.global_ops", 8, 0, f"{ops}|random_crop", num_global),
        "local_views": ("data.local_ops", 4, 512, f"{ops}|random_crop", num_local),
    }
    made = {}
    for name, (key, side, first, text, n) in kinds.items():
        host_ops, device_ops = zip(*parse_view_ops(text, (side, side), n, key), strict=True)
        made[name] = Views(Crops(key, (side, side), host_ops, first), device_ops)
    return made


def evaluate(source, *, image_size, ops, rows, global_batch_size, key="evals.*.ops", **how):
    host_ops, _ = parse_ops(ops, image_size)
    spec = image_batch(global_batch_size, image_size, host_ops, key)
    return list(pipeline.host_eval_batches(source, spec, rows=np.array(rows), **how))


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            assert batch[key].dtype == other[key].dtype
            np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


DIGITS_TOO = ["pets", pytest.param("digits", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=DIGITS_TOO)
def alone(request):
    """(source, arguments, the batches of three steps on one host)."""
    source, how = request.getfixturevalue(request.param), {"digits": DIGITS, "pets": FOLDER}
    return source, how[request.param], train(source, **how[request.param])


def test_a_host_makes_its_rows_of_the_batch_of_one(alone):
    source, how, batches = alone
    rows = [2, 3, 8, 9, 10, 15]
    found = train(source, **how, rows=rows)
    assert_same(found, [{key: leaf[rows] for key, leaf in batch.items()} for batch in batches])


def test_starting_at_a_step_equals_skipping(alone):
    source, how, batches = alone
    assert_same(train(source, **how, start_step=1, num_steps=2), batches[1:])


@pytest.mark.parametrize("name", DIGITS_TOO)
def test_a_view_depends_on_its_position_and_number_only(request, name):
    ops = {"digits": "resize(12)", "pets": "decode|resize(12)"}[name]
    source, rows = request.getfixturevalue(name), [2, 3, 15]
    how = {"image_size": (8, 8), "ops": "", "views": views_of(2, 3, ops)}
    batches = train(source, **how, num_steps=2)
    for batch in batches:
        assert batch.keys() == {"global_views", "local_views", "label", "mask", "id"}
        assert batch["global_views"].shape == (16, 2, 8, 8, 3)
        assert batch["local_views"].shape == (16, 3, 4, 4, 3)
        seen = batch["mask"] > 0
        assert batch["global_views"].any((1, 2, 3, 4)).tolist() == seen.tolist()
        first, second = batch["global_views"][seen].swapaxes(0, 1)
        assert not np.array_equal(first, second)
    resumed = train(source, **how, num_steps=1, start_step=1, rows=rows)
    assert_same(resumed, [{key: leaf[rows] for key, leaf in batches[1].items()}])
    (fewer,) = train(source, **how | {"views": views_of(1, 2, ops)}, num_steps=1)
    np.testing.assert_array_equal(fewer["global_views"], batches[0]["global_views"][:, :1])
    np.testing.assert_array_equal(fewer["local_views"], batches[0]["local_views"][:, :2])


def views_in(config):
    settings = settings_of(config)
    return parse_views(settings.data, settings.objective.further_views)


def test_crops_of_the_gram_teacher_are_those_of_the_global_views(digits):
    """The same windows, flipped alike, before the colours change."""
    c = base_config()
    c.objective.name, c.objective.gram_weight = "self_distillation", 1.0
    c.objective.gram_every = "1 epochs"
    c.data.image_size, c.data.num_global, c.objective.gram_size = 8, 2, 16
    c.data.global_ops = "inception_crop(area_min=0.4)|flip|greyscale(0.0)"
    views = views_in(c)
    assert [[op.name for op in ops] for ops in views["gram_views"].device_ops] == [["flip"]] * 2
    (batch,) = train(digits, image_size=(8, 8), ops="", views=views, num_steps=1)
    assert batch["gram_views"].shape == (16, 2, 16, 16, 3)
    pixels = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(16))
    made = make_device_transform((), **pixels, num_classes=10, views=views)(batch, keys)
    large, small = (np.asarray(made[name]) for name in ("gram_views", "global_views"))
    pooled, original = large.reshape(32, 8, 2, 8, 2, 3).mean((2, 4)), small.reshape(32, 8, 8, 3)

    def alike(x, y):
        pairs = zip(x, y, strict=True)
        return np.array([np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in pairs])

    assert alike(pooled, original).min() > 0.9
    assert alike(pooled[:, :, ::-1], original).min() < 0.7
    c.data.global_ops = "inception_crop(area_min=0.4)|greyscale(0.5)|flip"
    with at_fault("data.global_ops"):
        views_in(c)


def test_views_of_another_size_are_refused_before_the_first_batch(digits):
    views = views_of(1, 1, "resize(12)")
    local = views["local_views"]
    views["local_views"] = local._replace(crops=local.crops._replace(size=(5, 5)))
    with at_fault("data.local_ops"):
        train(digits, image_size=(8, 8), ops="", views=views)


def test_seed_and_position_change_what_is_seen(digits):
    first, second = train(digits, **DIGITS, num_steps=2)
    (other,) = train(digits, **DIGITS, num_steps=1, seed=1)
    assert not np.array_equal(first["id"], second["id"])
    assert not np.array_equal(first["id"], other["id"])


def test_an_example_is_augmented_anew_in_every_epoch(digits):
    batches = train(digits, **DIGITS, num_steps=270)  # three epochs
    images = {}
    for batch in batches:
        for record, image in zip(batch["id"], batch["image"], strict=True):
            images.setdefault(record, set()).add(image.tobytes())
    assert np.mean([len(seen) for seen in images.values()]) > 2


def test_the_billionth_step_starts_at_once(digits):
    start = time.perf_counter()
    (batch,) = train(digits, **DIGITS, start_step=10**9, num_steps=1)
    assert time.perf_counter() - start < 5
    position = 10**9 * 16
    assert position % digits.num_examples != 0 and len(set(batch["id"])) == 16


def test_evaluation_covers_every_digit_once_on_4_hosts():
    test = make_source("digits", split="test", image_size=(8, 8))
    hosts = [
        evaluate(test, image_size=(16, 16), ops="resize", rows=rows, global_batch_size=64)
        for rows in np.split(np.arange(64), 4)  # in the last batch one is all padding
    ]
    assert {len(batches) for batches in hosts} == {6}
    batches = list(itertools.chain(*hosts))
    ids, masks = (np.concatenate([batch[key] for batch in batches]) for key in ("id", "mask"))
    np.testing.assert_array_equal(np.sort(ids[masks == 1]), np.arange(360))
    np.testing.assert_array_equal(ids[masks == 0], [-1] * 24)
    for batch in batches:
        assert not batch["image"][batch["mask"] == 0].any()


def test_a_broken_file_is_masked_and_named_once(pets, caplog):
    loading._named.clear()
    with caplog.at_level(logging.WARNING, "vit_jax"):
        for _ in range(2):
            how = {"image_size": (16, 16), "ops": "decode|resize(antialias=True)"}
            first, last = evaluate(pets, **how, rows=range(16), global_batch_size=16)
    (record,) = caplog.records
    for word in (pets.record_name(4), "not a readable image", "; left out"):
        assert word in record.getMessage()
    np.testing.assert_array_equal(first["id"], np.arange(16))
    np.testing.assert_array_equal(first["mask"], np.arange(16) != 4)
    np.testing.assert_array_equal(last["mask"], np.arange(16) < 11)
    assert not first["image"][4].any() and first["image"][5].any()
    np.testing.assert_array_equal(first["label"][5:9], 0)
    np.testing.assert_array_equal(last["id"][11:], -1)


def test_an_image_smaller_than_a_crop_is_masked_and_named_with_its_size(tmp_path, caplog):
    root = make_folder(tmp_path, {"cat": 10, "dog": 10})
    source = make_source("folder", split="val", data_dir=root, image_size=(16, 16))
    small = source.record_name(1)
    (root / small).write_bytes(encode(smooth_image(12, 60)))
    how = {"image_size": (16, 16), "rows": range(2), "global_batch_size": 2}
    loading._named.clear()
    (batch,) = evaluate(source, ops="decode|central_crop", **how)
    np.testing.assert_array_equal(batch["mask"], [1, 0])
    (record,) = caplog.records
    for word in (small, "12 x 60 pixels", "'central_crop'", "takes 16 x 16"):
        assert word in record.getMessage()
    strict = {"key": "ops", "refuse_small": True}
    for ops in ("decode|central_crop", "decode|random_crop"):  # warned of before or not
        with at_fault("ops"):
            evaluate(source, ops=ops, **how, **strict)
    (batch,) = evaluate(source, ops="decode|central_crop(pad=True)", **how, **strict)
    np.testing.assert_array_equal(batch["mask"], [1, 1])
    assert not batch["image"][1, :2].any() and batch["image"][1, 2:14].all(-1).any()


def test_a_host_reads_its_own_records_only(pets):
    reads = []

    def read(record_id):
        seen = tf.py_function(lambda i: reads.append(int(i)), [record_id], [])
        with tf.control_dependencies([seen]):
            return pets.read(tf.identity(record_id))

    counting = dataclasses.replace(pets, read=read)
    batches = train(counting, **FOLDER, rows=range(4, 8), num_steps=2)
    assert sorted(reads) == sorted(np.concatenate([batch["id"] for batch in batches]))

    reads.clear()
    evaluate(counting, **FOLDER, rows=range(8, 16), global_batch_size=16)
    assert sorted(reads) == [*range(8, 16), *range(24, 27)]  # padding is not read


def test_of_a_folder_no_image_is_read_for_its_label(tmp_path):
    root = make_folder(tmp_path, {"cat": 10, "dog": 10})
    source = make_source("folder", split="train", data_dir=root, image_size=(8, 8))
    expected = ["dog" in source.record_name(i) for i in range(source.num_examples)]
    for file in root.rglob("*.jpg"):
        file.unlink()
    labels = read_labels(source, 0, source.num_examples)
    np.testing.assert_array_equal(labels, expected)


def test_chosen_records_are_handed_to_the_graph_and_no_part_of_it(digits, monkeypatch):
    """There they would be copied, and folded, with it."""
    arranged = []
    monkeypatch.setattr(pipeline, "local_batches", lambda *args: arranged.append(args[3]))
    spec, record_ids = image_batch(4, (8, 8)), np.arange(1000)[::-1]
    pipeline.host_eval_batches(digits, spec, rows=np.arange(4), record_ids=record_ids)
    (arrange,) = arranged
    traced = tf.function(arrange).get_concrete_function(tf.TensorSpec([], tf.int64))
    assert max(node.ByteSize() for node in traced.graph.as_graph_def().node) < 1000
    ids, _ = traced(tf.constant(2, tf.int64))
    np.testing.assert_array_equal(ids, [991, 990, 989, 988])


@pytest.mark.parametrize(
    ("ops", "image_size", "words"),
    [
        ("", (8, 9), ["evals.*.ops=''", "(8, 8, 3)", "(8, 9, 3)"]),
        ("central_crop", (8, 9), ["takes 8 x 9 pixels, but the data give images of 8 x 8"]),
        ("resize(16)", (8, 8), ["evals.*.ops='resize(16)'", "(16, 16, 3)"]),
    ],
)
def test_pixels_of_another_size_are_refused_before_the_first_batch(digits, ops, image_size, words):
    refused(digits, ops, image_size, words)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ("", ["begins with no host op", "put 'decode'"]),
        ("resize|flip", ["evals.*.ops begins with 'resize'", "'folder' are encoded"]),
        ("decode", ["(None, None, 3)", "'resize'"]),
        ("decode|resize_small(16)", ["evals.*.ops='decode|resize_small(16)'"]),
        ("inception_crop(8)", ["(8, 8, 3)"]),
    ],
)
def test_files_that_end_in_another_size_are_refused_before_the_first_batch(pets, ops, words):
    refused(pets, ops, (16, 16), words)


def test_training_names_its_own_key(digits):
    with at_fault("data.ops"):
        train(digits, image_size=(8, 8), ops="resize(16)")


def refused(source, ops, image_size, words):
    with refused_with(*words):
        spec = image_batch(16, image_size, parse_ops(ops, image_size)[0], "evals.*.ops")
        pipeline.host_eval_batches(source, spec, rows=np.arange(16))


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_global_arrays(digits, shape):
    mesh = jax.make_mesh(shape, ("data", "tensor"))
    spec, sharding = image_batch(16, (8, 8)), jax.sharding.NamedSharding(mesh, jax.P("data"))
    batches = train_batches(digits, spec, steps=range(2, 7), seed=0, sharding=sharding)
    batches = list(batches)
    assert_same(
        jax.device_get(batches), train(digits, image_size=(8, 8), ops="", start_step=2, num_steps=5)
    )
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(batches))
    test = make_source("digits", split="test", image_size=(8, 8))
    batches = eval_batches(test, spec, sharding=sharding)
    assert sum(float(batch["mask"].sum()) for batch in batches) == 360
