"""Every later version resumes the run that version 0.2.0 has stored."""

import json
import shutil

import numpy as np
import pytest
from finished_run import rows
from forked import Forked
from ml_collections import ConfigDict
from stored_run import (
    SAVED,
    STORED,
    WORDS,
    digests_of_batches,
    digests_of_state,
    logits_of,
    machine_and_build,
)

from vit_jax.config.base import declared_keys, default_config, flatten
from vit_jax.config.stored import read_stored


@pytest.fixture
def facts():
    return json.loads((STORED / "facts.json").read_text())


@pytest.fixture
def workdir(tmp_path):
    return shutil.copytree(STORED, tmp_path / "run", ignore=shutil.ignore_patterns("facts.json"))


def test_its_keys_and_values_are_read_as_they_were_written(workdir):
    written, read = json.loads((workdir / "config.json").read_text()), read_stored(workdir)
    for name, config in (("asked", read.asked), ("resolved", read.resolved)):
        found = flatten(ConfigDict(json.loads(json.dumps(config.to_dict()))))
        assert found | flatten(ConfigDict(written[name])) == found, name
        later = found.keys() - flatten(ConfigDict(written[name]))
        keys = declared_keys(config)
        before = {key: declared.before for key, declared in keys.items()}
        meant = {key: before[key] for key in later if before.get(key, ...) is not ...}
        meant = meant if name == "resolved" else {}  # what is asked now has today's defaults
        default = {key: declared.default for key, declared in keys.items()}
        default |= flatten(default_config()) | meant
        assert all(found[key] == default[key] for key in later)


def test_its_parameters_and_batches_have_the_bytes_that_they_had(workdir, facts):
    assert digests_of_state(workdir) == facts["saved_state"]
    assert digests_of_batches(workdir) == facts["batches"]


def test_its_logits_are_those_that_were_stored(facts):
    np.testing.assert_allclose(logits_of(STORED), facts["logits"], rtol=0, atol=2e-6)


def test_it_goes_on_with_the_losses_of_the_run_that_was_not_stopped(workdir, facts, tmp_path):
    as_recorded = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    output, words = tmp_path / "output", [*WORDS, f"--workdir={workdir}"]  # its own command
    code = Forked(("-m", "vit_jax.main"), words, output, as_recorded).wait(timeout=300)
    assert code == 0 and f"resumed at step {SAVED}" in output.read_text(), output.read_text()
    found, expected = rows(workdir), rows(STORED)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name in (name for name in other if name.endswith("loss")):
            np.testing.assert_allclose(row[name], other[name], 1e-5, err_msg=f"{row} {name}")
    if machine_and_build() == facts["machine_and_build"]:
        assert digests_of_state(workdir) == facts["last_state"]
