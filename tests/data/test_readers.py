"""Readers: the same batches from memory, by offset and from array_record; corrupt records."""

import logging
import shutil

import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from images import encode, pil_rgb, smooth_image
from prepared import break_image, flip_a_byte, labelled_images, prepare

from vit_jax.data import (
    Request,
    concatenate,
    image_batch,
    keep_classes,
    loading,
    make_order,
    make_source,
    parse_ops,
    pipeline,
    read_labels,
    records,
)
from vit_jax.data.host_tf import tf
from vit_jax.data.records import RecordFiles, stored_records, stretch_starts
from vit_jax.data.sources.tfds import View, open_prepared

ORDERS = {"record": {}, "chunk": {"chunk_size": 97, "streams": 4}}


def batches(source, order_name, ops, *, size, batch=64, seed=0, start=0, steps=2, rows=None):
    data_order = make_order(
        order_name, source.part_sizes, seed, global_batch_size=batch, **ORDERS[order_name]
    )
    return list(
        pipeline.host_batches(
            source,
            image_batch(batch, size, parse_ops(ops, size)[0]),
            steps=range(start, start + steps),
            seed=seed,
            rows=np.arange(batch) if rows is None else rows,
            data_order=data_order,
        )
    )


def assert_same(some, others):
    for batch, other in zip(some, others, strict=True):
        for key in ("image", "label", "mask", "id"):
            assert batch[key].dtype == other[key].dtype
            np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


@pytest.fixture(scope="module")
def cifar10(shared_data):
    """300 images on both sides of the end of a file."""
    folders = {"memory": "", "offsets": "", "array_record": "array_record"}
    return {
        reader: make_source(
            "cifar10",
            split="test[4900:5200]",
            data_dir=str(shared_data / folder),
            image_size=(32, 32),
            reader=reader,
        )
        for reader, folder in folders.items()
    }


@pytest.mark.parametrize(
    ("order_name", "ops"),
    [pytest.param("record", "", marks=pytest.mark.slow), ("chunk", "decode|pad_crop(2)")],
)
def test_every_reader_gives_the_same_batches(cifar10, order_name, ops):
    assert [source.encoded for source in cifar10.values()] == [False, True, True]
    assert len({source.fingerprint for source in cifar10.values()}) == 1
    how = {"size": (32, 32), "start": 3, "steps": 3}  # over the end of an epoch
    expected = batches(cifar10["memory"], order_name, ops, **how)
    assert all(batch["mask"].all() for batch in expected)
    for reader in ("offsets", "array_record"):
        assert_same(batches(cifar10[reader], order_name, ops, **how), expected)


@pytest.fixture(scope="module")
def sample(shared_data):
    return make_source(
        "imagenet_sample",
        split="train",
        data_dir=str(shared_data),
        image_size=(32, 32),
        reader="offsets",
    )


def test_evaluation_by_offset_covers_the_split_in_its_order(cifar10):
    spec = image_batch(64, (32, 32))
    found = list(pipeline.host_eval_batches(cifar10["offsets"], spec, rows=np.arange(64)))
    ids, mask = (np.concatenate([batch[key] for batch in found]) for key in ("id", "mask"))
    np.testing.assert_array_equal(ids, [*range(300), *[-1] * 20])
    np.testing.assert_array_equal(mask, ids >= 0)


# Stretches


def test_stretches_are_neighbours_in_one_segment():
    ids = [3, 4, 5, 6, 7, 9, 9, 10, 2, 1, 19, 20, 21, -1, -1, 0, *range(40, 80)]
    starts = stretch_starts(tf.constant(ids, tf.int64), tf.constant([0, 5, 20], tf.int64)).numpy()
    found = [tuple(stretch) for stretch in np.split(ids, starts[1:])]
    assert found == [
        (3, 4), (5, 6, 7), (9, 9, 10), (2,), (1,), (19,), (20, 21), (-1, -1), (0,),
        tuple(range(40, 56)), tuple(range(56, 72)), tuple(range(72, 80)),
    ]  # fmt: skip


@pytest.mark.parametrize("fails", ["raises", "ends"])
def test_a_stretch_is_opened_once_and_a_record_that_fails_takes_no_other_with_it(fails):
    opened = []

    def note(first, count):
        opened.append((int(first), int(count)))
        records = [b"%d" % i for i in range(first, first + count)]
        if any(i in (6, 8) for i in range(first, first + count)):
            if fails == "raises":
                raise ValueError("damaged")
            records = records[: max(0, 6 - first)] if first <= 6 else records[: max(0, 8 - first)]
        return np.array(records, object)

    def open_stretch(first, count):
        at_once = tf.data.Dataset.from_tensors((first, count)).map(
            lambda f, c: tf.ensure_shape(tf.numpy_function(note, [f, c], tf.string), [None])
        )
        return at_once.unbatch()

    files = RecordFiles(np.array([0, 20]), open_stretch, lambda stored, i: {})
    ids = tf.data.Dataset.from_tensor_slices(
        tf.constant([[0, 1, 2, 3, -1], [5, 6, 7, 8, 9], [18, 19, 20, 20, 21]], tf.int64)
    )
    found = [stored.decode() for stored in stored_records(files, ids).as_numpy_iterator()]
    assert found == "0 1 2 3 _ 5 _ 7 _ 9 18 19 20 20 21".replace("_", "").split(" ")
    assert {(0, 4), (5, 5), (18, 2), (20, 2)} <= set(opened)
    apart = {(i, 1) for i in range(5, 10)}
    assert set(opened) - {(0, 0)} == {(0, 4), (5, 5), (18, 2), (20, 2)} | apart


