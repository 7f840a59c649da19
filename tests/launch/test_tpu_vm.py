"""Cloud TPU VMs, simulated by stand_in/gcloud, which runs the workers' commands on this host."""

import json
import pathlib
import shlex
import shutil
import subprocess
import tempfile
import time
import types

import pytest
from stand_in_cloud import RESOURCES, STAND_IN, Cloud

QUICKSTART = "--config=configs/quickstart.py:debug"
PICTURES = "--config=configs/folder.py:debug"
BUCKET = "--workdir=gs://bucket/runs/digits"
WHERE = ["--name=digits", "--zone=us-west4-a"]
WORDS = [QUICKSTART, BUCKET, "--config.log.every=7 steps"]
RUN = ["run", *WHERE, "--topology=v5e:2x2", "--no_plan"]


@pytest.fixture
def cloud(tpu_vm, tmp_path, monkeypatch):
    folder = tmp_path / "plays"
    folder.mkdir()
    monkeypatch.setenv("GCLOUD_PLAYS", str(folder))
    monkeypatch.setenv("PATH", str(STAND_IN), prepend=":")
    monkeypatch.setattr(tpu_vm.slices, "POLL_S", 0.05)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    cloud = Cloud(folder)
    monkeypatch.setattr(tpu_vm, "subprocess", types.SimpleNamespace(run=cloud.run))
    yield cloud
    if (folder / "state").exists():
        (folder / "state").write_text("ACTIVE")
        cloud.run(["gcloud", *RESOURCES, "delete", "digits", "--force"])


# The stand-in


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compute", "tpus", "queued-resources", "ssh", "qr", "--command=true", "--all"], "--all"),
        (["compute", "tpus", "queued-resources", "resume", "qr"], "Invalid choice"),
        (["compute", "tpu", "queued-resources", "create", "qr"], "Invalid choice"),
        (["compute", "tpus", "queued-resources", "create", "qr", "--zone=z", "--node-id=n",
          "--accelerator-type=v5e-16", "--runtime-version=r"], "v5e-16 is not found"),
        (["compute", "tpus", "queued-resources", "create", "qr", "--zone=z", "--node-count=1",
          "--accelerator-type=v6e-16", "--runtime-version=r"], "greater than 1"),
        (["compute", "tpus", "queued-resources", "delete", "qr", "--recreate"], "--recreate"),
    ],
)  # fmt: skip
def test_stand_in_refuses_what_gcloud_refuses(cloud, words, says):
    done = cloud.run(["gcloud", *words], capture_output=True, text=True)
    assert done.returncode and says in done.stderr


def test_stand_in_is_a_program(cloud):
    words = ["gcloud", *RESOURCES, "describe", "digits", "--format=json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "Resource 'digits' was not found" in done.stderr


# create, by the reference's flags


@pytest.mark.parametrize(
    ("flags", "created"),
    [
        (["--topology=v5e:4x4", "--spot"],
         ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite",
          "--node-id=digits", "--spot"]),
        (["--topology=v6e:16x16", "--num_slices=2", "--reserved"],
         ["--accelerator-type=v6e-256", "--runtime-version=v2-alpha-tpuv6e", "--node-count=2",
          "--node-prefix=digits", "--reserved"]),
        (["--topology=v5p:4x4x4"],
         ["--accelerator-type=v5p-128", "--runtime-version=v2-alpha-tpuv5", "--node-id=digits"]),
        (["--topology=v4:2x2x2", "--runtime=tpu-ubuntu2204-base-2", "--service_account=me@p",
          "--project=p", "--create_flag=--subnetwork=s"],
         ["--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base-2",
          "--node-id=digits", "--service-account=me@p",
          "--scopes=https://www.googleapis.com/auth/cloud-platform", "--subnetwork=s"]),
    ],
)  # fmt: skip
def test_create(tpu_vm, call, cloud, flags, created):
    code, _, err = call(tpu_vm, "create", *WHERE, *flags)
    assert (code, err) == (0, "")
    [words] = cloud.calls("create")
    project = ["--project=p"] * ("--project=p" in flags)
    assert words == ["digits", *created, "--zone=us-west4-a", *project, "--quiet"]


def test_quota(tpu_vm, call, cloud):
    (cloud.folder / "refusal").write_text("RESOURCE_EXHAUSTED: Quota 'TPUV5sLitepod' exceeded")
    cloud.job("exit 0")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 2 and "requesting slices ..." in out
    assert "Quota 'TPUV5sLitepod' exceeded; request more quota" in err
    assert cloud.calls() == ["describe", "create"]


