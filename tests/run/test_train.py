"""Whole runs in this process."""

import copy
import dataclasses
import json
import logging
import math
import pathlib
import shutil
import signal
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import count_steps, prepare, train_and_evaluate
from at_fault import at_fault
from etils import epath
from finished_run import check_same_arrays
from opened import evaluate_run
from read_settings import settings_of, teaching
from sklearn.datasets import load_digits

from vit_jax import data, load_pretrained
from vit_jax.base import tree
from vit_jax.base.errors import InputError, SharedInputError
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.config.stored import read_config
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.job.lock import LostLockError, NoLock
from vit_jax.main import main
from vit_jax.run import loop, record, writers
from vit_jax.run.record import check_rows
from vit_jax.run.setup import workdir as workdir_module
from vit_jax.run.setup.workdir import clone_state
from vit_jax.run.summary import write_summary
from vit_jax.run.teachers import compare_classes, read_teachers
from vit_jax.run.watch import ledger, speed
from vit_jax.run.watch.guards import NonFiniteError, check_finite

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")
ROOT = pathlib.Path(__file__).parents[2]
FILE = str(ROOT / "configs/quickstart.py") + ":debug"


def make_config(**overrides):
    """The quickstart's debug form: 40 steps, rows each 5, evaluations each 20, saves each 10."""
    config = load_config(FILE)
    faults = apply_overrides(config, [(k.replace("__", "."), v) for k, v in overrides.items()])
    assert not faults
    return config


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_summary(workdir, tmp_path):
    """A copy of a finished run without its summary, as if it was killed just before its end."""
    run = shutil.copytree(workdir, tmp_path / "run")
    (run / "summary.json").unlink()
    return run


def final_checksums(workdir, step=40):
    return restore.read_meta(epath.Path(workdir) / "checkpoints" / str(step))["checksums"]


class Started(Exception):
    """The state is there, and the step would be compiled."""


def stop_here(run):
    raise Started


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    summary = train_and_evaluate(make_config(), workdir)
    return workdir, summary


def test_what_a_run_leaves(finished):
    workdir, summary = finished
    names = {p.name.split(".")[0] for p in workdir.iterdir()}
    assert names == {
        "config", "classes", "metrics", "events", "checkpoints", "summary", "starts",
    }  # fmt: skip
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert summary["step"] == 40 and summary["test/num_examples"] == 360
    assert summary["images_seen"] == 40 * 64
    assert summary["images_per_s"] > 0 and "chip_hours" not in summary  # of a CPU
    assert json.loads((workdir / "classes.json").read_text()) == list("0123456789")
    of_data = json.loads((workdir / "config.json").read_text())["resolved"]["data"]
    assert (of_data["num_examples"], of_data["num_classes"]) == (1437, 10)


def test_ctrl_c_saves_and_every_start_is_recorded(tmp_path, monkeypatch, capsys):
    """And meanwhile a second process is refused, while `evaluate` reads."""
    seen = {}

    def should_stop(guard, step):
        if step == 25:  # step 10 is saved for certain, as step 20 is being saved
            with at_fault("--workdir"):
                train_and_evaluate(make_config(), tmp_path)
            seen.update(evaluate_run(read_config(epath.Path(tmp_path)), tmp_path))
            signal.raise_signal(signal.SIGINT)
        return guard._signalled

    monkeypatch.setattr(loop.PreemptionGuard, "should_stop", should_stop)
    words = [f"--config={FILE}", "--config.log.every=7 steps", f"--workdir={tmp_path}"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        assert main(words) == 130
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped by Ctrl-C at step 25; saved" in capsys.readouterr().err
    assert restore.saved_steps(epath.Path(tmp_path / "checkpoints"))[0] == 25
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert last["step"] == 25 and {"time/seconds", "time/save_s", "time/wall_s"} <= {*last}
    assert not (tmp_path / "held_by.json").exists()
    assert "test/top1" in seen
    monkeypatch.setattr(loop, "compile_step", stop_here)
    with pytest.raises(Started):
        train_and_evaluate(make_config(), tmp_path)
    assert not (tmp_path / "held_by.json").exists()

    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["config"], first["overrides"]) == (FILE, {"log.every": "7 steps"})
    assert (first["resumed_at"], second["resumed_at"]) == (None, 25)
    assert "config" not in second and second["command"]
    assert first["hardware"]["devices"] == 1 and first["software"]["jax"] == jax.__version__
    assert first["commit"] == second["commit"] and first["clean"] in (True, False, None)


