"""The steps at which a run logs, evaluates and saves."""

from collections.abc import Mapping


class Timetable:
    """The steps at which a run logs, evaluates and saves; the last step does all three.

    Args:
      durations: {key: steps} for every duration of the config, from `parse_durations`.
    """

    def __init__(self, durations: Mapping[str, int]):
        self._durations, self._total_steps = durations, durations["duration"]
        self._evals = [key.split(".")[1] for key in durations if key.startswith("evals.")]

    @property
    def keep_every(self) -> int | None:
        """Interval, in steps, of the checkpoints that are kept for ever; None: none are."""
        return self._durations.get("checkpoint.keep_every")

    def _is_due(self, key: str, step: int) -> bool:
        return step == self._total_steps or step % self._durations[key] == 0

    def logs(self, step: int) -> bool:
        """Whether the run logs training metrics at `step`."""
        return self._is_due("log.every", step)

    def evaluators(self, step: int) -> list[str]:
        """Names of the evaluators that run at `step`, in the order of the config."""
        return [name for name in self._evals if self._is_due(f"evals.{name}.every", step)]

    def saves(self, step: int) -> bool:
        """Whether the run saves at `step`; multiples of `keep_every` are always saved."""
        kept = self.keep_every is not None and step % self.keep_every == 0
        return kept or self._is_due("checkpoint.every", step)
