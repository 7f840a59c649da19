"""Rows sent to W&B, read back from its offline files."""

import json
import logging
import math
import struct

import pytest

from vit_jax.config import base_config
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.writers import MetricWriter

CONFIG = {"seed": 3, "model": {"name": "ViT-mu/4", "width": None}, "data": {"mean": (0.5, 0.5)}}
BLOCK = 32768


@pytest.fixture(autouse=True)
def wandb(monkeypatch):
    """The optional package, offline; imported here, as each worker of the tests collects all."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(
        "WANDB_X_DISABLE_STATS", "true"
    )  # statistics of the machine; not tested here
    return pytest.importorskip("wandb", reason="the optional package wandb is not installed")


def read_records(path):
    """Messages of a .wandb file, a log in LevelDB's framing; checksums are not checked."""
    from wandb.proto import wandb_internal_pb2

    data, position, message = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:  # no room for a header, so the rest of the block is empty
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        message += data[position : position + size]
        position += size
        if kind in (1, 4):  # a whole message, or its end
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def read_run(path):
    """(description of the run, its config, {step: scalars}) from a .wandb file."""
    run, rows = None, {}
    for record in read_records(path):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            items = {
                item.key or item.nested_key[0]: item.value_json for item in record.history.item
            }
            step = int(items.pop("_step"))
            rows[step] = {
                k: float(json.loads(v)) for k, v in items.items() if not k.startswith("_")
            }
    config = {u.key or u.nested_key[0]: json.loads(u.value_json) for u in run.config.update}
    return run, config, rows


def recorded(wandb, workdir):
    """The .wandb files in a workdir, oldest first, after W&B's service has written them."""
    wandb.teardown()
    return sorted(workdir.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)


def open_writer(workdir, **fields):
    return MetricWriter(workdir, wandb_project="digits", config=CONFIG, **fields)


def test_config_and_rows(tmp_path, wandb):
    workdir = tmp_path / "my-run"
    with open_writer(workdir) as writer:
        writer.write(10, {"train/loss": 2.5, "time/images_per_s": 100.0})
        writer.write(10, {"test/top1": 0.25})
        writer.write(20, {"train/loss": math.nan})
    (path,) = recorded(wandb, workdir)
    run, config, rows = read_run(path)
    assert (run.project, run.display_name) == ("digits", "my-run")
    assert run.run_id == (workdir / "wandb_id").read_text()
    assert config["seed"] == 3
    assert config["model"] == {"name": "ViT-mu/4", "width": None}
    assert config["data"] == {"mean": [0.5, 0.5]}
    assert rows.keys() == {10, 20}
    assert rows[10] == {"train/loss": 2.5, "time/images_per_s": 100.0, "test/top1": 0.25}
    assert math.isnan(rows[20]["train/loss"])


def test_a_resumed_run_is_the_same_run_and_whole(tmp_path, wandb):
    """The second part has the rows that the first may have lost, and no discarded rows."""
    with open_writer(tmp_path) as writer:
        for step in (10, 20, 30):
            writer.write(step, {"train/loss": float(step)})
    first, _, _ = read_run(recorded(wandb, tmp_path)[-1])
    with open_writer(tmp_path, restored_step=20) as writer:
        writer.write(30, {"train/loss": 3.0})
        writer.write(40, {"train/loss": 4.0})
    second, _, rows = read_run(
        recorded(wandb, tmp_path)[-1]
    )  # within one second it would be the same file
    assert first.run_id == second.run_id
    assert rows == {
        10: {"train/loss": 10.0},
        20: {"train/loss": 20.0},
        30: {"train/loss": 3.0},
        40: {"train/loss": 4.0},
    }


class FakeRun:
    """A stand-in for a server that has rows up to step 24, or fails."""

    offline, url, step = False, "https://wandb.example/digits", 25

    def __init__(self, fails=False):
        self.rows, self.fails, self.finished = [], fails, False

    def log(self, scalars, step):
        if self.fails:
            raise BrokenPipeError("the service is gone")
        self.rows.append((step, scalars))

    def finish(self):
        self.finished = True


def test_no_step_is_sent_twice(tmp_path, monkeypatch, wandb):
    with MetricWriter(tmp_path) as writer:
        for step in (10, 20, 30):
            writer.write(step, {"train/loss": float(step)})
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **kwargs: run)
    with open_writer(tmp_path, restored_step=10) as writer:
        writer.write(20, {"train/loss": 2.0})
        writer.write(20, {"test/top1": 0.5})
        writer.write(25, {"train/loss": 2.5})
        writer.write(25, {"test/top1": 0.5})
    assert run.rows == [(25, {"train/loss": 2.5}), (25, {"test/top1": 0.5})]
    assert run.finished


def test_a_failure_on_the_way_ends_nothing(tmp_path, monkeypatch, caplog, wandb):
    monkeypatch.setattr(wandb, "init", lambda **kwargs: FakeRun(fails=True))
    with open_writer(tmp_path) as writer:
        for step in (30, 40):
            writer.write(step, {"train/loss": 1.0})
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "W&B failed at step 30 (the service is gone)" in record.getMessage()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_cannot_be_reached_is_recorded_offline(tmp_path, monkeypatch, caplog, wandb):
    init = wandb.init

    def unreachable(mode, **kwargs):
        if mode is None:
            raise wandb.errors.CommError("connection refused")
        return init(mode=mode, **kwargs)

    monkeypatch.setattr(wandb, "init", unreachable)
    caplog.set_level(logging.INFO, "vit_jax")
    with open_writer(tmp_path) as writer:
        writer.write(10, {"train/loss": 1.0})
    (path,) = recorded(wandb, tmp_path)
    assert read_run(path)[2] == {10: {"train/loss": 1.0}}
    assert "W&B cannot be reached (connection refused); recording offline" in caplog.text
    assert f"wandb sync {path.parent}" in caplog.text


def test_where_offline_fails_too_it_is_left_out(tmp_path, monkeypatch, caplog, wandb):
    def fails(mode, **kwargs):
        raise OSError("disk full") if mode else wandb.errors.CommError("connection refused")

    monkeypatch.setattr(wandb, "init", fails)
    with open_writer(tmp_path) as writer:
        writer.write(10, {"train/loss": 1.0})
    first, second = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "W&B cannot be reached (connection refused)" in first
    assert "W&B fails offline too (disk full)" in second
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("project", ["d-i g_i.t's", *(f"a{c}b" for c in "/\\#?%:"), 129 * "a"])
def test_what_wandb_refuses_is_refused_before(project, wandb):
    config = base_config()
    config.log.wandb = project
    faults = [fault for fault in find_faults(config) if fault.startswith("log.wandb=")]
    try:
        wandb.Settings(project=project)
        refused = False
    except Exception:
        refused = True
    assert bool(faults) == refused == (project != "d-i g_i.t's")


@pytest.mark.slow
def test_a_server_that_does_not_answer(tmp_path, monkeypatch, caplog, wandb):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    with open_writer(tmp_path) as writer:
        writer.write(10, {"train/loss": 1.0})
    assert "W&B cannot be reached" in caplog.text
    (path,) = recorded(wandb, tmp_path)
    assert read_run(path)[2] == {10: {"train/loss": 1.0}}