def test_what_git_says_of_a_clone(tmp_path):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *own, *words], check=True, capture_output=True)

    none = {"commit": None, "clean": None}
    assert clone_state(tmp_path) == none
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    (tmp_path / "untracked").mkdir()
    found = clone_state(tmp_path)
    assert len(found["commit"]) == 40 and found["clean"] is True
    assert clone_state(tmp_path / "untracked") == none  # a package inside of another clone
    (tmp_path / "a").write_text("2")
    assert clone_state(tmp_path) == found | {"clean": False}


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"hardware": {}}\n', '{"time": "2x26"}\n'])
def test_a_damaged_record_of_starts_stops_no_run(tmp_path, text, caplog):
    (tmp_path / "starts.jsonl").write_text(text)
    assert workdir_module.read_run(epath.Path(tmp_path)).devices is None
    assert ledger.read_past(epath.Path(tmp_path), [], None).wall_s < 60
    assert caplog.text.count("line 1 is damaged") == text.endswith("\n")


def test_a_step_of_a_run_is_a_source_too(finished, tmp_path):
    checkpoints = finished[0] / "checkpoints"
    steps = sorted(int(p.name) for p in checkpoints.iterdir())
    assert len(steps) == 2 and steps[-1] == 40
    heads = [
        np.asarray(load_pretrained(path)[1]["params"]["head"]["kernel"])
        for path in (finished[0], checkpoints / "40", checkpoints / str(steps[0]))
    ]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])
    with at_fault("init_from"):
        load_pretrained(checkpoints / "41")
    shutil.copytree(finished[0], tmp_path / "run")
    next((tmp_path / "run/checkpoints/40/state").rglob("*/d/*")).write_bytes(b"")
    with pytest.raises(InputError, match=r"checkpoints/40 is invalid: .*use another step"):
        load_pretrained(tmp_path / "run/checkpoints/40")


def test_rows_hold_their_own_steps_values(finished):
    workdir, summary = finished
    train = [row for row in rows(workdir) if "train/loss" in row]
    assert [row["step"] for row in train] == list(range(5, 41, 5))
    test = [row for row in rows(workdir) if "test/top1" in row]
    assert [row["step"] for row in test] == [20, 40]
    assert test[-1]["test/top1"] == summary["test/top1"]
    # 4 steps of warm-up to 1.5e-3: the update of step 5 is the first at the peak.
    assert train[0]["train/lr"] == pytest.approx(1.5e-3)
    assert train[-1]["train/lr"] == pytest.approx(
        1.5e-3 * 0.5 * (1 + np.cos(np.pi * 35 / 36)), rel=1e-5
    )


@pytest.fixture(scope="module")
def tuned(finished, tmp_path_factory):
    """A run from the weights of another, which it does not change: (workdir, calls, messages).

    Its compilation takes an hour on a chip that counts.
    """
    calls, compile_step, passed_s, messages = [], loop.compile_step, [0.0], []
    handler, logger = logging.Handler(), logging.getLogger("vit_jax")
    handler.emit = lambda record: messages.append(record.getMessage())

    def slowly(run):
        passed_s[0] += 3600
        return compile_step(run)

    def spy(patch, owner, name):
        original = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            calls.append(name)
            return original(self, *args, **kwargs)

        patch.setattr(owner, name, wrapped)

    workdir = tmp_path_factory.mktemp("tuned")
    config = make_config(
        init_from=str(finished[0]), duration="4 steps", schedule__warmup="0 steps",
        optimizer__peak_lr="0.0", log__every="4 steps", evals__test__every="4 steps",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed_s[0])
        patch.setattr(speed, "time", clock)
        patch.setattr(speed, "rented_chips", lambda devices: 1)
        spy(patch, writers.MetricWriter, "write")
        spy(patch, writers.MetricWriter, "flush")
        spy(patch, record, "evaluate")
        spy(patch, checkpoint.Checkpoints, "save")
        spy(patch, checkpoint.Checkpoints, "close")
        spy(patch, writers.MetricWriter, "__exit__")
        patch.setattr(loop, "compile_step", slowly)
        patch.setattr(logger, "handlers", [handler])
        patch.setattr(logger, "level", logging.INFO)
        train_and_evaluate(config, workdir)
    return workdir, calls, "\n".join(messages)


