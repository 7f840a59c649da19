"""Opening and checking the splits of a run."""

import dataclasses
import functools
import itertools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import config as config_lib
from vit_jax import data
from vit_jax.base.errors import Faults, InputError, collect_faults, few
from vit_jax.config import SOURCES, Evaluator, Settings, SplitKey
from vit_jax.config.metric_names import chosen_metrics
from vit_jax.config.sections import Data, Run
from vit_jax.data.contract import fingerprint
from vit_jax.data.preprocessing import (
    Preprocessing,
    describe_batch,
    eval_batch,
    fingerprint_of_views,
)
from vit_jax.objectives.contract import ObjectivePart
from vit_jax.objectives.losses import Loss, balanced_weights
from vit_jax.run.setup.matching import GENERIC_NAME, SYNSET

logger = logging.getLogger("vit_jax")

TaughtClasses = tuple[int | None, tuple[str, ...] | None]  # number and names


def open_evaluated(
    d: Data,
    evals: Mapping[str, Evaluator],
    class_names: Sequence[str] | None = None,
    divider: data.Divider | None = None,
    opened: Mapping[SplitKey, data.Source] = types.MappingProxyType({}),
) -> dict[SplitKey, data.Source]:
    """The splits that `evals` read; those in `opened` are not opened again.

    `class_names` belong to a model that is only evaluated, None if unknown: own images get the
    labels that their classes have in the model, by name. `divider` divides the user's images.

    Raises:
      InputError: lists the faults of all splits.
    """
    sources = dict[SplitKey, data.Source]()
    divider = divider or data.Divider(anew=True)
    faults: dict[str, str] = {}  # each is said once, however many splits are read
    captions = d.text_length is not None or any(e.reads_captions for e in evals.values())
    for name, entry in evals.items():
        learns = entry.learns_classes
        for split_key, key in config_lib.eval_splits(d, entry).items():
            where = f"evals.{name}.{split_key}"
            made = SOURCES.find(key.data_name).is_made
            asked: dict[str, Any] = {"class_names": None if learns else class_names}
            asked["captions"] = captions
            if made:
                asked |= {"num_classes": d.num_classes, "num_examples": d.num_examples}
            try:
                source = sources.get(key) or opened.get(key)
                source = source or _open_split(d, key, divider=divider, **asked)
                if class_names is not None and key not in sources:
                    of = "data" if key.data_dir == d.data_dir else f"evals.{name}"
                    source = _match_own(source, key, class_names, learns, f"{of}.data_dir")
            except InputError as e:
                for fault in e.faults:
                    faults.setdefault(fault, f"{where}: {fault}")
                continue
            sources[key] = source
            if not learns and source.num_classes != d.num_classes:
                faults[where] = (
                    f"{where}: {source.name} {source.split} has {source.num_classes:,} classes, "
                    f"but the model has {d.num_classes:,}; use a data set with the classes that "
                    "the model was trained on"
                )
    collect_faults([*faults.values()])
    return sources


def find_absent(settings: Settings, *, training: bool) -> dict[str, None]:
    """{"evals.NAME": None} for the evaluators whose split ends in "?" and is not there.

    Only own images have such splits.

    Raises:
      InputError: no evaluator is left to evaluate, or training would wait for a metric of one that
        is left out.
    """
    absent: dict[str, str] = {}
    for name, entry in settings.evals.items():
        for split_key, key in config_lib.eval_splits(settings.data, entry).items():
            if not getattr(entry, split_key).endswith("?"):
                continue
            splits = SOURCES.find(key.data_name).splits(key.data_name, key.data_dir)
            if key.split not in splits:
                where = f"{key.data_dir or key.data_name} has no split {key.split!r}"
                absent[name] = f"evals.{name}: left out, as {where}"
    if training:
        waits = [
            f"{key}={metric!r}: {absent[metric.partition('/')[0]]}; add it, or choose a metric of "
            "another evaluator"
            for key, metric in chosen_metrics(settings.checkpoint, settings.stop).items()
            if metric.partition("/")[0] in absent
        ]
        collect_faults(waits)
    elif absent and len(absent) == len(settings.evals):
        raise InputError(*(f"{said}; choose another, as split=val" for said in absent.values()))
    else:
        for said in absent.values():
            logger.info("%s", said)
    return dict.fromkeys(f"evals.{name}" for name in absent)


