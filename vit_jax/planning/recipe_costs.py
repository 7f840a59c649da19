"""What the shipped recipes cost: the table that tools/recipe_costs.py writes."""

import csv
import pathlib
from typing import Any, NamedTuple

from vit_jax.base.errors import InputError
from vit_jax.devices.chips import Slice, find_slice

TABLE = pathlib.Path(__file__).with_name("recipe_costs.csv")

# Configs of two stages: the word of the second, a recipe of its own.
_SECOND_STAGES = {
    "deit3": "finetune", "dinov3": "gram", "mae": "finetune", "masked_patches": "finetune",
}  # fmt: skip


def read_costs() -> list[dict[str, str]]:
    """The rows of the table: a recipe on a slice, by calculation or (later rows) by a compiler.

    `time_by` is the estimate that its time is from; see `estimates.estimate`.
    """
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def without_costs(target: Slice) -> list[str]:
    """The recipes that the table has of other chips only."""
    rows = read_costs()
    own = {row["recipe"] for row in rows if row["slice"].partition(":")[0] == target.chip}
    return [*dict.fromkeys(row["recipe"] for row in rows if row["recipe"] not in own)]


def stage_after(recipe: str) -> str | None:
    """The word of the stage that follows `recipe`, and that its costs leave out; None: none."""
    name, _, words = recipe.partition(":")
    second = _SECOND_STAGES.get(name)
    return None if second in words.split(",") else second


class Affordable(NamedTuple):
    """What a budget pays for.

    rows: the cheapest first, each {"recipe", "by", "time_by", "slice", "fits", "goodput", "hours",
      "chip_hours", "cost"}.
    shares: the least and the most time by the compiler's cycles or by kernels, as shares of the
      recipe's calculated time; None: there is none to compare, or no row is calculated.
    perhaps: recipes that cost more by calculation, but less with the least share of the time.
    too_large: recipes that fit the slice in no layout.
    """

    rows: list[dict[str, Any]]
    shares: tuple[float, float] | None
    perhaps: list[str]
    too_large: list[str]


def affordable(
    budget: float, target: Slice, price_per_chip_hour: float, goodput: float | None = None
) -> Affordable:
    """The recipes that cost at most `budget` on the chips of `target`.

    The slice is the one that the table has of these chips; the compiler's row counts before a
    calculated one. `goodput`: as in `estimate`.

    Raises: InputError: the table has no such chips.
    """
    table = read_costs()
    own = [row for row in table if row["slice"].partition(":")[0] == target.chip]
    if not own:
        known = ", ".join(dict.fromkeys(row["slice"] for row in table))
        raise InputError(
            f"--topology={target.name}: no costs are known for its chips; {known} "
            "are; plan one recipe with --config=RECIPE"
        )
    by: dict[str, dict[str, dict[str, str]]] = {"calculation": {}, "compiler": {}}
    for row in own:
        by[row["by"]][row["recipe"]] = row
    calculated, compiled = by.values()
    shares = [
        float(row["chip_hours"]) / float(calculated[recipe]["chip_hours"])
        for recipe, row in compiled.items()
        if recipe in calculated and row["time_by"] != "at_utilisation"
    ]  # fmt: skip
    least = min(shares, default=1.0)
    rows: list[dict[str, Any]] = []
    perhaps, too_large = [], []
    for recipe, row in (calculated | compiled).items():
        chip_hours = float(row["chip_hours"]) / (goodput or 1.0)
        cost = chip_hours * price_per_chip_hour
        if row["fits"] == "no":
            too_large.append(recipe)
        elif cost <= budget:
            figures = {key: row[key] for key in ("recipe", "by", "time_by", "slice", "fits")}
            hours = chip_hours / find_slice(row["slice"]).num_chips
            run = {"goodput": goodput, "hours": hours, "chip_hours": chip_hours, "cost": cost}
            rows.append(figures | run)
        elif recipe not in compiled and cost * least <= budget:
            perhaps.append(recipe)
    calculates = perhaps or any(row["by"] == "calculation" for row in rows)
    between = (least, max(shares)) if shares and calculates else None
    return Affordable(sorted(rows, key=lambda row: row["cost"]), between, perhaps, too_large)
