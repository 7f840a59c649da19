"""Commands of `python -m vit_jax.main`: one file and one name in COMMANDS each.

A command is a module with a docstring (its help), `define_flags(parser)` and `main(flags)`, which
returns the exit code. Importing this loads no JAX, so that a process can be ended, and a wrong
command is answered, at once.
"""

import importlib
import types

COMMANDS = ("train", "evaluate", "predict", "export", "benchmark", "plan", "study", "configs",
            "models")  # fmt: skip


def find_command(name: str) -> types.ModuleType:
    """The module of a command; loaded only now, so that one does not wait for the others."""
    return importlib.import_module(f"vit_jax.commands.{name}")
