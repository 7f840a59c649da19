"""Two processes of one job do what one process with as many devices does."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
from test_resume import final_state, rows

ROOT = pathlib.Path(__file__).parent.parent


def start(workdir, devices, *words):
    # With Adam's usual eps the noise of gradients that are zero in exact arithmetic is scaled up.
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [
            sys.executable, "-m", "vit_jax.main", "--config=configs/quickstart.py:debug",
            f"--workdir={workdir}", "--config.mesh.fsdp=2", "--config.optimizer.eps=1e-3", *words,
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def start_two(workdir, *words):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = (f"--coordinator=localhost:{port}", "--num_processes=2")
    return [start(workdir, 2, *job, f"--process_id={i}", *words) for i in range(2)]


def test_two_processes_end_where_one_does(tmp_path):
    alone = start(tmp_path / "alone", 4)
    output, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, output

    # The second is told to stop on its way: both save the same step, and go on from there.
    both = start_two(tmp_path / "both")
    for line in both[0].stdout:
        if line.startswith("start: from scratch"):
            both[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [75, 75], outputs

    both = start_two(tmp_path / "both")
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "2 host(s)" in outputs[0] and "start: resumed at step" in outputs[0]
    assert "step 40/40" not in outputs[1]  # the first alone speaks

    (step, found), (last, expected) = (
        final_state(tmp_path / "both"),
        final_state(tmp_path / "alone"),
    )
    assert step == last == 40
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
    for mine, other in zip(rows(tmp_path / "both"), rows(tmp_path / "alone"), strict=True):
        assert mine.keys() == other.keys()
        np.testing.assert_allclose(list(mine.values()), list(other.values()), rtol=1e-3)
