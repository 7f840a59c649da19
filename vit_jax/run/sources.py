"""Opening and checking the splits of a run."""

import dataclasses
import functools
import logging
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data
from vit_jax.config import SplitKey
from vit_jax.config.evals import EVALUATORS
from vit_jax.data.folder_contents import class_like_folders, find_dataset_below
from vit_jax.data.pictures import shown
from vit_jax.data.preprocessing import Preprocessing, describe_batch
from vit_jax.data.sources import fingerprint
from vit_jax.data.views import fingerprint_of_views
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators.metric_names import chosen_metrics
from vit_jax.objectives import objective_of
from vit_jax.objectives.losses import balanced_weights

logger = logging.getLogger("vit_jax")

SYNSET = re.compile(r"n\d{8}")  # as data sets call the classes of ImageNet, and models do not
TaughtClasses = tuple[int | None, tuple[str, ...] | None]  # number and names
_GENERIC_NAME = re.compile(r"LABEL_\d+")  # as Hugging Face calls classes that were given no names
_NUMBER = re.compile(f"{SYNSET.pattern}|{_GENERIC_NAME.pattern}")


def find_other_names(
    theirs: Sequence[str] | None, ours: Sequence[str] | None
) -> list[tuple[int, str, str]]:
    """(label, their name, our name) where the names differ, but not only in case.

    [] if one side has no names, or has synset numbers.
    """
    pairs = list(zip(theirs or (), ours or (), strict=False))
    if any(all(map(SYNSET.fullmatch, side)) for side in zip(*pairs, strict=True)):
        return []
    return [(i, a, b) for i, (a, b) in enumerate(pairs) if a.lower() != b.lower()]


def find_places(
    names: Sequence[str] | None, known: Sequence[str] | None, source: str
) -> list[int] | None:
    """The place of each class of `names` in `known`, the classes of `source`.

    None if one side has no names, or numbers for names, as then only the places can match.

    Raises:
      InputError: `known` lacks a class, or has two of its name.
    """
    if not names or not known or any(all(map(_NUMBER.fullmatch, side)) for side in (names, known)):
        return None
    if len(names) <= len(known) and not find_other_names(names, known):
        return list(range(len(names)))
    for name in names:
        if (number := known.count(name)) != 1:
            has = "no class" if number == 0 else f"{number} classes"
            raise InputError(f"{source} has {has} {name!r}, which the data have")
    return [known.index(name) for name in names]


def open_evaluated(
    config: ConfigDict,
    class_names: Sequence[str] | None = None,
    divider: data.Divider | None = None,
    opened: Mapping[SplitKey, data.Source] = types.MappingProxyType({}),
) -> dict[SplitKey, data.Source]:
    """The splits that `config.evals` reads; those in `opened` are not opened again.

    `class_names` are those of a model that is only evaluated, None if unknown: own pictures get the
    labels that their classes have in the model, by name. `divider` divides the user's pictures.

    Raises:
      InputError: lists the faults of all splits.
    """
    d, faults = config.data, Faults()
    divider = divider or data.Divider(anew=True)
    sources: dict[SplitKey, data.Source] = {}
    reported: list[str] = []
    for name, entry in config.evals.items():
        for split_key, key in config_lib.eval_splits(config, entry).items():
            synthetic = key.data_name == "synthetic"
            learns = EVALUATORS.find(entry.type).learns_classes
            numbers = (d.num_classes, d.num_examples) if synthetic else (None, None)
            try:
                source = sources.get(key) or opened.get(key)
                source = source or _open_split(config, key, *numbers, divider=divider)
            except InputError as e:  # the same for other splits of the data
                new = [fault for fault in e.faults if fault not in reported]
                faults += [f"evals.{name}.{split_key}: {fault}" for fault in new]
                reported += new
                continue
            if class_names is not None and key not in sources:
                try:
                    source = _match_own(source, key, class_names, learns)
                except InputError as e:
                    of = "data" if key.data_dir == d.data_dir else f"evals.{name}"
                    fault = f"{of}.data_dir={key.data_dir!r}: {e}"
                    faults.need(fault in faults, fault)  # once, however many splits are read
                    continue
            sources[key] = source
            if not learns and source.num_classes != d.num_classes:
                faults.append(
                    f"evals.{name}.{split_key}: {source.name} {source.split} has "
                    f"{source.num_classes:,} classes, but the model has {d.num_classes:,}; use a "
                    "data set with the classes that the model was trained on"
                )
    collect_faults(faults)
    return sources


