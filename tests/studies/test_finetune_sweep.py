"""The next members and the report of a learning-rate sweep, given the results so far."""

import statistics

import pytest

from vit_jax.config import base_config, classification, fewshot
from vit_jax.errors import InputError
from vit_jax.studies.finetune_sweep import STUDY
from vit_jax.studies.members import DIVERGED, FAILED, FINISHED, HANDED_OVER, Result

METRIC = "held_out/top1"


def make_config(**study):
    c = base_config()
    c.data.name, c.seed = "cifar10", 5
    c.evals.held_out = classification(split="test", every="1 epochs")
    c.study.name, c.study.peak_lrs = "finetune_sweep", (0.01, 0.03, 0.1)
    c.study.train_split, c.study.dev_split = "train[:98%]", "train[98%:]"
    c.study.update(study)
    return c


def done(value):
    return Result(FINISHED, {"step": 7, METRIC: value, "held_out/loss": 2 * value})


CHOSEN = {"dev_lr_0.01": done(0.5), "dev_lr_0.03": done(0.8), "dev_lr_0.1": done(0.6)}


def names(config, results):
    return [member.name for member in STUDY.members(config, results)]


def test_choices_train_on_a_part_and_never_see_the_test():
    members = STUDY.members(make_config(), {})
    assert [member.name for member in members] == ["dev_lr_0.01", "dev_lr_0.03", "dev_lr_0.1"]
    for member, lr in zip(members, ("0.01", "0.03", "0.1"), strict=True):
        assert member.overrides == {
            "optimizer.peak_lr": lr,
            "data.split": "train[:98%]",
            "evals.held_out.split": "train[98%:]",
        }


def test_the_best_runs_on_all_of_the_split_with_three_seeds():
    runs = STUDY.members(make_config(), CHOSEN)[3:]
    assert [run.overrides for run in runs] == [
        {"optimizer.peak_lr": "0.03", "seed": str(seed)} for seed in (5, 6, 7)
    ]
    assert [run.name for run in runs] == [f"lr_0.03_seed_{seed}" for seed in (5, 6, 7)]


@pytest.mark.parametrize("state", [FAILED, HANDED_OVER, None])
def test_nothing_is_chosen_before_all_choices_have_ended(state):
    results = {**CHOSEN, "dev_lr_0.1": Result(state)}
    if state is None:
        del results["dev_lr_0.1"]
    assert len(names(make_config(), results)) == 3
    report = STUDY.report(make_config(), results)
    assert (report.complete, report.values["peak_lr"], report.values["metrics"]) == (
        False,
        None,
        {},
    )


def test_what_diverged_is_lost_as_a_choice():
    results = {**CHOSEN, "dev_lr_0.03": Result(DIVERGED)}
    assert names(make_config(), results)[3] == "lr_0.1_seed_5"
    assert STUDY.report(make_config(), results).values["dev"]["0.03"] is None


def test_all_have_diverged():
    results = dict.fromkeys(CHOSEN, Result(DIVERGED))
    assert names(make_config(), results) == list(CHOSEN)
    assert not STUDY.report(make_config(), results).complete


def test_of_equals_the_lowest():
    config = make_config(peak_lrs=(0.1, 0.01, 0.03))
    assert names(config, dict.fromkeys(CHOSEN, done(0.5)))[3] == "lr_0.01_seed_5"


def test_one_learning_rate_is_no_choice():
    config = make_config(peak_lrs=(0.01,), train_split=None, dev_split=None)
    STUDY.check(config)
    assert names(config, {}) == [f"lr_0.01_seed_{seed}" for seed in (5, 6, 7)]


def test_mean_and_sample_deviation():
    values = (0.91, 0.94, 0.92)
    runs = {f"lr_0.03_seed_{5 + i}": done(value) for i, value in enumerate(values)}
    report = STUDY.report(make_config(), CHOSEN | runs)
    found = report.values["metrics"][METRIC]
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["std"] == pytest.approx((0.00046667 / 2) ** 0.5, rel=1e-4)
    assert report.values["metrics"]["held_out/loss"]["mean"] == pytest.approx(2 * found["mean"])
    assert report.complete and report.values["seeds"] == 3
    assert len(report.rows) == 7
    assert report.rows[-1] == ["mean ± std", "0.03", "3 of 3", "test", "92.33 ± 1.53"]
    assert report.rows[0][3:] == ["train[98%:]", "50.00"]


def test_a_run_that_fails_leaves_the_study_incomplete():
    runs = {"lr_0.03_seed_5": done(0.9), "lr_0.03_seed_6": Result(FAILED)}
    report = STUDY.report(make_config(), CHOSEN | runs)
    assert not report.complete and report.values["metrics"][METRIC] == {"mean": 0.9, "std": None}
    assert [row[-1] for row in report.rows[3:]] == ["90.00", "failed", "waits", "90.00"]


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ({"peak_lrs": ()}, "study.peak_lrs=(): needs distinct positive numbers"),
        ({"peak_lrs": (0.1, 0.1)}, "needs distinct positive numbers"),
        ({"peak_lrs": (0.1, -0.1)}, "needs distinct positive numbers"),
        ({"seeds": 0}, "study.seeds=0: needs a positive int"),
        ({"dev_split": None}, "study.dev_split: not set; needs a split of cifar10"),
        ({"dev_split": "test"}, "study.dev_split='test': is also the split of evals.held_out"),
        ({"metric": "held_out/loss"}, "study.metric='held_out/loss': needs an accuracy"),
        ({"metric": "held_out/top9"}, "study.metric='held_out/top9': needs an accuracy"),
        ({"metric": "test/top1"}, "evals: has held_out; a sweep needs exactly one evaluator"),
    ],
)
def test_what_is_no_sweep(study, says):
    with pytest.raises(InputError) as error:
        STUDY.check(make_config(**study))
    assert says in str(error.value)


def test_a_second_evaluator_could_look_at_the_test():
    config = make_config()
    config.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    with pytest.raises(
        InputError, match="evals: has few, held_out; a sweep needs exactly one evaluator"
    ):
        STUDY.check(config)


def test_a_metric_that_members_do_not_have():
    with pytest.raises(InputError, match="members report only held_out/top1, held_out/loss"):
        STUDY.report(make_config(metric="held_out/top9"), CHOSEN)
