"""The splits of a run, opened and checked."""

import copy
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data, transfer
from vit_jax.config import SplitKey
from vit_jax.config.evals import find_evaluator
from vit_jax.data.image_folder import class_folders
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.data.sources import FINGERPRINT_VERSION, fingerprint
from vit_jax.errors import Faults, InputError, collect_faults

logger = logging.getLogger("vit_jax")


def open_sources(
    config: ConfigDict, training: bool
) -> tuple[ConfigDict, dict[SplitKey, data.Source]]:
    """The config with what the data set says filled in, and the source of every split.

    Without `training` the training split is left out; what it says is in the config already.
    """
    config, sources = open_training(config) if training else (config, {})
    d, faults = config.data, Faults()
    for name, entry in config.evals.items():
        for split_key, key in config_lib.eval_splits(config, entry).items():
            synthetic = key.data_name == "synthetic"
            learns = find_evaluator(entry.type).learns_classes
            found = sources.get(key) or faults.check(
                _open_split,
                config,
                key,
                d.num_classes if synthetic else None,
                d.num_examples if synthetic else None,
                prefix=f"evals.{name}.{split_key}: ",
            )
            if found is None:
                continue
            sources[key] = found
            if not learns and found.num_classes != d.num_classes:
                faults.append(
                    f"evals.{name}.{split_key}: {found.name} {found.split} has "
                    f"{found.num_classes:,} classes, and the model {d.num_classes:,}; needs a data "
                    "set of the classes that it was trained on"
                )
    collect_faults(faults)
    return config, sources


def open_training(config: ConfigDict) -> tuple[ConfigDict, dict[SplitKey, data.Source]]:
    """The config with what the data set says filled in, and the sources that are trained on.

    Under `config.train_split(config)` is the whole of them, of a mixture the first by itself too.

    Raises:
      InputError: the data are missing, or not as the config says.
    """
    config = config.copy_and_resolve_references()
    d, faults = config.data, Faults()
    own, parts = SplitKey(d.name, d.split, d.data_dir, d.classes), data.parse_mix(d.mix)
    source = _open_split(config, own, d.num_classes, None if parts else d.num_examples)
    sources = {own: source}
    if parts:
        keys = [own._replace(data_name=part.name, split=part.split or d.split) for part in parts]
        others = [faults.check(_open_split, config, key, prefix="data.mix: ") for key in keys]
        collect_faults(faults)
        opened = [source, *(other for other in others if other is not None)]
        if d.reader is None and not data.held_alike(opened):
            # By size and free memory some are held as pixels; what is mixed depends on neither.
            opened = [
                s if s.encoded or key.data_name in data.SOURCES
                else _open_split(config, key, reader=data.ON_DISK)
                for key, s in zip([own, *keys], opened, strict=True)
            ]  # fmt: skip
            sources[own] = opened[0]
        sources[config_lib.train_split(config)] = source = data.concatenate(opened)
    if d.num_examples not in (None, source.num_examples):
        raise InputError(
            f"data.num_examples={d.num_examples}: the data sets of data.mix and data.name have "
            f"{source.num_examples} together; leave it out"
        )
    d.num_classes, d.num_examples = source.num_classes, source.num_examples
    d.order, d.streams = data.resolve_order(
        d.order,
        d.streams,
        num_examples=d.num_examples,
        global_batch_size=config.global_batch_size,
        repeats=d.repeats,
    )
    return config, sources


def _open_split(
    config: ConfigDict,
    key: SplitKey,
    num_classes: int | None = None,
    num_examples: int | None = None,
    reader: str | None = None,
) -> data.Source:
    return data.make_source(
        key.data_name,
        split=key.split,
        classes=key.classes,
        reader=reader or config.data.reader,
        broken_labels=config.data.broken_labels,
        data_dir=key.data_dir,
        holdout=config.data.holdout,
        image_size=config_lib.image_hw(config.data.image_size),
        num_classes=num_classes,
        num_examples=num_examples,
        **config_lib.own_keys(config, "data"),
    )


def training_order(config: ConfigDict, source: data.Source) -> data.Order:
    """The order of training on `source`, by a config that `open_sources` has filled in."""
    d = config.data
    return data.make_order(
        d.order,
        source.part_sizes,
        config.seed,
        global_batch_size=config.global_batch_size,
        chunk_size=d.chunk_size,
        streams=d.streams,
        repeats=d.repeats,
        weights=[part.weight for part in data.parse_mix(d.mix)],
    )


