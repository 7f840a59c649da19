"""Image folders: classes, splits, what is held out, and what is refused."""

import collections
import os
import shutil

import numpy as np
import pytest
from at_fault import at_fault, refused_with
from images import encode, make_folder, smooth_image, write_images

from vit_jax.data import Divider, Division, make_source
from vit_jax.data.division import divide_anew
from vit_jax.data.host_tf import tf
from vit_jax.data.sources.pseudo import PseudoLabels

TEN_EACH = {"cat": 10, "dog": 10, "eel": 10}


def folder(root, split="train", **fields):
    return make_source("folder", split=split, data_dir=root, image_size=(16, 16), **fields)


def names(source):
    return [source.record_name(record) for record in range(source.num_examples)]


def test_extensions_nesting_and_hidden_files(tmp_path):
    shown = ("b/1.JPG", "b/x/y/2.PnG", "a/3.jpeg", "a/4.jpg")
    image = encode(smooth_image())
    write_images(tmp_path, dict.fromkeys([*shown, "a/.hidden.jpg", "a/.cache/5.png"], image))
    (tmp_path / "a/notes.txt").write_text("not an image")
    (tmp_path / ".git").mkdir()

    train, val = folder(tmp_path), folder(tmp_path, "val")
    assert train.class_names == val.class_names == ("a", "b")
    assert sorted(names(train) + names(val)) == sorted(shown)
    assert train.encoded
    for record, name in enumerate(names(train)):
        example = train.read(tf.constant(record, tf.int64))
        assert example["image"].numpy() == (tmp_path / name).read_bytes()
        assert train.class_names[example["label"].numpy()] == name[0]


def test_a_tenth_is_held_out_evenly(tmp_path):
    root = make_folder(tmp_path, {"cat": 40, "dog": 20, "eel": 8, "fox": 1})
    train, val = names(folder(root)), names(folder(root, "val"))
    assert len(val) == 7 and len(train) == 62 and not set(train) & set(val)
    assert collections.Counter(name[:3] for name in val) == {"cat": 4, "dog": 2, "eel": 1}
    assert val == names(folder(root, "val"))


def test_of_small_classes_hashes_choose_those_held_out():
    files = {f"c{c:02}/{i}.jpg": f"c{c:02}" for c in range(30) for i in range(3)}
    held = [name for name, split in divide_anew("", files, {}).items() if split == "val"]
    assert len(held) == 9 == len({name[:3] for name in held})
    assert sorted(held) != sorted(files)[0:27:3]  # not the first of the alphabet


def test_a_division_stays_as_images_come_and_go(tmp_path, caplog):
    """A run's division is followed by name: no training image becomes one for validation."""
    files = dict.fromkeys((f"cat/{i}.jpg" for i in range(100)), "cat")
    begun = divide_anew("", files, {})
    odd = Division(begun | {"a\r,\n/\udcff": "val"}, frozenset({7}))
    assert Division.from_bytes(odd.to_bytes()) == odd
    stored = Division.from_bytes(Division(begun).to_bytes())
    held = {name for name, split in begun.items() if split == "val"}
    assert len(held) == 10
    more = files | {f"cat/new{i}.jpg": "cat" for i in range(50)} | {"dog/1.jpg": "dog"}
    gone = more.keys() - [*sorted(held)[:5], *sorted(files.keys() - held)[:2]]
    divider = Divider(stored, "runs/a")
    assert divider("pets", {name: more[name] for name in gone}, {}).items() <= begun.items()
    assert divider.find_missing() == sorted(files.keys() - held)[:2]
    said = "\n".join(caplog.messages)
    assert "images that runs/a did not begin with (51) are neither" in said and "cat/new0" in said
    assert "images that runs/a holds out are missing (5), so" in said
    moved = {f"pets/{name}": "cat" for name in files}
    Divider(stored, "runs/a", anew=True)("elsewhere", moved, {})
    assert "elsewhere: 100 images seem to be in runs/a under other names" in caplog.text
    # A run that starts from it trains on the new ones; an export knows only what is held out.
    for known in (stored, Division(hashes=stored.held_out())):
        anew = Divider(known, anew=True)("pets", more, {})
        assert {name for name, split in anew.items() if split == "val"} == held
        exported = Divider(Division(hashes=known.held_out()), "pets.npz")("pets", more, {})
        assert {name for name, split in exported.items() if split == "val"} == held
    others = {f"other/{name}": "cat" for name in files}
    assert [*Divider(stored, "runs/a")("others", others, {}).values()].count("val") == 10
    assert "others: holds none of the images that runs/a holds out; val is a tenth" in caplog.text
    # A run with validation images in a folder of their own has trained on all it knows.
    Divider(Division(dict.fromkeys(files, "train")), "runs/b")("pets", files, {})
    assert "pets: holds none of the images that runs/b holds out; val is a tenth" in caplog.text


