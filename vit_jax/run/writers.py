"""Metric writers: JSON lines and TensorBoard events in the workdir, and W&B.

Each has `write(step, scalars)`, `flush()` and `close()`.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.base.files import LiteralPath, open_for_append, read_lines
from vit_jax.checkpoints.history import ROWS, check_row, read_history
from vit_jax.run.weights_and_biases import WeightsAndBiases


class MetricWriter(contextlib.AbstractContextManager):
    """Writes scalars to WORKDIR/metrics.jsonl and to TensorBoard events in WORKDIR.

    A resumed run continues both as if it had never stopped: rows that an earlier, killed try wrote
    after the restored step are removed from the JSON lines and hidden in TensorBoard. Only one
    process may write.

    Every row is visible to readers at once and survives the death of the process; after `flush` it
    also survives the death of the machine. Object stores (gs://), which have no append, receive the
    whole file at each `flush`. Flush before saving a checkpoint, so that every step that can be
    restored has its rows.

    Args:
      workdir: created if absent.
      restored_step: step that the run was restored at; None: it starts from scratch.
      wandb_project: W&B project that also receives the rows; None: no W&B.
      config: the run's config as nested dicts, for W&B.
      may_write: asked before metrics.jsonl is uploaded or closed; if False, rows since the last
        flush are dropped, since another process now writes the file.
      writes: False: nothing is written, as on processes other than 0.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        *,
        restored_step: int | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        may_write: Callable[[], bool] = lambda: True,
        writes: bool = True,
    ):
        self._writers: list[JsonLines | TensorBoard | WeightsAndBiases] = []
        if not writes:
            return
        workdir = epath.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        first_step = 0 if restored_step is None else restored_step + 1
        self._writers += [
            JsonLines(workdir, first_step, may_write),
            TensorBoard(workdir, first_step),
        ]
        self.flush()
        if wandb_project is not None:
            rows = read_history(workdir)
            self._writers.append(WeightsAndBiases(workdir, wandb_project, config or {}, rows))

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one row."""
        for writer in self._writers:
            writer.write(step, scalars)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close each writer, also where another fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


class JsonLines:
    """WORKDIR/metrics.jsonl: one JSON object per row; NaN and infinity, unknown to JSON, are null.

    Rows from `first_step` on are dropped. Damaged lines stay, unless it is 0, so that they can be
    restored by hand.
    """

    def __init__(self, workdir: epath.Path, first_step: int, may_write: Callable[[], bool]):
        self._may_write = may_write
        path = workdir / ROWS
        kept = (line + b"\n" for line, row in read_lines(path, check_row)
                if (0 if row is None else row["step"]) < first_step)  # fmt: skip
        self._file = open_for_append(path, kept)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **finite_or_none(scalars)}
        self._file.write(json.dumps(row, default=float).encode() + b"\n")

    def flush(self) -> None:
        if self._may_write():
            self._file.flush()

    def close(self) -> None:
        if self._may_write():
            self._file.close()
        else:
            self._file.abandon()


class TensorBoard:
    """A file of TensorBoard events in WORKDIR.

    It starts a session at `first_step`, so that TensorBoard hides the rows that earlier files have
    from this step on.
    """

    def __init__(self, workdir: epath.Path, first_step: int):
        # tensorboard's own EventFileWriter would import TensorFlow if it is installed.
        self._file = open_for_append(workdir / _event_file_name(workdir), ())
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

    def _write_event(self, **fields: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


def finite_or_none(scalars: Mapping[Any, float | None]) -> dict[Any, float | None]:
    """`scalars` with None in place of NaN and infinity, for JSON."""
    return {name: v if v is not None and math.isfinite(v) else None for name, v in scalars.items()}


def _event_file_name(workdir: epath.Path) -> str:
    """A name that sorts after all others, since TensorBoard reads files in the order of names.

    A time stamp is not enough: a run may resume within a second, or on a host whose clock lags.
    """
    found = LiteralPath(workdir).glob("events.out.tfevents.*")
    times = [path.name.split(".")[3] for path in found]  # of other writers any text
    now = max([int(time.time()), *(int(t) + 1 for t in times if t.isdecimal())])
    return f"events.out.tfevents.{now:010d}.{socket.gethostname()}.{os.getpid()}"


def values_at(step: int, workdir: epath.Path) -> dict[str, float | None]:
    """Metrics that WORKDIR/metrics.jsonl has at `step`; None: not finite."""
    rows = [row for row in read_history(workdir) if row["step"] == step]
    return {name: value for row in rows for name, value in row.items() if name != "step"}
