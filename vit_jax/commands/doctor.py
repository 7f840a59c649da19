"""Check this machine: software, devices, memory, decoding, and access to data and services.

  python -m vit_jax.main doctor
  python -m vit_jax.main doctor --config=folder --config.data.data_dir=IMAGES --all_images
  python -m vit_jax.main doctor --workdir=gs://bucket/runs --wandb --coordinator=HOST:PORT

Each line that is not ok has a remedy. With --config it also says what `train` would choose, and
estimates the time of the run from a few steps; --all_images also reads and decodes every image of
the config's data, and names those that fail. A workdir in a bucket is tried with a small object.
The exit code is 1 if a check has failed.
"""

import argparse
import json
from collections.abc import Iterable

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import define_config_flags, define_format_flag, load_valid_config
from vit_jax.config import Settings
from vit_jax.job import exit_codes

_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument(
        "--workdir", type=files.absolute, metavar="DIR", help="folder or bucket to write to"
    )
    parser.add_argument("--data_dir", metavar="DIR", help="folder or bucket with data to read")
    parser.add_argument(
        "--all_images", action="store_true", help="read every image of the config's data"
    )
    parser.add_argument("--wandb", action="store_true", help="check Weights & Biases")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="process 0 that must answer")
    parser.add_argument("--timeout_s", type=float, default=15.0, help="limit of each check")
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    if flags.overrides and flags.config is None:
        raise InputError(f"--config.{flags.overrides[0][0]}: needs --config=NAME too")
    if flags.all_images and flags.config is None:
        raise InputError("--all_images: needs --config=NAME too, such as --config=folder")
    asked = None
    if flags.config is not None:
        config = load_valid_config(flags)
        own = config.data.data_dir
        if None not in (own, flags.data_dir) and own != flags.data_dir:
            raise InputError(f"--data_dir={flags.data_dir}: the config has {own}; leave one out")
        config.data.data_dir = flags.data_dir = own or flags.data_dir
        asked = Settings.of(config)

    from vit_jax.diagnosis.doctor import FAILED, examine  # heavy imports come last
    from vit_jax.run import terminal

    terminal.log_to_console(Console(stderr=True), quiet=True)  # of the checks only warnings
    names = ("workdir", "data_dir", "wandb", "coordinator", "all_images", "timeout_s")
    findings = [*examine(asked=asked, **{name: getattr(flags, name) for name in names})]
    if flags.format == "json":
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        Console().print(as_table(findings))
    failed = any(finding.state == FAILED for finding in findings)
    return exit_codes.FAILED if failed else exit_codes.DONE


def as_table(findings: Iterable[tuple[str, str, str, str]]) -> Table:
    """A row for each finding; the remedy stands below what was found."""
    table = Table("check", "state", Column("found", overflow="fold"))
    for subject, state, found, remedy in findings:
        text = Text(found)
        if remedy:
            text.append(f"\n→ {remedy}", style="bold")
        table.add_row(subject, Text(state, style=_STYLES[state]), text)
    return table
