"""The batch script, and a Slurm of one node that really runs it."""

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
    """Runs a batch script as Slurm would: (exit code, words of srun, words of scontrol requeue)."""
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
    # What task 3 of 4, the second on its node, is given.
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


@pytest.mark.parametrize(("ends_with", "again"), [(0, False), (1, False), (75, True), (143, True)])
def test_what_starts_again(slurm, call, tmp_path, ends_with, again):
    _, out, _ = call(slurm, "--dry_run", "--", QUICKSTART, f"--workdir={tmp_path}/w")
    script = out.partition("END'\n")[2].removesuffix("END\n")
    code, _, requeued = run_script(script, tmp_path, srun_ends_with=ends_with)
    assert code == ends_with and requeued == (["5000"] if again else [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus_per_node=8", "--processes_per_node=3", "--", QUICKSTART, "--workdir=W"],
         "--processes_per_node=3: does not divide --gpus_per_node=8; give 1, or as many as"),
        (["--nodes=0", "--", QUICKSTART, "--workdir=W"], "--nodes=0: needs a positive number"),
        (["--time=1h", "--", QUICKSTART, "--workdir=W"], "--time=1h: needs HH:MM:SS"),
        (["--sbatch=gpu", "--", QUICKSTART, "--workdir=W"], "--sbatch=gpu: no option; e.g."),
        (["--", QUICKSTART, "--workdir=W", "--config.sed=1"], "did you mean seed?"),
    ],
)  # fmt: skip
def test_refused(slurm, refused, words, says):
    assert says in refused(slurm, *words)


def test_without_sbatch(slurm, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    says = refused(slurm, "--", QUICKSTART, f"--workdir={tmp_path}/w")
    assert "sbatch: not found on PATH; call this on a login node of a Slurm cluster" in says


def test_sbatch_refuses(slurm, call, monkeypatch, tmp_path):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: gpux' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, out, err = call(slurm, "--", QUICKSTART, f"--workdir={tmp_path}/runs/w")
    assert (code, out) == (2, "") and "sbatch refused the job: sbatch: error: invalid" in err
    assert not (tmp_path / "runs").exists()


def test_logs_of_a_workdir_in_an_object_store(slurm, call, monkeypatch, tmp_path):
    code, out, _ = call(slurm, "--dry_run", "--", QUICKSTART, "--workdir=gs://bucket/runs/vit_l/")
    assert code == 0
    assert "--workdir=gs://bucket/runs/vit_l/ --config.mesh.platform=cpu" in out
    assert out.startswith(f"mkdir -p {pathlib.Path.cwd()}/slurm_logs/vit-l\n")


# The real thing


@pytest.fixture
def node(monkeypatch):
    """A running Slurm; where it is required, what fails to start is an error."""
    if os.environ.get("VIT_JAX_REQUIRE_SLURM") != "1":
        pytest.skip(
            "installs packages and starts daemons: as root on Debian, set VIT_JAX_REQUIRE_SLURM=1"
        )
    subprocess.run([NODE, "install"], check=True)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        try:
            subprocess.run([NODE, "start", folder], check=True)
            monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
            yield
        finally:
            subprocess.run([NODE, "stop", folder], check=True)


def state(number):
    """(state, number of restarts, exit code) of a job, as Slurm says."""
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
    first, resumed = log().split("which is saved\n")
    step = first.rpartition("stopped by SIGTERM at step ")[2].rstrip(", ")
    assert "devices: 2 x cpu on 2 host(s)" in first
    assert f"start: resumed at step {step}" in resumed and "step 100/100" in resumed
    assert json.loads((workdir / "summary.json").read_text())["step"] == 100
    assert log("process_1.log").count("which is saved") == 1
    assert "Exited with exit code 75" in log("slurm.log")

    # What a user cancels does not start again.
    number = submit(slurm, call, workdir)
    wait_until(lambda: state(number)[0] == "RUNNING")
    subprocess.run(["scancel", number], check=True)
    wait_until(lambda: state(number)[0] not in ("RUNNING", "COMPLETING"))
    time.sleep(2)
    assert state(number)[:2] == ("CANCELLED", 0)
    print(log("slurm.log"), log(), sep="\n")
