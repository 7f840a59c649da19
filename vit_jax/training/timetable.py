"""When a run logs, evaluates and saves."""

from ml_collections import ConfigDict

from vit_jax.experiment.experiment import num_steps


class Timetable:
    """The steps at which a run logs, evaluates and saves; at the last step it does all three.

    Args:
      config: with `data.num_examples` set, by which epochs are steps.
      total_steps: the last step.
    """

    def __init__(self, config: ConfigDict, total_steps: int):
        self._total_steps, self._evals = total_steps, [*config.evals]
        keys = ["log.every", "checkpoint.every", *(f"evals.{name}.every" for name in config.evals)]
        self._every = {key: num_steps(config, key) for key in keys}
        self.keep_every = num_steps(config, "checkpoint.keep_every")

    def _is_due(self, key: str, step: int) -> bool:
        return step == self._total_steps or step % self._every[key] == 0

    def logs(self, step: int) -> bool:
        """Whether the run logs the metrics of training at `step`."""
        return self._is_due("log.every", step)

    def evaluators(self, step: int) -> list[str]:
        """The names of the evaluators that run at `step`, in the order of the config."""
        return [name for name in self._evals if self._is_due(f"evals.{name}.every", step)]

    def saves(self, step: int) -> bool:
        """Whether the run saves at `step`: what is kept for ever must be saved to begin with."""
        kept = self.keep_every is not None and step % self.keep_every == 0
        return kept or self._is_due("checkpoint.every", step)
