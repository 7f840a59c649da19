"""List the configs that come with the package and the words that each accepts.

  python -m vit_jax.main configs
  python -m vit_jax.main configs finetune mae

Words follow the name of the config after a colon, separated by commas:
--config=finetune:ViT-B/16,cifar10,debug. MODEL and DATA are placeholders for names; see the
command `models` and docs/reference/models.md.
"""

import argparse

from vit_jax.base.errors import collect_faults, nearest
from vit_jax.config.text import import_config, shipped_configs
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these configs, in full")


def main(flags: argparse.Namespace) -> int:
    shipped = shipped_configs()
    collect_faults([f"{name}: no such config; {nearest(name, list(shipped))}"
                    for name in flags.names if name not in shipped])  # fmt: skip
    for name in flags.names or shipped:
        config = import_config(shipped[name])
        head, _, text = (config.__doc__ or "").partition("\n")
        print(f"{name}: {head}")
        if flags.names:
            print(
                text.replace("python -m vit_jax.main", "vit_jax").replace(
                    f"configs/{name}.py", name
                )
            )
        for word, meaning in config.WORDS.items():
            print(f"    {word:<20}{meaning}")
    return exit_codes.DONE
