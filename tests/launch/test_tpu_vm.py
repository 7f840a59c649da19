"""Cloud TPU VMs: the commands of gcloud, and those of a worker, which run on this host."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import types

import pytest
from at_fault import golden_page

QUICKSTART = "--config=configs/quickstart.py:debug"
IMAGES = "--config=configs/folder.py:debug"
BUCKET = "--workdir=gs://bucket/runs/digits"
WHERE = ["--name=digits", "--zone=us-west4-a"]
WORDS = [QUICKSTART, BUCKET, "--config.log.every=7 steps"]
RUN = ["run", *WHERE, "--topology=v5e:2x2", "--no_plan"]
GCLOUD = ("gcloud", "compute", "tpus", "queued-resources")


class Cloud:
    """A queued resource with one worker, whose home directory is a folder of this host.

    states: answers of `describe`, in turn; the last one stays; None: there is no such resource.
    failing: calls that the network fails, e.g. "ssh 2": the second call of ssh.
    calls: the words of each call of gcloud, from the verb on.
    """

    def __init__(self, folder):
        self.folder, self.states, self.failing, self.calls = folder, ["ACTIVE"], (), []
        (folder / "home").mkdir()

    def job(self, script):
        """The program that replaces `python` on the worker."""
        path = self.folder / "job"
        path.write_text(f"#!/usr/bin/env bash\n{script.replace('PLAYS', str(self.folder))}\n")
        path.chmod(0o755)

    def count(self, verb):
        return [call[0] for call in self.calls].count(verb)

    def end_job(self):
        leader = self.folder / "home/vit_jax/job.pid"
        if leader.exists():
            group = f"-{leader.read_text().strip()}"
            subprocess.run(["kill", "-KILL", "--", group], capture_output=True)

    def run(self, command, capture_output=True):
        if tuple(command[:4]) != GCLOUD:
            return subprocess.run(command, capture_output=capture_output)
        verb, *words = command[4:]
        self.calls.append([verb, *words])
        if f"{verb} {self.count(verb)}" in self.failing:
            return subprocess.CompletedProcess(command, 1, b"", b"ERROR: Connection reset by peer")
        home, answer = self.folder / "home", b""
        if verb == "describe":
            state = self.states.pop(0) if self.states[1:] else self.states[0]
            if state is None:
                return subprocess.CompletedProcess(command, 1, b"", b"NOT_FOUND: digits")
            answer = json.dumps({"state": {"state": state, "why": "no capacity"}}).encode()
        elif verb == "delete":
            self.end_job()
            shutil.rmtree(home)
            home.mkdir()
        elif verb == "scp":
            shutil.copy(words[0], home)
        elif verb == "ssh":
            [told] = [word[len("--command=") :] for word in words if word.startswith("--command=")]
            return subprocess.run(["bash", "-c", told], cwd=home, capture_output=True)
        return subprocess.CompletedProcess(command, 0, answer, b"")


@pytest.fixture
def cloud(tpu_vm, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    python3 = pathlib.Path(__file__).with_name("python3_of_worker")
    (tmp_path / "bin/python3").symlink_to(python3)
    (tmp_path / "bin/gcloud").symlink_to("/bin/true")
    monkeypatch.setenv("WORKER_PLAYS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(tpu_vm.slices, "POLL_S", 0.05)
    monkeypatch.setattr(tpu_vm.tempfile, "gettempdir", lambda: str(tmp_path))
    cloud = Cloud(tmp_path)
    monkeypatch.setattr(tpu_vm.slices, "subprocess", types.SimpleNamespace(run=cloud.run))
    yield cloud
    cloud.end_job()


# The commands of gcloud


@pytest.fixture
def shown(tpu_vm, call):
    """shown(*words) -> the commands of gcloud that a dry run prints, each from its verb on."""

    def shown(*words):
        code, out, err = call(tpu_vm, words[0], *WHERE, "--dry_run", *words[1:])
        assert (code, err) == (0, "")
        commands = [shlex.split(line) for line in out.splitlines() if line.startswith("gcloud ")]
        assert all(tuple(command[:4]) == GCLOUD for command in commands)
        return [command[4:] for command in commands]

    return shown


PAGE = pathlib.Path(__file__).with_name("tpu_vm.txt")


@pytest.mark.parametrize("words", golden_page(PAGE))
def test_actions(shown, words):
    expected = golden_page(PAGE)[words].splitlines()
    assert shown(*shlex.split(words)) == [shlex.split(line) for line in expected]


def test_status(shown):
    describe, ask = shown("status")
    assert describe == ["describe", "digits", "--format=json", "--zone=us-west4-a", "--quiet"]
    assert ask[:4] == ["ssh", "digits", "--node=0", "--worker=0"]


def test_run_shows_its_plan_and_what_it_calls(tpu_vm, call, shown, cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden0")
    words = ["--topology=v5e:2x2", "--ssh_flag=--tunnel-through-iap", "--env=MODE=a b", "--",
             *WORDS, "--config.log.wandb=project"]  # fmt: skip
    _, out, _ = call(tpu_vm, "run", *WHERE, "--dry_run", *words)
    assert " -m vit_jax.main plan --config=configs/quickstart.py:debug --topology=v5e:2x2" in out
    assert "MODE, WANDB_API_KEY" in out and "hidden0" not in out and not cloud.calls
    printed = {tuple(command) for command in shown("run", *words) if command[0] != "delete"}
    cloud.states = [None, "ACTIVE"]
    cloud.job("exit 0")
    assert call(tpu_vm, "run", *WHERE, "--no_plan", *words)[0] == 0
    sources = {pathlib.Path(word).parent for call in cloud.calls for word in call
               if word.startswith(str(tmp_path)) and call[0] == "scp"}  # fmt: skip
    (folder,) = sources  # of this call only, and gone again
    assert folder.parent == tmp_path and not folder.exists()
    called = {tuple(word.replace(str(folder), "FOLDER") for word in call) for call in cloud.calls}
    asked = {call for call in called | printed if " ask " in str(call)}  # each from its own offset
    assert called - asked == printed - asked
    assert all("--tunnel-through-iap" in call for call in called if call[0] in ("ssh", "scp"))


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize(
    "words",
    [["create", "--topology=v5e:4x4", "--spot"],
     pytest.param(["create", "--topology=v5p:4x4x4", "--reserved"], marks=pytest.mark.slow),
     pytest.param(["create", "--topology=v6e:16x16", "--num_slices=2", "--service_account=me@p"],
                  marks=pytest.mark.slow),
     *(pytest.param(words, marks=pytest.mark.slow) for words in (
         ["status"], ["logs"], ["delete"], ["run", "--topology=v5e:2x2", "--", *WORDS]))],
)  # fmt: skip
def test_gcloud_knows_the_flags(shown, tmp_path, words):
    """The real one, without an account: it reads all flags before it asks for one."""
    alone = {"CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false"}
    for command in shown(words[0], "--project=p", *words[1:]):
        done = subprocess.run([*GCLOUD, *command], env=os.environ | alone, capture_output=True)
        assert b"active account" in done.stderr, (command, done.stderr.decode())


# run, on a worker that is this host


def test_run(tpu_vm, call, cloud, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden0")
    cloud.states = [None, "WAITING_FOR_RESOURCES", "ACTIVE"]
    cloud.job('echo "$@" > words; echo "$MODE $WANDB_API_KEY" > variables; '
              'stat -c %a job.env >> variables; echo trains')  # fmt: skip
    words = [*RUN, "--env=MODE=a b", "--", *WORDS, "--config.log.wandb=project"]
    code, out, err = call(tpu_vm, *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[:4] == [
        "slices: ABSENT", "requesting slices ...", "slices: WAITING_FOR_RESOURCES", "slices: ACTIVE"
    ]  # fmt: skip
    assert "starting the job ...\ntrains\nthe job ended with exit code 0; to delete the" in out
    assert out.endswith("python launch/tpu_vm.py delete --name=digits --zone=us-west4-a\n")
    at = cloud.folder / "home/vit_jax"
    run = ["-m", "vit_jax.main", *words[words.index("--") + 1 :], "--config.mesh.platform=tpu"]
    assert (at / "words").read_text().split() == " ".join(run).split()
    assert (at / "installed").read_text() == "installed\n"
    assert (at / "variables").read_text() == "a b hidden0\n600\n"
    assert not (at / "job.env").exists() and not list(cloud.folder.glob("*.env"))
    assert "hidden0" not in out + str(cloud.calls)
    assert any("worker.sh install gcs,tpu,wandb" in str(call) for call in cloud.calls)
    code, out, _ = call(tpu_vm, "status", *WHERE)
    assert out.startswith("slices: ACTIVE\njob: ended with exit code 0: ") and "trains\n" in out


def test_variables_are_taken_again_where_another_worker_failed(shown, tmp_path):
    (tmp_path / "vit_jax").mkdir()
    commands = shown("run", "--topology=v5e:2x2", "--no_plan", "--env=A=b", "--", *WORDS)
    [take] = [word for command in commands for word in command if "install -m 600" in word]
    command = ["sh", "-c", take.removeprefix("--command=")]
    assert subprocess.run(command, cwd=tmp_path).returncode != 0  # they were not copied
    (tmp_path / "digits.env").write_text("export A=b\n")
    for _ in range(2):
        assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert (tmp_path / "vit_jax/job.env").read_text() == "export A=b\n"
    assert not (tmp_path / "digits.env").exists()


@pytest.mark.parametrize(
    ("job", "code", "says", "copies"),
    [
        # Told to stop, it starts again by itself, on the worker.
        ("[ -e saved ] && echo resumes || { touch saved; echo saves; exit 75; }",
         0, "saves\nresumes\n", 1),
        pytest.param("[ -e saved ] && echo resumes || { touch saved; echo saves; exit 143; }",
                     0, "saves\nresumes\n", 1, marks=pytest.mark.slow),
        # Wrong input and Ctrl-C are final.
        ("echo starts; exit 2", 2, "starts\nthe job ended with exit code 2", 1),
        pytest.param("echo starts; exit 130", 130, "starts\nthe job ended with exit code 130", 1,
                     marks=pytest.mark.slow),
        # Failures are counted from where it came further.
        pytest.param("[ -e PLAYS/before ] && step=1,002 || step=1,001\ntouch PLAYS/before\n"
                     'echo "step $step/2,000 | train/loss"; exit 1',
                     1, "failed with exit code 1; restart 1 of 1\n", 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_starts_again(tpu_vm, call, cloud, job, code, says, copies):
    cloud.job(job)
    ended, out, _ = call(tpu_vm, *RUN, "--max_restarts=1", "--", *WORDS)
    assert ended == code and says in out and cloud.count("scp") == copies
    assert f"the job ended with exit code {code}" in out


@pytest.mark.slow
def test_preempted_slices_are_asked_for_anew_and_the_job_resumes(tpu_vm, call, cloud):
    cloud.states = ["ACTIVE", "SUSPENDING", "SUSPENDED", "ACTIVE"]
    cloud.job("[ -e PLAYS/saved ] && echo resumes || { touch PLAYS/saved; sleep 100; }")
    code, out, err = call(tpu_vm, *RUN, "--spot", "--", *WORDS)
    assert (code, err) == (0, ""), out
    assert "preempted; the job will resume from its last save\nslices: SUSPENDED\ndeleting" in out
    assert "\nresumes\nthe job ended with exit code 0" in out
    assert cloud.count("create") == 1 and cloud.count("delete") == 1


@pytest.mark.slow
def test_called_again_it_goes_on_with_the_running_job(tpu_vm, call, cloud, monkeypatch):
    cloud.job("echo trains; while [ ! -e PLAYS/go ]; do sleep 0.05; done; echo ends")

    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tpu_vm, "time", types.SimpleNamespace(sleep=interrupt))
        code, _, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 130 and "the job keeps running" in err
    code, _, err = call(tpu_vm, *RUN, "--", *WORDS, "--config.seed=1")
    assert code == 2 and "--name=digits: another job is running there (--config=configs/qu" in err
    assert "python launch/tpu_vm.py delete --name=digits --zone=us-west4-a" in err
    code, _, err = call(tpu_vm, *RUN, "--env=MODE=fast", "--", *WORDS)
    assert code == 2 and "--env: the job is running on --name=digits with other variables" in err
    code, out, _ = call(tpu_vm, "status", *WHERE)
    assert out.startswith("slices: ACTIVE\njob: running: --config=configs/quick")
    (cloud.folder / "go").touch()
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, "") and "trains\nends\nthe job ended with exit code 0" in out


# What fails


@pytest.mark.slow
def test_network_that_fails_for_a_while(tpu_vm, call, cloud):
    cloud.states = [None, "ACTIVE"]
    cloud.job("echo trains; exit 0")
    # ssh: the job's state, the code's installation, the job's start, its state again.
    cloud.failing = ("describe 2", "describe 3", "ssh 1", "scp 1", "scp 2", "ssh 3", "ssh 5")
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, ""), out
    assert "Connection reset by peer\nfailed, try 2 of 10; next try in 0.05 s\ncopying it" in out
    assert "\ntrains\nthe job ended with exit code 0" in out
    assert [cloud.count(verb) for verb in ("create", "scp", "delete")] == [1, 3, 0]


@pytest.mark.parametrize(
    ("states", "failing", "says", "calls"),
    [
        (["ACTIVE"], ["scp 1", "scp 2", "scp 3"], "copying it to all workers: ERROR: ", None),
        (["ACTIVE"], ["ssh 1", "ssh 2", "ssh 3"], "worker 0 is unreachable: ERROR: ", None),
        ([None], ["describe 1"], "gcloud failed: ERROR: ", ["describe"]),
        ([None, "PROVISIONING", "FAILED"], [], "the request for slices failed: ", None),
        ([None, "PROVISIONING", "FAILED"], [], "no capacity", None),
    ],
)
def test_what_fails_always_is_said_in_the_end(
    tpu_vm, call, cloud, monkeypatch, states, failing, says, calls
):
    monkeypatch.setattr(tpu_vm.slices, "_TRIES", 3)
    cloud.states, cloud.failing = states, failing
    code, _, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert code == 2 and says in err
    assert calls is None or calls == [call[0] for call in cloud.calls]


def test_quota(tpu_vm):
    refusal = "echo RESOURCE_EXHAUSTED: Quota exceeded >&2; exit 1"
    with pytest.raises(tpu_vm.InputError, match="Quota exceeded; request more quota"):
        tpu_vm.call(["sh", "-c", refusal], "requesting slices")


def test_preempted_before_the_job_has_begun(tpu_vm, call, cloud):
    cloud.states = ["ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE"]
    cloud.job("exit 0")
    cloud.failing = ["scp 1"]
    code, out, err = call(tpu_vm, *RUN, "--", *WORDS)
    assert (code, err) == (0, "") and "preempted; the job will resume" in out
    assert cloud.count("create") == 1 and cloud.count("scp") == 2


# Rejected input


@pytest.mark.parametrize("data_dir", ["gs://bucket/data", "/disk/that/workers/mount"])
def test_data_that_workers_may_reach(tpu_vm, call, data_dir):
    words = ["--config=configs/cifar10.py", BUCKET, f"--config.data.data_dir={data_dir}"]
    assert call(tpu_vm, *RUN, "--dry_run", "--", *words)[0] == 0


def test_without_gcloud(tpu_vm, refused, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "gcloud: not found on PATH; install the Google" in refused(tpu_vm, *RUN, "--", *WORDS)


def test_what_does_not_fit_is_refused(tpu_vm, call, cloud, monkeypatch):
    monkeypatch.setattr(tpu_vm.tpus, "plan_command", lambda *args: ["bash", "-c", "exit 3"])
    words = [word for word in RUN if word != "--no_plan"]
    code, _, err = call(tpu_vm, *words, "--", *WORDS)
    assert code == 3 and "error: the run does not fit v5e:2x2" in err and not cloud.calls
