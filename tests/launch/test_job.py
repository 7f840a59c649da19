"""The checks of a job that all launchers share."""

import argparse
import pathlib
import re

import pytest
from at_fault import at_fault

from vit_jax.config import plugins
from vit_jax.job import exit_codes

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = "--config=configs/quickstart.py:debug"
MIXED = [{"name": "cifar10", "data_dir": "gs://bucket/data", "weight": 0.25},
         {"name": "cifar100", "weight": 0.25}]  # fmt: skip


@pytest.fixture
def job(local, monkeypatch):
    import job  # made importable by the launchers

    monkeypatch.chdir(ROOT)
    return job


def test_exit_codes_of_the_workers_script():
    found = re.findall(r"\$code = (\d+)", (ROOT / "launch/worker.sh").read_text())
    assert found == [str(exit_codes.PREEMPTED), str(exit_codes.TERMINATED)]


@pytest.mark.parametrize(
    ("workdir", "name"),
    [
        ("runs/ViT_L", "vit-l"),
        ("gs://bucket/runs/a.b/", "a-b"),
        ("/runs/" + "x" * 60, "x" * 40),
        ("/runs/--", "run"),
        ("/runs/a_", "a"),
    ],
)
def test_name(job, workdir, name):
    assert job.check_job([QUICKSTART, f"--workdir={workdir}"]).name == name


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["--workdir=w"], ()),
        (["--workdir=gs://bucket/w"], ("gcs",)),
        (["--workdir=w", "--config.data.data_dir=gs://bucket/data"], ("gcs",)),
        (["--workdir=w", "--config.evals.test.data_dir=gs://bucket/data"], ("gcs",)),
        (["--workdir=w", f"--config.data.mix={MIXED}"], ("gcs",)),
        (["--workdir=gs://bucket/w", "--config.log.wandb=project"], ("gcs", "wandb")),
    ],
)
def test_extras_that_the_config_needs(job, words, extras):
    assert job.check_job([QUICKSTART, *words]).extras == extras


def test_predictions_are_a_job_of_their_folder(job):
    words = ["predict", "--workdir=runs/mine", "--data=digits:test"]
    for name in ("--output", "--features"):
        checked = job.check_job([*words, f"{name}=gs://bucket/all"])
        assert (checked.workdir, checked.extras) == ("gs://bucket/all", ("gcs", "parquet"))
        assert checked.on("cpu") == checked and checked.data == ()
    with at_fault("--output"):
        job.check_job([*words, "--features=all.npz"])


def test_data_sets_of_a_mixture_are_looked_for_in_their_own_folders(job):
    checked = job.check_job([QUICKSTART, "--workdir=w", f"--config.data.mix={MIXED}"])
    assert checked.data == (("data.mix", "cifar10", "gs://bucket/data"),
                            ("data.data_dir", "cifar100", None))  # fmt: skip
    with at_fault("data.data_dir"):  # the bucket of the other is there
        job.check_data_travels(checked, "a worker", {}, lambda folder: False, "mount it")


def test_extras_of_the_members_of_a_study(job, tmp_path):
    sweep = f"--sweep=data.data_dir=gs://bucket/data,{tmp_path}"
    words = ["study", QUICKSTART, f"--workdir={tmp_path}/study", sweep]
    _, members = job.study_jobs([*words, "--config.log.wandb=project"])
    assert [member.extras for member in members] == [("gcs", "wandb"), ("wandb",)]


def test_environment(job, monkeypatch):
    import command_line  # made importable by the launchers
    import environment

    monkeypatch.setenv("HF_TOKEN", "hidden1")
    monkeypatch.setenv("WANDB_API_KEY", "hidden2")
    parser = argparse.ArgumentParser()
    command_line.add_common_flags(parser, "all")
    flags = parser.parse_args(["--env=MODE=a=b", "--env=HF_TOKEN", "--env=MONKEY=1"])
    to_wandb = job.Job((), None, "w", extras=("wandb",))
    read = environment.read_environment(flags, to_wandb)
    assert (read.plain, read.secret["MODE"]) == ({}, "a=b")
    assert read.shown.startswith('MODE="$MODE" HF_TOKEN="$HF_TOKEN" MONKEY="$MONKEY" ')
    flags.show_env = True
    read = environment.read_environment(flags, to_wandb)
    assert read.plain == {"MODE": "a=b", "MONKEY": "1"}
    assert read.secret == {"HF_TOKEN": "hidden1", "WANDB_API_KEY": "hidden2"}
    assert read.shown == 'MODE=a=b MONKEY=1 HF_TOKEN="$HF_TOKEN" WANDB_API_KEY="$WANDB_API_KEY" '
    assert "WANDB_API_KEY" not in environment.read_environment(flags, job.Job((), None, "w")).all
    flags = parser.parse_args(["--env=NOT_SET", "--env=a b=c"])
    with at_fault("--env", "--env"):
        environment.read_environment(flags, to_wandb)


