"""Tables for papers: what LaTeX would read as a command or as another sign is escaped."""

import pytest

from vit_jax.base.latex import as_latex


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("decode|flip", r"decode\textbar{}flip"),
        ("<1 & >2", r"\textless{}1 \& \textgreater{}2"),
        ('a"b', r"a\texttt{\char34}b"),
        ("[0.5, 0]", "{[}0.5, 0]"),
        (r"5 % ± {\x_1}", r"5 \% $\pm$ \{\textbackslash{}x\_1\}"),
    ],
)
def test_signs_are_escaped(cell, written):
    lines = as_latex([("run", "n"), (cell, cell)]).splitlines()
    assert lines[-3] == rf"{written} & {written} \\"
