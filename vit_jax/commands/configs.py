"""Lists the configs that come with the package, each with its words.

  python -m vit_jax.main configs

A config is given by its name, and takes its words behind a colon, with commas between them:
--config=finetune:ViT-B/16,cifar10,debug. MODEL and DATA stand for names, see `models` and README.
"""

import argparse

from vit_jax.config.text import import_config, shipped_configs
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    del parser  # it has none


def main(flags: argparse.Namespace) -> int:
    del flags
    for name, path in shipped_configs().items():
        config = import_config(path)
        head, _, _ = config.__doc__.partition("\n")
        print(f"{name}: {head}")
        for word, meaning in config.WORDS.items():
            print(f"    {word:<16}{meaning}")
    return exit_codes.DONE