def test_request_that_fails(tpu_vm, call, cloud):
    cloud.play("WAITING_FOR_RESOURCES", "PROVISIONING", "FAILED")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 2 and "slices: PROVISIONING\nslices: FAILED\n" in out
    assert "the request for slices failed: " in err and "no more capacity in the zone" in err


# run


def test_run(tpu_vm, call, cloud):
    cloud.play("WAITING_FOR_RESOURCES", "ACTIVE")
    cloud.job('echo "$@" > words; echo trains; exit 0')
    flags = ["--topology=v5p:2x2x2", "--num_slices=2", "--ssh_flag=--tunnel-through-iap"]
    code, out, err = call(tpu_vm, "run", *WHERE, *flags, "--no_plan", "--", *WORDS)
    assert (code, err) == (0, "")
    assert out.splitlines()[:4] == [
        "slices: ABSENT", "requesting slices ...", "slices: WAITING_FOR_RESOURCES", "slices: ACTIVE"
    ]  # fmt: skip
    assert (
        "starting the job ...\ntrains\nthe job ended with exit code 0; to delete the slices" in out
    )
    assert out.endswith("python launch/tpu_vm.py delete --name=digits --zone=us-west4-a\n")
    assert cloud.workers() == ["0-0", "0-1", "1-0", "1-1"]
    for worker in cloud.workers():
        at = cloud.folder / worker / "vit_jax"
        words = ["-m", "vit_jax.main", *WORDS, "--config.mesh.platform=tpu"]
        assert (at / "words").read_text().split() == " ".join(words).split()
        assert (at / "installed").read_text() == "installed\n"
        assert (at / "job.log").read_text() == "trains\n"
    assert all("--tunnel-through-iap" in words for words in cloud.calls("ssh"))


