"""Check this machine: software, devices, memory, decoding, and access to data and services.

  python -m vit_jax.main doctor
  python -m vit_jax.main doctor --config=folder --config.data.data_dir=IMAGES --all_images
  python -m vit_jax.main doctor --config=folder --config.data.data_dir=IMAGES --output=SEEN
  python -m vit_jax.main doctor --workdir=gs://bucket/runs --wandb --coordinator=HOST:PORT

Each line that is not ok has a remedy. With --config it also says what `train` would choose, whether
an objective without labels was seen to learn from so few images, and estimates the time of the run
from a few steps; --all_images also reads and decodes every image of
the config's data, and names those that fail. A workdir in a bucket is tried with a small object.
--output shows the data: classes, sizes, colours, broken pictures, near duplicates in the training
data and of pictures that the config evaluates, and what a square would cut off; as rows of the
table, and with pictures in DIR/page.html. With a model, --init_from=SOURCE, it also shows doubtful
labels, outliers and clusters. It needs: pip install -e '.[report,curation]'
The exit code is 1 if a check has failed.
"""

import argparse
import functools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.base.packages import need_package
from vit_jax.commands.flags import (
    define_config_flags,
    define_format_flag,
    load_valid_config,
)
from vit_jax.config import Settings
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    import numpy as np

    from vit_jax.data import Source
    from vit_jax.diagnosis.doctor import Finding
    from vit_jax.run.build import Run

_LOOKED_AT = 20_000  # pictures, evenly spread, that a model looks at
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
    parser.add_argument(
        "--output", type=files.absolute, metavar="DIR", help="folder for a page about the data"
    )
    parser.add_argument("--init_from", metavar="SOURCE", help="model that looks at the data too")
    parser.add_argument("--wandb", action="store_true", help="check Weights & Biases")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="process 0 that must answer")
    parser.add_argument("--timeout_s", type=float, default=15.0, help="limit of each check")
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    if flags.overrides and flags.config is None:
        raise InputError(f"--config.{flags.overrides[0][0]}: needs --config=NAME too")
    if flags.all_images and flags.config is None:
        raise InputError("--all_images: needs --config=NAME too, such as --config=folder")
    if flags.output is not None and flags.config is None:
        raise InputError("--output: needs --config=NAME too, such as --config=folder")
    if flags.init_from is not None and flags.output is None:
        raise InputError("--init_from: needs --output=DIR too, for the page that it adds to")
    if flags.output is not None:
        files.check_folder(flags.output, "--output")
        need_package("--output", "jinja2", "report")
        if flags.init_from is not None:
            need_package("--init_from", "cleanlab", "curation")
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
    survey = None if flags.output is None else functools.partial(_survey, flags)
    findings = [*examine(asked=asked, survey=survey, **{n: getattr(flags, n) for n in names})]
    if flags.format == "json":
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        Console().print(as_table(findings))
    failed = any(finding.state == FAILED for finding in findings)
    return exit_codes.FAILED if failed else exit_codes.DONE


def _survey(flags: argparse.Namespace, run: "Run") -> Iterator["Finding"]:
    """Write the page about the data of a run, and give what it says."""
    from vit_jax.config import train_split
    from vit_jax.curation.survey import odd_by_features, survey
    from vit_jax.data import mixed_keys, share_images
    from vit_jax.diagnosis.doctor import Finding
    from vit_jax.insight.pages import write_page

    trained = mixed_keys(run.settings.data)
    source, named = run.sources[key := train_split(run.settings.data)], {}
    for k, found in {key: source, **run.sources}.items():
        if k == key or not any(share_images(k, part) for part in trained):
            name = f"{k.data_name} {k.split}"
            named[name if name not in named else f"{name} of {k.data_dir}"] = found
    sections = survey(named, run.settings.data.max_tokens is not None)
    if flags.init_from is not None:
        records, x_ND = _features(flags.init_from, source)
        sections += odd_by_features(source, records, x_ND)
    flags.output.mkdir(parents=True, exist_ok=True)
    files.write_whole(
        flags.output / "page.html", write_page(f"Data: {next(iter(named))}", sections)
    )
    yield from (Finding(*section[:4]) for section in sections)
    yield Finding("page", "ok", str(flags.output / "page.html"))


def _features(model: str, source: "Source") -> "tuple[np.ndarray, np.ndarray]":
    """Some records of a source, int64 (n,), and a model's features of them, (n, D)."""
    import numpy as np

    from vit_jax import transfer
    from vit_jax.data.order import spread
    from vit_jax.inference.outputs import outputs, without_masked

    records = spread(_LOOKED_AT, source.num_examples)
    pretrained = transfer.read_pretrained(model)
    parts = outputs(
        pretrained, source, what="features", batch_size=64, progress=False, record_ids=records
    )
    return records, np.concatenate([without_masked(x, batch) for x, batch in parts])


def as_table(findings: Iterable[tuple[str, str, str, str]]) -> Table:
    """A row for each finding; the remedy stands below what was found."""
    table = Table("check", "state", Column("found", overflow="fold"))
    for subject, state, found, remedy in findings:
        text = Text(found)
        if remedy:
            text.append(f"\n→ {remedy}", style="bold")
        table.add_row(subject, Text(state, style=_STYLES[state]), text)
    return table
