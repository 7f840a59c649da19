"""Lists of files and labels: CSV and JSON lines, one label or several, and what is refused."""

import json
import os
import pathlib
import types

import numpy as np
import pytest
from asked import prepare
from at_fault import at_fault, refused_with
from images import encode, smooth_image

from vit_jax.base.errors import InputError
from vit_jax.config.text import load_config
from vit_jax.data import count_labels, image_batch, make_source, match_classes, parse_ops
from vit_jax.data.division import Divider, Division
from vit_jax.data.host_tf import tf
from vit_jax.data.pipeline import host_eval_batches

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CSV = "file,label\na.jpg,cat\nsub/b.png,dog\nc.jpg,cat\n"
GONE = CSV + "gone.jpg,dog\n"
SEVERAL = [("a.jpg", ["cat"]), ("sub/b.png", ["dog", "cat"]), ("c.jpg", [])]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "sub").mkdir()
    for seed, name in enumerate(("a.jpg", "sub/b.png", "c.jpg")):
        file_format = "PNG" if name.endswith("png") else "JPEG"
        (tmp_path / name).write_bytes(encode(smooth_image(seed=seed), file_format))
    return tmp_path


def write(root, text, name="list.csv"):
    (root / name).write_text(text)
    return root / name


def both(data_dir, **fields):
    """{file: label} of train and val together."""
    sources = [
        make_source("list", split=split, data_dir=data_dir, image_size=(16, 16), **fields)
        for split in ("train", "val")
    ]
    return {
        source.record_name(i): source.read(i)["label"].numpy().tolist()
        for source in sources
        for i in range(source.num_examples)
    }


def number_of_all(data_dir):
    return make_source("list", split="all", data_dir=data_dir, image_size=(16, 16)).num_examples


def refused(data_dir, *words, split="train", **fields):
    with refused_with(*words):
        make_source("list", split=split, data_dir=data_dir, image_size=(16, 16), **fields)


def test_one_label_each(root):
    expected = {"a.jpg": 0, "sub/b.png": 1, "c.jpg": 0}
    assert both(write(root, CSV)) == expected
    assert number_of_all(root / "list.csv") == 3
    assert both(write(root, "\ufeff" + CSV.replace("file", "File "))) == expected
    lines = [json.dumps({"file": n, "label": c}) for n, c in
             (("a.jpg", "cat"), (str(root / "sub/b.png"), "dog"), ("c.jpg", "cat"))]  # fmt: skip
    assert both(write(root, "\n".join(lines), "list.jsonl")) == expected
    numbers = write(root, CSV.replace("cat", "10").replace("dog", "9"))
    assert both(numbers) == {"a.jpg": 1, "sub/b.png": 0, "c.jpg": 1}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_several_labels_each(root, suffix):
    if suffix == "csv":
        text = "file,labels\n" + "".join(f"{n},{';'.join(ls)}\n" for n, ls in SEVERAL)
    else:
        text = "".join(json.dumps({"file": n, "labels": ls}) + "\n" for n, ls in SEVERAL)
    path = write(root, text, f"list.{suffix}")
    assert both(path, multi_label=True) == {
        "a.jpg": [1, 0], "sub/b.png": [1, 1], "c.jpg": [0, 0],
    }  # fmt: skip
    refused(path, "no label, or several", ": sub/b.png", "--config=folder:multilabel")
    assert both(path, multi_label=None) == both(path, multi_label=True)
    one_each = write(root, CSV, "one_each.csv")
    assert both(one_each, multi_label=None) == both(one_each)


