"""Checks of a config's keys: all there, of the right form, taken by the chosen part."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS, entry_keys
from vit_jax.errors import Faults, InputError, collect_faults, nearest


def find_unset(config: ConfigDict, required: Sequence[str]) -> list[str]:
    """A fault for each of the keys `required` that is None."""
    values = flatten(config)
    return [
        f"{key}: not set; set it in the config file or by --config.{key}=..."
        for key in required
        if values[key] is None
    ]


def find_emptied(config: ConfigDict) -> list[str]:
    """A fault for each key that is None without being optional; a config file can do that."""
    values = flatten(config)
    return [
        f"{key}=None: needs a value, e.g. {default!r}"
        for key, default in flatten(default_config(config.get("plugins") or ())).items()
        if default is not None and values[key] is None
    ]


def find_misshapen(config: ConfigDict) -> list[str]:
    """The keys that a config which does not come from `base_config()` lacks or has in excess."""
    try:
        wanted = set(flatten(default_config(config.get("plugins") or ())))
    except InputError as e:
        return list(e.faults)
    evals = config.get("evals", {})
    found = set(flatten(config)) - {f"evals.{name}.{key}" for name in evals for key in evals[name]}
    faults = [f"{key}: missing; begin with base_config()" for key in sorted(wanted - found)]
    faults += [f"{key}: no such key; {nearest(key, sorted(wanted))}"
               for key in sorted(found - wanted)]  # fmt: skip
    for name in evals:
        kind = evals[name].get("type")
        if kind in EVALUATORS:
            faults += [f"evals.{name}.{key}: missing or unknown; make it by config.{kind}()"
                       for key in sorted(entry_keys(kind) ^ set(evals[name]))]  # fmt: skip
        else:
            faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks numbers of every section, and the keys that no other room checks."""
    faults.need(
        config.init_from != "",
        "init_from: not set; give --config.init_from=SOURCE, a workdir, a file or the name of a "
        "published one, or say --config.init_from=scratch",
    )
    faults.need_known("init_head", config.init_head, ("new", "kept"))
    for key, value in flatten(config).items():
        numbers = value if isinstance(value, tuple) else (value,)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        faults.need(finite, f"{key}={value}: needs a finite number")
    seed = config.seed
    faults.need(0 <= seed < 2**32, f"seed={seed}: needs a number from 0 to {2**32 - 1}")
    faults.need_positive("global_batch_size", config.global_batch_size)


KeyValue = bool | int | float | str | tuple | None


def choose_keys(
    section: str, name: str, part: Callable, values: Mapping[str, KeyValue]
) -> dict[str, KeyValue]:
    """The keys of a section that are set, as arguments of the `part` that `name` chooses.

    Raises:
      InputError: `part` does not take one; an argument without default that may be given by
        position is not a key.
    """
    known = {
        key
        for key, argument in inspect.signature(part).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY or argument.default is not argument.empty
    }
    chosen: dict[str, KeyValue] = {k: value for k, value in values.items() if value is not None}
    collect_faults(
        [
            f"{section}.{key}={value!r}: is nothing that {name} has; set it to None"
            for key, value in chosen.items()
            if key not in known
        ]
    )
    return chosen
