"""A grid that chooses on validation data and then fine-tunes, given the results so far."""

import csv
import io

import pytest

from vit_jax.config import base_config, classification
from vit_jax.errors import InputError
from vit_jax.studies import tuned_grid
from vit_jax.studies.members import DIVERGED, FINISHED, WORKDIR, Result

CELLS = (
    "ViT | 10 pictures: data.subset=10; model.name=ViT-mu/4",
    "ViT | 100 pictures: data.subset=100; model.name=ViT-mu/4",
)


@pytest.fixture
def config():
    c = base_config()
    c.study.name, c.study.metric, c.study.seeds = "tuned_grid", "dev/top1", 2
    c.study.cells = CELLS
    c.study.candidates = ("weak: optimizer.weight_decay=0.03", "strong: model.dropout=0.1")
    c.study.choose_by = "dev/top1"
    c.study.finetune = "data.classes=5,6; duration=9 steps"
    c.study.finetune_metric = "test/top1"
    for name in ("dev", "test"):
        c.evals[name] = classification(split="test", every="1 epochs")
    return c


def done(dev, test=0.0, **more):
    return Result(FINISHED, {"step": 20, "dev/top1": dev, "test/top1": test, **more})


FIRST = {
    "ViT__10_pictures__weak__seed_0": done(0.2),
    "ViT__10_pictures__strong__seed_0": done(0.3),
    "ViT__100_pictures__weak__seed_0": done(0.6),
    "ViT__100_pictures__strong__seed_0": Result(DIVERGED),
}


def names(config, results):
    return [member.name for member in tuned_grid.find_members(config, results)]


def test_each_cell_keeps_its_best_candidate_for_the_other_seeds_and_fine_tuning(config):
    assert sorted(names(config, {})) == sorted(FIRST)
    some = {name: FIRST[name] for name in list(FIRST)[:3]}
    assert "ViT__100_pictures__weak__seed_1" not in names(config, some)
    assert names(config, FIRST)[4:] == [
        "ViT__10_pictures__strong__seed_1",
        "ViT__100_pictures__weak__seed_1",
        "ViT__10_pictures__strong__seed_0__finetuned",
        "ViT__100_pictures__weak__seed_0__finetuned",
    ]
    *_, second = tuned_grid.find_members(config, FIRST)
    assert second.overrides == {  # the model of its cell, but neither its data nor its candidate
        "model.name": "ViT-mu/4", "data.classes": "5,6", "duration": "9 steps", "seed": "0",
        "init_from": f"{WORKDIR}/ViT__100_pictures__weak__seed_0",
    }  # fmt: skip


def test_the_report_has_a_row_for_each_measure(config):
    config.study.seeds = 1
    results = FIRST | {"ViT__10_pictures__strong__seed_0__finetuned": done(0.1, 0.4)}
    report = tuned_grid.report(config, results)
    assert report.rows == [
        ["ViT", "dev/top1, %", "30.00 [strong]", "60.00 [weak]"],
        ["ViT", "fine-tuned: test/top1, %", "40.00 [strong]", "waits [weak]"],
    ]
    assert not report.complete
    rows = list(csv.DictReader(io.StringIO(report.files["study.csv"].decode())))
    assert [row["part"] for row in rows] == ["trained"] * 4 + ["fine-tuned"]
    assert report.files["study.png"][:4] == b"\x89PNG"


def test_the_best_step_counts_where_that_is_asked_for(config):
    config.study.point, config.study.candidates, config.study.seeds = "best", (), 1
    config.checkpoint.keep_best = "dev/top1"
    name = "ViT__10_pictures__seed_0"
    results = {name: done(0.1, 0.9, best={"step": 7, "dev/top1": 0.5, "test/top1": 0.25})}
    report = tuned_grid.report(config, results)
    assert report.rows[0][2] == "50.00"
    (row,) = csv.DictReader(io.StringIO(report.files["study.csv"].decode()))
    assert (row["dev/top1"], row["test/top1"]) == ("0.5", "0.25")
    *_, finetuned = tuned_grid.find_members(config, results)
    assert finetuned.overrides["init_from"] == f"{WORKDIR}/{name}/checkpoints/7"
    config.evals.dev.every = "1 epoch"
    tuned_grid.check(config)
    # Another step of a fine-tuning is the best one, and what finds it is measured there.
    config.study.finetune += "; checkpoint.keep_best=test/top1; evals.test.every=2 steps"
    tuned_grid.check(config)
    del results[name].summary["best"]["dev/top1"]  # as if it was not measured at that step
    with pytest.raises(InputError, match=r"metric='dev/top1': members report only test/top1"):
        tuned_grid.report(config, results)


def test_what_is_refused(config):
    config.study.finetune, config.study.finetune_metric = "data.clases=5,6", None
    config.study.point, config.study.choose_by = "best", "devel/top1"
    config.study.metric = "test/top1"
    with pytest.raises(InputError) as e:
        tuned_grid.check(config)
    text = str(e.value)
    assert "study.finetune_metric: not set" in text and "clases" in text
    assert "study.point='best': needs --config.checkpoint.keep_best=METRIC" in text
    assert "study.choose_by='devel/top1': no such evaluator; did you mean dev?" in text
    config.study.choose_by, config.checkpoint.keep_best = None, "dev/top1"
    config.evals.test.every = "2 epochs"
    with pytest.raises(InputError) as e:
        tuned_grid.check(config)
    text = str(e.value)
    assert "study.choose_by: not set; needs the metric that chooses among study.candidates" in text
    assert "study.metric='test/top1': evals.test.every='2 epochs' must be the '1 epochs' of" in text
