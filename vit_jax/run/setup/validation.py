"""Configs as users give them, and their checks.

The first check finds every fault that needs no file and no device; each room checks its own
section. `check_metrics` follows when the data are open.
"""

import copy
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import models
from vit_jax.base.addresses import hide
from vit_jax.base.errors import Faults, InputError, collect_faults, nearest
from vit_jax.config import (
    REQUIRED,
    Settings,
    SplitKey,
    add_plugins,
    decided_later,
    eval_splits,
    evals,
    step_range,
    with_values,
)
from vit_jax.config import text as config_text
from vit_jax.config.checks import find_emptied, find_misshapen, find_unset
from vit_jax.config.metric_names import (
    chosen_metrics,
    declared_metrics,
    guess_direction,
    is_named,
)
from vit_jax.config.plugins import import_plugins
from vit_jax.config.stored import read_stored
from vit_jax.data import Source
from vit_jax.data.checks import check_data, check_eval_ops
from vit_jax.experiment.checks import check_experiment
from vit_jax.run.watch.faults import parse_faults

logger = logging.getLogger("vit_jax")


def check_run(settings: Settings, config: ConfigDict, faults: Faults) -> None:
    """Check what a run writes, and the metrics by which it decides; works without wandb."""
    if settings.log.profile is not None:
        faults.check(step_range, settings.log.profile, key="log.profile")
    project = settings.log.wandb
    faults.need(
        project is None or re.fullmatch(r"(?=.*\S)[^/\\#?%:]{1,128}", project),  # as W&B takes them
        f"log.wandb={project!r}: needs the name of a project, of at most 128 characters, without "
        r"any of /\#?%:",
    )
    for key, metric in chosen_metrics(settings.checkpoint, settings.stop).items():
        name, _, kind = metric.partition("/")
        if kind and name in config.evals:
            continue
        known: list[str] = []
        for name, evaluator in settings.evals.items():
            found = declared_metrics(name, evaluator, settings.has_average)
            known += [f"{name}/..."] if found is None else found
        leaf = metric.rpartition("/")[2]
        same = [m for m in known if m.endswith(f"/{leaf}") and leaf]
        hint = nearest(metric, known) if known else "the config has no evals"
        hint = f"did you mean {' or '.join(same)}?" if same else hint
        faults.append(f"{key}={metric!r}: needs a metric of an evaluator; {hint}")


def check_metrics(settings: Settings, sources: Mapping[SplitKey, Source]) -> None:
    """Check that the metrics by which a run decides are ones that its evaluators report.

    Warns if the evaluator of such a metric declares none. `sources`: as opened.

    Raises:
      InputError: names the key, and the nearest metric or those that can be chosen.
    """
    faults = Faults()
    for key, metric in chosen_metrics(settings.checkpoint, settings.stop).items():
        name = metric.partition("/")[0]
        evaluator = settings.evals[name]
        found = declared_metrics(name, evaluator, settings.has_average)
        if found is None:
            logger.warning(
                "%s=%s: evals.%s does not declare its metrics; assuming that the %s value is the "
                "better one", key, metric, name, guess_direction(metric),
            )  # fmt: skip
            continue
        splits = eval_splits(settings.data, evaluator)
        why = evaluator.lacking({k: sources[split] for k, split in splits.items()})
        lacking = {f"{name}/{leaf}{end}": why[leaf] for leaf in why for end in ("", "_raw")}
        known = [m for m, better in found.items() if better != "neither" and m not in lacking]
        unknown = f"is not reported by evals.{name}, or no value of it is better than another"
        faults.need(
            is_named(metric, known),
            f"{key}={metric!r}: {lacking.get(metric, unknown)}; {nearest(metric, known)}",
        )
    collect_faults(faults)


def _check_sections(config: ConfigDict, faults: Faults) -> None:
    """Check a config that has all keys, with values of the right types."""
    settings, wrong = Settings.read_open(config)
    of_evals = [fault for fault in wrong if fault.startswith("evals.")]
    faults += [fault for fault in wrong if fault not in of_evals]
    models.check_model(settings.model, settings.data, faults)
    check_data(settings.data, settings.run.global_batch_size, faults)
    check_experiment(settings, faults)
    faults.check(parse_faults, settings.job.inject)
    evals.check_names(config.evals, faults)
    faults += of_evals
    check_eval_ops(settings.evals, settings.data, faults)
    check_run(settings, config, faults)