def test_batches_have_the_labels_of_all_classes(root):
    path = write(root, "file,labels\na.jpg,cat\nsub/b.png,dog;cat\nc.jpg,dog\ngone.jpg,dog\n")
    source = make_source(
        "list", split="train", data_dir=path, image_size=(16, 16), multi_label=True
    )
    one = make_source("list", split="train", data_dir=write(root, GONE, "one.csv"),
                      image_size=(16, 16))  # fmt: skip
    assert sorted(count_labels(one)) == [1, 2]  # no image is read for its label
    shown = {"a.jpg": [1, 0], "sub/b.png": [1, 1], "c.jpg": [0, 1], "gone.jpg": [0, 1]}
    names = [source.record_name(i) for i in range(source.num_examples)]
    np.testing.assert_array_equal(count_labels(source), np.sum([shown[n] for n in names], axis=0))
    ops = parse_ops("decode|resize", (16, 16))[0]
    (batch,) = host_eval_batches(source, image_batch(4, (16, 16), ops), rows=np.arange(4))
    assert batch["label"].shape == (4, 2) and batch["label"].dtype == np.float32
    assert batch["label"].sum() == (batch["mask"][:, None] * batch["label"]).sum()
    matched = match_classes(source, ("dog", "eel", "cat"))
    for i, name in enumerate(names):
        if name != "gone.jpg":
            cat, dog = shown[name]
            assert matched.read(i)["label"].numpy().tolist() == [dog, 0, cat]


def test_soft_labels_count_partly_for_several_classes():
    labels = tf.constant([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    source = types.SimpleNamespace(
        has_label_vectors=True, num_examples=3, num_classes=2, read=lambda i: {"label": labels[i]}
    )
    np.testing.assert_array_equal(count_labels(source), [1.75, 1.25])


def test_all_missing_files_of_a_list_are_named(root):
    rows = [f"gone_{i}.jpg,{'ab'[i]}\n" for i in range(2)]
    path = write(root, CSV + "".join(rows))
    fields = {"data_dir": path, "image_size": (16, 16), "max_corrupt_fraction": 0.1}
    with at_fault("data.data_dir") as error:
        make_source("list", split="train", **fields)  # which has 4 of the 5
    says = f"2 of the 5 images in {path} (40%) are missing"
    assert says in str(error.value) and "gone_0.jpg, gone_1.jpg" in str(error.value)


def test_too_many_missing_images_are_refused(root):
    """Before anything is written or compiled; in a folder of classes too."""
    c = load_config(f"{CONFIGS / 'folder.py'}:list,debug")
    c.data.data_dir = str(write(root, CSV + "".join(f"gone_{i}.jpg,dog\n" for i in range(9))))
    with refused_with("%) are missing", "data.max_corrupt_fraction=0.1: gone_", "or raise"):
        prepare(c, root / "run")
    assert not (root / "run").exists()
    folder = root / "classes"
    for class_name in ("cat", "dog"):
        (folder / class_name).mkdir(parents=True)
        (folder / class_name / "a.jpg").touch()
        (folder / class_name / "b.jpg").symlink_to(root / "nothing")
    fields = {"data_dir": folder, "image_size": (16, 16), "split": "all"}
    for name in ("folder", "unlabelled"):
        with at_fault("data.data_dir"):
            make_source(name, **fields, max_corrupt_fraction=0.4)
        assert make_source(name, **fields, max_corrupt_fraction=0.5).num_examples == 4


def test_a_list_for_each_split(root):
    write(root, CSV, "Train.csv")
    (root / "d.jpg").write_bytes(encode(smooth_image(seed=3)))
    write(root, '{"file": "d.jpg", "label": "dog"}', "valid.jsonl")
    source = make_source("list", split="val", data_dir=root, image_size=(16, 16))
    assert source.num_examples == 1 and source.read(0)["label"] == 1
    refused(root, "data.split='test'", "'train' and 'val'", split="test")
    write(root, "file,label\n./a.jpg,eel\n", "test.csv")
    for split in ("test", "all"):
        refused(root, "a.jpg is in train and in test", split=split)
    write(root, "file,label\ne.jpg,eel\n", "test.csv")
    (root / "e.jpg").write_bytes(encode(smooth_image(seed=4)))
    refused(root, "'eel'", "Train.csv lacks", split="test")
    write(root, CSV, "val.csv")
    refused(root, "val", "keep one")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,label\na.jpg,cat\n", ["columns name, label", "needed", "file"]),
        ("file\na.jpg\n", ["columns file;", "label, labels or caption"]),
        ("file,size\na.jpg,9\n", ["line 2: has '9' for size", "0 or 1"]),
        ("file,labels\na.jpg,cat,dog\n", ["line 2: has 1 more values", "as cat;dog"]),
        ("file,label\n./a.jpg,cat\nsub/../a.jpg,dog\n", ["line 3: a.jpg is listed twice"]),
        ("file,label,split\na.jpg,cat,dev\n", ["'dev'; needed: train, val or test"]),
        ("file,label\na.jpg,cat;dog\n", ["1 image has no label, or several: line 2: a.jpg"]),
        ("file,label\na.jpg,cat\na.jpg,dog\n", ["line 3", "listed twice", "`labels`"]),
        ("file,label\n" + "a.jpg,\n" * 9, ["line 2", "4 lines more"]),
        ("file,label\n", ["no labels"]),
        ("file,label\n\udcff,cat\n", ["'utf-8' codec can't decode"]),
    ],
)
def test_faulty_lines_are_named(root, text, words):
    (root / "list.csv").write_bytes(text.encode(errors="surrogateescape"))
    refused(root / "list.csv", *words)


