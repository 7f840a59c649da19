"""Words that `predict` refuses, before it writes anything: those of refused.txt."""

import os
import pathlib
import shlex

import jax
import pytest
from at_fault import golden_page
from pairs import siglip
from PIL import Image

from vit_jax.main import main

pytestmark = pytest.mark.usefixtures("one_device")

PAGE = golden_page(pathlib.Path(__file__).with_name("refused.txt"))


@pytest.fixture(scope="module")
def pair(golden, tmp_path_factory):
    return siglip(golden, tmp_path_factory.mktemp("pairs") / "siglip")


@pytest.mark.parametrize("words", PAGE)
def test_what_is_refused(words, golden, pair, one_device, tmp_path, capsys, monkeypatch):
    """The answer has each line of the page; GOLDEN and PAIR stand for a folder and a model."""
    monkeypatch.setattr(jax, "devices", lambda *args: one_device)  # all eight
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "d.npz", "pictures"):
        (tmp_path / folder).mkdir()
    for name in ("x.png", "pictures/x.png"):
        Image.new("RGB", (8, 8)).save(name)
    (tmp_path / "t.csv").write_text("class,threshold\ncat,0.5\n")
    os.mkfifo("pipe.jpg")  # to open it would wait for a writer
    before = sorted(tmp_path.rglob("*"))

    def placed(text):
        return text.replace("GOLDEN", str(golden)).replace("PAIR", str(pair))

    assert main(["predict", *shlex.split(placed(words))]) == 2
    said = capsys.readouterr().err
    assert all(line in said for line in placed(PAGE[words]).splitlines())
    assert sorted(tmp_path.rglob("*")) == before
