"""Metrics of a run: JSON lines and TensorBoard events in the workdir, a line on the terminal.

Metrics are flat: {"train/loss": 2.3}. Those that depend on the clock are named `time/...`; all
others are the same in every run of one config, one mesh and one build.
"""

import contextlib
import datetime
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from etils import epath
from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.files import open_for_append
from vit_jax.flops import mfu

CONSOLE = Console()


class MetricWriter:
    """Writes scalars to WORKDIR/metrics.jsonl and to TensorBoard events in WORKDIR.

    A run that is resumed goes on in both as if it had never stopped: what an earlier, killed try
    had written after the restored step is gone from the JSON lines, and hidden in TensorBoard by a
    session start at the step after it. To be opened by one process only.

    Every row is in its file at once, for others to read, and survives the death of the process;
    after `flush` it survives that of the machine. Object stores (gs://), which have no append, get
    the whole file at each `flush`. Flush before a checkpoint is saved, so that no step that can be
    restored lacks its rows.

    Args:
      workdir: made where it is absent.
      restored_step: the step that the run was restored at; None: it starts from scratch.
    """

    def __init__(self, workdir: epath.PathLike, *, restored_step: int | None = None):
        workdir = epath.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        first_step = 0 if restored_step is None else restored_step + 1
        rows = workdir / "metrics.jsonl"
        self._rows = open_for_append(rows, _rows_before(first_step, rows))
        # Not tensorboard's EventFileWriter: it loads TensorFlow wherever that is installed.
        self._events = open_for_append(workdir / _event_file_name(workdir), b"")
        self._records = RecordWriter(self._events)
        self._write_event(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(step=first_step, session_log=start)
        self.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one row. JSON has no NaN and no infinity: they are null there."""
        row = {"step": step, **finite_or_none(scalars)}
        self._rows.write(json.dumps(row, default=float).encode() + b"\n")
        values = [summary_pb2.Summary.Value(tag=n, simple_value=v) for n, v in scalars.items()]
        self._write_event(step=step, summary=summary_pb2.Summary(value=values))

    def flush(self) -> None:
        self._rows.flush()
        self._events.flush()

    def close(self) -> None:
        self._rows.close()
        self._events.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _write_event(self, **fields) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


def finite_or_none(scalars: Mapping[str, float]) -> dict[str, float | None]:
    """`scalars` as JSON can hold them."""
    return {name: v if math.isfinite(v) else None for name, v in scalars.items()}


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


def _rows_before(step: int, path: epath.Path) -> bytes:
    """The lines of a metrics.jsonl before `step`, without the half line that a kill may leave."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] < step:
                kept.append(line + b"\n")
    return b"".join(kept)


def _event_file_name(workdir: epath.Path) -> str:
    """A name that sorts after all others: TensorBoard reads a run's files in the order of names.

    The clock alone would not do: a run may go on within the second, or on a host whose clock lags.
    """
    times = [int(path.name.split(".")[3]) for path in workdir.glob("events.out.tfevents.*")]
    now = max([int(time.time()), *(t + 1 for t in times)])
    return f"events.out.tfevents.{now:010d}.{socket.gethostname()}.{os.getpid()}"


class Throughput:
    """The speed of training alone: between two readings, without the pauses.

    The device works behind the program's back: wait for the last step's result before `read` and
    before `pause`, or its time is taken for another's.

    Args:
      step: the step that the run starts at.
      global_batch_size: images a step, over all devices.
      flops_per_image: forward and backward; None: the model FLOPs utilisation is not known.
      device_kind, num_devices: what `flops.mfu` needs.
      clock: seconds.
    """

    def __init__(
        self,
        step: int,
        *,
        global_batch_size: int,
        flops_per_image: float | None,
        device_kind: str,
        num_devices: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._step, self._global_batch_size = step, global_batch_size
        self._flops_per_image = flops_per_image
        self._device_kind, self._num_devices = device_kind, num_devices
        self._clock = clock
        self._total_s = 0.0
        self._since = clock()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is not training: compilation, evaluation, saving."""
        start = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - start

    def seconds(self) -> float:
        """Seconds of training by this process so far; not to be asked in a pause."""
        return self._total_s + self._clock() - self._since

    def read(self, step: int) -> dict[str, float]:
        """The metrics since the last reading, at `step` steps.

        `time/seconds`: of training by this process so far; `time/images_per_s`: over all devices;
        `time/mfu`: a share, absent where the chip's peak or the FLOPs are not known.
        """
        now = self._clock()
        seconds = now - self._since
        images_per_s = (step - self._step) * self._global_batch_size / seconds
        self._step, self._since = step, now
        self._total_s += seconds
        scalars = {"time/seconds": self._total_s, "time/images_per_s": images_per_s}
        if self._flops_per_image is not None:
            share = mfu(
                self._flops_per_image * images_per_s,
                device_kind=self._device_kind,
                num_devices=self._num_devices,
            )
            if share is not None:
                scalars["time/mfu"] = share
        return scalars


class Progress:
    """One line that is kept up to date on a terminal; elsewhere a line for each update.

    To be used in a `with`, which gives the terminal back however it is left. What else goes
    through `console`, or is printed, appears above the line.

    Args:
      total_steps: of the whole run.
      console: where to.
      clock: seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console = CONSOLE,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._total_steps, self._console, self._clock = total_steps, console, clock
        self._start: tuple[int, float] | None = None  # step and time of the first update
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows the step, every `*/loss` and `*/top1`, the speed, the MFU and the time left.

        The time left counts on the wall time a step took from the first update on, evaluation and
        saving included.
        """
        parts = [f"step {step:,}/{self._total_steps:,}"]
        parts += [f"{name} {v:.4g}" for name, v in scalars.items() if name.endswith("/loss")]
        parts += [f"{name} {v:.1%}" for name, v in scalars.items() if name.endswith("/top1")]
        if "time/images_per_s" in scalars:
            parts.append(f"{scalars['time/images_per_s']:,.0f} images/s")
        if "time/mfu" in scalars:
            parts.append(f"MFU {scalars['time/mfu']:.1%}")
        parts.append(f"ETA {self._time_left(step)}")
        line = " | ".join(parts)
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._console.out(line, highlight=False)

    def _time_left(self, step: int) -> str:
        now = self._clock()
        first_step, start = self._start = self._start or (step, now)
        if step == first_step:
            return "unknown"
        seconds = (now - start) / (step - first_step) * (self._total_steps - step)
        return str(datetime.timedelta(seconds=round(seconds)))


def log_to_console(console: Console = CONSOLE) -> None:
    """Shows what the package's loggers say, from INFO on, above the line of a `Progress`.

    A command whose standard output is data gives a console on standard error.
    """
    logger = logging.getLogger("vit_jax")
    logger.handlers = [_ConsoleHandler(console)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        self._console.out(level + self.format(record), highlight=False)


def last_values(workdir: epath.Path) -> dict[str, float]:
    """The newest value of every metric in WORKDIR/metrics.jsonl."""
    rows = (workdir / "metrics.jsonl").read_text().splitlines()
    return {name: value for row in rows for name, value in json.loads(row).items()}
