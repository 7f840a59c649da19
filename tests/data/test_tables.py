"""Parquet and Arrow: the batches of TFRecord; what is broken is named."""

import logging
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from at_fault import at_fault, golden_page
from etils import epath
from images import encode, smooth_image
from of_tfrecord import check_parts, read_300_records
from table_files import make_table, save_to_disk, write_parquet

from vit_jax.base.errors import InputError
from vit_jax.data import (
    image_batch,
    loading,
    make_order,
    make_source,
    parse_ops,
    pipeline,
    read_labels,
    resolve_order,
)
from vit_jax.data.host_tf import tf
from vit_jax.data.order import Chunks
from vit_jax.data.sources import tables

SIZE = (32, 32)


def open_tables(name, data_dir, split="train", **fields):
    return make_source(name, split=split, data_dir=str(data_dir), image_size=SIZE, **fields)


def batches(source, rows, order_name="record", batch=24, **how):
    spec = image_batch(batch, SIZE, parse_ops("decode|random_crop(24)|resize", SIZE)[0])
    order = make_order(order_name, source.part_sizes, 0, global_batch_size=batch, **how)
    steps = {"steps": range(11, 14), "seed": 0, "data_order": order}  # over the end of an epoch
    return list(pipeline.host_batches(source, spec, rows=np.array(rows), **steps))


@pytest.mark.slow
def test_the_batches_of_tfrecord_on_any_host_from_any_step(shared_data, tmp_path):
    of_records, images, labels = read_300_records(shared_data)
    table = make_table(images, labels, of_records.class_names)
    for i in range(2):
        name = f"train-0000{i}-of-00002.parquet"
        write_parquet(table.slice(150 * i, 150), tmp_path / "parquet" / name, rows=40)
    save_to_disk({"train": table}, tmp_path / "arrow")
    sources = [open_tables(name, tmp_path / name) for name in ("parquet", "arrow")]
    assert {source.class_names for source in sources} == {of_records.class_names}
    assert all(list(read_labels(source, 0, 300)) == labels for source in sources)
    chunk = {"order_name": "chunk", "chunk_size": 40, "streams": 2}
    expected = batches(of_records, range(24), **chunk)
    assert all(batch["mask"].all() for batch in expected)
    host_rows = (range(12), range(12, 24))
    hosts = [batches(s, rows, **chunk) for s, rows in zip(sources, host_rows, strict=True)]
    check_parts(expected, hosts)


IMAGES = [encode(smooth_image(32, 32, seed)) for seed in range(12)]


@pytest.fixture
def whole(tmp_path):
    """Training data in two files, with labels 0 to 2 of named classes."""
    table = make_table(IMAGES, [i % 3 for i in range(12)], ("cat", "dog", "emu"))
    for i in range(2):
        write_parquet(table.slice(6 * i, 6), tmp_path / f"train-0000{i}-of-00002.parquet")
    return tmp_path


def test_records_that_cannot_be_read_are_masked_and_named(tmp_path, caplog):
    images, paths = [*IMAGES], [None] * 12
    images[1] = None  # no image
    images[2] = IMAGES[2][:-200]
    images[3], paths[3] = None, "gone.jpg"
    images[4], paths[4] = None, "there.jpg"
    (tmp_path / "there.jpg").write_bytes(IMAGES[4])
    table = make_table(images, [i % 3 for i in range(12)], paths=paths)
    file = write_parquet(
        table, tmp_path / "train.parquet", compression="NONE", use_dictionary=False
    )
    page = pq.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset
    content = file.read_bytes()
    file.write_bytes(content[:page] + b"\xff" * 8 + content[page + 8 :])
    source = open_tables("parquet", tmp_path)
    loading._named.clear()
    with caplog.at_level(logging.WARNING, "vit_jax"):
        spec = image_batch(12, SIZE, parse_ops("decode|resize", SIZE)[0])
        [batch] = pipeline.host_eval_batches(source, spec, rows=np.arange(12))
    assert list(batch["id"][batch["mask"] == 0]) == [1, 2, 3, 8, 9, 10, 11]
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 7
    for text, why in {
        "member row 1 ": "has no image", "member row 2 ": "damaged", "gone.jpg": "no such file",
        "row 8 ": "row group 2 cannot be read",
    }.items():  # fmt: skip
        assert any(text in message and why in message for message in said), said