def test_order_is_log_evaluate_flush_save_commit_close_and_compilation_counts(tuned):
    workdir, calls, _ = tuned
    # The first flush is the opening of the files; closing them may fail or take long, so it waits
    # for the last save.
    order = ["flush", "write", "evaluate", "write", "flush", "save", "close"]
    order += ["write", "__exit__"]  # the seconds since the last row
    assert calls == order
    assert restore.read_meta(epath.Path(workdir / "checkpoints/4"))["chip_hours"] >= 1


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys):
    losses = {16: math.nan}  # of step 17
    monkeypatch.setattr(loop, "compile_step", count_steps(lambda step: losses.get(step, 1.0)))
    assert main([f"--config={FILE}", f"--workdir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert "step 17: " in error and "loss is nan" in error and "last save: step 10" in error
    assert "Traceback" not in error
    assert restore.saved_steps(epath.Path(tmp_path / "run/checkpoints")) == [10]
    *logged, last = rows(tmp_path / "run")
    assert [row["step"] for row in logged] == [5, 10, 15] and "time/wall_s" in last


@pytest.mark.parametrize(
    ("error", "by_all"),
    [
        (InputError("evals.test.ops: an image is smaller than the crop"), False),
        (LostLockError("process 17 trains there now"), False),
        (SharedInputError("evals.few.l2=1e-30: too small"), True),
        (NothingToMeasureError("evals.few.train_split: none can be read"), True),
        (NonFiniteError("step 7: loss is nan"), True),
        (loop.Preempted("stopped at step 7"), True),
    ],
)
def test_an_error_of_one_process_of_several_keeps_its_lock(monkeypatch, tmp_path, error, by_all):
    """It does not wait for a commit that needs the others, so files may still be written."""
    said = []
    checkpoints = types.SimpleNamespace(close=lambda: said.append("closed"))
    monkeypatch.setattr(loop.checkpoint, "Checkpoints", lambda *_, **__: checkpoints)
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    lock = types.SimpleNamespace(keep=lambda: said.append("kept"))
    run = types.SimpleNamespace(
        workdir=epath.Path(tmp_path),
        settings=settings_of(make_config()),
        timetable=types.SimpleNamespace(keep_every=None),
    )
    with pytest.raises(type(error)), loop.open_checkpoints(run, None, lock):
        raise error
    assert said == (["closed"] if by_all else ["kept"])


def test_told_to_stop_before_the_step_is_compiled_it_ends_at_once(tmp_path, monkeypatch):
    class Told(BaseException):
        """By the signal handler installed before the run."""

    def told(*args):
        raise Told

    def compile_step(run):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "compile_step", compile_step)
    run = prepare(make_config(), tmp_path)
    earlier = signal.signal(signal.SIGTERM, told)
    try:
        with pytest.raises(Told):
            loop.loop(run, types.SimpleNamespace(step=0), {}, NoLock(), 0.0)
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_a_damaged_newest_checkpoint_is_moved_aside_and_the_run_ends_the_same(finished, tmp_path):
    workdir, _ = finished
    run = shutil.copytree(workdir, tmp_path / "run")  # with its summary: it is finished
    damaged = max((run / "checkpoints/40/state/d").iterdir(), key=lambda p: p.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    # It logs every step from here on: a row holds the loss of its own step, not an average.
    train_and_evaluate(make_config(log__every="1 steps"), run)
    assert (run / "checkpoints/invalid-40").exists()
    assert final_checksums(run) == final_checksums(workdir)
    loss, of_each_step = (
        {row["step"]: row["train/loss"] for row in rows(folder) if "train/loss" in row}
        for folder in (workdir, run)
    )
    assert [*of_each_step] == [*range(5, 31, 5), *range(31, 41)]
    assert of_each_step[35] == loss[35] and of_each_step[40] == loss[40]


def without_seconds(summary):
    return {k: v for k, v in summary.items() if k not in ("goodput", "seconds")}


def test_a_finished_run_without_its_last_evaluation_makes_it(finished, tmp_path):
    """The summary has only values of the last step, and a removed config.json is written again."""
    workdir, summary = finished
    run = without_summary(workdir, tmp_path)
    (run / "config.json").unlink()
    *before, last, _ = rows(run)  # the last row has the seconds of the end
    assert "test/top1" in last and last["step"] == 40
    first = next(row for row in before if "test/top1" in row)
    first["test/of_an_earlier_config"] = 0.5
    text = "".join(json.dumps(row) + "\n" for row in before)
    (run / "metrics.jsonl").write_text(text + json.dumps(last)[:30])  # and half of its row
    assert without_seconds(train_and_evaluate(make_config(), run)) == without_seconds(summary)
    assert rows(run) == [*before, last]
    assert (run / "config.json").read_text() == (workdir / "config.json").read_text()

    (run / "summary.json").write_text("{")  # and a damaged summary is none
    assert without_seconds(train_and_evaluate(make_config(), run)) == without_seconds(summary)
    assert rows(run) == [*before, last]


@pytest.mark.parametrize("process", [0, 1])
def test_evaluators_without_a_row_at_the_restored_step_are_run_on_all_processes(
    tmp_path, monkeypatch, process
):
    """Process 0 decides, since others may see an older metrics.jsonl."""
    written = [{"step": 10, "train/loss": 1.0}, {"step": 10, "few/top1": None},
               {"step": 20, "knn/top1": 0.5}]  # fmt: skip
    if process == 0:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in written))
    ran, said, told = [], [], []

    def say_to_all(what, find, timeout_s):
        said.append(find())
        return ["few_more", "knn"]

    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(record.processes, "say_to_all", say_to_all)
    monkeypatch.setattr(
        record, "evaluate", lambda name, *_: ran.append(name) or {f"{name}/top1": 0.25}
    )
    run = types.SimpleNamespace(
        workdir=epath.Path(tmp_path),
        settings=settings_of(make_config()),
        resolved=types.SimpleNamespace(config=make_config()),
        evaluators=dict.fromkeys(("few", "few_more", "knn")),
        callbacks=[lambda *args: told.append(args)],
    )
    state = types.SimpleNamespace(step=10, ema={})
    record.evaluate_missed(run, state, ["few", "few_more", "knn"], NoLock())
    assert ran == ["few_more", "knn"]
    assert told == [(10, state, {"few_more/top1": 0.25, "knn/top1": 0.25})]
    if process == 0:
        assert said == [["few_more", "knn"]]
        assert rows(tmp_path) == [
            *written[:2], {"step": 10, "few_more/top1": 0.25}, {"step": 10, "knn/top1": 0.25},
        ]  # fmt: skip
    else:
        assert not list(tmp_path.iterdir())


