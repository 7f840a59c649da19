"""tools/words_cifar10.py: its captions, its pictures and its runs; none is started."""

import sys
from types import SimpleNamespace

import notebooks
import numpy as np
import pytest
from loaded_file import load_module
from measured_runs import read_rows

from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.words import PROMPTS
from vit_jax.run.setup.validation import find_faults

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The tool, on pictures with the pixel 10 in every place, and with a table of its own."""
    tool, labels = load_module(notebooks.ROOT / "tools/words_cifar10.py"), np.arange(300) % 10
    split = {"image": np.full((300, 32, 32, 3), 10, np.uint8), "label": labels}
    builder = SimpleNamespace(
        as_dataset=lambda split, batch_size: None,
        info=SimpleNamespace(features={"label": SimpleNamespace(names=NAMES)}),
    )
    made = SimpleNamespace(builder=lambda name, data_dir: builder, as_numpy=lambda _: split)
    monkeypatch.setattr(tool, "tfds", made)
    monkeypatch.setattr(tool, "TABLE", tmp_path / "table.csv")
    return tool


def test_left_out_pairs_and_prompts_of_the_evaluation_are_in_no_caption(tool, tmp_path):
    tool.make_data(tmp_path, tmp_path)
    train, pairs = (np.load(tmp_path / f"{name}.npz") for name in ("captions", "pairs"))
    assert len(train["train_images"]) == len(train["train_captions"]) == 400
    captions = {text for row in train["train_captions"] for text in row}
    assert "this photo shows an airplane" in captions
    changed = [text for text in captions if not any(text.endswith(f" {n}") for n in NAMES)]
    assert len(changed) > 100  # of 64 pairs in three prompts; a red cat ends with a cat
    words = [pairs["class_names"][label] for label in np.unique(pairs["test_labels"])]
    assert len(words) == 16 and "red airplane" in words and "dog upside down" not in words
    for name in (*words, *(p.format(f"a {n}") for p in PROMPTS for n in NAMES if p != "{}")):
        assert not any(text in captions for text in (name, *(p.format(name) for p in PROMPTS)))
        assert not any(f"{name} " in f"{text} " for text in captions)
    with np.load(tmp_path / "retrieval.npz") as shown:
        assert len(shown["test_images"]) == 90
        assert len({text for row in shown["test_captions"] for text in row}) == 270
    shuffled = np.load(tmp_path / "shuffled.npz")["train_captions"]
    assert (shuffled != train["train_captions"]).any()
    assert sorted(map(tuple, shuffled)) == sorted(map(tuple, train["train_captions"]))


def test_pictures_show_what_the_words_say(tool):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    small = image.reshape(16, 2, 16, 2, 3).mean((1, 3)).round()
    found = [tool.change_picture(image, change) for change in range(len(tool.CHANGES))]
    assert (found[1][..., 1] == image[..., 1] // 2 + 127).all()
    assert (found[1][..., 0] == image[..., 0] // 2).all() and (found[3] == image[::-1]).all()
    for picture, corner in ((found[4], (0, 8)), (found[5], (16, 8)), (found[7], (16, 16))):
        assert (picture[corner[0] :][:16, corner[1] :][:, :16] == small).all()
    assert not found[4][16:].any() and not found[5][:16].any() and not found[6][:8].any()


def test_each_run_is_made_once(tool, tmp_path, monkeypatch):
    started = []

    def train(flags, workdir):
        config = load_config(flags[0].removeprefix("--config="))
        keys = [flag.removeprefix("--config.").split("=", 1) for flag in flags[1:]]
        assert apply_overrides(config, keys) + find_faults(config) == []
        started.append(config)
        workdir.mkdir()
        (workdir / "summary.json").write_text("{}")
        return {}, 1.0

    row = dict.fromkeys(("test", "pairs", "probe", *tool.RECALLS), 50.0)
    monkeypatch.setattr(tool, "train", train)
    monkeypatch.setattr(tool, "measure", lambda workdir, work, data_dir: row)
    for seeds, number in ((1, 7), (2, 12), (2, 12)):
        words = ["words_cifar10.py", str(tmp_path), "--data_dir=DIR", f"--seeds={seeds}"]
        monkeypatch.setattr(sys, "argv", words)
        tool.main()
        assert len(started) - 1 == number == len(read_rows(tool.TABLE))
    assert [c.objective.name for c in started].count("supervised") == 1  # the tower of LiT
    assert [c.objective.loss for c in started[:4]] == ["sigmoid", "softmax"] * 2
    assert started[-1].init_from == str(tmp_path / "tower_3600")
