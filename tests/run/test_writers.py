"""Written metrics, read back as JSON and by TensorBoard itself."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax.base import files
from vit_jax.checkpoints.history import read_history, read_values
from vit_jax.run import writers
from vit_jax.run.watch.ledger import read_past
from vit_jax.run.writers import MetricWriter


def json_rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def tensorboard_scalars(workdir):
    """{(tag, step, value)} as read by TensorBoard itself."""
    events = EventAccumulator(str(workdir)).Reload()
    return {
        (tag, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    }


def scalars_of(rows):
    return {
        (tag, row["step"], float(np.float32(value)))
        for row in rows
        for tag, value in row.items()
        if tag != "step"
    }


def write_steps(workdir, steps, loss, restored_step=None):
    """Write a row at each step without flushing or closing, as if killed."""
    writer = open_writer(workdir, restored_step=restored_step)
    for step in steps:
        writer.write(step, {"train/loss": loss, "test/top1": step / 100})


def open_writer(workdir, **fields):
    """A MetricWriter that stays open until the test is over."""
    OPEN.append(MetricWriter(workdir, **fields))
    return OPEN[-1]


OPEN = []


@pytest.fixture(autouse=True)
def close_writers():
    yield
    while OPEN:
        OPEN.pop().close()


def row(step, loss):
    return {"step": step, "train/loss": loss, "test/top1": step / 100}


@pytest.fixture(params=["local", "object store"])
def workdir(request, tmp_path, monkeypatch):
    """A workdir that does not exist yet, on disk or in a stand-in for an object store."""
    if request.param == "object store":
        monkeypatch.setattr(writers, "open_for_append", files.StoredObject)
    return tmp_path / "workdir"


def test_rows_are_read_back(workdir):
    with MetricWriter(workdir) as writer:
        writer.write(0, {"test/top1": 0.1})
        writer.write(1, {"train/loss": np.float32(2.5), "train/grad_norm": 1})
    assert json_rows(workdir) == [
        {"step": 0, "test/top1": 0.1},
        {"step": 1, "train/loss": 2.5, "train/grad_norm": 1.0},
    ]
    assert tensorboard_scalars(workdir) == scalars_of(json_rows(workdir))
    assert {path.name.split(".")[0] for path in workdir.iterdir()} == {"metrics", "events"}


def test_a_row_is_readable_at_once(tmp_path):
    write_steps(tmp_path, [1], 3.0)
    assert json_rows(tmp_path) == [row(1, 3.0)]
    assert tensorboard_scalars(tmp_path) == scalars_of([row(1, 3.0)])


def test_going_on_takes_no_memory_for_the_rows(tmp_path):
    row = {f"train/metric_{i}": 0.123 for i in range(5)} | {"time/wall_s": 1.0}
    lines = (json.dumps({"step": step, **row}) + "\n" for step in range(1, 10_001))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    workdir = writers.epath.Path(tmp_path)
    tracemalloc.start()
    assert read_past(workdir, read_history(workdir), 9000).seconds["lost"] == 0
    assert read_values(workdir, 9000, {}, "test/top1".__eq__) == {}
    open_writer(workdir, restored_step=9000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 500_000 and len(json_rows(tmp_path)) == 9000  # the file has 1.5 MB


def test_flush_is_durable(tmp_path, monkeypatch):
    writer, synced = open_writer(tmp_path), []
    monkeypatch.setattr(writers.os, "fsync", synced.append)
    writer.write(1, {"train/loss": 3.0})
    assert not synced
    writer.flush()
    assert len(set(synced)) == 2  # the JSON lines and the events


def test_flush_puts_the_whole_object(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "open_for_append", files.StoredObject)
    writer = open_writer(tmp_path)
    writer.write(1, {"train/loss": 3.0})
    writer.flush()
    writer.write(2, {"train/loss": 2.0})
    assert [row["step"] for row in json_rows(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("gs://bucket/run/metrics.jsonl", "StoredObject"), ("metrics.jsonl", "LocalFile")],
)
def test_object_stores_are_told_from_disks(path, kind, monkeypatch):
    for name in ("StoredObject", "LocalFile"):
        monkeypatch.setattr(files, name, lambda path, parts, name=name: name)
    assert files.open_for_append(writers.epath.Path(path), ()) == kind


@pytest.mark.parametrize("restored_step", [0, 20])
def test_resumed_as_if_never_killed(tmp_path, restored_step):
    before, after = range(0, restored_step + 1, 10), range(restored_step + 10, 61, 10)
    write_steps(tmp_path, range(0, 51, 10), loss=3.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 0, "train/lo')  # the kill came in the middle of a line
    write_steps(tmp_path, after, loss=2.0, restored_step=restored_step)
    expected = [row(step, 3.0) for step in before] + [row(step, 2.0) for step in after]
    assert json_rows(tmp_path) == expected
    assert tensorboard_scalars(tmp_path) == scalars_of(expected)


def test_killed_again_and_again(workdir):
    for restored_step in (None, 0, 1, 1, 2):
        first = 0 if restored_step is None else restored_step + 1
        with MetricWriter(workdir, restored_step=restored_step) as writer:
            for step in range(first, 5):
                writer.write(step, {"train/loss": first})
    expected = [{"step": s, "train/loss": loss} for s, loss in enumerate([0.0, 1.0, 2.0, 3.0, 3.0])]
    assert json_rows(workdir) == expected
    assert tensorboard_scalars(workdir) == scalars_of(expected)


def test_killed_before_the_first_row_of_the_second_try(tmp_path):
    write_steps(tmp_path, [1, 2, 3], loss=3.0)
    write_steps(tmp_path, [], loss=2.0, restored_step=2)
    assert tensorboard_scalars(tmp_path) == scalars_of([row(1, 3.0), row(2, 3.0)])


@pytest.mark.parametrize(
    "line", ['{"step": 2,, "a": 1}', '{"stop": 2}', '{"step": null}', "[2]", "2", "\xff"]
)
def test_a_damaged_line_stays_and_is_said_once(tmp_path, line, caplog):
    whole = ['{"step": 1}', '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_bytes(
        "\n".join([whole[0], line, whole[1], '{"step": 4', ""])[:-1].encode("latin-1")
    )
    assert [row["step"] for row in read_history(tmp_path)] == [1, 3]
    write_steps(tmp_path, [], loss=2.0, restored_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes().decode("latin-1").splitlines() == [
        whole[0], line,
    ]  # fmt: skip
    assert [r.getMessage().partition(": ")[2][:33] for r in caplog.records] == [
        "line 2 is damaged and not read; r"
    ]


def test_an_event_file_of_another_writer_is_no_obstacle(tmp_path):
    (tmp_path / "events.out.tfevents.mine").touch()
    write_steps(tmp_path, [1], loss=2.0)
    assert tensorboard_scalars(tmp_path) == scalars_of([row(1, 2.0)])


def test_from_scratch_drops_everything(tmp_path):
    write_steps(tmp_path, [0, 1, 2], loss=3.0)
    write_steps(tmp_path, [1], loss=2.0)
    assert json_rows(tmp_path) == [row(1, 2.0)]
    assert tensorboard_scalars(tmp_path) == scalars_of([row(1, 2.0)])


def test_a_host_whose_clock_lags_comes_last_all_the_same(tmp_path, monkeypatch):
    write_steps(tmp_path, [1, 2, 3], loss=3.0)
    now = writers.time.time()
    monkeypatch.setattr(writers.time, "time", lambda: now - 3600)
    write_steps(tmp_path, [2, 3], loss=2.0, restored_step=1)
    expected = [row(1, 3.0), row(2, 2.0), row(3, 2.0)]
    assert tensorboard_scalars(tmp_path) == scalars_of(expected)


def test_not_finite_is_null_in_json_and_itself_in_tensorboard(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    with MetricWriter(tmp_path) as writer:
        writer.write(1, values)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}
    assert json.loads(line, parse_constant=refuse) == expected
    read = {tag: value for tag, _, value in tensorboard_scalars(tmp_path)}
    np.testing.assert_equal(read, values)


def test_processes_other_than_0_write_nothing(tmp_path):
    with MetricWriter(tmp_path, writes=False, wandb_project="digits") as writer:
        writer.write(1, {"train/loss": 2.0})
        writer.flush()
    assert not list(tmp_path.iterdir())
