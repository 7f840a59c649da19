"""Classification by the words of the classes, without training on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.data import words
from vit_jax.evaluators.classification import Classification
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.evaluators.multilabel import MultiLabel
from vit_jax.experiment.state import TrainState
from vit_jax.models.zero_shot import need_text_side, zero_shot_head, zero_shot_model

_OF_SEVERAL = ("mean_ap",)  # the logits for several labels are in order, but no probabilities


class ZeroShot(SplitEvaluator):
    """Top-1 and the other values of `classification`, of classes that are described in words.

    The model has a text tower. The names of the data's classes are put into prompts; a class is the
    mean of its texts. Images with several labels have the mean average precision. ImageNet's
    classes have their names in WordNet.

    Source: Radford et al. 2021 (arXiv:2103.00020), section 3.1.
    """

    prompts: str = key("", "text file of prompts, one a line, {} for the class; '': our own")

    learns_classes = True
    output = "features"
    multi_label = None

    def _for(self, several: bool) -> Classification | MultiLabel:
        """The evaluator of the same entry for images with several labels, or with one."""
        common: dict[str, Any] = {k: getattr(self, k) for k in SplitEvaluator.declared()}
        return MultiLabel(**common, metrics=_OF_SEVERAL) if several else Classification(**common)

    def reports(self) -> dict[str, Better]:
        return {**self._for(True).reports(), **self._for(False).reports()}

    def lacking(self, sources: Mapping[str, Any]) -> dict[str, str]:
        several = sources["split"].multi_label
        own, others = self._for(several), self._for(not several).reports().keys()
        why = f"the images have {'several labels' if several else 'one label'} each"
        return dict.fromkeys(others - own.reports().keys(), why) | own.lacking(sources)

    def bind(self, inputs: EvalInputs) -> Measure:
        source = inputs.source()
        if source.class_names is None:
            raise InputError(f"split: {source.name} names no classes; zeroshot needs their words")
        classes = words.names_in_words(source.class_names, "split")
        prompts = words.read_prompts(self.prompts)
        side = need_text_side(inputs.read_text_side, "type='zeroshot'")
        texts = words.encode(side.read_tokenizer(), classes, prompts, "split")
        model = zero_shot_model(inputs.model, side.matcher, len(texts))
        inputs = dataclasses.replace(inputs, model=model, see=None)
        measure = self._for(source.multi_label).bind(inputs)
        of_source = zero_shot_head(side, texts) if side.params else None

        def measure_by_words(state: TrainState) -> dict[str, float]:
            head = of_source
            if head is None:
                learned = side._replace(params=tree.flatten_names(state.params[tree.OBJECTIVE]))
                head = zero_shot_head(learned, texts, inputs.replicated)
            return measure(state.replace(params={**state.params, **tree.unflatten_names(head)}))

        return measure_by_words
