"""A run is given another end where that leaves the learning rates of its past as they were."""

import json
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest
from asked import train_and_evaluate
from at_fault import at_fault
from etils import epath
from finished_run import rows
from opened import config_json
from read_settings import decided, settings_of

from vit_jax.base.errors import InputError
from vit_jax.checkpoints import restore
from vit_jax.config import with_values
from vit_jax.config.stored import StoredConfig, read_asked, read_stored
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.experiment.schedules import half_cosine, schedule_of
from vit_jax.main import main
from vit_jax.run.setup.branch import _with_rule, branch
from vit_jax.run.setup.changes import check_unchanged, find_other_past
from vit_jax.run.setup.workdir import read_run

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


def make_config(**overrides):
    """4 steps of warm-up, 40 in all."""
    config = load_config(CONFIG)
    pairs = [(key.replace("__", "."), str(value)) for key, value in overrides.items()]
    assert not apply_overrides(config, pairs)
    config.data.num_examples, config.data.num_classes = 1437, 10
    return decided(config)


ENDS = pathlib.Path(__file__).with_name("ends.txt").read_text().splitlines()[2:]


@pytest.mark.parametrize("line", ENDS)
def test_another_end_must_leave_the_past(line):
    """Step 5 of a cosine still has the peak of the warm-up."""
    begun, steps_done, end, says = (part.strip() for part in line.split("|"))
    own, new = (dict(word.split("=") for word in words.split("; ")) for words in (begun, end))
    found = find_other_past(make_config(**own), make_config(**own | new), int(steps_done))
    assert re.search(says, found) if says else found is None


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
    now = branched(make_config(**old), 20, "constant", {"duration": "80 steps"}).optimizer
    last = float(half_cosine(19, 40, start, end))
    shares = {"duration": "80 steps", "schedule.warmup": "5 %"}  # of the branch's own length
    schedule = branched(make_config(**old), 20, "constant", shares).schedule
    assert (schedule.start, schedule.warmup) == ("20 steps", "4 steps")
    assert now[key] == now[f"{key}_end"] == pytest.approx(last)


def branched(config, step, rule, overrides):
    return _with_rule(StoredConfig(config, config, {}), step, rule, overrides).resolved


def test_rsqrt_goes_on_as_it_was_or_as_if_it_had_been():
    later, steps = {"duration": "100 steps"}, np.arange(20, 100)
    before = make_config(schedule__name="rsqrt", schedule__timescale="10 steps")
    was, now, new = (
        schedule_of(settings_of(config))
        for config in (with_values(before, later), branched(before, 20, "rsqrt", later),
                       branched(make_config(), 20, "rsqrt", later))
    )  # fmt: skip
    np.testing.assert_allclose(now(steps), was(steps), rtol=1e-6)
    np.testing.assert_allclose(new(steps) / new(20), np.sqrt(20 / steps), rtol=1e-6)


