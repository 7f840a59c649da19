"""Runs side by side, from workdirs written by hand."""

import csv
import io
import json

import pytest
from opened import config_json
from rich.console import Console

from vit_jax.commands import report
from vit_jax.config.text import load_config
from vit_jax.insight import plots, runs
from vit_jax.main import main

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


def write_run(path, rows, **changes):
    config = load_config("configs/quickstart.py:debug")
    for key, value in changes.items():
        section, _, leaf = key.rpartition("__")
        (config[section] if section else config)[leaf] = value
    path.mkdir(parents=True)
    (path / "config.json").write_text(config_json(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workdirs(tmp_path):
    curve = [{"step": s, "train/loss": 2 / s, "time/images_per_s": 9.0} for s in (1, 2, 3)]
    a = write_run(
        tmp_path / "a/run", [*curve, {"step": 2, "test/top1": 0.5, "test/num_examples": 360}]
    )
    b = write_run(
        tmp_path / "b/run", [*curve[:2], {"step": 2, "train/loss": None, "val/top1": 0.25}],
        optimizer__peak_lr=0.5,
    )  # fmt: skip
    with open(b / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "train/l')  # cut off by a kill
    return [a, b]


def test_differences_and_last_metrics(workdirs):
    a, b = read = runs.read_all(workdirs)[0]
    assert (a.name, b.name, a.step, b.step) == ("a/run", "b/run", 3, 2)
    assert runs.differences(read) == {"optimizer.peak_lr": [1.5e-3, 0.5]}
    assert runs.last_values(read) == {
        "step": [3, 2],
        "test/top1": [0.5, None],
        "val/top1": [None, 0.25],
        "test/num_examples": [360, None],
        "train/loss": [pytest.approx(2 / 3), 1.0],  # not the NaN of step 2
    }
    assert isinstance(runs.last_values(read)["test/num_examples"][0], int)
    assert runs.choose_metrics(read) == ["train/loss", "test/top1", "val/top1"]


def test_steps_are_whole_numbers(workdirs):
    figure = plots.draw_runs(runs.read_all(workdirs)[0], ["train/loss"])
    ticks = figure.axes[0].get_xticks()
    assert (ticks == ticks.round()).all()


def test_tables_and_image(workdirs, tmp_path, capsys, json_of, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        plots, "as_file", lambda figure, form: drawn.append(figure) or form.encode()
    )
    words = ["report", *map(str, workdirs)]
    outputs = [f"--output={tmp_path / name}" for name in ("c.png", "t.csv")]
    assert main([*words, *outputs, "--metric=train/loss"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.peak_lr" in out and "50.00 %" in out and "0.0015: 2" in out
    assert (tmp_path / "c.png").read_bytes() == b"png" and len(drawn[0].axes) == 1
    table = list(csv.reader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert table[0] == ["kind", "name", "b/run", "a/run"]
    assert ["config", "optimizer.peak_lr", "0.5", "0.0015"] in table
    assert ["metrics", "test/top1", "", "0.5"] in table
    outputs = [f"--output={tmp_path / name}" for name in ("c.pdf", "c.svg", "t.tex")]
    assert main([*words, *outputs]) == 0
    assert (tmp_path / "c.pdf").read_bytes() == b"pdf"
    assert (tmp_path / "c.svg").read_bytes() == b"svg"
    table = (tmp_path / "t.tex").read_text()
    assert r"a/run & 1 & - & 50.00 \% \\" in table and "±" not in table
    said = json_of(*words, "--format=json")
    assert said["runs"] == ["b/run", "a/run"]
    assert said["config"] == {"optimizer.peak_lr": [0.5, 1.5e-3]}


def test_a_study_stands_for_its_runs(workdirs, tmp_path, json_of):
    folder = tmp_path / "a [1]"
    (tmp_path / "a").rename(folder)
    write_run(folder / "other", [], optimizer__peak_lr=0.25)
    (folder / "labels").mkdir()  # a member that is no run
    (folder / "study.json").write_text("{}")
    said = json_of("report", str(folder), str(tmp_path / "b/run"), "--format=json")
    assert said["runs"] == ["b/run", "a [1]/other", "a [1]/run"]  # one of them has val/top1
    assert said["config"] == {"optimizer.peak_lr": [0.5, 0.25, 1.5e-3]}


def test_no_plug_in_runs(workdirs):
    path = workdirs[1] / "config.json"
    content = json.loads(path.read_text())
    content["resolved"] |= {"plugins": ["lost.py"], "loss": {"name": "my_loss", "epsilon": 2.0}}
    path.write_text(json.dumps(content))
    found = runs.differences(runs.read_all(workdirs)[0])
    assert found["loss.epsilon"] == [runs.ABSENT, 2.0] and found["plugins"] == [(), ("lost.py",)]
    assert "data.mean" not in found


def test_a_folder_stands_for_its_runs_and_the_best_comes_first(workdirs, tmp_path, capsys):
    for i in range(9):
        rows = [{"step": 2, "train/loss": 1.0, "val/top1": i / 10, "test/top1": 0.5,
                 "val/macro_top1": 0.1, "val/ece": 0.5, "val/accuracy/a b": 0.1,
                 "train/grad_norm/layers_0": 0.1}]  # fmt: skip
        write_run(tmp_path / f"more/run_{i}", rows, seed=i)
    (tmp_path / "export").mkdir()  # of another library
    (tmp_path / "export/config.json").write_text('{"architecture": "vit"}')
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("In common: model.name ") and "optimizer" not in lines[0]
    assert max(map(len, lines[1:])) <= 80 or lines[-1].startswith("Not shown")
    shown = [
        line.split("│")[2].strip() for line in lines if line.startswith("│ ") and "unf" in line
    ]
    expected = [f"more/run_{i}" for i in range(8, -1, -1)]
    expected.insert(6, "b/run")  # with a val/top1 of 0.25
    assert shown == [*expected, "a/run"]
    found = runs.read_all([tmp_path])[0]
    assert runs.main_metric(found) == "val/top1"
    last = runs.last_values(runs.best_first(found))
    assert last["val/top1"][0] == 0.8 and last["val/accuracy/a b"][0] == 0.1
    assert "accuracy" not in "".join(lines)
    assert runs.choose_metrics(found)[-1] == "train/grad_norm/layers_0"  # no accuracy
    # What follows from other keys, and entries that only some runs have, are no differences.
    a, b = (found[i]._replace(config={"seed": i, "model.width": i, f"evals.{i}.split": i},
                              decided_by={"model.width": "source"}) for i in (0, 1))  # fmt: skip
    assert runs.differences([a, b]) == {"seed": [0, 1]}
    branches = [run._replace(decided_by=dict.fromkeys(run.config, "branch")) for run in (a, b)]
    assert {*runs.differences(branches)} == {"seed", "model.width"}
    a, b = (run._replace(config={"model.width": run.config["model.width"]}) for run in (a, b))
    assert runs.differences([a, b]) == {"model.width": [0, 1]}


def test_each_run_has_a_value_in_the_table(tmp_path, capsys):
    many = {f"val/{name}": 0.1 for name in ("top1", "top5", "macro_top1", "macro_f1", "ece")}
    for i in range(3):
        write_run(tmp_path / f"own_{i}", [{"step": 1, **many}], seed=i)
    write_run(tmp_path / "quickstart", [{"step": 1, "test/loss": 1.0, "test/top1": 0.9}], seed=3)
    write_run(tmp_path / "mae", [{"step": 1, "images/loss": 0.125}], seed=4)
    found = runs.read_all([tmp_path])[0]
    assert runs.by_use(runs.best_first(found))[:4] == [
        "val/top1", "images/loss", "test/top1", "val/top5",
    ]  # fmt: skip
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "90.00 %" in out and "0.125" in out and "seed" in out


def test_the_table_of_differences_is_short(capsys):
    config = {f"key_{i}": [1, 1, 1, 2, 1] for i in range(22)} | {"asked": [1, 2, 1, 1, 1]}
    report.print_differences(Console(), config, {"asked"})
    out = capsys.readouterr().out
    assert out.index("asked") < out.index("key_0") and "key_19" not in out
    assert "1: 1-3, 5" in out and "Not shown: 3 more keys" in out


def test_no_run_has_a_row_yet(tmp_path, capsys):
    words = ["report", str(write_run(tmp_path / "run", []))]
    assert main(words) == 0
    assert "0 unfinished" in capsys.readouterr().out
    assert main([*words, f"--output={tmp_path / 'c.png'}"]) == 2
    assert "no run has a metric yet" in capsys.readouterr().err
    assert main([*words, f"--output={tmp_path / 't.csv'}", f"--output={tmp_path / 't.tex'}"]) == 2
    assert "no run has a value for the table yet" in capsys.readouterr().err
    assert not (tmp_path / "t.csv").exists()


def test_a_latex_table_has_the_number_of_values_of_each_cell(tmp_path):
    for seed, rows in enumerate(([0.25, 2.0], [0.75, 4.0], [None, 6.0])):
        top1, loss = rows
        row = {"step": 1, "train/loss": loss} | ({} if top1 is None else {"test/top1": top1})
        write_run(tmp_path / f"run_{seed}", [row], seed=seed)
    read = runs.read_all([tmp_path])[0]
    table = runs.as_latex(read, ["train/loss", "test/top1"])
    assert r"run & 3 & 4 $\pm$ 2 & 50.00 $\pm$ 35.36 \% (n=2) \\" in table
    assert "standard deviation over n runs" in table
    assert r"run & 2 & 50.00 $\pm$ 35.36 \% \\" in runs.as_latex(read)


REFUSED = {
    "no run": ([], "no workdir"),
    "twice": (["run", "run"], "run, run"),
    "absent": (["no"], "no: no such folder"),
    "empty": (["x"], "holds no run or study, but a.txt"),
    "endings": (["run", "--output=x.eps", "--output=no/x.png"], "2 faults"),
    "figures": (["run", "--figures=no"], "--figures="),
    "metric": (["run", "--output=x.png", "--metric=train/los"], "--metric=train/los"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, capsys, case):
    words, says = REFUSED[case]
    write_run(tmp_path / "run", [{"step": 1, "train/loss": 1.0}])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *words]) == 2
    assert says in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