def test_platform_is_the_launchers_unless_it_is_given(job):
    checked = job.check_job([QUICKSTART, "--workdir=w"])
    assert checked.on("tpu").words == (*checked.words, "--config.mesh.platform=tpu")
    words = (QUICKSTART, "--workdir=w", "--config.mesh.platform", "cpu")
    assert job.check_job(words).on("tpu").words == words


def test_job_without_a_config_of_its_own(job):
    checked = job.check_job(["evaluate", "--workdir=w", "--config.evals.test.batch_size=8"])
    assert checked.config is None and checked.workdir == "w"
    command = ["py", "-m", "vit_jax.main", "evaluate", "--workdir=w"]
    assert checked.command(python="py")[:5] == command
    job.check_config_travels(checked, "a worker")


def test_config_of_the_package_travels(job):
    job.check_config_travels(job.Job((), "quickstart:debug", "w"), "the image")


@pytest.mark.parametrize("config", ["mine.py", "/etc/mine.py", f"{ROOT}/configs/quickstart.py"])
def test_config_that_does_not_travel(job, config):
    made = job.Job((), f"{config}:debug", "w")
    with at_fault("--config"):
        job.check_config_travels(made, "the image")


def test_plugins_travel_as_configs_do(job, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    (tmp_path / "part.py").write_text("")
    words = [QUICKSTART, "--workdir=w", f"--config.plugins={tmp_path}/part.py"]
    checked = job.check_job(words)  # on this host it may be anywhere
    assert checked.plugins == (tmp_path / "part.py",) and checked.words == tuple(words)
    with at_fault("plugins"):
        job.check_config_travels(checked, "a worker")
    inside = job.Job((), QUICKSTART.partition("=")[2], "w", (ROOT / "configs/part.py",))
    job.check_config_travels(inside, "a worker")


@pytest.mark.parametrize("folder", ["configs", "."])
def test_plugins_are_named_from_the_root(job, tmp_path, monkeypatch, folder):
    """As a worker finds them, whatever folder the launcher was called from."""
    root = tmp_path / "root"
    (root / "configs").mkdir(parents=True)
    (root / folder / "part.py").write_text("")
    monkeypatch.setattr(job, "ROOT", root)
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    monkeypatch.chdir(root / folder)
    evaluate = ["evaluate", "--workdir=gs://bucket/run"]
    for name in ("part.py", f"{root}/configs/../{folder}/part.py"):
        checked = job.check_job([*evaluate, f"--config.plugins={name}"])
        with at_fault("plugins"):
            job.check_config_travels(checked, "a worker")
    monkeypatch.chdir(root)
    checked = job.check_job([*evaluate, f"--config.plugins={folder}/part.py"])
    if folder == "configs":
        job.check_config_travels(checked, "a worker")
    else:
        with at_fault("plugins"):
            job.check_config_travels(checked, "a worker")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("local", ["--platform=cpu", "--num_processes=1"]),
        ("slurm", []),
        ("kubernetes", ["--image=i", "--nodes=2"]),
        ("kubernetes", ["--image=i", "--topology=v5e:2x2", "--xpk_cluster=c"]),
        ("skypilot", []),
        ("tpu_vm", ["run", "--name=digits", "--zone=z", "--topology=v5e:2x2"]),
    ],
)
def test_a_dry_run_shows_no_token_of_an_address(request, call, name, flags):
    address = "https://me:pass1@127.0.0.1:9/a.npz?token=pass2&download=true"
    words = [QUICKSTART, "--workdir=gs://bucket/run", f"--config.init_from={address}"]
    code, out, err = call(request.getfixturevalue(name), *flags, "--dry_run", "--", *words)
    assert code == 0 and "pass" not in out
    assert "https://***@127.0.0.1:9/a.npz?token=***&download=true" in out
    assert err.startswith("*** hides a password or token") and err.count("\n") == 1