# Corrupt records


@pytest.fixture(
    scope="module", params=[pytest.param("one size", marks=pytest.mark.slow), "any size"]
)
def corrupt(request, tmp_path_factory):
    """30 images in 3 files: 12 has a wrong checksum, 17 half a JPEG, 3 is a PNG, 4 is grey."""
    root = tmp_path_factory.mktemp("corrupt")
    shape = (60, 90, 3) if request.param == "one size" else (None, None, 3)
    (root / "3.png").write_bytes(encode(smooth_image(seed=3), "PNG"))
    (root / "4.jpg").write_bytes(encode(smooth_image(seed=4), mode="L"))
    images = {i: smooth_image(seed=i) for i in range(30)}
    images |= {3: str(root / "3.png"), 4: str(root / "4.jpg")}
    features = labelled_images(30, shape=shape, encoding_format="jpeg")
    examples = [{"image": images[i], "label": i} for i in range(30)]
    prepare(root, "pets", features, examples, examples_per_shard=10)
    shards = sorted((root / "pets/1.0.0").glob("*.tfrecord*"))
    assert len(shards) == 3
    break_image(shards[1], 7)
    flip_a_byte(shards[1], 2)
    return root


def pets(root, reader, split="train"):
    return make_source("pets", split=split, data_dir=str(root), image_size=(60, 90), reader=reader)


@pytest.mark.parametrize("order_name", [pytest.param("record", marks=pytest.mark.slow), "chunk"])
def test_a_corrupt_record_masks_itself_alone(corrupt, caplog, monkeypatch, order_name):
    how = {"size": (60, 90), "batch": 10, "steps": 6}
    monkeypatch.setitem(ORDERS["chunk"], "streams", 1)  # 30 records are one chunk: long stretches
    found_by = {}
    for reader in ("memory", "offsets"):
        with caplog.at_level(logging.WARNING, "vit_jax"):
            loading._named.clear()
            caplog.clear()
            found = batches(pets(corrupt, reader), order_name, "decode|resize", **how)
        found_by[reader] = found
        ids, labels, mask = (
            np.concatenate([batch[key] for batch in found]) for key in ("id", "label", "mask")
        )
        assert sorted(ids[mask == 0]) == [12, 12, 17, 17]
        np.testing.assert_array_equal(labels, ids * mask.astype(int))
        names = sorted(record.getMessage() for record in caplog.records)
        assert len(names) == 2
        for name, in_file, record in zip(names, (2, 7), (12, 17), strict=True):
            assert name.startswith("pets-train.tfrecord-00001")
            assert f" record {in_file} (record {record} of pets/1.0.0 train): not a read" in name
    assert_same(*found_by.values())


BROKEN = {2: "half a JPEG", 5: "no image", 9: "another size"}  # of 12 records


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """{reader: data_dir} of a set of three classes whose labels can all be read."""
    root = tmp_path_factory.mktemp("broken")
    contents = {2: encode(smooth_image())[:300], 5: b"text", 9: encode(smooth_image(20, 20), "PNG")}
    for record, content in contents.items():
        (root / f"{record}").write_bytes(content)
    features = labelled_images(3, shape=(16, 16, 3), encoding_format="png")
    examples = [
        {"image": str(root / f"{i}") if i in BROKEN else smooth_image(16, 16, i), "label": i % 3}
        for i in range(12)
    ]
    for file_format in ("tfrecord", "array_record"):
        prepare(root / file_format, "few", features, examples, file_format=file_format)
    offsets, array_record = (str(root / name) for name in ("tfrecord", "array_record"))
    return {"memory": offsets, "offsets": offsets, "array_record": array_record}


def said_of(source):
    """All that says which records there are: their names, but for the file's, and labels."""
    numbers = [source.record_name(i).partition("(")[2] for i in range(source.num_examples)]
    return numbers, list(read_labels(source, 0, source.num_examples)), source.fingerprint


