"""The experiment of a planned run."""

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.training.teachers import abstract_teachers


def planned_experiment(config: ConfigDict, mesh: Mesh) -> Experiment:
    """`make_experiment` with the shapes of its teachers, whose sources are read once.

    Raises:
      InputError: as `make_experiment`, or a teacher cannot be read.
    """
    return make_experiment(config, mesh, teachers=abstract_teachers(config))
