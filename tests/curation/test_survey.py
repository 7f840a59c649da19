"""What `doctor --output` shows of a data set, and what a model finds in it."""

import argparse
import re

import numpy as np
import PIL.Image
import pytest
from images import encode, write_images

from vit_jax.commands import doctor
from vit_jax.curation.survey import _captions, odd_by_features, survey
from vit_jax.data import make_source
from vit_jax.insight.pages import write_page


@pytest.fixture(scope="module")
def pixels():
    noise = np.random.default_rng(0).integers(0, 256, (33, 15, 20, 3), np.uint8)
    return np.stack([np.asarray(PIL.Image.fromarray(x).resize((160, 80))) for x in noise])


@pytest.fixture(scope="module")
def sources(pixels, tmp_path_factory):
    """30 wide pictures of one class and 2 of another. One is in `val` too, and one is broken."""
    root = tmp_path_factory.mktemp("images")
    train = {f"train/{'a' if i < 30 else 'b'}/{i:02}.png": pixels[i] for i in range(32)}
    val = {"val/a/0.jpg": encode(pixels[4]), "val/b/0.jpg": encode(pixels[32])}
    broken = {"train/b/32.png": b"none", "val/b/1.png": b"none"}
    write_images(root, train | val | broken)
    where = {"image_size": (8, 8), "data_dir": str(root)}
    return {split: make_source("folder", split=split, **where) for split in ("train", "val")}


@pytest.fixture(scope="module")
def sections(sources):
    return survey(sources, keeps_shape=False)


@pytest.mark.slow
def test_the_page_shows_what_there_is(sections):
    said = {section.subject: section for section in sections}
    assert [*said] == ["classes", "sizes", "square", "colours", "broken", "duplicates", "pictures"]
    classes = said["classes"]
    assert classes.found.startswith("2 classes, 32 pictures, 0 of them without a label; ")
    assert classes.found.endswith("; largest: a, 30; smallest: b, 2")
    assert classes.state == "warning" and classes.table[1] == ("a", "30", "93.75%")
    assert said["sizes"].table[3][1:] == ("2",) * 5  # width / height
    assert "distort 100.0% of the pixels by more than 10%, or cut off 50.0%" in said["square"].found
    assert said["square"].remedy.startswith("--config=folder:native keeps their shape")
    assert said["broken"].found == "unreadable pictures: 2, train/b/32.png, val/b/1.png"
    assert said["duplicates"].found == (
        "1 pictures of train are near an earlier one; 1 of them near one of val"
    )
    assert [len(row) for row in said["pictures"].pictures] == [8, 2]
    page = write_page("<b>", sections)
    assert page.count("<img") == 2 + 10 and "<h1>&lt;b&gt;</h1>" in page and "<script" not in page


def test_colours_are_those_of_the_pixels(sections, pixels):
    (said,) = (section.found for section in sections if section.subject == "colours")
    found = [float(x) for x in re.findall(r"\d\.\d+", said)]
    np.testing.assert_allclose(found[:3], (pixels[:32] / 255).mean((0, 1, 2)), atol=6e-4)
    np.testing.assert_allclose(found[3:], (pixels[:32] / 255).std((0, 1, 2)), atol=6e-4)


def test_the_longest_captions_come_first():
    captions = [("ab", b"\xef\xbb\xbfabcd"), (), ("a" * 9,), ("half \ud83d",), *[("x",)] * 30]
    source = argparse.Namespace(
        captions=lambda ids: (captions[i] for i in ids),
        num_examples=len(captions),
        record_name=lambda i: f"{i}.png",
    )
    (section,) = _captions(source)
    assert section.found == "the longest has 9 characters"
    assert section.table[1:5] == [
        (9, "2.png", "a" * 9), (8, "3.png", "half " + 3 * "\ufffd"), (4, "0.png", "abcd"),
        (2, "0.png", "ab"),
    ]  # fmt: skip
    assert len(section.table) == 1 + 20


def test_a_model_finds_wrong_labels_and_outliers(tmp_path):
    pytest.importorskip("cleanlab", reason="needs the extra curation")
    rng = np.random.default_rng(0)
    label = np.arange(200) % 2
    x = rng.normal(size=(200, 4)).astype(np.float32)
    x[np.arange(200), label] += 9
    x[7] = 0, 0, 0, 40  # an outlier
    x[9] = np.nan  # could not be read
    told, wrong = label.copy(), np.array([12, 31, 50, 101, 150, 177])
    told[wrong] ^= 1
    where = tmp_path / "all.npz"
    pixels = np.random.default_rng(1).integers(0, 256, (200, 8, 12, 3), np.uint8)
    np.savez(where, train_images=pixels, train_labels=told, class_names=["low", "high"])
    source = make_source("arrays", split="train", image_size=(8, 8), data_dir=str(where))
    found = {s.subject: s for s in odd_by_features(source, np.arange(200), x)}
    assert [*found] == ["doubtful labels", "outliers", "clusters"]
    doubted = {row[0]: row[1:3] for row in found["doubtful labels"].table[1:]}
    assert len(doubted) >= 4 and {*doubted} <= {source.record_name(i) for i in wrong.tolist()}
    assert {*doubted.values()} == {("high", "low"), ("low", "high")}
    assert found["outliers"].pictures[0][0][0] == source.record_name(7)
    assert sum(map(len, found["clusters"].pictures)) > 12


def test_the_command_adds_rows_and_writes_the_page(sources, sections, tmp_path, monkeypatch):
    """The training data come first, and splits that overlap them are left out."""
    from vit_jax.config import SplitKey, train_split
    from vit_jax.config.sections import Data

    data, seen = Data(name="folder", split="train", data_dir="x", subset="50%"), {}
    keys = [SplitKey("folder", "train", "x"), SplitKey("folder", "val", "x"), train_split(data),
            SplitKey("folder", "val", "y")]  # fmt: skip
    whole, val, part = sources["train"], sources["val"], object()
    run = argparse.Namespace(
        sources=dict(zip(keys, (whole, val, part, whole), strict=True)),
        settings=argparse.Namespace(data=data),
    )
    flags = argparse.Namespace(output=tmp_path / "seen", init_from=None)

    def survey(named, keeps_shape):
        seen.update(named)
        return sections

    monkeypatch.setattr("vit_jax.curation.survey.survey", survey)
    rows = [*doctor._survey(flags, run)]
    assert [*seen.items()] == [
        ("folder train", part), ("folder val", val), ("folder val of y", whole)
    ]  # fmt: skip
    assert [row.subject for row in rows][-1] == "page" and len(rows) == 8
    assert (tmp_path / "seen/page.html").read_text().startswith("<!DOCTYPE html>")
