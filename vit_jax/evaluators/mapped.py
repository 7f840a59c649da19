"""Accuracy on data whose classes are some of the model's, or map to several of them.

For ImageNet-A and -R, which have 200 of ImageNet's 1,000 classes, and for ObjectNet, where 113 of
313 classes overlap with ImageNet's and some match several of them.

Axes: B examples, C classes of the model, K classes of the data, L largest number of labels.
Sources: Hendrycks et al. 2021 (arXiv:1907.07174 and arXiv:2006.16241), who compare the logits of
the 200 classes only; Barbu et al. 2019 (ObjectNet, NeurIPS).
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators.features import gather_labels, need_images
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

AMONG = ("mapped", "all")
METRICS: dict[str, Better] = {"top1": "higher", "top5": "higher", "num_examples": "neither"}
_FORM = 'needs JSON such as {"chair": [423, 559]}: a class of the data, and labels of the model'


class Mapped:
    """Metrics top1, top5 and num_examples; see `mapped`.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      make_batches: one pass over the split, with as many batches on every process.
      labels: () -> the model's labels for each class of the data, int32 (K, L), padded with -1; a
        class without any is left out.
      among: mapped: predictions are compared among the labels in the map only; all: among C.
    """

    metrics: Mapping[str, Better] = METRICS

    def __init__(
        self,
        logits_fn: OutputFn,
        make_batches: Callable[[], Iterable[Batch]],
        labels: Callable[[], np.ndarray],
        among: str = "mapped",
    ):
        self._make_batches, self._read_labels = make_batches, labels

        def count(state, batch, labels_KL):
            logits_BC = logits_fn(state, batch["image"]).astype(jnp.float32)
            if among == "mapped":
                known_C = jnp.zeros(logits_BC.shape[1], bool)
                known_C = known_C.at[jnp.where(labels_KL < 0, logits_BC.shape[1], labels_KL)].set(
                    True, mode="drop"
                )
                logits_BC = jnp.where(known_C, logits_BC, -jnp.inf)
            labels_BL = labels_KL[batch["label"]]
            counts_B = batch["mask"] * (labels_BL >= 0).any(axis=1)
            top_B5 = jax.lax.top_k(logits_BC, min(5, logits_BC.shape[1]))[1]
            hits_B5 = (top_B5[:, :, None] == labels_BL[:, None, :]).any(axis=2)
            hits_1 = (counts_B * hits_B5[:, 0]).sum()
            return hits_1, (counts_B * hits_B5.any(axis=1)).sum(), counts_B.sum()

        self._count = jax.jit(count)

    @functools.cached_property
    def _labels(self) -> np.ndarray:
        return self._read_labels()

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state` over the split.

        Raises:
          NothingToMeasureError: if no image with labels can be read.
        """
        labels_KL = self._labels
        counts = fetch(self._count(state, batch, labels_KL) for batch in self._make_batches())
        top1, top5, seen = np.asarray(list(counts), np.float64).sum(axis=0)
        need_images(int(seen), "split")
        return {"top1": top1 / seen, "top5": top5 / seen, "num_examples": int(seen)}


def read_class_map(path: str, class_names: Sequence[str], num_classes: int) -> np.ndarray:
    """The model's labels for each class of the data: int32 (K, L), padded with -1.

    Args:
      path: a JSON file, {"class of the data": [labels of the model, counted from 0]}. Classes of
        the data that it lacks are left out of the accuracy.
      class_names: the classes of the data, K.
      num_classes: C.

    Raises:
      InputError: the file cannot be read, or names classes or labels that there are not; names the
        key `class_map`.
    """
    try:
        found = json.loads(epath.Path(path).read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"class_map={path!r}: cannot be read ({e}); {_FORM}") from None
    lists: list[list[int]] = list(found.values()) if isinstance(found, dict) else []
    is_list = all(isinstance(v, list) and all(type(label) is int for label in v) for v in lists)
    if not isinstance(found, dict) or not is_list:
        raise InputError(f"class_map={path!r}: {_FORM}")
    faults = Faults()
    unknown = sorted(name for name in found if name not in class_names)
    faults.need(
        not unknown,
        f"class_map={path!r}: has {len(unknown)} classes that the data lack: "
        f"{', '.join(map(repr, unknown[:5]))}; rename them as in the data, such as "
        f"{', '.join(map(repr, list(class_names)[:3]))}",
    )
    wrong = sorted({v for labels in lists for v in labels if not 0 <= v < num_classes})
    faults.need(
        not wrong,
        f"class_map={path!r}: has the labels {wrong[:5]}; the model has 0 to {num_classes - 1}",
    )
    faults.need(any(lists), f"class_map={path!r}: maps no class")
    collect_faults(faults)
    table = np.full((len(class_names), max(map(len, lists))), -1, np.int32)
    for row, name in zip(table, class_names, strict=True):
        labels = found.get(name, [])
        row[: len(labels)] = labels
    return table


def mapped(
    *,
    split: str,
    every: str,
    class_map: str = "",
    among: str = "mapped",
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
) -> ConfigDict:
    """Make an entry of `evals`: top-1 and top-5 on data with other classes than the model.

    `class_map` is a JSON file, {"class of the data": [labels of the model]}; a prediction is
    correct if it is among the labels of the image's class. Images of classes that it lacks do not
    count. "": the data have the model's labels, perhaps not all of them; the labels of the split
    are read to find which. `among=mapped` compares only the logits of labels that occur in the map
    or in the split, `all` those of all the model's classes. All other arguments are as in
    `classification`.
    """
    return typed_entry("mapped", locals())


def _check_entry(entry: ConfigDict) -> None:
    faults = Faults()
    faults.need_known("among", entry.among, AMONG)
    collect_faults(faults)


def make_mapped(inputs: EvalInputs) -> Mapped:
    """Make the evaluator for an entry from `mapped`.

    Raises:
      InputError: the model has no classes, or the map does not fit it or the data.
    """
    source, entry = inputs.source(), inputs.entry
    num_classes = getattr(inputs.model, "num_classes", None)
    if not num_classes:
        raise InputError(
            "type='mapped': the model has no classes; use fewshot, knn or linear_probe"
        )
    if entry.class_map:
        names = source.class_names or tuple(map(str, range(source.num_classes)))
        table = read_class_map(entry.class_map, names, num_classes)
        return Mapped(inputs.apply, inputs.batches, lambda: table, entry.among)
    if source.num_classes != num_classes:
        raise InputError(
            f"class_map='': {source.name} {source.split} has {source.num_classes:,} classes, but "
            f"the model has {num_classes:,}; give a file that maps them"
        )

    def read_labels():
        found = gather_labels(source)
        own = np.arange(num_classes, dtype=np.int32)
        return np.where(np.isin(own, found), own, -1)[:, None].astype(np.int32)

    return Mapped(inputs.apply, inputs.batches, read_labels, entry.among)


EVALUATOR = Evaluator(
    mapped,
    make_mapped,
    check=_check_entry,
    learns_classes=True,
    output="__call__",
    metrics=lambda entry: METRICS,
)