def find_absent(config: ConfigDict, *, training: bool) -> dict[str, None]:
    """{"evals.NAME": None} for the evaluators whose split ends in "?" and is not there.

    Only own pictures have such splits.

    Raises:
      InputError: no evaluator is left to evaluate, or training would wait for a metric of one that
        is left out.
    """
    absent: dict[str, None] = {}
    faults = Faults()
    for name, entry in config.evals.items():
        if not entry.get("split", "").endswith("?"):
            continue
        key = config_lib.eval_splits(config, entry)["split"]
        is_own = key.data_name in data.OWN_PICTURES
        if is_own and key.split in data.own_splits(key.data_name, key.data_dir, config.data):
            continue
        absent[f"evals.{name}"] = None
        if not training:
            left_out = f"evals.{name}: left out, as {key.data_dir} has no split {key.split!r}"
            logger.info("%s", left_out)
            faults.need(
                len(absent) < len(config.evals),
                f"{left_out}; choose one, e.g. --config.evals.{name}.split=val",
            )
        for metric_key, metric in chosen_metrics(config).items() if training else ():
            faults.need(
                metric.partition("/")[0] != name,
                f"{metric_key}={metric!r}: evals.{name} is left out, as the pictures have no "
                f"split {key.split!r}; add it, or choose a metric of another evaluator",
            )
    collect_faults(faults)
    return absent


def _match_own(
    source: data.Source,
    key: SplitKey,
    class_names: Sequence[str],
    learns: bool,
) -> data.Source:
    """A source of own pictures with the labels of a model's `class_names`, where it has them all.

    Raises:
      InputError: the model lacks some of the classes, and the evaluator does not learn its own.
    """
    names = source.class_names
    own_pictures = key.data_name in data.OWN_PICTURES and key.classes is None
    if not own_pictures or names is None or all(map(_GENERIC_NAME.fullmatch, class_names)):
        return source
    if learns and not {*names} <= {*class_names}:
        return source
    of_imagenet = len(names) == len(class_names) and all(map(SYNSET.fullmatch, names))
    if of_imagenet and not {*names} <= {*class_names}:
        return source  # models call these classes by words, in the same order
    return data.match_classes(source, class_names)


def open_training(
    config: ConfigDict,
    taught: TaughtClasses | None = None,
    divider: data.Divider | None = None,
) -> tuple[dict[str, Any], dict[SplitKey, data.Source]]:
    """Open the training data: ({key of the config: fact of the data}, sources).

    `config.train_split(config)` is the key of the whole; for a mixture, its first part also has a
    key of its own. `taught` are the classes that teachers give to unlabelled pictures, which have
    none of their own; None: there are no such teachers. `divider` divides the user's pictures;
    None: anew.

    Raises:
      InputError: if the data are missing, in part too, or do not match the config.
    """
    divider = divider or data.Divider(anew=True)
    d = config.data
    own, parts = config_lib.own_split(config), data.parse_mix(d.mix)
    if d.split == "all" and d.name in (*data.OWN_PICTURES, "unlabelled"):
        raise InputError("data.split='all': is for evaluation only; train on 'train'")
    open_split = functools.partial(_open_split, config, divider=divider)
    source = open_split(
        own,
        None if taught else d.num_classes,
        None if parts else d.num_examples,
        # Of a mixture, or of some classes, another share may be missing.
        max_corrupt_fraction=1.0 if parts or d.classes else d.max_corrupt_fraction,
    )
    if taught is not None and taught[0] is not None:
        source = dataclasses.replace(source, num_classes=taught[0], class_names=taught[1])
    sources, opened = {own: source}, [source]
    _check_learnable(config, source)
    if parts:
        opened = _open_mixture(config, source, open_split)
        sources[own] = opened[0]
        if d.soft_labels:
            opened = [data.soften(part) for part in opened]
        _check_soft(config, opened)
        sources[config_lib.train_split(config)] = source = data.concatenate(opened)
    elif d.soft_labels:
        source = data.soften(source)
        sources[own] = source
    else:
        _check_soft(config, opened)
    if missing := divider.find_missing():
        raise InputError(
            f"data.data_dir={d.data_dir!r}: {len(missing):,} of the pictures that the run began to "
            f"train on are missing: {data.say_names(missing)}; restore them, or begin a new run in "
            "another --workdir"
        )
    if d.num_examples not in (None, source.num_examples):
        raise InputError(
            f"data.num_examples={d.num_examples}: the data sets in data.name and data.mix have "
            f"{source.num_examples} in total; leave it out"
        )
    order, streams = data.resolve_order(
        d.order,
        d.streams,
        num_examples=source.num_examples,
        global_batch_size=config.global_batch_size,
        repeats=d.repeats,
    )
    facts = {
        "data.num_classes": source.num_classes,
        "data.num_examples": source.num_examples,
        "loss.class_weights": _class_weights(config, source, opened),
        "data.order": order,
        "data.streams": streams,
    }
    return facts, sources


