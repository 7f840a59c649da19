"""The command line: wrong input is answered by one message, and nothing is written."""

import copy
import gc
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from at_fault import golden_page
from cheap_compilation import flags_for
from etils import epath
from opened import config_json, open_all

import vit_jax
from vit_jax import main as main_lib
from vit_jax.base.addresses import hide, reveal
from vit_jax.commands import COMMANDS
from vit_jax.config.other_words import FLAGS
from vit_jax.config.registries import OPS
from vit_jax.config.stored import StoredConfig, parse_stored
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.job import exit_codes, watchdog
from vit_jax.main import _handle_unraisable, main
from vit_jax.run.loop import Interrupted, Preempted
from vit_jax.run.setup.workdir import record_start
from vit_jax.run.watch.guards import NonFiniteError

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = "--config=configs/quickstart.py:debug"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def snapshot(folder):
    """Names, bytes and times of everything below `folder`."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(words): run `main`, check that it rejects them, and return the message.

    "WORKDIR" in a word stands for a directory that may not exist; tmp_path must not change.
    """

    def refused(*words):
        before = snapshot(tmp_path)
        code = main([word.replace("WORKDIR", str(tmp_path / "workdir")) for word in words])
        out, err = capsys.readouterr()
        assert code == 2
        assert "error" not in out
        assert err.startswith("error: ") and err.endswith("\n")
        assert "Traceback" not in out + err
        assert snapshot(tmp_path) == before
        return err

    return refused


