"""Captions: the same tokens from every source, on any host; what cannot be used is named."""

import contextlib
import csv
import dataclasses
import functools
import json
import tempfile
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from at_fault import at_fault
from etils import epath
from fake_hub import COMMITS, served
from images import encode, smooth_image
from PIL import Image
from prepared import flip_a_byte, prepare
from table_files import make_table, save_to_disk, write_parquet
from tar_files import write_tar

from vit_jax.base.errors import InputError
from vit_jax.config.sections import Data
from vit_jax.data import concatenate, image_batch, keep_subset, make_source, parse_ops
from vit_jax.data.captions import (
    digest_of,
    keep_tokenizer,
    kept_tokenizer,
    look_at,
    open_tokenizer,
    read_kept,
    with_texts,
)
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.pipeline import host_batches
from vit_jax.data.sources import arrays, tables
from vit_jax.data.sources import tfds as tfds_data
from vit_jax.data.tokenizers import TokenizerFiles

SIZE, LENGTH, SEED = (16, 16), 9, 3
CAPTIONS = [
    ["a red dot", "two dots, one red", "dots"],
    ['says "hello, world"'],
    ["line one\nline two", "one line"],
    ["Grüße aus Köln", "greetings"],
    ["一只猫", "a cat"],
    ["a; b; c", "7"],
    ["12"],
    ["a grey square"],
    ["UPPER and lower", "lower"],
    ["it's a dog's life", "a dog", "dogs", "one more dog"],
    ["tab\there"],
    ["a very long text about nothing at all that goes on and on until it is cut"],
]
PIXELS = np.stack([smooth_image(*SIZE, seed) for seed in range(12)])
PIXELS[7] = PIXELS[7][..., :1]  # grey
FILES = [encode(image, "PNG", "L" if i == 7 else None) for i, image in enumerate(PIXELS)]
FIRST = [[texts[0]] for texts in CAPTIONS]


@contextlib.contextmanager
def refused(key, says):
    with at_fault(key) as error:
        yield
    assert says in str(error.value)


def data(**changes):
    return dataclasses.replace(Data.read({"text_length": LENGTH})[0], **changes)


def open_source(name, split="train", **fields):
    how = {"image_size": SIZE, "multi_label": False, "captions": True} | fields
    return make_source(name, split=split, **how)


def given(split):
    with arrays.give({"train": split}):
        return open_source("arrays")


def of_tar(root, captions):
    if captions == FIRST:
        texts = [("txt", texts[0].encode()) for texts in captions]
    else:
        texts = [("json", json.dumps({"caption": texts}).encode()) for texts in captions]
    members = [(f"{i}.png", image) for i, image in enumerate(FILES)]
    texts = [(f"{i}.{end}", content) for i, (end, content) in enumerate(texts)]
    both = [member for pair in zip(members, texts, strict=True) for member in pair]
    write_tar(root / "train-0.tar", both[:10])
    write_tar(root / "train-1.tar", both[10:])
    return open_source("tar", data_dir=str(root))


def table_of(captions):
    table = make_table(FILES, pa.array([0] * 12)).drop(["label"])
    plain = [texts[0] for texts in captions] if captions == FIRST else captions
    return table.append_column("text", pa.array(plain))


def of_parquet(root, captions):
    write_parquet(table_of(captions), root / "train.parquet", rows=5)
    return open_source("parquet", data_dir=str(root))


def of_arrow(root, captions):
    save_to_disk({"train": table_of(captions)}, root)
    return open_source("arrow", data_dir=str(root))


def write_files(root):
    root.mkdir(parents=True)
    for i, image in enumerate(FILES):
        (root / f"{i}.png").write_bytes(image)


def of_csv(root, captions):
    write_files(root)
    with open(root / "list.csv", "w", newline="") as file:
        rows = [(f"{i}.png", text) for i, texts in enumerate(captions) for text in texts]
        csv.writer(file).writerows([("file", "caption"), *rows])
    return open_source("list", "all", data_dir=str(root / "list.csv"))