def test_every_reader_gives_the_same_records_whatever_is_broken(broken):
    def found(reader):
        how = Request("few", "train", (16, 16), broken[reader], reader=reader)
        whole, scaled = (open_prepared(how, View(image_scale=s)) for s in (1, 2))
        made_of_it = keep_classes(whole, (2, 0)), concatenate([whole, whole])
        if reader == "array_record":  # the others show that these follow from the whole
            made_of_it = ()
        return scaled.fingerprint, *(said_of(source) for source in (whole, *made_of_it))

    expected = found("offsets")
    assert expected[1][1] == [i % 3 for i in range(12)] and expected[2][1] == [1, 0] * 4
    assert found("memory") == expected
    assert found("array_record") == expected[:2]


def test_a_record_that_cannot_be_read_has_a_label_for_no_reader(broken, tmp_path):
    shutil.copytree(f"{broken['offsets']}/few", tmp_path / "few")
    flip_a_byte(next((tmp_path / "few/1.0.0").glob("*.tfrecord*")), 7)
    labels = [-1 if i == 7 else i % 3 for i in range(12)]
    for reader in ("memory", "offsets"):
        how = {"split": "train", "data_dir": str(tmp_path), "image_size": (16, 16)}
        assert said_of(make_source("few", reader=reader, **how))[1] == labels


def test_png_and_grey_images_in_a_jpeg_set(corrupt):
    source = pets(corrupt, "offsets", "train[3:5]")
    spec = image_batch(2, (60, 90), parse_ops("decode|resize", (60, 90))[0])
    found = list(pipeline.host_eval_batches(source, spec, rows=np.arange(2)))
    files = [corrupt / "3.png", corrupt / "4.jpg"]
    for image, file in zip(found[0]["image"], files, strict=True):
        np.testing.assert_array_equal(image, pil_rgb(file.read_bytes()))


# The index of a TFRecord file


@pytest.fixture
def shard(corrupt, tmp_path, monkeypatch):
    """A copy of a file of 10 records, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = sorted((corrupt / "pets/1.0.0").glob("*.tfrecord*"))[0]
    return epath.Path(shutil.copy(source, tmp_path / "shard"))


def test_offsets_are_those_of_the_records(shard):
    (offsets,) = records.record_offsets([shard])
    stored = [record.numpy() for record in tf.data.TFRecordDataset(str(shard))]
    assert len(offsets) == len(stored) + 1 == 11
    np.testing.assert_array_equal(np.diff(offsets), [16 + len(record) for record in stored])


def test_a_file_is_walked_once_and_again_when_it_changes(shard, tmp_path, monkeypatch):
    walked, walk = [], records.walk
    monkeypatch.setattr(records, "walk", lambda *args: walked.append(args[0]) or walk(*args))
    first, second = (records.record_offsets([shard])[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(walked) == 1
    (entry,) = (tmp_path / "cache/vit_jax/tfrecord").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])  # a damaged entry is made anew
    np.testing.assert_array_equal(records.record_offsets([shard])[0], first)
    assert len(walked) == 2
    shard.write_bytes(shard.read_bytes() * 2)
    assert len(records.record_offsets([shard])[0]) == 21 and len(walked) == 3


def test_a_cache_that_cannot_be_written_is_not_needed(shard, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert len(records.record_offsets([shard])[0]) == 11


@pytest.mark.parametrize("cut", [1, 20, -5])
def test_a_file_that_does_not_end_with_a_record_is_refused(shard, cut):
    content = shard.read_bytes()
    shard.write_bytes(content[:-cut] if cut > 0 else content + b"12345")
    with at_fault("data.data_dir"):
        records.record_offsets([shard])


def test_a_file_of_another_length_is_refused(corrupt, tmp_path):
    shutil.copytree(corrupt / "pets", tmp_path / "pets")
    first, second, _ = sorted((tmp_path / "pets/1.0.0").glob("*.tfrecord*"))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with at_fault("data.data_dir"):
        pets(tmp_path, "offsets")


def test_a_reader_that_the_format_lacks_is_refused(corrupt, shared_data):
    with at_fault("data.reader"):
        pets(corrupt, "array_record")
    with at_fault("data.reader"):
        make_source(
            "cifar10",
            split="test",
            data_dir=str(shared_data / "array_record"),
            image_size=(32, 32),
            reader="offsets",
        )


@pytest.mark.slow
@pytest.mark.parametrize("order_name", ORDERS)
def test_memory_does_not_grow(sample, order_name):
    import psutil

    rss = {}
    data_order = make_order(order_name, [500], 0, global_batch_size=32, **ORDERS[order_name])
    stream = pipeline.host_batches(
        sample,
        image_batch(32, (224, 224), parse_ops("inception_crop", (224, 224))[0]),
        steps=range(2000),
        seed=0,
        rows=np.arange(32),
        data_order=data_order,
    )
    for step, _ in enumerate(stream, 1):
        if step in (500, 2000):
            rss[step] = psutil.Process().memory_info().rss
    assert rss[2000] - rss[500] < 50e6
