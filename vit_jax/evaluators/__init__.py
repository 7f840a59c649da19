"""Evaluators: one file and one line in EVALUATORS each.

An evaluator has `run(state) -> {name: float}`; every example counts once on any number of hosts.
"""

from collections.abc import Mapping

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data import Source, eval_batches, parse_ops, to_value_range
from vit_jax.evaluators.classification import Classification
from vit_jax.mesh import batch_sharding
from vit_jax.objectives.supervised import make_loss

EVALUATORS = {"classification": Classification}


def make_evaluators(config: ConfigDict, model, mesh: Mesh, sources: Mapping[str, Source]) -> dict:
    """{name: evaluator} of `config.evals`, each over the source of its split."""
    image_size = image_hw(config.data.image_size)

    def logits_fn(state, images):
        variables = {"params": state.params, **state.model_state}
        values = to_value_range(images, config.data.mean, config.data.std)
        return model.apply(variables, values, train=False)

    def make_batches(entry):
        host_ops, _ = parse_ops(entry.ops, image_size)
        return lambda: eval_batches(
            sources[entry.split],
            host_ops,
            global_batch_size=entry.batch_size or config.global_batch_size,
            image_size=image_size,
            sharding=batch_sharding(mesh),
        )

    loss = make_loss(**config.loss)
    return {
        name: EVALUATORS[entry.type](logits_fn, loss, make_batches(entry))
        for name, entry in config.evals.items()
    }
