"""A run's data and its config.json, without the run; and its evaluation."""

from read_settings import data_and_evals, decided

from vit_jax.base import files
from vit_jax.config import Settings, with_values
from vit_jax.config.stored import StoredConfig, read_config
from vit_jax.data import Divider
from vit_jax.data.dataset_sizes import known_facts
from vit_jax.run.setup.sources import find_absent, open_evaluated, open_training


def open_all(config):
    """(config with the facts of the data, sources of training and evaluation)."""
    config = with_values(config, find_absent(Settings.of(config), training=True))
    divider = Divider(anew=True)
    facts, sources = open_training(Settings.of(config), divider=divider)
    config = with_values(config, facts)
    evaluated = open_evaluated(
        *data_and_evals(config), divider=Divider(divider.settled()), opened=sources
    )
    return config, sources | evaluated


def with_known_facts(config):
    """`config` with the facts of its data set, which is not read."""
    return decided(
        with_values(config, known_facts(Settings.of(config).data, config.global_batch_size))
    )


def config_json(config):
    """The text of config.json of a run that resolved as little as possible."""
    return StoredConfig(config, decided(config), {}).to_json()


def evaluate_run(config, workdir):
    """Evaluate the run in `workdir` by `config`."""
    from vit_jax.inference.evaluate import StoredModel, evaluate_model

    workdir = files.absolute(workdir)
    return evaluate_model(
        Settings.of(config), StoredModel(workdir, Settings.of(read_config(workdir)))
    )