def test_what_is_no_list_is_refused(root):
    os.mkfifo(root / "pipe.jpg")  # to open it would wait for a writer
    refused(write(root, CSV + "pipe.jpg,dog\n"), "pipe.jpg is no file", split="all")
    refused(None, "data.data_dir=None")
    refused(root / "gone.csv", "no such list", "--config.data.data_dir=PATH")
    refused(root, "train.csv")
    refused(write(root, "", "list.txt"), ".csv or .tsv or .jsonl")
    refused(write(root, "[1]", "list.jsonl"), "no object")
    folder = make_source("synthetic", split="train", image_size=(8, 8), num_classes=2,
                         num_examples=2)  # fmt: skip
    assert not folder.multi_label
    with at_fault("data.multi_label"):
        make_source("digits", split="train", image_size=(8, 8), multi_label=True)


def test_wrong_columns_are_one_fault(root):
    with pytest.raises(InputError) as error:
        make_source("list", split="train", image_size=(8, 8),
                    data_dir=write(root, "file,kind\na.jpg,cat\n", "list.csv"))  # fmt: skip
    assert str(error.value).count("data.data_dir") == 1 and "UTF-8" not in str(error.value)


@pytest.mark.parametrize("header", ["file,label,label", "file,cat,cat"])
def test_a_column_that_is_there_twice_is_refused(root, header):
    """Only one of the two would be read, unless it is one that is not read at all."""
    name = header.split(",")[-1]
    refused(write(root, f"{header}\na.jpg,1,0\n"), f"has the column {name} twice")
    write(root, "file,note,note,label\na.jpg,x,y,cat\nsub/b.png,x,y,dog\nc.jpg,x,y,cat\n")
    assert both(root / "list.csv") == {"a.jpg": 0, "sub/b.png": 1, "c.jpg": 0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "filename,class\na.jpg,cat\nsub/b.png,dog\nc.jpg,cat\n"),
        ("list.csv", "path;label\na.jpg;cat\nsub/b.png;dog\nc.jpg;cat\n"),
        ("list.csv", 'image;labels\na.jpg;"cat"\nsub/b.png;dog\nc.jpg;cat\n'),
        ("list.tsv", "file_name\tlabel\na.jpg\tcat\nsub/b.png\tdog\nc.jpg\tcat\n"),
        ("list.csv", "image,dog,cat\na,0.0,1.0\nsub/b,1.0,0.0\nc,0.0,1.0\n"),
        ("list.csv", "file,label,labels\na.jpg,cat,\nsub/b.png,,dog\nc.jpg,cat,cat\n"),
        ("list.jsonl", '{"file": "a.jpg", "label": ["cat"]}\n'
                       '{"path": "sub/b.png", "labels": "dog"}\n'
                       '{"file": "c.jpg", "label": "cat", "labels": null}'),
    ],
)  # fmt: skip
def test_lists_as_others_write_them(root, name, text):
    assert both(write(root, text, name)) == {"a.jpg": 0, "sub/b.png": 1, "c.jpg": 0}