def _open_mixture(
    config: ConfigDict, source: data.Source, open_split: Callable[..., data.Source]
) -> list[data.Source]:
    """`source`, the first part of a mixture, and the parts in `data.mix`; all are held alike."""
    d, faults, own = config.data, Faults(), config_lib.own_split(config)
    whole = own._replace(subset=None)
    parts = data.parse_mix(d.mix)
    keys = [whole._replace(data_name=part.name, split=part.split or d.split) for part in parts]
    # The classes of pseudo labels are the teacher's, which were chosen before.
    keys = [key._replace(classes=None) if key.data_name == "pseudo" else key for key in keys]
    others = [faults.check(open_split, key, prefix="data.mix: ") for key in keys]
    collect_faults(faults)
    opened = [source, *(other for other in others if other is not None)]
    if d.reader is not None or data.held_alike(opened):
        return opened
    # Size and free memory decide which are held as pixels; a mixture must not depend on it.
    return [
        s if s.encoded or key.data_name in data.SOURCES else open_split(key, reader=data.ON_DISK)
        for key, s in zip([own, *keys], opened, strict=True)
    ]


def _check_soft(config: ConfigDict, parts: Sequence[data.Source]) -> None:
    """Raise InputError if one of `parts` has soft labels that `config` does not ask for."""
    soft = [part.split for part in parts if part.soft_labels]
    if soft and not config.data.soft_labels:
        raise InputError(
            f"data.soft_labels=False: {soft[0]} has probabilities for labels; set "
            "--config.data.soft_labels=true"
        )


def _class_weights(
    config: ConfigDict, source: data.Source, parts: Sequence[data.Source]
) -> str | None:
    """`loss.class_weights` in numbers: "balanced" by how often training draws each class.

    `parts` make up `source`; there are several in a mixture, whose weights count.

    Raises:
      InputError: it has another number of weights than there are classes.
    """
    weights = config.loss.class_weights
    if weights == "balanced":
        mix = [part.weight for part in data.parse_mix(config.data.mix)]
        counts_C = _drawn_counts(parts, mix) if mix else data.count_labels(source)
        numbers = balanced_weights(counts_C, source.num_examples, config.loss.name)
        return ",".join(f"{number:.6g}" for number in numbers)
    if weights is not None and len(weights.split(",")) != source.num_classes:
        raise InputError(
            f"loss.class_weights={weights!r}: has {len(weights.split(','))} numbers, and "
            f"{source.name} {source.num_classes} classes; give one for each, or balanced"
        )
    return weights


def _drawn_counts(parts: Sequence[data.Source], mix: Sequence[float]) -> np.ndarray:
    """Expected images of each class among as many draws as `parts` have images: float64 (C,).

    `mix`: the weights of all parts but the first, which gets the rest.
    """
    total = sum(part.num_examples for part in parts)
    counts = [
        total * share / part.num_examples * data.count_labels(part)
        for part, share in zip(parts, [1 - sum(mix), *mix], strict=True)
    ]
    return np.sum(counts, axis=0)