def test_the_refusal_says_how_to_go_on_and_other_keys_are_named_first(tmp_path):
    workdir = epath.Path(tmp_path)
    (workdir / "config.json").write_text(config_json(make_config()))
    begun = read_run(workdir)
    run = begun._replace(saved_steps=(40, 30))
    longer = settings_of(make_config(duration="80 steps"))
    with pytest.raises(InputError) as e:
        check_unchanged(longer, run, workdir)
    assert str(e.value).startswith(f"--workdir={tmp_path}: the run cannot get another end")
    assert str(e.value).endswith(
        "; keep the old value with '--config.duration=40 steps'; or train on in a new workdir: "
        f"vit_jax branch --init_from={tmp_path} --workdir=NEW '--config.duration=80 steps' "
        "--rule=cosine --config.optimizer.peak_lr=0.0015 '--config.schedule.warmup=2 steps'"
    )
    with pytest.raises(InputError, match=r"'--config\.duration=80 steps' --rule=constant$"):
        check_unchanged(longer, run._replace(saved_steps=(30,)), workdir)
    with at_fault("seed") as e:
        check_unchanged(settings_of(make_config(duration="80 steps", seed=1)), run, workdir)
    check_unchanged(longer, begun, workdir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, run(name, ...) -> (checksums, summary)) with a `whole` run."""
    folder = epath.Path(tmp_path_factory.mktemp("runs"))

    def run(name, duration=None, callbacks=(), warmup="4 steps"):
        if duration is None:
            config = read_asked(folder / name)
        else:
            config = make_config(
                schedule__name="constant", schedule__warmup=warmup, duration=duration
            )
            config.checkpoint.keep_every, config.log.every = "5 steps", "1 step"
            del config.evals.test  # half of what there is to compile
        command = duration and {"config": CONFIG, "overrides": {"schedule.warmup": warmup}}
        summary = train_and_evaluate(config, folder / name, command, callbacks=callbacks)
        meta = restore.read_meta(folder / name / f"checkpoints/{summary['step']}")
        return meta["checksums"], summary

    return folder, run, run("whole", "20 steps")[0]


@pytest.mark.slow
def test_a_finished_run_that_is_extended_ends_as_one_that_was_longer_from_the_start(runs):
    folder, run, longer = runs
    first, _ = run("extended", "10 steps", warmup="40 %")
    extended, summary = run("extended", "20 steps", warmup="40 %")  # of its first duration
    assert extended == longer != first and summary["step"] == 20
    stored = json.loads((folder / "extended/config.json").read_text())
    assert stored["resolved"]["duration"] == "20 steps"
    warmups = [stored[kind]["schedule"]["warmup"] for kind in ("asked", "resolved")]
    assert warmups == ["40 %", "4 steps"] and stored["decided_by"]["schedule.warmup"] == "duration"
    assert json.loads((folder / "extended/summary.json").read_text())["step"] == 20


def test_a_branch_at_the_last_rate_ends_as_the_run_that_went_on_also_when_killed(runs, caplog):
    folder, run, longer = runs

    def kill(step, state, metrics):
        if step == 17:
            raise KeyboardInterrupt

    with caplog.at_level("INFO", "vit_jax"):
        branch(folder / "whole/checkpoints/10", folder / "same", "constant")
    assert (
        "same: constant from step 10 to step 20, at first with a learning rate of 0.0015; to "
        in (caplog.messages[-1])
    )
    low = {"optimizer.peak_lr": 1e-5}
    branch(folder / "whole/checkpoints/10", folder / "low", "constant", low)
    assert caplog.messages[-1].startswith("--config.optimizer.peak_lr=1e-05: a model hardly learns")
    assert rows(folder / "same") == rows(folder / "whole")[:10]
    with pytest.raises(KeyboardInterrupt):
        run("same", callbacks=[kill])
    assert run("same")[0] == longer
    assert rows(folder / "same") == rows(folder / "whole")
    starts = [json.loads(line) for line in (folder / "same/starts.jsonl").read_text().splitlines()]
    assert [line.get("branch_of") for line in starts] == [None, str(folder / "whole"), None, None]
    assert [line["resumed_at"] for line in starts] == [None, 10, 10, 15]


def test_lost_rows_are_said_when_the_branch_is_made(runs, caplog):
    folder = runs[0]
    shutil.copytree(folder / "whole", folder / "emptied")
    (folder / "emptied/metrics.jsonl").write_text("")
    branch(folder / "emptied/checkpoints/10", folder / "of_emptied", "constant")
    said = f"{folder}/emptied/metrics.jsonl: ends at step 0, but has had rows up to step 10; "
    assert [m for m in caplog.messages if m.startswith(said)]


def test_what_no_branch_can_be_made_of(runs):
    folder = runs[0]
    (folder / "whole/checkpoints/5/seal.json").unlink()
    for step, overrides, says in (
        (7, {}, "the run keeps checkpoints of the steps 5, 10, 15, 20"),
        (5, {}, "checkpoints/5: is damaged"),
        (10, {"duration": "10 steps"}, "duration: ends at step 10, and the run is at step 10"),
        (10, {"seed": 1}, "--config.seed: a branch may set duration, "),
        (10, {"schedule.warmup": "11 steps"}, "after schedule.start"),
    ):
        source = folder / f"whole/checkpoints/{step}"
        with pytest.raises(InputError, match=says):
            branch(source, folder / "refused", "rsqrt", overrides)
        assert not (folder / "refused").exists()


@pytest.mark.slow
def test_a_branch_that_is_branched_again_falls_from_the_last_rate_to_0(runs, capsys):
    folder, run, _ = runs
    branch(folder / "whole", folder / "new", "cosine", {"duration": "30 steps"})
    run("new")
    rates = [row["train/lr"] for row in rows(folder / "new")[19:]]
    since = np.maximum(np.arange(-1, 10), 0)
    np.testing.assert_allclose(rates, 0.75e-3 * (1 + np.cos(np.pi * since / 10)), rtol=1e-5)
    branch(folder / "new/checkpoints/25", folder / "third", "cooldown")
    config = read_stored(folder / "third").resolved
    schedule = schedule_of(settings_of(config))
    np.testing.assert_allclose([schedule(25), schedule(30)], [rates[5], 0])
    asked = read_asked(folder / "new")
    asked.duration = "40 steps"
    with pytest.raises(InputError, match=r"another end, as step 22 had .* vit_jax branch") as e:
        train_and_evaluate(asked, folder / "new")
    words = shlex.split(str(e.value).partition("vit_jax branch ")[2])
    # The offered command works.
    assert main(["branch", *(word.replace("NEW", f"{folder}/fourth") for word in words)]) == 0
    config = read_stored(folder / "fourth").resolved
    schedule = schedule_of(settings_of(config))
    np.testing.assert_allclose([schedule(30), schedule(31), schedule(40)], [0, 1.5e-3, 0])
    says = "a learning rate of 0, which rises to 0.0015 by step 31; to"
    assert says in capsys.readouterr().out
    words = [f"--init_from={folder}/new", f"--workdir={folder}/fifth", "--rule=constant"]
    assert main(["branch", *words, "--config.duration=40 steps"]) == 0
    says = "WARNING: the learning rate is 3.67e-05 at this step of the run, after a peak of 0.0015"
    assert says in capsys.readouterr().out
