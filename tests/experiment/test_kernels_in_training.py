"""A run with TPU kernels, interpreted, against the same run without."""

import contextlib

import jax
import numpy as np
import pytest
from read_settings import settings_of
from tpu_form import fastest_on_tpu

from vit_jax.config import base_config
from vit_jax.devices import kernels
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.models.block_ops import PLAIN

pytestmark = pytest.mark.usefixtures("interpreted_kernels")


def small_config():
    c = base_config()
    c.model.name, c.model.dtype = "ViT-Ti/16", "bfloat16"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 16, 2, 32, 2
    c.model.patch_size, c.model.scan = 8, True
    c.data.name, c.data.image_size, c.data.num_classes = "synthetic", 24, 5
    c.data.num_examples, c.global_batch_size, c.duration = 64, 8, "20 steps"
    c.optimizer.peak_lr, c.init_from = 1e-3, "scratch"
    return c


def losses_of(config, steps):
    mesh = make_mesh(replica=1, data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    experiment = make_experiment(settings_of(config), mesh)
    rng, losses = np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        state = experiment.init()
        for _ in range(steps):
            batch = {
                "image": rng.integers(0, 256, (8, 24, 24, 3), dtype=np.uint8),
                "label": rng.integers(0, 5, 8, dtype=np.int32),
                "mask": np.ones(8, np.float32),
                "id": np.arange(8, dtype=np.int32),
            }
            state, metrics = experiment.train_step(state, batch)
            losses.append(float(metrics["loss"]))
    return np.array(losses)


@contextlib.contextmanager
def with_kernels_of_tpus(monkeypatch):
    """Choose as on TPU; yields the list of chosen operations."""
    chosen = []

    def find_forms(model, mesh):
        chosen.append(fastest_on_tpu(model, mesh))
        return {"plain": PLAIN, "rows": chosen[-1]}

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "find_forms", find_forms)
        yield chosen


@pytest.mark.slow
def test_steps_with_kernels_are_those_without(monkeypatch):
    config = small_config()
    config.model.dtype = "float32"
    with with_kernels_of_tpus(monkeypatch) as chosen:
        with_kernels = losses_of(config, 2)
    assert chosen and PLAIN not in chosen
    config.model.kernels = "plain"
    without = losses_of(config, 2)
    np.testing.assert_allclose(with_kernels, without, rtol=1e-5)
