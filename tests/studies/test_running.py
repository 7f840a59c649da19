"""Studies with stand-in members: which run, which do not run again, which are handed over."""

import copy
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from etils import epath
from opened import config_json

from vit_jax.config.stored import StoredConfig
from vit_jax.config.text import load_config
from vit_jax.main import main
from vit_jax.studies import running
from vit_jax.studies.running import find_differences

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT / 'configs/finetune_study.py'}:ViT-B/4,cifar10,debug"
MEMBER = pathlib.Path(__file__).with_name("member.py")
ALL = ["dev_lr_0.003", "dev_lr_0.03", "lr_0.03_seed_0", "lr_0.03_seed_1"]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Replace members by the stand-in."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {MEMBER} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr("vit_jax.studies.running.sys.executable", str(path))
    return path


@pytest.fixture
def workdir(tmp_path):
    path = tmp_path / "study"
    path.mkdir()
    return path


def study(workdir, *flags):
    return main(["study", f"--config={CONFIG}", f"--workdir={workdir}", *flags])


def fate(workdir, **members):
    (workdir / "fate.json").write_text(json.dumps(members))


def calls(workdir):
    """Members called since the last call of this function."""
    path = workdir / "calls.txt"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def report(workdir):
    return json.loads((workdir / "study.json").read_text())


def states(workdir):
    return {name: member["state"] for name, member in report(workdir)["members"].items()}


def test_all_members_and_the_report(python, workdir, capsys):
    assert study(workdir) == 0
    assert calls(workdir) == ALL
    found = report(workdir)
    assert found["complete"] and found["peak_lr"] == 0.03
    assert found["table"][-1]["held_out/top1, %"]["values"] == [0.03, 0.03]
    assert found["rows"][-1][-1] == "3.00 ± 0.00"
    assert states(workdir) == dict.fromkeys(ALL, "finished")
    for name, member in found["members"].items():
        words = shlex.split(member["command"])
        assert words[:4] == ["python", "-m", "vit_jax.main", f"--config={CONFIG}"]
        assert words[-1] == f"--workdir={workdir / name}"
        assert member["command"] in (workdir / "study.md").read_text()
    assert len((workdir / "study.csv").read_text().splitlines()) == 1 + 4
    captured = capsys.readouterr()
    assert "mean ± std" in captured.out
    assert f"dev_lr_0.003: python -m vit_jax.main --config={CONFIG} " in captured.err

    assert study(workdir) == 0
    assert calls(workdir) == []


def test_balanced_weights_are_those_that_a_member_has_stored(python, workdir, capsys):
    flag = "--config.loss.class_weights=balanced"
    assert study(workdir, flag) == 0
    config = load_config(CONFIG)
    config.optimizer.peak_lr, config.loss.class_weights = 0.003, "1,2,3"
    config.data.split, config.evals.held_out.split = "dev_train", "dev"
    asked = copy.deepcopy(config)
    asked.loss.class_weights = "balanced"
    (workdir / ALL[0] / "config.json").write_text(StoredConfig(asked, config, {}).to_json())
    assert study(workdir, flag) == 0
    assert study(workdir) == 2
    assert "loss.class_weights: was '1,2,3', now None" in capsys.readouterr().err


def test_a_member_that_was_trained_longer(python, workdir, capsys):
    assert study(workdir) == 0
    config = load_config(CONFIG)
    config.optimizer.peak_lr = 0.003
    config.data.split, config.evals.held_out.split = "dev_train", "dev"
    was = config.duration
    for duration, code in (("99 steps", 0), ("1 steps", 2)):
        config.duration = duration
        (workdir / ALL[0] / "config.json").write_text(config_json(config))
        assert study(workdir) == code
        warned = f"dev_lr_0.003 was trained for 99 steps instead of {was}"
        assert (warned in (workdir / "study.md").read_text()) and report(workdir)["complete"]
    assert f"duration: was '1 steps', now {was!r}" in capsys.readouterr().err
    (workdir / ALL[0] / "summary.json").unlink()  # it has not come to its new end
    config.duration = "99 steps"
    (workdir / ALL[0] / "config.json").write_text(config_json(config))
    assert study(workdir) == 2


def test_the_folders_of_a_mixture_may_move(python, workdir):
    def mixed(**part):
        return [{"name": "tar", "data_dir": "new", "weight": 0.25} | part]

    config = load_config(CONFIG)
    config.optimizer.peak_lr, config.data.name = 0.003, "cifar10"
    config.data.mix = mixed(data_dir="old")
    config.data.split, config.evals.held_out.split = "dev_train", "dev"
    (workdir / ALL[0]).mkdir()
    (workdir / ALL[0] / "config.json").write_text(config_json(config))
    (workdir / ALL[0] / "summary.json").write_text('{"step": 20, "held_out/top1": 0.5}')
    for mix, code in ((mixed(weight=0.5), 2), (mixed(), 0)):
        flags = ["--config.data.name=cifar10", f"--config.data.mix={mix}"]
        assert study(workdir, *flags) == code


