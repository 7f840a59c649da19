"""Packages that only some commands need; see the extras of setup.py."""

import importlib.util

from vit_jax.base.errors import InputError


def need_package(asked: str, name: str, extra: str) -> None:
    """Raise InputError unless a package of an extra is installed; `asked`: the flag or key."""
    if importlib.util.find_spec(name) is None:
        raise InputError(f"{asked}: {name} is not installed; run pip install -e '.[{extra}]'")
