"""Evaluators that compare a model's logits with the labels of images, by metrics."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from vit_jax.base.errors import Faults, InputError
from vit_jax.base.tree import Batch
from vit_jax.config import SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.config.metric_names import FLIPS
from vit_jax.data.native import mirror
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import sum_rows
from vit_jax.objectives.metrics import Metric, Metrics, find_metrics, make_metrics

_MOST = 1_000  # classes, each a curve


class LabelEvaluator(SplitEvaluator):
    """An evaluator that reports metrics (`objectives.metrics`).

    usual: the names of its metrics by default. Those that do not suit the data are then left out.
    own: the names of those that it computes itself, because they need all scores.
    """

    metrics: tuple[str, ...] | None = key(None, "names of metrics; None: those described here")

    usual: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The ends of its metrics' names: each metric has a value for each of them."""
        return ("",)

    @property
    def chosen(self) -> dict[str, Metric]:
        """{name: metric}; raises InputError as `find_metrics`."""
        names = self.usual if self.metrics is None else self.metrics
        return find_metrics(names, bool(self.multi_label), own=self.own)

    def check(self) -> list[str]:
        faults = Faults()
        faults.check(lambda: self.chosen)
        return faults

    def reports(self) -> dict[str, Better]:
        if (before := self.reports_before()) is not None:
            return dict(before)
        better = {n + end: metric.better for end in self.ends for n, metric in self.chosen.items()}
        return better | {"num_examples": "neither"}

    def lacking(self, sources: Mapping[str, Any]) -> dict[str, str]:
        data = bool(self.multi_label), sources["split"].num_classes
        faults = {name: metric.find_fault(*data) for name, metric in self.chosen.items()}
        return {n + end: fault for end in self.ends for n, fault in faults.items() if fault}

    def make_metrics(self, inputs: EvalInputs) -> Metrics:
        """The metrics to compute, without its own; raises InputError as `find_metrics`."""
        source = inputs.source()
        left_out = {*self.own, *(self.lacking({"split": source}) if self.metrics is None else ())}
        names = [name for name in self.chosen if name not in left_out]
        return make_metrics(names, inputs.settings.loss, bool(self.multi_label), source.num_classes)


class ClassEvaluator(LabelEvaluator):
    """An evaluator of the model's own classes, which may also report each of them."""

    by_class: bool = key(
        False, f"also report a value of each class that occurs; for up to {_MOST:,} classes"
    )

    shows_images = True
    of_class: ClassVar[str]  # the value of a class

    def reports(self) -> dict[str, Better]:
        ends = self.ends if self.by_class else ()
        return super().reports() | {f"{self.of_class}{end}/*": "higher" for end in ends}

    def name_classes(self, inputs: EvalInputs) -> list[str]:
        """The classes, each with a name of its own; [] if their values are not asked for.

        Raises:
          InputError: there are too many classes; names `by_class`.
        """
        if not self.by_class:
            return []
        source = inputs.source()
        if source.num_classes > _MOST:
            raise InputError(
                f"by_class=True: {source.name} has {source.num_classes:,} classes; needs up to "
                f"{_MOST:,}; for the classes of a finished run use evaluate --output=DIR"
            )
        names = source.class_names or [str(c) for c in range(source.num_classes)]
        count = Counter(names)
        return [f"{name}{f' ({c})' * (count[name] > 1)}" for c, name in enumerate(names)]


def measure_labels(
    inputs: EvalInputs,
    metrics: Metrics,
    classes: Sequence[str] = (),
    show: Callable[..., Any] | None = None,
    relabel: Callable[..., Any] = lambda logits_BC, batch: (logits_BC, batch),
    read: Callable[[], Any] = tuple,
    flips: bool = False,
) -> Measure:
    """measure(state) -> `report` of the metrics of a pass over the split.

    Args:
      inputs: of the evaluator.
      metrics: to compute; divided once, by the images of the split.
      classes: as for `report`.
      show: (logits (B, C), batch) -> a NamedTuple of arrays (B, ...) for `inputs.see`; None: it
        gets nothing.
      relabel: (logits (B, C), batch, *what `read` gives) -> the logits and the batch to compare.
      read: called once, when the first state is measured.
      flips: whether to report also the metrics of each image and its mirror image together.
    """
    read = functools.cache(read)

    @inputs.jit
    def compute(state: TrainState, batch: Batch, given: tuple[Any, ...]) -> tuple[Any, Any]:
        logits_BC, batch = relabel(inputs.apply(state, batch["image"]), batch, *given)
        mask_B = batch["mask"]
        shown = show and (show(logits_BC, batch), mask_B)
        seen = {"": logits_BC}
        if flips:
            mirrored_BC = inputs.apply(state, mirror(batch["image"], axis=2))
            seen[FLIPS] = (logits_BC + mirrored_BC) / 2
        sums = {end: sum_rows(metrics.rows(x, batch), mask_B) for end, x in seen.items()}
        return (sums, mask_B.sum()), shown

    def measure(state: TrainState) -> dict[str, float]:
        totals: Any = None
        shown = []
        for sums, some in fetch(compute(state, batch, read()) for batch in inputs.batches()):
            sums = jax.tree.map(np.float64, sums)
            totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
            shown.append(some)
        metric_sums, number = totals
        need_images(int(number), "split")
        if inputs.see is not None and show is not None:
            parts = [[leaf[mask > 0] for leaf in some] for some, mask in shown]
            inputs.see(type(shown[0][0])(*map(np.concatenate, zip(*parts, strict=True))))
        values = {end: metrics.finish(sums, number) for end, sums in metric_sums.items()}
        named = {f"{name}{end}": values[end][name] for end in values for name in metrics.parts}
        return report(named, int(number), classes)

    return measure


def report(values: Mapping[str, Any], number: int, classes: Sequence[str] = ()) -> dict[str, float]:
    """{"top1": value, "num_examples": number, "accuracy/cat": value}.

    values: {name: a number, or one for each of `classes`; NaN is left out}.
    """
    whole = {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
    by_class = {
        f"{name}/{of_class}": float(value)
        for name, values_C in values.items() if name not in whole
        for of_class, value in zip(classes, values_C, strict=True) if not np.isnan(value)
    }  # fmt: skip
    return whole | {"num_examples": number} | by_class
