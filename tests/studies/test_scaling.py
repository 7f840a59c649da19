"""The scaling study: its law against data made from it, the front, the held-out run."""

import functools

import numpy as np
import pytest
from studied import config_of, csv_of, done, keys_at_fault, overrides_of, report_of, study_of

from vit_jax.base.errors import InputError
from vit_jax.devices.chips import find_slice
from vit_jax.planning.targets import Target
from vit_jax.studies import law, planned
from vit_jax.studies.law import Law, fit_law, pareto_front

LAW = Law(a=0.05, b=0.35, c=0.12, d=2e-6)
COMPUTE = np.geomspace(1e-6, 1e-3, 8)


def noisy(seed):
    return LAW.predict(COMPUTE) * np.exp(0.02 * np.random.default_rng(seed).standard_normal(8))


def test_the_law_of_made_data_is_recovered():
    fit = fit_law(COMPUTE, LAW.predict(COMPUTE), num_draws=3)
    np.testing.assert_allclose(fit.law, LAW, rtol=1e-3)
    assert fit.residual_std < 1e-6


def test_the_held_out_run_lies_in_the_band_about_as_often_as_promised():
    inside = []
    for seed in range(4):
        errors = noisy(seed)
        fit = fit_law(COMPUTE[:-1], errors[:-1], num_draws=30)
        low, high = fit.band(COMPUTE[-1:], of_runs=True)
        inside.append(low[0] <= errors[-1] <= high[0])
    assert sum(inside) >= 3


def test_the_band_of_runs_is_the_wider_one():
    fit = fit_law(COMPUTE, noisy(0), num_draws=40)
    (low, high), (run_low, run_high) = fit.band(COMPUTE), fit.band(COMPUTE, of_runs=True)
    assert (low < fit.law.predict(COMPUTE)).all() and (high > fit.law.predict(COMPUTE)).all()
    assert (run_high - run_low > high - low).all()


def test_the_front_has_what_nothing_cheaper_beats():
    assert pareto_front([3, 1, 2, 1, 4], [0.3, 0.5, 0.6, 0.4, 0.3]) == [3, 0]


@pytest.fixture
def config():
    c = config_of("scaling", seeds=2)
    c.study.cells = tuple(
        f"{family} | width {width}: model.name={family}-mu/4; model.width={width}"
        for family in ("ViT", "DeiT")
        for width in (16, 32)
    )
    c.study.durations = tuple(f"{steps} steps" for steps in (10, 20, 40, 80))
    return c


def results_of(config, worse=0.0):
    """Results by LAW, with 1e-7 exaFLOPs for a step of width 16, 4 times as many for width 32.

    Errors are off by 0.1 %, up and down by turns, so that the band of a prediction is wider than
    rounding; only the largest run is exact.
    """
    results = {}
    for name, keys in overrides_of(config).items():
        steps = int(keys["duration"].split()[0])
        exaflops = 1e-7 * steps * (4 if keys["model.width"] == "32" else 1)
        noise = 0.0 if exaflops > 3e-5 else 0.001 * (-1) ** (steps // 10).bit_length()
        error = LAW.predict(exaflops) * (1 + noise) + (0.002 if keys["seed"] == "1" else -0.002)
        error += worse * (keys["model.name"] == "DeiT-mu/4")
        results[name] = done(float(1 - error), exaflops=exaflops)
    return results


def test_members_are_families_by_sizes_by_durations(config):
    members = overrides_of(config)
    assert len(members) == 2 * 2 * 4 * 2
    assert members["ViT__width_16__20_steps__seed_0"]["duration"] == "20 steps"
    assert list(members)[4] == "ViT__width_16__20_steps__seed_0"
    assert "duration" in study_of(config).sets
    config.study.durations = ("10 steps", "10 steps")
    assert {*keys_at_fault(config)} == {"study"}  # one workdir for two runs
    config.study.durations = ("10 stepps",)
    assert keys_at_fault(config) == ["study.durations"]


@pytest.mark.slow
def test_the_largest_run_is_held_out_and_predicted(config, monkeypatch):
    monkeypatch.setattr(law, "_cached_fit", functools.partial(fit_law, num_draws=60))
    results = results_of(config, worse=0.1)
    report = report_of(config, results)
    assert report.is_complete
    found = report.values["laws"]["ViT"]
    assert (found["held_out"]["size"], found["compute"]) == ("width 32", 3.2e-5)
    assert found["num_points"] == 5  # 10, 20, 40 and 80 steps of width 16, then 160 of 32 or 80
    assert found["error"] == pytest.approx(LAW.predict(3.2e-5), rel=0.01)
    assert found["measured"] == pytest.approx(LAW.predict(3.2e-5))
    low, high = found["low"], found["high"]
    assert 0.01 < high - low < 0.4 and low <= found["measured"] <= high
    assert {row["family"] for row in report.rows if row[""] == "front"} == {"ViT"}
    assert report.files["study.png"][:4] == b"\x89PNG"
    rows = csv_of(config, results)
    assert len(rows) == 32 and rows[1]["seed"] == "0" and rows[4]["duration"] == "20 steps"
    few = report_of(config, dict(list(results.items())[:3]))
    assert not few.is_complete and few.values["laws"] == {}


@pytest.mark.slow
def test_a_plan_has_a_row_for_each_member_and_plans_each_step_once(config, monkeypatch):
    config.model.name, config.data.name, config.data.image_size = "ViT-mu/4", "digits", 8
    config.global_batch_size, config.duration, config.optimizer.peak_lr = 8, "10 steps", 0.1
    config.study.cells, config.study.seeds = config.study.cells[:1], 1
    config.data.classes, config.data.subset = (0, 1), "10%"
    planned_steps = []
    calculate = planned.calculate_plan

    def count(*arguments):
        planned_steps.append(arguments)
        return calculate(*arguments)

    monkeypatch.setattr(planned, "calculate_plan", count)
    planner = planned.Planner(Target(find_slice("v5e:1x1")), 2.0)
    *rows, total = planned.plan_members(study_of(config), planner).rows
    assert [row["steps"] for row in rows] == ["10", "20", "40", "80"] and len(planned_steps) == 1
    hours = [float(row["chip-hours"]) for row in rows]
    assert hours[3] == pytest.approx(8 * hours[0], rel=0.01)
    assert float(rows[0]["cost"]) == pytest.approx(2 * hours[0], rel=0.01)
    assert float(rows[0]["TPU-core-days"]) == pytest.approx(hours[0] / 24, rel=0.01)
    assert (total["member"], total["steps"]) == ("all 4", "150")
    config.global_batch_size = 9
    with pytest.raises(InputError, match="can be planned: global_batch_size=9: "):
        planned.plan_members(study_of(config), planned.Planner(Target(find_slice("H100:2")), 2.0))
    config.global_batch_size, config.study.topology = 8, "v5e:1x1"
    report = report_of(config, dict(list(results_of(config).items())[:2]))
    assert report.columns[4] == "TPU-core-days of v5e:1x1" and report.texts[0][4] != "-"
