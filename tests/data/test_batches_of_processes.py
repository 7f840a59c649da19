"""Two processes make the global batches of one, also where their devices are interleaved."""

import pytest
from started_job import said_by_two

PROGRAM = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))

import numpy as np
from vit_jax.data import (
    eval_batches, image_batch, make_source, order, pipeline, train_batches
)
from vit_jax.data.native import PatchRule
from vit_jax.data.subset import leave_out

digits, test = (make_source("digits", split=s, image_size=(8, 8)) for s in ("train", "test"))
digits = leave_out(digits, np.array([0, 5, 6, 900]))
spec = image_batch(16, (8, 8))
train = dict(steps=range(3, 5), seed=0)
alone = list(pipeline.host_batches(digits, spec, **train, rows=np.arange(16)))
for order_of_devices, shape in [([0, 2, 1, 3], (4, 1)), ([0, 1, 2, 3], (2, 2))]:
    devices = np.array(jax.devices())[order_of_devices].reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    assert len(order.local_rows(sharding, 16)) == 8
    everywhere = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))
    for batch, expected in zip(
        train_batches(digits, spec, **train, sharding=sharding), alone, strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(everywhere(batch)), expected)
    for pack in ((), (1, 6)):
        small = image_batch(16, (8, 8), rule=PatchRule((4, 4), 6, pack))
        parts = list(pipeline.host_batches(digits, small, **train, rows=np.arange(16)))
        for batch, expected in zip(
            train_batches(digits, small, **train, sharding=sharding), parts, strict=True
        ):
            found = jax.device_get(everywhere(batch["image"]))
            np.testing.assert_array_equal(found.patches, expected["image"])
            np.testing.assert_array_equal(found.grid, expected["grid"])
    masks = [everywhere(b["mask"]) for b in eval_batches(test, spec, sharding=sharding)]
    assert np.sum(jax.device_get(masks)) == 360
"""


@pytest.mark.slow
def test_two_processes_make_the_batches_of_one():
    said_by_two(PROGRAM, devices=2)
