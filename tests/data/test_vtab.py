"""VTAB-1k: the table of its tasks, the rules of its labels, and every task on stand-in data."""

import logging
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from asked import evaluate_model
from stand_in_vtab import SPLITS, TEST_EXAMPLES, split_infos, write_stand_ins

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.config.text import load_config
from vit_jax.data import image_batch, make_source, parse_ops, read_labels
from vit_jax.data.dataset_sizes import known_sizes
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.pipeline import host_eval_batches
from vit_jax.data.sources.vtab import (
    GROUPS,
    TASKS,
    count_label,
    depth_label,
    find_missing,
    orientation_label,
    position_label,
    vehicle_label,
)
from vit_jax.transfer import read_pretrained

# The table once more: group, TFDS, the 200, test, its size, classes.
TABLE = pathlib.Path(__file__).with_name("vtab.txt").read_text()


def test_table():
    rows = [line.split() for line in TABLE.splitlines()]
    assert [row[0] for row in rows] == list(TASKS) and len(rows) == 19
    for name, *row in rows:
        t = TASKS[name]
        found = t.group, t.tfds_name, t.val200, t.test, str(t.test_size), str(t.num_classes)
        assert list(found) == row
        assert t.splits["train800val200"] == f"train[:800]+{t.val200}"
    assert [sum(t.group == group for t in TASKS.values()) for group in GROUPS] == [7, 4, 8]


@pytest.mark.parametrize("name", TASKS)
def test_sizes_in_the_catalogue(name):
    """800, 200, 1,000 and the test's, and no image is in two of them."""
    task = TASKS[name]
    infos = split_infos(SPLITS[task.tfds_name][1])
    seen = {}
    for split, text in task.splits.items():
        parts = tfds.core.ReadInstruction.from_spec(text).to_absolute(infos)
        seen[split] = set()
        for part in parts:
            stop = infos[part.splitname].num_examples if part.to is None else part.to
            seen[split] |= {(part.splitname, i) for i in range(part.from_ or 0, stop)}
        assert len(seen[split]) == task.sizes[split] == known_sizes(f"vtab/{name}", split)[1]
    assert seen["train800val200"] == seen["train800"] | seen["val200"]
    assert not seen["test"] & seen["train800val200"]


def objects(**columns):
    return {"objects": {key: tf.constant(values) for key, values in columns.items()}}


def test_label_of_clevr_count():
    for count in range(3, 11):
        coords = np.zeros((count, 3), np.float32)
        assert count_label(objects(pixel_coords=coords)) == count - 3


@pytest.mark.parametrize(
    ("nearest", "label"),
    [(0.1, 0), (8.0, 0), (8.01, 1), (8.5, 1), (8.9, 2), (9.1, 3), (9.9, 4), (10.0, 4), (10.1, 5)],
)
def test_label_of_clevr_distance(nearest, label):
    coords = np.float32([[0, 0, 99], [50, 1, nearest], [0, 0, 12]])
    assert depth_label(objects(pixel_coords=coords)) == label


@pytest.mark.parametrize(
    ("types", "distances", "label"),
    [
        ([0, 1], [30.0, 7.0], 0), ([2], [8.0], 0), ([2], [8.5], 1), ([0, 0], [25.0, 20.0], 1),
        ([1], [20.5], 2), ([3, 7], [5.0, 6.0], 3), ([3, 0], [5.0, 30.0], 2), ([], [], 3),
    ],
)  # fmt: skip
def test_label_of_kitti(types, distances, label):
    """Cars, vans and trucks count; people, cyclists and trams do not."""
    location = np.float32([[1, 2, z] for z in distances]).reshape(-1, 3)
    assert vehicle_label(objects(type=np.int64(types), location=location)) == label


def test_labels_of_dsprites():
    positions = [int(position_label({"label_x_position": tf.constant(i)})) for i in range(32)]
    assert positions == [i // 2 for i in range(32)]
    turns = [int(orientation_label({"label_orientation": tf.constant(i)})) for i in range(40)]
    assert turns == [math.floor(i / 2.5) for i in range(40)] and max(turns) == 15


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """The folder to which `write_stand_in` writes."""
    return tmp_path_factory.mktemp("vtab")


def write_stand_in(name, root):
    """Write the data set of a task unless it is there."""
    if not (root / TASKS[name].tfds_name).exists():
        write_stand_ins(root, [TASKS[name].tfds_name])


def open_task(name, root, split, reader="offsets"):
    where = {"data_dir": str(root), "image_size": (1, 1), "reader": reader}
    return make_source(f"vtab/{name}", split=split, **where)


# One of each kind, dsprites in test_pixels_of_dsprites; the others take three times as long.
KINDS = ("clevr_count", "smallnorb_azimuth")


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in TASKS],
)
def test_every_task_is_read(name, stand_ins):
    """Sizes, images and labels, of which there is every one."""
    task = TASKS[name]
    write_stand_in(name, stand_ins)
    train = open_task(name, stand_ins, "train800val200", reader="memory")
    test = open_task(name, stand_ins, "test")
    assert (train.name, train.split, train.num_examples) == (f"vtab/{name}", "train800val200", 1000)
    assert test.num_examples == (200 if "smallnorb" in name else TEST_EXAMPLES)
    assert train.num_classes == test.num_classes == task.num_classes
    host_ops, _ = parse_ops("decode|resize(16)", (16, 16))
    spec = image_batch(1000, (16, 16), host_ops)
    (batch,) = host_eval_batches(train, spec, rows=np.arange(1000))
    assert batch["mask"].all() and batch["image"].max() > 127
    assert set(batch["label"]) == set(range(task.num_classes))


