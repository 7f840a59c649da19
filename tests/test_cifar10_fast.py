"""tools/cifar10_fast.py: the runs that it makes, and their configs; no run is started."""

import sys

import notebooks
import pytest
from loaded_file import load_module
from measured_runs import read_rows

from vit_jax.config.text import apply_overrides, load_config
from vit_jax.run.setup.validation import find_faults


@pytest.mark.parametrize(
    ("form", "first"), [("fast", ""), ("hour", ""), ("fast,held_out", "450 steps")]
)
def test_each_run_is_made_once(form, first, tmp_path, monkeypatch):
    tool, started = load_module(notebooks.ROOT / "tools/cifar10_fast.py"), []

    def run(form, flags, workdir):
        config = load_config(f"cifar10:{form}")
        keys = [flag.removeprefix("--config.").split("=", 1) for flag in flags]
        assert apply_overrides(config, keys) + find_faults(config) == []
        started.append(config)
        return {"steps": 1, "cpu_s": 1.0, "pflop": 1.0, "top1": 50.0, "top1_flips": 51.0}

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "TABLE", tmp_path / "table.csv")
    number = len(tool.PARTS) if form == tool.OF_PARTS else 1
    for seeds in (1, 2):
        words = [str(tmp_path), "--data_dir=DIR", f"--seeds={seeds}", f"--form={form}"]
        monkeypatch.setattr(sys, "argv", ["cifar10_fast.py", *words])
        tool.main()
        assert len(started) == seeds * number
    assert [c.seed for c in started] == [0] * number + [1] * number
    assert started[0].duration == (first or load_config(f"cifar10:{form}").duration)
    assert len(read_rows(tool.TABLE)) == 2 * number
