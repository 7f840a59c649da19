"""Says what images show, or writes their features.

  python -m vit_jax.main predict --init_from=runs/mine cat.jpg PICTURES/
  python -m vit_jax.main predict --init_from=ViT-B_16.npz --features=digits.npz --data=digits:test

Images are files, and all JPEG and PNG files below folders; --data=NAME:SPLIT is a data set instead
(--data_dir says where). Classes are printed as a table, or with --format=json as JSON lines: by
name where the source tells names; 1,000 classes without names are taken for ImageNet's.
--features=FILE.npz writes what the head gets, or with --tokens=patches the features of each patch.
"""

import argparse
import json

from rich.console import Console
from rich.table import Table

from vit_jax.commands.flags import define_source_flags, read_source
from vit_jax.devices.mesh import start_backend
from vit_jax.errors import InputError, nearest
from vit_jax.job import exit_codes

FORMATS = ("table", "json")
TOKENS = ("pooled", "patches")


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="files and folders")
    parser.add_argument("--data", metavar="NAME:SPLIT", help="a data set instead of files")
    parser.add_argument("--data_dir", metavar="DIR", help="of --data")
    parser.add_argument("--features", metavar="FILE", help="an .npz file to make")
    parser.add_argument("--tokens", default="pooled", help="of --features: pooled or patches")
    parser.add_argument("--format", default="table", help="table or json")
    parser.add_argument("--top", type=int, default=5, help="classes of an image to print")
    parser.add_argument("--batch_size", type=int, default=64, help="over all devices")


def main(flags: argparse.Namespace) -> int:
    for name, known in (("format", FORMATS), ("tokens", TOKENS)):
        value = getattr(flags, name)
        if value not in known:
            raise InputError(f"--{name}={value}: {nearest(value, known)}")
    for name in ("top", "batch_size"):
        if getattr(flags, name) < 1:
            raise InputError(f"--{name}={getattr(flags, name)}: needs a positive number")
    if bool(flags.images) == bool(flags.data):
        raise InputError("give either images (files, folders) or --data=NAME:SPLIT")
    if flags.data and not flags.features:
        raise InputError("--data: is for --features=FILE.npz; to score a data set, use evaluate")

    from vit_jax import metrics  # the rest only now, that a typo is answered at once

    metrics.log_to_console(Console(stderr=True))
    start_backend()
    from vit_jax import data
    from vit_jax.data.image_files import find_images, image_files
    from vit_jax.inference import predict as prediction

    if flags.features:
        prediction.check_output(flags.features)  # before a large model is read
    paths = None if flags.data else find_images(flags.images)
    pretrained = read_source(flags)
    if paths is not None:
        source = image_files(paths)
    else:
        name, _, split = flags.data.partition(":")
        size = pretrained.spec.image_size or (1, 1)
        where = {"data_dir": flags.data_dir, "image_size": size}
        if pretrained.spec.holdout is not None:
            where["holdout"] = pretrained.spec.holdout
        source = data.make_source(name, split=split or "train", **where)
    options = {"batch_size": flags.batch_size}
    if flags.features:
        options["what"] = flags.tokens
        written = prediction.write_features(pretrained, source, flags.features, **options)
        print(json.dumps(written))
        return exit_codes.FAILED if written["unreadable"] else exit_codes.DONE
    console, unreadable = Console(), 0
    table = Table("image", "class", "probability")
    for row in prediction.predict(pretrained, source, top=flags.top, **options):
        unreadable += "error" in row
        if flags.format == "json":
            print(json.dumps(row, ensure_ascii=False))
        elif "error" in row:
            table.add_row(row["file"], row["error"], "")
        else:
            for i, found in enumerate(row["classes"]):
                shown = row["file"] if i == 0 else ""
                table.add_row(shown, found["name"], f"{found['probability']:.1%}")
    if flags.format == "table":
        console.print(table)
    return exit_codes.FAILED if unreadable else exit_codes.DONE
