"""Objectives of tests: a function of the parameters and the model's state alone."""

from vit_jax.objectives.contract import Objective


def objective_of(fn):
    """The objective whose loss is fn(params, model_state, batch, rng)."""
    return Objective(
        lambda params, state, batch, frozen, rng: fn(params, state.model_state, batch, rng)
    )
