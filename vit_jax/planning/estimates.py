"""Estimates of the time and cost of a planned run, with their assumptions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax.devices.chips import CHIPS, Chip

USUAL_SHARE = 0.4  # of the peak, with what is computed again; for large matrices


def estimate(
    figures: Mapping[str, Any],
    price_per_chip_hour: float | None = None,
    goodput: float | None = None,
    share_of_peak: float | None = None,
    measured: Chip | None = None,
) -> dict[str, Any]:
    """Estimate the time of a step and of the run from `plan`'s figures.

    `roofline` is the time by the chips' peaks. `compiler`, if cycles are known, is the compiler's
    time for the computation, with asynchronous collectives hidden behind it and the others added.
    `by_kernel` is for programs compiled for GPUs: each kernel by its roofline, in XLA's schedule.
    Without cycles, `at_utilisation` is the time at 40 % of the peak, or `roofline` where that is
    longer.
    `run` has the time, MFU and cost to budget: by `compiler`, else by `at_utilisation`, or
    `by_kernel` where that is longer; its `by` says which. Its hours are the steps' hours, divided
    by `goodput`, the share of steps in the time of a run like it; None: input, evaluations, saves
    and restarts are left out. With a measured `share_of_peak`, `at_utilisation` takes this share
    and decides the time; a `measured` chip replaces its vendor's.

    Of a run with a schedule of image sizes, `stages` has the estimates of each, the last one is
    repeated, and `run` adds up: its step, MFU and images/s are means over time.
    """
    if "stages" in figures:
        known = price_per_chip_hour, goodput, share_of_peak, measured
        stages = [estimate(stage, *known) for stage in figures["stages"]]
        return stages[-1] | {"stages": stages, "run": _add_up(stages, figures["total_steps"])}
    chip = measured or CHIPS[figures["topology"].partition(":")[0]]
    hidden, added = exchange_s(figures["collectives"] or (), chip)
    roofline = _by_roofline(figures, chip, hidden + added)
    estimates: dict[str, Any] = {"roofline": roofline, "compiler": None, "at_utilisation": None}
    estimates["by_kernel"] = None
    if chip.is_gpu and figures["kernels"]:
        estimates["by_kernel"] = _by_kernel(figures, chip)
    if share_of_peak is not None:
        by, step = "at_utilisation", _as_measured(figures, chip, share_of_peak)
    elif (cycles_per_s := _cycles_per_s(figures, chip)) is not None:
        flops_s, by = roofline["flops_s"], "compiler"
        step = _by_compiler(figures, chip, cycles_per_s, flops_s, hidden, added)
    else:
        estimates["at_utilisation"] = _at_utilisation(figures, chip, roofline)
        by = "at_utilisation"
        if estimates["by_kernel"] is not None:
            by = max(by, "by_kernel", key=lambda kind: estimates[kind]["step_s"])
        step = estimates[by]
    hours = step["step_s"] * figures["total_steps"] / 3600 / (goodput or 1.0)
    chip_hours = hours * figures["num_chips"]
    run = {
        "by": by,
        "step_s": step["step_s"],
        "mfu": step["mfu"],
        "images_per_s": figures["global_batch_size"] / step["step_s"],
        "goodput": goodput,
        "hours": hours,
        "chip_hours": chip_hours,
        "tpu_core_days": None
        if chip.platform != "tpu"
        else chip_hours * (1 + chip.has_two_cores) / 24,
        "cost": None if price_per_chip_hour is None else chip_hours * price_per_chip_hour,
    }
    return estimates | {by: step, "run": run}


def _add_up(stages: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """The `run` of `stages`, which have so many `steps` together."""
    runs = [stage["run"] for stage in stages]
    sums = {
        name: None if runs[-1][name] is None else sum(run[name] for run in runs)
        for name in ("hours", "chip_hours", "tpu_core_days", "cost")
    }
    hours, goodput = sum(run["hours"] for run in runs), runs[-1]["goodput"] or 1.0
    means = {
        name: sum(run[name] * run["hours"] for run in runs) / hours
        for name in ("mfu", "images_per_s")
    }
    longest = max(runs, key=lambda run: run["hours"])
    return longest | sums | means | {"step_s": hours * goodput * 3600 / steps}


def _cycles_per_s(figures: Mapping[str, Any], chip: Chip) -> float | None:
    """Cycles per second of the chip; None if unknown, or if the compiler has counted no cycles."""
    return None if figures["compiler_cycles"] is None else chip.cycles_per_s


def _by_roofline(figures: Mapping[str, Any], chip: Chip, collectives_s: float) -> dict[str, Any]:
    """A step's time by the chip's peaks; it is the least possible if `is_minimum`.

    The bytes that a compiled program accesses are no minimum, as some stay in VMEM. Beside a time
    by the compiler only the state, which is read and written once, and the batch count.
    """
    peak = chip.peak_flops * figures["num_chips"]
    moved, is_minimum = figures["hbm_bytes_accessed"], True
    traffic = "state, gradients and kept activations are read and written once"
    if _cycles_per_s(figures, chip) is not None:
        memory = figures["memory_bytes"]
        state = sum(memory[name] for name in ("params", "optimizer", "ema", "other_state"))
        moved = 2 * state + memory["batch"]
        traffic = "of memory only the state, read and written once, and the batch"
    elif figures["compiler_cycles"] is not None:
        is_minimum, traffic = False, "all accessed memory is HBM, though some may be VMEM"
    elif figures["kernels"]:
        is_minimum, traffic = False, "all accessed memory is HBM, though some may be in the cache"
    parts = {"flops_s": figures["flops"]["counted_per_step"] / peak}
    if moved is not None:
        parts["hbm_s"] = moved * chip.devices / chip.hbm_bytes_per_s
    if figures["collectives"] is not None:
        parts["collectives_s"] = collectives_s
    step_s = max(parts.values())
    return {
        **parts,
        "step_s": step_s,
        "bound_by": max(parts, key=parts.__getitem__).removesuffix("_s"),
        "mfu": figures["flops"]["model_per_step"] / (step_s * peak),
        "is_minimum": is_minimum,
        "assumptions": [
            f"the chip's peaks ({chip.source})",
            "every matrix product at the chip's peak, whatever its dtype",
            *_common_assumptions(figures, chip),
            *[traffic] * (moved is not None),
            "everything overlaps" + ", so this is the minimum time" * is_minimum,
        ],
    }


def _at_utilisation(
    figures: Mapping[str, Any], chip: Chip, roofline: Mapping[str, Any]
) -> dict[str, Any]:
    """A step's time at a usual share of the peak, for plans without one by the compiler.

    If memory or networks make the time of `roofline` longer, it is that time.
    """
    flops, peak = figures["flops"], chip.peak_flops * figures["num_chips"]
    usual_s = flops["counted_per_step"] / (USUAL_SHARE * peak)
    bounds = {"what is computed again counts": usual_s}
    bounds[f"less here, as the step is bound by {roofline['bound_by']}"] = roofline["step_s"]
    told, step_s = max(bounds.items(), key=lambda bound: bound[1])
    return {
        "share_of_peak": flops["counted_per_step"] / (step_s * peak),
        "mfu": flops["model_per_step"] / (step_s * peak),
        "step_s": step_s,
        "assumptions": [f"{USUAL_SHARE:.0%} of the chip's peak, usual for large matrices; {told}"],
    }


def _as_measured(figures: Mapping[str, Any], chip: Chip, share: float) -> dict[str, Any]:
    """A step's time at a measured share of the peak."""
    flops, peak = figures["flops"], chip.peak_flops * figures["num_chips"]
    step_s = flops["counted_per_step"] / (share * peak)
    return {
        "share_of_peak": share,
        "mfu": flops["model_per_step"] / (step_s * peak),
        "step_s": step_s,
        "assumptions": [f"{share:.0%} of the chip's peak, as measured with {figures['measured']}"],
    }


