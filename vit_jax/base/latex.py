"""Tables for papers written in LaTeX."""

from collections.abc import Sequence

_SIGNS = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$",
})  # fmt: skip


def as_latex(rows: Sequence[Sequence[str]], note: str = "") -> str:
    """A `tabular` of texts, which needs the package booktabs; the first row is its head.

    `note`: a comment above it.
    """
    lines = [" & ".join(" ".join(cell.translate(_SIGNS).split()) for cell in row) for row in rows]
    head, *body = (rf"{line} \\" for line in lines)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    lines = [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([rf"% needs \usepackage{{booktabs}}. {note}".strip(), begin, *lines])
