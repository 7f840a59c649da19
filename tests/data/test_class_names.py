"""Names of classes in every source: their order, their spelling, and what labels mean."""

import json
import unicodedata

import pytest
from images import encode, make_folder, smooth_image
from table_files import make_table, write_parquet
from tar_files import write_tar

from vit_jax.base.errors import InputError
from vit_jax.config import SplitKey
from vit_jax.data import Divider, make_source, read_labels
from vit_jax.data.class_names import as_label, number_labels, read_names, sorted_classes
from vit_jax.run.setup.matching import say_places
from vit_jax.run.setup.sources import _match_own

IMAGE = encode(smooth_image(16, 16), "PNG")
COMPOSED, APART = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def open_of(kind, root, labels, names=None, **fields):
    """A source of that kind of one image for each of `labels`."""
    images = [f"{i}.png" for i in range(len(labels))]
    if kind == "tar":
        cells = [(f"{i}.json", json.dumps({"label": c}).encode()) for i, c in enumerate(labels)]
        write_tar(root / "train.tar", [*((name, IMAGE) for name in images), *cells])
    elif kind == "parquet":
        write_parquet(make_table([IMAGE] * len(labels), labels), root / "train.parquet")
    elif kind == "folder":
        for name, label in zip(images, labels, strict=True):
            (root / str(label)).mkdir(exist_ok=True)
            (root / str(label) / name).write_bytes(IMAGE)
    else:
        rows = [{"file": n, "labels": c} for n, c in zip(images, labels, strict=True)]
        (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        [(root / name).write_bytes(IMAGE) for name in images]
    if names is not None:
        root.mkdir(exist_ok=True)
        (root / "classes.txt").write_bytes(names.encode())
    fields.setdefault("split", "all")
    return make_source(kind, data_dir=str(root), image_size=(16, 16), **fields)


def read(source):
    return read_labels(source, 0, source.num_examples).tolist()


@pytest.mark.parametrize("kind", ["folder", "list", "tar", "parquet"])
def test_numbers_sort_as_numbers_unless_the_model_knows_another_order(kind, tmp_path):
    labels = [str(i) for i in range(12)]
    source = open_of(kind, tmp_path, labels)
    assert source.class_names == tuple(labels) and sorted(read(source)) == [*range(12)]
    as_text = sorted(labels)
    before = open_of(kind, tmp_path, labels, divider=Divider(anew=True, class_names=as_text))
    assert before.class_names == tuple(as_text)
    assert [as_text[i] for i in read(before)] == [labels[i] for i in read(source)]


def test_the_order_of_classes():
    assert sorted_classes(["0010", "2", "0001"]) == ("0001", "2", "0010")
    assert sorted_classes(["10", "9", "cat"]) == ("10", "9", "cat")
    assert sorted_classes(["10", "9", "b", "a"], ["b", "x"]) == ("b", "10", "9", "a")
    assert sorted_classes(["0", "1"], ["0.0", "1.0"]) == ("0.0", "1.0")  # of version 0.2.0


@pytest.mark.parametrize("kind", ["folder", "list", "tar", "parquet"])
def test_one_name_however_it_is_composed(kind, tmp_path):
    source = open_of(kind, tmp_path, [COMPOSED, "dog", APART])
    assert source.class_names == (COMPOSED, "dog") and sorted(read(source)) == [0, 0, 1]
    known = open_of(
        kind, tmp_path, [COMPOSED, "dog", APART], divider=Divider(anew=True, class_names=[APART])
    )
    assert known.class_names == (APART, "dog") and read(known) == read(source)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_numbers_of_classes_whose_names_are_numbers(kind, tmp_path):
    source = open_of(kind, tmp_path, [0, 1, 2, 3], "\ufeff1\r\n2\r\n3\r\n4\r\n\r\n")
    assert source.class_names == ("1", "2", "3", "4") and read(source) == [0, 1, 2, 3]
    assert read(open_of(kind, tmp_path / "names", [4, 1], "1\n2\n3\n4\n")) == [3, 0]
    with pytest.raises(InputError, match="the label 1 may be the class of this name"):
        open_of(kind, tmp_path / "both", [1, 2, 3], "1\n2\n3\n4\n")


@pytest.mark.parametrize("kind", ["list", "tar", "parquet"])
def test_minus_1_is_no_label_and_1_point_0_is_1(kind, tmp_path):
    labels = [1.0, 2.0, -1.0] if kind == "parquet" else [1, 2.0, -1]
    source = open_of(kind, tmp_path, labels, multi_label=True)
    assert source.class_names == ("1", "2")
    assert sorted(source.read(i)["label"].numpy().sum() for i in range(3)) == [0, 1, 1]


def test_an_index_of_version_0_2_0_with_points_is_made_anew(tmp_path):
    open_of("tar", tmp_path, [1, 2.0])
    index = tmp_path / ".vit_jax/train.tar.index"
    head, rest = index.read_bytes().split(b"\n", 1)
    old = json.loads(head) | {"names": ["1", "2.0"]}
    del old["whole"]
    index.write_bytes(json.dumps(old).encode() + b"\n" + rest)
    source = make_source("tar", split="train", data_dir=str(tmp_path), image_size=(16, 16))
    assert source.class_names == ("1", "2")


@pytest.mark.parametrize("text, line", [("a\n\nb\n", 2), ("a\nb\na\n", 3), ("\na\n", 1),
                                        (f"{APART}\nb\n{COMPOSED}", 3)])  # fmt: skip
def test_empty_and_double_names_are_refused(text, line):
    with pytest.raises(InputError, match=f"classes.txt, line {line}: "):
        read_names(text, "classes.txt")


@pytest.mark.parametrize("value", [0.5, -2, {}, True])
def test_what_is_no_label(value):
    with pytest.raises(ValueError, match="needed: text, a whole number"):
        as_label(value)


@pytest.mark.parametrize(
    ("value", "label"), [("3.0", "3"), (" 3 ", "3"), ("-1", None), ("-1.0", None), ("v1.0", "v1.0")]
)
def test_numbers_in_text_as_pandas_writes_them(value, label):
    assert as_label(value) == label


def test_words_and_numbers_among_labels():
    def read(labels, names):
        return number_labels("data", labels, names, "classes.txt", counted=True)

    assert read(["cat", "1"], ("cat", "dog")) == {"cat": 0, "1": 1}
    assert read(["cat", "1"], ("1", "cat")) == {"cat": 1, "1": 0}
    assert read(["1", "0"], ("0", "1")) == {"0": 0, "1": 1}
    for labels, names in ((["0", "2"], ("a", "b")), (["2", "3"], ("1", "2")), (["0", "4"], "1234")):
        with pytest.raises(InputError, match=r"has the labels .*, which classes.txt lacks"):
            read(labels, (*names,))


@pytest.mark.parametrize(
    "names, level, said",
    [(("0", "1", "2"), "INFO", "'0' is output 0, '2' is output 2"),
     (("1", "2", "3"), "WARNING", "'1' is output 0, '2' is output 1; accuracy is meaningful only"),
     (("cat", "dog"), "INFO", "'cat' is output 0, 'dog' is output 1")],
)  # fmt: skip
def test_a_match_by_place_is_said(names, level, said, caplog):
    with caplog.at_level("INFO", "vit_jax"):
        say_places("evals.val", names, "model.npz")
    (record,) = caplog.records
    assert (record.levelname, said in record.message) == (level, True)


def test_numbers_from_0_are_the_outputs_of_a_model_with_other_names(tmp_path):
    root = make_folder(tmp_path, {str(i): 1 for i in range(11)})
    how = {"data_dir": str(root), "image_size": (16, 16)}
    source = make_source("folder", split="all", **how)
    key = SplitKey("folder", "all", str(root))
    words = [f"word {i}" for i in range(11)]
    assert _match_own(source, key, words, False, "data.data_dir") is source
    with pytest.raises(InputError, match=r"are none of the model.s"):
        _match_own(source, key, words[1:], False, "data.data_dir")


@pytest.mark.parametrize("kind", ["tar", "parquet", "folder"])
def test_numbers_of_some_classes_are_outputs_of_the_model(kind, tmp_path):
    source = open_of(kind, tmp_path, ["3", "0", "3"])
    key = SplitKey(kind, "train", str(tmp_path))
    labels = read_labels(source, 0, 3)
    for names in (["bird", "cat", "dog", "fish"], [f"LABEL_{i}" for i in range(4)]):
        found = _match_own(source, key, names, False, "data.data_dir")
        assert found.class_names == tuple(names)
        assert read_labels(found, 0, 3).tolist() == [3 if label else 0 for label in labels]
        assert _match_own(source, key, names, True, "data.data_dir") is source
    with pytest.raises(InputError, match=r"'3' are none .*; .* number them from 0 to 2"):
        _match_own(source, key, ["bird", "cat", "dog"], False, "data.data_dir")
    with pytest.raises(InputError, match=r"'0' are none"):  # 3 is a name, so numbers may be names
        _match_own(source, key, ["1", "2", "3", "4"], False, "data.data_dir")
