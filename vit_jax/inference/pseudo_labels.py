"""Labels unlabelled images by a model, for self-training.

    WORKDIR/labels.json      what was labelled, by which model
    WORKDIR/part_00000.npz   probabilities of the first records, and so on
    WORKDIR/labels.npz       the records to train on, and their labels: data/sources/pseudo.py
    WORKDIR/summary.json     how many were kept, and by which choice; written last

A part is written whole. The same command goes on with the parts that are missing, and chooses the
records anew where only the choice has changed.

Axes: n records, C classes.
"""

import io
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax import data
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.files import absolute, check_folder, write_whole
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.config import SOURCES, Settings, sections
from vit_jax.data.sources.pseudo import PseudoLabels, agreement, select
from vit_jax.inference.outputs import check_classes, outputs
from vit_jax.run.setup.matching import find_places, say_places
from vit_jax.transfer import Pretrained
from vit_jax.transfer.pretrained import ops_for

logger = logging.getLogger("vit_jax")

_RECORDS_OF_PART = 65_536


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
    path, num_classes = workdir / "labels.json", pretrained.model.num_classes
    _check_same(facts, path)
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(facts, indent=2) + "\n")
    found = _label_parts(run.global_batch_size, pretrained, source, workdir)
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
        labels = _probabilities_of(workdir, records, source.num_examples, num_classes)
    facts |= {
        "of_model": num_classes,
        "class_names": pretrained.spec.class_names,
        "loss": pretrained.spec.loss or "softmax",  # as `outputs` assumes
    }
    division = data.Division(divider.decided).to_bytes() if divider.decided else b""
    write_whole(workdir / "labels.npz", PseudoLabels(records, labels, facts, division).to_bytes())
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
    write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _choice(study: sections.Study, run: sections.Run) -> dict[str, Any]:
    """The keys that decide what `labels.npz` holds."""
    keys = ("confidence", "per_class", "soft_labels", "unlabelled")
    of_study = {f"study.{key}": getattr(study, key) for key in keys}
    return of_study | {"init_from": run.init_from, "seed": run.seed}


def _check_same(facts: Mapping[str, Any], path: epath.Path) -> None:
    """Raise InputError if the workdir has labels of other images or another model."""
    before = json.loads(path.read_text()) if path.exists() else facts
    for key in facts:
        if key != "data_dir" and before.get(key) != facts[key]:
            raise InputError(
                f"--workdir={path.parent}: holds labels with another {key}: {before.get(key)!r}, "
                f"now {facts[key]!r}; use a new --workdir"
            )


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
        image_size=spec.image_size,
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
        "fingerprint": source.fingerprint,
        "model": pretrained.source,
        "weights": hash_params({**pretrained.params, **pretrained.model_state}),
        "ops": ops_for(spec, source.image_shape and source.image_shape[:2]),
    }


def _part(workdir: epath.Path, first: int) -> epath.Path:
    return workdir / f"part_{first // _RECORDS_OF_PART:05}.npz"


def _label_parts(
    batch_size: int, pretrained: Pretrained, source: data.Source, workdir: epath.Path
) -> dict[str, np.ndarray]:
    """Write the missing parts; return of every record {"label", "top", "true"}, each (n,)."""
    columns: dict[str, list[np.ndarray]] = {"label": [], "top": [], "true": []}
    for first in range(0, source.num_examples, _RECORDS_OF_PART):
        ids = np.arange(first, min(first + _RECORDS_OF_PART, source.num_examples))
        path = _part(workdir, first)
        if not path.exists():
            how = {"batch_size": batch_size, "record_ids": ids}
            rows = list(outputs(pretrained, source, what="probabilities", **how))
            probabilities = np.concatenate([p for p, _ in rows])
            part = {
                "probabilities": probabilities.astype(np.float16),
                "label": probabilities.argmax(axis=1).astype(np.int32),
                "top": probabilities.max(axis=1),
                "valid": np.concatenate([batch["mask"] > 0 for _, batch in rows]),
                "true": np.concatenate([batch["label"] for _, batch in rows]),
            }
            file = io.BytesIO()
            np.savez(file, **part)
            write_whole(path, file.getvalue())
            logger.info("%s: %d records labelled", path, len(ids))
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as part:
            columns["label"].append(part["label"])
            columns["top"].append(np.where(part["valid"], part["top"], 0))
            columns["true"].append(part["true"])
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _probabilities_of(
    workdir: epath.Path, records: np.ndarray, num_examples: int, num_classes: int
) -> np.ndarray:
    """The probabilities of `records`, float16 (m, C)."""
    found = np.empty((len(records), num_classes), np.float16)
    for first in range(0, num_examples, _RECORDS_OF_PART):
        of_part = (records >= first) & (records < first + _RECORDS_OF_PART)
        if of_part.any():
            with np.load(io.BytesIO(_part(workdir, first).read_bytes())) as part:
                found[of_part] = part["probabilities"][records[of_part] - first]
    return found