def test_new_classes_of_a_run_s_folder_are_left_out(tmp_path):
    root = make_folder(tmp_path, {"cat": 10, "dog": 10})
    (divider := Divider(anew=True))("", {n: n[:3] for n in names(folder(root, "all"))}, {})
    before = folder(root, divider=Divider(Division(divider.decided)))
    make_folder(root, {"ant": 3})
    (root / "cat/new.jpg").write_bytes((root / "cat/0.jpg").read_bytes())
    after = folder(root, divider=Divider(Division(divider.decided)))
    assert after.fingerprint == before.fingerprint and after.class_names == ("cat", "dog")
    assert folder(root).num_examples > after.num_examples


def test_validation_images_that_link_to_training_images_are_named(tmp_path, caplog):
    for split, number in (("train", 10), ("val", 3)):
        make_folder(tmp_path / split, {"cat": number, "dog": number})
    folder(tmp_path, "val")
    assert not caplog.text
    (tmp_path / "val/cat/link.jpg").symlink_to(tmp_path / "train/cat/0.jpg")
    assert folder(tmp_path, "val").num_examples == 7
    assert "1 images are links into train/, so they are trained on: cat/link.jpg" in caplog.text


def test_new_classes_of_own_splits_are_left_out(tmp_path, caplog):
    root = tmp_path / "pets"
    for split, number in (("train", 10), ("val", 3), ("test", 2)):
        make_folder(root / split, {"cat": number, "dog": number})
    folder(root, divider=(divider := Divider(anew=True)))
    for split in ("train", "val", "test"):
        make_folder(root / split, {"ant": 1})
    for split, number in (("train", 20), ("val", 6), ("test", 4)):
        found = folder(root, split, divider=Divider(divider.settled()))
        assert (found.class_names, found.num_examples) == (("cat", "dog"), number)
    assert "left out 1 images of classes that the run did not begin with: ant" in caplog.text
    assert folder(root, "val").num_classes == folder(root, "all").num_classes == 3


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


def test_a_given_val_is_used_with_train_s_labels(tmp_path, caplog):
    make_folder(tmp_path / "train", TEN_EACH)
    make_folder(tmp_path / "val", {"eel": 2})
    train, val = folder(tmp_path), folder(tmp_path, "val")
    assert (train.num_examples, names(val)) == (30, ["val/eel/0.jpg", "val/eel/1.jpg"])
    assert val.class_names == ("cat", "dog", "eel")
    assert "val: no images of cat, dog, which " in caplog.text
    assert val.read(tf.constant(0, tf.int64))["label"] == 2


def test_fingerprint_follows_the_files_not_their_place(tmp_path):
    here = make_folder(tmp_path / "here", TEN_EACH)
    there = shutil.copytree(here, tmp_path / "there")
    assert folder(here).fingerprint == folder(there).fingerprint != folder(here, "val").fingerprint
    assert names(folder(here, "val")) == names(folder(there, "val"))
    (there / "cat/0.jpg").write_bytes(b"another size")
    (there / "cat/1.jpg").write_bytes(b"another size")  # at least one of them is in train
    assert folder(here).fingerprint != folder(there).fingerprint


def test_each_image_is_looked_up_on_the_disk_once(tmp_path, monkeypatch):
    make_folder(tmp_path, TEN_EACH)
    stat, looked_up = os.stat, collections.Counter()

    def count(path, *args, **kwargs):
        looked_up[os.fspath(path)] += 1
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", count)
    folder(tmp_path)
    assert [n for path, n in looked_up.items() if path.endswith(".jpg")] == [1] * 30


def refused(root, *words, **fields):
    with refused_with(*words):
        folder(root, **fields)


def test_what_is_no_image_folder_is_refused(tmp_path):
    refused(None, "data.data_dir=None")
    refused(tmp_path / "absent", "data.data_dir", "absent", "is not a local folder")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    refused(tmp_path, "0 class folders", "at least 2", "unlabelled")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1.jpg").write_bytes(encode(smooth_image()))
    refused(tmp_path, "train has 0 class folders")
    make_folder(tmp_path, {"cat": 1})  # train was meant as a class
    refused(tmp_path, "train has 0 class folders", "found 1 .jpg")


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


