"""Every combination of values of some keys, each a run: --sweep=KEY=VALUE,VALUE, given again.

`study.sweep` has a text for each key, as `--sweep` takes it: "optimizer.peak_lr=1e-3,3e-3". Commas
within brackets or quotes belong to a value: "data.mean=[0.5,0.5,0.5],[0,0,0]". `seed` is a key like
others, but that the report gives mean and deviation over its values.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.config import key
from vit_jax.studies.engine import Found, Member, Results, Study, join_name
from vit_jax.studies.figures import draw_table
from vit_jax.studies.tables import DIVERGED, FINISHED, Report, best_first

_FORM = "needs KEY=VALUE,VALUE, e.g. optimizer.peak_lr=1e-3,3e-3"
_VALUE = r"""(?:[^,()\[\]{}"']|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|"[^"]*"|'[^']*')+"""


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """{key: its values} of `study.sweep`.

    Raises:
      InputError: naming all that are not of the form, or give a key twice.
    """
    sweep: dict[str, list[str]] = {}
    faults = Faults()
    for text in texts:
        key, _, rest = (part.strip() for part in text.partition("="))
        values = [value.strip() for value in re.findall(_VALUE, rest)]
        is_whole = re.fullmatch(rf"{_VALUE}(,{_VALUE})*", rest) is not None
        faults.need(key and is_whole and all(values), f"--sweep={text}: {_FORM}")
        faults.need(key not in sweep, f"--sweep={text}: {key} is given twice; give all its values "
                    "at once")  # fmt: skip
        sweep[key] = values
    collect_faults(faults)
    return sweep


class Sweep(Study):
    """See the module."""

    sweep: tuple[str, ...] = key((), 'values, as in --sweep: "optimizer.peak_lr=1e-3,3e-3"')

    flag = "--sweep="

    @functools.cached_property
    def axes(self) -> dict[str, list[str]]:
        """{key: its values}; raises InputError as `parse_sweep`."""
        return parse_sweep(self.sweep)

    @property
    def own_keys(self) -> Sequence[str]:
        return list(self.axes)

    def check_own(self, faults: Faults) -> None:
        faults.need(self.sweep, f"study.sweep: has nothing; {_FORM}")

    @property
    def _rows(self) -> list[dict[str, str]]:
        """{key: value} of each combination but for the seed."""
        axes = {key: values for key, values in self.axes.items() if key != "seed"}
        return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]

    def members(self, results: Results) -> list[Member]:
        """Every combination with the first seed, then every one with the second, and so on."""
        seeds = [{"seed": value} for value in self.axes.get("seed", ())] or [{}]
        return [self._member({**row, **seed}) for seed in seeds for row in self._rows]

    def _member(self, overrides: dict[str, str]) -> Member:
        leaves = [key.rpartition(".")[2] for key in self.axes]
        shown = {key: leaf if leaves.count(leaf) == 1 else key
                 for key, leaf in zip(self.axes, leaves, strict=True)}  # fmt: skip
        name = join_name(*(f"{shown[key]}_{value}" for key, value in overrides.items()))
        return Member(name, overrides, {key: overrides[key] for key in self.axes})

    def report(self, found: Found) -> Report:
        """A row for each combination, over its seeds: the best first, any that diverged behind."""
        rows: list[dict[str, Any]] = [
            {**row, self.label: found.measure(**row)} for row in self._rows
        ]
        names = (", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.items())
                 for row in self._rows)  # fmt: skip
        cells = [row[self.label] for row in rows]
        files = draw_table({self.label: {"": dict(zip(names, cells, strict=True))}})
        states = [result.state for result in found.results.values()]
        is_over = len(states) == len(found.members) and {*states} <= {FINISHED, DIVERGED}
        return Report(
            rows=best_first(rows, self.label),
            complete=is_over and any(row[self.label].known for row in rows),
            files=files,
            best=found.best_of(found.members),
        )
