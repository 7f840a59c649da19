"""Extracts the plug-ins of docs/how_to/extend, so that tests run the documented code."""

import pathlib
import re

_PAGES = pathlib.Path(__file__).parents[1] / "docs/how_to/extend"


def write_parts(folder: pathlib.Path) -> list[str]:
    """Write each code block that begins with its file's name to a file; return the names."""
    text = "".join(page.read_text() for page in sorted(_PAGES.glob("*.md")))
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code)
    return [name for name, _ in blocks]
