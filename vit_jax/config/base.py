"""The experiment's configuration: every key is born here, typed, and can be overridden by name.

A config file has `get_config(arg: str = "") -> ConfigDict`; `arg` is what stands behind the colon
of `--config=FILE:arg`, comma-separated words (`split_words`). Importing this module touches no
device and no TensorFlow.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from vit_jax.config import plugins as plugins_lib
from vit_jax.config.evals import find_evaluator
from vit_jax.errors import InputError, collect_faults


def base_config(plugins: Sequence[str] = ()) -> ConfigDict:
    """Every key of an experiment with its type; locked, but for the names under `evals`.

    A key that is None is either required (`REQUIRED`), or optional: its comment says what None
    means. Durations are strings with a unit: "90 epochs", "10000 steps", "5e6 examples".

    `plugins`: the user's own modules (docs/extending.md), imported now beside those of
    --config.plugins; their keys are there too.

    Raises:
      InputError: a plug-in is missing or fails, or its keys are not as they have to be.
    """
    return default_config((*plugins_lib.named_by_command(), *plugins_lib.import_plugins(plugins)))


def default_config(plugins: Sequence[str] = ()) -> ConfigDict:
    """`base_config` with plug-ins that have been imported, by their names in `config.plugins`."""
    c = ConfigDict()
    c.seed = 0
    c.global_batch_size = placeholder(int)  # over all hosts and devices
    c.duration = placeholder(str)
    # See transfer.read_pretrained. None and "scratch": from scratch; "": it has to be given.
    c.init_from = placeholder(str)
    c.init_head = "new"  # or kept: whether its head is replaced, as in fine-tuning
    c.init_resize = placeholder(str)  # of its position embedding; None: as its own library does
    c.plugins = ()  # the user's own modules, read before any other key; see plugins.py

    c.model = ConfigDict()  # below `dtype`: None means the default of the model's family
    c.model.name = placeholder(str)
    c.model.dtype = "float32"  # of the computation; parameters are always float32
    c.model.patch_size = placeholder(object)  # int or (height, width); None: as in the name
    c.model.stages = placeholder(tuple)  # of a ResNet: the units of each
    c.model.stem_width = placeholder(int)  # of a ResNet: the channels of its root
    c.model.width = placeholder(int)
    c.model.depth = placeholder(int)
    c.model.mlp_dim = placeholder(int)
    c.model.num_heads = placeholder(int)
    c.model.pool = placeholder(str)
    c.model.class_token = placeholder(bool)  # None: where `pool` takes it
    c.model.norm_pooled = placeholder(bool)  # the last norm after pooling instead of before
    c.model.hidden_head = placeholder(bool)
    c.model.head_bias = placeholder(float)
    c.model.distillation_head = placeholder(bool)  # of DeiT: False leaves the second head out
    c.model.pos_embed = placeholder(str)
    c.model.pos_embed_at = placeholder(str)  # stem, layers or layers_shared; None: by the kind
    c.model.pos_embed_class_token = placeholder(bool)  # False: positions are the patches' alone
    c.model.gelu = placeholder(str)
    c.model.dropout = placeholder(float)
    c.model.attention_dropout = placeholder(float)
    c.model.parallel = placeholder(bool)  # attention and MLP side by side
    c.model.norm = placeholder(str)
    c.model.norm_eps = placeholder(float)
    c.model.qk_norm = placeholder(bool)
    c.model.qkv_bias = placeholder(bool)
    c.model.layer_scale = placeholder(float)
    c.model.stochastic_depth = placeholder(float)
    c.model.scan = placeholder(bool)
    c.model.remat = placeholder(str)

    c.data = ConfigDict()
    c.data.name = placeholder(str)  # digits, folder, synthetic, vtab/TASK, or a TFDS data set
    c.data.split = "train"
    c.data.data_dir = placeholder(str)  # None: where TFDS keeps its data sets
    # Which tenth of a folder without val/ is held out: names (by hash of the file names) or
    # "seed N" (the rule of older versions). init_from=RUN takes the run's rule for its folder.
    c.data.holdout = "names"
    c.data.image_size = placeholder(object)  # int or (height, width), in pixels
    c.data.num_classes = placeholder(int)  # None: what the data set says
    c.data.classes = placeholder(tuple)  # labels kept, renumbered from 0; None: all
    # Of training; a mixture has those of all its data sets. An epoch is so many positions, whatever
    # data.repeats and the weights of data.mix. None: what the data set says.
    c.data.num_examples = placeholder(int)
    c.data.mix = ""  # "NAME=WEIGHT, NAME@SPLIT=WEIGHT"; data.name gets what is left of 1
    c.data.order = placeholder(str)  # record or chunk; None: chunk from 100 million examples on
    c.data.chunk_size = 64  # consecutive records that `chunk` reads together
    c.data.streams = placeholder(int)  # of `chunk`, read side by side; None: up to 256, by batch
    c.data.repeats = 1  # views of a record side by side in a batch (arXiv:1901.09335)
    c.data.reader = placeholder(str)  # of TFDS: memory, offsets, array_record; None: by size
    # The label of a TFDS record with a broken image: read; or by_reader, as in older runs: lost if
    # the reader is memory, so that data.classes and few-shot draws depend on the reader.
    c.data.broken_labels = "read"
    c.data.max_corrupt_fraction = 0.1  # of the examples so far; above it the run stops
    c.data.ops = ""  # of training; "decode|resize|flip" and so on
    # Whether every crop of an image that is too small pads it with black, or only one that says so.
    c.data.pad_crops = False
    c.data.mean = (0.5, 0.5, 0.5)  # the model sees (image / 255 - mean) / std
    c.data.std = (0.5, 0.5, 0.5)

    c.objective = ConfigDict({"name": "supervised"})
    c.loss = ConfigDict({"name": "softmax", "label_smoothing": 0.0})
    c.loss.z_loss = 0.0  # times log(Z)^2, Z the sum of the softmax; 0: off

    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"
    c.optimizer.peak_lr = placeholder(float)
    c.optimizer.weight_decay = 0.0  # times the current learning rate
    c.optimizer.weight_decay_on = ".*/kernel"  # regular expression over whole names
    c.optimizer.grad_clip_norm = placeholder(float)  # global norm; None: no clipping
    c.optimizer.b1 = placeholder(float)  # None: 0.9 (adamw, lion, adafactor)
    c.optimizer.b2 = placeholder(float)  # None: adamw 0.999, lion 0.99, adafactor at most 0.999
    c.optimizer.eps = placeholder(float)  # None: adamw 1e-8, adafactor 1e-30
    c.optimizer.momentum = placeholder(float)  # of sgd; None: 0.9
    c.optimizer.momentum_dtype = placeholder(str)  # None: adafactor bfloat16, others float32
    c.optimizer.layer_decay = placeholder(float)  # rate of a layer by the next one's; None: 1
    c.optimizer.freeze = placeholder(str)  # regular expression, encoder/layer_0/.*; None: nothing
    c.optimizer.accum_steps = 1  # microbatches whose gradients are added before an update
    c.optimizer.ema_decay = placeholder(float)  # of the parameters' running average; None: none

    c.schedule = ConfigDict()
    c.schedule.name = "cosine"
    c.schedule.warmup = "0 steps"
    c.schedule.cooldown = "0 steps"
    c.schedule.timescale = "10000 steps"  # of rsqrt
    c.schedule.milestones = ""  # of multistep: "200 steps, 300 steps", each divides the rate by 10

    c.mesh = ConfigDict()  # sizes of the mesh's axes; -1: what the others leave
    c.mesh.replica = placeholder(int)  # across TPU slices; None: as many as there are slices
    c.mesh.data = -1
    c.mesh.fsdp = 1
    c.mesh.tensor = 1
    c.mesh.platform = placeholder(str)  # cpu, gpu or tpu; None: the best that is there

    c.checkpoint = ConfigDict()
    c.checkpoint.every = "1000 steps"
    c.checkpoint.keep_last = 2
    c.checkpoint.keep_every = placeholder(str)  # saved and kept for ever; None: none is

    c.log = ConfigDict()
    c.log.every = "50 steps"
    c.log.wandb = placeholder(str)  # project of Weights & Biases; None: no W&B
    c.log.by_layer = False  # norms of each layer in every row, for one more backward pass a row
    c.log.profile = placeholder(str)  # "10:15" traces the steps 11 to 15; None: no trace

    c.job = ConfigDict()  # of one or more processes; how long, in seconds, what may take
    c.job.join_deadline_s = 1800  # until all processes have started
    c.job.heartbeat_s = 100  # a process that is not heard of for so long is dead
    c.job.step_deadline_s = placeholder(float)  # None: 0.6 of heartbeat_s; alone an hour
    c.job.compile_deadline_s = 3600.0  # what comes before the first step, each thing by itself
    c.job.evaluation_deadline_s = 3600.0  # each evaluator
    c.job.save_deadline_s = 3600.0  # each save, and ending the threads that read ahead

    c.study = ConfigDict()  # what `study` makes of the config; `train` does not look at it
    c.study.name = placeholder(str)  # one of studies.STUDIES
    c.study.peak_lrs = ()  # to choose from
    c.study.seeds = 3  # runs of what was chosen
    c.study.train_split = placeholder(str)  # of data.name, trained on while choosing
    c.study.dev_split = placeholder(str)  # of data.name, by which is chosen
    c.study.metric = "held_out/top1"  # of the only evaluator; the higher is the better
    c.study.cells = ()  # of a grid: "row | column: key=value; key=value"

    c.evals = ConfigDict()
    _lock(c)
    add_plugins(c, plugins)
    return c


def _lock(config: ConfigDict) -> None:
    """Locks all keys, but for the names under `evals`."""
    config.lock()
    config.evals.unlock()
    for entry in config.evals.values():
        entry.lock()


# Sections to which plug-ins may add keys. Keys of `_SECTIONS_BY_NAME` become arguments of the part
# that `name` chooses; a key that is None is not passed.
_SECTIONS_BY_NAME = ("model", "objective", "loss", "optimizer")
_OPEN_SECTIONS = (*_SECTIONS_BY_NAME, "data")
_KINDS = (bool, int, float, str, tuple, object)


def add_plugins(config: ConfigDict, names: Sequence[str]) -> None:
    """Puts imported plug-ins into `config`, in place, with the keys that they add.

    Raises:
      InputError: one has not been imported, or a key is not as it has to be, exists with another
        type, or belongs to a section that takes none.
    """
    for name in names:
        if name in config.plugins:
            continue
        keys = plugins_lib.find_plugin(name).keys
        collect_faults(_key_faults(config, keys), f"CONFIG_KEYS of the plug-in {name}")
        config.unlock()
        for key, default in keys.items():
            section, _, leaf = key.partition(".")
            if leaf not in config[section]:
                # A reference of its own: one that configs shared would share its value.
                is_none = isinstance(default, FieldReference)
                config[section][leaf] = placeholder(default.get_type()) if is_none else default
        config.plugins = (*config.plugins, name)
        _lock(config)


def _key_faults(config: ConfigDict, keys: Any) -> list[str]:
    """What is wrong with the keys that a plug-in adds to `config`."""
    if not isinstance(keys, dict):
        return ['needs a dict, e.g. {"model.token_dim": placeholder(int)}']
    faults = []
    for key, default in keys.items():
        if not (isinstance(key, str) and re.fullmatch(r"[a-z]\w*\.[a-z]\w*", key)):
            faults.append(f"{key!r}: needs the form section.key")
            continue
        section, _, leaf = key.partition(".")
        is_none = isinstance(default, FieldReference) and default.get() is None
        kind = default.get_type() if is_none else type(default)
        numbers = default if kind is tuple and not is_none else ()
        if kind not in _KINDS or not all(type(number) in (int, float) for number in numbers):
            faults.append(f"{key}={default!r}: needs a bool, an int, a float, text, a tuple of "
                          "numbers, or placeholder(type)")  # fmt: skip
        elif section not in _OPEN_SECTIONS:
            faults.append(f"{key}: {section} takes no keys of plug-ins; choose one of "
                          f"{', '.join(_OPEN_SECTIONS)}")  # fmt: skip
        elif section in _SECTIONS_BY_NAME and not is_none:
            faults.append(f"{key}={default!r}: needs placeholder({kind.__name__}), as only what "
                          "you add has it")  # fmt: skip
        elif leaf in config[section] and config[section].get_type(leaf) is not kind:
            faults.append(f"{key}: exists as {config[section].get_type(leaf).__name__}, not "
                          f"{kind.__name__}; rename it")  # fmt: skip
    return faults


def own_keys(config: ConfigDict, section: str) -> dict[str, Any]:
    """{key: value} of the keys of plug-ins in a section that are not None."""
    ours = default_config()[section]
    return {k: v for k, v in config[section].items() if k not in ours and v is not None}


REQUIRED = ("global_batch_size", "duration", "model.name", "data.name", "data.image_size",
            "optimizer.peak_lr")  # fmt: skip

REQUIRED_TO_EVALUATE = ("global_batch_size", "data.name")  # a model that is there already

TUPLES_OF_STRINGS = ("study.cells",)


class SplitKey(NamedTuple):
    """What tells the splits apart that a run opens.

    classes: those that are kept, as in `data.classes`; None: all.
    """

    data_name: str
    split: str
    data_dir: str | None
    classes: tuple[int, ...] | None = None


def weights_source(config: ConfigDict) -> str | None:
    """What a run takes its first weights from; None: nothing, it starts from scratch."""
    return None if config.init_from == "scratch" else config.init_from


def train_split(config: ConfigDict) -> SplitKey:
    """What is trained on: a split, or the mixture that begins with it."""
    split = config.data.split + (f" + {config.data.mix}" if config.data.mix else "")
    return SplitKey(config.data.name, split, config.data.data_dir, config.data.classes)


def eval_splits(config: ConfigDict, entry: ConfigDict) -> dict[str, SplitKey]:
    """{key: split} of the keys of an entry of `evals` that hold splits.

    Of other data than those of training, `data.classes` are not chosen for what learns its own.
    """
    d = config.data
    name = d.name if entry.data_name is None else entry.data_name
    data_dir = d.data_dir if entry.data_dir is None else entry.data_dir
    own = (name, data_dir) == (d.name, d.data_dir) or name == "synthetic"
    classes = d.classes if own or not find_evaluator(entry.type).learns_classes else None
    keys = sorted(key for key in entry if key.endswith("split"))
    return {key: SplitKey(name, entry[key], data_dir, classes) for key in keys}


def split_words(arg: str, known: dict[str, str]) -> tuple[list[str], set[str]]:
    """Splits a config's argument string into free words, in their order, and those of `known`.

    Args:
      arg: comma-separated words, e.g. "ViT-L/16,imagenet21k,30ep,debug".
      known: the words that may stand in any place, with what each does.
    """
    words = [word.strip() for word in arg.split(",") if word.strip()]
    return [w for w in words if w not in known], {w for w in words if w in known}


def refuse_words(words: Sequence[str], known: dict[str, str], config_file: str) -> None:
    """Raises InputError if there are `words` that the config file `config_file` does not know."""
    meaning = "; ".join(f"{word}: {what}" for word, what in known.items())
    collect_faults(
        [f"unknown word {word!r}; it takes {meaning}" for word in words],
        f"configs/{pathlib.Path(config_file).name}",
    )


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """{"model.name": "ViT-B/16", ...}: every leaf by its dotted key; lists as tuples."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value
    return flat


