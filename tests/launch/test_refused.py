"""What the launchers refuse, and what they say: one golden page."""

import pathlib
import shlex

import pytest

PAGE = pathlib.Path(__file__).parent / "refused.txt"


def messages():
    """{command line: message, of lines that are indented on the page}."""
    blocks = PAGE.read_text().strip().split("\n\n")
    return dict(block.replace("\n    ", "\n").split("\n", 1) for block in blocks)


@pytest.mark.parametrize("words", messages())
def test_refused(request, refused, monkeypatch, words):
    name, *flags = shlex.split(words)
    launcher = request.getfixturevalue(name)
    if name == "local":
        monkeypatch.setattr(launcher, "visible_gpus", list)
    said = refused(launcher, *flags).partition("error: ")[2]  # after argparse's usage, if any
    assert said.strip() == messages()[words]