def of_json_lines(root, captions):
    write_files(root)
    rows = [{"file": f"{i}.png", "captions": texts} for i, texts in enumerate(captions)]
    (root / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return open_source("list", "all", data_dir=str(root / "list.jsonl"))


def of_columns(root, captions):
    return given({"image": PIXELS, "caption": captions})


def of_items(root, captions):
    rows = zip(FILES, captions, strict=True)
    return given([{"img": image, "captions": texts} for image, texts in rows])


def of_npz(root, captions):
    root.mkdir(parents=True)
    texts = np.array([texts[0] for texts in captions])
    np.savez(root / "a.npz", train_images=PIXELS, train_captions=texts)
    return open_source("arrays", data_dir=str(root / "a.npz"))


def of_tfds(reader, nested):
    def make(root, captions):
        feature = tfds.features.Text()
        texts = [texts[0] for texts in captions]
        if captions != FIRST:
            feature = tfds.features.Sequence({"text": feature} if nested else feature)
            texts = [{"text": texts} for texts in captions] if nested else captions
        features = {"image": tfds.features.Image(shape=(None, None, 3)), "captions": feature}
        rows = zip(PIXELS, texts, strict=True)
        examples = [{"image": image, "captions": text} for image, text in rows]
        prepare(root, "told", features, examples, examples_per_shard=5)
        return open_source("told", data_dir=str(root), reader=reader)

    return make


EVERY = {
    "arrow": of_arrow,
    "columns": of_columns,
    "csv": of_csv,
    "items": of_items,
    "json lines": of_json_lines,
    "parquet": of_parquet,
    "tar": of_tar,
    "tfds in memory": of_tfds("memory", nested=False),
    "tfds on the disk": of_tfds("offsets", nested=True),
}


def with_tokenizer(source, root, **changes):
    tokenizer, contents = open_tokenizer(data(**changes), epath.Path(root), source)
    return dataclasses.replace(source, tokenizer=tokenizer), contents


def batches(source, rows=range(5), steps=range(4, 8), seed=SEED, **how):
    spec = image_batch(5, SIZE, parse_ops("decode|resize", SIZE)[0])
    spec = dataclasses.replace(spec, text=source.tokenizer.facts)
    return list(host_batches(source, spec, steps=steps, rows=np.array(rows), seed=seed, **how))


def one_pass(source):
    """Batches of all 12 records, in their order; padded as in evaluation."""
    return batches(source, steps=range(3), data_order=lambda i: tf.where(i < 12, i, -1))


@functools.cache
def expected(which):
    """(captions, files of the tokenizer, training batches, one pass) of pixels in memory."""
    captions = {"first": FIRST, "all": CAPTIONS}[which]
    with tempfile.TemporaryDirectory() as folder:
        source, contents = with_tokenizer(of_columns(None, captions), folder)
    return captions, contents, batches(source), one_pass(source)


# One caption each has a form of its own in some sources.
EACH = [*((name, "all") for name in EVERY),
        *((name, "first") for name in ("npz", "parquet", "tar", "tfds in memory"))]  # fmt: skip


@pytest.mark.parametrize(("name", "which"), EACH)
def test_every_source_gives_the_same_tokens_to_any_host_from_any_step(name, which, tmp_path):
    captions, contents, trained, in_order = expected(which)
    source = (EVERY | {"npz": of_npz})[name](tmp_path / "data", captions)
    source, own = with_tokenizer(source, tmp_path)
    assert own == contents and source.class_names is None
    of_a_host = batches(source, range(1, 5, 2), range(5, 8))
    for batch, part in zip(trained[1:], of_a_host, strict=True):
        assert all(np.array_equal(part[key], batch[key][1::2]) for key in batch)
    for ours, theirs in zip(one_pass(source), in_order, strict=True):
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


def test_a_caption_is_drawn_by_seed_and_position(tmp_path):
    source, _ = with_tokenizer(of_columns(None, CAPTIONS), tmp_path)
    drawn = set()
    for step, batch in enumerate(batches(source, steps=range(40))):
        for row, record in enumerate(batch["id"]):
            texts = CAPTIONS[record]
            which = np.random.Philox(key=[SEED, 5 * step + row]).random_raw() % len(texts)
            drawn.add((record, int(which)))
            assert np.array_equal(batch["text"][row], source.tokenizer([texts[which]])[0])
    assert len(drawn) == sum(map(len, CAPTIONS))
    last = one_pass(source)[-1]  # 12 records in batches of 5
    assert last["text_mask"].tolist() == last["mask"].tolist() == [1, 1, 0, 0, 0]
    assert np.array_equal(last["text"][:2], source.tokenizer(["tab\there", FIRST[11][0]]))


BAD = [
    ["a dot"], [], ["", "..."], [b"\xff\xfe"], ["two</s>dots"], ["many dots and many more of them, "
    "and more"], ["", "a dot"], [None], [b"\xef\xbb\xbfa dot"], ["\ud800"], ["dots"], ["a"],
]  # fmt: skip


def test_unusable_captions_are_counted_named_and_masked(tmp_path):
    source, _ = with_tokenizer(of_columns(None, BAD), tmp_path)
    _, faults = look_at(source)
    assert faults == (
        "arrays train: 2 missing (item 1 of train, item 7 of train); 3 empty (item 2 of train, "
        "item 6 of train); 2 not UTF-8 (item 3 of train, item 9 of train); 1 with a special token "
        "(item 4 of train); 1 cut to 8 tokens (item 5 of train); images without another caption "
        "are left out"
    )
    found = {}
    for batch in one_pass(source):
        shown = zip(batch["id"], batch["text"], batch["text_mask"], batch["mask"], strict=True)
        found |= {record: row for record, *row in shown if record >= 0}
    good = [i for i in found if found[i][1]]
    assert good == [0, 5, 6, 8, 10, 11] and all(mask for _, _, mask in found.values())
    assert np.array_equal(found[6][0], found[0][0]) and np.array_equal(found[8][0], found[0][0])
    assert found[5][0][-1] == source.tokenizer.facts.end_id  # which is never cut
    assert np.array_equal(found[1][0], source.tokenizer([""])[0])
    with refused("data.tokenizer", "none can be trained on the captions"):
        with_tokenizer(of_columns(None, [[]] * 12), tmp_path)


def test_other_captions_have_another_digest(tmp_path):
    source, _ = with_tokenizer(of_columns(None, FIRST), tmp_path)
    other = of_columns(None, [*FIRST[:-1], ["short"]])
    other = dataclasses.replace(other, tokenizer=source.tokenizer)
    assert look_at(source)[0] == look_at(source)[0] != look_at(other)[0]
    texts = np.array([texts[0] for texts in FIRST])  # whatever NumPy calls them
    same = dataclasses.replace(of_columns(None, texts), tokenizer=source.tokenizer)
    assert look_at(same)[0] == look_at(source)[0]


def test_parts_and_mixtures_keep_captions_and_all_must_have_some(tmp_path):
    whole = of_columns(None, CAPTIONS)
    part = keep_subset(whole, "5")
    assert [*part.captions([*range(5)])] == [
        CAPTIONS[int(part.record_name(i).split()[1])] for i in range(5)
    ]
    mixed = concatenate([whole, part])
    assert [*mixed.captions([12, 3])] == [*part.captions([0]), CAPTIONS[3]]
    with refused("data.mix", "arrays and arrays differ in whether images have captions"):
        concatenate([whole, given({"image": PIXELS})])
    with refused("data.text_length", "has no captions"):
        with_tokenizer(given({"image": PIXELS}), tmp_path)


def test_a_mixture_has_no_labels_if_a_part_has_none(tmp_path):
    named = {"image": PIXELS, "label": [i % 2 for i in range(12)], "caption": CAPTIONS}
    parts = [given({"image": PIXELS, "caption": CAPTIONS}), given(named)]
    assert parts[1].num_classes == 2
    files = {"image": FILES, "label": named["label"], "caption": CAPTIONS}
    for one in (parts, [given(f) for f in (files, {k: files[k] for k in ("image", "caption")})]):
        mixed = concatenate(one)
        assert mixed.class_names is None and mixed.num_classes == 1
        mixed, _ = with_tokenizer(mixed, tmp_path)
        assert not any(batch["label"].any() for batch in batches(mixed, steps=range(5)))


def test_few_labels_beside_captions_do_not_count():
    some = [0] * 11 + [None]
    assert given({"image": PIXELS, "label": some, "caption": CAPTIONS}).class_names is None
    with arrays.give({"train": {"image": PIXELS, "label": some}}), at_fault("data['train']"):
        open_source("arrays", captions=False)


def test_captions_of_tfds_stay_unless_they_are_too_many(tmp_path, monkeypatch):
    source = of_tfds("offsets", nested=True)(tmp_path, CAPTIONS)
    flip_a_byte(tmp_path / "told/1.0.0/told-train.tfrecord-00000", 3)
    expected = [[text.encode() for text in CAPTIONS[i]] * (i != 3) for i in (3, 3, 9, 4, 9)]
    assert [*source.captions([3, 3, 9, 4, 9])] == expected
    with monkeypatch.context() as patch:
        patch.setattr(tfds_data, "stored_values", None)  # they stay
        assert [*source.captions([9, 3])] == [expected[2], []]
    monkeypatch.setattr(tfds_data, "_KEPT", 11)
    assert [*source.captions([3, 3, 9, 4, 9])] == expected


def test_a_damaged_group_of_captions_is_named(tmp_path, monkeypatch, caplog):
    source = of_parquet(tmp_path, FIRST)

    broken = Mock(side_effect=OSError("not Parquet"))
    monkeypatch.setattr(tables._kept, "get", broken)
    assert [*source.captions([6, 7])] == [[], []]
    said = "train.parquet: the captions of its row group 1 cannot be read: not Parquet; copy"
    assert caplog.text.count(said) == 1


def test_a_text_of_a_tar_file_is_a_label_only_where_captions_are_not_read(tmp_path):
    texts = [(f"{i}.txt", b"cat" if i % 2 else b"dog") for i in range(12)]
    members = [(f"{i}.png", image) for i, image in enumerate(FILES)]
    write_tar(tmp_path / "train.tar", [*members, *texts])
    labelled = open_source("tar", data_dir=str(tmp_path), captions=False)
    assert labelled.class_names == ("cat", "dog") and labelled.captions is None
    told = open_source("tar", data_dir=str(tmp_path))
    assert told.class_names is None and [*told.captions([3])] == [[b"cat"]]
    # Indexes of earlier versions have no captions.
    index = tmp_path / ".vit_jax/train.tar.index"
    head, rest = index.read_bytes().split(b"\n", 1)
    old = json.loads(head)
    old["sizes"] = old["sizes"][:3]
    size = len(rest) - rest.index(b'{"keys"')
    rest = rest[: 12 * (20 + 4 + 4)] + rest[-size:]
    index.write_bytes(json.dumps(old).encode() + b"\n" + rest)
    written = index.read_bytes()
    assert open_source("tar", data_dir=str(tmp_path), captions=False).class_names == ("cat", "dog")
    assert index.read_bytes() == written
    assert [*open_source("tar", data_dir=str(tmp_path)).captions([3])] == [[b"cat"]]


def test_labels_count_if_each_image_has_one(tmp_path):
    write_files(tmp_path / "d")
    rows = [{"file": f"{i}.png", "caption": "a", "label": "xy"[i % 2]} for i in range(12)]
    file = tmp_path / "d/list.jsonl"
    for labels in (2, 0):
        file.write_text("\n".join(map(json.dumps, rows)))
        assert open_source("list", "all", data_dir=str(file)).num_classes == max(labels, 1)
        rows[3].pop("label", None)
    with pytest.raises(InputError, match="1 image has no label, or several: line 4"):
        open_source("list", "all", data_dir=str(file), captions=False)


def test_a_column_that_holds_no_text_is_refused(tmp_path):
    table = make_table(FILES, pa.array([0] * 12)).append_column("caption", pa.array([*range(12)]))
    write_parquet(table, tmp_path / "train.parquet")
    with refused("data.caption_column", "has there int64; needed: text, or lists of text"):
        open_source("parquet", data_dir=str(tmp_path))
    with at_fault("data.caption_column"):
        open_source("parquet", data_dir=str(tmp_path), own={"caption_column": "told"})


def test_bytes_that_are_no_text_in_a_column_of_text(tmp_path):
    wrong = pa.Array.from_buffers(
        pa.string(), 12, pa.array([b"\xff" if i == 2 else b"a" for i in range(12)]).buffers()
    )
    table = make_table(FILES, pa.array([0] * 12)).append_column("caption", wrong)
    write_parquet(table, tmp_path / "train.parquet")
    source = open_source("parquet", data_dir=str(tmp_path))
    assert [*source.captions([1, 2])] == [[b"a"], [b"\xff"]]


def test_a_run_goes_on_only_with_its_own_tokenizer(tmp_path, golden):
    source = of_columns(None, FIRST)
    _, contents = with_tokenizer(source, tmp_path)
    digest = digest_of(contents)
    assert len(digest) == 32 and digest != digest_of(contents | {"spiece.model": b""})
    with refused("data.tokenizer", "the run began with is missing"):
        with_tokenizer(source, tmp_path, vocabulary_digest=digest)
    keep_tokenizer(epath.Path(tmp_path), contents)
    changed = of_columns(None, CAPTIONS)
    assert with_tokenizer(changed, tmp_path, vocabulary_digest=digest)[1] == contents
    siglip = golden / "tokenizer_siglip"
    for name in (siglip, siglip / "spiece.model"):
        given, theirs = with_tokenizer(source, tmp_path, tokenizer=str(name))
        assert theirs == TokenizerFiles(siglip, LENGTH).contents
        assert given.tokenizer.facts.pad_id == 1
    kept = data(vocabulary_digest=digest, tokenizer="hf:org/gone")  # the hub is not asked again
    assert open_tokenizer(kept, epath.Path(tmp_path), source, "hf:org/gone")[1] == contents
    size = given.tokenizer.vocabulary
    with refused("data.tokenizer", "the run began with another tokenizer"):
        with_tokenizer(source, tmp_path, tokenizer=str(siglip), vocabulary_digest=digest)
    with refused("data.vocabulary", f"has {size} token ids"):
        with_tokenizer(source, tmp_path, tokenizer=str(siglip), vocabulary=size - 1)


def test_a_new_run_takes_no_files_that_a_killed_start_left(tmp_path, golden):
    siglip, clip = (golden / f"tokenizer_{name}" for name in ("siglip", "clip"))
    keep_tokenizer(epath.Path(tmp_path), TokenizerFiles(siglip, LENGTH).contents)
    source = of_columns(None, FIRST)
    _, contents = with_tokenizer(source, tmp_path)
    assert contents == with_tokenizer(source, tmp_path / "none")[1]
    files = TokenizerFiles(clip, LENGTH).contents
    keep_tokenizer(epath.Path(tmp_path), files)
    assert kept_tokenizer(epath.Path(tmp_path), data()).contents == files
    known = data(vocabulary_digest=digest_of(files))
    assert read_kept(epath.Path(tmp_path), known).vocabulary == 929
    with refused("data.tokenizer", "the run began with another tokenizer"):
        read_kept(epath.Path(tmp_path), data(vocabulary_digest=digest_of(contents)))


def test_a_tokenizer_of_the_hub(tmp_path, golden, monkeypatch):
    files = TokenizerFiles(golden / "tokenizer_clip", LENGTH).contents
    repositories = {("org/words", COMMITS["main"]): files | {"model.safetensors": b"weights"}}
    source = of_columns(None, FIRST)
    with served(repositories, monkeypatch, tmp_path) as hub:
        told, contents = with_tokenizer(source, tmp_path, tokenizer="hf:org/words")
        assert contents == files and told.tokenizer.facts.vocabulary == 929
        assert not any("weights" in file for _, file in hub.asked)
        with refused("data.tokenizer", "does not exist, or is private"):
            with_tokenizer(source, tmp_path, tokenizer="hf:org/nothing")
        with refused("data.text_length", "has no room for words"):
            with_tokenizer(source, tmp_path, tokenizer="hf:org/words", text_length=2)


def test_texts_are_read_two_batches_ahead_and_none_beyond_the_last(tmp_path):
    taken = []

    def numbered():
        for step in range(9):
            taken.append(step)
            yield {"id": np.array([step])}

    source, _ = with_tokenizer(of_columns(None, CAPTIONS), tmp_path)
    told = with_texts(numbered(), source, [np.array([i]) for i in range(5)], SEED)
    assert next(told)["id"] == [0] and taken == [0, 1, 2]
    assert [int(batch["id"][0]) for batch in told] == [1, 2, 3, 4] and taken == [*range(5)]


def test_an_image_without_a_caption_comes_first():
    names = ("caption", "text")
    items = [{"img": file} | {names[i % 2]: None, names[1 - i % 2]: "a dog"}
             for i, file in enumerate(FILES)]  # fmt: skip
    items[0] = {"img": FILES[0], "caption": None}
    source = given(items)
    assert [*source.captions(range(3))] == [[], ["a dog"], ["a dog"]]


def test_pillow_images_with_captions():
    items = [{"image": Image.fromarray(image), "text": "a"} for image in PIXELS]
    assert [*given(items).captions([11])] == [["a"]]
    with refused("data['train']", "12 images and 11 captions"):
        given({"image": PIXELS, "caption": ["a"] * 11})
