"""Labels unlabelled images by a model, for self-training.

    WORKDIR/labels.json      what was labelled, by which model
    WORKDIR/part_00000.npz   probabilities of the first records, and so on
    WORKDIR/labels.npz       the records to train on, and their labels: data/sources/pseudo.py
    WORKDIR/summary.json     how many were kept, and by which choice; written last

The parts are written as parts.py says. The same command chooses the records anew where only the
choice has changed.

Axes: n records, C classes.
"""

import io
import json
import logging
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import data
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.files import absolute, check_folder, write_whole
from vit_jax.config import LOSSES, SOURCES, Settings, sections
from vit_jax.data.sources.pseudo import PseudoLabels, agreement, select
from vit_jax.inference.outputs import check_classes
from vit_jax.inference.parts import Parts, Rows, begin, facts_of, write_missing
from vit_jax.run.setup.matching import find_places, say_places
from vit_jax.transfer import Pretrained

logger = logging.getLogger("vit_jax")

_RECORDS_OF_PART = 65_536  # until labels.json stated it


def label(
    study: sections.Study, settings: Settings, pretrained: Pretrained, workdir: epath.PathLike
) -> dict[str, Any]:
    """Label the images of `study.unlabelled` by `pretrained`; return the summary.

    Uses the keys `unlabelled`, `unlabelled_dir`, `soft_labels`, `confidence` and `per_class` of
    `study`, and how `settings.data` reads images. The images are preprocessed as in the model's
    evaluation.

    Raises:
      InputError: the images or the classes are missing, an image may have several labels,
        `workdir` holds a run or the labels of other images or another model, or no image is
        labelled with the needed confidence.
    """
    workdir, run = absolute(workdir), settings.run
    _check_inputs(pretrained, workdir)
    size = pretrained.spec.image_size or settings.data.image_size
    divider = data.Divider(pretrained.division, anew=True)  # labels new images too
    pretrained = pretrained._replace(spec=pretrained.spec.at(size))
    source, facts = _open_images(study, settings.data, pretrained, divider)
    num_classes = pretrained.model.num_classes
    parts = begin(
        workdir / "labels.json",
        {key: facts[key] for key in facts if key != "data_dir"},  # which may move
        source.num_examples,
        run.global_batch_size,
        flag="--workdir",
        suffix=".npz",
        size=_RECORDS_OF_PART,
    )
    how = {"batch_size": run.global_batch_size, "what": "probabilities"}
    write_missing(pretrained, source, parts, _write_part, **how)
    found = _read_columns(parts)
    records = select(
        found["top"],
        found["label"],
        confidence=study.confidence,
        per_class=study.per_class,
        num_classes=num_classes,
        seed=run.seed,
    )
    if not len(records):
        raise InputError(
            f"study.confidence={study.confidence}: no image is labelled with it; the greatest "
            f"probability is {found['top'].max(initial=0):.3g}; choose a smaller one"
        )
    labels = found["label"][records].astype(np.int32)
    if study.soft_labels:
        labels = _probabilities_of(parts, records, num_classes)
    loss = pretrained.spec.loss or "softmax"  # as `outputs` assumes
    facts |= {
        "of_model": num_classes,
        "class_names": pretrained.spec.class_names,
        "loss": loss,
        "adds_up": LOSSES.find(loss).excludes is not False,
    }
    division = data.Division(divider.decided).to_bytes() if divider.decided else b""
    content = PseudoLabels(records, labels, facts, division).to_bytes()
    summary = {
        "labels/examples": source.num_examples,
        "labels/kept": len(np.unique(records)),
        "labels/written": len(records),
        "labels/classes": len(np.unique(found["label"][records])),
        "choice": _choice(study, run),
    }
    true = _true_labels(source, pretrained, found["true"])
    if true is not None and not np.isnan(top1 := agreement(records, found["label"], true)):
        summary["labels/top1"] = top1
    if jax.process_index() == 0:
        write_whole(workdir / "labels.npz", content)
        write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _choice(study: sections.Study, run: sections.Run) -> dict[str, Any]:
    """The keys that decide what `labels.npz` holds."""
    keys = ("confidence", "per_class", "soft_labels", "unlabelled")
    of_study = {f"study.{key}": getattr(study, key) for key in keys}
    return of_study | {"init_from": run.init_from, "seed": run.seed}


