"""The best step is kept, and a run ends early; a killed run decides as an uninterrupted one."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import types

import jax
import pytest
from asked import count_steps, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath
from opened import open_all
from read_settings import settings_of

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.history import read_values
from vit_jax.config.metric_names import find_best, find_direction
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.evaluators.classification import Classification
from vit_jax.run import loop, selection
from vit_jax.run.selection import Selection
from vit_jax.run.setup.sources import find_absent
from vit_jax.run.setup.validation import check_metrics
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


def check(config):
    config, sources = open_all(config)
    check_metrics(settings_of(config), sources)


def make_config(**overrides):
    config = load_config(CONFIG)
    pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
    assert not apply_overrides(config, pairs)
    return config


@pytest.mark.parametrize(
    ("metric", "values", "best", "since"),
    [
        ("val/top1", [0.1, 0.3, 0.2, 0.3], 2, 2),  # the first of equals
        ("val/loss", [3.0, 1.0, 2.0], 2, 1),
        ("val/distance", [0.2, 0.1], 2, 0),
        ("val/top1", [math.nan, None, 0.0], 3, 0),
        ("val/loss", [None, math.inf], None, 2),
        ("val/top1", [], None, 0),
    ],
)
def test_the_best_of_a_series(metric, values, best, since):
    better = "higher" if metric == "val/top1" else "lower"
    assert find_best(dict(enumerate(values, 1)), better) == (best, since)


def test_metrics_that_evaluators_declare_are_checked_before_training(tmp_path):
    config = make_config(
        optimizer__ema_decay="0.9", stop__metric="test/top2", checkpoint__keep_best="test/los_raw"
    )
    with at_fault("checkpoint.keep_best", "stop.metric"):
        prepare(config, tmp_path)
    config.checkpoint.keep_best, config.stop.metric = "test/ece_raw", "test/num_examples"
    with at_fault("stop.metric"):
        prepare(config, tmp_path)
    config.stop.metric = "test/accuracy/a loss"  # of a class
    with at_fault("stop.metric"):
        check(config)
    config.evals.test.by_class = True
    check(config)
    assert find_direction(settings_of(config).evals, "test/accuracy/a loss") == "higher"


@pytest.mark.parametrize("end", ["", "_raw"])
def test_metrics_that_the_data_rule_out_are_refused_and_not_suggested(tmp_path, end):
    config = load_config("folder:ViT-mu/16")
    config.data.data_dir = str(tmp_path)
    for name in "abcd":
        (tmp_path / name).mkdir()
        for i in range(6):
            (tmp_path / name / f"{i}.png").touch()
    assert not apply_overrides(config, [("evals.near", "knn"), ("optimizer.ema_decay", "0.9")])
    config.checkpoint.keep_best, config.stop.metric = f"val/top5{end}", f"near/100nn_top1{end}"
    with at_fault("checkpoint.keep_best", "stop.metric") as error:
        check(config)
    of_top5, of_neighbours = error.value.faults
    assert of_top5.endswith(
        f"needs more than 5 classes; the data have 4; did you mean val/top1{end}?"
    )
    assert re.search(r"train_split has \d+ images; did you mean near/[12]0nn_top1", of_neighbours)
    config.checkpoint.keep_best = config.stop.metric = "val/top1"
    check(config)


@pytest.fixture
def declare(monkeypatch):
    """Lets the evaluator of `test` declare other metrics."""
    return lambda found: monkeypatch.setattr(Classification, "reports", lambda self: found)


def test_an_evaluator_declares_which_values_are_better(declare, caplog):
    config = make_config(stop__metric="test/distance", checkpoint__keep_best="test/lossless")
    declare({"distance": "lower", "lossless": "higher"})
    check(config)
    evals = settings_of(config).evals
    assert find_direction(evals, "test/distance") == "lower"
    assert find_direction(evals, "test/lossless") == "higher"
    assert not caplog.records
    declare({"distance": "down"})
    with pytest.raises(AssertionError, match=r"evals\.test declares .*'distance': 'down'"):
        check(config)


@pytest.mark.parametrize(("name", "better"), [("error", "lower"), ("ece_raw", "lower"),
                                              ("loss_flips_raw", "lower"),
                                              ("top1", "higher")])  # fmt: skip
def test_without_declared_metrics_the_name_decides(name, better, declare, caplog):
    config = make_config(stop__metric=f"test/{name}")
    declare(None)
    check(config)
    assert find_direction(settings_of(config).evals, f"test/{name}") == better
    assert f"does not declare its metrics; assuming that the {better} value" in caplog.text


def test_a_metric_that_the_evaluator_does_not_give():
    found = Selection(settings_of(make_config(stop__metric="test/top2")), {})
    found.add(5, {"other/top1": 0.5})
    with at_fault("stop.metric"):
        found.add(10, {"test/top1": 0.5, "test/loss": 1.0})


def test_a_metric_of_an_optional_split_that_the_images_lack(tmp_path):
    config = load_config("folder:ViT-mu/16")
    config.data.data_dir = str(tmp_path)
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "test" not in open_all(config)[0].evals
    config.stop.metric = "test/top1"
    with at_fault("stop.metric"):
        open_all(config)
    config.stop.metric = "val/top1"
    open_all(config)


def test_a_run_is_evaluated_on_images_without_its_optional_split(tmp_path, caplog):
    caplog.set_level("INFO", logger="vit_jax")
    config = load_config("folder:ViT-mu/16")
    for name in ("cat/1.png", "dog/1.png"):
        for split in ("a/train", "a/test", "b/train", "b/val"):
            (tmp_path / split / name).parent.mkdir(parents=True)
            (tmp_path / split / name).touch()
    config.data.data_dir = str(tmp_path / "a")
    run, sources = open_all(config)
    assert {"test", "val"} == {*run.evals} and {"train", "val", "test"} == {
        k.split for k in sources
    }
    run.data.data_dir = str(tmp_path / "b")
    assert [*find_absent(settings_of(run), training=False)] == ["evals.test"]
    assert f"evals.test: left out, as {tmp_path / 'b'} has no split 'test'" in caplog.text
    run.stop.metric = "test/top1"  # nothing waits for it now
    assert [*find_absent(settings_of(run), training=False)] == ["evals.test"]
    del run.evals["val"]
    with at_fault("evals.test"):
        find_absent(settings_of(run), training=False)


def test_other_processes_get_the_evaluations_that_process_0_sees(monkeypatch):
    config = make_config(stop__metric="test/loss", stop__patience="1")
    run = types.SimpleNamespace(settings=settings_of(config), evaluators={})
    monkeypatch.setattr(
        selection.processes, "say_to_all", lambda *_: {"stop.metric": {"5": 1.0, "10": 1.5}}
    )
    assert selection.share_selection(run, 10, {}).stops


TOP1 = {5: 0.1, 10: 0.5, 15: 0.4, 20: 0.3, 25: 0.2, 30: 0.9}


def start(workdir, **overrides):
    keys = {
        "evals__test__every": "5 steps", "checkpoint__keep_best": "test/top1",
        "stop__metric": "test/top1", "stop__patience": "3", "checkpoint__every": "8 steps",
    }  # fmt: skip
    return train_and_evaluate(make_config(**keys | overrides), workdir)


class KillError(BaseException):
    pass


def start_and_kill(workdir, at=17, **overrides):
    def kill(guard, step):
        if step == at:
            raise KillError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KillError):
        patch.setattr(loop.PreemptionGuard, "should_stop", kill)
        start(workdir, **overrides)


def outcome(workdir):
    """What must not depend on whether the run was killed."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    steps = restore.saved_steps(epath.Path(workdir / "checkpoints"))
    metas = [restore.read_meta(epath.Path(workdir / f"checkpoints/{step}")) for step in steps]
    return rows, steps, [meta["checksums"] for meta in metas]


