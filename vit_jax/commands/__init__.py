"""Commands of `python -m vit_jax.main`: one module each, listed in COMMANDS.

A command is a module with a docstring (its help), `define_flags(parser)` and `main(flags)`, which
returns the exit code. Importing this package does not import JAX, so that a wrong command fails at
once and the process can be interrupted.
"""

import importlib
import types

COMMANDS = ("train", "branch", "evaluate", "predict", "export", "push", "benchmark", "plan",
            "study", "label", "report", "status", "figures", "prepare", "curate",
            "duplicates", "check", "doctor", "certify", "configs", "models", "keys")  # fmt: skip


def find_command(name: str) -> types.ModuleType:
    """Import and return the module of a command; the other commands are not imported."""
    return importlib.import_module(f"vit_jax.commands.{name}")
