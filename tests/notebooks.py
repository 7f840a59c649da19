"""The notebooks of docs/: their cells, their commands, and how a test runs them."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TUTORIAL = ROOT / "docs/tutorials/notebook.ipynb"
FREE = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
_SHELL = re.compile(r"^!((?:.*\\\n)*.*)", re.MULTILINE)


def code_cells(path):
    """(tags, source) of each code cell."""
    cells = json.loads(path.read_text())["cells"]
    return [
        (cell["metadata"].get("tags", []), "".join(cell["source"]))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def parameters(path):
    """The names that the cell of parameters defines."""
    names = {}
    for tags, source in code_cells(path):
        if "parameters" in tags:
            exec(source, names)
    return names


def commands(path):
    """The shell commands, as Jupyter fills them in."""
    names = parameters(path)
    found = [command for _, source in code_cells(path) for command in _SHELL.findall(source)]
    return [eval(f"f'''{command}'''", names) for command in found]


def run(path, changed, shell=None):
    """The names after all cells but those tagged "online", with parameters `changed`.

    shell: called with each command.
    """
    names = parameters(path) | changed | {"shell": shell}
    for tags, source in code_cells(path):
        if not {*tags} & {"parameters", "online"}:
            exec(_SHELL.sub(r"shell(f'''\1''')", source), names)
    return names
