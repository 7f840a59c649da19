"""What a run shows on the terminal: a line that is kept up to date, and messages above it."""

import datetime
import logging
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

CONSOLE = Console()


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


def readable(values: Mapping[str, float | None]) -> str:
    """Metrics in a message: accuracies in percent, counts in full, the rest in four digits.

    None is a value that was not finite.
    """

    def show(name, value):
        if value is None:
            return f"{name} not finite"
        if name.removesuffix("_raw").endswith(("top1", "top5", "top1_std")):
            return f"{name} {value:.2%}"
        return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"

    return ", ".join(show(name, value) for name, value in values.items())
