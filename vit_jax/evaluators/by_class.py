"""Values of each class and means over the classes, for images with one label or several.

Axes: C classes.
"""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.config import SplitEvaluator, key
from vit_jax.evaluators.inputs import EvalInputs

_MOST = 1_000  # classes, each a curve


class ClassEvaluator(SplitEvaluator):
    """An evaluator of the model's own classes, which may also report each of them."""

    by_class: bool = key(
        False, f"also report a value of each class that occurs; for up to {_MOST:,} classes"
    )

    shows_images = True
    of_class: ClassVar[str]  # the value of a class

    def metrics(self):
        return {f"{self.of_class}/*": "higher"} if self.by_class else {}

    def name_classes(self, inputs: EvalInputs) -> Callable[[np.ndarray], dict[str, float]]:
        """The function: values (C,) -> {"accuracy/cat": value}, without NaN; {} if not asked for.

        Raises:
          InputError: there are too many classes; names `by_class`.
        """
        if not self.by_class:
            return lambda values_C: {}
        source = inputs.source()
        if source.num_classes > _MOST:
            raise InputError(
                f"by_class=True: {source.name} has {source.num_classes:,} classes; needs up to "
                f"{_MOST:,}; for the classes of a finished run use evaluate --output=DIR"
            )
        names = source.class_names or [str(c) for c in range(source.num_classes)]
        count = Counter(names)
        keys = [f"{self.of_class}/{n}{f' ({c})' * (count[n] > 1)}" for c, n in enumerate(names)]
        return lambda values_C: {
            k: float(v) for k, v in zip(keys, values_C, strict=True) if not np.isnan(v)
        }


def f1(images_C: np.ndarray, predictions_C: np.ndarray, correct_C: np.ndarray) -> np.ndarray:
    """F1 of each class, NaN for a class that neither occurs nor is predicted.

    The harmonic mean of precision and recall: 2 * correct / (images + predictions).
    """
    with np.errstate(invalid="ignore"):
        return 2 * correct_C / (images_C + predictions_C)
