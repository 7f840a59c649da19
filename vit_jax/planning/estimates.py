"""How long a planned run takes: no more than an estimate, which names what it assumes."""

from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.devices.chips import CHIPS, Chip


def estimate(figures: Mapping[str, Any], price_per_chip_hour: float | None) -> dict[str, Any]:
    """How long a step and the run take, by `plan`'s figures: no more than an estimate.

    `roofline` is the least time that the chips' peaks leave; `compiler`, where there are cycles,
    what the compiler expects of the computation, with what is exchanged meanwhile hidden behind it
    and the rest added.
    """
    chip = CHIPS[figures["topology"].partition(":")[0]]
    peak = chip.peak_flops * figures["num_chips"]
    parts = {"flops_s": figures["flops"]["counted_per_step"] / peak}
    if figures["hbm_bytes_accessed"] is not None:
        parts["hbm_s"] = figures["hbm_bytes_accessed"] * chip.devices / chip.hbm_bytes_per_s
    hidden, added = _exchange_s(figures["collectives"] or (), chip)
    if figures["collectives"] is not None:
        parts["collectives_s"] = hidden + added
    step_s = max(parts.values())
    roofline = {
        **parts,
        "step_s": step_s,
        "bound_by": max(parts, key=parts.__getitem__).removesuffix("_s"),
        "mfu": figures["flops"]["model_per_step"] / (step_s * peak),
        "assumptions": [
            f"the chip's peaks ({chip.source})",
            "every matrix product at the peak of bfloat16",
            *_common_assumptions(figures, chip),
            "all of it overlaps: the least time there can be",
        ],
    }
    compiler = None
    if figures["compiler_cycles"] is not None and chip.cycles_per_s is not None:
        compiler = _by_compiler(figures, chip, hidden, added)
    best = roofline if compiler is None else compiler
    run = {
        "by": "roofline" if compiler is None else "compiler",
        **_run_costs(figures, best["step_s"], price_per_chip_hour),
    }
    return {"roofline": roofline, "compiler": compiler, "run": run}


def _exchange_s(collectives: Iterable[Mapping[str, Any]], chip: Chip) -> tuple[float, float]:
    """Seconds a step of the collectives that computation hides, and of the others."""
    hidden = added = 0.0
    for row in collectives:
        seconds = row["sent_bytes"] * chip.devices / speed_of(chip, row["network"])
        hidden += seconds if row["asynchronous"] else 0.0
        added += 0.0 if row["asynchronous"] else seconds
    return hidden, added


def _common_assumptions(figures: Mapping[str, Any], chip: Chip) -> list[str]:
    """The assumptions of both estimates."""
    assumptions = ["all chips alike; no input, evaluation, saving or restart"]
    if figures["collectives"] is not None:
        assumptions.append(
            "rings that use all of a chip's links at once, without latency: "
            f"{chip.fast_bytes_per_s / 1e9:g} GB/s a chip within a slice or host, "
            f"{chip.slow_bytes_per_s / 1e9:g} GB/s beyond"
        )
    return assumptions


def _by_compiler(
    figures: Mapping[str, Any], chip: Chip, hidden: float, added: float
) -> dict[str, Any]:
    """A step by the compiler's cycles, with the seconds of exchanges hidden and added."""
    compute_s = figures["compiler_cycles"] / chip.cycles_per_s
    step_s = max(compute_s, hidden) + added
    peak = chip.peak_flops * figures["num_chips"]
    return {
        "compute_s": compute_s,
        "collectives_hidden_s": hidden,
        "collectives_added_s": added,
        "step_s": step_s,
        "mfu": figures["flops"]["model_per_step"] / (step_s * peak),
        "assumptions": [
            f"the chip's peaks ({chip.source})",
            *_common_assumptions(figures, chip),
            f"the compiler's cycles, at {chip.cycles_per_s / 1e9:g} GHz",
            "asynchronous exchanges hide behind computation, the others wait for it",
        ],
    }


def _run_costs(
    figures: Mapping[str, Any], step_s: float, price_per_chip_hour: float | None
) -> dict[str, Any]:
    """The whole run: its speed, and the hours and money it takes."""
    hours = step_s * figures["total_steps"] / 3600
    chip_hours = hours * figures["num_chips"]
    name = figures["topology"].partition(":")[0]
    two_cores = name in ("v4", "v5p", "tpu7x")
    return {
        "images_per_s": figures["global_batch_size"] / step_s,
        "hours": hours,
        "chip_hours": chip_hours,
        "tpu_core_days": None if CHIPS[name].is_gpu else chip_hours * (1 + two_cores) / 24,
        "cost": None if price_per_chip_hour is None else chip_hours * price_per_chip_hour,
    }


def speed_of(chip: Chip, network: str) -> float:
    """Bytes/s that a chip sends over "ICI", "DCN", "NVLink" or "network", of a collective table."""
    return chip.fast_bytes_per_s if network in ("ICI", "NVLink") else chip.slow_bytes_per_s
