"""What `doctor --output` shows of a data set, and what a model finds in it."""

import argparse
import pathlib

import numpy as np
import PIL.Image
import pytest
from prepared_sets import encoded, smooth

from vit_jax.commands import doctor
from vit_jax.curation.survey import odd_by_features, survey
from vit_jax.data import make_source
from vit_jax.insight.pages import write_page


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """30 wide pictures of one class, 2 of another, of which one is in `val` too; one is broken."""
    root = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 256, (33, 15, 20, 3), np.uint8)
    large = [np.asarray(PIL.Image.fromarray(x).resize((160, 80))) for x in noise]
    for i, pixels in enumerate(large):
        path = root / "train" / ("a" if i < 30 else "b") / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels, "PNG"))
    (root / "train/b/32.png").write_bytes(b"none")
    for name in "ab":
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "0.jpg").write_bytes(encoded(large[4 if name == "a" else 32]))
    where = {"image_size": (8, 8), "data_dir": str(root)}
    return {split: make_source("folder", split=split, **where) for split in ("train", "val")}


def test_the_page_shows_what_there_is(sources):
    sections = survey(sources, keeps_shape=False)
    said = {section.subject: section for section in sections}
    assert [*said] == ["classes", "sizes", "square", "colours", "broken", "duplicates", "pictures"]
    assert said["classes"].found.startswith(
        "2 classes, 32 pictures, 0 of them without a label; 30 of a"
    )
    assert said["classes"].state == "warning" and said["classes"].table[1] == ("a", "30", "93.75%")
    assert said["sizes"].table[3][1:] == ("2",) * 5  # width / height
    assert "distort 100.0% of the pixels by more than 10%, or cut off 50.0%" in said["square"].found
    assert "data.max_tokens" in said["square"].remedy
    assert "train/b/32.png" in said["broken"].found
    assert "1 pictures of train are near an earlier one; 1 of them near one of val" in (
        said["duplicates"].found
    )
    assert [len(row) for row in said["pictures"].pictures] == [8, 2]
    page = write_page("<b>", sections)
    assert page.count("<img") == 2 + 10 and "<h1>&lt;b&gt;</h1>" in page and "<script" not in page
    (native,) = (s for s in survey(sources, keeps_shape=True) if s.subject == "square")
    assert native.state == "ok"


def test_colours_are_those_of_the_pixels(sources):
    (said,) = (s.found for s in survey(sources, keeps_shape=True) if s.subject == "colours")
    folder = pathlib.Path(sources["train"].record_name(0)).parent
    assert folder.name == "a"
    found = [float(x) for x in said.replace(";", ",").replace("mean ", "").replace(
        " standard deviation ", " ").replace(" (of 1)", "").split(",")]  # fmt: skip
    assert np.allclose(found, [0.5] * 3 + [0.2] * 3, atol=0.08)


def test_a_model_finds_wrong_labels_and_outliers(tmp_path):
    pytest.importorskip("cleanlab", reason="needs the extra curation")
    rng = np.random.default_rng(0)
    label = np.arange(60) % 2
    x = rng.normal(size=(60, 4)).astype(np.float32)
    x[:, 0] += 9 * label
    x[7, 3] = 40  # an outlier
    x[9] = np.nan  # could not be read
    told = label.copy()
    told[[12, 31]] ^= 1
    where = tmp_path / "all.npz"
    pixels = np.stack([smooth(i, 8, 12) for i in range(60)])
    np.savez(where, train_images=pixels, train_labels=told, class_names=["low", "high"])
    source = make_source("arrays", split="train", image_size=(8, 8), data_dir=str(where))
    found = {s.subject: s for s in odd_by_features(source, np.arange(60), x)}
    assert [*found] == ["doubtful labels", "outliers", "clusters"]
    doubted = found["doubtful labels"]
    assert doubted.found.startswith("2 of 59 labels are doubtful")
    assert {row[1:3] for row in doubted.table[1:]} == {("high", "low"), ("low", "high")}
    assert found["outliers"].pictures[0][0][0] == source.record_name(7)
    assert sum(map(len, found["clusters"].pictures)) > 12


def test_the_command_adds_rows_and_writes_the_page(sources, tmp_path):
    from vit_jax.config import SplitKey

    keys = [SplitKey("folder", split, "x") for split in sources]
    run = argparse.Namespace(
        sources=dict(zip(keys, sources.values(), strict=True)),
        settings=argparse.Namespace(
            data=argparse.Namespace(
                name="folder", split="train", data_dir="x", classes=None, subset=None,
                exclude=None, mix="", max_tokens=None,
            )
        ),
    )  # fmt: skip
    flags = argparse.Namespace(output=tmp_path / "seen", init_from=None)
    rows = [*doctor._survey(flags, run)]
    assert [row.subject for row in rows][-1] == "page" and len(rows) == 8
    assert (tmp_path / "seen/page.html").read_text().startswith("<!DOCTYPE html>")
