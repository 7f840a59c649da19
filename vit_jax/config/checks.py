"""Checks of a config's keys: all present, of the right type, accepted by the selected part."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, InputError, nearest
from vit_jax.config.base import declared_keys, default_config, flatten
from vit_jax.config.evals import EVALUATORS
from vit_jax.config.parts import find_wrong
from vit_jax.config.registries import SOURCES, STUDIES

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
            wanted = {"type", *EVALUATORS.find(kind).declared()}
            faults += [f"evals.{name}.{key}: missing or unknown; make entries with config.{kind}()"
                       for key in sorted(wanted ^ set(evals[name]))]  # fmt: skip
        else:
            faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check that all numbers can be computed with, and the keys that no other room checks."""
    from_scratch = "" if config.init_fields == "source" else ", or --config.init_from=scratch"
    faults.need(
        config.init_from != "",
        "init_from: not set; give --config.init_from=SOURCE (a workdir, a file or the name of "
        f"published weights){from_scratch}",
    )
    faults += find_wrong(declared_keys(config), flatten(config))
    for registry in (SOURCES, STUDIES):
        if config[registry.section].name is not None:
            faults.check(registry.make, config[registry.section])
    faults.need(
        config.init_fields != "source" or config.init_from not in (None, "scratch"),
        f"init_fields='source': init_from={config.init_from!r} has no fields; give "
        "--config.init_from=SOURCE, or train from scratch with --config.init_fields=config and "
        "--config.data.image_size=...",
    )
    for key, value in flatten(config).items():
        values = value if isinstance(value, tuple) else (value,)
        for number in (v for v in values if type(v) in _LARGEST):
            most = _LARGEST[type(number)]
            holds = abs(number) <= most  # false for NaN
            faults.need(holds, f"{key}={value}: needs a finite number, up to {most:.3g}")
