"""Tar shards: the batches of TFRecord, locally and on gs://; what is broken is named."""

import gzip
import json
import logging
import pathlib
import re
import tarfile
import tempfile

import numpy as np
import pytest
from at_fault import golden_page
from fake_store import served
from images import encode, smooth_image
from of_tfrecord import check_parts, read_300_records
from tar_files import write_tar

from vit_jax.base.errors import InputError
from vit_jax.data import (
    contract,
    image_batch,
    loading,
    make_order,
    make_source,
    parse_ops,
    pipeline,
    read_labels,
)
from vit_jax.data.host_tf import tf

SIZE = (32, 32)
IMAGES = [encode(smooth_image(32, 32, seed), "PNG") for seed in range(8)]
PAGE = pathlib.Path(__file__).with_name("broken_tars.txt")


def open_tar(data_dir, split="train", **fields):
    return make_source("tar", split=split, data_dir=str(data_dir), image_size=SIZE, **fields)


def batches(source, rows, steps):
    spec = image_batch(24, SIZE, parse_ops("decode|random_crop(24)|resize", SIZE)[0])
    order = make_order("record", source.part_sizes, 0, global_batch_size=24)
    how = {"steps": steps, "seed": 0, "data_order": order}
    return list(pipeline.host_batches(source, spec, rows=np.array(rows), **how))


def numbered(labels, of=IMAGES):
    """The members 0.png, 0.cls, 1.png, ..."""
    return [
        member
        for i, label in enumerate(labels)
        for member in ((f"{i}.png", of[i]), (f"{i}.cls", b"%d" % label))
    ]


@pytest.mark.slow
def test_the_batches_of_tfrecord_on_any_host_from_any_step(shared_data, tmp_path, monkeypatch):
    of_records, images, labels = read_300_records(shared_data)
    root = tmp_path / "shards"
    for i in range(0, 300, 110):
        of = numbered(labels[i : i + 110], images[i:])
        write_tar(root / f"cifar10-train-{i:03d}.tar", of)
    (root / "classes.txt").write_text("\n".join(of_records.class_names))
    expected = batches(of_records, range(24), range(11, 14))  # over the end of an epoch
    local = open_tar(root)
    assert local.class_names == of_records.class_names
    assert list(read_labels(local, 0, 300)) == labels
    assert local.file_names(108, 112) == ["108.png", "109.png", "0.png", "1.png"]
    with served(root, monkeypatch, tmp_path):
        open_tar("gs://bucket/")  # writes the indexes
    with served(root, monkeypatch, tmp_path) as requests:
        in_bucket = open_tar("gs://bucket/")
        hosts = [batches(source, rows, range(11, 14))
                 for source, rows in ((local, range(12)), (in_bucket, range(12, 24)))]  # fmt: skip
    ranges = [re.search(r"tar bytes=(\d+)-(\d+)", path) for path in requests]
    assert in_bucket.fingerprint == local.fingerprint
    check_parts(expected, hosts)
    fetched = sum(int(found[2]) - int(found[1]) + 1 for found in ranges if found)
    ids = np.concatenate([batch["id"] for batch in hosts[1]])
    used = sum(len(images[i]) for i in ids)
    assert used < fetched < 3 * used  # headers of 512 bytes, and what lies between neighbours