def test_variables_and_extras_reach_the_workers(tpu_vm, call, cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden0")
    cloud.play("ACTIVE")
    cloud.job('echo "$MODE $WANDB_API_KEY" > variables; stat -c %a job.env >> variables; exit 0')
    words = [*RUN, "--env=MODE=a b", "--", *WORDS, "--config.log.wandb=project"]
    code, out, err = call(tpu_vm, *words)
    assert (code, err) == (0, "")
    at = cloud.folder / "0-0/vit_jax"
    assert (at / "variables").read_text() == "a b hidden0\n600\n"
    assert not (at / "job.env").exists()
    assert "hidden0" not in out and "hidden0" not in (cloud.folder / "calls").read_text()
    assert not list(tmp_path.glob("*.env"))
    installs = [word for call in cloud.calls("ssh") for word in call if "worker.sh install" in word]
    assert "install gcs,tpu,wandb" in installs[0]


@pytest.mark.slow
def test_a_worker_that_outlives_worker_0_leaves_the_next_job_its_variables(
    tpu_vm, call, cloud, monkeypatch
):
    cloud.play("ACTIVE")
    cloud.job("""
echo "$MODE" > mode
case $MODE$PWD in old*/0-1/*) while [ ! -e PLAYS/go ]; do sleep 0.02; done ;; esac
""")
    four = ["run", *WHERE, "--topology=v5e:4x4", "--no_plan"]
    assert call(tpu_vm, *four, "--env=MODE=old", "--", *WORDS)[0] == 0
    take = tpu_vm.take_variables
    # The old job of worker 1 ends when the new job's variables are there.
    ended = 'touch "$GCLOUD_PLAYS/go"; while kill -0 $(cat vit_jax/job.pid); do sleep 0.02; done'
    monkeypatch.setattr(tpu_vm, "take_variables", lambda path: f"{take(path)}; {ended}; true")
    assert call(tpu_vm, *four, "--env=MODE=new", "--", *WORDS)[0] == 0
    deadline = time.monotonic() + 60
    at = cloud.folder / "0-1/vit_jax"
    while not (at / "job.code").exists():  # the launcher follows worker 0
        assert time.monotonic() < deadline
    assert (at / "mode").read_text() == "new\n"


def test_variables_are_taken_again_where_another_worker_failed(tpu_vm, tmp_path):
    (tmp_path / "vit_jax").mkdir()
    command = ["sh", "-c", tpu_vm.take_variables("/tmp/digits.env")]
    assert subprocess.run(command, cwd=tmp_path).returncode != 0  # they were not copied
    (tmp_path / "digits.env").write_text("export A=b\n")
    for _ in range(2):
        assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert (tmp_path / "vit_jax/job.env").read_text() == "export A=b\n"
    assert not (tmp_path / "digits.env").exists()


@pytest.mark.slow
def test_preempted_slices_are_asked_for_anew_and_the_job_resumes(tpu_vm, call, cloud):
    cloud.play("ACTIVE")
    cloud.job("""
if [ ! -e PLAYS/saved ]; then
  touch PLAYS/saved; printf 'SUSPENDING\\nSUSPENDED\\nACTIVE' > PLAYS/next; sleep 100
fi
echo resumes
""")
    code, out, err = call(tpu_vm, *RUN, "--spot", "--", *WORDS)
    assert (code, err) == (0, ""), out
    assert (
        "preempted; the job will resume from its last save\nslices: SUSPENDED\ndeleting the slices"
        in out
    )
    assert "\nresumes\nthe job ended with exit code 0" in out
    assert len(cloud.calls("create")) == 2 and cloud.calls("create")[0] == cloud.calls("create")[1]
    assert cloud.calls("delete") == [["digits", "--force", "--zone=us-west4-a", "--quiet"]]


@pytest.mark.parametrize("told", [75, pytest.param(143, marks=pytest.mark.slow)])
def test_process_that_was_told_to_stop_starts_again_by_itself(tpu_vm, call, cloud, told):
    cloud.play("ACTIVE")
    cloud.job(f"[ -e saved ] && echo resumes || {{ touch saved; echo saves; exit {told}; }}")
    code, out, _ = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 0 and "saves\nresumes\n" in out
    assert len(cloud.calls("scp")) == 1


@pytest.mark.parametrize("ends_with", [2, pytest.param(130, marks=pytest.mark.slow)])
def test_wrong_input_and_ctrl_c_on_a_worker_do_not_start_again(tpu_vm, call, cloud, ends_with):
    cloud.play("ACTIVE")
    cloud.job(f"echo starts; exit {ends_with}")
    code, out, _ = call(tpu_vm, *RUN, "--max_restarts=1", "--", *WORDS)
    assert code == ends_with and out.count("\nstarts\n") == 1
    assert f"the job ended with exit code {ends_with}" in out


@pytest.mark.slow
def test_failures_are_counted_from_where_it_came_further(tpu_vm, call, cloud):
    cloud.play("ACTIVE")
    cloud.job("""
[ -e PLAYS/before ] && step=1,002 || step=1,001
touch PLAYS/before
echo "step $step/2,000 | train/loss"; exit 1
""")
    code, out, _ = call(tpu_vm, *RUN, "--max_restarts=1", "--", *WORDS)
    steps = [line[:10] for line in out.splitlines() if line.startswith("step")]
    assert code == 1 and steps == ["step 1,001", "step 1,002", "step 1,002"]
    assert out.count("failed with exit code 1; restart 1 of 1\n") == 2
    assert "the job ended with exit code 1" in out


@pytest.mark.slow
def test_called_again_it_goes_on_with_the_running_job(tpu_vm, call, cloud):
    cloud.play("ACTIVE")
    cloud.job("echo trains; while [ ! -e PLAYS/go ]; do sleep 0.05; done; echo ends")
    look, tries = tpu_vm.look, []

    def leave(gcloud, offset):
        tries.append(offset)
        if len(tries) == 3:
            raise KeyboardInterrupt
        return look(gcloud, offset)

    tpu_vm.look = leave
    try:
        code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    finally:
        tpu_vm.look = look
    assert code == 130 and "the job keeps running" in err

    code, out, err = call(tpu_vm, *RUN, "--", *WORDS, "--config.seed=1")
    assert (
        code == 2 and "--name=digits: another job is running there (--config=configs/quick" in err
    )
    delete = "delete it (python launch/tpu_vm.py delete --name=digits --zone=us-west4-a), or"
    assert delete in err

    code, out, err = call(tpu_vm, *RUN, "--env=MODE=fast", "--", *WORDS)
    assert code == 2 and "--env: the job is running on --name=digits with other variables" in err

    code, out, _ = call(tpu_vm, "status", *WHERE)
    assert code == 0 and out.startswith("slices: ACTIVE\njob: running: --config=configs/quick")

    (cloud.folder / "go").touch()
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, "") and "trains\nends\nthe job ended with exit code 0" in out
    assert len(cloud.calls("scp")) <= 2  # one, unless it had ended before it was queried


