"""A study of every combination of values, from results as members leave them."""

import json
import pathlib
import shlex

import pytest
from opened import config_json, with_known_facts
from studied import config_of, csv_of, done, keys_at_fault, names_of, report_of, study_of

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, knn, multilabel, plugins
from vit_jax.config.text import load_config
from vit_jax.main import main
from vit_jax.studies import running
from vit_jax.studies.engine import Found, Result
from vit_jax.studies.preparation import make_sweep
from vit_jax.studies.sweep import parse_sweep
from vit_jax.studies.tables import DIVERGED

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


def sweep_of(*texts):
    return config_of("sweep", sweep=texts)


def test_names_too_long_for_a_disk_are_shortened_and_stay_different(tmp_path):
    def names(length):  # in bytes; "init_from_" has 10
        values = ",".join("é" * 100 + "x" * (length - 211) + end for end in "ab")
        return names_of(sweep_of(f"init_from={values}"))

    assert names(255)[0] == "init_from_" + "é" * 100 + "x" * 44 + "a"
    found = names(256) + names(600)
    assert len({*found}) == 4 and all(name.startswith("init_from_éé") for name in found)
    for name in found:
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
    assert parse_sweep([text]) == {text.partition("=")[0]: values}


def test_faults_are_told_at_once():
    texts = ("seed", "seed=", "=1", "duration=1,,2", "data.mean=[1,2", "a=1", "a=2")
    with pytest.raises(InputError) as e:
        parse_sweep(texts)
    keys = [fault.partition(":")[0] for fault in e.value.faults]
    assert {*keys} == {f"--sweep={text}" for text in texts} - {"--sweep=a=1"}
    assert {*keys_at_fault(sweep_of("seed=1,1"))} == {"study"}  # one workdir for two runs
    assert "study.sweep" in keys_at_fault(sweep_of())
    for text in ("optimizer.peak_lr='x'", "optimizer.lrr"):
        with pytest.raises(InputError, match=f"--sweep={text}: "):
            study_of(sweep_of(f"{text.partition('=')[0]}=x")).check_all()


def test_the_metric_is_one_that_the_evaluator_will_report():
    c = sweep_of("seed=0,1")
    c.evals.several = multilabel(split="test", every="1 epochs")
    c.evals.near = knn(train_split="a", test_split="b", every="1 epochs", num_neighbours=(3,))
    for name in ("several", "near"):
        c.study.metric = f"{name}/top1"
        assert keys_at_fault(c) == ["study.metric"]


def test_without_a_metric_it_is_the_first_accuracy_of_an_evaluator_that_is_always_there():
    for entry, metric in (
        (multilabel(split="val", every="1 epochs"), "val/mean_ap"),
        (knn(train_split="a", test_split="b", every="1 epochs", num_neighbours=(3,)),
         "val/3nn_top1"),
    ):  # fmt: skip
        c = base_config()
        c.evals.perhaps = classification(split="test?", every="1 epochs")
        c.evals.val = entry
        make_sweep(c, running.Call("mine", [], pathlib.Path(), None, False), ["seed=0,1"])
        assert (c.study.name, c.study.sweep, c.study.metric) == ("sweep", ("seed=0,1",), metric)


def test_members_are_combinations_seed_by_seed():
    assert names_of(sweep_of("optimizer.peak_lr=1,2", "seed=0,1", "data.subset=5,9"))[:5] == [
        "peak_lr_1__subset_5__seed_0", "peak_lr_1__subset_9__seed_0",
        "peak_lr_2__subset_5__seed_0", "peak_lr_2__subset_9__seed_0",
        "peak_lr_1__subset_5__seed_1",
    ]  # fmt: skip
    same_leaf = sweep_of("optimizer.name=sgd", "model.name=a,b")
    assert names_of(same_leaf)[0] == "optimizer.name_sgd__model.name_a"


def test_rows_have_mean_and_deviation_over_the_seeds():
    config = sweep_of("optimizer.peak_lr=3e-3,1e-3", "seed=0,1")
    results = {
        "peak_lr_1e-3__seed_0": done(0.5),
        "peak_lr_1e-3__seed_1": done(0.7),
        "peak_lr_3e-3__seed_0": Result(DIVERGED, {}, "loss is nan"),
    }
    report = report_of(config, results)
    assert report.columns == ["optimizer.peak_lr", "held_out/top1, %"]
    assert report.texts == [["1e-3", "60.00 ± 14.14"], ["3e-3", "diverged"]]  # the best first
    best = ["peak_lr_1e-3__seed_0", "peak_lr_1e-3__seed_1"]
    assert report.best.names == best and not report.is_complete
    row = csv_of(config, results)[0]
    assert (row["optimizer.peak_lr"], row["seed"], row["state"]) == ("3e-3", "0", "diverged")
    results["peak_lr_3e-3__seed_1"] = done(0.25)
    report = report_of(config, results)
    assert report.is_complete and report.texts[1] == ["3e-3", "25.00 (1 of 2)"]
    assert not report_of(sweep_of("optimizer.peak_lr=1e-3", "seed=0,1"), results).best.names
    results["peak_lr_3e-3__seed_1"] = done(0.9)
    assert report_of(config, results).best.names == best  # one lucky seed beside a diverged one


