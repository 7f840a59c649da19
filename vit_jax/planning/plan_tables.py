"""What the command `plan` prints: the answer in one line, and tables."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from rich.table import Column, Table

from vit_jax.devices.flops import format_bytes
from vit_jax.planning.recipe_costs import Affordable, stage_after

_SMALL = 0.01  # share of the time of all kernels, below which a kind has no row
_BY = {"compiler": "the compiler", "calculation": "calculation"}
_TIME_BY = {"compiler": "compiler", "by_kernel": "kernels", "at_utilisation": "40% of peak"}


def answer(figures: dict[str, Any]) -> str:
    """One sentence about a plan: whether it fits, how long it takes and what it costs.

    If it does not fit, also a change with which it does, if `figures` has "remedies".
    """
    memory, by = figures["memory_bytes"], _BY[figures["by"]]
    space = f"{_bytes(memory['peak'])} of {_bytes(memory['capacity'])} a device"
    time = _time(figures["estimate"]["run"])
    if memory["fits"]:
        verdict = "May not fit" if memory["may_not_fit"] else "Fits"
        return f"{verdict}, by {by}: {space}; {time}"
    parts = [f"Does not fit, by {by}: needs {space}", f"would take {time}"]
    if "remedies" in figures:
        parts.append(_remedy(figures["remedies"]))
    return "; ".join(parts)


def _time(run: dict[str, Any]) -> str:
    """Time of a step, MFU, and hours and cost of the run: the figures to budget."""
    cost = "" if run["cost"] is None else f", cost {_amount(run['cost'], ',.2f', 0.01)}"
    hours = f"{_amount(run['hours'], ',.3g')} hours ({_what_counts(run['goodput'])})"
    return (
        f"{_ms(run['step_s'])} a step, MFU {run['mfu']:.0%}; "
        f"{hours}, {_amount(run['chip_hours'])} chip-hours{cost}"
    )


def _what_counts(goodput: float | None) -> str:
    return f"goodput {goodput:.1%}" if goodput else "without input, evaluations and saves"


def _amount(amount: float, form: str = ",.4g", least: float = 0.001) -> str:
    """Hours or money; what is below `least` is worth no digits."""
    if 0 < amount < least:
        return f"under {least}"
    if amount >= 1000 and form.endswith("g"):  # whole, not 1e+03
        form = ",.0f"
    return f"{amount:{form}}"


def _remedy(remedies: list[dict[str, Any]]) -> str:
    """The change to make: the last one that `find_remedies` gives."""
    last: dict[str, Any] = remedies[-1] if remedies else {"fits": False}
    if last["fits"]:
        return f"fits with {_as_flags(last['change'])} ({_bytes(last['peak_bytes'])})"
    suggested = f"; try {_as_flags(last['change'])}" if last["fits"] is None else ""
    return f"nothing tried fits{suggested}"


def _as_flags(change: dict[str, Any]) -> str:
    return " ".join(
        f"--{'' if key == 'topology' else 'config.'}{key}={value}" for key, value in change.items()
    )


def print_plan(figures: dict[str, Any]) -> list[Any]:
    """The answer in one line, then tables of the plan and the assumptions of its estimates."""
    estimate = figures["estimate"]
    per = "chip" if figures["devices_per_chip"] == 1 else "device (half a chip)"
    parts: list[Any] = [
        f"{answer(figures)}.",
        run_table(figures),
        memory_table(figures, per),
        work_table(figures, per),
    ]
    if figures["collectives"] is not None:
        parts.append(collectives_table(figures["collectives"], per))
    if "stages" in figures:
        parts.append(stages_table(figures))
    parts.append(estimate_table(estimate))
    for kind in ("compiler", "at_utilisation", "by_kernel", "roofline"):
        if estimate[kind] is not None:
            assumptions = "; ".join(estimate[kind]["assumptions"])
            parts.append(f"{kind.replace('_', ' ')}: assumes {assumptions}.")
    return parts


def run_table(figures: dict[str, Any]) -> Table:
    """Table of the run that is planned."""
    from vit_jax.planning.targets import readable_mesh

    hosts = figures["num_hosts"]
    slices = f", {figures['num_slices']} slices" if figures["num_slices"] > 1 else ""
    took = f", in {figures['compile_s']:.0f} s" if figures["by"] == "compiler" else ""
    share = f"{figures['images_per_way']:,} per shard"
    share += f" in {n} microbatches" if (n := figures["accum_steps"]) > 1 else ""
    rows = {
        "chips": f"{figures['num_chips']:,} on {hosts:,} host{'s' * (hosts > 1)}{slices}",
        "mesh": readable_mesh(figures["mesh"]),
        "images": "{} x {} pixels (height x width)".format(*figures["image_size"]),
        "batch": f"{figures['global_batch_size']:,}, {share}",
        "layers": describe_layers(figures),
        "parameters": f"{figures['num_params']:,}",
        "forward pass": f"{figures['flops']['forward_macs_per_image'] / 1e9:,.4g} GMAC an image",
        "steps": f"{figures['total_steps']:,}",
        "by": f"{_BY[figures['by']]}{took}",
    }
    return _pairs(f"{figures['model']} on {figures['topology']}", rows)


def memory_table(figures: dict[str, Any], per: str) -> Table:
    """Table of the memory of a device, called `per`, and of a host."""
    memory = figures["memory_bytes"]
    shown = ("params", "optimizer", "ema", "other_state", "teachers", "batch", "temporaries",
             "arguments", "updated_in_place", "peak", "capacity", "margin")  # fmt: skip
    rows = {name.replace("_", " "): _bytes(memory[name]) for name in shown if name in memory}
    rows = {name: size for name, size in rows.items() if size != "0.0 MiB"}
    fits = "maybe" if memory["may_not_fit"] else "yes"
    rows["fits"] = fits if memory["fits"] else f"no: {_bytes(-memory['margin'])} too much"
    rows["host, at save"] = _bytes(figures["host_bytes_at_save"])
    return _pairs(f"Memory of a {per}", rows)


def work_table(figures: dict[str, Any], per: str) -> Table:
    """Table of what a step computes and accesses."""
    flops, cycles, rows = figures["flops"], figures["compiler_cycles"], {}
    if (by_sizes := flops["model_per_image_by_sizes"]) is not None:
        rows["FLOPs of the model, by its sizes"] = _flops(by_sizes * figures["global_batch_size"])
    rows["FLOPs of the model, counted"] = _flops(flops["model_per_step"])
    rows["FLOPs with recomputation, counted"] = _flops(flops["counted_per_step"])
    if figures["hbm_bytes_accessed"] is not None:
        what = "bytes accessed" if figures["by"] == "compiler" else "HBM accessed"
        rows[f"{what} by a {per}"] = _bytes(figures["hbm_bytes_accessed"])
    if cycles is not None:
        rows["compiler's estimate"] = f"{cycles / 1e6:,.1f} Mcycles"
        for call, number in _sum_calls(figures["kernels"], "cycles").items():
            rows[f"of these {call}"] = f"{number / 1e6:,.1f} Mcycles"
    elif figures["kernels"]:
        rows |= _kernel_rows(figures["kernels"])
    return _pairs("Work of a step", rows)


def _kernel_rows(kernels: list[dict[str, Any]]) -> dict[str, str]:
    """Rows of the kernels of a GPU, the longest first; one row has all that take little."""
    whole = sum(row["roofline_s"] for row in kernels)
    large = [row for row in kernels if row["roofline_s"] >= _SMALL * whole]
    rows = {call: _ms(seconds) for call, seconds in _sum_calls(large, "roofline_s").items()}
    if number := sum(row["count"] for row in kernels if row not in large):
        rows[f"{number:,} x others"] = _ms(whole - sum(row["roofline_s"] for row in large))
    return rows


def _sum_calls(kernels: list[dict[str, Any]], key: str) -> dict[str, float]:
    """{calls: their sum of `key`}; kernels that differ in their shapes only, as of two towers, add.

    The largest comes first.
    """
    counts, sums = Counter[str](), Counter[str]()
    for row in kernels:
        kind = f"{row['name']}, bound by {row['bound_by']}"
        counts[kind] += row["count"]
        sums[kind] += row[key]
    return {f"{counts[kind]:,} x {kind}": number for kind, number in sums.most_common()}


def describe_layers(row: dict[str, Any]) -> str:
    """How the layers of a plan are compiled, e.g. "unrolled, remat full in the first 10"."""
    of_some = "" if row["remat_layers"] is None else f" in the first {row['remat_layers']}"
    return f"{'scanned' if row['scan'] else 'unrolled'}, remat {row['remat']}{of_some}"


def collectives_table(rows: list[dict[str, Any]], per: str) -> Table:
    """Table of the exchanges between devices in one step."""
    kind = Column("", no_wrap=True)  # whole in a narrow terminal too
    table = Table(kind, "axes", "network", "count", "bytes", f"sent by a {per}", "meanwhile",
                  title="Exchanges in a step")  # fmt: skip
    for row in rows:
        table.add_row(
            row["kind"], " ".join(row["axes"]), row["network"], f"{row['count']:,}",
            _bytes(row["bytes"]), _bytes(row["sent_bytes"]),
            "computes" if row["asynchronous"] else "waits",
        )  # fmt: skip
    return table


def stages_table(figures: dict[str, Any]) -> Table:
    """Table of the stages of a run, with what is drawn, or the share of patches it encodes."""
    columns = ("pixels", "patches", "steps", "batch", "step", "hours", "memory")
    table = Table(*columns, title="Stages; time and cost are sums, other tables describe the last")
    for stage, estimate in zip(figures["stages"], figures["estimate"]["stages"], strict=True):
        run, peak = estimate["run"], stage["memory_bytes"]["peak"]
        drawn = " ".join(str(each).rpartition(".")[2] for each in stage["drawn"])
        table.add_row(
            "{} x {}".format(*stage["image_size"]), drawn or f"{stage['keep_tokens']:.0%}",
            f"{stage['total_steps']:,}", f"{stage['global_batch_size']:,}", _ms(run["step_s"]),
            _amount(run["hours"]), _bytes(peak),
        )  # fmt: skip
    return table


def estimate_table(estimate: dict[str, Any]) -> Table:
    """Table of time and cost; all figures are estimates."""
    roofline, usual, run = (estimate[key] for key in ("roofline", "at_utilisation", "run"))
    share = "by the compiler" if usual is None else f"at {usual['share_of_peak']:.0%} of the peak"
    if run["by"] == "by_kernel":
        share = "by the roofline of each kernel"
    rows = {
        "step": _ms(run["step_s"]),
        "MFU": f"{run['mfu']:.1%}",
        "images/s": f"{run['images_per_s']:,.0f}",
        "hours": _amount(run["hours"]),
        "chip-hours": _amount(run["chip_hours"]),
    }
    if run["tpu_core_days"] is not None:
        rows["TPU-core-days"] = _amount(run["tpu_core_days"])
    if run["cost"] is not None:
        rows["cost"] = _amount(run["cost"], ",.2f", 0.01)
    if (by_kernel := estimate["by_kernel"]) is not None:
        rows["step, each kernel by its roofline"] = _ms(by_kernel["step_s"])
        rows["of it waits for exchanges"] = _ms(by_kernel["collectives_added_s"])
        rows["MFU, each kernel by its roofline"] = f"{by_kernel['mfu']:.1%}"
    bound = f"bound by {roofline['bound_by']}"
    rows["step, by the roofline"] = f"{_ms(roofline['step_s'])}, {bound}"
    rows["MFU, by the roofline"] = f"{roofline['mfu']:.1%}"
    return _pairs(f"Estimates {share}", rows)


def layouts_table(rows: list[dict[str, Any]]) -> list[Any]:
    """One row per layout, the fastest first, and the words that select it."""
    from vit_jax.planning.targets import readable_mesh

    columns = ("mesh", "layers", "batch", "peak", "images/s", "MFU", "hours")
    fit = rows[0]["fits"]  # the fastest come first
    counts = f"; hours: {_what_counts(rows[0]['estimate']['goodput'])}" if fit else ""
    table = Table(*columns, title=f"Layouts; speeds are estimates{counts}")
    for row in rows:
        cells = [
            readable_mesh(row["mesh"]), describe_layers(row), f"{row['global_batch_size']:,}",
            _bytes(row["peak_bytes"]),
        ]  # fmt: skip
        if row["fits"]:
            run = row["estimate"]
            cells += [f"{run['images_per_s']:,.0f}", f"{run['mfu']:.1%}", f"{run['hours']:,.4g}"]
        else:
            cells.append("does not fit")
        table.add_row(*cells)
    if not fit:
        return [table]
    return [table, f"the fastest: {_as_flags(rows[0]['changes']) or 'as the config has it'}"]


def recipes_table(found: Affordable, asked: str, without: Collection[str] = ()) -> list[Any]:
    """One row per recipe, the cheapest first.

    Args:
      asked: the slice of --topology.
      without: the recipes without costs on its chips.
    """
    said: list[Any] = []
    if rows := found.rows:
        name = Column("recipe", overflow="fold")  # a narrow terminal shows all figures
        figures = [Column(word, no_wrap=True) for word in ("slice", "time by", "hours", "cost")]
        table = Table(name, *figures, title="Recipes, by estimated cost")
        for row in rows:
            where = row["slice"] + " (may not fit)" * (row["fits"] == "maybe")
            hours, cost = _amount(row["hours"], ",.3g", 0.01), _amount(row["cost"], ",.2f", 0.01)
            table.add_row(row["recipe"], where, _TIME_BY[row["time_by"]], hours, cost)
        said += [table, f"Hours: {_what_counts(rows[0]['goodput'])}. A plan with --config=RECIPE "
                 "has all figures of a recipe."]  # fmt: skip
    else:
        said.append("No shipped recipe costs as little.")
    if found.shares is not None:
        least, most = found.shares
        said.append(
            "Calculated times assume 40 % of the chips' peak. By the compiler the steps of recipes "
            f"take {least:.0%} to {most:.0%} of the calculated time."
        )
    if found.perhaps:
        said.append(f"Above the budget by calculation only: {', '.join(found.perhaps)}.")
    stages = [(row["recipe"], stage_after(row["recipe"])) for row in rows]
    if first := [f"{recipe} ({second})" for recipe, second in stages if second]:
        said.append(f"Add the cost of the stage that follows: {', '.join(first)}.")
    if any(row["slice"] != asked for row in rows):
        said.append(
            f"These are costs on {rows[0]['slice']}: other numbers of chips take other times, and "
            "fewer may be too small."
        )
    if found.too_large:
        said.append(f"Fit in no layout: {', '.join(found.too_large)}.")
    if without:
        said.append(f"Without costs on these chips: {', '.join(without)}.")
    return said


def sharding_table(rows: list[dict[str, Any]]) -> list[Table]:
    """One row per parameter."""
    name = Column("parameter", no_wrap=True)  # never shortened, even in a narrow terminal
    table = Table(name, "shape", "split over", "a device", title="Parameters")
    for row in rows:
        axes = ", ".join("+".join(a) if isinstance(a, list) else a or "-" for a in row["sharding"])
        table.add_row(row["name"], str(tuple(row["shape"])), axes or "-",
                      _bytes(row["bytes_per_device"]))  # fmt: skip
    return [table]


def _pairs(title: str, rows: dict[str, str]) -> Table:
    """Table of names and values."""
    table = Table("", "", title=title, show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def _bytes(number: float) -> str:
    return format_bytes(int(number)) if number >= 0 else f"-{format_bytes(int(-number))}"


def _ms(seconds: float) -> str:
    return f"{_amount(seconds * 1e3, least=0.0)} ms"


def _flops(number: float) -> str:
    return f"{number / 1e12:,.4g} TFLOP"
