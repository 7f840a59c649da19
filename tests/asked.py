"""Functions of the package that take settings, for tests that make a config."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from vit_jax.config import Settings
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.inference import evaluate
from vit_jax.run import build, loop, train
from vit_jax.run.setup import opener


def prepare(config, *args, **how):
    return build.prepare(Settings.of(config), *args, **how)


def train_and_evaluate(config, *args, **how):
    return train.train_and_evaluate(Settings.of(config), *args, **how)


def train_with_stops(config, workdir, stops, monkeypatch):
    """Train, preempted after each of the steps `stops`, and go on to the end."""
    for stop in stops:
        monkeypatch.setattr(
            loop.PreemptionGuard, "should_stop", lambda _, step, at=stop: step == at
        )
        with pytest.raises(loop.Preempted):
            train_and_evaluate(config, workdir)
    monkeypatch.setattr(loop.PreemptionGuard, "should_stop", lambda _, step: False)
    train_and_evaluate(config, workdir)


def count_steps(loss_of=lambda step: 1.0):
    """For the place of `loop.compile_step`: steps that leave the model as it is, soon compiled.

    loss_of: of the number of steps done before.
    """

    def train_step(state, batch):
        loss = jnp.float32(loss_of(int(state.step)))
        masked = (1.0 - batch["mask"]).sum()
        return state.replace(step=state.step + 1), {"loss": loss, "masked": masked}

    return lambda run: train_step


def evaluate_model(config, *args, **how):
    return evaluate.evaluate_model(Settings.of(config), *args, **how)


@contextlib.contextmanager
def meshes_on(devices):
    """Make the meshes of runs on `devices`; yields the patch, for more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opener, "make_mesh", lambda **axes: make_mesh(**axes, devices=devices))
        yield patch


def prepare_step(form, keys, devices, workdir):
    """A run of the config `form` with `keys`, prepared on `devices`; its state, and a batch."""
    config = load_config(form)
    assert apply_overrides(config, [(key, str(value)) for key, value in keys.items()]) == []
    with meshes_on(devices):
        started = prepare(config, workdir)
    with jax.set_mesh(started.mesh):
        state = started.experiment.init()
        batch = next(started.batches(range(1)))
        return started, state, started.experiment.parts.transform(batch, jax.random.key(0))
