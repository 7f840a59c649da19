"""The rule by which a run's folder held out images, kept where its weights are used again."""

import copy
import logging
import os

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import transfer
from vit_jax.data.image_folder import class_folders
from vit_jax.errors import InputError

logger = logging.getLogger("vit_jax")


def adopt_holdout(config: ConfigDict, pretrained: transfer.Pretrained) -> ConfigDict:
    """`config` with the rule by which the run of `pretrained` held out images of its folder.

    Otherwise images that the run was trained on could be tested on. A config that reads only other
    folders keeps its own rule.

    Raises:
      InputError: if `config` sets another rule.
    """
    if not _may_read_its_folder(config, pretrained):
        return config
    config = _adopt_folder_rules(config, pretrained)
    rule, own = pretrained.spec.holdout, config.data.holdout
    default = config_lib.base_config().data.holdout
    if rule is None or own == rule:
        return config
    if own != default:
        raise InputError(
            f"data.holdout={own!r}: {pretrained.source} held out images by {rule!r}; leave out "
            "data.holdout, or images that it was trained on would be tested on"
        )
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    config.data.holdout = rule
    if config_lib.reads_folder(config):
        logger.warning(
            "%s held out images of its folder by data.holdout=%r; the same rule is used here "
            "(default for new runs: %r)",
            pretrained.source, rule, default,
        )  # fmt: skip
    return config


def _adopt_folder_rules(config: ConfigDict, pretrained: transfer.Pretrained) -> ConfigDict:
    """`config` with the older `data.folder_rules` of a run, by which other images are held out."""
    if pretrained.run is None or not config_lib.reads_folder(config):
        return config
    older = pretrained.run["config"]["data"]["folder_rules"]
    if config_lib.reads_folder(pretrained.run["config"]) and older < config.data.folder_rules:
        logger.warning(
            "%s read its folder by data.folder_rules=%d; so it is read here (new runs: %d)",
            pretrained.source, older, config.data.folder_rules,
        )  # fmt: skip
        config = copy.deepcopy(config)  # with the types of keys that are None
        config.data.folder_rules = older
    return config


def _may_read_its_folder(config: ConfigDict, pretrained: transfer.Pretrained) -> bool:
    """Whether `config` may read the folder, perhaps moved, that the run in `pretrained` read.

    An exported model knows its class names but not its folder. True also if `config` reads no
    folder, so that models initialized from this one inherit the rule.
    """
    ours = config_lib.folders_read(config)
    its = config_lib.folders_read(pretrained.run["config"]) if pretrained.run else set()
    if not ours or (pretrained.run and not its):
        return True
    real_paths = [
        {os.path.realpath(os.path.expanduser(folder)) for folder in folders if folder}
        for folders in (ours, its)
    ]
    names = pretrained.spec.class_names
    return (
        not real_paths[0].isdisjoint(real_paths[1])
        or names is None
        or any({*names} <= {*class_folders(folder)} for folder in real_paths[0])
    )
