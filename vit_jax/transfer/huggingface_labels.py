"""Classes in a config.json of Hugging Face: their names, and whether an image has several."""

import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from vit_jax.transfer.pretrained import Spec

logger = logging.getLogger("vit_jax")

LOSSES = {"single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
_PROBLEM_TYPE = {ours: theirs for theirs, ours in LOSSES.items()}


def read_labels(stated: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes; None for those that transformers writes if there are none."""
    names = stated.get("id2label")
    if names is None or names == {str(i): f"LABEL_{i}" for i in range(len(names))}:
        return None
    return [names.get(str(i)) for i in range(len(names))]


def write_labels(path: epath.Path, spec: Spec, num_classes: int) -> dict[str, Any]:
    """The keys of config.json for the names of the classes and for the loss."""
    names = spec.class_names or [f"LABEL_{i}" for i in range(num_classes)]
    if spec.loss not in (None, *_PROBLEM_TYPE):  # a plug-in's loss
        logger.warning("%s: omits the loss %s, which transformers lacks", path, spec.loss)
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": _PROBLEM_TYPE.get(spec.loss or ""),
    }