def exchange_s(collectives: Iterable[Mapping[str, Any]], chip: Chip) -> tuple[float, float]:
    """Seconds per step of the collectives that computation hides, and of the others."""
    seconds = {True: 0.0, False: 0.0}
    for row in collectives:
        speed = speed_of(chip, row["network"])
        seconds[row["asynchronous"]] += row["sent_bytes"] * chip.devices / speed
    return seconds[True], seconds[False]


def _common_assumptions(figures: Mapping[str, Any], chip: Chip) -> list[str]:
    """The assumptions of both estimates."""
    assumptions = ["all chips equally fast; no input, evaluation, saving or restart"]
    if figures["collectives"] is not None:
        assumptions.append(
            "rings that use all of a chip's links at once, without latency: "
            f"{chip.fast_bytes_per_s / 1e9:g} GB/s per chip within a slice or host, "
            f"{chip.slow_bytes_per_s / 1e9:g} GB/s beyond"
        )
    return assumptions


def _by_compiler(
    figures: Mapping[str, Any],
    chip: Chip,
    cycles_per_s: float,
    flops_s: float,
    hidden: float,
    added: float,
) -> dict[str, Any]:
    """A step's time by the compiler's cycles, given the seconds of hidden and added collectives.

    The computation takes at least `flops_s`, also if the cycles of a kernel are not known.
    """
    compute_s = max(figures["compiler_cycles"] / cycles_per_s, flops_s)
    told = (
        "the compiler's cycles, with kernels' cycles by their schedules, at "
        f"{cycles_per_s / 1e9:g} GHz"
    )
    waits = "asynchronous collectives hide behind computation, the others add to it"
    return _with_collectives(figures, chip, compute_s, hidden, added, [told, waits])


def _by_kernel(figures: Mapping[str, Any], chip: Chip) -> dict[str, Any]:
    """A step's time by the roofline of each kernel, in XLA's schedule; see `scheduled_s`."""
    times = figures["scheduled_s"]
    added = times["step"] - times["kernels"]
    told = [
        "each kernel at the peak of its products or of the memory, one after the other, in no time "
        "to start",
        "products as they are compiled without a device, which would choose the fastest of several "
        "kernels",
        "one exchange at a time, 10 us to start; the step waits where XLA's schedule does",
    ]
    hidden = max(times["exchanges"] - added, 0.0)
    return _with_collectives(figures, chip, times["kernels"], hidden, added, told)


def _with_collectives(
    figures: Mapping[str, Any], chip: Chip, compute_s: float, hidden: float, added: float,
    told: list[str],
) -> dict[str, Any]:  # fmt: skip
    """A step's time by `compute_s`, with the seconds of hidden and added collectives.

    `told`: assumptions about `compute_s`.
    """
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
            *told,
        ],
    }


def speed_of(chip: Chip, network: str) -> float:
    """Bytes/s that a chip sends over a collective's network; see `Chip.fast_network`."""
    return chip.fast_bytes_per_s if network == chip.fast_network else chip.slow_bytes_per_s