def test_evaluate_gives_what_the_run_logged_without_training_data(finished, monkeypatch, json_of):
    make, splits = data.make_source, []

    def note(name, *, split, **kwargs):
        splits.append(split)
        return make(name, split=split, **kwargs)

    monkeypatch.setattr(data, "make_source", note)
    workdir, summary = finished
    results = json_of("evaluate", f"--workdir={workdir}")
    assert results == {k: v for k, v in summary.items() if k == "step" or k.startswith("test/")}
    assert splits == ["test"]


def test_init_from_an_unrolled_workdir_into_a_scanned_model(finished, tmp_path):
    workdir, _ = finished
    config = make_config(init_from=str(workdir), init_head="kept", model__scan="true")
    found = prepare(config, tmp_path / "tuned").initial_params
    _, expected = load_pretrained(workdir, scan=True)
    expected = tree.flatten_names(expected["params"])
    check_same_arrays(found, expected)


def test_init_from_replaces_the_head_also_for_as_many_classes(finished, tuned):
    workdir, _, said = tuned
    _, expected = load_pretrained(finished[0], num_classes=10)
    _, found = load_pretrained(workdir)
    expected, found = tree.flatten_names(expected), tree.flatten_names(found)
    assert not found["params/head/kernel"].any() and not found["params/head/bias"].any()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, name)
    assert "the head is initialised anew" in said
    assert f"start: parameters from init_from={finished[0]}" in said