def test_names_labels_and_captions(tmp_path):
    long = "a/" * 90 + "long"
    folder, link = tarfile.TarInfo("a"), tarfile.TarInfo("a/link.png")
    folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "0.png"
    for tar_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        root = tmp_path / str(tar_format)
        write_tar(root / "train.tar", [
            ("", folder), ("a/ü.txt", b"a cat on a mat"), ("a/ü.PNG", IMAGES[0]),
            ("a/ü.json", json.dumps({"label": ["cat", "mat"]}).encode()),
            (f"{long}.png", IMAGES[1]), (f"{long}.json", b'{"label": null, "cls": "dog"}'),
            ("", link),
            ("./b.png", IMAGES[2]), ("b.txt", b"cat"), ("b.seg.png", IMAGES[7]),
            ("c.png", IMAGES[3]), ("c.json", b'{"caption": "none"}'), ("d.cls", b"4"),
        ], tar_format)  # fmt: skip
        several = open_tar(root, multi_label=True)
        assert several.class_names == ("cat", "dog", "mat")
        read = [several.read(tf.constant(i, tf.int64)) for i in range(4)]
        assert [example["image"].numpy() for example in read] == IMAGES[:4]
        labels = [example["label"].numpy().tolist() for example in read]
        assert labels == [[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]
        assert several.file_names(0, 2) == ["a/ü.PNG", f"{long}.png"]
        np.testing.assert_array_equal(contract.count_labels(several), [2, 1, 1])
    write_tar(tmp_path / "web/0.tar", [("0.jpg", IMAGES[0]), ("0.json", b"{}"), ("0.txt", b"a")])
    assert open_tar(tmp_path / "web").class_names is None
    write_tar(tmp_path / "text/0.tar", [("0.png", IMAGES[0]), ("0.cls", b"cat")])
    unread = open_tar(tmp_path / "text")  # a label that cannot be read is not class 0
    assert unread.why_unreadable(0) == "its label cannot be read; write it again"


def test_an_index_beside_or_in_the_cache_holds_until_its_file_changes(tmp_path, monkeypatch):
    file = write_tar(tmp_path / "data/train.tar", numbered([0, 1, 2]))
    before = open_tar(file.parent).fingerprint
    index = file.parent / ".vit_jax/train.tar.index"
    written = index.stat().st_mtime_ns
    assert open_tar(file).fingerprint == before
    assert index.stat().st_mtime_ns == written
    head, *rest = index.read_bytes().split(b"\n", 1)
    for of_another_type in (b"[]", b"{}", head.replace(b'"sizes": [', b'"sizes": [null, ')):
        index.write_bytes(b"\n".join([of_another_type, *rest]))
        assert open_tar(file).fingerprint == before
    index.unlink()
    index.parent.rmdir()
    index.parent.write_bytes(b"no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_tar(file.parent).fingerprint == before
    assert len([*(tmp_path / "cache/vit_jax/tar").iterdir()]) == 1
    write_tar(file, numbered([0, 1, 2], [IMAGES[0], IMAGES[1] + b" ", IMAGES[2]]))
    assert open_tar(file.parent).fingerprint != before


def test_the_index_of_a_bucket_without_write_access_is_in_the_cache(tmp_path, monkeypatch):
    file = write_tar(tmp_path / "data/train.tar", numbered([0, 1, 2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with served(file.parent, monkeypatch, tmp_path, writable=False):
        in_bucket = open_tar("gs://bucket/")
    assert [path.name for path in file.parent.iterdir()] == ["train.tar"]
    assert len([*(tmp_path / "cache/vit_jax/tar").iterdir()]) == 1
    assert in_bucket.fingerprint == open_tar(file.parent).fingerprint


def test_members_that_cannot_be_read_are_masked_and_named(tmp_path, caplog):
    members = numbered([0, 1, 0, 1, 0, 1, 0])
    members[2] = ("1.png", IMAGES[1][:-200])
    members[5] = ("2.cls", b"cat")
    members[7] = ("3.json", b'{"label": ')
    file = write_tar(tmp_path / "train.tar", [*members, ("7.cls", b"1")])
    with caplog.at_level(logging.WARNING, "vit_jax"):
        source = open_tar(file)
    assert "left out 1 of the members: train.tar: 7 has no image" in caplog.text
    assert list(read_labels(source, 0, 7)) == [0, 1, -1, -1, 0, 1, 0]
    other = tarfile.TarInfo("9.png")  # replaces 5.png while the run reads
    other.size = len(IMAGES[5])
    content = file.read_bytes()
    at = content.index(b"5.png")
    file.write_bytes(content[:at] + other.tobuf() + content[at + tarfile.BLOCKSIZE :])
    caplog.clear()
    loading._named.clear()
    with caplog.at_level(logging.WARNING, "vit_jax"):
        spec = image_batch(7, SIZE, parse_ops("decode|resize", SIZE)[0])
        [batch] = pipeline.host_eval_batches(source, spec, rows=np.arange(7))
    assert list(batch["id"][batch["mask"] == 0]) == [1, 2, 3, 5]
    said = [record.getMessage() for record in caplog.records]
    expected = {"1.png": "damaged", "2.png": "label", "3.png": "label", "5.png": "has changed"}
    for text, (name, why) in zip(said, expected.items(), strict=True):
        assert text.startswith(f"train.tar member {name} (record ") and why in text


def shortened(path, size):
    path.write_bytes(path.read_bytes()[:size])


def with_member(path, *members):
    write_tar(path, [*numbered([0, 1]), *members])


BROKEN = {
    "cut in a member": lambda path: shortened(path, 1000),
    "cut in a header": lambda path: shortened(path, path.read_bytes().index(b"1.cls") + 100),
    "cut between members": lambda path: shortened(path, path.read_bytes().index(b"1.png")),
    "garbage between members": lambda path: path.write_bytes(
        path.read_bytes().replace(b"1.cls", b"2.cls")
    ),
    "zero bytes": lambda path: shortened(path, 0),
    "no tar file": lambda path: path.write_bytes(b"<html>not found</html>"),
    "compressed": lambda path: path.with_name("train-0.tar.gz").write_bytes(
        gzip.compress(path.read_bytes())
    ),
    "compressed by another name": lambda path: path.write_bytes(gzip.compress(path.read_bytes())),
    "no images": lambda path: write_tar(path, [("0.npy", b"0"), ("0.cls", b"0")]),
    "keys with dots": lambda path: write_tar(path, [("1.5.png", IMAGES[0]), ("1.5.cls", b"0")]),
    "two images of one key": lambda path: with_member(path, ("0.jpg", IMAGES[0])),
    "a member twice": lambda path: with_member(path, ("0.png", IMAGES[0])),
    "no label": lambda path: with_member(path, ("2.png", IMAGES[2])),
    "two labels": lambda path: with_member(
        path, ("2.png", IMAGES[2]), ("2.json", b'{"labels": [1, 2]}')
    ),
    "a label that train lacks": lambda path: write_tar(
        path.with_name("val.tar"), numbered([0, 1, 2, 3])
    ),
    "a missing split": lambda path: None,
    "a missing shard": lambda path: None,
    "no shards": lambda path: path.rename(path.with_suffix(".zip")),
}
ASKED = {"a label that train lacks": {"split": "val"}, "a missing split": {"split": "validation"}}


def refusal(kind, root):
    """What opening a data set that is broken in this way says."""
    path = write_tar(root / "train-0.tar", numbered([0, 1, 2]))
    BROKEN[kind](path)
    data_dir = root / "train-{0..1}.tar" if kind == "a missing shard" else root
    with pytest.raises(InputError) as e:
        open_tar(data_dir, **ASKED.get(kind, {}))
    return str(e.value).replace(str(root), "DIR")


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused_by_name(kind, tmp_path):
    assert refusal(kind, tmp_path) == golden_page(PAGE)[kind]


if __name__ == "__main__":
    said = {}
    for kind in BROKEN:
        with tempfile.TemporaryDirectory() as folder:
            said[kind] = refusal(kind, pathlib.Path(folder))
    PAGE.write_text("\n\n".join(f"{kind}\n    {text}" for kind, text in said.items()) + "\n")
