"""Write a report on runs and studies: one HTML file that needs no network.

  python -m vit_jax.main report runs/a --output=report.html
  python -m vit_jax.main report runs/a runs/b runs/study --figures=FIGURES --output=report.html

It shows results with deviations over seeds, curves that zoom, times, the configs and their
differences, results by class (of `evaluate --output=RUN/classes`), pictures in RUN/figures and in
each --figures, and where the runs come from. Runs may still be training. --figures and --metric may
be repeated. Needs: pip install -e '.[report]'
"""

import argparse
import logging

from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")

ENDING = ".html"


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="workdirs of runs and studies")
    repeated = {"action": "append", "default": []}
    parser.add_argument("--output", metavar="FILE", default="report.html", help="FILE.html")
    parser.add_argument("--figures", metavar="DIR", help="folder with PNGs to show", **repeated)
    parser.add_argument("--metric", metavar="NAME", help="metric to draw", **repeated)


def main(flags: argparse.Namespace) -> int:
    output = files.absolute(flags.output)
    if output.suffix != ENDING:
        raise InputError(f"--output={output}: the name must end in {ENDING}")
    files.check_output(output, "--output")
    folders = [files.absolute(folder) for folder in flags.figures]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--figures={folder}: no such folder; give one with PNGs")

    from vit_jax.insight import report
    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(quiet=flags.quiet)
    report.check_installed()
    page = report.write(flags.runs, folders, flags.metric)
    files.write_whole(output, page)
    logger.info("report: %s, %.1f MB", output, len(page.encode()) / 1e6)
    return exit_codes.DONE
