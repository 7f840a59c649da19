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
      InputError: the file exists and has no column `model`.
    """
    rows: dict[str, dict[str, str]] = {}
    if path.exists():
        reader = csv.DictReader(io.StringIO(path.read_text()))
        if _KEY not in (reader.fieldnames or ()):
            raise InputError(
                f"--table={path}: has no column {_KEY!r}, so it is no table of results; name "
                "another file"
            )
        rows = {row[_KEY]: {k: cell for k, cell in row.items() if cell} for row in reader}
    cells = {name: "" if value is None else str(value) for name, value in values.items()}
    rows[model] = {_KEY: model} | cells
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    write_whole(path, text.getvalue())