def test_what_there_is(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr() == ("", text)
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*\.$", text, re.MULTILINE)


def train(refused, *words):
    return refused(QUICKSTART, "--workdir=WORKDIR", *words)


def test_all_faults_are_named_at_once(refused):
    err = train(refused, "--config.optimiser.name=sgd", "--config.seed=x", "--config.data.ops=flop")
    assert "3 faults" in err
    for key in ("--config.optimiser.name: ", "--config.seed='x': ", "data.ops: "):
        assert f"\n  {key}" in err


def test_existing_workdir_is_left_alone(refused, tmp_path):
    (tmp_path / "workdir/checkpoints").mkdir(parents=True)
    (tmp_path / "workdir/notes.txt").write_text("mine")
    assert "model.wdth" in train(refused, "--config.model.wdth=3")
    assert "global_batch_size=63" in train(refused, "--config.global_batch_size=63")
    assert "no such file" in train(refused, "--config.init_from=/no/such.npz")


# Initial weights


@pytest.mark.usefixtures("without_checks")
def test_unreadable_init_from(refused, tmp_path):
    """One that would run code; transfer/test_broken.py has the others."""
    path = write(tmp_path / "pretrained.pth.tar", b"x")
    err = train(refused, f"--config.init_from={path}")
    assert f"init_from={str(path)!r}" in err and "write its arrays to a .safe" in err


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.usefixtures("without_checks")
def test_init_from_workdir_without_checkpoint(refused, tmp_path):
    path = make_workdir(tmp_path / "pretrained")
    (path / "checkpoints").mkdir()
    err = train(refused, f"--config.init_from={path}")
    assert f"init_from={str(path)!r}: has no checkpoint yet" in err


@pytest.mark.usefixtures("without_checks")
def test_init_from_that_does_not_fit(refused, golden):
    source = f"--config.init_from={golden / 'vit_pretrained.npz'}"
    err = train(refused, source)
    assert "has another architecture" in err
    assert "model.pool='gap', but 'token' in the source" in err
    _, flags = err.split("to match the source: ")
    assert "--config.model.depth=3" in flags.split()
    err = train(refused, source, *flags.split(), "--config.model.layer_scale=0.1")
    assert "does not fit the model (set the fields of config.model to the source's values)" in err
    assert "encoder/layer_2/scale_mlp/scale (32,): absent from the source" in err


# The workdir


def make_workdir(path, *overrides):
    """Workdir of a quickstart run that has saved nothing yet."""
    config = load_config("configs/quickstart.py:debug")
    assert apply_overrides(config, list(overrides)) == []
    config, _ = open_all(config)
    path.mkdir()
    (path / "config.json").write_text(config_json(config))
    return path


@pytest.mark.usefixtures("without_checks")
def test_workdir_that_is_a_file(refused, tmp_path):
    write(tmp_path / "workdir", b"mine")
    err = train(refused)
    assert f"--workdir={tmp_path / 'workdir'}: is a file; give a directory" in err


@pytest.mark.usefixtures("without_checks")
def test_workdir_of_another_config(refused, tmp_path):
    make_workdir(tmp_path / "workdir", ("seed", "3"), ("log.every", "7 steps"))
    err = train(refused, "--config.model.pos_embed=none")
    assert "already holds a run with other settings; restore them, use a new --workdir" in err
    assert "2 faults" in err
    assert "seed: was 3, now 0" in err
    assert "--config.model.pos_embed=None" in err
    assert "log.every" not in err


def test_workdir_of_another_version(refused, tmp_path):
    config = make_workdir(tmp_path / "workdir") / "config.json"
    config.write_text(config.read_text().replace('"dropout"', '"drop_out"'))
    err = train(refused)
    assert "model.drop_out: no such key; did you mean dropout?" in err
    assert "model.drop_out: no such key" in refused("evaluate", "--workdir=WORKDIR")
    config.write_text("{")
    assert "config.json: damaged" in train(refused)


@pytest.mark.usefixtures("without_checks")
def test_workdir_that_cannot_be_made(refused, tmp_path):
    write(tmp_path / "file", b"mine")
    err = refused(QUICKSTART, f"--workdir={tmp_path / 'file/workdir'}")
    assert f"--workdir={tmp_path / 'file/workdir'}" in err


def test_ops_that_give_another_image_size(refused):
    err = train(refused, "--config.data.ops=resize(16)")
    assert "data.ops='resize(16)' gives images of (16, 16, 3); needed: (8, 8, 3)" in err


# Commands and flags


PAGE = ROOT / "tests/refused.txt"


@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("words", golden_page(PAGE))
def test_bad_command_line(refused, tmp_path, words):
    """With faults that only the flags, the files or the devices show; run/faults.txt has more."""
    said = refused(*shlex.split(words)).replace(str(tmp_path / "workdir"), "WORKDIR")
    said = said.replace(f"{ROOT}/", "")
    assert said.removeprefix("error: ").strip() == golden_page(PAGE)[words]


def test_wrong_flags_are_answered_with_all_flags(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        main([QUICKSTART, f"--workdir={tmp_path / 'workdir'}", "--num_processes=two"])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "--num_processes: invalid int value: 'two'" in err.splitlines()[-1]
    assert all(f"[--{flag}" in err for flag in ("workdir DIR", "config NAME", "config.KEY VALUE"))
    assert not (tmp_path / "workdir").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("benchmark --what=stap", "--what: invalid choice: 'stap'"),
        ("benchmark --what=step --steps=0", "--steps: got '0'; needs a positive int"),
        (f"predict --batch_size={10**20}", f"--batch_size: got '{10**20}'; needs a positive int"),
        ("report runs/a --format=xml", "--format: invalid choice: 'xml'"),
        ("export --weights=both", "--weights: invalid choice: 'both'"),
        ("figures --image_size=big", "--image_size: invalid image_size value: 'big'"),
        ("figures --image_size=²", "--image_size: invalid image_size value: '²'"),
    ],
)
def test_values_of_flags_are_checked_first(words, says, capsys):
    with pytest.raises(SystemExit) as e:
        main(words.split())
    assert e.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        main([command, "--help"])
    out, err = capsys.readouterr()
    assert (e.value.code, err) == (0, "")
    assert out.startswith(f"usage: vit_jax {command} ")
    of_runs = ("train", "branch", "evaluate", "predict", "export", "study", "label", "figures",
               "doctor", "keys")  # fmt: skip
    of_jobs = ("train", "evaluate", "predict", "label", "doctor", "certify")
    assert ("--workdir DIR" in out) == (command in of_runs)
    assert ("--coordinator HOST:PORT" in out) == (command in of_jobs)
    of_configs = ("train", "evaluate", "benchmark", "plan", "study", "label", "doctor", "certify",
                  "keys")  # fmt: skip
    assert ("--print_config" in out) == (command in of_configs)
    of_keys = (*of_configs, "branch", "check", "prepare", "duplicates")
    assert ("--config.KEY VALUE" in out) == (command in of_keys)
    assert f"\n  python -m vit_jax.main {'' if command == 'train' else command}" in out