def find_faults(config: ConfigDict, required: Sequence[str] = REQUIRED) -> list[str]:
    """The faults of `config`, at most one per key, each starting with its key.

    `required`: keys that must be set.
    """
    faults = Faults(find_misshapen(config))
    if not faults:
        later = decided_later(config)
        faults += find_unset(config, [key for key in required if key not in later])
        emptied = find_emptied(config)
        faults += emptied
        if not emptied:
            _check_sections(config, faults)
    first_of_each_key = {re.split(r"[^\w.*]", fault)[0]: fault for fault in reversed(faults)}
    return list(first_of_each_key.values())[::-1]


def validate(
    config: ConfigDict,
    override_faults: list[str],
    where: str,
    required: Sequence[str] = REQUIRED,
) -> None:
    """Raise one InputError with all faults of a config and of the overrides applied to it.

    Hides passwords in the addresses of its weights, in place; see `base.addresses`.
    """
    keys = (config, "init_from"), (config, "init_texts_from"), (config.objective, "teacher")
    for section, key in keys:
        if isinstance(section.get(key), str):
            section[key] = hide(section[key])
    collect_faults(override_faults + find_faults(config, required), where)


def load_config(
    config: ConfigDict | str | os.PathLike, overrides: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Load a config, or copy one, and set some of its keys.

        config = vit_jax.load_config("quickstart:debug", {"duration": "20 steps"})
        config.optimizer.peak_lr = 3e-3

    Args:
      config: as --config: the name of a shipped config or the path of a file, and its words; or a
        config, which is copied.
      overrides: {key: value}, e.g. {"model.depth": 6} or {"model": {"depth": 6}}; "plugins" is a
        list of files and modules.

    Raises:
      InputError: lists every key that does not exist and every value of a wrong type.
    """
    pairs = as_pairs(overrides)
    if isinstance(config, ConfigDict):
        config = copy.deepcopy(config)  # keeps the types of keys that are None
    elif isinstance(config, (str, os.PathLike)):
        config = load_named(os.fspath(config))
    else:
        got = type(config).__name__
        raise InputError(f"config: got {got}; needs the name of a config, its file, or a config")
    add_plugins(config, import_plugins((overrides or {}).get("plugins", ())))
    collect_faults(config_text.apply_overrides(config, pairs), "overrides")
    return config


def load_named(spec: str) -> ConfigDict:
    """`config.text.load_config`; an error says what other libraries' models are called here."""
    try:
        return config_text.load_config(spec)
    except InputError as e:
        words = spec.partition(":")[2].split(",")
        hints = [f"{word}: {hint}" for word in words if (hint := models.translate_name(word))]
        if not hints or "is called" in str(e):
            raise
        raise InputError(f"{e}; {'; '.join(hints)}") from None


def as_pairs(overrides: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """`overrides` as the command line gives them: (key, text)."""
    pairs = []
    if not isinstance(overrides, Mapping | None):
        got = type(overrides).__name__
        raise InputError(f'overrides: got {got}; needs a dict such as {{"duration": "20 steps"}}')
    for key, value in (overrides or {}).items():
        if isinstance(value, Mapping):
            pairs += [(f"{key}.{end}", text) for end, text in as_pairs(value)]
        else:
            text = repr(tuple(value)) if isinstance(value, (tuple, list)) else str(value)
            pairs.append((key, text))
    return pairs


def load_run(
    workdir: epath.Path, overrides: Sequence[tuple[str, str]]
) -> tuple[ConfigDict, Settings]:
    """The config of the run in `workdir` with `overrides`, (key, text), validated; and as it ran.

    A mesh that the run's devices decided is open again, as these devices may be others.

    Raises:
      InputError: if there is no run, or it has no evaluators.
    """
    stored = read_stored(workdir)
    chosen = [key for key, by in stored.decided_by.items() if by == "devices"]
    config = with_values(stored.resolved, {key: None for key in chosen if key.startswith("mesh.")})
    validate(config, config_text.apply_overrides(config, overrides), f"{workdir}/config.json")
    if not config.evals:
        raise InputError(f"--workdir={workdir}: its config lists no evaluators (evals)")
    return config, Settings.of(stored.resolved)


def check_evaluates_any(config: ConfigDict, where: str) -> None:
    """Raise InputError, naming `where`, unless `config` can evaluate a model from any source."""
    if config.model.name is not None:
        raise InputError(f"model.name={config.model.name!r}: --init_from sets it; leave it out")
    if not config.evals:
        raise InputError(f"{where}: lists no evaluators (evals)")
