"""One job at a time trains in a workdir: processes here, and files as others leave them."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from at_fault import at_fault
from etils import epath

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.job import lock
from vit_jax.job.lock import Holder, Lock, LostLockError, check_free
from vit_jax.run import record, writers


@pytest.fixture
def workdir(tmp_path):
    path = epath.Path(tmp_path) / "run"
    path.mkdir()
    return path


def held_by(workdir, host="n7"):
    """Leaves the file of another process in `workdir`, as a killed one leaves it."""
    holder = Holder(host, 17, time.time() - 7200, "another")
    (workdir / "held_by.json").write_text(json.dumps(dataclasses.asdict(holder)))


def set_age(workdir, seconds):
    now = time.time()
    os.utime(workdir / "held_by.json", (now - seconds, now - seconds))


# Starts as soon as it is free, says so, and trains until it is killed.
TRAIN = """
import sys, time
from etils import epath
from vit_jax.job.lock import Lock
Lock(epath.Path(sys.argv[1]))
print("trains", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(workdir):
    """In containers, if they can be made here: both may have the same host name and process id."""
    container = "unshare", "--pid", "--fork", "--kill-child"
    if subprocess.run([*container, "true"], capture_output=True).returncode:
        container = ()  # needs root
    command = [*container, sys.executable, "-c", TRAIN, str(workdir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "trains\n"
            pid = json.loads((workdir / "held_by.json").read_text())["pid"]
            for start in (check_free, Lock):
                with at_fault("--workdir"):
                    start(workdir)
            second = subprocess.run(command, capture_output=True, text=True, timeout=30)
            assert second.returncode != 0 and f"process {pid} on" in second.stderr
            assert (pid < 10) == bool(container)
        finally:
            first.kill()
    check_free(workdir)
    own = Lock(workdir)
    assert json.loads((workdir / "held_by.json").read_text())["pid"] == os.getpid()
    own.release()
    assert not any(workdir.iterdir())


def test_a_link_in_the_place_of_the_file_is_not_followed(workdir, tmp_path):
    (tmp_path / "mine").write_text("mine")
    pathlib.Path(workdir / "held_by.json").symlink_to(tmp_path / "mine")
    for hold in (lock.Lock, lock.check_free):
        with pytest.raises(InputError, match=r"held_by\.json is a link.*; remove it"):
            hold(workdir)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_copy_of_a_workdir_is_free(workdir, tmp_path):
    first = Lock(workdir)
    shutil.copytree(workdir, tmp_path / "copy")
    check_free(epath.Path(tmp_path / "copy"))
    shutil.move(workdir, tmp_path / "moved")
    with at_fault("--workdir"):
        check_free(epath.Path(tmp_path / "moved"))
    first.release()


@pytest.fixture(params=["of another host", "on a disk without locks"])
def unseen(request, workdir, monkeypatch):
    """A holder without a lock that this process can see; only its heartbeat shows that it runs."""
    if request.param == "of another host":
        held_by(workdir)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", fail)
        held_by(workdir, socket.gethostname())


@pytest.mark.usefixtures("unseen")
def test_it_waits_for_an_old_heartbeat_and_says_so(workdir, monkeypatch, caplog):
    set_age(workdir, 61)
    check_free(workdir)  # at once
    assert not caplog.records

    set_age(workdir, 50)
    slept = []
    monkeypatch.setattr(lock.time, "sleep", lambda s: slept.append(s) or set_age(workdir, 60.5))
    check_free(workdir)
    assert len(slept) == 1
    assert "process 17 on " in caplog.text and " has held it for 2:00:00" in caplog.text
    assert "waiting up to 10 s" in caplog.text
    assert [p.name for p in workdir.iterdir()] == ["held_by.json"]


@pytest.mark.usefixtures("unseen")
def test_a_heartbeat_refuses(workdir, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda s: os.utime(workdir / "held_by.json"))
    for start in (check_free, Lock):
        set_age(workdir, 5)
        with at_fault("--workdir"):
            start(workdir)


def test_the_heartbeat_keeps_the_file_young(workdir, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    first = Lock(workdir)
    set_age(workdir, 100)
    deadline = time.monotonic() + 60
    while lock._heartbeat_age(workdir) > 50:
        assert time.monotonic() < deadline
    first.release()


def test_a_process_whose_workdir_was_taken_writes_nothing_and_leaves_the_other_its_hold(
    workdir, monkeypatch
):
    monkeypatch.setattr(writers, "open_for_append", files.StoredObject)
    first = Lock(workdir)
    first.check(fresh=True)
    writer = writers.MetricWriter(workdir, may_write=first.is_ours)
    writer.write(5, {"train/loss": 1.0})
    held_by(workdir)
    writers.MetricWriter(workdir, restored_step=None).close()
    first.check(fresh=False)  # the heartbeat has not looked yet
    with pytest.raises(LostLockError, match=r"names another process.*without saving"):
        first.check(fresh=True)
    with pytest.raises(LostLockError):
        first.check(fresh=False)
    writer.flush()
    writer.close()
    first.release()
    assert (workdir / "held_by.json").exists()
    assert (workdir / "metrics.jsonl").read_text() == ""


def test_files_are_not_opened_once_the_workdir_was_taken(workdir):
    first = Lock(workdir)
    held_by(workdir)
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(LostLockError):
        record.open_writer(None, None, first)
    first.release()
    assert (workdir / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_heartbeat_notices_the_loss(workdir, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    first = Lock(workdir)
    held_by(workdir)
    deadline = time.monotonic() + 60
    with pytest.raises(LostLockError):
        while time.monotonic() < deadline:
            first.check(fresh=False)
    first.release()


def test_a_lock_that_is_kept_outlasts_its_release(workdir):
    first = Lock(workdir)
    first.keep()
    first.release()
    with at_fault("--workdir"):
        check_free(workdir)
    first._ended.set()


def fail(*args, **kwargs):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("name", ["_read", "_open_locked", "_heartbeat_age"])
def test_a_disk_that_fails_is_told_with_the_remedy(workdir, monkeypatch, name):
    held_by(workdir)
    monkeypatch.setattr(lock, name, fail)
    with at_fault("--workdir"):
        Lock(workdir)


def test_a_full_disk_leaves_no_file_behind(workdir, monkeypatch):
    monkeypatch.setattr(lock.os, "pwrite", fail)
    with at_fault("--workdir"):
        Lock(workdir)
    assert not [*workdir.iterdir()]


def test_a_disk_that_fails_for_less_than_a_heartbeat_may_be_old_loses_nothing(workdir, monkeypatch):
    first = Lock(workdir)
    monkeypatch.setattr(lock, "_read", fail)
    first.check(fresh=True)
    set_age(workdir, 100)
    turns = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(first, "_ended", types.SimpleNamespace(wait=lambda s: next(turns)))
        first._keep_beating()
    assert lock._heartbeat_age(workdir) > 90  # no beat, as the file may name another process
    now = time.monotonic()
    monkeypatch.setattr(lock.time, "monotonic", lambda: now + 61)
    with pytest.raises(LostLockError, match="without saving"):
        first.check(fresh=True)
    monkeypatch.undo()
    first.release()


def test_of_many_that_start_at_once_one_holds(workdir):
    held_by(workdir, socket.gethostname())  # a killed run's
    barrier, locks, refused = threading.Barrier(8), [], []

    def start():
        barrier.wait()
        try:
            locks.append(Lock(workdir))
        except InputError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(locks) == 1 and len(refused) == 7
    locks[0].release()


@pytest.mark.parametrize("content", ["{", '{"pid": 3}', "[]"])
def test_a_file_that_cannot_be_read_counts_by_its_age(workdir, monkeypatch, content):
    (workdir / "held_by.json").write_text(content)
    set_age(workdir, 59)
    monkeypatch.setattr(lock.time, "sleep", lambda s: set_age(workdir, 61))
    check_free(workdir)


def test_a_run_that_ends_while_its_heartbeat_is_looked_at_does_not_hold(workdir, monkeypatch):
    held_by(workdir)
    age = lock._heartbeat_age

    def release_and_look(workdir):
        (workdir / "held_by.json").unlink()
        return age(workdir)

    monkeypatch.setattr(lock, "_heartbeat_age", release_and_look)
    check_free(workdir)
    assert not any(workdir.iterdir())
