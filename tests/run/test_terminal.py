"""Output on a terminal, and to a file."""

import io
import logging
import re
import sys

import absl.logging
import pytest
from fake_clock import FakeClock
from rich.console import Console

from vit_jax.run import terminal
from vit_jax.run.terminal import Progress


@pytest.fixture(autouse=True)
def restored_logger(monkeypatch):
    logger = logging.getLogger("vit_jax")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))


SCALARS = {
    "train/loss": 2.30259,
    "train/top1": 0.125,
    "train/grad_norm": 7.0,
    "time/images_per_s": 1234.5,
    "time/mfu": 0.4123,
}
LINE = " | train/loss 2.303 | train/top1 12.5% | 1,234 images/s | MFU 41.2%"


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)


def terminal_screen(text):
    """The lines left on a terminal after `text`, in which rich redraws by "\\r, erase line"."""
    left = re.sub(r"[^\n]*\r\x1b\[2K", "", text)
    return re.sub(r"\x1b\[\?25[lh]", "", left).splitlines()


def test_progress_prints_lines_where_there_is_no_terminal():
    out, clock = console(terminal=False), FakeClock()
    own = {"metrics": ["top3", "own"], "console": out, "clock": clock}
    with Progress(3000, start=500, **own) as progress:
        clock.now += 1000
        progress.update(1000, SCALARS)
        clock.now += 1000
        progress.update(2000, {"train/loss": 1.0, "train/top3": 0.5, "train/own": 2.5})
    assert out.file.getvalue().splitlines() == [
        f"step 1,000/3,000 | ETA 1:06:40{LINE}",
        "step 2,000/3,000 | ETA 0:22:13 | train/loss 1 | train/top3 50.0% | train/own 2.5",
    ]


def test_the_time_left_knows_that_later_steps_take_longer():
    out, clock = console(terminal=False), FakeClock()
    flops = {500: 500, 1000: 1000, 3000: 7000}.get
    with Progress(3000, start=500, flops=flops, console=out, clock=clock) as progress:
        clock.now += 100
        progress.update(1000, {})
    assert out.file.getvalue() == "step 1,000/3,000 | ETA 0:20:00\n"


def test_progress_keeps_one_line_on_a_terminal():
    out = console(terminal=True)
    terminal.log_to_console(out)
    with Progress(3000, console=out) as progress:
        progress.update(1000, SCALARS)
        logging.getLogger("vit_jax.run.train").info("saved step 1000")
        progress.update(1001, SCALARS)
    screen = terminal_screen(out.file.getvalue())
    assert len(screen) == 2
    assert screen[0] == "saved step 1000"
    bar, line = screen[1].split(maxsplit=1)
    assert set(bar) <= {*"━╺╸"}
    assert line.startswith("step 1,001/3,000 | ETA 0:00:0")  # whole at 80 columns
    assert "| train/loss 2.303" in line and line.rstrip().endswith("…")


def test_progress_gives_the_terminal_back_after_an_exception():
    out = console(terminal=True)
    stdout = sys.stdout
    with pytest.raises(KeyboardInterrupt), Progress(3000, console=out) as progress:
        progress.update(1000, SCALARS)
        raise KeyboardInterrupt
    hide, show = "\x1b[?25l", "\x1b[?25h"
    text = out.file.getvalue()
    assert 0 <= text.rfind(hide) < text.rfind(show)
    assert sys.stdout is stdout


def test_a_narrow_terminal_cuts_the_line():
    out = console(terminal=True)
    out.width = 30
    with Progress(3000, console=out) as progress:
        progress.update(1000, SCALARS)
    assert [len(line) for line in terminal_screen(out.file.getvalue())] == [30]


def test_log_messages_name_their_level_from_warnings_on():
    out = console(terminal=False)
    terminal.log_to_console(out)
    terminal.log_to_console(out)
    logger = logging.getLogger("vit_jax.devices.sharding")
    logger.info("[bold] is no markup, " + "and a long line is not wrapped " * 10)
    logger.warning("not divided")
    logger.info("class \x1b[31mred\x07\nand a second line")
    message, warning, *escaped = out.file.getvalue().splitlines()
    assert message.startswith("[bold] is no markup, and a long")
    assert escaped == [r"class \x1b[31mred\x07", "and a second line"]
    assert warning == "WARNING: not divided"


def test_quiet_shows_warnings_only(caplog):
    out = console(terminal=False)
    for quiet in (True, False):  # orbax, for one
        terminal.log_to_console(out, quiet=quiet)
        absl.logging.warning("Waiting for previous save to complete took 2 seconds.")
        assert len(caplog.records) == (not quiet)
    terminal.log_to_console(out, quiet=True)
    logger = logging.getLogger("vit_jax.run")
    logger.info("compiled")
    logger.warning("not divided")
    assert out.file.getvalue().splitlines() == ["WARNING: not divided"]


def test_metrics_in_a_message():
    values = {"test/top1": 0.5, "test/top1_flips": 0.75, "test/num_examples": 1000,
              "test/ece": 0.012346, "test/loss": None}  # fmt: skip
    assert terminal.readable(values) == (
        "test/top1 50.00%, test/top1_flips 75.00%, test/num_examples 1,000, "
        "test/ece 0.01235, test/loss not finite"
    )


def test_the_lowest_classes_come_last():
    values = {"val/top1": 0.5} | {f"val/accuracy/{c}": i / 10 for i, c in enumerate("edcba")}
    said = "lowest: val/accuracy/e 0.00%, val/accuracy/d 10.00%, val/accuracy/c 20.00%"
    assert terminal.readable(values) == f"val/top1 50.00%, {said}"
    assert terminal.readable({"val/loss": None, "train/loss/a": 1.0}) == (
        "val/loss not finite, train/loss/a 1"
    )
