"""The speed of training, with a fake clock."""

import pytest
from fake_clock import FakeClock

from vit_jax.run.speed import Throughput


def make_throughput(clock, **fields):
    fields = {"flops_per_image": 197e9, "device_kind": "TPU v5e", "num_chips": 4} | fields
    return Throughput(100, 32, clock=clock, **fields)


def test_throughput_counts_training_alone():
    clock = FakeClock()
    throughput = make_throughput(clock)
    clock.now += 4
    read = throughput.read(110)
    assert read == {"time/seconds": 4, "time/images_per_s": 80, "time/mfu": 0.02}
    clock.now += 1
    for what, seconds in (("evaluation", 20), ("save", 60), ("evaluation", 10)):
        with throughput.pause(what):
            clock.now += seconds
    clock.now += 1
    read = throughput.read(120)
    assert (read.pop("time/evaluation_s"), read.pop("time/save_s")) == (30, 60)
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
    assert throughput.read(101) == {"time/seconds": 1, "time/images_per_s": 32}


def test_a_pause_that_fails_is_still_a_pause():
    clock = FakeClock()
    throughput = make_throughput(clock)
    with pytest.raises(OSError), throughput.pause("save"):
        clock.now += 5
        raise OSError
    clock.now += 1
    assert throughput.read(101)["time/seconds"] == 1
