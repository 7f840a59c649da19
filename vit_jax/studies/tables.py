"""The table of a study: cells over seeds, rows, and their order."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# What has become of a member.
FINISHED, DIVERGED, FAILED, HANDED_OVER = "finished", "diverged", "failed", "handed over"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A cell of a table: a metric of the members at one place, which differ in their seeds.

    values: None for a member without the metric.
    states: of the members that have ended, for those without a value.
    note: shown behind the number.
    """

    values: Sequence[float | None] = ()
    states: Sequence[str] = ()
    note: str = ""

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def is_whole(self) -> bool:
        return bool(self.values) and None not in self.values

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts the best first: any that diverged behind, those without a value last."""
        mean = statistics.fmean(self.known) if self.known else 0.0
        return not self.known, DIVERGED in self.states, -mean

    def is_near(self, best: "Measured") -> bool:
        """Whether the means differ by at most one standard deviation of either, over seeds."""
        both = self.known, best.known
        deviations = [statistics.stdev(values) for values in both if len(values) > 1]
        if not (all(both) and deviations) or DIVERGED in self.states:
            return False
        return statistics.fmean(best.known) - statistics.fmean(self.known) <= max(deviations)

    def __str__(self) -> str:
        """Mean and deviation in percent, or the states of the members."""
        known = self.known
        if known:
            text = f"{100 * statistics.fmean(known):.2f}"
            text += f" ± {100 * statistics.stdev(known):.2f}" if len(known) > 1 else ""
            text += f" ({len(known)} of {len(self.values)})" * (len(known) < len(self.values))
        else:
            text = ", ".join(dict.fromkeys(self.states)) or "waits"
        return text + f" [{self.note}]" * bool(self.note)

    def numbers(self) -> dict[str, Any]:
        """Mean, sample deviation and values as fractions, for study.json."""
        known = self.known
        mean = statistics.fmean(known) if known else None
        std = statistics.stdev(known) if len(known) > 1 else None
        return {"mean": mean, "std": std, "values": known, "note": self.note}


class Best(NamedTuple):
    """The best place of a study.

    names: the members there that have finished, by seeds; (): no places are compared.
    near: the places that are within one standard deviation of it.
    """

    names: Sequence[str] = ()
    near: Sequence[Mapping[str, Any]] = ()


def say_deviations(cells: Iterable[Any]) -> str:
    """The meaning of ± in the texts of `cells`; "" if none has it."""
    counts = {len(cell.known) for cell in cells if isinstance(cell, Measured)} - {0, 1}
    if not counts:
        return ""
    return f"± is the sample standard deviation over n={', '.join(map(str, sorted(counts)))} seeds"


class Report(NamedTuple):
    """Results of a study so far.

    rows: the table, {column: `Measured` or a text}; "-" where a row lacks a column of others.
    values: further content of study.json.
    complete: whether all planned results are there; None: if no `Measured` lacks one.
    files: {name: content} of additional files.
    best: the best members, from `Found.best_of`.
    """

    rows: Sequence[Mapping[str, Any]]
    values: Mapping[str, Any] = {}
    complete: bool | None = None
    files: Mapping[str, bytes] = {}
    best: Best = Best()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    @property
    def texts(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [[str(row.get(column, "-")) for column in self.columns] for row in self.rows]

    @property
    def note(self) -> str:
        """A sentence about the deviations; "" if there are none."""
        return say_deviations(cell for row in self.rows for cell in row.values())

    @property
    def is_complete(self) -> bool:
        cells = [cell for row in self.rows for cell in row.values() if isinstance(cell, Measured)]
        return all(cell.is_whole for cell in cells) if self.complete is None else self.complete


def best_first(rows: Iterable[Mapping[str, Any]], *columns: str) -> list[Mapping[str, Any]]:
    """Rows of a table by their best cell among `columns`, or all; see `Measured.rank`."""

    def place(row: Mapping[str, Measured]) -> tuple:
        cells = [cell for column, cell in row.items() if not columns or column in columns]
        return min((cell.rank for cell in cells if isinstance(cell, Measured)), default=(True,))

    return sorted(rows, key=place)
