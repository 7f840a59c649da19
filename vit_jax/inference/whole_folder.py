"""Own pictures that a model was not trained on are evaluated whole: nothing needs holding out."""

import copy
import logging
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data
from vit_jax.config.evals import find_evaluator
from vit_jax.data.pictures import Walk
from vit_jax.transfer.published import is_published

_SHARED = 0.01  # share of the pictures above which two folders hold the same ones


class Origin(NamedTuple):
    """Where a model comes from.

    source: of the model, as in `load_pretrained`.
    run_config: the config of the run, if the source is one.
    holdout: the rule by which its training held out pictures, if it states one.
    """

    source: str
    run_config: Mapping[str, Any] | None = None
    holdout: str | None = None


def take_whole_folders(
    config: ConfigDict, origin: Origin, asked: Collection[str] = ()
) -> tuple[ConfigDict, list[tuple[int, str]]]:
    """`config` with the split `all` for evaluators of pictures that the model has not seen.

    This concerns folders and lists without splits of their own, where `val` is a tenth, but not
    those that the run was trained on. The keys `asked`, which the user has set, stay as they are.

    Returns: the config, and what to log, as (level, text), once the data have been accepted.

    Raises:
      InputError: there is no such folder or list.
    """
    config, said = copy.deepcopy(config), []  # with the types of keys that are None
    for name, entry in config.evals.items():
        split_key = f"evals.{name}.split"
        data_dir = None if split_key in asked else _find_undivided(config, entry)
        if data_dir is None or _is_same(data_dir, _trained_on(origin.run_config)):
            continue
        reason = find_doubt(origin, data_dir)
        if reason is not None:
            text = (
                f"evals.{name}: evaluates a tenth of {data_dir}, as the model may have been "
                f"trained on the rest ({reason}); if it was not, give --config.{split_key}=all"
            )
            said.append((logging.WARNING, text))
        else:
            entry.split = "all"
            text = (
                f"evals.{name}: evaluates all pictures of {data_dir}, as the model was not "
                "trained on them"
            )
            said.append((logging.INFO, text))
    return config, said


def _find_undivided(config: ConfigDict, entry: ConfigDict) -> str | None:
    """The folder or list if `entry` evaluates a held-out tenth of it; None otherwise."""
    key = config_lib.eval_splits(config, entry).get("split")
    if key is None or key.split != "val" or find_evaluator(entry.type).learns_classes:
        return None
    own = key.data_name in data.OWN_PICTURES
    is_tenth = own and data.is_undivided(key.data_name, key.data_dir, config.data)
    return key.data_dir if is_tenth else None


def _trained_on(run_config: Mapping[str, Any] | None) -> str | None:
    """The folder or list of own pictures that a run was trained on; None: there is none."""
    if run_config is None:
        return None
    own = _data_sets(run_config) & {*data.OWN_PICTURES, "unlabelled"}
    return run_config["data"]["data_dir"] if own else None


def _data_sets(run_config: Mapping[str, Any]) -> set[str]:
    """The names of all data sets that a run was trained on."""
    d = run_config["data"]
    return {d["name"], *(part.name for part in data.parse_mix(d["mix"]))}


def _is_same(data_dir: str, other: str | None) -> bool:
    real = [os.path.realpath(os.path.expanduser(path)) for path in (data_dir, other or "")]
    return other is not None and real[0] == real[1]


def find_doubt(origin: Origin, data_dir: str) -> str | None:
    """Why a model may have been trained on pictures of the folder or list `data_dir`, or None.

    Published models were not, and neither were runs on other data. The folder of a run on own
    pictures may have been moved or copied, so its pictures must still be there, and `data_dir` must
    hold others, by their names and sizes. The folder of pseudo-labelled pictures is not looked up.
    """
    if origin.run_config is None:
        known = origin.holdout is None and is_published(origin.source)
        return None if known else f"the training pictures of {origin.source} are unknown"
    first = config_lib.weights_source(origin.run_config)
    if first is not None and not is_published(first):
        return f"the run started from {first}, whose training pictures are unknown"
    if "pseudo" in _data_sets(origin.run_config):
        return "the run learned from pseudo labels of other pictures"
    trained_on = _trained_on(origin.run_config)
    if trained_on is None:
        return None
    its, others = _find_pictures(trained_on), _find_pictures(data_dir)
    if len(its) < origin.run_config["data"]["num_examples"]:
        return f"{trained_on} no longer holds all pictures of the run"
    if len({*its} & {*others}) > _SHARED * len(others):
        return f"{trained_on} has files of the same names and sizes"
    return None


def _find_pictures(data_dir: str) -> list[tuple[str, int]]:
    """(file name, bytes) of all pictures below a folder or beside a list; [] if it is absent."""
    root = pathlib.Path(data_dir).expanduser()
    sizes = Walk().pictures(root.parent if root.is_file() else root)
    return [(os.path.basename(path), size) for path, size in sizes.items()]
