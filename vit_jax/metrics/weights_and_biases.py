"""Metrics in Weights & Biases, an optional dependency: `pip install -e '.[wandb]'`."""

import importlib.util
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.errors import Faults, InputError
from vit_jax.files import write_whole

logger = logging.getLogger("vit_jax")

_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0
_NOT_IN_NAMES = r"/\#?%:"  # refused by W&B
_MAX_NAME = 128


def check_installed(project: str) -> None:
    """Raises InputError if `log.wandb` asks for a package that is not there."""
    if importlib.util.find_spec("wandb") is None:
        raise InputError(
            f"log.wandb={project!r}: the package wandb is not installed; "
            "install it with pip install -e '.[wandb]', or leave log.wandb out"
        )


class WeightsAndBiases:
    """A run of a W&B project, its step being the training's.

    Its id is kept in WORKDIR/wandb_id, so a run that is resumed goes on in the same W&B run. W&B
    takes no step twice and none back: rows from the restored step on that a killed try had sent
    stay (a resumed run makes the same once more), and rows that were lost on the way, as W&B's
    client loses what it holds when it is killed, are sent again from metrics.jsonl. An evaluation
    that a killed try has missed, and that the resumed run makes, is not in W&B if W&B has another
    row of that step.

    W&B never ends a run. Where it cannot be reached at the start, or there is no login, the run
    is recorded offline in WORKDIR/wandb, for `wandb sync` to send; where that fails too, or W&B
    fails later, it is left out from there on. `WANDB_MODE=offline` records offline from the start.

    Args:
      workdir: of the run; its name is the W&B run's.
      project: of W&B.
      config: of the run, as nested dicts.
      rows: (step, scalars) of all steps so far, in their order.
    """

    def __init__(
        self,
        workdir: epath.Path,
        project: str,
        config: Mapping[str, Any],
        rows: Iterable[tuple[int, Mapping[str, float]]],
    ):
        import wandb  # it takes a second, and few ask for it

        id_file = workdir / "wandb_id"
        if not id_file.exists():
            write_whole(id_file, secrets.token_hex(4))

        def init(mode: str | None):
            return wandb.init(
                project=project,
                id=id_file.read_text(),
                name=workdir.name,
                resume="allow",
                config=dict(config),
                allow_val_change=True,
                dir=None if "://" in os.fspath(workdir) else os.fspath(workdir),
                mode=mode,
                settings=wandb.Settings(
                    console="off",  # our line, redrawn, is no log
                    quiet=True,
                    init_timeout=_INIT_TIMEOUT_S,
                    finish_timeout=_FINISH_TIMEOUT_S,
                ),
            )

        self._run = None
        for mode, instead in ((None, "recording offline"), ("offline", "it is left out")):
            try:
                self._run = init(mode)
                break
            except Exception as e:  # whatever it is, it shall not end the run
                what = "fails offline too" if mode else "cannot be reached"
                logger.warning("log.wandb: W&B %s (%s); %s", what, e, instead)
                wandb.teardown()  # its service still holds the run's id
        if self._run is None:
            return
        if self._run.offline:
            logger.info("W&B: offline; send it by: wandb sync %s", os.path.dirname(self._run.dir))
        elif self._run.url:  # there is none with WANDB_MODE=disabled
            logger.info("W&B: %s", self._run.url)
        self._next_step = self._run.step
        self._said = True  # of rows so far W&B has the earlier ones
        for step, scalars in rows:
            self.write(step, scalars)
        self._said = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._run is None:
            return
        if step < self._next_step:
            if not self._said:
                logger.info(
                    "W&B: keeps its own rows before step %d; rows made again from step %d on, and "
                    "evaluations missed there, are in metrics.jsonl only", self._next_step, step,
                )  # fmt: skip
                self._said = True
            return
        try:
            self._run.log(dict(scalars), step=step)
        except Exception as e:  # see above
            logger.warning("log.wandb: W&B failed at step %d (%s); it is left out now", step, e)
            self._run = None

    def flush(self) -> None:
        """Nothing: W&B has no way to be asked for it, hence the rows that are sent again."""

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as e:  # see above
            logger.warning("log.wandb: W&B failed at the end (%s)", e)


def check_project(config: ConfigDict, faults: Faults) -> None:
    """Checks `log.wandb`, also where the package is not installed."""
    project = config.log.wandb
    if project is not None:
        named = project.strip() and len(project) <= _MAX_NAME
        faults.need(
            named and not set(project) & set(_NOT_IN_NAMES),
            f"log.wandb={project!r}: needs the name of a project, at most {_MAX_NAME} characters, "
            f"none of them in {_NOT_IN_NAMES}",
        )
