"""The experiment of a planned run, and the facts about its data."""

import os

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data import OWN_PICTURES
from vit_jax.data.known import fill_in_sizes
from vit_jax.errors import InputError
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.training.sources import open_training
from vit_jax.training.teachers import abstract_teachers, classes_of, gives_classes


def planned_experiment(config: ConfigDict, mesh: Mesh) -> Experiment:
    """`make_experiment` with the shapes of its teachers, whose sources are read once.

    Raises:
      InputError: as `make_experiment`, or a teacher cannot be read.
    """
    return make_experiment(config, mesh, teachers=abstract_teachers(config))


def fill_in_facts(config: ConfigDict) -> ConfigDict:
    """`config` with the number of classes and examples filled in.

    Own pictures are counted; the numbers of public data sets are known.

    Raises:
      InputError: a number is not given, and the data are neither known nor here.
    """
    d = config.data
    numbers = {"num_classes": d.num_classes, "num_examples": d.num_examples}
    missing = [key for key, number in numbers.items() if number is None]
    if d.name not in (*OWN_PICTURES, "unlabelled") or not missing:
        return fill_in_sizes(config)
    if d.data_dir is None or not epath.Path(os.path.expanduser(d.data_dir)).exists():
        remedies = " ".join(f"--config.data.{key}=..." for key in missing)
        raise InputError(
            f"data.data_dir={d.data_dir!r}: there are no pictures to count; give their place, or "
            f"set {remedies}"
        )
    taught = classes_of(abstract_teachers(config)) if gives_classes(config) else None
    return open_training(config, taught)[0]
