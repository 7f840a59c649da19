"""What the launchers refuse, and what they say: one golden page."""

import pathlib
import shlex

import pytest
from at_fault import golden_page

PAGE = pathlib.Path(__file__).parent / "refused.txt"


@pytest.mark.parametrize("words", golden_page(PAGE))
def test_refused(request, refused, monkeypatch, words):
    name, *flags = shlex.split(words)
    launcher = request.getfixturevalue(name)
    if name == "local":
        monkeypatch.setattr(launcher, "visible_gpus", list)
    said = refused(launcher, *flags).partition("error: ")[2]  # after argparse's usage, if any
    assert said.strip() == golden_page(PAGE)[words]