def image_hw(size: int | Sequence[int], key: str = "image_size") -> tuple[int, int]:
    """(height, width) of a size given as int or pair, for the key or argument `key`.

    Raises:
      InputError: if it is neither.
    """
    pair = (size, size) if isinstance(size, int) else size
    if not (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(type(side) is int and side > 0 for side in pair)
    ):
        raise InputError(f"{key}={size!r}: needs a positive int or a pair of them")
    height, width = pair
    return height, width


def step_range(text: str, key: str) -> range:
    """The steps that "10:15" names: after the first number, up to and with the second.

    Raises:
      InputError: if it is not of that form.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise InputError(f"{key}={text!r}: needs two steps, the smaller first, e.g. 10:15")
    return range(int(match[1]), int(match[2]))


def model_fields(config: ConfigDict) -> dict[str, Any]:
    """The keyword arguments for `create_model` that `config.model` sets."""
    return {k: v for k, v in config.model.items() if k != "name" and v is not None}


def optimizer_fields(config: ConfigDict) -> dict[str, Any]:
    """The keyword arguments for `make_optimizer` in `config.optimizer`."""
    of_others = ("peak_lr", "accum_steps", "ema_decay")
    return {k: v for k, v in config.optimizer.items() if k not in of_others}


def step_fields(config: ConfigDict) -> dict[str, Any]:
    """The keyword arguments for `make_train_step` that the config sets."""
    return {k: config.optimizer[k] for k in ("accum_steps", "ema_decay", "freeze")}
