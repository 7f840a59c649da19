"""Warnings of a collapse, on rows made by hand and in a run."""

import dataclasses
import json
import logging
import math
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from asked import train_and_evaluate
from fake_clock import FakeClock
from finished_run import check_same_end, final_state
from read_settings import settings_of

from vit_jax import load_pretrained, save_pretrained
from vit_jax.config import base_config, rank
from vit_jax.config.sizes import make_stages
from vit_jax.config.text import load_config
from vit_jax.job.lock import NoLock
from vit_jax.models.vit import ViT
from vit_jax.objectives.contract import Collapse, Objective
from vit_jax.run.record import Record
from vit_jax.run.watch.guards import Health, Jumps, Stalls
from vit_jax.run.watch.ledger import NO_PAST
from vit_jax.run.watch.spikes import Spikes
from vit_jax.run.writers import MetricWriter

LIMIT = math.log(1000)
COLLAPSE = Collapse("raise a", LIMIT, "raise b", "raise c")


def entropies(*shares):
    return [{"train/loss": 1.0, "train/teacher_entropy": share * LIMIT} for share in shares]


def feed(health, rows):
    """The number of each row that warns, with its warnings."""
    found = [health.add(row) for row in rows]
    return [(i, *texts) for i, texts in enumerate(found) if texts]


@pytest.mark.parametrize(
    ("near", "far", "remedy"), [(0.009, 0.011, "raise b"), (0.991, 0.989, "raise c")]
)
def test_entropy_at_either_end_for_five_rows_is_said_once(near, far, remedy):
    health = Health(COLLAPSE, [], {})
    assert feed(health, entropies(*[near] * 4, far, *[near] * 4)) == []
    ((row, text),) = feed(health, entropies(*[near] * 9))
    assert row == 0 and remedy in text and "does_it_learn" in text
    ((row, _),) = feed(health, entropies(far, *[near] * 7))  # it recovered, and came back
    assert row == 5


def test_from_one_end_to_the_other_is_no_row_of_five():
    assert feed(Health(COLLAPSE, [], {}), entropies(*[0.0] * 3, *[1.0] * 4)) == []


def test_a_rank_under_a_twentieth_of_the_width_is_said_once():
    health = Health(COLLAPSE, ["of_train"], {})
    rows = [{"of_train/rank": 1000 * share, "of_train/share": share}
            for share in (0.3, 0.049, 0.02, 0.051, 0.04)]  # fmt: skip
    (first, text), (second, _) = feed(health, rows)
    assert (first, second) == (1, 4)
    assert text.startswith("of_train/rank=49: the features fill 4.9 % of") and "raise a" in text
    assert feed(health, [{"other/rank": 1.0, "other/share": 0.001}]) == []


def test_a_resumed_run_goes_on_counting_and_says_nothing_twice():
    health = Health(COLLAPSE, ["rank"], {})
    assert health.read() == {}  # so that the checkpoints of healthy runs stay as they were
    feed(health, [*entropies(0, 0, 0, 0), {"rank/rank": 1.0, "rank/share": 0.01}])
    resumed = Health(COLLAPSE, ["rank"], json.loads(json.dumps(health.read())))
    assert feed(resumed, [{"rank/rank": 1.0, "rank/share": 0.01}]) == []
    assert len(feed(resumed, entropies(0))) == 1


def test_objectives_that_cannot_collapse_are_not_watched():
    """Ten classes need ten directions; a supervised run is well with few."""
    rows = [*entropies(*[0.0] * 9), {"rank/rank": 1.0, "rank/share": 0.001}]
    assert feed(Health(None, ["rank"], {}), rows) == []
    assert feed(Health(Collapse("raise a"), [], {}), rows) == []  # no teacher


def test_long_waits_are_named_once_until_they_are_over():
    checkpoint = settings_of(base_config()).checkpoint
    stalls = Stalls(dataclasses.replace(checkpoint, every=1000, memory_every=10))

    def add(wall_s, **seconds):
        return stalls.add({"time/wall_s": wall_s} | {f"time/{k}": v for k, v in seconds.items()})

    assert stalls.add({"test/top1": 1.0}) == add(5.0, input_wait_s=5.0) == []  # before it
    assert add(10.0, input_wait_s=3.0) == []  # too short to judge
    (text,) = add(16.0, save_s=1.0)
    assert text.startswith("3.0 of the last 11.0 s: the devices wait for images")
    (text,) = add(30.0, input_wait_s=9.0, save_s=2.0)
    assert (
        "checkpoint.every (now '1000 steps') and checkpoint.memory_every (now '10 steps')" in text
    )
    assert add(50.0, input_wait_s=1.0) == []
    assert len(add(70.0, input_wait_s=3.0)) == 1