@pytest.fixture
def accuracies(monkeypatch):
    """The accuracy that the evaluator finds at each step; steps only count."""
    monkeypatch.setattr(loop, "compile_step", count_steps(lambda step: 1 / (1 + step)))
    found = dict(TOP1)

    def measure(state):
        return {"top1": found[int(jax.device_get(state.step))]}

    monkeypatch.setattr(Classification, "bind", lambda self, inputs: measure)
    return found


@pytest.mark.parametrize("kills", [(17,), pytest.param((17, 25), marks=pytest.mark.slow)])
def test_a_run_ends_early_with_its_best_step_kept_whenever_it_was_killed(
    kills, accuracies, tmp_path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = start(whole)
    assert summary["step"] == 25 and summary["stopped_early"] is True
    assert summary["best"] == {"step": 10, "test/top1": 0.5}  # with what else was found there
    assert outcome(whole)[1] == [25, 24, 10]
    assert read_pretrained(whole, best=True).run["step"] == 10
    with pytest.raises(InputError, match="checkpoints/10': is one step of a run"):
        read_pretrained(whole / "checkpoints/10", best=True)
    assert vit_jax.evaluate(whole, best=True) == {"step": 10, "test/top1": 0.5}

    for step in kills:
        start_and_kill(killed, step)
    start(killed)
    assert outcome(killed) == outcome(whole)
    assert len((killed / "starts.jsonl").read_text().splitlines()) == len(kills) + 1


def test_the_best_step_is_one_that_was_kept(accuracies, tmp_path):
    """Also where the run was begun without `checkpoint.keep_best`."""
    start_and_kill(tmp_path, checkpoint__keep_best="None")
    with pytest.raises(InputError, match=r"--config\.checkpoint\.keep_best=METRIC"):
        read_pretrained(tmp_path, best=True)
    summary = start(tmp_path)
    assert summary["step"] == 25 and summary["stopped_early"]  # as step 10 was the best
    assert summary["best"] == {"step": 20, "test/top1": 0.3}
    assert outcome(tmp_path)[1] == [25, 24, 20]


@pytest.mark.slow
def test_a_run_that_has_ended_early_starts_again(accuracies, tmp_path):
    run = tmp_path / "run"
    start(run)
    before = outcome(run)
    (run / "summary.json").unlink()  # killed between the last save and the summary
    assert start(run)["stopped_early"]
    assert outcome(run) == before
    assert start(run)["step"] == 25  # finished before
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2

    accuracies.update({35: 0.1, 40: 0.1})
    summary = start(run, stop__patience="5")  # goes on, as it was not long enough
    assert summary["step"] == 40 and "stopped_early" not in summary
    assert summary["best"]["step"] == 30


@pytest.mark.parametrize(
    "loss", ["one byte", "all rows", pytest.param("the file", marks=pytest.mark.slow)]
)
def test_lost_rows_change_neither_the_best_step_nor_its_checkpoint(
    loss, accuracies, tmp_path, caplog
):
    start_and_kill(tmp_path)
    rows = tmp_path / "metrics.jsonl"
    damaged = rows.read_text().replace('"test/top1": 0.5', '"test/top1": x.5')
    assert "x.5" in damaged
    rows.write_text(damaged if loss == "one byte" else "")
    if loss == "the file":
        rows.unlink()
    summary = start(tmp_path)
    assert (summary["step"], summary["best"]["step"]) == (25, 10)
    folder = epath.Path(tmp_path / "checkpoints")
    assert 10 in restore.saved_steps(folder)
    assert "has no checkpoint" not in caplog.text
    if loss == "one byte":  # said once, and still there to be mended
        assert caplog.text.count("is damaged and not read") == 1 and "x.5" in rows.read_text()
    assert ("ends at step 0, but has had rows up to step 15" in caplog.text) == (loss != "one byte")

    if loss == "all rows":
        rows.write_text("")
        newest = folder / str(restore.saved_steps(folder)[0]) / "meta/metadata"
        newest.write_text(newest.read_text().replace("0.5", "0.0"))
        run = read_pretrained(tmp_path, best=True).run
        assert (run["step"], run["results"]["test/top1"]) == (10, {"value": 0.5, "step": 10})


def test_states_tell_values_before_rows_do_and_those_of_0_2_0_tell_none(tmp_path):
    rows = [{"step": 5, "test/top1": 0.25, "test/loss": 2.0}, {"step": 10, "test/top1": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workdir = epath.Path(tmp_path)
    assert read_values(workdir, 10, {})["test/top1"] == {5: 0.25, 10: 0.5}
    meta = {"evaluated": {"test/top1": {"5": 0.75, "7": None}}}
    found = read_values(workdir, 7, meta)
    assert (found["test/top1"], found["test/loss"]) == ({5: 0.75, 7: None}, {5: 2.0})


@pytest.mark.parametrize("place", ["checkpoints", "memory"])
def test_what_decides_is_saved_in_the_store_and_in_memory(place, monkeypatch):
    monkeypatch.setattr(loop, "check_replicas", lambda state, mesh: None)
    saved = []
    store = types.SimpleNamespace(save=lambda step, state, meta: saved.append(meta))
    record = types.SimpleNamespace(saved=8, saving=lambda step: contextlib.nullcontext({"a": 1}))
    found = Selection(settings_of(make_config(stop__metric="test/top1")), {"stop.metric": {5: 0.5}})
    parts = dict.fromkeys(field.name for field in dataclasses.fields(loop.Loop))
    parts |= {"run": types.SimpleNamespace(mesh=None), "selection": found, "record": record}
    opened, due = loop.Loop(**parts | {place: store}), types.SimpleNamespace(step=10)
    (opened.save if place == "checkpoints" else opened.keep)(due, state=None)
    assert saved[0]["evaluated"] == {"test/top1": {5: 0.5}} and saved[0]["a"] == 1