def _check_learnable(config: ConfigDict, source: data.Source) -> None:
    """Raises InputError if the objective learns classes and the user's pictures have too few."""
    if not objective_of(config).learns_labels:
        return
    where = f"data.data_dir={config.data.data_dir!r}"
    if source.name == "unlabelled":
        raise InputError(
            "data.name='unlabelled': has no labels, which "
            f"objective.name={config.objective.name!r} learns; put the pictures into a folder for "
            "each class (data.name=folder), or choose another objective, such as distillation with "
            "--config.objective.weight=1"
        )
    if source.name in data.OWN_PICTURES and source.num_classes < 2:
        remedy = "; needed: at least 2"
        if source.name == "folder":
            remedy += _advise_folder(data.find_layout(config.data.data_dir).train_root)
        raise InputError(f"{where} has 1 class, {source.class_names}{remedy}")


def _advise_folder(train_root: pathlib.Path) -> str:
    """The folder to give instead, if the one class in `train_root` holds a data set; or ""."""
    below = find_dataset_below(train_root)
    if below is not None:
        return f"; as {below.name}/ has train/ in it, give --config.data.data_dir={below}"
    folders = class_like_folders(train_root)
    inner = class_like_folders(folders[0]) if len(folders) == 1 else []
    if len(inner) < 2:
        return ""
    names = [shown(path.name) for path in inner[:4]] + ["..."] * (len(inner) > 4)
    return (
        f"; {shown(folders[0].name)}/ holds {len(inner)} folders ({', '.join(names)}); if they are "
        f"the classes, give --config.data.data_dir={folders[0]}"
    )


def _open_split(
    config: ConfigDict,
    key: SplitKey,
    num_classes: int | None = None,
    num_examples: int | None = None,
    reader: str | None = None,
    max_corrupt_fraction: float = 1.0,
    *,
    divider: data.Divider,
) -> data.Source:
    return data.make_source(
        key.data_name,
        split=key.split,
        classes=key.classes,
        subset=key.subset,
        reader=reader or config.data.reader,
        max_corrupt_fraction=max_corrupt_fraction,
        data_dir=key.data_dir,
        divider=divider,
        exif=config.data.exif,
        multi_label=config.data.multi_label,
        channels=config.data.channels,
        image_size=config_lib.image_hw(config.data.image_size),
        num_classes=num_classes,
        num_examples=num_examples,
        **config_lib.own_keys(config, "data"),
    )


def training_order(config: ConfigDict, source: data.Source) -> data.Order:
    """The order of training on `source`; `config` is resolved."""
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
    """Raise InputError if the ops of training or of an evaluator do not give `data.image_size`."""
    spec = dataclasses.replace(describe_batch(config, preprocessing), size=1)  # it may not be set
    training = sources[config_lib.train_split(config)]
    data.host_batches(training, spec, steps=range(0), seed=0, rows=np.arange(1))
    check_evaluated_images(config, preprocessing, sources)


def check_evaluated_images(
    config: ConfigDict, preprocessing: Preprocessing, sources: Mapping[SplitKey, data.Source]
) -> None:
    """Raise InputError if the ops of an evaluator do not give `data.image_size`."""
    for name, entry in config.evals.items():
        ops, key = preprocessing.eval_ops[name], f"evals.{name}.ops"
        spec = data.image_batch(1, preprocessing.image_size, ops, key)
        for split in config_lib.eval_splits(config, entry).values():
            data.host_eval_batches(sources[split], spec, rows=np.arange(1))


def data_fingerprint(config: ConfigDict, source: data.Source) -> str:
    """Digest of everything, apart from code, that decides the bytes of each step's batch.

    Args:
      config: filled in by `open_sources`.
      source: the training data.
    """
    d = config.data
    identity = [
        source.fingerprint,
        config.seed,
        config.global_batch_size,
        d.ops,
        config_lib.image_hw(d.image_size),
        [d.order, d.chunk_size, d.streams, d.repeats, d.mix],
    ]
    channels = [f"{d.channels} channels"] * (d.channels != 3)
    views = fingerprint_of_views(config)
    return fingerprint(*identity, *channels, *views)