def test_each_jump_of_the_clock_is_named_once(monkeypatch):
    clock, steady = FakeClock(), FakeClock()
    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr("time.monotonic", steady)
    jumps = Jumps()
    said = []
    for clock_s, steady_s in ((60, 60), (-3540, 60), (60, 60), (100.5, 100)):
        clock.now, steady.now = clock.now + clock_s, steady.now + steady_s
        said += jumps.add({})
    assert [text[:40] for text in said] == ["this host's clock has jumped by -3,600 s"]


def test_a_run_logs_the_warnings_of_its_rows_and_saves_what_it_has_said(caplog):
    c = base_config()
    c.evals.few = rank(split="train", every="1 epochs")
    c.global_batch_size, c.data.num_examples = 8, 100
    objective, settings = Objective(lambda *_: None, collapse=COLLAPSE), settings_of(c)
    vars(settings)["stages"] = make_stages([(8, 8)], [0], [8], 10_000, None)
    run = types.SimpleNamespace(
        settings=settings,
        flops=lambda steps: 8 * steps + 8 * max(steps - 5_000, 0),  # twice as many from there on
        fingerprint={},
        experiment=types.SimpleNamespace(
            objective=objective, schedule=lambda step: 0.0, total_steps=10_000
        ),
        mesh=types.SimpleNamespace(devices=np.array(jax.devices()[:1])),
        evaluators={"few": lambda state: {"rank": 1.0, "share": 0.01}},
    )
    silent = types.SimpleNamespace(update=lambda *_: None)
    writer, spikes = MetricWriter("", writes=False), Spikes(run, (), {})
    record = Record(run, 0, {}, 0.0, writer, silent, NoLock(), NO_PAST, spikes)
    state = types.SimpleNamespace(step=5, ema={}, opt_state={}, replace=lambda **_: None)
    with caplog.at_level(logging.WARNING, "vit_jax"):
        for step in range(1, 6):
            record.add(step, {"teacher_entropy": 0.0, "masked": 0.0})
            record.check(step)
            record.log(step, state)
        record.evaluate(state, ["few"])
    first, second = (r.getMessage() for r in caplog.records)
    assert first.startswith("step 5: train/teacher_entropy=0:") and "few/rank=1" in second
    with record.saving(5) as meta:  # in host memory
        assert meta["health"]["said"] == ["entropy_low", "few"]
    assert record.saved is None
    record._throughput.clock = clock = FakeClock()
    with caplog.at_level(logging.INFO, "vit_jax"):
        for step in range(1, 40):
            clock.now += 0.25
            record.add(step, {})
    assert caplog.records[-1].getMessage() == (
        "about 62 minutes left: 0.25 s a step, with evaluations and saves as far as measured"
    )


@pytest.mark.slow
def test_a_collapsed_run_warns_resumes_bit_for_bit_and_exports_a_vit(tmp_path, caplog, one_device):
    """LeJEPA, whose weight decay takes all of every kernel in every step."""
    c = load_config(f"{pathlib.Path(__file__).parents[2] / 'configs/lejepa.py'}:debug")
    c.duration, c.checkpoint.every, c.log.every = "4 steps", "2 steps", "1 steps"
    c.schedule.name, c.schedule.warmup = "constant", "0 steps"
    c.optimizer.peak_lr, c.optimizer.weight_decay, c.objective.points = 1e-5, 1e5, 5
    del c.evals["near"], c.evals["probe"]
    c.evals.rank.every, c.evals.rank.num_images = "2 steps", 128
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with caplog.at_level(logging.WARNING, "vit_jax"):
        summary = train_and_evaluate(c, whole)
    assert summary["rank/share"] < 0.05
    (said,) = [r.getMessage() for r in caplog.records if "the features fill" in r.getMessage()]
    assert (
        said.startswith("step 2: rank/rank=1") and "Raise objective.sigreg_weight, now 0.05" in said
    )

    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/4")
    (resumed / "summary.json").unlink()
    with caplog.at_level(logging.WARNING, "vit_jax"):
        train_and_evaluate(c, resumed)
    assert len([r for r in caplog.records if "the features fill" in r.getMessage()]) == 1
    assert any(name.startswith("params/obj") for name in final_state(resumed)[1])
    check_same_end(resumed, whole)

    model, variables = load_pretrained(whole)
    save_pretrained(tmp_path / "timm", model, variables, "timm")
    again, same = load_pretrained(tmp_path / "timm")
    assert type(again) is ViT and again == model and "objective" not in variables["params"]
    jax.tree.map(np.testing.assert_array_equal, same, variables)