def label_column(values):
    return make_table(IMAGES, values).select(["label"])["label"]


def set_label(path, labels, **options):
    write_parquet(make_table(IMAGES[: len(labels)], labels, **options), path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


BROKEN = {
    "no Parquet": lambda first, root: first.write_bytes(b"<html>not found</html>"),
    "cut short": lambda first, root: cut(first),
    "zero bytes": lambda first, root: first.write_bytes(b""),
    "a missing file": lambda first, root: first.unlink(),
    "no column of images": lambda first, root: [
        write_parquet(pa.table({"pixels": [1], "label": [0]}), path) for path in root.iterdir()
    ],
    "decoded arrays": lambda first, root: [
        write_parquet(pa.table({"image": [[[1, 2]]], "label": [0]}), path)
        for path in root.iterdir()
    ],
    "another schema": lambda first, root: write_parquet(
        pa.table({"image": IMAGES[:2], "label": [0, 1]}), root / "train-00001-of-00002.parquet"
    ),
    "other classes": lambda first, root: set_label(first, [0, 1], names=("cat", "cow")),
    "a label out of range": lambda first, root: set_label(
        first, [0, 7], names=("cat", "dog", "emu")
    ),
    "no label": lambda first, root: set_label(first, [0, None], names=("cat", "dog", "emu")),
    "labels in fractions": lambda first, root: [
        set_label(path, [0.5, 1.5]) for path in root.iterdir()
    ],
    "a label that train lacks": lambda first, root: [
        set_label(first.with_name("train-00000-of-00001.parquet"), ["cat", "dog"]),
        set_label(root / "train-00001-of-00002.parquet", ["cat", "dog"]),
        first.unlink(), (root / "train-00001-of-00002.parquet").unlink(),
        set_label(root / "validation.parquet", ["cat", "yak"]),
    ],
    "several columns of classes": lambda first, root: [
        write_parquet(rename_label(pq.read_table(path)), path) for path in root.iterdir()
    ],
    "no such column": lambda first, root: {"own": {"label_column": "breed"}},
    "no such split": lambda first, root: {"split": "val"},
}  # fmt: skip
PAGE = pathlib.Path(__file__).parent / "broken_tables.txt"


def rename_label(table):
    """With fine and coarse labels."""
    noted = table.schema.metadata[b"huggingface"].replace(b'"label"', b'"fine"')
    noted = noted[:-3] + b', "coarse": {"names": ["a"], "_type": "ClassLabel"}}}}'
    table = table.rename_columns(["image", "fine"]).append_column("coarse", table["label"])
    return table.replace_schema_metadata({"huggingface": noted})


def refusal(kind, root):
    """What is said of the data in `root` once they are broken so."""
    changed = BROKEN[kind](root / "train-00000-of-00002.parquet", root)
    fields = changed if isinstance(changed, dict) else {}
    if (root / "validation.parquet").exists():
        fields["split"] = "val"
    try:
        open_tables("parquet", root, **fields)
    except InputError as e:
        return re.sub(r"\((?:Parquet|Couldn't|Could)[^)]*\)*", "(...)", str(e)).replace(
            str(root), "DIR"
        )


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_refused_by_name(kind, whole):
    assert refusal(kind, whole) == golden_page(PAGE)[kind]


@pytest.mark.parametrize("change", ["image", "label", "order"])
def test_data_that_have_changed_have_another_fingerprint(change, whole):
    before = open_tables("parquet", whole).fingerprint
    assert open_tables("parquet", whole).fingerprint == before
    file = whole / "train-00001-of-00002.parquet"
    table = pq.read_table(file)
    if change == "order":
        table = table.take([0, 2, 1, 3, 4, 5])
    else:
        images, labels = [[*table[name].to_pylist()] for name in ("image", "label")]
        images[1] = {"bytes": IMAGES[0], "path": None} if change == "image" else images[1]
        labels[1] = 2 if change == "label" else labels[1]
        table = pa.table([pa.array(images, table.schema.types[0]), labels], table.schema)
    write_parquet(table, file)
    assert open_tables("parquet", whole).fingerprint != before


def test_columns_of_bytes_and_of_paths_and_several_labels(tmp_path):
    (tmp_path / "1.jpg").write_bytes(IMAGES[1])
    labels = [["dog", "cat"], [], ["dog"]]
    write_parquet(pa.table({"img": IMAGES[:3], "labels": labels}), tmp_path / "a/train.parquet")
    write_parquet(pa.table({"path": ["../1.jpg"], "label": [3]}), tmp_path / "b/train.parquet")
    source = open_tables("parquet", tmp_path / "a", multi_label=True)
    found = [source.read(tf.constant(i, tf.int64)) for i in range(3)]
    assert [example["image"].numpy() for example in found] == IMAGES[:3]
    assert [list(example["label"].numpy()) for example in found] == [[1, 1], [0, 0], [0, 1]]
    source = open_tables("parquet", tmp_path / "b")
    assert source.read(tf.constant(0, tf.int64))["image"].numpy() == IMAGES[1]
    assert (source.class_names, source.file_names(0, 1)) == (("3",), ["../1.jpg"])


def test_large_data_are_read_in_chunks_of_row_groups(whole, monkeypatch, caplog):
    files = [epath.Path(file) for file in whole.iterdir()]
    sizes = [size for file in files for size in tables.open_parquet(file).sizes]
    monkeypatch.setattr(tables, "_KEPT_BYTES", sum(sizes) - 1)
    monkeypatch.setattr(tables, "_GROUP_BYTES", max(sizes))
    chunks = open_tables("parquet", whole).chunks
    assert chunks == Chunks(4, (sum(sizes) - 1) // (2 * max(sizes)))
    how = {"num_examples": 12, "global_batch_size": 512, "repeats": 1}
    assert resolve_order(None, None, **how, chunks=Chunks(4, 9)) == ("chunk", 8)
    assert resolve_order(None, None, **how) == ("record", None)

    monkeypatch.setattr(tables, "_GROUP_BYTES", max(sizes) - 1)
    with pytest.raises(InputError) as e:
        open_tables("parquet", whole)
    command = shlex.split(str(e.value).partition("100 images: ")[2].replace("(100)", "(2)"))
    subprocess.run([sys.executable, *command[1:]], cwd=whole, check=True)
    written = pq.ParquetFile(whole / "NEW.parquet")
    assert [written.metadata.row_group(i).num_rows for i in range(3)] == [2, 2, 2]
    assert written.schema_arrow.metadata == pq.read_schema(command[2].split("'")[1]).metadata


def test_arrow_in_a_bucket_is_refused():
    with at_fault("data.data_dir"):
        tables.open_arrow(epath.Path("gs://bucket/train/data-00000-of-00001.arrow"))


def test_threads_read_a_group_once_and_the_last_used_stay():
    kept, read = tables.Kept(2), []

    def get(key):
        return kept.get(key, lambda: time.sleep(0.01) or read.append(key) or key, 1)

    threads = [threading.Thread(target=get, args=["a"]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [get(key) for key in "abacab"] == [*"abacab"]
    assert read == [*"abcb"]  # b went for c
    with pytest.raises(OSError, match="damaged"):
        kept.get("d", lambda: (_ for _ in ()).throw(OSError("damaged")), 1)
    assert get("d") == "d"


if __name__ == "__main__":
    said = {}
    for kind in BROKEN:
        with tempfile.TemporaryDirectory() as folder:
            said[kind] = refusal(kind, whole.__wrapped__(pathlib.Path(folder)))
    PAGE.write_text("\n\n".join(f"{kind}\n    {text}" for kind, text in said.items()) + "\n")
