"""A CSV file with a row of results for each model."""

import csv
import io
from collections.abc import Mapping

from etils import epath

from vit_jax.errors import InputError
from vit_jax.files import write_whole

_KEY = "model"


def add_row(path: epath.Path, model: str, values: Mapping[str, float | None]) -> None:
    """Write the results of a model into the file `path`, which is made if there is none.

    The columns are `model` and all metrics of all rows; a cell is empty where a model lacks the
    metric. A row of the same model is replaced.

    Raises:
      InputError: as `check_table`.
    """
    rows = _read_rows(path)
    cells = {name: "" if value is None else str(value) for name, value in values.items()}
    rows[model] = {_KEY: model} | cells
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    write_whole(path, text.getvalue())


def check_table(path: epath.Path) -> None:
    """Raise InputError unless `path` is free for a new table, or holds one already."""
    _read_rows(path)


def _read_rows(path: epath.Path) -> dict[str, dict[str, str]]:
    """{model: {column: cell}} without the empty cells; {} if there is no file."""
    if not path.exists():
        return {}
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(), newline=""))
        rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as e:
        raise InputError(f"--table={path}: cannot be read as CSV ({e}); name another file") from e
    if _KEY not in (reader.fieldnames or ()):
        raise InputError(
            f"--table={path}: has no column {_KEY!r}, so it is no table of results; name "
            "another file"
        )
    if any(None in row for row in rows):
        raise InputError(f"--table={path}: a row has more cells than the header; repair the file")
    return {row[_KEY]: {k: cell for k, cell in row.items() if cell} for row in rows}
