"""Terminal output of a run: a progress line, and messages above it."""

import contextlib
import datetime
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping

from absl.logging import get_absl_logger
from rich import progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.table import Column

from vit_jax.base.errors import shown_lines
from vit_jax.config.metric_names import FLIPS

CONSOLE = Console()
_BAR_WIDTH = 12  # characters
_LOWEST = 3  # classes of an evaluator that reports each


class Progress(contextlib.AbstractContextManager):
    """A progress line, updated in place on a terminal; elsewhere one line per update.

    Use it in a `with` statement, which restores the terminal on exit. Text printed to `console`
    or standard output appears above the line.

    Args:
      total_steps: length of the whole run.
      start: the step that the run continues from; the clock starts when this object is made.
      flops: of the first so many steps.
      metrics: names of training's metrics to show beside loss and top1.
      console: where the line is shown.
      clock: returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        start: int = 0,
        *,
        flops: Callable[[int], float] = float,
        metrics: Collection[str] = (),
        console: Console = CONSOLE,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._total_steps, self._console, self._clock = total_steps, console, clock
        self._start, self._flops = (start, clock()), flops
        self._metrics = {f"train/{name}" for name in metrics}
        cut = Column(no_wrap=True, overflow="ellipsis")
        line = TextColumn("{task.description}", markup=False, table_column=cut)
        bar = BarColumn(_BAR_WIDTH, table_column=Column(width=_BAR_WIDTH))
        self._live = progress.Progress(
            bar, line, console=console, auto_refresh=False, disable=not console.is_terminal
        )
        self._task = self._live.add_task("", total=total_steps, visible=False)
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the step, the time left, `*/loss`, `*/top1`, `metrics`, the speed and the MFU.

        A narrow terminal cuts the end of the line. The time left is extrapolated by FLOPs from the
        wall time since the start, including evaluations and saves.
        """
        parts = [f"step {step:,}/{self._total_steps:,}", f"ETA {self._time_left(step)}"]
        parts += [f"{name} {v:.4g}" for name, v in scalars.items() if name.endswith("/loss")]
        for name, value in scalars.items():
            if name.endswith("/top1") or name in self._metrics:
                parts.append(f"{name} {value:{'.1%' if is_accuracy(name) else '.4g'}}")
        if "time/images_per_s" in scalars:
            parts.append(f"{scalars['time/images_per_s']:,.0f} images/s")
        if "time/mfu" in scalars:
            parts.append(f"MFU {scalars['time/mfu']:.1%}")
        line = " | ".join(parts)
        if self._live.disable:
            self._console.out(line, highlight=False)
        else:
            self._live.update(
                self._task, completed=step, description=line, visible=True, refresh=True
            )

    def _time_left(self, step: int) -> str:
        first_step, since = self._start
        if step == first_step:
            return "unknown"
        before, now, end = map(self._flops, (first_step, step, self._total_steps))
        seconds = (self._clock() - since) / (now - before) * (end - now)
        return str(datetime.timedelta(seconds=round(seconds)))


def log_to_console(console: Console = CONSOLE, *, quiet: bool = False) -> None:
    """Show the messages of the package's loggers above the line of a `Progress`.

    Args:
      console: a console on standard error for a command whose standard output is data.
      quiet: show only the package's warnings and errors, and errors of the libraries.
    """
    logger = logging.getLogger("vit_jax")
    logger.handlers = [_ConsoleHandler(console)]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    # orbax logs by absl; among its warnings is advice on how often to save.
    get_absl_logger().setLevel(logging.ERROR if quiet else logging.WARNING)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        self._console.out(shown_lines(level + self.format(record)), highlight=False)


def is_accuracy(name: str) -> bool:
    """Whether a metric is an accuracy, or its deviation, which are shown in percent."""
    leaf = name.removesuffix("_raw").removesuffix(FLIPS)
    return is_of_class(name) or re.search(r"top\d+(_std)?$", leaf) is not None


def is_of_class(name: str) -> bool:
    """Whether a metric is an evaluator's value of one class, such as val/accuracy/cat."""
    return name.count("/") > 1 and not name.startswith("train/")


def readable(values: Mapping[str, float | None]) -> str:
    """Metrics as text: accuracies in percent, counts in full, others with four digits.

    None is shown as not finite; of single classes the lowest are shown, last.
    """

    def show(name: str, value: float | None) -> str:
        if value is None:
            return f"{name} not finite"
        if is_accuracy(name):
            return f"{name} {value:.2%}"
        return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"

    shown = [show(name, value) for name, value in values.items() if not is_of_class(name)]
    of_classes = sorted((value, name) for name, value in values.items()
                        if is_of_class(name) and value is not None)  # fmt: skip
    lowest = ", ".join(show(name, value) for value, name in of_classes[:_LOWEST])
    return ", ".join([*shown, *[f"lowest: {lowest}"] * bool(lowest)])
