"""Draw what a model learned: filters, positions, attention, features, similar layers.

  python -m vit_jax.main figures --workdir=runs/mine --output=figures PICTURES/
  python -m vit_jax.main figures --init_from=ViT-B_16.npz --output=figures \\
      --data=imagenet2012:validation --data_dir=DIR --examples=128
  python -m vit_jax.main figures --init_from=A --compare_to=B --figures=similarity \\
      --output=figures PICTURES/

Pictures are files, or folders read at any depth; --data=NAME:SPLIT reads a data set instead. Each
figure is a PNG as wide as a column of a paper, with its numbers beside it as .npz or .csv. Averages
are over at most --examples images, evenly spaced; maps are drawn for the first --shown of them.
Filters and positions need no pictures. A figure that the model cannot give is left out, and one
line says why.
"""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from vit_jax import files
from vit_jax.commands.flags import (
    check_image_flags,
    define_image_flags,
    define_source_flags,
    open_data_set,
    read_source,
)
from vit_jax.config.checks import LARGEST_BATCH
from vit_jax.devices.mesh import start_backend
from vit_jax.errors import Faults, InputError
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.data import Source
    from vit_jax.transfer import Pretrained

NAMES = ("filters", "positions", "distance", "rollout", "heads", "features", "entropy", "norms",
         "similarity")  # fmt: skip
FORMATS = ("table", "json")
_LONGEST_NAME = 20  # letters


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    define_image_flags(parser)
    parser.add_argument("--output", metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--figures", metavar="NAME,...", help=f"any of {', '.join(NAMES)}; default: all"
    )
    parser.add_argument(
        "--compare_to", metavar="SOURCE", help="second model, for `similarity` between both"
    )
    parser.add_argument("--examples", type=int, default=128, help="images to average over")
    parser.add_argument("--shown", type=int, default=3, help="images to draw maps of")
    parser.add_argument("--batch_size", type=int, default=32, help="images at once, on all devices")
    parser.add_argument("--format", default="table", help="standard output: table or json")


def main(flags: argparse.Namespace) -> int:
    names = _check_flags(flags)
    output = files.absolute(flags.output)
    files.check_folder(output, "--output")

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend()
    from vit_jax.data.image_files import search_images
    from vit_jax.insight import model_figures as figures

    has_pictures = bool(flags.images or flags.data)
    paths, faults = search_images(flags.images) if flags.images else ([], {})
    if faults and not paths:
        raise InputError(*(f"{path}: {fault}" for path, fault in faults.items()))
    pretrained = read_source(flags)
    reasons = figures.left_out(pretrained.model, names, has_pictures)
    names = [name for name in names if name not in reasons]
    subject = figures.Subject(pretrained, name=_name(flags.init_from or flags.workdir))
    if figures.needs_pictures(names):
        source = _open(flags, pretrained, paths)
        how = {"examples": flags.examples, "batch_size": flags.batch_size, "shown": flags.shown}
        how["progress"] = not flags.quiet
        subject.seen = figures.measure_chosen(pretrained, source, **how)
        if flags.compare_to is not None and "similarity" in names:
            other = _read_other(flags.compare_to, pretrained)
            subject.other = figures.measure_chosen(other, source, **how)
            subject.other_name = _name(flags.compare_to)
    written, not_made = figures.write_figures(subject, names, output)
    reasons |= not_made
    _say(flags.format, output, written, {name: reasons[name] for name in NAMES if name in reasons})
    for path, fault in faults.items():
        print(f"error: {path}: {fault}", file=sys.stderr)
    return exit_codes.FAILED if faults else exit_codes.DONE


def _check_flags(flags: argparse.Namespace) -> list[str]:
    """The names of the figures to draw; raises InputError that lists all faults of the flags."""
    found = Faults()
    found.need(flags.output, "--output: missing; give a folder, e.g. --output=figures")
    found.need_known("--format", flags.format, FORMATS)
    chosen = [name.strip() for name in (flags.figures or ",".join(NAMES)).split(",")]
    for name in chosen:
        found.need_known("--figures", name, NAMES)
    for name in ("examples", "shown", "batch_size"):
        found.need_positive(f"--{name}", getattr(flags, name), LARGEST_BATCH)
    found.need(flags.shown <= flags.batch_size, f"--shown={flags.shown}: needs at most "
               f"--batch_size={flags.batch_size}; raise that")  # fmt: skip
    if flags.compare_to is not None:
        found.need("similarity" in chosen, "--compare_to: is for `similarity`; add it to --figures")
        found.need(flags.images or flags.data, "--compare_to: needs pictures; give files, folders "
                   "or --data=NAME:SPLIT")  # fmt: skip
    found.check(check_image_flags, flags)
    if found:
        raise InputError(*found)
    return [name for name in NAMES if name in chosen]


def _open(flags: argparse.Namespace, pretrained: "Pretrained", paths: list[str]) -> "Source":
    """The pictures `paths`, or the records of --data."""
    from vit_jax.data.image_files import image_files

    if flags.data:
        return open_data_set(flags, pretrained)
    return image_files(paths, pretrained.spec.exif is not False, pretrained.spec.channels)


def _read_other(source: str, pretrained: "Pretrained") -> "Pretrained":
    """The model of --compare_to; where it takes any image size, at that of `pretrained`."""
    from vit_jax import transfer

    try:
        other = transfer.read_pretrained(source)
    except InputError as e:
        raise InputError(f"--compare_to={source}: {e}") from None
    if other.spec.image_size is None:
        other = transfer.with_image_size(other, pretrained.spec.image_size)
    if other.spec.channels != pretrained.spec.channels:
        raise InputError(
            f"--compare_to={source}: takes images of {other.spec.channels} channels, the first "
            f"model of {pretrained.spec.channels}; choose models that take the same"
        )
    return other


def _name(source: str) -> str:
    """A short name of a source, for labels."""
    *above, name = source.rstrip("/").split("/")
    if len(above) > 1 and above[-1] == "checkpoints":
        name = f"{above[-2]} at {name}"
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _say(
    format: str, output: os.PathLike, written: dict[str, list[str]], left_out: dict[str, str]
) -> None:
    if format == "json":
        print(json.dumps({"output": os.fspath(output), "figures": written, "left_out": left_out}))
        return
    for name, made in written.items():
        print(f"{name}: {', '.join(made)}")
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}")
