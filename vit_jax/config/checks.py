"""Checks that a config has all keys, and those that must be set; `Settings` checks the values."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, nearest
from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS


def find_unset(config: ConfigDict, required: Sequence[str]) -> list[str]:
    """A fault for each key in `required` that is None."""
    values = flatten(config)
    return [
        f"{key}: not set; set it in the config file or by --config.{key}=..."
        for key in required
        if values[key] is None
    ]


def find_emptied(config: ConfigDict) -> list[str]:
    """A fault for each key that is None but not optional; a config file can cause this."""
    values = flatten(config)
    return [
        f"{key}=None: needs a value, e.g. {default!r}"
        for key, default in flatten(default_config(config.get("plugins") or ())).items()
        if default is not None and values[key] is None
    ]


def find_misshapen(config: ConfigDict) -> list[str]:
    """Faults for missing and unknown keys, as in a config that was not made by `base_config()`."""
    try:
        wanted = set(flatten(default_config(config.get("plugins") or ())))
    except InputError as e:
        return list(e.faults)
    evals = config.get("evals", {})
    found = set(flatten(config)) - {f"evals.{name}.{key}" for name in evals for key in evals[name]}
    faults = [f"{key}: missing; start from base_config()" for key in sorted(wanted - found)]
    faults += [f"{key}: no such key; {nearest(key, sorted(wanted))}"
               for key in sorted(found - wanted)]  # fmt: skip
    for name in evals:
        kind = evals[name].get("type")
        if kind in EVALUATORS:
            wanted = {"type", *EVALUATORS.find(kind).declared()}
            faults += [f"evals.{name}.{key}: missing or unknown; make entries with config.{kind}()"
                       for key in sorted(wanted ^ set(evals[name]))]  # fmt: skip
        else:
            faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return faults
