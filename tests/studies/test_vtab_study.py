"""The VTAB-1k study: its runs, its report, and a whole study on stand-in data."""

import json
import pathlib

import pytest
from studied import keys_at_fault, overrides_of, report_of

from vit_jax.config.text import load_config
from vit_jax.data.sources.vtab import TASKS
from vit_jax.main import main
from vit_jax.studies.engine import Result
from vit_jax.studies.tables import DIVERGED, FINISHED

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT / 'configs/vtab.py'}:ViT-B/8"


@pytest.fixture
def make_config(monkeypatch):
    """(names of missing tasks, keys of the config's study) -> config."""

    def make(*missing, **study):
        found = {task: f"get {task}" for task in missing}
        monkeypatch.setattr("vit_jax.studies.vtab.find_missing", lambda *_: found)
        config = load_config(CONFIG)
        config.study.update(study)
        return config

    return make


def results(config, accuracy):
    """Results of all members, from accuracy(task, seed)."""
    return {
        name: Result(FINISHED, {"test/top1": accuracy(keys["data.name"][5:], int(keys["seed"]))})
        for name, keys in overrides_of(config).items()
    }


def test_a_run_of_every_task_that_is_there_with_every_seed(make_config):
    members = overrides_of(make_config("dtd", "pets"))
    assert len(members) == 17 * 3 and not [name for name in members if "dtd" in name]
    assert members["caltech101_seed_0"] == {
        "data.name": "vtab/caltech101", "data.split": "train800val200", "seed": "0",
    }  # fmt: skip


def test_means_by_group_and_over_all_and_their_deviation(make_config):
    config = make_config(seeds=2)
    order = list(TASKS)
    found = results(config, lambda task, seed: order.index(task) + seed)
    report = report_of(config, found)
    cells = {row["task"]: row["test/top1, %"] for row in report.rows}
    means = {name: cells[f"mean of {name}"].numbers()
             for name in ("natural", "specialised", "structured", "all 19")}  # fmt: skip
    # Natural is 0 to 6, specialised 7 to 10, structured 11 to 18; one more with the other seed.
    assert [mean["mean"] for mean in means.values()] == pytest.approx([3.5, 9.0, 15.0, 9.5])
    assert all(mean["std"] == pytest.approx(0.5**0.5) for mean in means.values())
    assert cells["dtd"].numbers()["mean"] == 2.5 and report.is_complete
    assert len(report.rows) == 19 + 4
    assert report.texts[-1] == ["mean of all 19", "all 19", "950.00 ± 70.71"]
    del found["dtd_seed_1"]  # a mean over seeds that have all tasks
    means = report_of(config, found).rows[-4:]
    assert [row["test/top1, %"].numbers()["values"] for row in means] == [
        [3.0], [8.5, 9.5], [14.5, 15.5], [9.0]
    ]  # fmt: skip


def test_no_mean_without_all_its_tasks(make_config):
    config = make_config("dtd", seeds=1)
    found = results(config, lambda task, seed: 0.5)
    report = report_of(config, found)
    assert report.is_complete  # of the tasks that exist
    shown = {task: value for task, _, value in report.texts}
    assert shown["dtd"] == "missing" and shown["missing: dtd"] == "get dtd"
    assert shown["mean of natural"] == shown["mean of all 19"] == "lacks tasks"
    assert shown["mean of specialised"] == "50.00"

    found["svhn_seed_0"] = Result(DIVERGED)
    del found["dmlab_seed_0"]
    report = report_of(config, found)
    shown = {task: value for task, _, value in report.texts}
    assert (shown["svhn"], shown["dmlab"], shown["pets"]) == ("diverged", "waits", "50.00")
    assert shown["mean of structured"] == "lacks tasks" and not report.is_complete


def test_refusals(make_config):
    assert keys_at_fault(make_config(*TASKS)) == ["data.data_dir"]
    assert keys_at_fault(make_config(metric="val/top1")) == ["study.metric"]
    assert keys_at_fault(make_config(metric="test/top2")) == ["study.metric"]


@pytest.mark.slow
def test_all_19_tasks_on_stand_ins(tmp_path, monkeypatch):
    """Real runs on generated data in the format of the real sets. One set is missing."""
    monkeypatch.syspath_prepend(ROOT / "tests/data")
    from stand_in_vtab import write_stand_ins

    data, workdir = tmp_path / "data", tmp_path / "study"
    data.mkdir()
    write_stand_ins(data)
    words = [f"--config={CONFIG},debug", f"--workdir={workdir}", f"--config.data.data_dir={data}"]
    (data / "dtd").rename(tmp_path / "dtd")
    assert main(["study", *words]) == 0
    found = json.loads((workdir / "study.json").read_text())
    assert found["rows"][-2][-1] == "lacks tasks" and list(found["missing"]) == ["dtd"]
    assert "download_and_prepare" in found["missing"]["dtd"]
    before = {path: path.stat().st_mtime for path in workdir.glob("*/summary.json")}
    assert len(before) == 18

    (tmp_path / "dtd").rename(data / "dtd")
    assert main(["study", *words]) == 0
    found = json.loads((workdir / "study.json").read_text())
    assert found["complete"] and found["missing"] == {}
    means = [row["test/top1, %"]["mean"] for row in found["table"]]
    assert means[-1] == pytest.approx(sum(means[:19]) / 19)
    assert all(path.stat().st_mtime == time for path, time in before.items())
