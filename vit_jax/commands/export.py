"""Export a model to another format, with a receipt that describes it.

  python -m vit_jax.main export --workdir=runs/mine --output=mine --format=hf
  python -m vit_jax.main export --init_from=ViT-B_16.npz --output=ViT-B_16 --format=timm

npz, npz_v2: a file in the first or the later layout of the reference release.
hf: a folder for transformers; hf_pair: one of both towers of a model of images and texts.
timm: a folder, or a .safetensors file with a .json beside it.
stablehlo: a jax.export program for cpu, cuda and tpu with any batch size, including the parameters.
onnx: a program for onnxruntime. litert: a program for LiteRT on phones, one image a call.

The files are read back before they are moved to --output. The largest difference between logits is
recorded in the receipt and printed as JSON, together with the names of the files. A program is run
in its own runtime on pictures, or on texts. In float32 its outputs differ from the model's by at
most 1e-4 of the largest and have a cosine of at least 0.9999; in float16 the cosine is at least
0.999. Each picture gets the same class. int8 loses at most --max_drop of top-1. Otherwise nothing
is written.
"""

import argparse
import json
import sys

from rich.console import Console

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.commands.flags import define_source_flags, read_source, require_flags
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_source_flags(parser)
    parser.add_argument("--output", metavar="PATH", help="file or folder to write")
    parser.add_argument(
        "--format", help="npz, npz_v2, hf, hf_pair, timm, t2t, stablehlo, onnx or litert"
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help="most bytes of a weight file in a folder; default: 5GB, one file for timm",
    )
    of_program = parser.add_argument_group("programs")
    of_program.add_argument(
        "--takes", default="floats", help="floats in the model's value range, or bytes, the pixels"
    )
    of_program.add_argument(
        "--gives",
        default="logits",
        help="logits, probabilities, or features (the head's input); models of images and texts "
        "also give image_features or text_features, normalised and of one width",
    )
    of_program.add_argument("--precision", default="float32", help="float32, float16 or int8")
    of_program.add_argument(
        "--pictures", metavar="FOLDER", help="compare on these; for int8, a folder for each class"
    )
    of_program.add_argument(
        "--calibration",
        metavar="FOLDER",
        help="other pictures; at most 512, evenly spaced, give the ranges of int8",
    )
    of_program.add_argument(
        "--max_drop",
        type=float,
        default=0.01,
        help="the largest loss of top-1 by int8, as a fraction (0.01: one point)",
    )


def main(flags: argparse.Namespace) -> int:
    example = "python -m vit_jax.main export --workdir=runs/mine --output=mine --format=hf"
    require_flags(flags, ("output", "format"), example)
    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend()
    from vit_jax.transfer.export import check_choice, export
    from vit_jax.transfer.program import Choice

    try:
        choice = {name: getattr(flags, name) for name in Choice._fields}
        faults, chosen = Faults(), Choice(**choice)
        faults.check(check_choice, flags.format, chosen, flags.output, flags.max_shard_size)
        faults.need(
            flags.image_size is None or not chosen.of_texts,
            f"--image_size={flags.image_size}: is for images, but gives=text_features takes token "
            "ids; leave it out",
        )
        collect_faults(faults)
        source = read_source(flags)
        receipt = export(
            source, flags.output, flags.format, max_shard_size=flags.max_shard_size, **choice
        )
    except RuntimeError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    shown = {"output": flags.output, **receipt["read_back"], "files": list(receipt["files"])}
    print(json.dumps(shown, indent=2))
    return exit_codes.DONE
