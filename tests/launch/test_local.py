"""Processes on this host: their devices, logs and ends."""

import json
import os
import pathlib
import re
import shlex
import signal
import sys

import pytest

QUICKSTART = "--config=configs/quickstart.py:debug"


@pytest.fixture
def on_cpu(local, monkeypatch):
    monkeypatch.setattr(local, "visible_gpus", list)


@pytest.fixture
def scripts(local, monkeypatch):
    """scripts(*texts): use these Python scripts as the processes of the job."""
    monkeypatch.setattr(local, "_GRACE_S", 0.2)

    def scripts(*texts):
        commands = [[sys.executable, "-c", text] for text in texts]
        monkeypatch.setattr(local, "commands", lambda job, num_processes: commands)

    return scripts


def start(call, local, workdir, num_processes=2):
    return call(
        local, f"--num_processes={num_processes}", "--platform=cpu", "--",
        QUICKSTART, f"--workdir={workdir}",
    )  # fmt: skip


# Devices


def test_gpus_are_split(local):
    def shares(*args):
        return [e["CUDA_VISIBLE_DEVICES"] for e in local.device_environments(*args)]

    assert shares(2, None, list("01234567")) == ["0,1,2,3", "4,5,6,7"]
    assert shares(2, 1, list("357")) == ["3", "5"]
    assert shares(1, None, ["GPU-a"]) == ["GPU-a"]


