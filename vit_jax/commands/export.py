"""Writes a model in a format that others read, and a receipt of what it is.

  python -m vit_jax.main export --workdir=runs/mine --output=mine --format=hf
  python -m vit_jax.main export --init_from=ViT-B_16.npz --output=ViT-B_16 --format=timm

npz, npz_v2: a file of the reference release, of its first or its later variant.
hf: a folder that transformers opens. timm: a folder, or a .safetensors file with a .json.
stablehlo: a program (jax.export) for cpu, cuda and tpu and any batch size, parameters within.

The files are read back before they are written to --output; the receipt tells the largest
difference of a logit. Prints that and the files' names as JSON on standard output.
"""

import argparse
import json
import sys

from rich.console import Console

from vit_jax.commands.flags import define_source_flags, read_source, require_flags
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    parser.add_argument("--output", metavar="PATH", help="file or folder to make")
    parser.add_argument("--format", help="npz, npz_v2, hf, timm or stablehlo")


def main(flags: argparse.Namespace) -> int:
    example = "python -m vit_jax.main export --workdir=runs/mine --output=mine --format=hf"
    require_flags(flags, ("output", "format"), example)
    from vit_jax import metrics  # the rest only now, that a typo is answered at once

    metrics.log_to_console(Console(stderr=True))
    start_backend()
    from vit_jax.transfer.export import export

    try:
        receipt = export(read_source(flags), flags.output, flags.format)
    except RuntimeError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    shown = {"output": flags.output, **receipt["read_back"], "files": list(receipt["files"])}
    print(json.dumps(shown, indent=2))
    return exit_codes.DONE
