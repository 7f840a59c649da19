"""The chips and the slices that can be planned for."""

import math
import subprocess
import sys

import pytest

from vit_jax.errors import InputError
from vit_jax.flops import PEAK_FLOPS
from vit_jax.topologies import CHIPS, SLICES, find_slice


def test_slices_have_the_chips_of_their_shapes():
    for name, found in SLICES.items():
        chip, _, shape = name.partition(":")
        assert (found.name, found.chip) == (name, chip)
        assert found.num_chips == math.prod(map(int, shape.split("x")))
        assert found.num_hosts == 1 or found.num_chips == 4 * found.num_hosts


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [("v5e:4x4", 16, 4), ("v5e:2x4", 8, 1), ("v5p:4x8x8", 256, 64), ("v4:2x2x1", 4, 1),
     ("H100:64", 64, 8), ("A100:2", 2, 1)],
)  # fmt: skip
def test_find_slice(name, chips, hosts):
    found = find_slice(name)
    assert (found.num_chips, found.num_hosts) == (chips, hosts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:4x5", r"v5e:4x5: no such slice is rented; known: v5e:1x1, v5e:2x2, .*v5e:16x16$"),
        ("v5p:1x1", "known: v5p:2x2x1"),
        ("v5litepod-16", r"v5litepod-16: .*known: v4:.*v5e:.*v5p:.*v6e:.*H100:NUMBER"),
        ("H100:12", "H100:12: needs 1, 2, 4 or a multiple of 8 GPUs"),
        ("H100", "needs 1, 2, 4"),
        ("v6:4x4", "did you mean v6e:4x4"),
    ],
)
def test_other_names_are_refused_with_the_list(name, message):
    with pytest.raises(InputError, match=f"--topology=.*{message}"):
        find_slice(name)


def test_chips_can_use_no_more_than_they_have():
    for chip in CHIPS.values():
        assert 0.7 * chip.hbm_bytes < chip.usable_bytes < chip.hbm_bytes
        assert chip.slow_bytes_per_s < chip.fast_bytes_per_s < chip.hbm_bytes_per_s
        assert chip.source


def test_peaks_are_of_devices():
    assert PEAK_FLOPS["TPU v5 lite"] == CHIPS["v5e"].peak_flops == 197e12
    assert PEAK_FLOPS["TPU7x"] == CHIPS["tpu7x"].peak_flops / 2  # JAX sees its cores
    assert PEAK_FLOPS["NVIDIA H200"] == 989e12


def test_importing_it_starts_nothing():
    program = "import sys, vit_jax.topologies; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
