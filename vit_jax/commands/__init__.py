"""Commands of `python -m vit_jax.main`: one file and one name in COMMANDS each.

A command is a module with a docstring (its help), `define_flags(parser)` and `run(flags)`, which
returns the exit code. What commands share about flags is here.
"""

import argparse
import importlib
import types

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.validation import validate

COMMANDS = ("train", "evaluate", "benchmark")


def find_command(name: str) -> types.ModuleType:
    """The module of a command; loaded only now, so that one does not wait for the others."""
    return importlib.import_module(f"vit_jax.commands.{name}")


def define_process_flags(parser: argparse.ArgumentParser) -> None:
    """The flags by which processes of one job find each other, where no cluster is detected."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--num_processes", type=int, help="processes of this job")
    parser.add_argument("--process_id", type=int, help="number of this process, from 0")


def load_valid_config(flags: argparse.Namespace) -> ConfigDict:
    """The config of `--config`, overridden and checked.

    Raises:
      InputError: with all faults.
    """
    config = config_lib.load_config(flags.config)
    faults = config_lib.apply_overrides(config, flags.overrides)
    validate(config, faults, f"--config={flags.config}")
    return config
