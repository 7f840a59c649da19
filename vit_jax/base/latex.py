"""Tables for papers written in LaTeX."""

from collections.abc import Sequence

_SIGNS = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}",
    '"': r"\texttt{\char34}",  # \textquotedbl is an error in the usual encoding OT1
})  # fmt: skip


def as_latex(rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Write texts as a `tabular` for the package booktabs; the first row is its head.

    `note`: a comment above it.
    """
    lines = [" & ".join(map(_escape, row)) for row in rows]
    head, *body = (rf"{line} \\" for line in lines)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    lines = [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([rf"% needs \usepackage{{booktabs}}. {note}".strip(), begin, *lines])


def _escape(cell: str) -> str:
    text = " ".join(cell.translate(_SIGNS).split())
    return "{[}" + text[1:] if text.startswith("[") else text  # \\ takes a "[" as its argument
