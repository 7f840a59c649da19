"""What this package uses of JAX's private modules is still there, and still means the same."""

import pathlib
import subprocess
import sys

import jax
import pytest

from vit_jax.job import processes

ROOT = pathlib.Path(__file__).parents[1]
BROKEN = "jax has moved this: mend its user. Until then "


def test_whether_devices_are_started():
    code = """if True:
        from vit_jax.config.plugins import has_devices
        assert not has_devices(), "before the import of jax"
        import jax
        assert not has_devices(), "after the import of jax"
        jax.devices()
        assert has_devices(), "after jax.devices()"
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{BROKEN}a plug-in that takes devices during its import is not refused\n{done.stderr}"
    )


def test_the_state_of_the_job():
    state = processes.distributed_state()
    for name, lost in {
        "process_id": "messages do not name their process",
        "num_processes": "messages do not name their process",
        "coordinator_address": "the watchdog cannot see whether process 0 answers",
        "client": "processes cannot compare their configs, and the watchdog is blind",
    }.items():
        assert hasattr(state, name), f"{BROKEN}distributed.global_state.{name}: {lost}"
    assert state.client is None
    assert state.num_processes in (None, jax.process_count())


def test_the_clusters_that_are_detected(monkeypatch):
    lost = f"{BROKEN}--num_processes is not checked against the cluster"
    for name in ("OMPI_MCA_orte_hnp_uri", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert processes.find_cluster() is None, lost
    for name, value in {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    cluster = processes.find_cluster()
    assert cluster is not None and cluster.get_process_count() == 2, lost


@pytest.mark.parametrize("folder", ["vit_jax", "launch", "configs"])
def test_nothing_else_uses_private_modules_of_jax(folder):
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "jax._src" in path.read_text()
    ]
    assert set(found) <= {"vit_jax/config/plugins.py", "vit_jax/job/processes.py"}