@pytest.mark.slow
def test_a_sweep_of_a_config_of_one_run(tmp_path, monkeypatch, capsys):
    def study(workdir, *flags):
        return main(["study", f"--config={CONFIG}", f"--workdir={tmp_path / workdir}", *flags])

    def execute(command):
        words = dict(word.removeprefix("--").partition("=")[::2] for word in command[3:])
        workdir = pathlib.Path(words["workdir"])
        workdir.mkdir()
        top1 = 100 * float(words["config.optimizer.peak_lr"])
        (workdir / "summary.json").write_text(json.dumps({"step": 40, "test/top1": top1}))
        (workdir / "config.json").write_text(config_json(with_known_facts(load_config(CONFIG))))
        return 0, "", False

    monkeypatch.setattr(running, "_execute", execute)
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    own = tmp_path / "own.py"
    own.touch()
    flags = ("--sweep=optimizer.peak_lr=1e-3,3e-3", "--sweep=seed=0,1",
             "--sweep=data.ops=[bold] decode|flip")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(running, "check_members", lambda *args: None)
        assert study("w", *flags) == 0
        assert study("own", *flags, f"--config.plugins={own}") == 0
    winner = json.loads((tmp_path / "own/study.json").read_text())["winner"]
    assert winner["next"].endswith(f" --config.plugins={own}")
    out = "".join(capsys.readouterr().out.split())
    assert "[bold]decode|flip" in out  # a cell is no markup
    best = [f"{tmp_path}/w/peak_lr_3e-3__ops__bold_decode_flip__seed_{seed}" for seed in (0, 1)]
    assert f"Workdir:{best[0]}Workdir:{best[1]}Next:vit_jaxevaluate--workdir={best[0]}" in out
    longer = f"Totrainitlonger:vit_jaxbranch--init_from={best[0]}--workdir=NEW'--config.duration=80"
    assert longer in out and "--rule=cosine--config.optimizer.peak_lr=0.0015" in out
    found = json.loads((tmp_path / "w/study.json").read_text())
    said = f"# {CONFIG}: sweep\n\noptimizer.peak_lr: 1e-3, 3e-3; seed: 0, 1\n\n"
    page = (tmp_path / "w/study.md").read_text()
    assert page.startswith(said) and f"Workdir: {best[1]}" in page
    assert found["winner"]["values"] == pytest.approx({"test/top1": 0.3})
    assert found["complete"] and found["metric"] == "test/top1"  # of the only evaluator
    assert [row["test/top1, %"]["mean"] for row in found["table"]] == pytest.approx([0.3, 0.1])
    assert found["rows"][0] == ["3e-3", "[bold] decode|flip", "30.00 ± 0.00"]
    assert r"| 3e-3 | [bold] decode\|flip | 30.00 ± 0.00 |" in (tmp_path / "w/study.md").read_text()
    assert "\n± is the sample standard deviation over n=2 seeds.\n" in page
    latex = r"3e-3 & {[}bold] decode\textbar{}flip & 30.00 $\pm$ 0.00 \\"
    assert latex in (tmp_path / "w/study.tex").read_text()
    assert [str(tmp_path / "w" / name) for name in found["best"]] == best
    sweep = [flag.removeprefix("--sweep=") for flag in flags]
    with monkeypatch.context() as patch:
        patch.setattr(running, "check_members", lambda *args: None)
        assert vit_jax.study(CONFIG, tmp_path / "w", sweep=sweep) == found
    command = shlex.split(found["members"][found["best"][1]]["command"])
    assert command[3:] == [
        f"--config={CONFIG}", "--config.optimizer.peak_lr=3e-3",
        "--config.data.ops=[bold] decode|flip", "--config.seed=1", f"--workdir={best[1]}",
    ]  # fmt: skip
    of_study = f"--config={CONFIG.replace('quickstart.py', 'finetune_study.py:ViT-B/4,cifar10')}"
    capsys.readouterr()
    for flags, key in (
        (["--sweep=optimizer.peak=1"], "optimizer.peak"),
        (["--sweep=seed=1,2", "--config.seed=3"], "--config.seed"),
        ([], "study.name"),
        (["--sweep=seed=1", of_study.replace(":debug", ",debug")], "--sweep"),
    ):
        assert study("v", *flags) == 2
        assert f"{key}: " in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_what_is_within_a_deviation_of_the_best_is_said():
    config = config_of("sweep", sweep=("optimizer.peak_lr=1,2,3", "seed=0,1"))
    study, values = study_of(config), {"1": (0.5, 0.6), "2": (0.52, 0.5), "3": (0.3, 0.31)}
    results = {m.name: done(values[m.place["optimizer.peak_lr"]][int(m.place["seed"])])
               for m in study.members({})}  # fmt: skip
    names, near = study.report(Found(study, results)).best
    assert len(names) == 2 and near == [{"optimizer.peak_lr": "2"}]
    winner = {"place": {"a": 1}, "near": near, "values": {}, "workdirs": [], "next": ""}
    assert running._say_winner(winner)[1].endswith(
        "one standard deviation of it: optimizer.peak_lr 2"
    )
    one_seed = {name: result for name, result in results.items() if name.endswith("seed_0")}
    assert study.report(Found(study, one_seed)).best.near == []  # no deviation is known
