"""A run that commit 918fdf2 began goes on as it would have there; see golden/older_run."""

import importlib.util
import json
import logging
import shutil

import numpy as np
import pytest
from etils import epath

from vit_jax.checkpoints import checkpoint
from vit_jax.config.text import load_config
from vit_jax.training.train import train_and_evaluate


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def older_run(golden, tmp_path):
    """A copy of the folder, that no test writes into the original."""
    return shutil.copytree(golden / "older_run", tmp_path / "older_run")


def test_a_run_from_a_folder_resumes_to_the_same_parameters(older_run, caplog):
    make = load_module(older_run / "make.py")
    config = load_config(f"{older_run}/make.py")
    config.data.data_dir = str(older_run / "pictures")
    with caplog.at_level(logging.INFO, "vit_jax"):
        summary = train_and_evaluate(config, older_run / "workdir")
    (warning,) = [r.getMessage() for r in caplog.records if "goes on as it began" in r.getMessage()]
    assert "data.holdout='seed 3' (new runs: 'names')" in warning
    assert "resumed at step 3" in caplog.text and summary["step"] == 6

    finished = json.loads((older_run / "finished.json").read_text())
    expected = dict(np.load(older_run / "finished.npz"))
    found, metrics = make.parameters(older_run / "workdir"), make.last_row(older_run / "workdir")
    assert found.keys() == expected.keys()
    if make.machine() == finished["machine"]:
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    assert metrics.keys() >= finished["metrics"].keys()
    for name, value in finished["metrics"].items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name

    meta = checkpoint.read_meta(epath.Path(older_run / "workdir/checkpoints/6"))
    assert meta["fingerprint_version"] == 2  # step 3 has none: the first

    with caplog.at_level(logging.INFO, "vit_jax"):  # its config.json has the new keys now
        train_and_evaluate(config, older_run / "workdir")
    assert "finished before, at step 6" in caplog.text
