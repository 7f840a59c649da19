"""Reads the files of a finished run, and checks that two runs are the same."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.base import tree
from vit_jax.devices.mesh import make_mesh


def final_state(workdir):
    """(step, {leaf name: array}) of the newest checkpoint."""
    step = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    path = workdir / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        leaves = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return step, tree.flatten_names(state)


def rows(workdir):
    """The rows of metrics.jsonl without the values that depend on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in lines
    ]
    return [row for row in found if len(row) > 1]


def check_same_end(one, other):
    """Two workdirs have the same rows, and the same step and bits in their newest checkpoints."""
    assert rows(one) == rows(other)
    (step, state), (last, expected) = final_state(one), final_state(other)
    assert step == last and state.keys() == expected.keys()
    bits = lambda x: (x.shape, x.dtype, x.tobytes())  # noqa: E731
    differing = [name for name, x in state.items() if bits(x) != bits(expected[name])]
    assert not differing


def check_same_arrays(found, expected):
    """Two trees have leaves, of the same names and with the same values."""
    found, expected = tree.flatten_names(found), tree.flatten_names(expected)
    assert expected and found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def check_same_on_all_devices(take_steps, atol):
    """`take_steps`(mesh) -> (losses, parameters) gives the same on one device and on all."""
    axes = {"replica": 1, "data": -1, "fsdp": 1, "tensor": 1}
    losses, params = take_steps(make_mesh(**axes, devices=jax.devices()[:1]))
    losses_of_all, params_of_all = take_steps(make_mesh(**axes))
    np.testing.assert_allclose(losses, losses_of_all, rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (params_of_all, params)), strict=True):
        np.testing.assert_allclose(found, expected, atol=atol)