def test_links_are_followed_and_not_round_and_round(tmp_path, caplog):
    make_folder(tmp_path / "elsewhere", {"more": 3})
    root = make_folder(tmp_path / "pets", {"cat": 20, "dog": 10})
    (root / "cat" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "around").symlink_to(root)
    assert folder(root).class_names == ("cat", "dog")
    assert folder(root).num_examples + folder(root, "val").num_examples == 33
    (root / "dog/also.jpg").symlink_to(root / "dog/0.jpg")
    os.link(root / "cat/1.jpg", root / "dog/a_cat.jpg")
    folder(root)
    assert "2 images count several times, by links" in caplog.text
    assert "1 images have several labels, by links: dog/a_cat.jpg is cat/1.jpg" in caplog.text


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
    refused(tmp_path / "without", "Test/ and valid/", "no train/", "(found cat)")


def test_folders_beside_the_splits_are_named(tmp_path, caplog):
    for name in ("train", "val", "extra", "unsorted"):
        make_folder(tmp_path / name, TEN_EACH)
    folder(tmp_path)
    assert any("ignored these folders: extra, unsorted" in m for m in caplog.messages)


def test_images_without_classes(tmp_path):
    make_folder(tmp_path, {"holiday": 10, "deep/er": 9})
    (tmp_path / "flat.jpg").write_bytes(encode(smooth_image()))
    (tmp_path / "flat.heic").write_bytes(b"")
    fields = {"data_dir": tmp_path, "image_size": (16, 16)}
    source = make_source("unlabelled", split="train", **fields)
    assert source.num_examples == 20 and "flat.jpg" in names(source)
    assert source.class_names is None
    with at_fault("data.split"):
        make_source("unlabelled", split="val", **fields)
    (empty := tmp_path / "empty").mkdir()
    with at_fault("data.data_dir"):
        make_source("unlabelled", split="train", data_dir=empty, image_size=(8, 8))


def test_pseudo_labels_keep_the_images_that_were_labelled(tmp_path):
    root = make_folder(tmp_path / "images", {"cat": 10, "dog": 10})
    labelled = folder(root, divider=(divider := Divider(anew=True)))
    facts = {"name": "folder", "split": "train", "data_dir": str(root), "class_names": None,
             "num_classes": None, "num_examples": None, "of_model": 3, "loss": "softmax",
             "fingerprint": labelled.fingerprint}  # fmt: skip
    numbers = np.arange(labelled.num_examples)
    stored = PseudoLabels(numbers, numbers % 3, facts, Division(divider.decided).to_bytes())
    (tmp_path / "labels.npz").write_bytes(stored.to_bytes())
    make_folder(root, {"ant": 5})
    pseudo = make_source("pseudo", split=str(tmp_path / "labels.npz"), image_size=(16, 16))
    assert names(pseudo) == names(labelled)


def test_a_run_without_labels_leaves_the_folder_s_own_division(tmp_path, caplog):
    root = make_folder(tmp_path, {"cat": 10, "dog": 10})

    def unlabelled(divider):
        source = make_source(
            "unlabelled", split="train", data_dir=root, image_size=(16, 16), divider=divider
        )
        return {*names(source)}

    everything = unlabelled(divider := Divider(anew=True))
    assert len(everything) == 20
    known = Division(divider.decided, unlabelled=True)
    caplog.set_level("INFO", logger="vit_jax")
    assert names(folder(root, "val", divider=Divider(known, "run"))) == names(folder(root, "val"))
    assert [r.levelname for r in caplog.records] == ["INFO"], caplog.messages
    assert "run trained on all of these images, without labels; val is a tenth" in caplog.text
    (root / "cat/new.jpg").write_bytes((root / "cat/0.jpg").read_bytes())
    assert unlabelled(Divider(known, "run")) == everything
    held = {*names(folder(root, "val"))}
    assert not held & unlabelled(Divider(Division({name: "val" for name in held}), anew=True))


def test_a_group_that_is_held_out_in_part_is_held_out_whole():
    files = {str(i): "cat" for i in range(20)}
    splits = divide_anew("", files, {"0": "herd", "1": "herd"}, Division({"0": "val"}))
    assert {name for name, split in splits.items() if split == "val"} == {"0", "1"}


def test_evaluators_divide_other_folders_by_what_the_source_holds_out():
    source = Division({"a": "val", "b": "train"})
    divider = Divider(source, anew=True)
    divider("", {"c": "cat", "d": "cat"}, {})  # the run's own images
    assert divider.settled().holds_out("a") and not divider.settled().holds_out("b")
