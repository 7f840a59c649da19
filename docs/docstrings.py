"""Prepares docstrings for the pages of the Python API.

In the code, `Shapes: ...`, `Source: ...` and `Raises: ...` may be one sentence, and the fields of a
tuple are lines of the form `name: meaning`. The pages show both as lists do elsewhere.
"""

import re

import griffe

_CONTINUED = r"((?:\n +\S.*)*)"  # lines that are further in
_LABEL = re.compile(rf"^([A-Z][a-z]+): (\S.*){_CONTINUED}", re.MULTILINE)
_FIELD = re.compile(rf"([a-z_]\w*): (\S.*){_CONTINUED}\n?")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _label(match: re.Match[str]) -> str:
    return f"\n**{match[1]}:** {_one_line(match[2] + match[3])}\n"


def readable(docstring: str) -> str:
    """`docstring` with bold labels and with its fields as a list."""
    paragraphs = re.split(r"\n(?: *\n)+", docstring)
    for i, paragraph in enumerate(paragraphs):
        if re.fullmatch(rf"(?:{_FIELD.pattern})+", paragraph):
            fields = _FIELD.findall(paragraph)
            rows = [f"- **{name}:** {_one_line(first + rest)}" for name, first, rest in fields]
            paragraphs[i] = "\n".join(rows)
    return _LABEL.sub(_label, "\n\n".join(paragraphs))


class Docstrings(griffe.Extension):
    """Makes every docstring readable before its sections are parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
