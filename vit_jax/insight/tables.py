"""CSV files: their text, and a table with a row of results for each model."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import write_whole

_KEY = "model"


def as_csv(rows: Iterable[Iterable[Any]]) -> bytes:
    """Rows as a CSV file; None becomes an empty cell, and floats are read back as they were."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(map(as_cell, row) for row in rows)
    return text.getvalue().encode(errors="backslashreplace")


def as_cell(value: Any) -> Any:
    """`value`, or behind an apostrophe a text that a spreadsheet would compute as a formula."""
    is_formula = isinstance(value, str) and re.match(r"[=+\-@\t\r](?![\d.]+(e[-+]?\d+)?$)", value)
    return f"'{value}" if is_formula else value


def _of_cell(cell: str) -> str:
    return cell[1:] if cell == as_cell(cell[1:]) else cell


def add_row(path: epath.Path, model: str, values: Mapping[str, float | None]) -> None:
    """Write the results of a model into the file `path`, which is made if there is none.

    The columns are `model` and all metrics of all rows; a cell is empty where a model lacks the
    metric. A row of the same model is replaced.

    Raises:
      InputError: if `path` holds something else.
    """
    rows = read_rows(path)
    rows[model] = {_KEY: model} | {k: str(v) for k, v in values.items() if v is not None}
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = [[row.get(name) for name in columns] for row in rows.values()]
    write_whole(path, as_csv([columns, *table]))


def read_rows(path: epath.Path) -> dict[str, dict[str, str]]:
    """{model: {column: cell}} of a table, without the empty cells; {} if there is no file.

    Raises:
      InputError: if `path` holds something else.
    """
    if not path.exists():
        return {}
    reader = csv.DictReader(io.StringIO(path.read_bytes().decode(errors="replace"), newline=""))
    if _KEY not in (reader.fieldnames or ()):
        raise InputError(
            f"--table={path}: has no column {_KEY!r}, so it is no table of results; name "
            "another file"
        )
    rows = ({k: _of_cell(cell) for k, cell in row.items() if cell} for row in reader)
    return {row[_KEY]: row for row in rows}
