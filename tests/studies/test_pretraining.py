"""The study of pretraining methods: its members, its table, and what it refuses."""

import pytest

from vit_jax.config import base_config, classification, knn, rank
from vit_jax.errors import InputError
from vit_jax.studies import pretraining
from vit_jax.studies.members import FINISHED, Result


def config_of(**study):
    c = base_config()
    c.study.name, c.study.seeds, c.study.metric = "pretraining", 2, "test/top1"
    c.study.stages = ("mae: objective.name=mae; data.ops=flip", "other: objective.name=lejepa")
    c.study.finetunings = ("few: data.split=train[:9]",)
    splits = {"train_split": "train", "test_split": "test", "every": "1 epochs"}
    c.evals.test = classification(split="test", every="1 epochs")
    c.evals.near = knn(**splits, num_neighbours=(20,))
    c.evals.rank = rank(split="train", every="1 epochs")
    for key, value in study.items():
        c.study[key] = value
    return c


def test_fine_tunings_wait_for_their_pretraining_and_fill_the_table():
    config = config_of()
    first = pretraining.find_members(config, {})
    assert [m.name for m in first] == [
        "mae__seed_0", "other__seed_0", "from_scratch__few__seed_0",
        "mae__seed_1", "other__seed_1", "from_scratch__few__seed_1",
    ]  # fmt: skip
    assert first[0].overrides == {"objective.name": "mae", "data.ops": "flip", "seed": "0"}
    assert first[2].overrides == {"data.split": "train[:9]", "init_from": "scratch", "seed": "0"}

    features = {"near/20nn_top1": 0.25, "rank/rank": 9.0, "rank/share": 0.5, "test/top1": 0.01}
    results = {"mae__seed_0": Result(FINISHED, features), "mae__seed_1": Result("diverged")}
    new = {m.name: m for m in pretraining.find_members(config, results)}.keys() - {
        m.name for m in first
    }
    assert new == {"mae__few__seed_0"}
    (tuned,) = [m for m in pretraining.find_members(config, results) if m.name in new]
    assert tuned.overrides["init_from"] == "{workdir}/mae__seed_0"
    for seed, top1 in ((0, 0.5), (1, 0.6)):
        results[f"from_scratch__few__seed_{seed}"] = Result(FINISHED, {"test/top1": top1})
    results["mae__few__seed_0"] = Result(FINISHED, {"test/top1": 0.75})

    report = pretraining.report(config, results)
    assert report.columns == ["%", "near/20nn_top1", "rank/share", "few"]
    assert report.rows[0] == ["mae", "25.00 (1 of 2)", "50.00 (1 of 2)", "75.00 (1 of 2)"]
    assert report.rows[1] == ["other", "waits", "waits", "waits"]
    assert report.rows[2] == ["from scratch", "-", "-", "55.00 ± 7.07"]
    assert not report.complete
    table = report.files["table.csv"].decode().splitlines()
    assert "mae,few,0.75000,,1" in table and "from scratch,few,0.55000,0.07071,2" in table
    assert len(report.files["study.csv"].decode().splitlines()) == 1 + 5


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ({"stages": ()}, r"study\.stages: is empty"),
        ({"finetunings": ("a",)}, r"study\.finetunings: 'a': needs"),
        ({"stages": ("a: seed=1",)}, "a sets seed, which the study sets"),
        ({"metric": "tset/top1"}, "did you mean"),
    ],
)
def test_studies_that_cannot_be(study, says):
    with pytest.raises(InputError, match=says):
        pretraining.check(config_of(**study))
