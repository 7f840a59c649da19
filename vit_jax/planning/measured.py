"""Plans by what `vit_jax certify` measured in the place of assumptions."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.devices.chips import CHIPS, Chip, Slice
from vit_jax.planning.targets import Target

SCHEMA = 2  # of the files that this module reads


class Step(NamedTuple):
    """A step of a certificate.

    flops_per_image: of the model and what is computed again.
    share_of_peak: FLOP/s of the step over the peak of the chips.
    scale: measured bytes of activations over calculated ones; see `kept.peak_bytes`.
    """

    model: str
    flops_per_image: float
    share_of_peak: float
    scale: float


class Certificate(NamedTuple):
    """The figures of a certificate for plans.

    target: the hardware on which it was made.
    """

    source: str
    target: Target
    steps: tuple[Step, ...]

    @property
    def is_of_cpu(self) -> bool:
        return self.target.chip.platform == "cpu"

    def check_chip(self, chip: str) -> None:
        """Raise InputError if plans are for another chip."""
        own = self.target.slice.chip
        if chip != own:
            raise InputError(
                f"--measured={self.source}: was measured on {own}, not on {chip}; give "
                "a --topology of that chip, or another certificate"
            )

    def nearest_to(self, figures: Mapping[str, Any]) -> Step:
        """The step whose FLOPs of an image are nearest to the plan's, as a ratio."""
        flops = figures["flops"]["counted_per_step"] / figures["global_batch_size"]
        return min(self.steps, key=lambda step: abs(math.log(step.flops_per_image / flops)))


def read_certificate(path: epath.Path) -> Certificate:
    """Read a certificate.

    Raises:
      InputError: the file is none, or has no step beside its calculated memory.
    """
    try:
        content = json.loads(path.read_text())
        schema, parts = content["schema"], content["parts"]
        devices, rows = parts["devices"], parts["steps"]["rows"]
        target = target_of_certificate(devices, str(path))
        peak = target.chip.peak_flops * target.num_chips
        steps = tuple(
            Step(
                row["model"],
                row["flops"] / row["global_batch_size"],
                row["flops"] / (row["step_s"] * peak),
                row["scale_of_activations"],
            )
            for row in rows
            if "scale_of_activations" in row
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"--measured={path}: is no certificate with steps ({type(error).__name__}: {error}); "
            "make one with: vit_jax certify --output=DIR"
        ) from None
    if schema != SCHEMA or not steps:
        raise InputError(
            f"--measured={path}: has {len(steps)} steps beside a plan, and schema {schema}; make "
            "one with: vit_jax certify --output=DIR"
        )
    return Certificate(str(path), target, steps)


def target_of_certificate(devices: Mapping[str, Any], source: str) -> Target:
    """The hardware of the part `devices` of a certificate.

    Raises:
      InputError: its chip is not known.
    """
    kind, number = devices["device_kind"], devices["num_chips"]
    if kind == "cpu":
        memory, speed = int(devices["memory_bytes"]), devices["memory_bytes_per_s"]
        measured = Chip(
            devices["flops_per_s"], memory, memory, speed, speed, speed, None, ("cpu",),
            f"as measured, {source}",
        )  # fmt: skip
        slice_ = Slice(f"cpu:{number}", "cpu", number, 1)
        return Target(slice_, may_compile=False, measured=measured)
    for name, chip in CHIPS.items():
        if kind in chip.device_kinds:
            return Target(Slice(f"{name}:{number}", name, number, 1), may_compile=False)
    raise InputError(f"--measured={source}: plans know no {kind}")
