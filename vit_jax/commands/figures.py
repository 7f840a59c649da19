"""Draw what a model learned: filters, positions, attention, features, similar layers.

  python -m vit_jax.main figures --workdir=runs/mine --output=figures IMAGES/
  python -m vit_jax.main figures --init_from=ViT-B_16.npz --output=figures \\
      --data=imagenet2012:validation --data_dir=DIR --examples=128
  python -m vit_jax.main figures --init_from=A --compare_to=B --figures=similarity \\
      --output=figures IMAGES/

Images are files, or folders read at any depth; --data=NAME:SPLIT reads a data set instead. Each
figure is a PNG as wide as a column of a paper, with its numbers beside it as .npz or .csv;
--figures=distance.pdf,norms.svg makes vector figures. Averages are over at most --examples images,
evenly spaced; maps are drawn for --shown of these.
Filters and positions need no images. A figure that the model cannot give is left out, and one
line says why.
"""

import argparse
import json
import os
import sys

from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.commands.flags import (
    define_format_flag,
    define_image_flags,
    define_source_flags,
    open_source,
    positive_int,
    read_source,
)
from vit_jax.devices.mesh import start_backend
from vit_jax.insight.figure_names import FIGURE_NAMES, FILE_NAMES
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    define_image_flags(parser, batch_size=32)
    parser.add_argument("--output", type=files.absolute, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--figures", metavar="NAME,...",
        help=f"any of {', '.join(FIGURE_NAMES)}, each may end in .pdf or .svg; default: all, as "
        "PNGs",
    )  # fmt: skip
    parser.add_argument(
        "--compare_to", metavar="SOURCE", help="second model, for `similarity` between both"
    )
    parser.add_argument("--examples", type=positive_int, default=128, help="images to average over")
    parser.add_argument("--shown", type=positive_int, default=3, help="images to draw maps of")
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    names = _check_flags(flags)
    files.check_folder(flags.output, "--output")

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend()
    from vit_jax.data.images.given import search_images
    from vit_jax.insight.figures import draw_figures, needs_images

    paths, faults = search_images(flags.images)
    if faults and not paths:
        raise InputError(*(f"{path}: {fault}" for path, fault in faults.items()))
    pretrained = read_source(flags)
    source = None
    if (paths or flags.data) and needs_images(names):
        source = open_source(flags, pretrained, paths)
    how = {name: getattr(flags, name) for name in ("examples", "batch_size", "shown")}
    how |= {"compare_to": flags.compare_to, "progress": not flags.quiet}
    said = draw_figures(pretrained, flags.output, source, names, **how)
    if flags.format == "json":
        print(json.dumps({"output": os.fspath(flags.output), **said}))
    else:
        for name, made in said["figures"].items():
            print(f"{name}: {', '.join(made)}")
        for name, reason in said["left_out"].items():
            print(f"{name}: left out: {reason}")
    for path, fault in faults.items():
        print(f"error: {path}: {fault}", file=sys.stderr)
    return exit_codes.FAILED if faults else exit_codes.DONE


def _check_flags(flags: argparse.Namespace) -> list[str]:
    """The names of the figures to draw; raises InputError that lists all faults of the flags."""
    found = Faults()
    found.need(flags.output, "--output: missing; give a folder, e.g. --output=figures")
    chosen = [name.strip() for name in (flags.figures or ",".join(FIGURE_NAMES)).split(",")]
    for name in chosen:
        found.need_known("--figures", name, FILE_NAMES)
    if flags.compare_to is not None:
        is_drawn = "similarity" in {name.partition(".")[0] for name in chosen}
        found.need(is_drawn, "--compare_to: is for `similarity`; add it to --figures")
    both = flags.images and flags.data
    found.need(not both, "give either images (files, folders) or --data=NAME:SPLIT, not both")
    collect_faults(found)
    return [name for name in FILE_NAMES if name in chosen]
