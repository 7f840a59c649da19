"""Folders searched by words and by pictures, with features that are kept beside them."""

import json
import os
import shutil

import numpy as np
import pytest
from at_fault import at_fault
from pairs import clip, siglip
from PIL import Image

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.inference import index, parts
from vit_jax.inference.index import open_index
from vit_jax.main import main
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

TEXTS = ["a red car", "a dog"]


@pytest.fixture(scope="module")
def pair(golden, tmp_path_factory):
    """A model that projects features of images to those of texts."""
    return read_pretrained(clip(golden, tmp_path_factory.mktemp("pairs") / "clip"))


@pytest.fixture(scope="module")
def source(golden, tmp_path_factory):
    return siglip(golden, tmp_path_factory.mktemp("pairs") / "siglip")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures/more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png", "more/c.png"):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(
            tmp_path / "pictures" / name
        )
    (tmp_path / "pictures/broken.png").write_bytes(b"no image")
    return tmp_path / "pictures"


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def by_hand(pair, folder, names):
    """(cosines of pictures and TEXTS, cosines of the pictures)."""
    x = vit_jax.predict([folder / name for name in names], pair, output="features")
    side = pair.read_text_side()
    ids = side.read_tokenizer()(TEXTS)
    texts = side.matcher.apply(side.variables, ids, method="text_features")
    images = side.matcher.apply(side.variables, x, method="image_features")
    return unit(np.asarray(images)) @ unit(np.asarray(texts)).T, unit(x) @ unit(x).T


def index_file(folder):
    (file,) = folder.parent.glob("pictures.*.index.npz")
    return file


def test_texts_and_pictures_find_the_nearest(pair, folder):
    names = ["a.png", "b.png", "more/c.png"]
    to_texts, to_each_other = by_hand(pair, folder, names)
    rows = vit_jax.search(folder, pair, texts=TEXTS, images=folder / "b.png", top=5, batch_size=8)
    for row, text, cosines in zip(rows, TEXTS, to_texts.T, strict=False):
        assert row["text"] == text
        found = {one["file"]: one["similarity"] for one in row["neighbours"]}
        expected = {str(folder / name): c for name, c in zip(names, cosines, strict=True)}
        assert found == pytest.approx(expected, abs=1e-5)
        assert [*found] == sorted(expected, key=expected.get, reverse=True)
    found = {one["file"]: one["similarity"] for one in rows[2]["neighbours"]}
    expected = {str(folder / names[i]): to_each_other[1, i] for i in (0, 2)}
    assert rows[2]["file"] == str(folder / "b.png") and found == pytest.approx(expected, abs=1e-5)


def test_features_are_computed_once_for_each_picture(pair, folder, monkeypatch, caplog):
    read = []
    features_of = index.features_of
    monkeypatch.setattr(
        index,
        "features_of",
        lambda p, paths, *how: read.append(paths) or features_of(p, paths, *how),
    )
    ask = lambda: open_index(pair, folder, batch_size=8, progress=False)  # noqa: E731
    first, names = ask(), ["a.png", "b.png", "broken.png", "more/c.png"]
    assert read.pop() == [str(folder / name) for name in names]
    assert np.isnan(first.x_ND).all(axis=1).tolist() == [False, False, True, False]
    again = ask()
    assert not read and np.array_equal(again.x_ND, first.x_ND, equal_nan=True)
    moved = pair.model.clone(constrain=lambda x, axes: x)  # as in a process with other addresses
    open_index(pair._replace(model=moved), folder, batch_size=8, progress=False)
    assert not read
    shutil.copy(folder / "a.png", folder / "b.png")  # another time of change
    os.utime(folder / "b.png", ns=(0, 1))
    (folder / "more/c.png").unlink()
    changed = ask()
    assert read.pop() == [str(folder / "b.png")]
    np.testing.assert_allclose(changed.x_ND[1], changed.x_ND[0], atol=1e-6)
    assert len(changed.files) == 3 and len(np.load(index_file(folder))["stamps"]) == 3
    params = pair.params | {"embedding/kernel": pair.params["embedding/kernel"] + 1}
    other = open_index(pair._replace(params=params), folder, batch_size=8, progress=False)
    assert len(read.pop()) == 3 and not np.allclose(other.x_ND[0], changed.x_ND[0])
    assert len([*folder.parent.glob("*.npz")]) == 2
    for file in folder.parent.glob("*.npz"):
        file.write_bytes(file.read_bytes()[:100])
    assert np.array_equal(ask().x_ND, changed.x_ND, equal_nan=True)
    assert len(read.pop()) == 3 and "made anew" in caplog.text


def test_a_folder_that_cannot_be_written_beside_is_searched(pair, folder, monkeypatch, caplog):
    def refuse(path, content):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index.files, "write_whole", refuse)
    assert len(open_index(pair, folder, batch_size=8, progress=False).files) == 4
    assert "the index cannot be kept (Permission denied)" in caplog.text


def test_the_next_question_to_a_predictor_reads_no_weights(pair, folder, monkeypatch):
    read = []
    counted = pair._replace(read_text_side=lambda: read.append("texts") or pair.read_text_side())
    monkeypatch.setattr(parts, "hash_params", lambda p: read.append("all") or hash_params(p))
    predictor = vit_jax.load_predictor(counted)
    for _ in range(2):
        rows = vit_jax.search(folder, predictor, texts=TEXTS, batch_size=8)
        assert sorted(read) == ["all", "texts"]
    for row, expected in zip(rows, vit_jax.search(folder, pair, texts=TEXTS), strict=True):
        found = {one["file"]: one["similarity"] for one in row["neighbours"]}
        others = {one["file"]: one["similarity"] for one in expected["neighbours"]}
        assert found == pytest.approx(others, abs=1e-5)


def test_a_search_needs_texts_or_images(pair, folder):
    with at_fault("texts"):
        vit_jax.search(folder, pair)


def test_the_command(source, tmp_path, folder, capsys):
    words = ["predict", f"--init_from={source}", f"--neighbours={folder}", "--batch_size=8"]
    asked = [f"--text={TEXTS[0]}", f"--image={folder / 'a.png'}", "--top=1"]
    sheet = tmp_path / "sheet.png"
    assert main([*words, *asked, "--format=json", f"--sheet={sheet}"]) == 0
    of_text, of_picture = map(json.loads, capsys.readouterr().out.splitlines())
    assert of_text["text"] == TEXTS[0] and of_picture["file"] == str(folder / "a.png")
    expected = vit_jax.search(folder, source, texts=TEXTS[0], top=1)
    assert of_text == expected[0]
    assert Image.open(sheet).size == (2 * 132 + 12, 2 * 146)
    assert main([*words, *asked]) == 0
    assert TEXTS[0] in capsys.readouterr().out


def test_a_model_without_text_tower(golden, folder):
    with pytest.raises(InputError, match=r"text: .*hf_vit: the model has no text tower"):
        vit_jax.search(folder, golden / "hf_vit", texts="a dog")
    with pytest.raises(InputError, match="top=0: needs a positive number"):
        vit_jax.search(folder, golden / "hf_vit", images=folder, top=0)