def check_images(
    config: ConfigDict, preprocessing: Preprocessing, sources: Mapping[SplitKey, data.Source]
) -> None:
    """Raises InputError if the ops of training or of an evaluator do not give `data.image_size`."""
    one = _one_image(preprocessing)
    training, ops = sources[config_lib.train_split(config)], preprocessing.host_ops
    data.host_batches(training, ops, **one, seed=0, start_step=0, num_steps=0)
    check_evaluated_images(config, preprocessing, sources)


def check_evaluated_images(
    config: ConfigDict, preprocessing: Preprocessing, sources: Mapping[SplitKey, data.Source]
) -> None:
    """Raises InputError if the ops of an evaluator do not give `data.image_size`."""
    for name, entry in config.evals.items():
        how = _one_image(preprocessing) | {"key": f"evals.{name}.ops"}
        for key in config_lib.eval_splits(config, entry).values():
            data.host_eval_batches(sources[key], preprocessing.eval_ops[name], **how)


def _one_image(preprocessing: Preprocessing) -> dict[str, Any]:
    return {"global_batch_size": 1, "image_size": preprocessing.image_size, "rows": np.arange(1)}


def adopt_holdout(config: ConfigDict, pretrained: transfer.Pretrained) -> ConfigDict:
    """`config` with the rule by which the run of `pretrained` held out images of its folder.

    So no image that the run was trained on is one to test with, nor the other way round. A config
    that reads other folders only keeps its rule.

    Raises:
      InputError: if `config` sets another rule.
    """
    rule, own = pretrained.spec.holdout, config.data.holdout
    default = config_lib.base_config().data.holdout
    if rule is None or own == rule:
        return config
    if not _may_read_its_folder(config, pretrained):
        return config
    if own != default:
        raise InputError(
            f"data.holdout={own!r}: {pretrained.source} held out images by {rule!r}; leave "
            "data.holdout out, or images that it was trained on would be tested on"
        )
    config = copy.deepcopy(config)  # with the types of keys that are None
    config.data.holdout = rule
    if config_lib.reads_folder(config):
        logger.warning(
            "%s held out images of its folder by data.holdout=%r; so they are held out here "
            "(new runs: %r)",
            pretrained.source, rule, default,
        )  # fmt: skip
    return config


def _may_read_its_folder(config: ConfigDict, pretrained: transfer.Pretrained) -> bool:
    """Whether a folder of `config` may be one that the run in `pretrained` read, perhaps moved.

    The source may be the run's export, which knows class names but no folder. True too where
    `config` reads no folder: what starts from it then goes on by the rule.
    """
    ours = config_lib.folders_read(config)
    its = config_lib.folders_read(pretrained.run["config"]) if pretrained.run else set()
    if not ours or (pretrained.run and not its):
        return True
    real_paths = [
        {os.path.realpath(folder) for folder in folders if folder} for folders in (ours, its)
    ]
    names = pretrained.spec.class_names
    return (
        not real_paths[0].isdisjoint(real_paths[1])
        or names is None
        or any({*names} <= {*class_folders(folder)} for folder in real_paths[0])
    )


def data_fingerprint(
    config: ConfigDict, source: data.Source, version: int = FINGERPRINT_VERSION
) -> str:
    """The digest of everything but code that decides which bytes the batch of a step holds.

    Args:
      config: that `open_sources` has filled in.
      source: of training.
      version: of the rule; older checkpoints are compared by the rule that they were saved with.

    Raises:
      InputError: if `version` is newer than this code.
    """
    d = config.data
    if version > FINGERPRINT_VERSION:
        raise InputError(
            f"--workdir: its checkpoints have a data fingerprint of version {version}, and this "
            f"vit_jax knows them up to {FINGERPRINT_VERSION}; use a newer one"
        )
    identity = [
        source.fingerprints[version - 1],
        config.seed,
        config.global_batch_size,
        d.ops,
        config_lib.image_hw(d.image_size),
        [d.order, d.chunk_size, d.streams, d.repeats, d.mix],
    ]
    return fingerprint(*identity, *[d.pad_crops] * (version > 1))
