"""Warnings of a collapse: a self-supervised run whose loss falls while its features say less."""

from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.objectives.contract import Collapse

_LEAST_SHARE = 0.05  # of the width that the effective rank of healthy features fills
_NEAR = 0.01  # of the greatest entropy: as near to 0 or to it counts as there
_ROWS = 5  # one after another, so that a single row warns of nothing
_MORE = "docs/explanation/does_it_learn.md shows healthy and sick runs"


class Health:
    """Watches the rows of a run's metrics; each finding is said once, and again after a recovery.

    Args:
      collapse: from the objective; None: nothing is watched.
      ranks: names of the evaluators of type `rank`.
      meta: saved with the state that the run continues from; {} from scratch.
    """

    def __init__(self, collapse: Collapse | None, ranks: Collection[str], meta: Mapping[str, Any]):
        self._collapse, self._ranks = collapse, ranks
        known = meta.get("health", {})
        self._rows: dict[str, int] = {"low": 0, "high": 0} | known.get("rows", {})
        self._said: set[str] = {*known.get("said", ())}

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add a row, {"train/loss": 2.3, ...} or {"rank/share": 0.4, ...}; return new warnings."""
        if self._collapse is None:
            return []
        return self._judge_entropy(row) + self._judge_ranks(row)

    def _judge_entropy(self, row: Mapping[str, float]) -> list[str]:
        assert self._collapse is not None
        entropy, limit = row.get("train/teacher_entropy"), self._collapse.entropy_limit
        if entropy is None or not limit:
            return []
        found = []
        for kind, near, what, remedy in (
            ("low", entropy <= _NEAR * limit, "0: the teacher is sure of every image, as it is "
             "where all images get one prototype", self._collapse.low_entropy),
            ("high", entropy >= (1 - _NEAR) * limit, f"{limit:.4g}, its greatest value: the "
             "teacher prefers no prototype for any image", self._collapse.high_entropy),
        ):  # fmt: skip
            self._rows[kind] = self._rows[kind] + 1 if near else 0
            found += self._say(
                f"entropy_{kind}",
                self._rows[kind] >= _ROWS,
                f"train/teacher_entropy={entropy:.4g}: for {_ROWS} rows within 1 % of {what}. "
                f"{remedy}; {_MORE}",
            )
        return found

    def _judge_ranks(self, row: Mapping[str, float]) -> list[str]:
        assert self._collapse is not None
        found = []
        for name in self._ranks:
            share = row.get(f"{name}/share")
            if share is not None:
                found += self._say(
                    name,
                    share < _LEAST_SHARE,
                    f"{name}/rank={row[f'{name}/rank']:.3g}: the features fill {100 * share:.2g} % "
                    f"of the model's width, less than {100 * _LEAST_SHARE:.0f} %, so they hardly "
                    f"tell images apart. {self._collapse.low_rank}; {_MORE}",
                )
        return found

    def _say(self, finding: str, is_there: bool, text: str) -> list[str]:
        """[text] if the finding has come up with this row."""
        is_new = is_there and finding not in self._said
        (self._said.add if is_there else self._said.discard)(finding)
        return [text] if is_new else []

    def read(self) -> dict[str, Any]:
        """What a resumed run must know, to be saved with the state; {} if nothing was found."""
        if not any(self._rows.values()) and not self._said:
            return {}
        return {"health": {"rows": self._rows.copy(), "said": sorted(self._said)}}