def settle_names(data: Data, evals: Mapping[str, Evaluator]) -> dict[str, str]:
    """{key: name} of the data sets whose names may mean other data later."""
    of_evals = {f"evals.{name}.data_name": entry.data_name for name, entry in evals.items()}
    names = {"data.name": data.name} | {k: name for k, name in of_evals.items() if name is not None}
    settled = {key: SOURCES.find(name).settle(name) for key, name in names.items()}
    return {key: name for key, name in settled.items() if name != names[key]}


def _match_own(
    source: data.Source, key: SplitKey, class_names: Sequence[str], learns: bool, where: str
) -> data.Source:
    """A source of own images with the labels of a model's `class_names`, where it has them all.

    Labels that are numbers below the number of classes, and no names, are the model's from 0.
    `where`: the key of the config that gives its folder.

    Raises:
      InputError: the model lacks some of the classes, and the evaluator does not learn its own.
    """
    names = source.class_names
    is_own = SOURCES.find(key.data_name).is_own and key.classes is None
    if not is_own or names is None:
        return source
    if not {*names} <= {*class_names}:
        numbers = [int(name) for name in names if name.isdecimal()]
        are_numbers = [*dict.fromkeys(numbers)] == numbers and len(numbers) == len(names)
        # Models call the classes of ImageNet by words, in the same order.
        of_imagenet = all(map(SYNSET.fullmatch, names)) and len(names) == len(class_names)
        if learns or of_imagenet or (are_numbers and numbers == [*range(len(class_names))]):
            return source
        if are_numbers and max(numbers) < len(class_names) and not {*names} & {*class_names}:
            logger.info("%s=%r: label numbers count the model's classes from 0: %s is %r",
                        where, key.data_dir, names[0], class_names[numbers[0]])  # fmt: skip
            names = tuple(class_names[number] for number in numbers)
            source = dataclasses.replace(source, class_names=names)
        elif all(map(GENERIC_NAME.fullmatch, class_names)):
            return source
    try:
        return data.match_classes(source, class_names)
    except InputError as e:
        raise InputError(f"{where}={key.data_dir!r}: {e}") from None


def open_training(
    settings: Settings,
    taught: TaughtClasses | None = None,
    divider: data.Divider | None = None,
) -> tuple[dict[str, Any], dict[SplitKey, data.Source]]:
    """Open the training data: ({key of the config: fact of the data}, sources).

    `config.train_split` gives the key of the whole; for a mixture, its first part also has a
    key of its own. `taught` are the classes that teachers give to unlabelled images, which have
    none of their own; None: there are no such teachers. `divider` divides the user's images;
    None: anew.

    Raises:
      InputError: if the data are missing, in part too, or do not match the config.
    """
    divider = divider or data.Divider(anew=True)
    d = settings.data
    own, *others = keys = data.mixed_keys(d)
    for key in keys:
        if key.split == "all" and SOURCES.find(key.data_name).is_own:
            where = "data.split='all'" if key == own else f"data.mix: {key.data_name}@all"
            raise InputError(f"{where}: is for evaluation only; train on 'train'")
    _warn_of_evaluated(others, settings)
    open_split = functools.partial(_open_split, d, divider=divider)
    first = open_split(
        own,
        num_classes=None if taught else d.num_classes,
        num_examples=None if others else d.num_examples,
        # Of a mixture, or of some classes, another share may be missing.
        max_corrupt_fraction=1.0 if others or d.classes else d.max_corrupt_fraction,
    )
    if taught is not None and taught[0] is not None:
        first = dataclasses.replace(first, num_classes=taught[0], class_names=taught[1])
    _check_learnable(settings.objective, d, first)
    opened = _open_mixture(d, keys, first, open_split) if others else [first]
    sources = {own: opened[0]}
    if d.soft_labels:
        opened = [data.soften(part) for part in opened]
    elif soft := [part.split for part in opened if part.soft_labels]:
        raise InputError(
            f"data.soft_labels=False: {soft[0]} has probabilities for labels; set "
            "--config.data.soft_labels=true"
        )
    source = data.concatenate(opened) if others else opened[0]
    sources[config_lib.train_split(d)] = source
    _check_whole(d, source, divider)
    facts = {
        "data.num_classes": source.num_classes,
        "data.num_examples": source.num_examples,
        "loss.class_weights": _class_weights(settings.loss, d.mix, source, opened),
        **_find_order(d, settings.run.global_batch_size, source),
    }
    return facts, sources


