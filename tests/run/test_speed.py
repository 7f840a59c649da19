"""The speed of training, with a fake clock."""

import threading
import time

import pytest
from fake_clock import FakeClock

from vit_jax.run.watch.ledger import Past
from vit_jax.run.watch.speed import Results, Throughput


def make_throughput(clock, **fields):
    counts = {"images": lambda steps: 32 * steps, "flops": lambda steps: 32 * 197e9 * steps}
    fields = {"device_kind": "TPU v5e", "num_chips": 4} | fields
    return Throughput(100, **counts, clock=clock, **fields)


def test_throughput_counts_training_alone():
    clock = FakeClock()
    throughput = make_throughput(clock)
    clock.now += 4
    read = throughput.read(110)
    assert read == {"time/seconds": 4, "time/images_per_s": 80, "time/mfu": 0.02,
                    "time/wall_s": 4, "time/goodput": 1}  # fmt: skip
    clock.now += 1
    for what, seconds in (("evaluation", 20), ("save", 60), ("evaluation", 10)):
        with throughput.pause(what):
            clock.now += seconds
    clock.now += 1
    read = throughput.read(120)
    assert (read.pop("time/evaluation_s"), read.pop("time/save_s")) == (30, 60)
    assert (read.pop("time/wall_s"), read.pop("time/goodput")) == (96, 6 / 96)
    assert read == {"time/seconds": 6, "time/images_per_s": 160, "time/mfu": 0.04}
    clock.now += 2
    assert "time/save_s" not in throughput.read(130)


def test_time_goes_on_after_a_restart():
    clock = FakeClock()
    throughput = make_throughput(clock, total_s=10.0)
    clock.now += 4
    assert throughput.seconds() == 14
    read = throughput.read(110)
    assert (read["time/seconds"], read["time/images_per_s"]) == (14, 80)


def test_throughput_of_an_unknown_chip_has_no_mfu():
    clock = FakeClock()
    throughput = make_throughput(clock, device_kind="cpu")
    clock.now += 1
    assert "time/mfu" not in throughput.read(101)


def test_a_pause_that_fails_is_still_a_pause():
    clock = FakeClock()
    throughput = make_throughput(clock)
    with pytest.raises(OSError), throughput.pause("save"):
        clock.now += 5
        raise OSError
    clock.now += 1
    assert throughput.read(101)["time/seconds"] == 1


class Result:
    """A result of a device that ends when it is told to."""

    def __init__(self):
        self._ended = threading.Event()

    def block_until_ready(self):
        self._ended.wait()
        return self

    def end(self, results):
        self._ended.set()
        while results.idle_since() is None:  # the thread is about to note it
            time.sleep(0.001)


def test_a_wait_for_a_batch_counts_from_when_the_devices_are_idle():
    clock, results_of = FakeClock(), []
    past = Past(10.0, 1.0, {"restart": 10.0})
    throughput = make_throughput(clock, past=past)

    def batches(results):
        clock.now += 2  # before the first step
        yield 1
        clock.now += 3  # a step computes meanwhile
        yield 2
        clock.now += 1
        results_of[-1].end(results)
        clock.now += 4
        yield 3

    with Results(clock) as results:
        for _ in throughput.waits(batches(results), results):
            results_of.append(Result())
            results.add(results_of[-1])
            if len(results_of) == 2:
                results_of[0]._ended.set()
        results_of[-1].end(results)
    read = throughput.read(110)
    assert (read["time/input_wait_s"], read["time/restart_s"]) == (2 + 4, 10.0)
    assert read["time/wall_s"] == 20 and read["time/goodput"] == (10 - 6 - 1) / 20