@pytest.mark.parametrize("command", ["train", "benchmark", "plan", "study"])
def test_print_config(refused, command, capsys):
    words = [command, "--config=quickstart:debug", "--print_config"]
    assert main([*words, "--config.seed=3", "--config.mesh.fsdp", "2"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert (printed["seed"], printed["mesh"]["fsdp"], err) == (3, 2, "")
    assert printed["duration"] == "40 steps"
    assert (printed["optimizer"]["b2"], printed["model"]["norm_eps"]) == (0.999, 1e-6)  # of parts
    assert "momentum" not in printed["optimizer"] and printed["evals"]["test"]["type"]
    assert "--config.seed='x': needs an int" in refused(*words, "--config.seed=x")
    assert "--config: missing; e.g. --config=quickstart" in refused(command, "--print_config")


def test_print_config_of_evaluate(json_of):
    printed = json_of("evaluate", "--config=evaluate:knn,cifar10", "--print_config")
    assert (list(printed["evals"]), printed["data"]["name"]) == (["knn"], "cifar10")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_print_config_of_a_run(command, tmp_path, json_of):
    config = load_config("configs/quickstart.py:debug")
    (tmp_path / "config.json").write_text(config_json(config))
    printed = json_of(command, f"--workdir={tmp_path}", "--print_config", "--config.seed=3")
    assert (printed["seed"], printed["model"]["width"]) == (3, config.model.width)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vit_jax {vit_jax.__version__}\n"


def test_list_of_configs(capsys):
    assert main(["configs"]) == 0
    out = capsys.readouterr().out
    for path in (ROOT / "configs").glob("*.py"):
        head, _, _ = path.read_text().removeprefix('"""').partition("\n")
        assert f"{path.stem}: {head}\n" in out
    assert "\n    headline            512 px and averaged weights, for imagenet2012\n" in out
    assert out.count("\n    debug  ") == len(list((ROOT / "configs").glob("*.py")))


def test_one_config(refused, capsys):
    assert main(["configs", "quickstart"]) == 0
    out = capsys.readouterr().out
    assert "vit_jax --config=quickstart --workdir" in out
    assert "\n    debug  " in out and "mae" not in out
    assert "did you mean quickstart?" in refused("configs", "quikstart")


def keys_of(capsys, *words):
    assert main(["keys", *words, "--format=json"]) == 0
    return {row.pop("key"): row for row in json.loads(capsys.readouterr().out)}


def test_keys_of_a_config(capsys):
    words = ["--config=finetune:ViT-B/16,folder", "--config.seed=3", "--config.data.ops.flip=None"]
    rows = keys_of(capsys, *words)
    by = {key: (row["value"], row["decided_by"]) for key, row in rows.items()}
    assert by["seed"] == (3, "user") and by["data.ops"] == ("scaled_inception_crop", "user")
    assert by["optimizer.name"] == ("sgd", "recipe") and by["optimizer.l2"] == (0.0, "default")
    assert by["optimizer.momentum"][1] == "default" and by["model.width"] == (768, "source")
    waiting = {"duration": "rule", "schedule.warmup": "rule", "data.num_classes": "data",
               "data.image_size": "source", "mesh.fsdp": "devices", "data.mean": "source",
               "model.scan": "devices", "model.dropout": "default",
               "model.kernels": "default"}  # fmt: skip
    assert {key: by[key][1] for key in waiting} == waiting
    resume = {"seed": "no", "evals.val.every": "yes", "duration": "past", "mesh.fsdp": "yes"}
    assert {key: rows[key]["resume"] for key in resume} == resume


def test_keys_of_a_run(tmp_path, capsys):
    config = load_config("configs/quickstart.py:debug")
    asked = copy.deepcopy(config)
    asked.schedule.warmup = "10 %"
    stored = StoredConfig(asked, config, {"schedule.warmup": "duration"})
    (tmp_path / "config.json").write_text(stored.to_json())
    rows = keys_of(capsys, "duration", "warmup", f"--workdir={tmp_path}")
    assert (rows["duration"]["value"], rows["duration"]["resume"]) == ("40 steps", "past")
    warmup = rows["schedule.warmup"]
    assert (warmup["value"], warmup["decided_by"]) == ("4 steps", "10 % of the duration")


def test_keys_by_part_section_name_and_text(refused, capsys):
    assert {*keys_of(capsys, "Rsqrt")} == {"schedule.timescale"}
    assert keys_of(capsys, "mae")["objective.mask_ratio"]["decided_by"] == "with mae"
    assert {"size", "crop"} <= {key.removeprefix("resize.") for key in keys_of(capsys, "resize")}
    assert "evals.NAME.shots" in keys_of(capsys, "fewshot")
    assert keys_of(capsys, "ViT-B/16").keys() == keys_of(capsys, "ViT").keys()
    assert keys_of(capsys, "ViT-B/16")["model.width"]["value"] == 768
    assert not keys_of(capsys, "top1", "learned_1d") and "loss.name" in keys_of(capsys, "loss")
    assert {*keys_of(capsys, "stop")} == {"stop.metric", "stop.patience"}
    assert {*keys_of(capsys, "peak_lr", "seed")} == {"optimizer.peak_lr", "seed"}
    assert "schedule.warmup" in keys_of(capsys, "warm-up")
    assert "did you mean momentum?" in refused("keys", "momentun")
    assert main(["keys", "data.num_examples"]) == 0  # piped, it is one whole line
    assert "None: taken from the data (int in (0, inf))" in capsys.readouterr().out


def test_keys_by_the_words_of_other_libraries(refused, capsys):
    keys = [flag.own_key for flag in FLAGS]
    assert {*keys_of(capsys, *keys)} == {*keys}  # all are keys
    assert {op for flag in FLAGS if (op := flag.key.partition("=")[2])} <= {*OPS}
    for word, key in (
        ("warmup-epochs", "schedule.warmup"), ("drop_path", "model.stochastic_depth"),
        ("epochs", "duration"), ("blr", "optimizer.peak_lr"), ("threeaugment", "data.ops"),
        ("recount", "data.ops"), ("remode", "data.ops"), ("rand-m9-mstd0.5-inc1", "data.ops"),
        ("color-jitter", "data.ops"), ("vflip", "data.ops"),
    ):  # fmt: skip
        assert {*keys_of(capsys, word)} == {key}
    assert main(["keys", "wd"]) == 0
    assert "it is big_vision's wd divided by its lr" in capsys.readouterr().out
    err = refused(QUICKSTART, "--workdir=runs/x", "--drop_path=0.1")
    assert "did you mean --config.model.stochastic_depth?" in err
    err = refused(QUICKSTART, "--workdir=runs/x", "--config.reprob=0.1")
    assert "did you mean data.ops?" in err
    err = refused(QUICKSTART, "--workdir=runs/x", "--pin-mem", "--mixup-off-epoch=200")
    assert "--pin-mem: no such flag of train; nothing to set: " in err
    assert "--mixup-off-epoch=200: no such flag of train; not there" in err
    assert "val-split: no key; an evaluator has it: " in refused("keys", "val-split")


def test_list_of_models(refused, capsys):
    assert main(["models", "MU", "R+"]) == 0
    note, heading, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "224" in note and heading == ["name", "parameters", "GMAC"]
    assert [row[0] for row in rows] == ["ViT-mu/16", "R+ViT-Ti/16"]
    table = (ROOT / "docs/reference/models.md").read_text()
    for row in rows:
        assert f"| {' | '.join(row)} |\n" in table
    err = refused("models", "vit_b")
    assert "vit_b: no model has this in its name; did you mean ViT-B/" in err
    assert "did you mean T2T-ViT-1" in refused("models", "T2T-ViT-15")
    assert "--config.seed: this command takes no config" in refused("models", "--config.seed=1")


def test_a_token_in_an_address_is_no_part_of_what_is_stored(tmp_path, monkeypatch, capsys):
    whole = "https://me:pass@127.0.0.1:9/a.npz?token=pass"
    words = [QUICKSTART, f"--workdir={tmp_path / 'run'}", f"--config.init_from={whole}"]
    monkeypatch.setattr("sys.orig_argv", words)
    found = []

    def train_and_evaluate(asked, workdir, command, choose_layout, began):
        record_start(epath.Path(workdir), (), None, command)
        config = asked.to_config()
        text = StoredConfig(config, config, {}).to_json()  # and of an earlier version
        before = parse_stored(text.replace(hide(whole), whole), epath.Path(workdir))
        found.extend([text, before.asked.init_from, reveal(config.init_from)])

    monkeypatch.setattr("vit_jax.run.train.train_and_evaluate", train_and_evaluate)
    (tmp_path / "run").mkdir()
    assert main(words) == 0
    assert found[1:] == [hide(whole), whole]
    assert "pass" not in found[0] + (tmp_path / "run/starts.jsonl").read_text()
    assert main(["export", f"--init_from={whole}", f"--output={tmp_path / 'x'}"]) == 2
    assert "pass" not in capsys.readouterr().err


def test_exit_codes_of_train(tmp_path, monkeypatch, capsys):
    words = [QUICKSTART, f"--workdir={tmp_path / 'workdir'}", "--config.seed=5"]

    def end_with(error):
        def train_and_evaluate(asked, workdir, command, choose_layout, began):
            assert (asked.run.seed, workdir) == (5, str(tmp_path / "workdir"))
            assert command["overrides"] == {"seed": "5"} and command["config"] in QUICKSTART
            if error is not None:
                raise error

        monkeypatch.setattr("vit_jax.run.train.train_and_evaluate", train_and_evaluate)
        return main(words), capsys.readouterr().err

    assert end_with(None)[0] == 0
    code, err = end_with(Preempted("stopped at step 7"))
    assert (code, err.splitlines()[-1]) == (75, "stopped at step 7")
    code, err = end_with(Interrupted("stopped at step 7"))
    assert (code, err.splitlines()[-1]) == (130, "stopped at step 7")
    code, err = end_with(KeyboardInterrupt())
    nothing = "Interrupted; nothing is saved. Run the same command to begin"
    assert (code, err.splitlines()[-1]) == (130, nothing)
    code, err = end_with(NonFiniteError("step 8: loss is nan"))
    assert (code, err.splitlines()[-1]) == (1, "error: step 8: loss is nan")
    full = ValueError('RESOURCE_EXHAUSTED: Error writing "a":\nNo space left on device [28]')
    code, err = end_with(full)  # as tensorstore says it
    assert (code, "Traceback" in err) == (2, False)
    assert err.endswith('"a": No space left on device [28]; free space on its disk, then run the '
                        "same command again\n")  # fmt: skip


@pytest.mark.parametrize(("text", "is_shown"), [("Event loop is closed", False), ("b", True)])
def test_writes_that_end_after_a_failed_save_print_nothing(monkeypatch, capsys, text, is_shown):
    class Late:
        def __del__(self):
            raise RuntimeError(text)

    monkeypatch.setattr(sys, "unraisablehook", _handle_unraisable)
    Late()
    assert ("Traceback" in capsys.readouterr().err) == is_shown


def test_a_run_goes_on_without_its_config(tmp_path, monkeypatch, refused):
    config = load_config("quickstart:debug")
    config.seed = 7
    (tmp_path / "config.json").write_text(config_json(config))
    seen = []
    monkeypatch.setattr(
        "vit_jax.run.train.train_and_evaluate", lambda *args, began: seen.append(args)
    )
    assert main([f"--workdir={tmp_path}", "--config.log.every=3 steps"]) == 0
    config.log.every = "3 steps"
    asked, *others = seen[0][:3]
    assert asked.to_config() == config
    assert others == [str(tmp_path), {"config": None, "overrides": {"log.every": "3 steps"}}]
    assert "config.sed" in refused(f"--workdir={tmp_path}", "--config.sed=1")
    assert "without stop.metric" in refused(f"--workdir={tmp_path}", "--config.stop.patience=2")
    assert "other: holds no run" in refused(f"--workdir={tmp_path}/other")


@pytest.mark.usefixtures("without_checks")
@pytest.mark.parametrize("words", [[], ["--config=quickstart:debug"]])
def test_a_store_whose_library_is_missing_is_not_asked(words, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.setattr("etils.epath.gpath._GPath.exists", None)
    assert "need google-cloud-storage" in refused(*words, "--workdir=gs://bucket/run")


def test_a_long_name_is_refused_in_one_line(refused):
    long = f"WORKDIR/{'é' * 130}"
    of_folder = ("--config=folder:debug", "--workdir=WORKDIR", f"--config.data.data_dir={long}")
    assert re.search("choose a shorter name|is not a local folder", refused(*of_folder))
    for words in ([QUICKSTART], ["report", "--output={}.html"], ["report", "--output={}.csv"]):
        words = [word.format(long) for word in words]
        flag = "--output" if len(words) > 1 else "--workdir"
        err = refused(*words, *[f"--workdir={long}"] * (flag == "--workdir"))
        assert re.fullmatch(rf"error: {flag}=.*; choose a shorter one\n", err)


# evaluate


@pytest.mark.usefixtures("without_checks")
def test_evaluate_before_the_first_checkpoint(refused, tmp_path):
    make_workdir(tmp_path / "workdir")
    (tmp_path / "workdir/classes.json").write_text("null")
    err = refused("evaluate", "--workdir=WORKDIR")
    assert f"--workdir={tmp_path / 'workdir'}: has no checkpoint yet" in err
    (tmp_path / "workdir/checkpoints").mkdir()
    assert "has no checkpoint yet" in refused("evaluate", "--workdir=WORKDIR")


def test_evaluate_with_faults(refused, tmp_path):
    make_workdir(tmp_path / "workdir")
    (tmp_path / "workdir/classes.json").write_text("null")
    err = refused("evaluate", "--workdir=WORKDIR", "--config.evals.tset.split=x", "--config.seed=x")
    assert f"{tmp_path / 'workdir'}/config.json: 2 faults" in err
    assert "did you mean evals.test.split?" in err
    err = refused("evaluate", "--workdir=WORKDIR", "--config.evals.test.batch_size=100")
    assert "evals.test.batch_size=100" in err


def test_evaluate_without_evaluators(refused, tmp_path):
    config = load_config("configs/quickstart.py:debug")
    del config.evals.test
    (tmp_path / "workdir").mkdir()
    (tmp_path / "workdir/config.json").write_text(config_json(config))
    assert "its config lists no evaluators" in refused("evaluate", "--workdir=WORKDIR")


# As a user runs it


def run_command(*words, **options):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_for(8)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment} | options
    command = [sys.executable, "-m", "vit_jax.main", *words]
    return subprocess.run(command, text=True, cwd=ROOT, **options)


@pytest.mark.slow
def test_message_is_all_that_is_printed(tmp_path):
    """No warnings and no traceback, after devices and data are opened."""
    workdir = tmp_path / "workdir"
    done = run_command(QUICKSTART, f"--workdir={workdir}", "--config.data.num_classes=7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: data.num_classes=7: digits train has 10; set ")
    assert done.stderr.count("\n") == 1
    assert not workdir.exists()


def test_reader_that_leaves():
    """As `vit_jax models | head -1` does; the version needs no JAX."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run_command("--version", stdout=writer)  # fails when the buffer is flushed
    os.close(writer)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_an_old_python_is_refused_in_one_line():
    code = "import sys; sys.version_info = (3, 10, 13); import vit_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "needs Python 3.11 or newer" in line and sys.executable in line


def test_ctrl_c_during_a_callback_of_the_garbage_collector_is_not_lost():
    code = """if True:
        import gc, signal, time
        from vit_jax import main
        from vit_jax.commands import status

        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupted(phase, info):
            gc.callbacks.remove(interrupted)
            signal.raise_signal(signal.SIGINT)

        def goes_on(flags):
            gc.callbacks.append(interrupted)
            gc.collect()
            time.sleep(60)  # ends the test if Ctrl-C is lost

        status.main = goes_on
        main.execute_and_exit(["status", "runs"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (exit_codes.INTERRUPTED, "Interrupted\n")


def test_a_start_looks_for_garbage_less_often(monkeypatch):
    """With Python's threshold of 700, the search took an eighth of the quickstart's start."""
    before = gc.get_threshold()
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(main_lib, "execute", lambda argv: (gc.get_threshold()[0], None))
    monkeypatch.setattr(watchdog, "leave", lambda code, error: sys.exit(code))
    try:
        with pytest.raises(SystemExit) as left:
            main_lib.execute_and_exit([])
    finally:
        gc.set_threshold(*before)
    assert left.value.code == 20_000