def _check_whole(d: Data, source: data.Source, divider: data.Divider) -> None:
    """Raise InputError if training images are missing, or are not as many as the config says."""
    if missing := divider.find_missing():
        raise InputError(
            f"data.data_dir={d.data_dir!r}: {len(missing):,} of the images that the run began to "
            f"train on are missing: {few(missing)}; restore them, or begin a new run in "
            "another --workdir"
        )
    if d.num_examples not in (None, source.num_examples):
        raise InputError(
            f"data.num_examples={d.num_examples}: the data sets in data.name and data.mix have "
            f"{source.num_examples} in total; leave it out"
        )


def _find_order(d: Data, global_batch_size: int, source: data.Source) -> dict[str, Any]:
    """The keys of the order in which the training records are read; warns of a slow one."""
    order, streams = data.resolve_order(
        d.order,
        d.streams,
        num_examples=source.num_examples,
        global_batch_size=global_batch_size,
        repeats=d.repeats,
        chunks=source.chunks,
    )
    if source.chunks and order == "record":
        logger.warning(
            "data.order=record: reads %d images for each one, as %s stores them together; leave it "
            "out, or set it to chunk", source.chunks.size, source.name,
        )  # fmt: skip
    chunk_size = data.resolve_chunk_size(d.chunk_size, source.chunks)
    return {"data.order": order, "data.streams": streams, "data.chunk_size": chunk_size}


def _warn_of_evaluated(keys: Sequence[SplitKey], settings: Settings) -> None:
    """Warn of splits in `data.mix` that an evaluator measures."""
    for name, entry in settings.evals.items():
        measured = {k: s for k, s in config_lib.eval_splits(settings.data, entry).items()
                    if k != "train_split"}  # fmt: skip
        for key in keys:
            if any(data.share_images(key, split) for split in measured.values()):
                logger.warning(
                    "data.mix: %s %s is trained on, and evals.%s measures these images; leave them "
                    "out of one of the two", key.data_name, key.split, name,
                )  # fmt: skip


def _open_mixture(
    d: Data,
    keys: Sequence[SplitKey],
    source: data.Source,
    open_split: Callable[..., data.Source],
) -> list[data.Source]:
    """`source`, the first of the `keys` of a mixture, and the others; all are held alike."""
    faults = Faults()
    others = [faults.check_in("data.mix: ", open_split, key) for key in keys[1:]]
    collect_faults(faults)
    for one, other in itertools.combinations(keys, 2):
        if data.share_images(one, other):
            logger.warning(
                "data.mix: %s and %s of %s may share images, which are then drawn for both; mix "
                "parts that share none, such as train[:50%%] and train[50%%:]",
                one.split, other.split, one.data_name,
            )  # fmt: skip
    opened = [source, *(other for other in others if other is not None)]
    if d.reader is not None or data.held_alike(opened):
        return opened
    # Size and free memory decide which are held as pixels; a mixture must not depend on it.
    return [
        s if s.encoded or key.data_name in data.SOURCES else open_split(key, reader=data.ON_DISK)
        for key, s in zip(keys, opened, strict=True)
    ]


def _class_weights(
    loss: Loss, mixed: str, source: data.Source, parts: Sequence[data.Source]
) -> str | None:
    """`loss.class_weights` in numbers: "balanced" by how often training draws each class.

    `parts` make up `source`; there are several in a mixture, `mixed`, whose weights count.

    Raises:
      InputError: it has another number of weights than there are classes.
    """
    weights, total = loss.class_weights, source.num_examples
    if weights == "balanced":
        mix = [part.weight for part in data.parse_mix(mixed)]
        shares = [1 - sum(mix), *mix]
        # Expected images of each class among as many draws as there are images.
        counts_C = sum(
            total * share / part.num_examples * data.count_labels(part)
            for part, share in zip(parts, shares, strict=True)
        )
        numbers = balanced_weights(np.asarray(counts_C), total, bool(loss.excludes))
        return ",".join(f"{number:.6g}" for number in numbers)
    if weights is not None and len(weights.split(",")) != source.num_classes:
        raise InputError(
            f"loss.class_weights={weights!r}: has {len(weights.split(','))} numbers, and "
            f"{source.name} {source.num_classes} classes; give one for each, or balanced"
        )
    return weights