def test_answers_of_a_worker_are_parsed(tpu_vm):
    assert tpu_vm.read_answer(b"") == (None, False, None, b"", None)
    state = tpu_vm.read_answer(b"job 0f3a: no 3 --config=a --workdir=b\nlog")
    assert state == ("--config=a --workdir=b", False, 3, b"log", "0f3a")
    state = tpu_vm.read_answer(b"job 0f3a: yes - --config=a\n")
    assert state == ("--config=a", True, None, b"", "0f3a")


@pytest.mark.slow
def test_network_that_fails_for_a_while(tpu_vm, call, cloud):
    cloud.play("ACTIVE")
    cloud.job("echo trains; exit 0")
    # ssh: the job's state, the code's installation, the job's start, its state again.
    cloud.fail("describe 2", "describe 3", "ssh 1", "scp 1", "scp 2", "ssh 3", "ssh 5", "ssh 7")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, ""), out
    assert "Connection reset by peer\nfailed, try 2 of 10; next try in 0.05 s\ncopying it" in out
    assert "\ntrains\nthe job ended with exit code 0" in out
    assert len(cloud.calls("create")) == 1 and len(cloud.calls("scp")) == 3
    assert cloud.calls("delete") == []


@pytest.mark.slow
def test_network_that_fails_does_not_end_a_running_job(tpu_vm, call, cloud, monkeypatch):
    cloud.play("ACTIVE")
    call(tpu_vm, "create", *WHERE, "--topology=v5e:2x2")
    cloud.job("echo trains; while [ ! -e PLAYS/go ]; do sleep 0.05; done; echo ends")
    cloud.fail("ssh 4", "ssh 5", "ssh 6")
    monkeypatch.setattr(tpu_vm.slices, "_TRIES", 3)
    code, _, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 2 and "worker 0 is unreachable: ERROR: " in err
    assert "; try: gcloud compute tpus queued-resources ssh digits --node=0 --worker=0" in err

    (cloud.folder / "go").touch()
    cloud.fail("ssh 7")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, "") and out.count("trains\nends\n") == 1
    assert len(cloud.calls("scp")) <= 2  # one, unless it had ended before it was queried


def test_what_fails_always_is_said_in_the_end(tpu_vm, call, cloud, monkeypatch):
    monkeypatch.setattr(tpu_vm.slices, "_TRIES", 3)
    cloud.play("ACTIVE")
    cloud.fail("scp 1", "scp 2", "scp 3")
    code, _, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 2 and "error: copying it to all workers: ERROR: " in err
    assert "Connection reset by peer" in err and len(cloud.calls("scp")) == 3


def test_gcloud_that_is_not_set_up_is_said_at_once(tpu_vm, call, cloud):
    cloud.fail("describe 1")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, out) == (2, "") and "gcloud failed: ERROR: " in err
    assert cloud.calls() == ["describe"]


@pytest.mark.slow
def test_preempted_before_the_job_has_begun(tpu_vm, call, cloud):
    cloud.play("ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE")
    cloud.job("exit 0")
    cloud.fail("scp 1")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, "") and "preempted; the job will resume" in out
    assert len(cloud.calls("create")) == 2 and len(cloud.calls("scp")) == 2


# status, logs, delete


def test_status_logs_delete(tpu_vm, call, cloud):
    assert call(tpu_vm, "status", *WHERE)[:2] == (0, "slices: ABSENT\n")
    cloud.play("ACTIVE")
    call(tpu_vm, "create", *WHERE, "--topology=v5e:4x4")
    assert call(tpu_vm, "status", *WHERE)[:2] == (0, "slices: ACTIVE\njob: none\n")
    cloud.job("echo trains; exit 3")
    call(tpu_vm, *RUN, "--max_restarts=0", "--", *WORDS)
    assert call(tpu_vm, "status", *WHERE)[1].endswith(
        "job: ended with exit code 3: " + " ".join(WORDS) + " --config.mesh.platform=tpu\ntrains\n"
    )
    code, out, err = call(tpu_vm, "delete", *WHERE)
    assert (code, out, err) == (0, "deleting the slices ...\n", "")
    assert cloud.workers() == [] and call(tpu_vm, "status", *WHERE)[1] == "slices: ABSENT\n"