def test_members_with_other_microbatches_are_named(tmp_path):
    config = load_config(CONFIG)
    for name, number, batch in (("a", 4, 512), ("b", 2, 512), ("c", 1, 64)):
        config.optimizer.accum_steps, config.global_batch_size = number, batch
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config_json(config))
    (warning,) = find_differences(epath.Path(tmp_path), "abcd")
    assert warning.startswith("optimizer.accum_steps differs") and ": 4 in a, 2 in b; " in warning


def test_a_killed_member_does_not_end_the_study_and_is_run_again(python, workdir, capsys):
    fate(workdir, **{"dev_lr_0.003": "signal 9"})
    assert study(workdir) == 1
    assert calls(workdir) == ALL[:2]  # the choice needs it
    assert "dev_lr_0.003 failed: ended with exit code 137" in capsys.readouterr().err
    assert states(workdir)["dev_lr_0.003"] == "failed"
    fate(workdir, **{"lr_0.03_seed_0": "exit 1"})
    assert study(workdir) == 1
    assert calls(workdir) == [ALL[0], *ALL[2:]]
    error = report(workdir)["members"]["lr_0.03_seed_0"]["error"]
    assert error == "ended with exit code 1\nerror: lr_0.03_seed_0 cannot"
    assert not report(workdir)["complete"]
    fate(workdir)
    assert study(workdir) == 0
    assert calls(workdir) == ["lr_0.03_seed_0"] and report(workdir)["complete"]


def test_a_diverged_choice_is_lost_and_no_failure(python, workdir, capsys):
    fate(workdir, **{"dev_lr_0.03": "diverge"})
    assert study(workdir) == 0
    assert calls(workdir) == [*ALL[:2], "lr_0.003_seed_0", "lr_0.003_seed_1"]
    assert "dev_lr_0.03 diverged: step 3: loss is nan" in capsys.readouterr().err
    assert study(workdir) == 0
    assert calls(workdir) == []


def test_all_diverged(python, workdir, capsys):
    fate(workdir, **dict.fromkeys(ALL, "diverge"))
    assert study(workdir) == 1
    assert calls(workdir) == ALL[:2]
    assert "is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "says"),
    [(75, "was told to stop"), (2, "was rejected"), (3, "does not fit"), (143, "was told to stop")],
)
def test_what_ends_a_study_at_once(python, workdir, capsys, code, says):
    fate(workdir, **{"dev_lr_0.003": f"exit {code}"})
    assert study(workdir) == code
    assert calls(workdir) == ALL[:1]
    assert f"dev_lr_0.003 {says}" in capsys.readouterr().err
    assert (workdir / "study.json").exists() == (code != 2)  # nothing of a rejected member


def test_a_member_that_is_refused_leaves_the_others_once_one_was_not(python, workdir):
    fate(workdir, **{"dev_lr_0.003": "exit 1", "dev_lr_0.03": "exit 2"})
    assert study(workdir) == 2
    assert states(workdir) == dict.fromkeys(ALL[:2], "failed")
    calls(workdir)
    fate(workdir, **{"lr_0.03_seed_0": "exit 2"})
    assert study(workdir) == 1
    assert calls(workdir) == ALL
    assert states(workdir)["lr_0.03_seed_0"] == "failed"


@pytest.mark.parametrize("then", ["finish", "diverge", "exit 1"])
def test_told_to_stop_too_late_for_the_member(python, workdir, capsys, then):
    """It ends normally, but no other member starts."""
    fate(workdir, **{"dev_lr_0.003": f"stop, {then}"})
    assert study(workdir) == 143
    assert calls(workdir) == ALL[:1]
    assert "dev_lr_0.003 was told to stop; run the same command" in capsys.readouterr().err
    state = {"finish": "finished", "diverge": "diverged", "exit 1": "failed"}[then]
    assert states(workdir) == {"dev_lr_0.003": state}
    fate(workdir)
    assert study(workdir) == 0
    assert calls(workdir) == (ALL if then == "exit 1" else ALL[1:])


def test_told_to_stop_while_a_member_is_handed_over(launcher, workdir):
    fate(workdir, **dict.fromkeys(ALL, "stop, later"))
    assert study(workdir, launcher) == 143
    assert calls(workdir) == ALL[:1]
    assert json.loads((workdir / "handed_over.json").read_text()).keys() == {ALL[0]}