@pytest.mark.slow
def test_the_training_images_are_the_800_and_the_200(stand_ins):
    write_stand_in("svhn", stand_ins)
    write_stand_in("clevr_count", stand_ins)
    sources = {split: open_task("svhn", stand_ins, split) for split in TASKS["svhn"].splits}
    labels = {split: read_labels(source, 0, source.num_examples)
              for split, source in sources.items()}  # fmt: skip
    both = np.concatenate([labels["train800"], labels["val200"]])
    np.testing.assert_array_equal(labels["train800val200"], both)
    np.testing.assert_array_equal(labels["val200"], np.arange(65931, 66131) % 10)
    others = [
        open_task("clevr_count", stand_ins, "test"),
        open_task("clevr_distance", stand_ins, "test"),
    ]
    assert len({source.fingerprint for source in [*sources.values(), *others]}) == 6


def test_pixels_of_dsprites(stand_ins):
    """Stored as 0 and 1 in one channel: black and white in three."""
    write_stand_in("dsprites_location", stand_ins)
    source = make_source("vtab/dsprites_location", split="val200", data_dir=str(stand_ins),
                         image_size=(1, 1), reader="offsets")  # fmt: skip
    assert source.image_shape == (64, 64, 3)
    (batch,) = host_eval_batches(source, image_batch(200, (64, 64)), rows=np.arange(200))
    assert set(np.unique(batch["image"])) == {0, 255}
    shown = batch["image"].all(axis=(1, 3)).argmax(axis=1)  # the first column that is all white
    np.testing.assert_array_equal(batch["label"], shown // 4)


def test_absent_classes_and_short_tests_are_named(tmp_path, caplog):
    """Of the first 800 every seventh class alone is there."""
    write_stand_ins(tmp_path, ["dtd"], make_label=lambda i, count: i * 7 % count // 7 * 7)
    open_task("dtd", tmp_path, "train800")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("vtab/dtd train800: 40 of 47 classes", "kind 1, kind 2, kind 3, kind 4, kind 5"):
        assert words in record.getMessage()
    caplog.clear()
    open_task("dtd", tmp_path, "test")
    assert all(word in caplog.text for word in ("40", "1880", "comparable"))


def refusal(name, root, split="train800"):
    with pytest.raises(InputError) as e:
        open_task(name, root, split)
    return str(e.value)


def test_what_is_missing_is_named_with_the_way_to_get_it(stand_ins, tmp_path):
    message = refusal("retinopathy", tmp_path)
    assert "data.name='vtab/retinopathy': " in message and "btgraham-300" in message
    assert "download_and_prepare()" in message and "downloads/manual. TFDS says: " in message
    write_stand_in("svhn", stand_ins)
    assert find_missing(["svhn"], str(stand_ins)) == {}
    missing = find_missing(["pets", "dtd"], str(tmp_path))
    assert list(missing) == ["pets", "dtd"] and "oxford_iiit_pet" in missing["pets"]


def test_unknown_names_and_other_sets_are_refused(stand_ins, tmp_path):
    assert "did you mean clevr_count?" in refusal("clever_count", tmp_path)
    assert "data.split='train' of vtab/dtd: did you mean train800?" in refusal(
        "dtd", tmp_path, "train"
    )
    for name, other in (("cifar100", "dtd"), ("clevr_count", "dsprites")):
        write_stand_in(name, stand_ins)
        shutil.copytree(stand_ins / TASKS[name].tfds_name, tmp_path / other)
    message = refusal("dtd", tmp_path)
    assert "'dtd'" in message or "'classes': 47" in message
    assert "needed: 'image', an Image, and 'label_x_position'" in refusal(
        "dsprites_location", tmp_path
    )


@pytest.mark.slow
def test_a_model_on_all_tasks(stand_ins, tmp_path):
    """A random model's features through the probe, from its file to the accuracies."""
    model = vit_jax.create_model("ViT-mu/4", 3, 16, num_heads=2, mlp_dim=32)
    variables = model.init(jax.random.key(0), np.zeros((1, 16, 16, 3), np.float32))
    vit_jax.save_pretrained(tmp_path / "random.npz", model, variables, format="npz")
    pretrained, top1 = read_pretrained(tmp_path / "random.npz"), {}
    for name, task in TASKS.items():
        config = load_config(f"configs/evaluate.py:probe,vtab/{name}")
        write_stand_in(name, stand_ins)
        config.data.data_dir, config.evals.probe.l2 = str(stand_ins), (1e-3,)
        top1[name] = evaluate_model(config, pretrained)["probe/top1"]
        assert top1[name] > 2 / task.num_classes or task.num_classes == 2
    assert np.mean(list(top1.values())) > 0.5
