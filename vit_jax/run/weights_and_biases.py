"""Metrics in Weights & Biases; needs an optional package: `pip install -e '.[wandb]'`."""

import functools
import importlib.util
import logging
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import write_whole

logger = logging.getLogger("vit_jax")

_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0


def check_installed(project: str | None) -> None:
    """Raise InputError if `log.wandb` is set but the package is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise InputError(
            f"log.wandb={project!r}: the package wandb is not installed; "
            "run pip install -e '.[wandb]', or leave out log.wandb"
        )


class WeightsAndBiases:
    """A W&B run that records the metrics by training step.

    Its id is kept in WORKDIR/wandb_id, so a resumed run continues the same W&B run. W&B accepts
    steps in increasing order only. If an earlier try was killed after the restored step, the rows
    that it sent stay (the resumed run computes the same values). Rows that were lost on the way,
    because the killed client still held them, are sent again from metrics.jsonl. A missed
    evaluation is absent from W&B if W&B already has a later row.

    W&B never ends a run. If it cannot be reached at the start, or there is no login, the run is
    recorded offline in WORKDIR/wandb, for `wandb sync`. If that fails too, or W&B fails later, the
    run continues without W&B. `WANDB_MODE=offline` records offline from the start.

    Args:
      workdir: directory of the run; its name becomes the name of the W&B run.
      project: W&B project.
      config: the run's config as nested dicts.
      rows: of all steps so far, in order, each with its `step`; None: not finite.
    """

    def __init__(
        self,
        workdir: epath.Path,
        project: str,
        config: Mapping[str, Any],
        rows: Iterable[Mapping[str, float | None]],
    ):
        import wandb  # takes a second, and is rarely needed

        id_file = workdir / "wandb_id"
        if not id_file.exists():
            write_whole(id_file, secrets.token_hex(4))
        init = functools.partial(
            wandb.init,
            project=project,
            id=id_file.read_text(),
            name=workdir.name,
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            dir=None if "://" in os.fspath(workdir) else os.fspath(workdir),
            settings=wandb.Settings(
                console="off",  # the progress line is redrawn, so capturing it is useless
                quiet=True,
                init_timeout=_INIT_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
            ),
        )
        self._run = None
        modes: Any = ((None, "recording offline"), ("offline", "continuing without W&B"))
        for mode, instead in modes:
            try:
                self._run = init(mode=mode)
                break
            except Exception as e:  # no failure of W&B may end the run
                what = "fails offline too" if mode else "cannot be reached"
                logger.warning("log.wandb: W&B %s (%s); %s", what, e, instead)
                wandb.teardown()  # its service still holds the run's id
        if self._run is None:
            return
        if self._run.offline:
            logger.info("W&B: offline; to upload: wandb sync %s", os.path.dirname(self._run.dir))
        elif self._run.url:  # None with WANDB_MODE=disabled
            logger.info("W&B: %s", self._run.url)
        self._next_step = self._run.step
        for row in rows:
            values = {name: math.nan if v is None else v for name, v in row.items()}
            self.write(int(values.pop("step")), values)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._run is None or step < self._next_step:
            return
        try:
            self._run.log(dict(scalars), step=step)
        except Exception as e:  # no failure of W&B may end the run
            logger.warning("log.wandb: W&B failed at step %d (%s); continuing without W&B", step, e)
            self._run = None

    def flush(self) -> None:
        """Do nothing: W&B cannot be flushed, so lost rows are sent again on resume."""

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as e:  # no failure of W&B may end the run
            logger.warning("log.wandb: W&B failed at the end (%s)", e)
