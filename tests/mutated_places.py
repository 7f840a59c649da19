"""The places of the source that mutations.py breaks: the table mutated_places.txt."""

import ast
import pathlib
from typing import NamedTuple


class Mutation(NamedTuple):
    """`old` stands exactly once in `file`; `tests` (pytest's node ids) fail where it is `new`."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        folder, _, rest = self.file.partition("/")
        return rest.partition("/")[0].removesuffix(".py") if folder == "vit_jax" else folder

    @property
    def node_ids(self) -> list[str]:
        return [f"tests/{name}" for name in self.tests.split()]


def read(table: str) -> list[Mutation]:
    """The mutations of a table with a paragraph for each; lines that begin with # are comments."""
    paragraphs = (
        [line for line in paragraph.splitlines() if not line.startswith("#")]
        for paragraph in table.strip().split("\n\n")
    )
    return [
        Mutation(file, ast.literal_eval(old), ast.literal_eval(new), tests)
        for file, tests, old, new in filter(None, paragraphs)
    ]


MUTATIONS = read(pathlib.Path(__file__).with_suffix(".txt").read_text())
