"""Training data on gs://, read through TensorFlow's client from a store on the loopback."""

import re

import numpy as np
import pytest
from fake_store import served
from images import encode, smooth_image
from prepared import labelled_images, prepare
from table_files import make_table, write_parquet

from vit_jax.data import image_batch, make_order, make_source, parse_ops, pipeline
from vit_jax.data.host_tf import tf


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    root = tmp_path_factory.mktemp("local")
    features = labelled_images(3, shape=(16, 16, 3), encoding_format="png")
    examples = [
        {"image": encode(smooth_image(16, 16, seed), "PNG"), "label": seed % 3} for seed in range(9)
    ]
    prepare(root, "tiny", features, examples, examples_per_shard=4)
    of_records = make_source("tiny", split="train", data_dir=str(root), image_size=(16, 16),
                             reader="offsets")  # fmt: skip
    stored = [of_records.read(tf.constant(i, tf.int64)) for i in range(9)]
    images, labels = ([example[key].numpy() for example in stored] for key in ("image", "label"))
    unread = [np.random.default_rng(i).bytes(1 << 18) for i in range(9)]
    table = make_table(images, labels).append_column("unread", [unread])
    write_parquet(table, root / "train.parquet")
    return root


def first_batch(name, data_dir):
    where = {"split": "train", "data_dir": data_dir, "image_size": (16, 16)}
    source = make_source(name, **where, reader="offsets")
    order = make_order("record", source.part_sizes, 0, global_batch_size=8)
    how = {"steps": range(2, 3), "rows": np.arange(8), "seed": 0, "data_order": order}
    ops, _ = parse_ops("decode|central_crop", (16, 16))
    [batch] = pipeline.host_batches(source, image_batch(8, (16, 16), ops), **how)
    return batch


@pytest.fixture(scope="module")
def expected(local):
    return first_batch("tiny", str(local))


@pytest.mark.parametrize("name", ["tiny", "parquet"])
def test_data_in_a_bucket_give_the_batches_of_the_folder(
    name, local, expected, tmp_path, monkeypatch
):
    with served(local, monkeypatch, tmp_path) as requests:
        found = first_batch(name, "gs://bucket/")
    assert any({"tiny": "tfrecord"}.get(name, name) in path for path in requests)
    ranges = [re.search(r"parquet bytes=(\d+)-(\d+)", path) for path in requests]
    fetched = sum(int(found[2]) - int(found[1]) + 1 for found in ranges if found)
    assert fetched < 1 << 18  # nothing of the column that is not read
    for key in ("image", "label", "mask", "id"):
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