def test_gpus_of_the_host(local, monkeypatch):
    monkeypatch.setattr(local.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia3"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.visible_gpus() == ["0", "1"]  # as CUDA counts visible devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert local.visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.visible_gpus() == []


def test_dry_run_prints_what_would_run_and_does_nothing(local, call, on_cpu, tmp_path):
    workdir = tmp_path / "work dir"
    code, out, err = call(
        local, "--num_processes=2", "--devices_per_process=3", "--dry_run", "--",
        QUICKSTART, f"--workdir={workdir}", "--config.log.every=7 steps",
    )  # fmt: skip
    assert (code, err) == (0, "")
    made, other, main = out.splitlines()
    assert shlex.split(made) == ["mkdir", "-p", f"{workdir}/logs"]
    words = shlex.split(main)
    assert words[:2] == ["JAX_PLATFORMS=cpu", "JAX_NUM_CPU_DEVICES=3"]
    assert words[2:8] == [
        sys.executable, "-m", "vit_jax.main", QUICKSTART, f"--workdir={workdir}",
        "--config.log.every=7 steps",
    ]  # fmt: skip
    assert words[9:] == [
        "--num_processes=2", "--process_id=0", "2>&1", "|", "tee", "-a",
        f"{workdir}/logs/process_0.log",
    ]  # fmt: skip
    port = words[8].removeprefix("--coordinator=localhost:")
    assert port.isdigit() and f"--coordinator=localhost:{port} " in other
    assert "--process_id=1" in other and other.endswith("process_1.log' > /dev/null &")
    assert not workdir.exists()


def test_processes_that_do_not_divide_the_gpus(local, refused, monkeypatch):
    monkeypatch.setattr(local, "visible_gpus", lambda: list("01234567"))
    job = ["--", QUICKSTART, "--workdir=W"]
    says = refused(local, "--num_processes=3", *job)
    assert "--num_processes=3: does not divide the 8 GPUs of this host; give 1 or 2 or 4" in says
    says = refused(local, "--num_processes=3", "--devices_per_process=4", *job)
    assert "this host has 8 GPUs; lower one of them, or use --platform=cpu" in says


def test_workdir_that_cannot_be_made(local, call, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, out, err = start(call, local, tmp_path / "file/workdir")
    assert (code, out) == (2, "") and f"--workdir={tmp_path}/file/workdir: " in err


# How processes end


def test_one_that_fails_ends_all(local, call, scripts, tmp_path):
    waits = "import time; print('waits', flush=True); time.sleep(1000)"
    waiting = f"while not open({str(tmp_path / 'w/logs/process_0.log')!r}).read(): pass"
    scripts(waits, f"{waiting}\nprint('no such thing'); raise SystemExit(7)")
    code, out, err = start(call, local, tmp_path / "w")
    assert (code, out) == (7, "waits\n")
    assert "error: process 1 failed with exit code 7; its last lines:\n  no such thing\n" in err
    assert f"full log: {tmp_path}/w/logs/process_1.log" in err
    assert (tmp_path / "w/logs/process_0.log").read_text() == "waits\n"
    assert (tmp_path / "w/logs/process_1.log").read_text() == "no such thing\n"
    scripts("print('error: disk full'); [print(i) for i in range(30)]; raise SystemExit(2)")
    _, _, err = start(call, local, tmp_path / "w", num_processes=1)
    assert "its last lines:\n  error: disk full\n  ...\n  10\n" in err
    scripts(waits, "raise SystemExit(130)")  # one that a person has stopped
    code, out, err = start(call, local, tmp_path / "w")
    assert code == 130 and "restart" not in out


def test_one_that_is_killed_restarts_all(local, call, scripts, tmp_path):
    waits = "import time; print('waits', flush=True); time.sleep(1000)"
    waiting = f"while not open({str(tmp_path / 'w/logs/process_0.log')!r}).read(): pass"
    scripts(waits, f"import os\n{waiting}\nos.kill(os.getpid(), 9)")
    code, out, err = start(call, local, tmp_path / "w")
    assert code == 128 + 9 and err.count("process 1 was ended by SIGKILL") == 4
    assert re.findall("restart . of at most 3; running the same command again", out)[2:] == [
        "restart 3 of at most 3; running the same command again"
    ]
    # The logs of earlier starts stay.
    assert (tmp_path / "w/logs/process_0.log").read_text().startswith("waits\n")


def test_wrong_input_leaves_nothing(local, call, scripts, tmp_path):
    scripts("import sys; print('error: mesh.data=3', file=sys.stderr); sys.exit(2)")
    code, _, err = start(call, local, tmp_path / "w", num_processes=1)
    assert code == 2 and "mesh.data=3" in err
    assert list(tmp_path.iterdir()) == []


PREEMPTED_ONCE = """
import os, pathlib, signal, sys, time
mark = pathlib.Path({mark!r})
if mark.exists():
    print("resumes"); sys.exit(0)
print("saves", flush=True); mark.touch()
while len(list(mark.parent.glob("mark*"))) < 2: time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(75)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_preempted_job_starts_again(local, call, scripts, tmp_path, end):
    scripts(*(PREEMPTED_ONCE.format(mark=str(tmp_path / f"mark{i}"), end=end) for i in range(2)))
    code, out, err = start(call, local, tmp_path / "w")
    assert (code, err) == (0, "")
    assert out == "saves\npreempted; running the same command again\nresumes\n"


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_stopped_from_outside_it_waits_and_ends(
    local, call, scripts, tmp_path, number, expected, request
):
    """Each process is told to stop, saves, and is not restarted."""
    told = "signal.SIGINT" if number == signal.SIGINT else "signal.SIGTERM"
    tell = f"os.kill(os.getppid(), {int(number)})"
    script = f"""
import os, signal, sys, time
def save(*args):
    print("saves", flush=True); time.sleep(0.5); print("saved"); sys.exit(75)
signal.signal({told}, save)
{{then}}
while True: time.sleep(0.1)  # one long sleep would begin after a signal that came just before
"""
    mark = f"open({str(tmp_path / 'ready')!r}, 'w')"
    wait = f"while not os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.01)"
    scripts(script.format(then=f"{wait}\n{tell}"), script.format(then=mark))
    earlier = signal.signal(number, signal.default_int_handler)  # ignored under nohup
    request.addfinalizer(lambda: signal.signal(number, earlier))
    before = signal.getsignal(number)
    code, out, err = start(call, local, tmp_path / "w")
    assert (code, out, err) == (expected, "saves\nsaved\n", "")
    assert (tmp_path / "w/logs/process_1.log").read_text() == "saves\nsaved\n"
    assert signal.getsignal(number) == before


# Real runs


@pytest.mark.slow
def test_two_processes_with_two_devices(local, call, on_cpu, tmp_path, pytestconfig):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pytestconfig.cache.mkdir("jax"))
    try:
        code, out, err = call(
            local, "--num_processes=2", "--devices_per_process=2", "--",
            QUICKSTART, f"--workdir={tmp_path}", "--config.evals.test.every=10 steps",
            "--config.duration=10 steps",
        )  # fmt: skip
    finally:
        del os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert (code, err) == (0, "")
    assert "devices: 4 x cpu on 2 host(s); mesh: replica 1, data 4" in out
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 10
    logs = tmp_path / "logs"
    assert "step 10/10" in out and out == (logs / "process_0.log").read_text()
    assert "step 10/10" not in (logs / "process_1.log").read_text()


@pytest.mark.slow
def test_quickstart_reaches_the_accuracy_of_one_process(local, call, on_cpu, tmp_path):
    code, _, err = call(
        local, "--num_processes=2", "--devices_per_process=2", "--",
        "--config=configs/quickstart.py", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert code == 0, err
    summary = json.loads(pathlib.Path(tmp_path, "summary.json").read_text())
    assert summary["test/top1"] >= 0.97
