"""Checks of a config's keys: all present, of the right type, accepted by the selected part."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS, entry_keys
from vit_jax.errors import Faults, InputError, collect_faults, nearest

LARGEST_BATCH = 2**24  # images; the largest of published runs have 2**20
_LARGEST = {float: 3.4028234e38, int: 2**40}  # of float32; more than any count of a run


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
            faults += [f"evals.{name}.{key}: missing or unknown; make entries with config.{kind}()"
                       for key in sorted(entry_keys(kind) ^ set(evals[name]))]  # fmt: skip
        else:
            faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check that all numbers can be computed with, and the keys that no other room checks."""
    faults.need(
        config.init_from != "",
        "init_from: not set; give --config.init_from=SOURCE (a workdir, a file or the name of "
        "published weights), or --config.init_from=scratch",
    )
    faults.need_known("init_head", config.init_head, ("new", "kept"))
    faults.need_known("init_fields", config.init_fields, ("config", "source"))
    faults.need(
        config.init_fields != "source" or config.init_from not in (None, "scratch"),
        f"init_fields='source': init_from={config.init_from!r} has no fields; give "
        "--config.init_from=SOURCE, or train from scratch with --config.init_fields=config and "
        "--config.data.image_size=...",
    )
    for key, value in flatten(config).items():
        values = value if isinstance(value, tuple) else (value,)
        if key == "global_batch_size" or re.fullmatch(r"evals\.\w+\.batch_size", key):
            faults.need_positive(key, value, LARGEST_BATCH)
        for number in (v for v in values if type(v) in _LARGEST):
            most = _LARGEST[type(number)]
            holds = abs(number) <= most  # false for NaN
            faults.need(holds, f"{key}={value}: needs a finite number, up to {most:.3g}")
    seed = config.seed
    faults.need(0 <= seed < 2**32, f"seed={seed}: needs a number from 0 to {2**32 - 1}")


KeyValue = bool | int | float | str | tuple | None


def choose_keys(
    section: str, name: str, part: Callable, values: Mapping[str, KeyValue]
) -> dict[str, KeyValue]:
    """The keys of a section that are set, as arguments of the `part` selected by `name`.

    Raises:
      InputError: if `part` does not take one of them. Positional arguments without a default are
        not keys.
    """
    known = {
        key
        for key, argument in inspect.signature(part).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY or argument.default is not argument.empty
    }
    chosen: dict[str, KeyValue] = {k: value for k, value in values.items() if value is not None}
    collect_faults(
        [
            f"{section}.{key}={value!r}: {name} has no such setting; set it to None"
            for key, value in chosen.items()
            if key not in known
        ]
    )
    return chosen