def test_cells_with_several_labels_and_with_none(root, caplog):
    rows = [("a.jpg", "cat; dog"), ("sub/b.png", [None, "dog"]), ("c.jpg", None)]
    lines = [json.dumps({"file": file, "labels": labels}) for file, labels in rows]
    path = write(root, "\n".join(lines), "list.jsonl")
    expected = {"a.jpg": [1, 1], "sub/b.png": [0, 1], "c.jpg": [0, 0]}
    assert both(path, multi_label=True) == expected
    one_hot = "image,cat,dog\na.jpg,1,1\nsub/b.png,0,1\nc.jpg,0,0\n"
    assert both(write(root, one_hot), multi_label=True) == expected
    by_pandas = "".join(f"{i or ''}, {line}" for i, line in enumerate(one_hot.splitlines(True)))
    assert both(write(root, by_pandas.replace(",", ", ")), multi_label=True) == expected
    write(root, ",image,label\n0,a.jpg,cat\n1,sub/b.png,dog\n2,c.jpg,cat\n")
    assert both(root / "list.csv") and "not read" not in caplog.text
    refused(write(root, '{"file": "a.jpg", "label": {"x": 1}}', "list.jsonl"), "{'x': 1}")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *[("list.csv", line) for line in ("c.jpg,", "c.jpg,-1", "c.jpg, ")],
        *[("list.jsonl", f'{{"file": "c.jpg", "label": {cell}}}') for cell in ("null", '""', "-1")],
    ],
)
def test_an_empty_cell_means_no_label(root, name, line):
    text = "file,label\na.jpg,cat\nsub/b.png,dog\n"
    if name == "list.jsonl":
        text = '{"file": "a.jpg", "label": "cat"}\n{"file": "sub/b.png", "label": "dog"}\n'
    path = write(root, text + line, name)
    assert both(path, multi_label=True) == {"a.jpg": [1, 0], "sub/b.png": [0, 1], "c.jpg": [0, 0]}
    refused(path, "1 image has no label, or several: line", "c.jpg; ", "folder:multilabel")


def test_columns_say_the_split_and_other_columns_are_named(root, caplog):
    text = "file,label,split,size\na.jpg,cat,train,1\nsub/b.png,dog,Training,2\nc.jpg,cat,test,3\n"
    path = write(root, text)
    for split, names in (("train", ["a.jpg"]), ("test", ["c.jpg"])):  # a tenth of train is held out
        source = make_source("list", split=split, data_dir=path, image_size=(16, 16))
        assert [source.record_name(i) for i in range(source.num_examples)] == names or (
            split == "train" and source.num_examples == 1
        )
        assert source.class_names == ("cat", "dog")
    assert any("these columns are not read: size" in m for m in caplog.messages)
    write(root, text.replace("test", "valid"))
    assert len(both(path)) == 3
    known = Divider(Division({"a.jpg": "train", "c.jpg": "train"}), "runs/a")  # c.jpg moved since
    make_source("list", split="val", data_dir=path, image_size=(16, 16), divider=known)
    assert "list.csv, val: runs/a was trained on 1 of these images: c.jpg" in caplog.text
    refused(path, "'train' and 'val' and 'all'", split="test")


