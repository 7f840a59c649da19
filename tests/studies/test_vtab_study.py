"""The VTAB-1k study: its runs, its report, and a whole study on stand-in data."""

import json
import pathlib

import pytest

from vit_jax.config.text import load_config
from vit_jax.data.vtab import TASKS
from vit_jax.errors import InputError
from vit_jax.main import main
from vit_jax.studies.members import DIVERGED, FINISHED, Result
from vit_jax.studies.vtab import STUDY

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT / 'configs/vtab.py'}:ViT-B/8"
METRIC = "test/top1"


@pytest.fixture
def make_config(monkeypatch):
    """(names of missing tasks, keys of the config's study) -> config."""

    def make(*missing, **study):
        def find_missing(tasks, data_dir):
            return {task: f"get {task}" for task in tasks if task in missing}

        monkeypatch.setattr("vit_jax.studies.vtab.find_missing", find_missing)
        config = load_config(CONFIG)
        config.study.update(study)
        return config

    return make


def results(config, accuracy):
    """Results of all members, from accuracy(task, seed)."""
    found = {}
    for member in STUDY.members(config, {}):
        task = member.overrides["data.name"].removeprefix("vtab/")
        value = accuracy(task, int(member.overrides["seed"]))
        found[member.name] = Result(FINISHED, {"step": 9, METRIC: value, "test/loss": 3.0})
    return found


def test_a_run_of_every_task_that_is_there_with_every_seed(make_config):
    config = make_config("dtd", "pets")
    members = STUDY.members(config, {})
    assert len(members) == len({member.name for member in members}) == 17 * 3
    assert members[0].name == "caltech101_seed_0"
    assert members[0].overrides == {
        "data.name": "vtab/caltech101", "data.split": "train800val200", "seed": "0",
    }  # fmt: skip
    assert not [member for member in members if "dtd" in member.name]


def test_means_by_group_and_over_all_and_their_deviation(make_config):
    config = make_config(seeds=2)
    order = list(TASKS)
    report = STUDY.report(config, results(config, lambda task, seed: order.index(task) + seed))
    means = report.values["means"]
    # Natural is 0 to 6, specialised 7 to 10, structured 11 to 18; one more with the other seed.
    assert {name: found["mean"] for name, found in means.items()} == pytest.approx(
        {"natural": 3.5, "specialised": 9.0, "structured": 15.0, "all 19": 9.5}
    )
    assert all(found["std"] == pytest.approx(0.5**0.5) for found in means.values())
    assert report.values["tasks"]["dtd"]["mean"] == 2.5
    assert report.complete and len(report.rows) == 19 + 4
    assert report.rows[-1] == ["mean of all 19", "all 19", "950.00 ± 70.71"]


def test_no_mean_without_all_its_tasks(make_config):
    config = make_config("dtd", seeds=1)
    report = STUDY.report(config, results(config, lambda task, seed: 0.5))
    means = {name: found["mean"] for name, found in report.values["means"].items()}
    assert means == {"natural": None, "specialised": 0.5, "structured": 0.5, "all 19": None}
    assert report.complete  # of the tasks that exist
    assert report.rows[-1] == ["missing: dtd", "natural", "get dtd"]
    assert ["dtd", "natural", "missing"] in [list(row) for row in report.rows]


def test_what_diverged_or_waits_has_no_mean(make_config):
    config = make_config(seeds=1)
    found = results(config, lambda task, seed: 0.5)
    found["svhn_seed_0"] = Result(DIVERGED)
    del found["dmlab_seed_0"]
    report = STUDY.report(config, found)
    assert not report.complete
    shown = {task: value for task, _, value in report.rows}
    assert (shown["svhn"], shown["dmlab"], shown["dtd"]) == ("diverged", "waits", "50.00")
    means = {name: value["mean"] for name, value in report.values["means"].items()}
    assert means == {"natural": None, "specialised": 0.5, "structured": None, "all 19": None}


def test_refusals(make_config):
    with pytest.raises(
        InputError, match=r"the data of all tasks are missing:\n +get caltech101\n +get cifar100"
    ):
        STUDY.check(make_config(*TASKS))
    config = make_config()
    config.study.metric = "val/top1"
    with pytest.raises(InputError, match="VTAB needs exactly one evaluator, 'val'"):
        STUDY.check(config)
    config.study.metric = "test/top2"
    with pytest.raises(InputError, match=r"study\.metric='test/top2': needs an accuracy"):
        STUDY.check(config)
    with pytest.raises(InputError, match=r"study\.seeds=0"):
        STUDY.check(make_config(seeds=0))


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
    assert found["means"]["all 19"]["mean"] is None and list(found["missing"]) == ["dtd"]
    assert "download_and_prepare" in found["missing"]["dtd"]
    before = {path: path.stat().st_mtime for path in workdir.glob("*/summary.json")}
    assert len(before) == 18

    (tmp_path / "dtd").rename(data / "dtd")
    assert main(["study", *words]) == 0
    found = json.loads((workdir / "study.json").read_text())
    assert found["complete"] and found["missing"] == {}
    values = [found["tasks"][task]["mean"] for task in TASKS]
    assert found["means"]["all 19"]["mean"] == pytest.approx(sum(values) / 19)
    assert all(path.stat().st_mtime == time for path, time in before.items())
