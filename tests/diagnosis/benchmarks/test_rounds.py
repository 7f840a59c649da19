"""Calls in turns, and what each cost by the clocks."""

import time

from vit_jax.diagnosis.benchmarks.rounds import Cost, measure, spread


def test_calls_take_turns_and_each_is_charged_its_own_time(monkeypatch):
    order, now = [], {"wall": 0.0, "cpu": 0.0}

    def call(name, wall_s, cpu_s):
        order.append(name)
        now["wall"] += wall_s
        now["cpu"] += cpu_s

    with monkeypatch.context() as clocks:
        clocks.setattr(time, "perf_counter", lambda: now["wall"])
        clocks.setattr(time, "process_time", lambda: now["cpu"])
        costs = measure({"a": lambda: call("a", 1.0, 2.0), "b": lambda: call("b", 10.0, 5.0)}, 2)
    assert order == ["a", "b", "a", "b"]
    assert costs == {"a": [Cost(1.0, 2.0)] * 2, "b": [Cost(10.0, 5.0)] * 2}


def test_spread_is_the_median_with_its_extremes():
    assert spread([9.0, 1.0, 2.0, 4.0]) == {"median": 3.0, "min": 1.0, "max": 9.0}
