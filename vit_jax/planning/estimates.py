"""How long a planned run takes: no more than an estimate, which names what it assumes."""

from collections.abc import Mapping
from typing import Any

from vit_jax.devices.chips import CHIPS, Chip


def estimate(figures: Mapping[str, Any], price_per_chip_hour: float | None) -> dict[str, Any]:
    """How long a step and the run take, by `plan`'s figures: no more than an estimate.

    `roofline` is the least time that the chips' peaks leave; `compiler`, where there are cycles,
    what the compiler expects of the computation, with what is exchanged meanwhile hidden behind it
    and the rest added.
    """
    chip = CHIPS[figures["topology"].partition(":")[0]]
    model_flops = figures["flops"]["model_per_step"]
    peak = chip.peak_flops * figures["num_chips"]
    parts = {"flops_s": figures["flops"]["counted_per_step"] / peak}
    assumptions = [
        f"the chip's peaks ({chip.source})",
        "every matrix product at the peak of bfloat16",
        "all chips alike; no input, evaluation, saving or restart",
    ]
    if figures["hbm_bytes_accessed"] is not None:
        parts["hbm_s"] = figures["hbm_bytes_accessed"] * chip.devices / chip.hbm_bytes_per_s
    hidden = added = 0.0
    if figures["collectives"] is not None:
        for row in figures["collectives"]:
            seconds = row["sent_bytes"] * chip.devices / speed_of(chip, row["network"])
            hidden += seconds if row["asynchronous"] else 0.0
            added += 0.0 if row["asynchronous"] else seconds
        parts["collectives_s"] = hidden + added
        assumptions.append(
            "rings that use all of a chip's links at once, without latency: "
            f"{chip.fast_bytes_per_s / 1e9:g} GB/s a chip within a slice or host, "
            f"{chip.slow_bytes_per_s / 1e9:g} GB/s beyond"
        )
    step_s = max(parts.values())
    result = {
        "roofline": {
            **parts,
            "step_s": step_s,
            "bound_by": max(parts, key=parts.__getitem__).removesuffix("_s"),
            "mfu": model_flops / (step_s * peak),
            "assumptions": [*assumptions, "all of it overlaps: the least time there can be"],
        },
        "compiler": None,
    }
    cycles = figures["compiler_cycles"]
    if cycles is not None and chip.cycles_per_s is not None:
        compute_s = cycles / chip.cycles_per_s
        step_s = max(compute_s, hidden) + added
        result["compiler"] = {
            "compute_s": compute_s,
            "collectives_hidden_s": hidden,
            "collectives_added_s": added,
            "step_s": step_s,
            "mfu": model_flops / (step_s * peak),
            "assumptions": [
                *assumptions[:1],
                *assumptions[2:],
                f"the compiler's cycles, at {chip.cycles_per_s / 1e9:g} GHz",
                "asynchronous exchanges hide behind computation, the others wait for it",
            ],
        }
    hours = step_s * figures["total_steps"] / 3600
    chip_hours = hours * figures["num_chips"]
    two_cores = figures["topology"].partition(":")[0] in ("v4", "v5p", "tpu7x")
    result["run"] = {
        "by": "roofline" if result["compiler"] is None else "compiler",
        "images_per_s": figures["global_batch_size"] / step_s,
        "hours": hours,
        "chip_hours": chip_hours,
        "tpu_core_days": None if chip.is_gpu else chip_hours * (1 + two_cores) / 24,
        "cost": None if price_per_chip_hour is None else chip_hours * price_per_chip_hour,
    }
    return result


def speed_of(chip: Chip, network: str) -> float:
    """Bytes/s that a chip sends over "ICI", "DCN", "NVLink" or "network", of a collective table."""
    return chip.fast_bytes_per_s if network in ("ICI", "NVLink") else chip.slow_bytes_per_s
