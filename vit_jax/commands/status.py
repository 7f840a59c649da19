"""Show where runs are: step, speed, time left, loss, health, host, goodput.

  python -m vit_jax.main status runs/
  python -m vit_jax.main status runs/a runs/b --watch

It reads only the files of the workdirs, from any machine that sees them; a folder stands for the
runs and studies in it, up to two folders deep. --watch shows the table anew every 5 seconds until
Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base.errors import shown
from vit_jax.commands.flags import define_format_flag
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.insight.status import Status

_WATCH_S = 5.0
_WIDE = 10_000  # columns of a pipe, which cuts nothing
_COLUMNS = ("run", "step", "images/s", "ETA", "train/loss", "health", "where", "goodput")


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="workdirs of runs and studies, or folders of them"
    )
    parser.add_argument("--watch", action="store_true", help="show it anew every 5 seconds")
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    from vit_jax.insight.status import read_status
    from vit_jax.run import terminal

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if flags.format == "json":
        found = [dataclasses.asdict(status) for status in read_status(flags.runs)]
        print(json.dumps(found, indent=2))
    elif not flags.watch:
        console.print(_table(read_status(flags.runs)))
    else:
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            show = console.print
            if console.is_terminal:
                live = Live(console=console, auto_refresh=False, vertical_overflow="visible")
                show = functools.partial(stack.enter_context(live).update, refresh=True)
            while True:
                show(_table(read_status(flags.runs)))
                time.sleep(_WATCH_S)
    return exit_codes.DONE


def _table(found: Iterable["Status"]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in _COLUMNS))
    for status in found:
        cells = status.cells()
        table.add_row(*(Text(shown(cells[name])) for name in _COLUMNS))
    return table
