"""List models with their parameter counts and the multiply-adds of a forward pass.

  python -m vit_jax.main models
  python -m vit_jax.main models ViT-B BiT

Words select the models whose name contains one of them. Parameters include a head of 1,000 classes;
GMAC: 10^9 multiply-adds for one image of 224 px.
"""

import argparse

from vit_jax.base.errors import InputError, nearest
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a name, such as ViT-B")


def main(flags: argparse.Namespace) -> int:
    from vit_jax.devices.flops import forward_macs
    from vit_jax.devices.mesh import start_backend
    from vit_jax.models import create_model, known_names, translate_name
    from vit_jax.models.contract import with_known
    from vit_jax.transfer.shapes import abstract_params

    known = known_names()
    words = [word.lower() for word in flags.words]
    names = [name for name in known if not words or any(word in name.lower() for word in words)]
    if not names:
        hint = translate_name(flags.words[0]) or nearest(flags.words[0], known)
        raise InputError(f"{' '.join(flags.words)}: no model has this in its name; {hint}")
    start_backend("cpu")  # leave accelerators to training runs
    print("With a head of 1,000 classes; GMAC: 10^9 multiply-adds for one image of 224 px.")
    print(f"{'name':<16}{'parameters':>16}{'GMAC':>12}", flush=True)
    for name in names:
        model = with_known(create_model(name), scan=True)  # traces many times faster
        params = sum(leaf.size for leaf in abstract_params(model).values())
        # Large ResNets take seconds each, so print every line at once.
        print(f"{name:<16}{params:>16,}{forward_macs(model) / 1e9:>12,.2f}", flush=True)
    return exit_codes.DONE
