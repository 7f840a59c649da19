"""The next members and the report of a learning-rate sweep, given the results so far."""

import statistics

import pytest
from studied import (
    config_of,
    done,
    keys_at_fault,
    names_of,
    overrides_of,
    report_of,
    study_of,
)

from vit_jax.config import fewshot
from vit_jax.studies.engine import Result
from vit_jax.studies.tables import DIVERGED, FAILED, HANDED_OVER

LABEL = "held_out/top1, %"
CHOSEN = {"dev_lr_0.01": done(0.5), "dev_lr_0.03": done(0.8), "dev_lr_0.1": done(0.6)}


def make_config(**study):
    study = {"peak_lrs": (0.01, 0.03, 0.1), "train_split": "train[:98%]",
             "dev_split": "train[98%:]", **study}  # fmt: skip
    c = config_of("finetune_sweep", **study)
    c.seed = 5
    return c


def test_choices_see_the_development_split_and_the_best_runs_on_all_with_three_seeds():
    members = overrides_of(make_config(), CHOSEN)
    assert list(members) == [*CHOSEN, *(f"lr_0.03_seed_{seed}" for seed in (5, 6, 7))]
    for name, lr in zip(CHOSEN, ("0.01", "0.03", "0.1"), strict=True):
        assert members[name] == {
            "optimizer.peak_lr": lr, "data.split": "train[:98%]", "seed": "5",
            "evals.held_out.split": "train[98%:]",
        }  # fmt: skip
    assert members["lr_0.03_seed_6"] == {"optimizer.peak_lr": "0.03", "seed": "6"}


@pytest.mark.parametrize("state", [FAILED, HANDED_OVER, None])
def test_nothing_is_chosen_before_all_choices_have_ended(state):
    results = {**CHOSEN, "dev_lr_0.1": Result(state)}
    if state is None:
        del results["dev_lr_0.1"]
    assert names_of(make_config(), results) == list(CHOSEN)
    report = report_of(make_config(), results)
    assert not report.is_complete and report.values["peak_lr"] is None and len(report.rows) == 3


def test_what_diverged_is_no_choice_and_of_equals_the_lowest_is_chosen():
    config = make_config(peak_lrs=(0.1, 0.01, 0.03))
    results = {**CHOSEN, "dev_lr_0.03": Result(DIVERGED)}
    assert names_of(config, results)[3] == "lr_0.1_seed_5"
    assert report_of(config, results).texts[2][-1] == "diverged"
    assert names_of(config, dict.fromkeys(CHOSEN, done(0.5)))[3] == "lr_0.01_seed_5"
    results = dict.fromkeys(CHOSEN, Result(DIVERGED))
    assert len(names_of(config, results)) == 3 and not report_of(config, results).is_complete


def test_one_learning_rate_is_no_choice():
    config = make_config(peak_lrs=(0.01,), train_split=None, dev_split=None)
    study_of(config).check_all()
    assert names_of(config) == [f"lr_0.01_seed_{seed}" for seed in (5, 6, 7)]


def test_mean_and_sample_deviation():
    values = (0.91, 0.94, 0.92)
    runs = {f"lr_0.03_seed_{5 + i}": done(value) for i, value in enumerate(values)}
    report = report_of(make_config(), CHOSEN | runs)
    found = report.rows[-1][LABEL].numbers()
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["std"] == pytest.approx((0.00046667 / 2) ** 0.5, rel=1e-4)
    assert report.is_complete and len(report.rows) == 7 and report.values == {"peak_lr": 0.03}
    assert [row[-1] for row in report.texts[3:6]] == ["94.00", "92.00", "91.00"]  # the best first
    assert report.best.names == [f"lr_0.03_seed_{seed}" for seed in (5, 6, 7)]
    assert report.texts[-1] == ["mean ± std", "0.03", "test", "-", "92.33 ± 1.53"]
    assert report.texts[0][-1] == "80.00" and "train[98%:]" in report.texts[0]
    runs["lr_0.03_seed_6"] = Result(FAILED)
    del runs["lr_0.03_seed_7"]
    report = report_of(make_config(), CHOSEN | runs)
    assert not report.is_complete
    last = [row[LABEL] for row in report.rows[3:]]
    assert [str(cell) for cell in last] == ["91.00", "failed", "waits", "91.00 (1 of 3)"]


def test_a_second_evaluator_could_look_at_the_test():
    config = make_config()
    config.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    assert keys_at_fault(config) == ["evals"]


def test_a_metric_that_members_do_not_have():
    report = report_of(make_config(metric="held_out/top9"), CHOSEN)
    assert report.texts[0][-1] == "without held_out/top9" and not report.is_complete
