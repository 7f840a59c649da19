"""Runs measured from outside, and the tables of docs/ that keep their rows; for the tools here."""

import argparse
import csv
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.insight.tables import as_csv

ROOT = pathlib.Path(__file__).resolve().parents[1]


def make_parser(about: str, seeds: int = 3) -> argparse.ArgumentParser:
    """Of the words that tools on CIFAR-10 share: WORKDIR, --data_dir and --seeds.

    `about`: the tool's docstring. `seeds`: as many by default.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("workdir", type=_whole_path)
    parser.add_argument("--data_dir", type=_whole_path, required=True, help="holds cifar10/VERSION")
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds, from 0 on")
    return parser


def _whole_path(text: str) -> pathlib.Path:
    return pathlib.Path(text).resolve()


def train(words: list[str], workdir: pathlib.Path) -> tuple[dict, float]:
    """Train from the start: the summary of the run, and CPU seconds of its whole process.

    `workdir` is made anew. The output goes to the file WORKDIR.txt, which a failure names.
    """
    shutil.rmtree(workdir, ignore_errors=True)  # else the seconds would be of its last part only
    command = [sys.executable, "-m", "vit_jax.main", *words, f"--workdir={workdir}"]
    with open(f"{workdir}.txt", "w") as output:
        job = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        _, code, used = os.wait4(job.pid, 0)
    if code:
        raise SystemExit(f"{' '.join(words)}: see {output.name}")
    return json.loads((workdir / "summary.json").read_text()), used.ru_utime + used.ru_stime


def read_rows(table: pathlib.Path) -> list[dict]:
    """The rows of a CSV file; none where there is no file yet."""
    return [*csv.DictReader(io.StringIO(table.read_text()))] if table.exists() else []


def has_row(table: pathlib.Path, place: dict) -> bool:
    """Whether a row has all the texts of `place`."""
    return any(place.items() <= row.items() for row in read_rows(table))


def add_row(table: pathlib.Path, row: dict) -> None:
    """Print a row and add it to those that the file has by now: others may have added some."""
    print(row, flush=True)
    rows = [*read_rows(table), row]
    write_whole(
        epath.Path(table), as_csv([rows[0], *([row[key] for key in rows[0]] for row in rows)])
    )