def test_dry_run(tpu_vm, call, cloud):
    code, out, err = call(tpu_vm, "logs", *WHERE, "--node=1", "--worker=3", "--dry_run")
    assert (code, err) == (0, "")
    assert shlex.split(out) == [
        "gcloud", "compute", "tpus", "queued-resources", "ssh", "digits", "--node=1", "--worker=3",
        "--command=tail --lines=100 --follow vit_jax/job.log", "--zone=us-west4-a", "--quiet",
    ]  # fmt: skip
    for action in ("status", "delete"):
        assert "gcloud compute tpus" in call(tpu_vm, action, *WHERE, "--dry_run")[1]
    words = ["--topology=v5e:2x2", "--dry_run", "--", *WORDS]
    code, out, err = call(tpu_vm, "run", *WHERE, *words)
    assert (code, err) == (0, "")
    assert " -m vit_jax.main plan --config=configs/quickstart.py:debug --topology=v5e:2x2" in out
    assert not (cloud.folder / "calls").exists()
    # The printed commands are those called later, except for the plan.
    cloud.play("ACTIVE")
    cloud.job("exit 0")
    shown = {tuple(shlex.split(line)) for line in out.splitlines() if line.startswith("gcloud")}
    assert call(tpu_vm, "run", *WHERE, "--no_plan", *words[0:1], "--", *WORDS)[0] == 0
    lines = (cloud.folder / "calls").read_text().splitlines()
    called = {("gcloud", *json.loads(line)) for line in lines}
    assert called == {line for line in shown if line[4] != "delete"}


# Rejected input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", *WHERE, "--", *WORDS], "--topology: missing; e.g. --topology=v5e:4x4"),
        (["run", *WHERE, "--topology=v5e:5x5", "--", *WORDS], "no such slice is rented; known"),
        (["create", *WHERE, "--topology=tpu7x:4x4x4"], "; use launch/kubernetes.py"),
        (["create", *WHERE, "--topology=v5e:4x4", "--", *WORDS], "create: takes no job"),
        (["create", *WHERE, "--topology=v5e:4x4", "--num_slices=0"], "--num_slices=0: needs a pos"),
        (["create", *WHERE, "--topology=v5e:4x4", "--spot", "--reserved"], "not allowed with"),
        (["run", *WHERE, "--topology=v5e:4x4", "--", QUICKSTART, "--workdir=runs/x"],
         "--workdir=runs/x: would be a different folder on each worker"),
        ([*RUN, "--", PICTURES, BUCKET], "data.data_dir=None: a worker has no pictures there"),
        ([*RUN, "--", PICTURES, BUCKET, f"--config.data.data_dir={pathlib.Path.home()}"],
         "a worker has no pictures there; give the full path of a disk that all workers mount"),
        ([*RUN, "--", PICTURES, BUCKET, "--config.data.data_dir=pictures"], "'pictures': a worker"),
        (["run", *WHERE, "--topology=v5e:4x4", "--"], "no job: give its arguments after --"),
        (["runn", *WHERE], "invalid choice: 'runn'"),
        (["status", "--name=ViT_L", "--zone=us-west4-a"], "--name=ViT_L: needs at most 40"),
    ],
)  # fmt: skip
def test_refused(tpu_vm, refused, words, says):
    assert says in refused(tpu_vm, *words)


@pytest.mark.parametrize("data_dir", ["gs://bucket/data", "/disk/that/workers/mount"])
def test_data_that_workers_may_reach(tpu_vm, call, data_dir):
    words = ["--config=configs/cifar10.py", BUCKET, f"--config.data.data_dir={data_dir}"]
    assert call(tpu_vm, *RUN, "--dry_run", "--", *words)[0] == 0


def test_without_gcloud(tpu_vm, refused, monkeypatch):
    monkeypatch.setenv("PATH", "")
    says = refused(tpu_vm, *RUN, "--", *WORDS)
    assert "gcloud: not found on PATH; install the Google Cloud SDK" in says


def test_config_that_does_not_travel(tpu_vm, call, tmp_path):
    shutil.copy(pathlib.Path(__file__).parents[2] / "configs/quickstart.py", tmp_path / "mine.py")
    code, _, err = call(tpu_vm, *RUN, "--", f"--config={tmp_path}/mine.py", BUCKET)
    assert code == 2 and "a worker has only the repository's files; move the file to" in err


def test_what_does_not_fit_is_refused(tpu_vm, call, cloud, monkeypatch):
    monkeypatch.setattr(tpu_vm.tpus, "plan_command", lambda *args: ["bash", "-c", "exit 3"])
    words = [word for word in RUN if word != "--no_plan"]
    code, _, err = call(tpu_vm, *words, "--", *WORDS)
    assert code == 3 and "error: the run does not fit v5e:2x2" in err
    assert not (cloud.folder / "calls").exists()
