"""Image folders: classes, splits, what is held out, and what is refused."""

import collections
import os
import shutil

import pytest
from images import encode, make_folder, smooth_image

from vit_jax.data import make_source
from vit_jax.data.host_tf import tf
from vit_jax.errors import InputError

TEN_EACH = {"cat": 10, "dog": 10, "eel": 10}


def folder(root, split="train", **fields):
    return make_source("folder", split=split, data_dir=root, image_size=(16, 16), **fields)


def names(source):
    return [source.record_name(record) for record in range(source.num_examples)]


def test_extensions_nesting_and_hidden_files(tmp_path):
    for name in (
        "b/1.JPG",
        "b/x/y/2.PnG",
        "a/3.jpeg",
        "a/4.jpg",
        "a/.hidden.jpg",
        "a/.cache/5.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(smooth_image()))
    (tmp_path / "a/notes.txt").write_text("not an image")
    (tmp_path / ".git").mkdir()

    train, val = folder(tmp_path), folder(tmp_path, "val")
    assert train.class_names == val.class_names == ("a", "b")
    assert sorted(names(train) + names(val)) == ["a/3.jpeg", "a/4.jpg", "b/1.JPG", "b/x/y/2.PnG"]
    assert train.encoded
    for record, name in enumerate(names(train)):
        example = train.read(tf.constant(record, tf.int64))
        assert example["image"].numpy() == (tmp_path / name).read_bytes()
        assert train.class_names[example["label"].numpy()] == name[0]


def test_a_tenth_is_held_out_evenly(tmp_path):
    root = make_folder(tmp_path, {"cat": 40, "dog": 20, "eel": 8})
    train, val = names(folder(root)), names(folder(root, "val"))
    assert len(val) == 7 and len(train) == 61 and not set(train) & set(val)
    assert collections.Counter(name[:3] for name in val) == {"cat": 4, "dog": 2, "eel": 1}
    assert val == names(folder(root, "val"))


def test_at_least_one_is_held_out(tmp_path):
    assert folder(make_folder(tmp_path, {"cat": 2, "dog": 2}), "val").num_examples == 1


def test_train_without_val_is_split_too(tmp_path):
    make_folder(tmp_path / "train", TEN_EACH)
    train, val = folder(tmp_path), folder(tmp_path, "val")
    assert (train.num_examples, val.num_examples) == (27, 3)
    assert all(name.startswith("train/") for name in names(train) + names(val))


def test_all_holds_out_nothing(tmp_path):
    everything = folder(make_folder(tmp_path / "flat", TEN_EACH), "all")
    assert everything.num_examples == 30 and names(everything)[0] == "cat/0.jpg"
    for split, classes in (("Train", {"cat": 3, "dog": 2}), ("test", {"dog": 2})):
        make_folder(tmp_path / "divided" / split, classes)
    for name in ("folder", "unlabelled"):
        source = make_source(name, split="all", data_dir=tmp_path / "divided", image_size=(16, 16))
        assert names(source)[0] == "Train/cat/0.jpg" and names(source)[-1] == "test/dog/1.jpg"
        assert source.num_examples == 7
    assert folder(tmp_path / "divided", "all").read(tf.constant(6, tf.int64))["label"] == 1


def test_a_given_val_is_used_with_train_s_labels(tmp_path):
    make_folder(tmp_path / "train", TEN_EACH)
    make_folder(tmp_path / "val", {"eel": 2})
    train, val = folder(tmp_path), folder(tmp_path, "val")
    assert (train.num_examples, names(val)) == (30, ["val/eel/0.jpg", "val/eel/1.jpg"])
    assert val.class_names == ("cat", "dog", "eel")
    assert val.read(tf.constant(0, tf.int64))["label"] == 2


def test_fingerprint_follows_the_files_not_their_place(tmp_path):
    here = make_folder(tmp_path / "here", TEN_EACH)
    there = shutil.copytree(here, tmp_path / "there")
    assert folder(here).fingerprint == folder(there).fingerprint != folder(here, "val").fingerprint
    assert names(folder(here, "val")) == names(folder(there, "val"))
    (there / "cat/0.jpg").write_bytes(b"another size")
    (there / "cat/1.jpg").write_bytes(b"another size")  # at least one of them is in train
    assert folder(here).fingerprint != folder(there).fingerprint


def test_each_picture_is_looked_up_on_the_disk_once(tmp_path, monkeypatch):
    make_folder(tmp_path, TEN_EACH)
    stat, looked_up = os.stat, collections.Counter()

    def count(path, *args, **kwargs):
        looked_up[os.fspath(path)] += 1
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", count)
    folder(tmp_path)
    assert [n for path, n in looked_up.items() if path.endswith(".jpg")] == [1] * 30


def refused(root, *words, **fields):
    with pytest.raises(InputError) as error:
        folder(root, **fields)
    for word in words:
        assert word in str(error.value)


def test_what_is_no_image_folder_is_refused(tmp_path):
    refused(None, "data.data_dir=None")
    refused(tmp_path / "absent", "data.data_dir", "absent", "is not a local folder")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    refused(tmp_path, "0 class folders", "at least 2", "unlabelled")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1.jpg").write_bytes(encode(smooth_image()))
    refused(tmp_path, "train has 0 class folders")
    make_folder(tmp_path, {"cat": 1})  # train was meant as a class
    refused(tmp_path, "train has 0 class folders", "found 1 picture", "(cat/), rename it")


def test_missing_splits_and_classes_are_refused(tmp_path):
    make_folder(tmp_path / "val", {"cat": 1, "ant": 1})
    refused(tmp_path, "val/ but no train/")
    make_folder(tmp_path / "train", TEN_EACH)
    refused(tmp_path, "data.split='test'", "'train' and 'val'", split="test")
    refused(tmp_path, "['ant']", "lacks")
    shutil.rmtree(tmp_path / "val/ant")
    refused(tmp_path, "data.num_classes=2", "has 3", num_classes=2)
    shutil.rmtree(tmp_path / "val/cat")
    refused(tmp_path, "val holds no images", split="val")


def test_links_are_followed_and_not_round_and_round(tmp_path):
    make_folder(tmp_path / "elsewhere", {"more": 3})
    root = make_folder(tmp_path / "pets", {"cat": 20, "dog": 10})
    (root / "cat" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "around").symlink_to(root)
    assert folder(root).class_names == ("cat", "dog")
    assert folder(root).num_examples + folder(root, "val").num_examples == 33


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("Train", "Valid", "Test"), ("training", "validation", "TESTING"), ("train", "val", None)],
)
def test_splits_by_their_usual_names_in_any_case(tmp_path, train, val, test):
    for name, size in ((train, 4), (val, 1), (test, 2)):
        if name is not None:
            make_folder(tmp_path / name, {"cat": size, "dog": size})
    splits = ("train", "val", "test") if test else ("train", "val")
    sizes = {split: folder(tmp_path, split).num_examples for split in splits}
    assert sizes == {"train": 8, "val": 2} | ({"test": 4} if test else {})
    if test is None:
        refused(tmp_path, "data.split='test'", split="test")


