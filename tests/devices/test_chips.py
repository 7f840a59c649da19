"""The chips and the slices that can be planned for."""

import itertools
import math
import subprocess
import sys
import time
import types

import jax
import pytest

from vit_jax.base.errors import InputError
from vit_jax.devices.chips import CHIPS, SLICES, count_chips, find_slice
from vit_jax.devices.flops import PEAK_FLOPS, mfu
from vit_jax.planning.targets import Target, describe_devices
from vit_jax.run.watch.speed import chip_hours, rented_chips


def test_slices_have_the_chips_of_their_shapes():
    for name, found in SLICES.items():
        chip, _, shape = name.partition(":")
        assert (found.name, found.chip) == (name, chip)
        assert found.num_chips == math.prod(map(int, shape.split("x")))
        assert found.num_hosts == 1 or found.num_chips == 4 * found.num_hosts


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [("v5e:4x4", 16, 4), ("v5e:2x4", 8, 1), ("v5p:4x8x8", 256, 64), ("v4:2x2x1", 4, 1),
     ("H100:64", 64, 8), ("A100:2", 2, 1), ("RTX4090:1", 1, 1)],
)  # fmt: skip
def test_find_slice(name, chips, hosts):
    found = find_slice(name)
    assert (found.num_chips, found.num_hosts) == (chips, hosts)


@pytest.mark.parametrize(
    ("accelerator_type", "name"),
    [("v5e-16", "v5e:4x4"), ("v5litepod-8", "v5e:2x4"), ("v6e-256", "v6e:16x16"),
     ("v4-32", "v4:2x2x4"), ("v5p-8", "v5p:2x2x1")],
)  # fmt: skip
def test_accelerator_types_of_google_cloud_name_slices(accelerator_type, name):
    assert find_slice(accelerator_type) == SLICES[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:4x5", r"v5e:4x5: no such slice; known: v5e:1x1,2x2,[\dx,]*,16x16$"),
        ("v5p:1x1", "known: v5p:2x2x1"),
        ("v5litepod-17", r"v5litepod-17: .*known: v4:.*v5e:.*v5p:.*v6e:.*H100:NUMBER"),
        ("H100:12", "H100:12: needs 1, 2, 4 or a multiple of 8 GPUs"),
        ("H100", "needs 1, 2, 4"),
        ("v6:4x4", r"no such slice; known: v6e:1x1,[\dx,]*,16x16$"),
        ("h100x8", "no such slice; known: H100:NUMBER; "),
        ("A100-80GB:8", "no such slice; known: A100:NUMBER; A100-PCIe:NUMBER; A100-40GB"),
    ],
)
def test_other_names_are_refused_with_the_list(name, message):
    with pytest.raises(InputError, match=message) as refused:
        find_slice(name)
    assert str(refused.value).startswith("--topology=")


def test_chips_can_use_no_more_than_they_have():
    for chip in CHIPS.values():
        assert 0.7 * chip.hbm_bytes < chip.usable_bytes < chip.hbm_bytes
        assert chip.slow_bytes_per_s < chip.fast_bytes_per_s < chip.hbm_bytes_per_s
        assert chip.source


def test_peaks_are_of_chips():
    assert PEAK_FLOPS["TPU v5 lite"] == CHIPS["v5e"].peak_flops == 197e12
    assert PEAK_FLOPS["TPU7x"] == CHIPS["tpu7x"].peak_flops == 2307e12
    assert PEAK_FLOPS["NVIDIA H200"] == 989e12


def make_tpus(kind, cores, **more):
    """The devices of a slice of 2 x 2 chips, as `jax.Device` shows them."""
    return [
        types.SimpleNamespace(
            id=2 * number + core, platform="tpu", device_kind=kind, coords=[*place, 0],
            core_on_chip=core, **more,
        )
        for number, place in enumerate(itertools.product(range(2), range(2)))
        for core in range(cores)
    ]  # fmt: skip


def test_devices_on_one_chip_are_counted_as_that_chip():
    gpus = [types.SimpleNamespace(id=i, platform="gpu") for i in range(8)]
    assert count_chips(gpus) == 8
    assert count_chips(make_tpus("TPU v4", 1)) == 4  # both cores in one device
    for kind in ("TPU v2", "TPU v3", "TPU7x"):
        assert len(make_tpus(kind, 2)) == 8 and count_chips(make_tpus(kind, 2)) == 4
    slices = [make_tpus("TPU7x", 2, slice_index=i) for i in range(2)]
    assert count_chips([*slices[0], *slices[1]]) == 8


@pytest.mark.parametrize("name", ["v4:2x2x2", "v5e:4x4", "v5p:2x4x4", "tpu7x:4x4x4", "H100:16"])
def test_plans_count_chips_as_runs_do(name):
    target = Target(find_slice(name), 1 if name == "H100:16" else 2)
    devices = describe_devices(target)
    assert count_chips(devices) == target.num_chips
    assert len(devices) == target.num_chips * target.chip.devices


def test_chip_hours_and_mfu_are_of_chips():
    devices = make_tpus("TPU7x", 2)
    assert chip_hours({}, devices, time.perf_counter() - 3600) == pytest.approx(4, rel=1e-3)
    assert mfu(4 * 2307e12, device_kind="TPU7x", num_chips=count_chips(devices)) == 1


def test_chip_hours_are_of_accelerators_only():
    assert rented_chips(make_tpus("TPU7x", 2)) == 4
    assert chip_hours({"chip_hours": 80.0}, jax.devices("cpu"), 0.0) == 80


def test_importing_it_starts_nothing():
    program = "import sys, vit_jax.devices.chips; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
