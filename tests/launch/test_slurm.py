"""The batch script, and a real one-node Slurm that runs it."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

import pytest

QUICKSTART = "--config=configs/quickstart.py:debug"
NODE = pathlib.Path(__file__).parent / "slurm_node.sh"


def run_script(script, folder, srun_ends_with):
    """Run a batch script like Slurm: (exit code, words of srun, words of scontrol requeue)."""
    stand_ins = {
        "srun": f"printf '%s\\0' \"$@\" > {folder}/srun; exit {srun_ends_with}",
        "scontrol": f'[ "$1" = requeue ] && echo "$2" > {folder}/requeued || printf "n3\\nn4\\n"',
    }
    for name, text in stand_ins.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    of_slurm = {"SLURM_JOB_ID": "5000", "SLURM_JOB_NODELIST": "n[3-4]"}
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | of_slurm | {"PATH": f"{folder}/bin:{os.environ['PATH']}"},
    )
    requeued = folder / "requeued"
    srun = (folder / "srun").read_bytes().decode().split("\0")[:-1]
    return done.returncode, srun, requeued.read_text().split() if requeued.exists() else []


def test_dry_run_on_gpus(slurm, call, tmp_path):
    workdir = tmp_path / "work dir"
    code, out, err = call(
        slurm, "--nodes=2", "--gpus_per_node=8", "--processes_per_node=2", "--cpus_per_process=12",
        "--time=1-00:00:00", "--save_s=600", "--sbatch=--partition=gpu", "--dry_run", "--",
        QUICKSTART, f"--workdir={workdir}", "--config.log.every=7 steps",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert not workdir.exists()
    made, sbatch, *script, end = out.splitlines()
    assert shlex.split(made) == ["mkdir", "-p", f"{workdir}/logs"]
    assert (sbatch, script[0], end) == ("sbatch <<'END'", "#!/bin/bash", "END")
    options = [line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")]
    assert [shlex.split(option)[0] for option in options] == [
        "--job-name=work-dir", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=12",
        "--gpus-per-node=8", "--time=1-00:00:00", "--signal=TERM@600",
        f"--output={workdir}/logs/slurm.log", "--open-mode=append", "--requeue", "--partition=gpu",
    ]  # fmt: skip

    _, srun, requeued = run_script("\n".join(script), tmp_path, srun_ends_with=75)
    assert requeued == ["5000"]
    at = srun.index("bash")
    assert srun[:at] == [
        "--cpus-per-task=12", "--wait=600", f"--output={workdir}/logs/process_%t.log",
        "--open-mode=append",
    ]  # fmt: skip
    bash, option, task, name, *process = srun[at:]
    assert process == [
        sys.executable, "-m", "vit_jax.main", QUICKSTART, f"--workdir={workdir}",
        "--config.log.every=7 steps", "--config.mesh.platform=gpu",
    ]  # fmt: skip
    # Arguments of task 3 of 4, the second on its node.
    shows = "import os, sys; print(os.environ['JAX_LOCAL_DEVICE_IDS'], *sys.argv[1:])"
    shown = subprocess.run(
        [bash, option, task, name, sys.executable, "-c", shows],
        env={"PATH": os.environ["PATH"], "COORDINATOR": "n3:62344", "SLURM_NTASKS": "4",
             "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split() == [
        "4,5,6,7", "--coordinator=n3:62344", "--num_processes=4", "--process_id=3"
    ]  # fmt: skip
    assert "export COORDINATOR=$host:$((61440 + SLURM_JOB_ID % 4096))" in script


SWEEP = ("--sweep=optimizer.peak_lr=1e-3,3e-3", "--sweep=seed=0,1")


def test_a_study_is_one_array(slurm, call, tmp_path):
    workdir = tmp_path / "my sweep"
    done = workdir / "peak_lr_1e-3__seed_1"
    done.mkdir(parents=True)
    (done / "summary.json").write_text('{"step": 40, "test/top1": 0.5}')
    words = ["study", QUICKSTART, f"--workdir={workdir}", *SWEEP]
    code, out, err = call(slurm, "--gpus_per_node=1", "--dry_run", "--", *words)
    assert code == 0 and err.startswith("warning: --cpus_per_process: not given; ")
    flags = ("--gpus_per_node=1", "--sbatch=--cpus-per-gpu=8", "--dry_run")
    assert call(slurm, *flags, "--", *words)[2] == ""
    made, _, *script, _ = out.splitlines()
    names = ["peak_lr_1e-3__seed_0", "peak_lr_3e-3__seed_0", "peak_lr_3e-3__seed_1"]
    logs = [f"{workdir}/logs", *(f"{workdir}/{name}/logs" for name in names)]
    assert shlex.split(made) == ["mkdir", "-p", *logs]
    assert "#SBATCH --array=0-2" in script and "#SBATCH --job-name=my-sweep" in script
    assert f"#SBATCH --output='{workdir}/logs/slurm_%a.log'" in script
    # The last task of an array has the array's number, so that alone would requeue all tasks.
    array = "export SLURM_ARRAY_JOB_ID=5000 SLURM_ARRAY_TASK_ID=2\n" + "\n".join(script)
    _, srun, requeued = run_script(array, tmp_path, srun_ends_with=75)
    assert requeued == ["5000_2"]
    assert f"--output={workdir}/{names[2]}/logs/process_%t.log" in srun
    assert srun[srun.index("task") + 1 :] == [
        sys.executable, "-m", "vit_jax.main", QUICKSTART, "--config.optimizer.peak_lr=3e-3",
        "--config.seed=1", f"--workdir={workdir}/{names[2]}", "--config.mesh.platform=gpu",
    ]  # fmt: skip


def test_missing_data_are_said(slurm, call, tmp_path, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--config=configs/folder.py:debug", f"--workdir={tmp_path}/w"]
    for given, missing in ((tmp_path, None), (tmp_path / "no", tmp_path / "no")):
        code, _, err = call(slurm, "--dry_run", "--", *words, f"--config.data.data_dir={given}")
        said = f"warning: {missing}: does not exist here; " if missing else ""
        assert code == 0 and err.startswith(said) and bool(err) == bool(said)
    sweep = ["study", *words, "--config.study.metric=val/top1", "--sweep=seed=0,1"]
    code, _, err = call(slurm, "--dry_run", "--", *sweep)
    assert code == 2 and "data.data_dir=None: a compute node has no images there" in err
    two = "--config.data.mix=cifar100=0.25"
    _, _, err = call(slurm, "--dry_run", "--", "--config=configs/cifar10.py", words[1], two)
    assert err.startswith("warning: ~/tensorflow_datasets: does not exist here; ")
    assert err.count("does not exist here") == 1


def test_what_an_array_hands_over_is_not_handed_over_twice(slurm, call, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ncat > {tmp_path}/script\necho 77\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    workdir = tmp_path / "sweep"
    address = "--config.init_from=https://me:pass@127.0.0.1:9/a.npz"
    words = ["--", "study", QUICKSTART, f"--workdir={workdir}", *SWEEP, address]
    code, out, err = call(slurm, *words)
    assert code == 0 and err.startswith("*** hides a password")
    assert "an array of 4 runs: peak_lr_1e-3__seed_0" in out
    assert f"python -m vit_jax.main study {QUICKSTART} --workdir={workdir} {SWEEP[0]}" in out
    assert "--array=0-3" in (tmp_path / "script").read_text()
    assert address in (tmp_path / "script").read_text()  # only sbatch gets it
    assert "pass" not in out + (workdir / "handed_over.json").read_text()
    assert len(json.loads((workdir / "handed_over.json").read_text())) == 4
    assert (workdir / "peak_lr_3e-3__seed_1/logs").is_dir()
    code, _, err = call(slurm, *words)
    assert code == 2 and "no member waits" in err and "--again" in err
    code, out, _ = call(slurm, *words, "--again")
    assert code == 0 and "--again" not in out


@pytest.mark.parametrize(("ends_with", "again"), [(0, False), (1, False), (75, True), (143, True)])
def test_what_starts_again(slurm, call, tmp_path, ends_with, again):
    _, out, _ = call(slurm, "--dry_run", "--", QUICKSTART, f"--workdir={tmp_path}/w")
    script = out.partition("END'\n")[2].removesuffix("END\n")
    code, _, requeued = run_script(script, tmp_path, srun_ends_with=ends_with)
    assert code == ends_with and requeued == (["5000"] if again else [])


@pytest.mark.parametrize("word", ["--sbatch=--comment=a\nrm -r x", "--name=a\nb"])
def test_a_line_break_is_no_command_of_the_script(slurm, refused, tmp_path, word):
    says = refused(slurm, word, "--dry_run", "--", QUICKSTART, f"--workdir={tmp_path}/w")
    assert "has a line break or control character" in says and "\n" not in says.rstrip()
    says = refused(slurm, "--dry_run", "--", QUICKSTART, f"--workdir={tmp_path}/w\nrm -r x")
    assert "has a line break" in says


def test_slurm_fills_in_nothing_of_the_workdir(slurm, call, tmp_path):
    _, out, _ = call(slurm, "--dry_run", "--", QUICKSTART, f"--workdir={tmp_path}/50%j")
    assert f"#SBATCH --output={tmp_path}/50%%j/logs/slurm.log" in out
    assert f"output={tmp_path}/50%%j/logs/process_%t.log" in out


def test_without_sbatch(slurm, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    says = refused(slurm, "--", QUICKSTART, f"--workdir={tmp_path}/w")
    assert "sbatch: not found on PATH; run this on a login node of a Slurm cluster" in says


def test_sbatch_refuses(slurm, call, monkeypatch, tmp_path):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: gpux' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, out, err = call(slurm, "--", QUICKSTART, f"--workdir={tmp_path}/runs/w")
    assert (code, out) == (2, "") and "sbatch rejected the job: sbatch: error: invalid" in err
    assert not (tmp_path / "runs").exists()


def test_logs_of_a_workdir_in_an_object_store(slurm, call, monkeypatch, tmp_path):
    code, out, _ = call(slurm, "--dry_run", "--", QUICKSTART, "--workdir=gs://bucket/runs/vit_l/")
    assert code == 0
    assert "--workdir=gs://bucket/runs/vit_l/ --config.mesh.platform=cpu" in out
    assert out.startswith(f"mkdir -p {pathlib.Path.cwd()}/slurm_logs/vit-l\n")


# Real runs


@pytest.fixture
def node(monkeypatch):
    """A running Slurm; an error if it is installed but does not start."""
    if os.environ.get("VIT_JAX_REQUIRE_SLURM") != "1":
        pytest.skip(
            "installs packages and starts daemons: as root on Debian, set VIT_JAX_REQUIRE_SLURM=1"
        )
    if subprocess.run([NODE, "install"]).returncode:
        pytest.skip("Debian's packages of Slurm cannot be had here")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        try:
            subprocess.run([NODE, "start", folder], check=True, timeout=120)
            monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
            yield
        finally:
            subprocess.run([NODE, "stop", folder], check=True, timeout=120)


def state(number):
    """(state, number of restarts, exit code) of a job, from Slurm."""
    show = ["scontrol", "--oneliner", "show", "job", number]
    shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    found = dict(word.partition("=")[::2] for word in shown.split())
    return found["JobState"], int(found["Restarts"]), found["ExitCode"]


def wait_until(condition, timeout_s=300):
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + timeout_s
        time.sleep(0.2)


def submit(slurm, call, workdir):
    code, out, err = call(
        slurm, "--processes_per_node=2", "--time=00:10:00", "--", QUICKSTART,
        f"--workdir={workdir}", "--config.duration=100 steps", "--config.evals.test.every=80 steps",
    )  # fmt: skip
    assert (code, err) == (0, "")
    return out.split()[2].rstrip(";")


def test_preempted_job_is_requeued_and_resumes(node, slurm, call, tmp_path, monkeypatch, request):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(request.config.cache.mkdir("jax")))
    workdir = tmp_path / "work dir"
    number = submit(slurm, call, workdir)

    def log(name="process_0.log"):
        path = workdir / "logs" / name
        return path.read_text() if path.exists() else ""

    wait_until(lambda: "step 5/100" in log())
    subprocess.run(["scancel", "--signal=TERM", number], check=True)
    wait_until(lambda: state(number)[0] in ("COMPLETED", "FAILED", "CANCELLED"))
    assert state(number) == ("COMPLETED", 1, "0:0")
    first, resumed = log().split("to continue\n")
    step = first.rpartition("stopped by SIGTERM at step ")[2].partition(";")[0]
    assert "devices: 2 x cpu on 2 host(s)" in first
    assert f"start: resumed at step {step}" in resumed and "step 100/100" in resumed
    assert json.loads((workdir / "summary.json").read_text())["step"] == 100
    assert log("process_1.log").count("stopped by SIGTERM") == 1
    assert "Exited with exit code 75" in log("slurm.log")

    # A cancelled job does not restart.
    number = submit(slurm, call, workdir)
    wait_until(lambda: state(number)[0] == "RUNNING")
    subprocess.run(["scancel", number], check=True)
    wait_until(lambda: state(number)[0] not in ("RUNNING", "COMPLETING"))
    time.sleep(2)
    assert state(number)[:2] == ("CANCELLED", 0)
    print(log("slurm.log"), log(), sep="\n")


@pytest.mark.slow
def test_a_task_of_an_array_is_requeued_by_itself(
    node, slurm, call, tmp_path, monkeypatch, request
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(request.config.cache.mkdir("jax")))
    study = tmp_path / "study"
    code, out, err = call(
        slurm, "--time=00:10:00", "--", "study", "--config=quickstart:debug",
        f"--workdir={study}", "--sweep=seed=0,1", "--config.duration=100 steps",
        "--config.evals.test.every=80 steps",
    )  # fmt: skip
    assert (code, err) == (0, "")
    number = out.split()[2].rstrip(";")

    def log(seed):
        path = study / f"seed_{seed}/logs/process_0.log"
        return path.read_text() if path.exists() else ""

    wait_until(lambda: "step 5/100" in log(1))
    subprocess.run(["scancel", "--signal=TERM", f"{number}_1"], check=True)
    wait_until(lambda: all((study / f"seed_{i}/summary.json").exists() for i in range(2)))
    wait_until(lambda: state(f"{number}_1")[0] == "COMPLETED")
    assert state(f"{number}_1") == ("COMPLETED", 1, "0:0")
    assert state(f"{number}_0") == ("COMPLETED", 0, "0:0")
    assert "start: resumed at step" in log(1) and "start: resumed" not in log(0)
