"""Writes the plug-ins of docs/extending.md as files, so that the tests run the documented code."""

import pathlib
import re

_DOCUMENT = pathlib.Path(__file__).parents[1] / "docs/extending.md"


def write_parts(folder: pathlib.Path) -> list[str]:
    """Writes each code block that begins with its file's name; returns the names."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code)
    return [name for name, _ in blocks]
