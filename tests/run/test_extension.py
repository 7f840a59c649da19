"""A run is given another end where that leaves the learning rates of its past as they were."""

import json
import pathlib

import pytest
from at_fault import at_fault
from etils import epath
from opened import config_json

from vit_jax.base.errors import InputError
from vit_jax.checkpoints import restore
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.run.changes import check_unchanged, find_other_past
from vit_jax.run.train import train_and_evaluate
from vit_jax.run.workdir import read_run

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


def make_config(**overrides):
    """4 steps of warm-up, 40 in all."""
    config = load_config(CONFIG)
    pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
    assert not apply_overrides(config, pairs)
    config.data.num_examples, config.data.num_classes = 1437, 10
    return config


@pytest.mark.parametrize(
    ("schedule", "steps_done", "end"),
    [
        ({"name": "constant"}, 40, {"duration": "100 steps"}),
        ({"name": "constant"}, 40, {"duration": "3 epochs"}),
        ({"name": "constant"}, 40, {"duration": "60 steps", "schedule__cooldown": "20 steps"}),
        ({"name": "constant"}, 20, {"schedule__cooldown": "20 steps"}),
        ({"name": "rsqrt"}, 40, {"duration": "41 steps"}),
        ({"name": "rsqrt", "cooldown": "10 steps"}, 31, {"duration": "100 steps"}),
        ({"name": "rsqrt", "cooldown": "10 steps"}, 20, {"duration": "30 steps"}),
        ({"name": "multistep", "milestones": "10 steps"}, 40, {"duration": "50 steps"}),
        ({"name": "cosine"}, 5, {"duration": "50 steps"}),  # in the warm-up, and its peak
        ({"name": "cosine"}, 0, {"duration": "50 steps"}),
    ],
)
def test_an_end_that_leaves_the_past(schedule, steps_done, end):
    own = {f"schedule__{key}": value for key, value in schedule.items()}
    args = make_config(**own), make_config(**own | end), steps_done
    assert find_other_past(*args) is None


@pytest.mark.parametrize(
    ("schedule", "steps_done", "end", "says"),
    [
        ({"name": "cosine"}, 6, {"duration": "50 steps"}, r"step 6 had .*rate=0\.001497146"),
        ({"name": "linear"}, 40, {"duration": "50 steps"}, "step 6 had"),
        ({"name": "rsqrt", "cooldown": "10 steps"}, 32, {"duration": "50 steps"},
         "step 32 had"),
        ({"name": "constant"}, 21, {"duration": "19 steps"}, "ends before step 21"),
        ({"name": "constant"}, 22, {"schedule__cooldown": "20 steps"}, "step 22 had"),
    ],
)  # fmt: skip
def test_an_end_that_does_not(schedule, steps_done, end, says):
    own = {f"schedule__{key}": value for key, value in schedule.items()}
    with pytest.raises(InputError, match=says):
        raise InputError(
            find_other_past(make_config(**own), make_config(**own | end), steps_done) or ""
        )


@pytest.mark.parametrize(
    ("key", "start", "end"), [("weight_decay", 0.1, 0.4), ("ema_decay", 0.9, 1.0)]
)
def test_values_that_move_until_the_end_keep_it_where_it_is(key, start, end):
    moving = {f"optimizer__{key}": str(start), f"optimizer__{key}_end": str(end)}
    old = {"schedule__name": "constant", **moving}
    args = make_config(**old), make_config(**old, duration="80 steps")
    assert find_other_past(*args, 1) is None  # the first step has the value of the start
    assert f"step 2 had optimizer.{key}=" in (find_other_past(*args, 2) or "")
    same = make_config(**old), make_config(**old, schedule__cooldown="20 steps")
    assert find_other_past(*same, 20) is None


def test_the_refusal_says_how_to_go_on_and_other_keys_are_named_first(tmp_path):
    workdir = epath.Path(tmp_path)
    (workdir / "config.json").write_text(config_json(make_config()))
    begun = read_run(workdir)
    run = begun._replace(saved_steps=(40, 30))
    with pytest.raises(InputError) as e:
        check_unchanged(make_config(duration="80 steps"), run, workdir)
    assert str(e.value).startswith(f"--workdir={tmp_path}: the run cannot get another end")
    assert str(e.value).endswith(
        "; keep the old value with '--config.duration=40 steps'; or train on from its weights: "
        f"--config.init_from={tmp_path} --config.init_head=kept and a new --workdir"
    )
    with at_fault("seed") as e:
        check_unchanged(make_config(duration="80 steps", seed="1"), run, workdir)
    check_unchanged(make_config(duration="80 steps"), begun, workdir)


def test_a_finished_run_that_is_extended_ends_as_one_that_was_longer_from_the_start(tmp_path):
    def run(name, duration, warmup):
        config = make_config(schedule__name="constant", schedule__warmup=warmup, duration=duration)
        del config.evals.test  # half of what there is to compile
        command = {"config": CONFIG, "overrides": {"schedule.warmup": warmup}}
        summary = train_and_evaluate(config, tmp_path / name, command)
        meta = restore.read_meta(epath.Path(tmp_path / name / f"checkpoints/{summary['step']}"))
        return meta["checksums"], summary

    first, _ = run("extended", "10 steps", "40 %")
    longer, _ = run("whole", "20 steps", "4 steps")
    extended, summary = run("extended", "20 steps", "40 %")  # of its first duration
    assert extended == longer != first and summary["step"] == 20
    stored = json.loads((tmp_path / "extended/config.json").read_text())
    assert stored["resolved"]["duration"] == "20 steps"
    warmups = [stored[kind]["schedule"]["warmup"] for kind in ("asked", "resolved")]
    assert warmups == ["40 %", "4 steps"] and stored["decided_by"]["schedule.warmup"] == "duration"
    assert json.loads((tmp_path / "extended/summary.json").read_text())["step"] == 20
