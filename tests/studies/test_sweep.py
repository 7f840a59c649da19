"""A study of every combination of values, from results as members leave them."""

import argparse
import json
import pathlib
import shlex

import pytest

from vit_jax.commands.study import _make_sweep
from vit_jax.config import base_config, classification, knn, multilabel
from vit_jax.errors import InputError
from vit_jax.main import main
from vit_jax.studies import running, sweep
from vit_jax.studies.members import DIVERGED, FINISHED, Result

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


def config_of(*texts):
    c = base_config()
    c.study.name, c.study.sweep = "sweep", texts
    c.evals.held_out = classification(split="test", every="1 epochs")
    return c


def test_names_too_long_for_a_disk_are_shortened_and_stay_different(tmp_path):
    def names_of(length):  # in bytes; "init_from_" has 10
        values = ",".join("é" * 100 + "x" * (length - 211) + end for end in "ab")
        return [m.name for m in sweep.find_members(config_of(f"init_from={values}"), {})]

    assert names_of(255)[0] == "init_from_" + "é" * 100 + "x" * 44 + "a"
    names = names_of(256) + names_of(600)
    assert len({*names}) == 4 and all(name.startswith("init_from_éé") for name in names)
    for name in names:
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("optimizer.peak_lr=1e-3, 3e-3", ["1e-3", "3e-3"]),
        ("duration=10 steps,2 epochs", ["10 steps", "2 epochs"]),
        ("data.mean=[0.5,0.5,0.5],(0,0,0)", ["[0.5,0.5,0.5]", "(0,0,0)"]),
        ("data.ops=resize(8,9)|flip,flip", ["resize(8,9)|flip", "flip"]),
        ("init_from=a=b", ["a=b"]),
    ],
)
def test_values_of_a_key(text, values):
    assert sweep.parse_sweep([text]) == {text.partition("=")[0]: values}


def test_faults_are_told_at_once():
    texts = ("seed", "seed=", "=1", "duration=1,,2", "data.mean=[1,2", "a=1", "a=2", "b=1,1")
    with pytest.raises(InputError) as e:
        sweep.parse_sweep(texts)
    said = str(e.value)
    assert "7 faults" in said and "--sweep=seed: needs KEY=VALUE,VALUE" in said
    assert "--sweep=a=2: a is given twice" in said and "--sweep=b=1,1: gives 1 twice" in said


@pytest.mark.parametrize(
    "text", ["optimizer.peak_lr=1e-3,0.001", "data.mean=[0,0,0],(0,0,0)", "seed=1,01"]
)
def test_one_value_in_two_spellings(text):
    key = text.partition("=")[0]
    with pytest.raises(
        InputError, match=rf"study\.sweep: {key}=.* and .* are equal; leave one out"
    ):
        sweep.check(config_of(text))


def test_the_metric_is_one_that_the_evaluator_will_report():
    c = config_of("seed=0,1")
    c.evals.several = multilabel(split="test", every="1 epochs")
    c.evals.near = knn(train_split="a", test_split="b", every="1 epochs", num_neighbours=(3,))
    for name, known in (("several", "several/mean_ap"), ("near", "near/3nn_top1")):
        c.study.metric = f"{name}/top1"
        with pytest.raises(InputError, match=f"{name}/top1': needs an accuracy; known: {known}$"):
            sweep.check(c)
        c.study.metric = known
        sweep.check(c)
    # By default it is one of a split that is always there, in the order of names.
    del c.evals["held_out"], c.evals["near"]
    c.evals.a_test = classification(split="test?", every="1 epochs")
    c.study.name, c.study.metric = None, "held_out/top1"
    _make_sweep(c, argparse.Namespace(config="mine", overrides=[], sweep=["seed=0,1"]))
    assert c.study.metric == "several/mean_ap"


def test_members_run_seed_by_seed_and_their_names_are_clear():
    config = config_of("optimizer.peak_lr=1e-3,3e-3", "seed=0,7", "model.depth=2")
    sweep.STUDY.check(config)
    members = sweep.find_members(config, {})
    assert [m.name for m in members] == [
        f"peak_lr_{lr}__depth_2__seed_{seed}" for seed in (0, 7) for lr in ("1e-3", "3e-3")
    ]
    assert members[3].overrides == {
        "optimizer.peak_lr": "3e-3", "model.depth": "2", "seed": "7",
    }  # fmt: skip
    config = config_of("data.name=a,b", "model.name=ViT-B/16")
    assert [m.name for m in sweep.find_members(config, {})] == [
        "data.name_a__model.name_ViT-B_16", "data.name_b__model.name_ViT-B_16",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"study\.sweep: two runs would have the workdir of one"):
        sweep.STUDY.check(config_of("data.ops=a|b,a/b"))


