"""Extracts the plug-ins of docs/how_to/extend.md, so that tests run the documented code."""

import pathlib
import re

_DOCUMENT = pathlib.Path(__file__).parents[1] / "docs/how_to/extend.md"


def write_parts(folder: pathlib.Path) -> list[str]:
    """Write each code block that begins with its file's name to a file; return the names."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code)
    return [name for name, _ in blocks]
