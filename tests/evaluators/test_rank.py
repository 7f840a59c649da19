"""Effective rank against its definition, and evaluators of runs that learn without labels."""

import types

import jax
import numpy as np
import PIL.Image
import pytest
from hand_made import OF_SPLIT, PIXELS, PROJECTION, State, make_batches, run
from opened import open_all
from read_settings import settings_of

from vit_jax.config import base_config, knn, linear_probe, rank
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import make_evaluators
from vit_jax.evaluators.rank import Rank, effective_rank

RNG = np.random.default_rng(0)


def by_svd(x):
    """Equations 1 and 2 of the paper."""
    values = np.linalg.svd(np.float64(x), compute_uv=False)
    p = values / values.sum() + 1e-7
    return np.exp(-(p * np.log(p)).sum())


@pytest.mark.parametrize("shape", [(200, 30), (30, 200)])
def test_the_rank_is_that_of_the_paper(shape):
    x = (RNG.standard_normal(shape) * 0.8 ** np.arange(shape[1]) + 0.1).astype(np.float32)
    assert effective_rank(x) == pytest.approx(by_svd(x), rel=1e-5)
    assert 5 < effective_rank(x) < 20


def test_ranks_that_are_known():
    assert effective_rank(np.eye(64, dtype=np.float32)) == pytest.approx(64, rel=1e-4)
    same = np.tile(RNG.standard_normal(32), (500, 1)).astype(np.float32)  # collapsed to a point
    assert effective_rank(same) == pytest.approx(1, abs=1e-3)
    assert effective_rank(np.zeros((50, 8), np.float32)) == 0
    assert np.isnan(effective_rank(np.full((50, 8), np.inf, np.float32)))


def test_broken_images_do_not_count():
    x, labels = RNG.standard_normal((40, 12)).astype(np.float32), np.zeros(40, np.int32)
    read = make_batches(x, labels, broken=range(0, 40, 3))
    source = types.SimpleNamespace(num_examples=40)
    found = run(Rank(**OF_SPLIT), lambda key, ids: read(ids), source=lambda: source)
    assert found["rank"] == pytest.approx(by_svd(np.delete(x, range(0, 40, 3), axis=0)), rel=1e-5)
    assert found == {"rank": found["rank"], "share": found["rank"] / 12}


@pytest.mark.slow
def test_evaluators_of_a_run_on_images_without_classes(tmp_path):
    """Rank on those images; neighbours and a probe on another data set, which has labels."""
    for i in range(18):
        pixels = RNG.integers(0, 256, (9, 9, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    c = base_config()
    c.data.name, c.data.data_dir, c.data.image_size = "unlabelled", str(tmp_path), 8
    c.data.mean, c.data.std, c.data.ops = (0.0,) * 3, (1.0,) * 3, "decode|resize"
    c.objective.name, c.objective.teacher, c.objective.weight = "distillation", "runs/mine", 1.0
    c.global_batch_size = 64
    of = {"train_split": "train", "test_split": "test", "data_name": "digits", "every": "1 epochs"}
    c.evals.own = rank(split="train", every="1 epochs", ops="decode|resize", num_images=7)
    c.evals.all = rank(split="all", every="1 epochs", ops="decode|resize")
    c.evals.near = knn(**of, num_neighbours=(20,))
    c.evals.probe = linear_probe(**of, l2=(0.1,))
    c, sources = open_all(c)
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    with jax.set_mesh(mesh):
        made = make_evaluators(
            settings_of(c), parse_preprocessing(settings_of(c)), PIXELS, mesh, sources
        )
        found = {name: measure(State(PROJECTION, {})) for name, measure in made.items()}
    assert 0.9 < found["near"]["20nn_top1"] < 1 and 0.8 < found["probe"]["top1"] < 1
    assert 1 < found["own"]["rank"] <= 7 < 18  # evenly spaced
    assert found["own"]["rank"] < found["all"]["rank"]
