"""The study of pretraining methods: its members, its table, and what it refuses."""

from studied import config_of, csv_of, done, names_of, overrides_of, report_of

from vit_jax.config import knn, rank
from vit_jax.studies.engine import Result
from vit_jax.studies.tables import DIVERGED


def pretraining():
    c = config_of("pretraining", seeds=2, finetunings=("few: data.split=train[:9]",))
    c.study.stages = ("mae: objective.name=mae; data.ops=flip", "other: objective.name=lejepa")
    splits = {"train_split": "train", "test_split": "test", "every": "1 epochs"}
    c.evals.near = knn(**splits, num_neighbours=(20,))
    c.evals.rank = rank(split="train", every="1 epochs")
    return c


def test_fine_tunings_wait_for_their_pretraining_and_fill_the_table():
    config = pretraining()
    first = overrides_of(config)
    assert list(first) == [
        "mae__seed_0", "other__seed_0", "from_scratch__few__seed_0",
        "mae__seed_1", "other__seed_1", "from_scratch__few__seed_1",
    ]  # fmt: skip
    assert first["mae__seed_0"] == {"objective.name": "mae", "data.ops": "flip", "seed": "0"}
    assert first["from_scratch__few__seed_0"] == {
        "data.split": "train[:9]", "init_from": "scratch", "seed": "0"
    }  # fmt: skip

    features = {"near/20nn_top1": 0.25, "rank/rank": 9.0, "rank/share": 0.5}
    results = {"mae__seed_0": done(0.01, **features), "mae__seed_1": Result(DIVERGED)}
    assert {*names_of(config, results)} - {*first} == {"mae__few__seed_0"}
    assert overrides_of(config, results)["mae__few__seed_0"]["init_from"] == "/w/mae__seed_0"
    results |= {"from_scratch__few__seed_0": done(0.5), "from_scratch__few__seed_1": done(0.6),
                "mae__few__seed_0": done(0.75)}  # fmt: skip
    report = report_of(config, results)
    assert report.columns == ["%", "near/20nn_top1", "rank/share", "few"]
    assert report.texts == [
        ["mae", "25.00 (1 of 2)", "50.00 (1 of 2)", "75.00 (1 of 2)"],
        ["from scratch", "-", "-", "55.00 ± 7.07"],
        ["other", "waits", "waits", "waits"],
    ]
    assert report.best.names == ["mae__few__seed_0"]
    assert not report.is_complete and len(csv_of(config, results)) == 5