def test_train_and_test_alone_hold_out_from_train(tmp_path):
    make_folder(tmp_path / "Train", TEN_EACH)
    make_folder(tmp_path / "Test", {"eel": 2})
    train, val, test = (folder(tmp_path, split) for split in ("train", "val", "test"))
    assert (train.num_examples, val.num_examples) == (27, 3)
    assert names(test) == ["Test/eel/0.jpg", "Test/eel/1.jpg"]
    assert test.read(tf.constant(0, tf.int64))["label"] == 2


def test_two_folders_of_a_split_and_classes_that_look_like_splits_are_refused(tmp_path):
    make_folder(tmp_path / "pets/train", TEN_EACH)
    make_folder(tmp_path / "pets/val", TEN_EACH)
    make_folder(tmp_path / "pets/Valid", TEN_EACH)
    refused(tmp_path / "pets", "Valid and val", "keep one")
    make_folder(tmp_path / "nested/train", {"Train": 2, "test": 2})
    refused(tmp_path / "nested", "look like splits", "Train, test")
    make_folder(tmp_path / "without", {"Test": 2, "valid": 2})
    make_folder(tmp_path / "without", {"cat": 1})
    refused(tmp_path / "without", "valid/ and Test/", "no train/", "(found cat/)")


def test_folders_beside_the_splits_are_named(tmp_path, caplog):
    for name in ("train", "val", "extra", "unsorted"):
        make_folder(tmp_path / name, TEN_EACH)
    folder(tmp_path)
    assert any("ignored these folders: extra, unsorted" in m for m in caplog.messages)


def test_pictures_without_classes(tmp_path):
    make_folder(tmp_path, {"holiday": 10, "deep/er": 9})
    (tmp_path / "flat.jpg").write_bytes(encode(smooth_image()))
    (tmp_path / "flat.heic").write_bytes(b"")
    fields = {"data_dir": tmp_path, "image_size": (16, 16)}
    source = make_source("unlabelled", split="train", **fields)
    assert source.num_examples == 20 and "flat.jpg" in names(source)
    assert source.class_names is None
    with pytest.raises(InputError, match=r"'val': .* has the splits 'train' and 'all'"):
        make_source("unlabelled", split="val", **fields)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no images"):
        make_source("unlabelled", split="train", data_dir=empty, image_size=(8, 8))
