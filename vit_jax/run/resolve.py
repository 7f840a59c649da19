"""Decides the keys that a config leaves open; no other code sets a key.

    asked ──> continue_run ──> weights ──> teachers ──> data ──> rules ──> layout ──> microbatches

A config file cannot know them:

    source    decisions.take_fields    model fields, image size and value range of `init_from`
    teachers  opener.Files.teachers    the number of classes of unlabelled images
    data      sources.open_training    numbers of classes and examples, order, class weights
    rule      decisions.freeze_layers  a pattern of frozen parameters, by `optimizer.last_layers`
    rule      decisions.follow_rule    length, learning rate and warm-up, by `schedule.rule`
    devices   opener.Files.layout      mesh, scan and remat, under `auto`
    devices   opener.Files.microbatches

config.json keeps what was asked for, what it came to, and who decided each key: "user" (a flag),
"recipe" (the config file), "default", "source" (of the weights), "teachers", "data", "rule" or
"devices".
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.config.stored import StoredConfig, keep_resolved
from vit_jax.errors import Faults, collect_faults
from vit_jax.run.decisions import Changes, follow_rule, freeze_layers

# What is decided anew at every start, and must then be as the data decided at the first; the number
# of microbatches is the recorded one, as far as the devices allow.
DECIDED_ANEW = ("data.num_classes", "data.num_examples", "data.order", "data.streams",
                "loss.class_weights", "optimizer.accum_steps")  # fmt: skip


class Opener:
    """Opens what decides open keys, each thing once; this one opens nothing.

    A run that trains opens files and devices (`opener.Files`), a plan tables (`opener.Tables`).
    `resolve` calls the methods in this order.
    """

    def find_faults(self, config: ConfigDict) -> list[str]:
        """What forbids `config` before anything is opened."""
        return []

    def weights(self, config: ConfigDict) -> Changes:
        """What the source of the initial weights decides."""
        return {}

    def teachers(self, config: ConfigDict) -> Changes:
        """What the teachers of the objective decide."""
        return {}

    def data(self, config: ConfigDict) -> Changes:
        """What the data decide."""
        return {}

    def layout(self, config: ConfigDict) -> Changes:
        """What the devices decide of LAYOUT_KEYS."""
        return {}

    def microbatches(self, config: ConfigDict) -> Changes:
        """What the devices decide of `optimizer.accum_steps`, if it is open or recorded."""
        return {}

    def has_layout_of(self, stored: StoredConfig) -> bool:
        """Whether `auto` has chosen the layout of `stored`, and for these devices."""
        return True


class Resolved(NamedTuple):
    """A config without open keys; see `StoredConfig`."""

    asked: ConfigDict
    config: ConfigDict
    decided_by: Mapping[str, str]


def resolve(
    asked: ConfigDict,
    opener: Opener,
    stored: StoredConfig | None = None,
    by_user: Collection[str] = (),
) -> Resolved:
    """Decide the open keys of `asked`; writes nothing.

    Args:
      asked: has passed `validation.validate`.
      opener: opens what decides.
      stored: of the run that goes on; None: a new run. What it decided stays, but for new entries
        of `evals`, and for mesh, remat and microbatches on other devices.
      by_user: the keys that the user has set on the command line; no source or rule changes them.

    Raises:
      InputError: names the keys; faults of the source, the teachers and the data together.
    """
    stages: tuple[tuple[str, Callable[[ConfigDict], Changes]], ...] = (
        ("source", opener.weights),
        ("teachers", opener.teachers),
        ("data", opener.data),
        ("rule", freeze_layers),
        ("rule", follow_rule),
        ("devices", opener.layout),
        ("devices", opener.microbatches),
    )
    config, decided_by = continue_run(asked, opener, stored, by_user)
    faults = Faults(opener.find_faults(config))
    for by, decide in stages:
        flat = config_lib.flatten(config)
        changes = {
            key: value
            for key, value in (faults.check(decide, config) or {}).items()
            if (key not in flat or flat[key] != value)
            and (key not in by_user or by not in ("source", "rule"))
        }
        config = config_lib.with_values(config, changes)
        decided_by |= dict.fromkeys(changes, by)
        if by not in ("source", "teachers") or config.data.image_size is None:
            collect_faults(faults)  # the next stage needs what this one decides
    return Resolved(asked, config, {key: decided_by[key] for key in config_lib.flatten(config)})


def continue_run(
    asked: ConfigDict, opener: Opener, stored: StoredConfig | None, by_user: Collection[str]
) -> tuple[ConfigDict, dict[str, str]]:
    """`asked` with what the run of `stored` decided, and who decided each key."""
    new = config_lib.flatten(asked)
    defaults = config_lib.flatten(config_lib.default_config(asked.plugins))
    decided_by = {
        key: "user" if key in by_user else "default" if defaults.get(key) == value else "recipe"
        for key, value in new.items()
    }
    if stored is None:
        return asked, decided_by
    anew = {*DECIDED_ANEW}
    keeps_layout = opener.has_layout_of(stored) if asked.auto else not stored.asked.auto
    if not keeps_layout:
        anew |= {*config_lib.LAYOUT_KEYS} - {"model.scan"}  # the form of its checkpoints
    same = keep_resolved(asked, stored)
    decided_by |= {key: stored.decided_by[key] for key in same if key in stored.decided_by}
    kept = {key: value for key, value in same.items() if key not in anew}
    return config_lib.with_values(asked, kept), decided_by
