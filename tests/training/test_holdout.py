"""No command trains on images that a run held out of its folder, whatever the seed."""

import json
import shutil

import numpy as np
import pytest
from etils import epath
from numpy_vit import random_params

from vit_jax import data, transfer
from vit_jax.config.stored import read_config, to_json
from vit_jax.config.text import load_config
from vit_jax.data import make_source
from vit_jax.errors import InputError
from vit_jax.inference import evaluate as evaluation
from vit_jax.inference import predict as prediction
from vit_jax.main import main
from vit_jax.models import create_model
from vit_jax.studies.members import Member
from vit_jax.studies.running import Call, check_member
from vit_jax.training.holdout import adopt_holdout
from vit_jax.training.prepare import prepare
from vit_jax.training.workdir import write_workdir

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

RULES = {"older": "seed 3", "new": "names"}


@pytest.fixture(scope="module")
def pictures(golden):
    return str(golden / "older_run/pictures")


@pytest.fixture(params=["older", pytest.param("new", marks=pytest.mark.slow)])
def run(request, golden, tmp_path):
    """(workdir, rule) of a run by an older version, and of one by this version."""
    workdir = shutil.copytree(golden / "older_run/workdir", tmp_path / "run")
    if request.param == "new":
        stored = json.loads((workdir / "config.json").read_text())
        stored["data"]["holdout"] = "names"
        (workdir / "config.json").write_text(json.dumps(stored))
    return workdir, RULES[request.param]


@pytest.fixture
def opened(monkeypatch):
    """[(split, names of its records)] for all sources opened from now on."""
    splits, make = [], data.make_source

    def note(name, **how):
        source = make(name, **how)
        splits.append((how["split"], names(source)))
        return source

    monkeypatch.setattr(data, "make_source", note)
    return splits


def names(source):
    return {source.record_name(record) for record in range(source.num_examples)}


def folder(pictures, split, rule):
    source = make_source("folder", split=split, data_dir=pictures, holdout=rule, image_size=(8, 8))
    return names(source)


def test_the_rules_differ(pictures):
    assert folder(pictures, "val", "names") != folder(pictures, "val", "seed 3")


def finetune_config(pictures, workdir, seed, **fields):
    c = load_config("configs/folder.py:debug")
    c.data.data_dir, c.seed, c.init_from, c.data.image_size = pictures, seed, str(workdir), 8
    c.model.update(read_config(epath.Path(workdir)).model.to_dict())
    c.data.update(fields)
    return c


@pytest.mark.parametrize("format", ["npz", "timm", "hf"])
def test_an_export_has_the_run_s_rule(run, pictures, tmp_path, format):
    workdir, rule = run
    source = transfer.read_pretrained(workdir)
    assert source.spec.holdout == rule
    model = create_model("ViT-mu/4", 2, 8, depth=1, width=8, mlp_dim=8, num_heads=2)
    params = random_params(model, np.zeros((1, 8, 8, 3), np.float32))
    output = tmp_path / ("model.npz" if format == "npz" else "model")
    transfer.save_pretrained(output, model, {"params": params}, format, source.spec)
    pretrained = transfer.read_pretrained(output)
    config = load_config("configs/evaluate.py:classification,folder")
    config.data.data_dir = pictures
    assert adopt_holdout(config, pretrained).data.holdout == rule
    config.data.holdout = "seed 9"
    with pytest.raises(InputError, match=r"data\.holdout='seed 9'"):
        adopt_holdout(config, pretrained)


@pytest.mark.slow
def test_every_command_holds_out_what_the_run_did(
    run, pictures, opened, monkeypatch, tmp_path, capsys
):
    workdir, rule = run
    monkeypatch.setattr(evaluation, "_evaluate_all", lambda evaluators, *_: {})
    monkeypatch.setattr(prediction, "write_features", lambda *_, **__: {"unreadable": 0})
    where = f"--config.data.data_dir={pictures}"
    of_run = f"--init_from={workdir}"
    words = "classification,fewshot,knn,probe,folder"
    assert main(["evaluate", f"--workdir={workdir}", where]) == 0
    assert main(["evaluate", of_run, f"--config=configs/evaluate.py:{words}", where]) == 0
    for split in ("train", "val"):
        features = ["--features=f.npz", f"--data=folder:{split}", f"--data_dir={pictures}"]
        assert main(["predict", of_run, *features]) == 0
    for seed in (3, 4):
        tuned = prepare(finetune_config(pictures, workdir, seed), tmp_path / f"tuned_{seed}")
        assert tuned.config.data.holdout == rule

    splits = {split: folder(pictures, split, rule) for split in ("train", "val")}
    assert not splits["train"] & splits["val"]
    assert opened == [(split, splits[split]) for split, _ in opened]
    assert [split for split, _ in opened].count("val") == 5


def test_what_starts_from_a_run_goes_on_by_its_rule(golden, pictures, tmp_path, caplog):
    workdir, tuned = golden / "older_run/workdir", tmp_path / "members" / "seed_5"
    config = finetune_config(pictures, workdir, 5)
    run = prepare(config, tuned)
    (warning,) = [r.getMessage() for r in caplog.records if "held out" in r.getMessage()]
    assert warning.startswith(f"{workdir} held out images of its folder by data.holdout='seed 3'")
    write_workdir(run.workdir, run.config, run.train_source)
    shutil.copytree(workdir / "checkpoints", tuned / "checkpoints")
    assert prepare(config, tuned).config.data.holdout == "seed 3"  # resumed: nothing is rejected
    call = Call("configs/folder.py", (), epath.Path(tuned.parent), None, again=False)
    check_member(config, call, Member("seed_5", {}))

    again = adopt_holdout(finetune_config(pictures, tuned, 6), transfer.read_pretrained(str(tuned)))
    assert again.data.holdout == "seed 3"


def test_an_older_run_killed_before_its_first_save_goes_on_by_its_own_rule(
    golden, pictures, tmp_path
):
    config = finetune_config(pictures, golden / "older_run/workdir", 5)
    stored = json.loads(to_json(prepare(config, tmp_path / "another").config))
    del stored["data"]["holdout"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert prepare(config, tmp_path).config.data.holdout == "seed 5"


def test_another_rule_than_the_run_s_is_refused(golden, pictures, tmp_path):
    config = finetune_config(pictures, golden / "older_run/workdir", 0, holdout="seed 9")
    with pytest.raises(InputError, match=r"data\.holdout='seed 9': .* held out images by 'seed 3'"):
        prepare(config, tmp_path / "tuned")


def test_an_unrelated_folder_keeps_its_own_rule(golden, pictures, tmp_path):
    pretrained = transfer.read_pretrained(str(golden / "older_run/workdir"))
    (moved := tmp_path / "moved").symlink_to(pictures)
    copied = shutil.copytree(pictures, tmp_path / "copied")
    config = finetune_config(pictures, golden / "older_run/workdir", 0)
    for where in (moved, copied):
        config.data.data_dir = str(where)
        assert adopt_holdout(config, pretrained).data.holdout == "seed 3"
    for name in ("eagle", "falcon"):
        (tmp_path / "other/train" / name).mkdir(parents=True)
    config.data.data_dir = str(tmp_path / "other")
    for rule in ("names", "seed 0"):
        config.data.holdout = rule
        assert adopt_holdout(config, pretrained).data.holdout == rule
