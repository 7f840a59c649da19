"""Writers of metrics: JSON lines and TensorBoard events in the workdir, and W&B.

Each has `write(step, scalars)`, `flush()` and `close()`.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.files import open_for_append
from vit_jax.metrics.weights_and_biases import WeightsAndBiases


class MetricWriter:
    """Writes scalars to WORKDIR/metrics.jsonl and to TensorBoard events in WORKDIR.

    A run that is resumed goes on in both as if it had never stopped: what an earlier, killed try
    had written after the restored step is gone from the JSON lines, and hidden in TensorBoard. To
    be opened by one process only.

    Every row is in its file at once, for others to read, and survives the death of the process;
    after `flush` it survives that of the machine. Object stores (gs://), which have no append, get
    the whole file at each `flush`. Flush before a checkpoint is saved, so that no step that can be
    restored lacks its rows.

    Args:
      workdir: made where it is absent.
      restored_step: the step that the run was restored at; None: it starts from scratch.
      wandb_project: where W&B gets the same besides; None: it gets nothing.
      config: of the run, as nested dicts, for W&B.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        *,
        restored_step: int | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        workdir = epath.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        first_step = 0 if restored_step is None else restored_step + 1
        self._writers = [JsonLines(workdir, first_step), TensorBoard(workdir, first_step)]
        self.flush()
        if wandb_project is not None:
            rows = _read_rows(workdir)
            self._writers.append(WeightsAndBiases(workdir, wandb_project, config or {}, rows))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one row."""
        for writer in self._writers:
            writer.write(step, scalars)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class JsonLines:
    """WORKDIR/metrics.jsonl: one object a row. JSON has no NaN and no infinity: they are null.

    What stands there from `first_step` on is dropped.
    """

    def __init__(self, workdir: epath.Path, first_step: int):
        path = workdir / "metrics.jsonl"
        self._file = open_for_append(path, _rows_before(first_step, path))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **finite_or_none(scalars)}
        self._file.write(json.dumps(row, default=float).encode() + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """A file of TensorBoard events in WORKDIR.

    It begins with a session start at `first_step`, by which TensorBoard hides what earlier files
    have from that step on.
    """

    def __init__(self, workdir: epath.Path, first_step: int):
        # Not tensorboard's EventFileWriter: it loads TensorFlow wherever that is installed.
        self._file = open_for_append(workdir / _event_file_name(workdir), b"")
        self._records = RecordWriter(self._file)
        self._write_event(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(step=first_step, session_log=start)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [summary_pb2.Summary.Value(tag=n, simple_value=v) for n, v in scalars.items()]
        self._write_event(step=step, summary=summary_pb2.Summary(value=values))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_event(self, **fields) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


class NullWriter:
    """Stands in for a MetricWriter on the processes that write nothing."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> "NullWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        pass


def finite_or_none(scalars: Mapping[str, float]) -> dict[str, float | None]:
    """`scalars` as JSON can hold them."""
    return {name: v if math.isfinite(v) else None for name, v in scalars.items()}


def _rows_before(step: int, path: epath.Path) -> bytes:
    """The lines of a metrics.jsonl before `step`."""
    return b"".join(line + b"\n" for line, row in _whole_rows(path) if row["step"] < step)


def _whole_rows(path: epath.Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics.jsonl and what they hold; a kill may have left one by half."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield line, json.loads(line)


def _event_file_name(workdir: epath.Path) -> str:
    """A name that sorts after all others: TensorBoard reads a run's files in the order of names.

    The clock alone would not do: a run may go on within the second, or on a host whose clock lags.
    """
    times = [int(path.name.split(".")[3]) for path in workdir.glob("events.out.tfevents.*")]
    now = max([int(time.time()), *(t + 1 for t in times)])
    return f"events.out.tfevents.{now:010d}.{socket.gethostname()}.{os.getpid()}"


def _read_rows(workdir: epath.Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, scalars) of every row of WORKDIR/metrics.jsonl; what was not finite is NaN."""
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row.pop("step"), {n: math.nan if v is None else v for n, v in row.items()}


def values_at(step: int, workdir: epath.Path) -> dict[str, float | None]:
    """The metrics that WORKDIR/metrics.jsonl has of `step`; None is a value that was not finite."""
    rows = (row for _, row in _whole_rows(workdir / "metrics.jsonl"))
    return {
        name: value
        for row in rows
        if row["step"] == step
        for name, value in row.items()
        if name != "step"
    }
