"""tools/selfsup_cifar10.py: the runs that it makes, and their configs; no run is started."""

import json
import sys

import notebooks
import pytest
from loaded_file import load_module
from measured_runs import read_rows

from vit_jax.config import OBJECTIVES, REQUIRED_TO_EVALUATE, with_values
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.run.setup.validation import find_faults


def test_each_method_is_judged_ten_times_by_images_that_it_has_not_seen(tmp_path, monkeypatch):
    tool, seen = load_module(notebooks.ROOT / "tools/selfsup_cifar10.py"), []

    def train(words, workdir):
        name, *flags = (word.removeprefix("--config") for word in words)
        config = load_config(name.removeprefix("="))
        keys = [flag.removeprefix(".").split("=", 1) for flag in flags]
        assert apply_overrides(config, keys) + find_faults(config) == []
        seen.append((config.seed, config.evals.near.every, config.evals.near.test_split))
        workdir.mkdir()
        first = {"near/20nn_top1": 0.2, "near/pixels_20nn_top1": 0.3}
        rows = [first, {"train/loss": 1.0}, {"near/20nn_top1": 0.5}, {"near/20nn_top1": 0.4}]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (workdir / "metrics.jsonl").write_text(text)
        return {"exaflops": 0.002}, 10.0

    def evaluate(workdir, name, keys):
        config = with_values(load_config(name), keys)
        assert find_faults(config, REQUIRED_TO_EVALUATE) == []
        return {"probe/top1": 0.6}

    (tmp_path / "pictures").mkdir()
    monkeypatch.setattr(tool, "train", train)
    monkeypatch.setattr(tool.vit_jax, "evaluate", evaluate)
    monkeypatch.setattr(tool, "TABLE", tmp_path / "table.csv")
    for judge in ("held_out", "test", "test"):
        words = [str(tmp_path), "--data_dir=DIR", "--seeds=2", f"--judge={judge}"]
        monkeypatch.setattr(sys, "argv", ["selfsup_cifar10.py", *words])
        tool.main()
    number, splits = len(tool.RUNS), ("train[96%:]", "test[:20%]")
    assert seen == [(s, "10 %", split) for split in splits for s in (0, 1) for _ in range(number)]
    row = read_rows(tool.TABLE)[0]
    assert {key: float(row[key]) for key in ("random", "pixels", "best", "last", "probe")} == (
        pytest.approx({"random": 20, "pixels": 30, "best": 50, "last": 40, "probe": 60})
    )


def test_an_objective_was_seen_to_learn_where_its_runs_end_above_the_pixels():
    """By 3 points in each seed: `doctor` says of an objective what the table shows."""
    tool, gains = load_module(notebooks.ROOT / "tools/selfsup_cifar10.py"), {}
    for row in read_rows(tool.TABLE):
        name = load_config(tool.RUNS[row["run"]][0]).objective.name
        gain = float(row["last"]) - max(float(row["random"]), float(row["pixels"]))
        gains.setdefault(name, []).append(gain)
    seen = {name: OBJECTIVES.make({"name": name}).fewest_images == 5000 for name in gains}
    assert len(seen) > 1 and seen == {name: min(found) >= 3 for name, found in gains.items()}
