"""Evaluators: one file and one line in EVALUATORS each; its config entry is in config.EVAL_TYPES.

An evaluator has `run(state) -> {name: float}`, which looks at the state's `params` and
`model_state` only; every example counts once on any number of hosts.
"""

from collections.abc import Mapping

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import SplitKey
from vit_jax.data import Source
from vit_jax.evaluators.classification import make_classification
from vit_jax.evaluators.fewshot import make_fewshot
from vit_jax.evaluators.inputs import EvalInputs

EVALUATORS = {"classification": make_classification, "fewshot": make_fewshot}


def make_evaluators(
    config: ConfigDict, model, mesh: Mesh, sources: Mapping[SplitKey, Source]
) -> dict:
    """{name: evaluator} of `config.evals`, over the sources that `run.open_sources` gives."""
    return {
        name: EVALUATORS[entry.type](EvalInputs(config, entry, model, mesh, sources))
        for name, entry in config.evals.items()
    }
