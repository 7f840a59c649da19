"""data.exclude: records that are left out, by every reader, in order, with little memory."""

import tracemalloc

import numpy as np
import pytest
from at_fault import at_fault
from opened import open_all, with_known_facts
from prepared import prepare
from read_settings import settings_of, splits_of

from vit_jax.config import base_config, classification, train_split
from vit_jax.data import image_batch, make_source, parse_ops, pipeline, read_labels
from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.id_files import ids_to_bytes
from vit_jax.data.records import RecordFiles
from vit_jax.data.subset import leave_out

SIZE = (8, 8)
OUT = np.array([0, 3, 4, 11, 29])  # the first and the last record, neighbours, a file's first


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of 30 small images in three files; label i is record i."""
    root = tmp_path_factory.mktemp("data")
    features = {
        "image": tfds.features.Image(shape=(*SIZE, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=30),
    }
    pixels = np.random.default_rng(0).integers(0, 256, (30, *SIZE, 3), np.uint8)
    examples = [{"image": image, "label": i} for i, image in enumerate(pixels)]
    prepare(root, "insects", features, examples, examples_per_shard=11)
    return root


def open_insects(root, reader="offsets", **more):
    where = {"split": "train", "image_size": SIZE, "data_dir": str(root), "reader": reader}
    return make_source("insects", **where, **more)


@pytest.fixture(scope="module")
def listed(folder):
    path = folder / "exclude.npz"
    path.write_bytes(ids_to_bytes(OUT, open_insects(folder).fingerprint))
    return str(path)


def epoch(source, order=None):
    ops = parse_ops("decode", SIZE)[0] if source.encoded else ()
    found = pipeline.host_batches(
        source, image_batch(5, SIZE, ops), steps=range(5), seed=3, rows=np.arange(5),
        data_order=order,
    )  # fmt: skip
    return [(b["label"].tolist(), b["mask"].tolist(), b["image"].tobytes()) for b in found]


def test_the_others_are_read_once_an_epoch_by_every_reader(folder, listed):
    memory, offsets = (open_insects(folder, r, exclude=listed) for r in ("memory", "offsets"))
    kept = np.delete(np.arange(30), OUT)
    assert memory.num_examples == 25 and memory.fingerprint == offsets.fingerprint
    assert memory.fingerprint != open_insects(folder).fingerprint
    for source in (memory, offsets):
        np.testing.assert_array_equal(read_labels(source, 0, 25), kept)
        batches = epoch(source)
        assert sorted(label for labels, _, _ in batches for label in labels) == kept.tolist()
        assert epoch(memory) == batches
    in_order = epoch(offsets, lambda positions: positions % 25)  # neighbours, read together
    assert [label for labels, _, _ in in_order for label in labels] == kept.tolist()
    whole = open_insects(folder)
    assert [offsets.record_name(i) for i in (0, 24)] == [whole.record_name(i) for i in (1, 28)]


def test_neighbours_are_read_together_but_over_no_gap(folder, listed):
    files = open_insects(folder, exclude=listed).record_files
    assert files.segments.tolist() == [0, 2, 8, 18]  # after 0; 3 and 4; 11; from file 22
    assert [*map(len, np.split(np.arange(25), files.segments[1:]))] == [2, 6, 10, 7]


def test_classes_and_parts_are_of_what_is_left(folder, listed):
    chosen = {"classes": (1, 5, 29, 28), "subset": ("100%", False, 0)}
    assert open_insects(folder, exclude=listed, **chosen).num_examples == 3


def test_the_memory_is_that_of_the_list():
    """A thousand of ten million records are left out. The records have no files."""
    number = 10_000_000
    files = RecordFiles(np.array([0]), lambda first, count: tf.data.Dataset.range(count))
    source = Source(
        "made", "train", number, 2, "f", lambda ids: {"label": tf.cast(ids, tf.int32)}, str,
        record_files=files,
    )  # fmt: skip
    out = np.arange(0, number, 10_000)
    tracemalloc.start()
    left = leave_out(source, out)
    last = left.read(tf.constant([0, number - 1001], tf.int64))["label"].numpy()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert last.tolist() == [1, number - 1] and left.record_name(9_999) == "10001"


def config_of(root, exclude):
    c = base_config()
    c.data.name, c.data.data_dir, c.data.image_size = "insects", str(root), 8
    c.data.exclude, c.data.ops, c.global_batch_size = exclude, "decode", 5
    c.evals.test = classification(split="train", every="1 epochs", ops="decode")
    return c


def test_a_run_leaves_them_out_and_its_evaluators_do_not(folder, listed):
    found, sources = open_all(config_of(folder, listed))
    assert found.data.num_examples == 25
    assert sources[train_split(settings_of(found).data)].num_examples == 25
    (key,) = splits_of(found, "test").values()
    assert key.exclude is None and sources[key].num_examples == 30


def test_a_plan_counts_what_is_left(folder, tmp_path):
    c = config_of(folder, str(tmp_path / "digits.npz"))
    c.data.name = "digits"
    digits = make_source("digits", split="train", image_size=SIZE)
    (tmp_path / "digits.npz").write_bytes(ids_to_bytes(OUT, digits.fingerprint))
    assert with_known_facts(c).data.num_examples == digits.num_examples - 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        (b"no archive", "is not a file of record ids"),
        ("other", "is not the data of this file, or has changed"),
        ("all", "has no other records"),
    ],
)
def test_lists_that_are_refused(folder, tmp_path, content, said):
    path, source = tmp_path / "exclude.npz", open_insects(folder)
    if content == "other":
        content = ids_to_bytes(OUT, "of other data")
    elif content == "all":
        content = ids_to_bytes(np.arange(30), source.fingerprint)
    if content is not None:
        path.write_bytes(content)
    with at_fault("data.exclude") as error:
        open_insects(folder, exclude=str(path))
    assert said in str(error.value)
