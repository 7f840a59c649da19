"""Predictions in files: features of some images in one .npz, predictions of many in parts.

FOLDER/predictions.json     the manifest, see parts.py
FOLDER/part_00000.parquet   a row for each record: `id`, its index; `file`, its name; `label`, for
                            data sets; `classes`, as `classify` has them; `error`, if it cannot
                            be read
FOLDER/part_00000.npy       or the features of these rows, float16, NaN for those with an error; of
                            patches of pictures in their own shape (n, S, D), NaN after the
                            patches, and the table has their `grid` of rows and columns, 0 for
                            those with an error
FOLDER/summary.json         the numbers of rows and of errors; written last
"""

import functools
import io
import itertools
import json
import os
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.base.packages import need_package
from vit_jax.data import Source
from vit_jax.inference.outputs import outputs, without_masked
from vit_jax.inference.parts import Rows, begin, facts_of, write_missing
from vit_jax.inference.predict import classified, name_rows
from vit_jax.transfer.pretrained import Pretrained

if TYPE_CHECKING:
    import pyarrow as pa


def check_output(output: os.PathLike | str, flag: str, suffix: str) -> epath.Path:
    """The absolute path of a file with that suffix, if it can be written.

    Raises:
      InputError: names `flag`.
    """
    output = files.absolute(output)
    if output.suffix != suffix:
        raise InputError(f"{flag}={output}: the name must end in {suffix}")
    files.check_output(output, flag)
    return output


def write_features(
    pretrained: Pretrained, source: Source, output: epath.Path, *, batch_size: int, what: str
) -> dict[str, Any]:
    """Write FILE.npz with the features of every record of `source`; return a summary of it.

    The file holds `features`, float32 (n, D), or (n, rows, columns, D) for `what="dense"`; `valid`
    (n,), False for images that could not be read, whose features are NaN; `record` (n,), the names
    of the records; and for data sets `label` (n,). For pictures in their own shape "dense" gives
    (n, S, D), NaN after their patches, and `grid` (n, 2), their rows and columns, 0 for images that
    could not be read. Features are written batch by batch.

    `output` comes from `check_output`.
    """
    count = source.num_examples
    found = outputs(pretrained, source, batch_size=batch_size, what=what)
    first = next(found)
    shape = (count, *first[0].shape[1:])
    batches = []
    with files.replaced(output) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        with archive.open("features.npy", "w", force_zip64=True) as entry:
            entry.write(_npy_header("<f4", shape))
            for features, batch in itertools.chain([first], found):
                features = without_masked(features, batch)
                entry.write(np.ascontiguousarray(features, "<f4").tobytes())
                batches.append(batch)
        records = np.array([source.record_name(i) for i in range(count)])
        whole = {key: np.concatenate([batch[key] for batch in batches]) for key in first[1]}
        rest = {"valid": whole.pop("mask") > 0, "record": records, **whole}
        if source.name == "files":
            del rest["label"]
        for name, array in rest.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return {
        "features": os.fspath(output),
        "shape": list(shape),
        "unreadable": int(count - rest["valid"].sum()),
    }


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file := io.BytesIO(), header)
    return file.getvalue()


def write_predictions(
    pretrained: Pretrained,
    source: Source,
    folder: epath.Path,
    flag: str,
    *,
    what: str,
    batch_size: int,
    **choice: Any,
) -> dict[str, Any]:
    """Write the parts of `folder` that are missing; return the summary, on all processes.

    Args:
      folder: one that can be written; all processes see it.
      flag: that names it.
      what: "classes", or "features" or "dense" of `outputs`.
      batch_size: over all devices of a process.
      choice: `top` and `thresholds` of `classify`.

    Raises:
      InputError: pyarrow is missing, the folder holds other predictions, or a feature is beyond
        float16.
    """
    need_package(f"{flag}={folder}", "pyarrow", "parquet")
    import pyarrow.parquet as pq

    facts = facts_of(pretrained, source)
    facts |= {"what": what, **{key: np.asarray(value).tolist() for key, value in choice.items()}}
    parts = begin(
        folder / "predictions.json", facts, source.num_examples, batch_size,
        flag=flag, suffix=".parquet",
    )  # fmt: skip
    write = functools.partial(_write_part, pretrained, source, what, choice)
    of = "probabilities" if what == "classes" else what
    write_missing(pretrained, source, parts, write, what=of, batch_size=batch_size)
    errors = []
    for part in range(len(parts)):
        with parts.path(part).open("rb") as file:
            errors.append(pq.read_table(file, columns=["error"])["error"])
    summary = {
        "output": os.fspath(folder),
        "rows": sum(map(len, errors)),
        "unreadable": sum(len(found) - found.null_count for found in errors),
    }
    if jax.process_index() == 0:
        files.write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _write_part(
    pretrained: Pretrained,
    source: Source,
    what: str,
    choice: dict[str, Any],
    path: epath.Path,
    ids: np.ndarray,
    rows: Rows,
) -> None:
    """Write the features of a part, if it has any, and then its table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, tables, records = _schema(source, what), list[pa.Table](), iter(ids.tolist())

    def features() -> Iterator[np.ndarray]:
        """The features of each batch, whose table joins `tables`."""
        for x, batch in rows:
            here = list(itertools.islice(records, len(x)))
            named = name_rows(pretrained, source, here, batch["mask"])
            if what == "classes":
                named = classified(pretrained, named, x, **choice)
            own = zip(named, here, batch["label"].tolist(), strict=True)
            found = [{**row, "id": record, "label": label} for row, record, label in own]
            table = pa.Table.from_pylist(found, schema)
            if "grid" in batch:
                table = table.append_column("grid", [batch["grid"].tolist()])
            tables.append(table)
            yield without_masked(x, batch)

    found = features()
    if what == "classes":
        list(found)
    else:
        first = next(found)
        head = _npy_header("<f2", (len(ids), *first.shape[1:]))
        halves = (_half(x, path).tobytes() for x in itertools.chain([first], found))
        files.open_for_append(path.with_suffix(".npy"), itertools.chain([head], halves)).close()
    pq.write_table(pa.concat_tables(tables), table := io.BytesIO())
    files.write_whole(path, table.getvalue())


def _half(x: np.ndarray, path: epath.Path) -> np.ndarray:
    """`x` in float16; raises InputError if one of its numbers is too large."""
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(x, "<f2")
    except FloatingPointError:
        raise InputError(
            f"--features={path.parent}: a feature is above 65,504, the largest number of float16; "
            "save float32 by --features=FILE.npz"
        ) from None


def _schema(source: Source, what: str) -> "pa.Schema":
    import pyarrow as pa

    columns = [("id", pa.int64()), ("file", pa.string())]
    if source.name != "files":
        label = pa.list_(pa.float32()) if source.has_label_vectors else pa.int32()
        columns.append(("label", label))
    if what == "classes":
        kinds = [("name", pa.string()), ("index", pa.int32()), ("probability", pa.float32())]
        columns.append(("classes", pa.list_(pa.struct(kinds))))
    return pa.schema([*columns, ("error", pa.string())])