def test_members_get_the_overrides_of_the_user(python, workdir):
    assert study(workdir, "--config.study.seeds=1", "--config.log.every", "2 steps") == 0
    member = report(workdir)["members"]["lr_0.03_seed_0"]
    assert "'--config.log.every=2 steps'" in member["command"]
    assert calls(workdir) == ALL[:3]


@pytest.fixture
def launcher(tmp_path):
    """A launcher that records the position of `--`, and then acts as a member."""
    path = tmp_path / "launcher.sh"
    path.write_text(
        f'#!/bin/sh\necho "$1 $2" > {tmp_path}/flags\nshift 2\n'
        f'exec {sys.executable} -IS {MEMBER} "$@"\n'
    )
    return f"--launcher=sh {shlex.quote(str(path))} --nodes=2"


def test_a_launcher_that_waits(launcher, workdir, tmp_path):
    assert study(workdir, launcher) == 0
    assert calls(workdir) == ALL and report(workdir)["complete"]
    assert (tmp_path / "flags").read_text() == "--nodes=2 --\n"


def test_a_launcher_that_does_not_wait(launcher, workdir, capsys):
    fate(workdir, **dict.fromkeys(ALL, "later"))
    assert study(workdir, launcher) == 0
    assert calls(workdir) == ALL[:2]
    assert "handed over and not finished: dev_lr_0.003, dev_lr_0.03" in capsys.readouterr().out
    assert not report(workdir)["complete"]

    (workdir / "dev_lr_0.003").mkdir()  # one has ended meanwhile
    (workdir / "dev_lr_0.003/summary.json").write_text('{"step": 20, "held_out/top1": 0.5}')
    assert study(workdir, launcher) == 0
    assert calls(workdir) == []  # nothing is submitted twice
    handed_over = (workdir / "handed_over.json").read_text()
    for text in (handed_over[:9], "[]", '{"a": 5}'):
        (workdir / "handed_over.json").write_text(text)
        assert study(workdir, launcher) == 2 and calls(workdir) == []
        assert f"error: {workdir}/handed_over.json: is damaged" in capsys.readouterr().err
    (workdir / "handed_over.json").write_text(handed_over)
    fate(workdir, **{ALL[2]: "later"})
    assert study(workdir, launcher, "--again") == 0
    assert calls(workdir) == [ALL[1], "lr_0.003_seed_0", "lr_0.003_seed_1"]


def test_a_launcher_that_cannot(launcher, workdir):
    fate(workdir, **{"dev_lr_0.003": "exit 2"})
    assert study(workdir, launcher) == 2
    assert calls(workdir) == ALL[:1]
    assert not (workdir / "handed_over.json").exists()


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--config.optimizer.peak_lr=1"], "--config.optimizer.peak_lr"),
        (["--config.study.name=swep"], "study.name='swep'"),
        (["--config.study.seeds=0"], "study.seeds=0"),
        (["--config.study.peak_lrs=0.1,0.1"], "study.peak_lrs=(0.1, 0.1)"),
        (["--config.study.dev_split="], "study.dev_split"),
        (["--again"], "--again"),
        (["--launcher="], "--launcher"),
        (["--config.init_from="], "init_from"),
    ],
)
def test_what_is_refused_before_anything_runs(python, workdir, capsys, flags, key):
    assert study(workdir, *flags) == 2
    assert f"{key}: " in capsys.readouterr().err
    assert list(workdir.iterdir()) == []


def test_a_config_of_one_run_is_no_study(capsys, tmp_path):
    flags = [f"--config={ROOT / 'configs/quickstart.py'}", f"--workdir={tmp_path / 'w'}"]
    assert main(["study", *flags]) == 2
    assert "study.name: not set by" in capsys.readouterr().err
    assert main(["study"]) == 2
    assert "--config, --workdir: missing" in capsys.readouterr().err


def test_a_member_is_told_to_stop(tmp_path, monkeypatch, request):
    """SIGTERM to the study reaches the member, whose exit code is the study's."""
    monkeypatch.chdir(tmp_path)
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)  # otherwise a fault ends the tests
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, earlier))

    def tell():
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    waits = "trap 'exit 75' TERM; touch started; for i in $(seq 400); do sleep 0.05; done"
    assert running._execute(["sh", "-c", waits]) == (75, "", True)


@pytest.mark.slow
def test_ctrl_c_lets_the_member_save(tmp_path):
    """A terminal sends it to both; the study ends after its member."""
    script = (
        "import signal\nfrom vit_jax.studies.running import _execute\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever a shell has set
        "_execute(['sh', '-c', 'trap \"sleep 0.5; touch saved; exit 130\" INT; touch started; "
        "while true; do sleep 0.05; done'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, start_new_session=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert (tmp_path / "saved").exists()