def _check_learnable(objective: ObjectivePart, d: Data, source: data.Source) -> None:
    """Raises InputError if the objective learns classes and the user's images have too few."""
    if not objective.learns_labels:
        return
    if source.class_names is None and SOURCES.find(source.name).is_own:
        raise InputError(
            f"data.name={source.name!r}: has no labels, which "
            f"objective.name={objective.name!r} learns; give it some: a folder for each "
            'class (data.name=folder), or in Python data={"train": (images, labels)}; or choose '
            "another objective, such as distillation with --config.objective.weight=1"
        )
    if SOURCES.find(source.name).is_own and source.num_classes < 2:
        has = f"has 1 class, {source.class_names}; needed: at least 2"
        if d.data_dir is None:
            raise InputError(f"data.name={source.name!r}: {has}; give images of others too")
        raise InputError(
            f"data.data_dir={d.data_dir!r} {has}; give the folder that holds a folder for each "
            "class, or train/ with them"
        )


def _open_split(d: Data, key: SplitKey, *, divider: data.Divider, **asked: Any) -> data.Source:
    """Opens a split; `asked`: further fields of `data.contract.Request`."""
    keys = ("reader", "exif", "pixel_range", "decoding", "multi_label", "channels")
    common = {name: getattr(d, name) for name in keys}
    common["captions"] = d.text_length is not None
    return data.make_source(
        key.data_name,
        split=key.split,
        image_size=d.image_size,
        data_dir=key.data_dir,
        exclude=key.exclude,
        classes=key.classes,
        subset=key.subset,
        own=d.own,
        divider=divider,
        **common | asked,
    )


def training_order(d: Data, run: Run, source: data.Source) -> data.Order:
    """The order of training on `source`; the sections are resolved."""
    return data.make_order(
        d.order,
        source.part_sizes,
        run.seed,
        global_batch_size=run.global_batch_size,
        chunk_size=d.chunk_size,
        streams=d.streams,
        repeats=d.repeats,
        weights=[part.weight for part in data.parse_mix(d.mix)],
    )


def check_images(
    d: Data,
    evals: Mapping[str, Evaluator],
    preprocessing: Preprocessing,
    sources: Mapping[SplitKey, data.Source],
) -> None:
    """Raise InputError if the ops of training or of an evaluator do not give `data.image_size`."""
    spec = describe_batch(d, 1, preprocessing)
    training, faults = sources[config_lib.train_split(d)], Faults()
    faults.check(data.host_batches, training, spec, steps=range(0), seed=0, rows=np.arange(1))
    faults.check(check_evaluated_images, d, evals, preprocessing, sources)
    collect_faults(faults)


def check_evaluated_images(
    d: Data,
    evals: Mapping[str, Evaluator],
    preprocessing: Preprocessing,
    sources: Mapping[SplitKey, data.Source],
) -> None:
    """Raise InputError if the ops of evaluators do not give `data.image_size`."""
    faults = Faults()
    for name, entry in evals.items():
        ops, key = preprocessing.eval_ops[name], f"evals.{name}.ops"
        spec = eval_batch(d, 1, ops, key)
        for split in config_lib.eval_splits(d, entry).values():
            faults.check(data.host_eval_batches, sources[split], spec, rows=np.arange(1))
    collect_faults(faults)


def data_fingerprint(settings: Settings, source: data.Source) -> str:
    """Digest of everything, apart from code, that decides the bytes of each step's batch.

    Args:
      settings: resolved.
      source: the training data.
    """
    d = settings.data
    identity = [
        source.fingerprint,
        settings.run.seed,
        settings.run.global_batch_size,
        d.ops,
        d.image_size,
        [d.order, d.chunk_size, d.streams, d.repeats, data.without_places(d.mix)],
    ]
    channels = [f"{d.channels} channels"] * (d.channels != 3)
    views = fingerprint_of_views(d, settings.objective.further_views)
    ranges = [] if d.pixel_range is None else [f"range {d.pixel_range}"]
    schedule = [settings.values["data.image_size"], d.image_size_keeps]
    sizes = schedule if len(settings.sizes) > 1 else []
    sizes += [] if d.max_tokens is None else [settings.values["data.max_tokens"], d.patch_size]
    sizes += [] if d.pack is None else [["pack", *d.pack]]
    texts = [d.text_length, d.vocabulary_digest] if d.text_length is not None else []
    return fingerprint(*identity, *channels, *views, *ranges, *sizes, *texts)
