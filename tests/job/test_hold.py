"""One job at a time trains in a workdir: processes here, and files as others leave them."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest
from etils import epath

from vit_jax import files, metrics
from vit_jax.errors import InputError
from vit_jax.job import hold
from vit_jax.job.hold import Hold, LostHoldError, check_free
from vit_jax.metrics import writers
from vit_jax.training import record


@pytest.fixture
def workdir(tmp_path):
    path = epath.Path(tmp_path) / "run"
    path.mkdir()
    return path


@pytest.fixture
def other():
    """A process that lives until the test kills it."""
    process = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def held_by(workdir, **changes):
    """Leaves the file of another process in `workdir`."""
    holder = dataclasses.replace(hold._this_process(workdir), **changes)
    (workdir / "held_by.json").write_text(json.dumps(dataclasses.asdict(holder)))


def set_age(workdir, seconds):
    now = time.time()
    os.utime(workdir / "held_by.json", (now - seconds, now - seconds))


def test_a_second_process_is_refused_until_the_first_is_gone(workdir, other):
    start = hold.pid_start(other.pid)
    held_by(workdir, host="n7", pid=other.pid, pid_start=start, since=time.time() - 7200)
    with pytest.raises(
        InputError,
        match=rf"run: process {other.pid} on n7 has been training there for 2\.0 h; wait until",
    ):
        check_free(workdir)
    with pytest.raises(InputError, match=f"process {other.pid}"):
        Hold(workdir)
    other.kill()
    deadline = time.monotonic() + 60
    while hold.pid_start(other.pid) is not None:  # a zombie, for which nobody has waited
        assert time.monotonic() < deadline
    check_free(workdir)
    first = Hold(workdir)
    assert json.loads((workdir / "held_by.json").read_text())["pid"] == os.getpid()
    first.release()
    assert not any(workdir.iterdir())


def test_a_process_id_that_was_given_again_does_not_hold(workdir, other):
    held_by(workdir, pid=other.pid, pid_start="1")
    check_free(workdir)


def test_a_process_that_proc_hides_counts_by_its_heartbeat(workdir, other, monkeypatch):
    held_by(workdir, pid=other.pid, pid_start=hold.pid_start(other.pid))
    monkeypatch.setattr(hold, "pid_start", lambda pid: "")
    set_age(workdir, 59)
    monkeypatch.setattr(hold.time, "sleep", lambda s: os.utime(workdir / "held_by.json"))
    with pytest.raises(InputError, match=f"process {other.pid}"):
        check_free(workdir)
    set_age(workdir, 61)
    check_free(workdir)


def test_a_copy_of_a_workdir_is_free(workdir, other, tmp_path):
    held_by(workdir, pid=other.pid, pid_start=hold.pid_start(other.pid))
    shutil.copytree(workdir, tmp_path / "copy")
    check_free(epath.Path(tmp_path / "copy"))
    shutil.move(workdir, tmp_path / "moved")
    with pytest.raises(InputError, match=str(other.pid)):
        check_free(epath.Path(tmp_path / "moved"))


def test_from_elsewhere_it_waits_for_an_old_heartbeat_and_says_so(workdir, monkeypatch, caplog):
    held_by(workdir, place="another boot", host="n7", pid=17)
    set_age(workdir, 61)
    check_free(workdir)  # at once
    assert not caplog.records

    set_age(workdir, 50)
    slept = []
    monkeypatch.setattr(hold.time, "sleep", lambda s: slept.append(s) or set_age(workdir, 60.5))
    check_free(workdir)
    assert len(slept) == 1
    assert "process 17 on n7 has held it for 0 s" in caplog.text
    assert "waiting up to 10 s" in caplog.text
    assert [p.name for p in workdir.iterdir()] == ["held_by.json"]


def test_from_elsewhere_a_heartbeat_refuses(workdir, monkeypatch):
    held_by(workdir, place="another boot", host="n7", pid=17)
    set_age(workdir, 5)
    monkeypatch.setattr(hold.time, "sleep", lambda s: os.utime(workdir / "held_by.json"))
    with pytest.raises(InputError, match=r"process 17 on n7 has been training there"):
        check_free(workdir)


def test_the_heartbeat_keeps_the_file_young(workdir, monkeypatch):
    monkeypatch.setattr(hold, "_BEAT_S", 0.01)
    first = Hold(workdir)
    set_age(workdir, 100)
    deadline = time.monotonic() + 60
    while hold._heartbeat_age(workdir) > 50:
        assert time.monotonic() < deadline
    first.release()


def test_a_process_whose_workdir_was_taken_writes_nothing_and_leaves_the_other_its_hold(
    workdir, monkeypatch
):
    monkeypatch.setattr(writers, "open_for_append", files.StoredObject)
    first = Hold(workdir)
    first.check(fresh=True)
    writer = metrics.MetricWriter(workdir, may_write=first.is_ours)
    writer.write(5, {"train/loss": 1.0})
    held_by(workdir, place="another boot", host="n7", pid=17)
    metrics.MetricWriter(workdir, restored_step=None).close()
    first.check(fresh=False)  # the heartbeat has not looked yet
    with pytest.raises(LostHoldError, match=r"process 17 on n7 trains there now.*without saving"):
        first.check(fresh=True)
    with pytest.raises(LostHoldError):
        first.check(fresh=False)
    writer.flush()
    writer.close()
    first.release()
    assert (workdir / "held_by.json").exists()
    assert (workdir / "metrics.jsonl").read_text() == ""


def test_files_are_not_opened_once_the_workdir_was_taken(workdir):
    first = Hold(workdir)
    held_by(workdir, place="another boot", host="n7", pid=17)
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(LostHoldError):
        record.open_writer(None, None, first)
    first.release()
    assert (workdir / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_heartbeat_notices_the_loss(workdir, monkeypatch):
    monkeypatch.setattr(hold, "_BEAT_S", 0.01)
    first = Hold(workdir)
    held_by(workdir, place="another boot", host="n7", pid=17)
    deadline = time.monotonic() + 60
    with pytest.raises(LostHoldError):
        while time.monotonic() < deadline:
            first.check(fresh=False)
    first.release()


def test_a_hold_that_is_kept_outlasts_its_release(workdir):
    first = Hold(workdir)
    first.keep()
    first.release()
    with pytest.raises(InputError, match=f"process {os.getpid()}"):
        check_free(workdir)
    first._ended.set()


def fail(*args, **kwargs):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("name", ["_read", "write_whole", "_inode"])
def test_a_disk_that_fails_is_told_with_the_remedy(workdir, monkeypatch, name):
    monkeypatch.setattr(hold, name, fail)
    with pytest.raises(InputError, match=r"--workdir=.*held_by\.json.*Disk quota exceeded; make "):
        Hold(workdir)


def test_a_disk_that_fails_for_less_than_a_heartbeat_may_be_old_loses_nothing(workdir, monkeypatch):
    first = Hold(workdir)
    monkeypatch.setattr(hold, "_read", fail)
    first.check(fresh=True)
    beats, turns = [], iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(first, "_beat", lambda: beats.append("beat"))
        patch.setattr(first, "_ended", types.SimpleNamespace(wait=lambda s: next(turns)))
        first._keep_beating()
    assert not beats  # the file may name another process
    now = time.monotonic()
    monkeypatch.setattr(hold.time, "monotonic", lambda: now + 61)
    with pytest.raises(LostHoldError, match=r"cannot be read: Disk quota"):
        first.check(fresh=True)
    monkeypatch.undo()
    first.release()


def test_without_the_id_of_the_boot_only_the_heartbeat_decides(workdir, other, monkeypatch):
    """A process id may mean another process after a reboot, or in another container."""
    monkeypatch.setattr(hold.os, "readlink", fail)
    held_by(workdir, pid=other.pid, pid_start="1")
    set_age(workdir, 5)
    monkeypatch.setattr(hold.time, "sleep", lambda s: os.utime(workdir / "held_by.json"))
    with pytest.raises(InputError, match=f"process {other.pid}"):
        check_free(workdir)


def test_of_many_that_start_at_once_one_holds(workdir):
    held_by(workdir, pid=2**22 + 1)  # that nobody can have: a killed run's
    barrier, holds, refused = threading.Barrier(8), [], []

    def start():
        barrier.wait()
        try:
            holds.append(Hold(workdir))
        except InputError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(holds) == 1 and len(refused) == 7
    holds[0].release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": 3}', "[]"])
def test_a_file_that_cannot_be_read_counts_by_its_age(workdir, monkeypatch, content):
    (workdir / "held_by.json").write_text(content)
    set_age(workdir, 59)
    monkeypatch.setattr(hold.time, "sleep", lambda s: set_age(workdir, 61))
    check_free(workdir)


def test_a_run_that_ends_while_its_heartbeat_is_looked_at_does_not_hold(workdir, monkeypatch):
    held_by(workdir, place="another boot", host="n7", pid=17)
    age = hold._heartbeat_age

    def release_and_look(workdir):
        (workdir / "held_by.json").unlink()
        return age(workdir)

    monkeypatch.setattr(hold, "_heartbeat_age", release_and_look)
    check_free(workdir)
    assert not any(workdir.iterdir())
