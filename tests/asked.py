"""Functions of the package that take settings, for tests that make a config."""

from vit_jax.config import Settings
from vit_jax.inference import evaluate
from vit_jax.run import build, train


def prepare(config, *args, **how):
    return build.prepare(Settings.of(config), *args, **how)


def train_and_evaluate(config, *args, **how):
    return train.train_and_evaluate(Settings.of(config), *args, **how)


def evaluate_model(config, *args, **how):
    return evaluate.evaluate_model(Settings.of(config), *args, **how)
