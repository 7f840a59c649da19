"""Classify images, or save their features.

  python -m vit_jax.main predict --init_from=runs/mine cat.jpg IMAGES/
  python -m vit_jax.main predict --init_from=ViT-B_16.npz --features=digits.npz --data=digits:test

Images are files, or folders whose images (JPEG, PNG, WebP, BMP, GIF, TIFF) are read at any depth.
--data=NAME:SPLIT reads a data set instead, from --data_dir. Classes are printed as a table, or as
JSON lines with --format=json. They have names if the model comes with class names; 1,000 classes
without names are assumed to be ImageNet's. Images that are missing or cannot be read are reported,
all others are predicted, and the exit code is 1. --features=FILE.npz saves the features before the
head, or with --tokens=patches the features of every patch.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.commands.flags import (
    define_format_flag,
    define_image_flags,
    define_source_flags,
    open_source,
    positive_int,
    read_source,
)
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    define_image_flags(parser, batch_size=64)
    parser.add_argument("--features", metavar="FILE", help=".npz file to write")
    parser.add_argument(
        "--tokens", default="pooled", choices=("pooled", "patches"), help="features to save"
    )
    define_format_flag(parser)
    parser.add_argument("--top", type=positive_int, default=5, help="classes to print per image")


def main(flags: argparse.Namespace) -> int:
    _check_flags(flags)

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend()
    from vit_jax.data.images.given import search_images
    from vit_jax.inference import predict as prediction

    paths, faults = ([], {}) if flags.data else search_images(flags.images)
    wrong = Faults()  # collected before a large model is read
    output = flags.features and wrong.check(prediction.check_output, flags.features)
    if not paths:
        wrong += [f"{path}: {fault}" for path, fault in faults.items()]
    collect_faults(wrong)
    pretrained = read_source(flags)
    source = open_source(flags, pretrained, paths)
    if output:
        for path, fault in faults.items():
            print(f"error: {path}: {fault}", file=sys.stderr)
        what = {"pooled": "features", "patches": "dense"}[flags.tokens]
        written = prediction.write_features(
            pretrained, source, output, batch_size=flags.batch_size, what=what
        )
        print(json.dumps(written))
        return exit_codes.FAILED if written["unreadable"] or faults else exit_codes.DONE
    rows = prediction.classify(pretrained, source, top=flags.top, batch_size=flags.batch_size)
    absent = [{"file": path, "error": fault} for path, fault in faults.items()]
    num_errors = _print_rows(itertools.chain(rows, absent), flags.format)
    return exit_codes.FAILED if num_errors else exit_codes.DONE


def _check_flags(flags: argparse.Namespace) -> None:
    """Raise one InputError that lists all faults of the flags."""
    faults = Faults()
    faults.need(
        bool(flags.images) != bool(flags.data),
        "give either images (files, folders) or --data=NAME:SPLIT",
    )
    faults.need(
        not flags.data or flags.features,
        "--data: needs --features=FILE.npz; to score a data set, use evaluate",
    )
    collect_faults(faults)


def _print_rows(rows: Iterable[dict[str, Any]], format: str) -> int:
    """Print the predictions `rows` as a table or as JSON lines; return how many are errors."""
    num_errors, table = 0, Table("image", "class", "probability")
    for row in rows:
        num_errors += "error" in row
        if format == "json":
            print(json.dumps(row, ensure_ascii=False))
        elif "error" in row:
            table.add_row(Text(row["file"]), row["error"], "")
        else:
            for i, found in enumerate(row["classes"]):
                shown = Text(row["file"] if i == 0 else "")
                table.add_row(shown, Text(found["name"]), f"{found['probability']:.1%}")
    if format == "table":
        Console().print(table)
    return num_errors
