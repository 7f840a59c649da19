"""List models with their parameter counts and the multiply-adds of a forward pass.

  python -m vit_jax.main models
  python -m vit_jax.main models ViT-B BiT
  python -m vit_jax.main models --weights dinov2

Words select the models whose name contains one of them. Parameters include a head of 1,000 classes;
GMAC: 10^9 multiply-adds for one image of 224 px.

--weights lists published weights that --config.init_from and --init_from take by name: the size of
their images in pixels, the mean and deviation that normalise them, what the features are, the
licence, and by what share of the largest output a small model of the kind differs from the library.
Google's .npz files have names of their own, such as ViT-B/16@augreg.
"""

import argparse

from rich.console import Console
from rich.table import Column, Table

from vit_jax.base.errors import InputError, nearest
from vit_jax.job import exit_codes

_WIDE = 200  # columns that hold every row


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a name, such as ViT-B")
    parser.add_argument("--weights", action="store_true", help="list published weights instead")


def main(flags: argparse.Namespace) -> int:
    return _list_weights(flags.words) if flags.weights else _list_models(flags.words)


def _list_models(words: list[str]) -> int:
    from vit_jax.devices.flops import forward_macs
    from vit_jax.devices.mesh import start_backend
    from vit_jax.models import create_model, known_names, translate_name
    from vit_jax.models.contract import with_known
    from vit_jax.transfer.shapes import abstract_params

    known = known_names()
    names = [name for name in known if _has_any(words, name)]
    if not names:
        hint = translate_name(words[0]) or nearest(words[0], known)
        raise InputError(f"{' '.join(words)}: no model has this in its name; {hint}")
    start_backend("cpu")  # leave accelerators to training runs
    print("With a head of 1,000 classes; GMAC: 10^9 multiply-adds for one image of 224 px.")
    print(f"{'name':<16}{'parameters':>16}{'GMAC':>12}", flush=True)
    for name in names:
        model = with_known(create_model(name), scan=True)  # traces many times faster
        params = sum(leaf.size for leaf in abstract_params(model).values())
        # Large ResNets take seconds each, so print every line at once.
        print(f"{name:<16}{params:>16,}{forward_macs(model) / 1e9:>12,.2f}", flush=True)
    return exit_codes.DONE


def _list_weights(words: list[str]) -> int:
    from vit_jax.transfer.known_weights import WEIGHTS

    rows = [weights for weights in WEIGHTS if _has_any(words, f"{weights.name} {weights.model}")]
    if not rows:
        hint = nearest(words[0], [weights.name for weights in WEIGHTS])
        raise InputError(f"{' '.join(words)}: no published weights have this in their name; {hint}")
    columns = "init_from", "model", "px", "pixels", "features", "licence", "parity"
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for weights in rows:
        table.add_row(*map(str, weights[:-1]), f"{weights.parity:.0e}")
    Console(width=_WIDE).print(table)
    if any(weights.name.endswith(".pth") for weights in rows):
        print("A .pth is a pickle of the Hub: write it to a .safetensors file as "
              "docs/how_to/weights.md shows.")  # fmt: skip
    return exit_codes.DONE


def _has_any(words: list[str], name: str) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)