def test_the_images_of_a_group_are_held_out_together(root):
    rows = [f"{i}.jpg,{'cat' if i % 2 else 'dog'},patient {i // 4}" for i in range(80)]
    for i in range(80):
        (root / f"{i}.jpg").write_bytes(b"")
    path = write(root, "file,label,group\n" + "\n".join(rows) + "\n")
    val = make_source("list", split="val", data_dir=path, image_size=(16, 16))
    patients = {int(val.record_name(i).removesuffix(".jpg")) // 4 for i in range(val.num_examples)}
    assert val.num_examples == 8 and len(patients) == 2


def test_absolute_paths_in_a_linked_folder(root, tmp_path):
    (real := tmp_path / "deep/er/lists").mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    write(real, f"file,label\n{root / 'a.jpg'},cat\n../../../c.jpg,dog\n{root / 'sub/b.png'},cat\n")
    source = make_source(
        "list", split="all", data_dir=tmp_path / "link/list.csv", image_size=(8, 8)
    )
    assert all(source.read(i)["image"].numpy() for i in range(3))


def test_links_to_one_image_are_named_and_held_out_together(root, caplog):
    for i in range(20):
        (root / f"{i}.jpg").write_bytes(encode(smooth_image(seed=i)))
        (root / f"link{i}.jpg").symlink_to(root / f"{i}.jpg")
    rows = [f"{name}{i}.jpg,cat" for i in range(20) for name in ("", "link")]
    path = write(root, "file,label\n" + "\n".join(rows).replace("link7.jpg,cat", "link7.jpg,dog"))
    val = make_source("list", split="val", data_dir=path, image_size=(16, 16))
    held = [val.record_name(i).removeprefix("link") for i in range(val.num_examples)]
    assert len(held) == 4 and len({*held}) == 2
    said = "\n".join(caplog.messages)
    assert "20 images count several times, by links: link0.jpg is 0.jpg" in said
    assert "1 images have several labels, by links: link7.jpg is 7.jpg" in said


def test_a_group_in_two_splits_is_refused(tmp_path):
    lines = ["file,label,split,group", "0.png,a,train,g", "1.png,b,train,h", "2.png,a,test,g"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    with at_fault("data.data_dir"):
        make_source("list", split="train", data_dir=tmp_path / "list.csv", image_size=(16, 16))


def test_groups_that_share_a_image_are_one(root):
    """A link joins the groups of the column, and a group the files of all its links."""
    for i in range(30):
        (root / f"{i}.jpg").write_bytes(encode(smooth_image(seed=i)))
        (root / f"link{i}.jpg").symlink_to(root / f"{i}.jpg")
    rows = [
        f"{i}.jpg,cat,{i // 3}\nlink{i}.jpg,cat,{'' if i % 3 == 0 else i // 3 + 100}"
        for i in range(30)
    ]
    path = write(root, "file,label,group\n" + "\n".join(rows))
    splits = {}
    for split in ("train", "val"):
        source = make_source("list", split=split, data_dir=path, image_size=(16, 16))
        splits |= {source.record_name(i): split for i in range(source.num_examples)}
    for i in range(30):
        assert splits[f"{i}.jpg"] == splits[f"link{i}.jpg"] == splits[f"{i // 3 * 3}.jpg"]


def test_new_labels_of_a_run_s_lists_are_left_out(root, caplog):
    for i in range(20):
        (root / f"{i}.jpg").write_bytes(b"")
    rows = "\n".join(f"{i}.jpg,{'cd'[i % 2]}" for i in range(15))
    write(root, f"file,label\n{rows}\n", "train.csv")
    write(root, "file,label\n15.jpg,c\n16.jpg,d\n", "test.csv")
    make_source("list", split="train", data_dir=root, image_size=(8, 8),
                divider=(divider := Divider(anew=True)))  # fmt: skip
    write(root, f"file,label\n{rows}\n17.jpg,a\n", "train.csv")
    write(root, "file,label\n15.jpg,c\n16.jpg,d\n18.jpg,a\n", "test.csv")
    test = make_source("list", split="test", data_dir=root, image_size=(8, 8),
                       divider=Divider(divider.settled()))  # fmt: skip
    assert test.class_names == ("c", "d") and test.num_examples == 2
    assert "left out 1 images of classes that the run did not begin with: a" in caplog.text