def test_a_pretrained_file_in_the_workdir_is_no_resume(tmp_path, golden, caplog, monkeypatch):
    monkeypatch.setattr(loop, "compile_step", stop_here)
    caplog.set_level("INFO", "vit_jax")
    shutil.copy(golden / "vit_finetuned.npz", tmp_path / "checkpoint.npz")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(golden / "vit_finetuned.npz", tmp_path / "checkpoints/7")
    with pytest.raises(Started):
        train_and_evaluate(make_config(duration="4 steps"), tmp_path)
    assert "start: from scratch" in caplog.text


@pytest.mark.slow
def test_a_relative_workdir(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [f"--config={FILE}", "--workdir=runs/w", "--config.duration=4 steps"]
    assert main(flags) == 0
    assert main(["evaluate", "--workdir=runs/w"]) == 0
    model, variables = load_pretrained("runs/w", num_classes=3)
    assert model.apply(variables, np.zeros((1, 8, 8, 3), np.float32)).shape == (1, 3)
    assert prepare(make_config(init_from="runs/w"), "tuned").resolved.config.init_from == "runs/w"
    (tmp_path / "runs/w/summary.json").unlink()
    capsys.readouterr()
    assert main(flags) == 0
    assert "resumed at step 4" in capsys.readouterr().out


def test_a_save_that_fails_says_why(tmp_path, monkeypatch):
    def no_space(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", no_space)
    monkeypatch.setattr(loop, "compile_step", count_steps())
    with pytest.raises(OSError, match="No space left on device"):
        train_and_evaluate(make_config(duration="4 steps", checkpoint__every="2 steps"), tmp_path)


def test_lost_checkpoints_are_said(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 40}\n')
    check_rows(types.SimpleNamespace(workdir=epath.Path(tmp_path)), [{"step": 40}], {})
    assert "has rows up to step 40, but" in caplog.text and "has no checkpoint" in caplog.text
    assert (tmp_path / "metrics_before.jsonl").read_text() == '{"step": 40}\n'


def test_other_images_are_refused_and_nothing_is_moved(finished, tmp_path, monkeypatch):
    run = without_summary(finished[0], tmp_path)
    (run / "checkpoints/40/meta/metadata").unlink()
    monkeypatch.setattr("vit_jax.run.build.data_fingerprint", lambda *_: "another")
    with pytest.raises(InputError, match="the data set differs"):
        train_and_evaluate(make_config(), run)
    assert (run / "checkpoints/40").exists()


@pytest.mark.parametrize("name", ["summary.json", "config.json", "metrics.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: is a folder, in the place of a file"):
        train_and_evaluate(make_config(), tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / name]


def test_a_checkpoint_is_not_condemned_for_what_is_not_its_fault(finished, tmp_path, monkeypatch):
    run = without_summary(finished[0], tmp_path)

    def denied(*args):
        raise PermissionError("denied")

    monkeypatch.setattr(restore, "_restore", denied)
    with pytest.raises(PermissionError):
        train_and_evaluate(make_config(), run)
    assert (run / "checkpoints/40").exists()


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def optional(request, finished):
    """A config whose run holds what is optional in its state; it learns from a teacher.

    `all` has what is dearer to compile too.
    """
    dear = {"optimizer__name": "adafactor", "optimizer__accum_steps": "2", "model__scan": "true"}
    return make_config(
        objective__name="distillation", objective__teacher=str(finished[0]),
        objective__mode="features", duration="8 steps", schedule__warmup="1 steps",
        checkpoint__every="4 steps", log__every="4 steps", evals__test__every="8 steps",
        optimizer__peak_lr="1e-2", optimizer__ema_decay="0.9", optimizer__layer_decay="0.8",
        optimizer__freeze="encoder/layer_0/mlp/.*", **(dear if request.param == "all" else {}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def averaged(optional, tmp_path_factory):
    """(workdir, summary) of a run of `optional`."""
    workdir = tmp_path_factory.mktemp("averaged")
    return workdir, train_and_evaluate(optional, workdir)


def test_resumed_with_everything_on_the_run_ends_bit_identical(optional, averaged, tmp_path):
    """Only the second part logs norms by layer, which must not change anything."""
    workdir, summary = averaged
    run = without_summary(workdir, tmp_path)
    shutil.rmtree(run / "checkpoints/8")
    config = copy.deepcopy(optional)
    config.log.by_layer = True
    again = train_and_evaluate(config, run)
    expected = final_checksums(workdir, step=8)
    assert {name.split("/")[0] for name in expected} == {"step", "params", "opt_state", "ema"}
    assert "params/objective/adapter_0_0/kernel" in expected
    assert final_checksums(run, step=8) == expected
    assert {k: v for k, v in again.items() if k.startswith("test/")} == {
        k: v for k, v in summary.items() if k.startswith("test/")
    }
    by_layer = [row for row in rows(run) if "train/grad_norm/encoder/layer_0" in row]
    assert [row["step"] for row in by_layer] == [8]
    assert by_layer[0]["train/update_norm/encoder/layer_0"] > 0
    assert by_layer[0]["train/param_norm/head"] > 0


def test_a_run_learns_from_a_teacher(optional, averaged, finished, tmp_path):
    """Its adapters are left out where only the model counts."""
    teacher, workdir = finished[0], shutil.copytree(averaged[0], tmp_path / "run")
    assert {"train/loss", "train/loss_label", "train/loss_pooled"} <= rows(workdir)[0].keys()
    assert "objective" not in load_pretrained(workdir)[1]["params"]
    (recorded,) = json.loads((workdir / "teachers.json").read_text())
    assert recorded["source"] == str(teacher) and len(recorded["digest"]) == 64

    config = copy.deepcopy(optional)
    other = [
        teacher._replace(class_names=tuple("1023456789"))
        for teacher in read_teachers(*teaching(config))
    ]
    with at_fault("objective.teacher"):
        config.objective.mode = "hard"
        compare_classes(settings_of(config).objective, other, tuple("0123456789"))
    config.objective.mode = "features"
    changed = json.dumps([recorded | {"digest": "0"}])
    (workdir / "teachers.json").write_text(changed)
    with at_fault("objective.teacher"):
        prepare(config, workdir)


def test_the_average_is_evaluated_beside_the_raw_weights(averaged):
    """Also where the teacher is gone."""
    workdir, summary = averaged
    tested = {k for k in summary if k.startswith("test/")}
    names = ("top1", "top5", "macro_top1", "macro_f1", "loss", "ece")
    assert tested == {
        "test/num_examples", *(f"test/{n}" for n in names), *(f"test/{n}_raw" for n in names),
    }  # fmt: skip
    assert summary["test/loss"] != summary["test/loss_raw"]
    stored = read_config(epath.Path(workdir))
    stored.objective.teacher = str(workdir / "gone")
    results = evaluate_run(stored, workdir)
    assert results == {k: v for k, v in summary.items() if k == "step" or k in tested}

    # The average is loaded, so it gives the metrics without a suffix.
    model, variables = load_pretrained(workdir)
    bunch = load_digits()
    images = np.repeat(np.rint(bunch.images[::5] * (255 / 16))[..., None], 3, axis=-1)
    logits = np.float64(jax.jit(model.apply)(variables, jnp.float32(images / 127.5 - 1)))
    labels = bunch.target[::5]
    assert (logits.argmax(axis=-1) == labels).mean() == pytest.approx(summary["test/top1"])
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    smoothed = 0.9 * np.eye(10)[labels] + 0.1 / 10  # the config's label smoothing
    loss = -(smoothed * log_p).sum(axis=-1).mean()
    assert loss == pytest.approx(summary["test/loss"], rel=1e-5)
    assert abs(loss - summary["test/loss"]) < abs(loss - summary["test/loss_raw"])


def test_a_run_without_the_average_is_refused_by_name(finished, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run")
    with at_fault("optimizer.ema_decay"):
        train_and_evaluate(make_config(optimizer__ema_decay="0.9"), run)


def test_layers_whose_gradients_are_not_finite_are_named():
    nan, inf = float("nan"), float("inf")
    norms = {"embedding": nan, "encoder/layer_0": nan, "encoder/layer_1": inf, "head": 1.0}
    values = {"loss": 1.0, "grad_norm": nan, "update_norm/head": nan}
    values |= {f"grad_norm/{part}": norm for part, norm in norms.items()}
    with pytest.raises(NonFiniteError) as error:
        check_finite([(17, values)], None)
    assert str(error.value).startswith(
        "step 17: grad_norm is nan, non-finite gradients in embedding, encoder/layer_0, "
        "encoder/layer_1; nothing is saved"
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_every_value_that_is_not_finite_is_named(value):
    steps = [(3, {"loss": 1.0}), (4, {"loss": float(value)})]
    with pytest.raises(NonFiniteError, match=f"^step 4: loss is {value}; .*step 2"):
        check_finite(steps, 2)


def test_init_from_another_architecture_of_the_same_shapes_is_refused(finished, tmp_path):
    config = make_config(init_from=str(finished[0]), model__num_heads="4", model__gelu="exact")
    with at_fault("model.gelu", "model.num_heads"):
        train_and_evaluate(config, tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_time_goes_on_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "compile_step", count_steps())
    monkeypatch.setattr(record, "evaluate", lambda *_: {"test/top1": 0.5})

    def should_stop(guard, step):
        return step == 12

    with monkeypatch.context() as patch, pytest.raises(loop.Preempted):
        patch.setattr(loop.PreemptionGuard, "should_stop", should_stop)
        train_and_evaluate(make_config(duration="16 steps"), tmp_path)
    saved = restore.read_meta(epath.Path(tmp_path / "checkpoints/12"))["train_s"]
    summary = train_and_evaluate(make_config(duration="16 steps"), tmp_path)
    found = {row["step"]: row["time/seconds"] for row in rows(tmp_path) if "time/seconds" in row}
    assert [*found] == [5, 10, 12, 15, 16]  # at the stop, too
    assert 0 < found[5] < found[10] < found[12] == saved < found[15] < found[16]
    assert summary["images_per_s"] == 16 * 64 / found[16]


@pytest.mark.slow
def test_chosen_steps_are_traced(tmp_path):
    train_and_evaluate(make_config(duration="4 steps", log__profile="1:3"), tmp_path)
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert traces and traces[0].stat().st_size > 0


@pytest.mark.parametrize(
    ("platform", "gib", "said"),
    [("cpu", 3, True), ("cpu", 1, False), ("gpu", 9, True), ("gpu", 7, False),
     ("other", 99, False)],
)  # fmt: skip
def test_more_memory_than_there_is_is_said_with_what_saves_some(
    platform, gib, said, monkeypatch, caplog
):
    """Two CPUs share the 4 GiB of a host; a GPU has 8 GiB of its own."""
    monkeypatch.setattr(loop.psutil, "virtual_memory", lambda: types.SimpleNamespace(total=4 << 30))
    stats = {"bytes_limit": 8 << 30} if platform == "gpu" else None
    device = types.SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    mesh = types.SimpleNamespace(local_devices=[device] * 2, size=2, shape={"fsdp": 1})
    experiment = types.SimpleNamespace(
        objective=types.SimpleNamespace(couples_rows=False),
        model=types.SimpleNamespace(remat="none"),
    )
    run = types.SimpleNamespace(mesh=mesh, experiment=experiment)
    loop.warn_of_memory(run, gib << 30)
    remedies = ("global_batch_size", "accum_steps", "remat=full", "mesh.fsdp")
    assert [name in caplog.text for name in remedies] == [said] * 4
    experiment.model.remat, experiment.objective.couples_rows, mesh.size = "full", True, 1
    caplog.clear()
    loop.warn_of_memory(run, 99 << 30, gib << 30)  # unless that has been warned of
    is_due = platform != "other" and not said
    assert [name in caplog.text for name in remedies] == [is_due, False, False, False]


def test_a_loss_that_did_not_fall_is_the_last_word(finished, monkeypatch, caplog):
    workdir, summary = finished
    run = prepare(make_config(), workdir)
    caplog.set_level("INFO", "vit_jax")
    assert write_summary(run) == summary
    assert "did not fall" not in caplog.text
    rows = [{"step": 5, "train/loss": 2.0}, {"step": 9, "train/loss": None},
            {"step": 10, "train/loss": 2.5}, {"step": 10, "test/top1": 0.5}]  # fmt: skip
    monkeypatch.setattr("vit_jax.run.summary.read_history", lambda _: rows)
    write_summary(run)
    assert caplog.messages[-1].endswith("train/loss is 2.5 at step 10 and was 2 at step 5")
    objective = dataclasses.replace(run.experiment.objective, needs=("image",))
    run = dataclasses.replace(
        run, experiment=dataclasses.replace(run.experiment, objective=objective)
    )
    write_summary(run)  # of a run whose evaluator has labels
    assert "what the features are worth" not in caplog.text
    settings = dataclasses.replace(run.settings, evals={})
    write_summary(dataclasses.replace(run, settings=settings))
    assert "evaluate --init_from=" in caplog.messages[-1]


def test_a_state_that_does_not_fit_is_said_before_it_is_made(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loop.psutil, "virtual_memory", lambda: types.SimpleNamespace(total=1))
    monkeypatch.setattr("vit_jax.run.train.restore_from_memory", stop_here)
    with pytest.raises(Started):
        train_and_evaluate(make_config(), tmp_path / "run")
    assert "expected to take at least" in caplog.text


def test_a_step_that_does_not_fit_is_said_before_it_compiles(tmp_path, monkeypatch, caplog):
    config = make_config()
    config.global_batch_size, config.optimizer.accum_steps = 1 << 15, 1
    run = prepare(config, tmp_path)
    monkeypatch.setattr(jax.stages.Traced, "lower", stop_here)
    for mib in (1000, 100):  # it takes 250
        there = types.SimpleNamespace(total=mib << 20)
        monkeypatch.setattr(loop.psutil, "virtual_memory", lambda there=there: there)
        assert not caplog.messages
        with pytest.raises(Started), jax.set_mesh(run.mesh):
            loop.compile_step(run)
    assert "expected to take at least" in caplog.text


@pytest.mark.parametrize(("evaluates", "tokens"), [(True, [1, 4]), (False, [1])])
def test_kernels_are_checked_for_evaluations_too(evaluates, tokens, tmp_path, monkeypatch):
    """Which see all patches, where training keeps some."""
    config, passed = make_config(model__keep_tokens="0.25"), []

    def stop(passes, mesh):
        passed.extend(each.model.num_tokens_in_training for each in passes)
        raise Started

    monkeypatch.setattr("vit_jax.run.train.check_kernels", stop)
    if not evaluates:
        config.evals = {}
    with pytest.raises(Started):
        train_and_evaluate(config, tmp_path / "run")
    assert passed == tokens
