"""Publish a model on the Hugging Face Hub, with a model card.

  python -m vit_jax.main push runs/mine OWNER/NAME --dry_run
  python -m vit_jax.main push runs/mine OWNER/NAME --license=apache-2.0

SOURCE is a workdir or any other model, as --init_from of `export` takes it. The weights are
exported and read back first, as `export` does. The repository is made if there is none. Set
HF_TOKEN, or run `hf auth login`, for a token that may write. After a failed upload run the same
command again: what was sent is not sent again.

Prints the names and sizes of the files, and the address, as JSON. With --dry_run it sends nothing,
and prints texts too: the model card README.md, the recipe, the receipt and the library's settings,
but no long files such as a tokenizer.
"""

import argparse
import json
import sys

from rich.console import Console

from vit_jax.base.errors import InputError
from vit_jax.commands.flags import define_best_flag
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="workdir, file or name")
    parser.add_argument("repository", nargs="?", metavar="OWNER/NAME", help="at the Hub")
    define_best_flag(parser)
    parser.add_argument(
        "--format", default="timm", help="of the weights: hf, hf_pair, timm (default) or t2t"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="made if there is none")
    parser.add_argument("--pull_request", action="store_true", help="open a pull request")
    parser.add_argument(
        "--license", metavar="NAME", help="such as apache-2.0; default: as the source's at the Hub"
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help="most bytes of a weight file; default: 5GB, one file for timm",
    )
    parser.add_argument("--dry_run", action="store_true", help="show all, send nothing")


def main(flags: argparse.Namespace) -> int:
    if not flags.source or not flags.repository:
        raise InputError("give SOURCE and OWNER/NAME, e.g. push runs/mine OWNER/NAME --dry_run")
    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend()
    from vit_jax.transfer import read_pretrained
    from vit_jax.transfer.push import push

    pretrained = read_pretrained(flags.source, best=flags.best)
    how = {name: getattr(flags, name) for name in
           ("revision", "pull_request", "license", "dry_run", "max_shard_size")}  # fmt: skip
    try:
        said = push(pretrained, flags.repository, flags.format, **how)
    except RuntimeError as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    texts = said.pop("texts")
    print(json.dumps(said, indent=2))
    if flags.dry_run:
        for name, text in texts.items():
            print(f"\n== {name}\n{text}")
    return exit_codes.DONE