def _true_labels(
    source: data.Source, pretrained: Pretrained, labels: np.ndarray
) -> np.ndarray | None:
    """The images' own `labels` (n,) as outputs of the model, -1 for none.

    None if it has other classes.
    """
    if source.multi_label:
        return None
    try:
        places = find_places(source.class_names, pretrained.spec.class_names, pretrained.source)
    except InputError:
        return None
    if places is not None:
        return np.where(labels < 0, -1, np.asarray(places)[labels])
    if source.num_classes != pretrained.model.num_classes:
        return None
    if source.class_names:
        say_places("labels/top1", source.class_names, pretrained.source)
    return labels


def _check_inputs(pretrained: Pretrained, workdir: epath.Path) -> None:
    """Raise InputError if the teacher or the workdir do not suit."""
    check_classes(pretrained)
    check_folder(workdir, "--workdir")
    faults = Faults()
    faults.need(
        not (workdir / "config.json").exists(),
        f"--workdir={workdir}: holds a run; give the labels a folder of their own",
    )
    faults.need(
        pretrained.run is None or not pretrained.run["config"]["data"]["multi_label"],
        f"init_from={pretrained.source!r}: was trained with data.multi_label=true, and an image "
        "gets one pseudo label; label with a teacher of exclusive classes",
    )
    collect_faults(faults)


def parse_unlabelled(unlabelled: str | None, split: str) -> tuple[str, str]:
    """(name, split) in `study.unlabelled`; without a split there, `split`.

    Raises:
      InputError: it is not set.
    """
    name, at, own_split = (unlabelled or "").partition("@")
    if not name or (at and not own_split):
        raise InputError(
            f"study.unlabelled={unlabelled!r}: needs NAME or NAME@SPLIT, the images to label"
        )
    return name, own_split or split


def _open_images(
    study: sections.Study, d: sections.Data, pretrained: Pretrained, divider: data.Divider
) -> tuple[data.Source, dict[str, Any]]:
    """The images to label, and the facts that make them and their labels."""
    spec = pretrained.spec
    name, split = parse_unlabelled(study.unlabelled, d.split)
    made = SOURCES.find(name).is_made
    source = data.make_source(
        name,
        split=split,
        data_dir=study.unlabelled_dir or d.data_dir,
        image_size=spec.need_size(),
        divider=divider,
        **spec.reading._asdict(),
        reader=d.reader,
        num_classes=d.num_classes if made else None,
        num_examples=d.num_examples if made else None,
        **d.own,
    )
    return source, {
        "name": name,
        "split": split,
        "data_dir": study.unlabelled_dir,
        "num_classes": source.num_classes if made else None,
        "num_examples": source.num_examples if made else None,
        **facts_of(pretrained, source),
    }


def _write_part(path: epath.Path, ids: np.ndarray, rows: Rows) -> None:
    found = list(rows)
    probabilities = np.concatenate([p for p, _ in found])
    part = {
        "probabilities": probabilities.astype(np.float16),
        "label": probabilities.argmax(axis=1).astype(np.int32),
        "top": probabilities.max(axis=1),
        "valid": np.concatenate([batch["mask"] > 0 for _, batch in found]),
        "true": np.concatenate([batch["label"] for _, batch in found]),
    }
    np.savez(file := io.BytesIO(), **part)
    write_whole(path, file.getvalue())
    logger.info("%s: %d records labelled", path, len(ids))


def _read_columns(parts: Parts) -> dict[str, np.ndarray]:
    """{"label", "top", "true"}, each (n,), of every record."""
    columns: dict[str, list[np.ndarray]] = {"label": [], "top": [], "true": []}
    for i in range(len(parts)):
        with np.load(io.BytesIO(parts.path(i).read_bytes()), allow_pickle=False) as part:
            columns["label"].append(part["label"])
            columns["top"].append(np.where(part["valid"], part["top"], 0))
            columns["true"].append(part["true"])
    return {name: np.concatenate(found) for name, found in columns.items()}


def _probabilities_of(parts: Parts, records: np.ndarray, num_classes: int) -> np.ndarray:
    """The probabilities of `records`, float16 (m, C)."""
    found = np.empty((len(records), num_classes), np.float16)
    for i in range(len(parts)):
        of_part = records // parts.size == i
        if of_part.any():
            with np.load(io.BytesIO(parts.path(i).read_bytes())) as part:
                found[of_part] = part["probabilities"][records[of_part] % parts.size]
    return found
