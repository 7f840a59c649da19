"""List the configs that come with the package and the words that each accepts.

  python -m vit_jax.main configs

Words follow the name of the config after a colon, separated by commas:
--config=finetune:ViT-B/16,cifar10,debug. MODEL and DATA are placeholders for names; see the
command `models` and docs/reference/models.md.
"""

import argparse

from vit_jax.config.text import import_config, shipped_configs
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    del parser  # no flags


def main(flags: argparse.Namespace) -> int:
    del flags
    for name, path in shipped_configs().items():
        config = import_config(path)
        head, _, _ = config.__doc__.partition("\n")
        print(f"{name}: {head}")
        for word, meaning in config.WORDS.items():
            print(f"    {word:<16}{meaning}")
    return exit_codes.DONE