def test_report_gives_mean_and_deviation_over_seeds():
    config = config_of("optimizer.peak_lr=3e-3,1e-3", "seed=0,1")
    results = {
        "peak_lr_1e-3__seed_0": Result(FINISHED, {"step": 9, "held_out/top1": 0.5}),
        "peak_lr_1e-3__seed_1": Result(FINISHED, {"step": 9, "held_out/top1": 0.7}),
        "peak_lr_3e-3__seed_0": Result(DIVERGED, {}, "loss is nan"),
    }
    report = sweep.report(config, results)
    assert report.columns == ["optimizer.peak_lr", "held_out/top1, %"]
    assert report.rows == [["1e-3", "60.00 ± 14.14"], ["3e-3", "diverged"]]  # the best first
    assert report.best == ["peak_lr_1e-3__seed_0", "peak_lr_1e-3__seed_1"]
    assert not report.complete
    assert report.files["study.csv"].decode().splitlines()[:3] == [
        "optimizer.peak_lr,seed,state,held_out/top1,num_params,images_seen,exaflops",
        "3e-3,0,diverged,,,,", "1e-3,0,finished,0.5,,,",
    ]  # fmt: skip
    results["peak_lr_3e-3__seed_1"] = Result(FINISHED, {"step": 9, "held_out/top1": 0.25})
    report = sweep.report(config, results)
    assert report.complete and report.rows[1] == ["3e-3", "25.00 (1 of 2)"]
    assert report.values["combinations"][0]["values"] == [0.5, 0.7]
    assert not sweep.report(config_of("optimizer.peak_lr=1e-3", "seed=0,1"), results).best
    # One lucky seed beside a diverged one does not win.
    results["peak_lr_3e-3__seed_1"].summary["held_out/top1"] = 0.9
    assert sweep.report(config, results).best == report.best


def study(workdir, *flags):
    return main(["study", f"--config={CONFIG}", f"--workdir={workdir}", *flags])


def test_a_sweep_of_a_config_of_one_run(tmp_path, monkeypatch, capsys):
    def execute(command):
        words = dict(word.removeprefix("--").partition("=")[::2] for word in command[3:])
        workdir = pathlib.Path(words["workdir"])
        workdir.mkdir()
        top1 = 100 * float(words["config.optimizer.peak_lr"])
        (workdir / "summary.json").write_text(json.dumps({"step": 40, "test/top1": top1}))
        return running._Ended(0, "", told_to_stop=False)

    monkeypatch.setattr(running, "_execute", execute)
    flags = ("--sweep=optimizer.peak_lr=1e-3,3e-3", "--sweep=seed=0,1",
             "--sweep=data.ops=[bold] decode|flip")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(running, "check_member", lambda *args: None)
        assert study(tmp_path / "w", *flags) == 0
    out = "".join(capsys.readouterr().out.split())
    assert "[bold]decode|flip" in out  # a cell is no markup
    best = [f"{tmp_path}/w/peak_lr_3e-3__ops__bold_decode_flip__seed_{seed}" for seed in (0, 1)]
    assert f"best:{','.join(best)}" in out
    found = json.loads((tmp_path / "w/study.json").read_text())
    assert found["complete"] and found["metric"] == "test/top1"  # of the only evaluator
    assert [row["mean"] for row in found["combinations"]] == pytest.approx([0.3, 0.1])
    assert found["rows"][0] == ["3e-3", "[bold] decode|flip", "30.00 ± 0.00"]
    assert r"| 3e-3 | [bold] decode\|flip | 30.00 ± 0.00 |" in (tmp_path / "w/study.md").read_text()
    assert [str(tmp_path / "w" / name) for name in found["best"]] == best
    command = shlex.split(found["members"][found["best"][1]]["command"])
    assert command[3:] == [
        f"--config={CONFIG}", "--config.optimizer.peak_lr=3e-3",
        "--config.data.ops=[bold] decode|flip", "--config.seed=1", f"--workdir={best[1]}",
    ]  # fmt: skip
    capsys.readouterr()
    assert study(tmp_path / "v", "--sweep=optimizer.peak=1") == 2
    assert "optimizer.peak: no such key; did you mean optimizer.peak_lr?" in capsys.readouterr().err
    assert study(tmp_path / "v", "--sweep=seed=1,2", "--config.seed=3") == 2
    assert "--config.seed: set by the study sweep" in capsys.readouterr().err
    assert study(tmp_path / "v") == 2
    assert "give --sweep=KEY=VALUE,VALUE" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()
    of_study = CONFIG.replace("quickstart.py:debug", "finetune_study.py:ViT-B/4,cifar10,debug")
    assert main(["study", f"--config={of_study}", f"--workdir={tmp_path}", "--sweep=seed=1"]) == 2
    assert "is a study already (finetune_sweep)" in capsys.readouterr().err
