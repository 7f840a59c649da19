"""Train a model as its config describes, and evaluate it during training.

  python -m vit_jax.main --config=quickstart --workdir=runs/quickstart

The same command continues an earlier run in the workdir; so does --workdir=DIR alone.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath
from ml_collections import ConfigDict
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    is_run,
    load_valid_config,
    require_flags,
    start_job,
)
from vit_jax.config.stored import read_asked
from vit_jax.job import exit_codes
from vit_jax.job.age import process_age
from vit_jax.job.allocator import limit_arenas

if TYPE_CHECKING:
    from vit_jax.run.build import Callback


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder for everything the run writes")
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    goes_on = flags.config is None and is_run(flags.workdir)
    example = "python -m vit_jax.main --config=quickstart --workdir=runs/quickstart"
    if flags.config is None and flags.workdir and not goes_on:
        raise InputError(f"--workdir={flags.workdir}: holds no run; give --config to begin one")
    require_flags(flags, ("workdir",) if goes_on else ("config", "workdir"), example)
    config = load_valid_config(flags, of_run=goes_on)

    from vit_jax.checkpoints import restore
    from vit_jax.checkpoints.replicas import DivergedError
    from vit_jax.planning.search import choose_layout
    from vit_jax.run import loop, terminal, train
    from vit_jax.run.watch import guards

    console = Console(stderr=True) if flags.quiet else terminal.CONSOLE
    terminal.log_to_console(console, quiet=flags.quiet)
    start_job(flags, config)
    console.quiet = jax.process_index() > 0
    terminal.CONSOLE.quiet = flags.quiet or console.quiet
    command = {"config": flags.config, "overrides": dict(flags.overrides)}
    try:
        train.train_and_evaluate(
            config, flags.workdir, command, choose_layout, began=time.perf_counter() - process_age()
        )
    except KeyboardInterrupt:  # outside of the loop, which saves
        steps = restore.saved_steps(files.absolute(flags.workdir) / "checkpoints")
        saved, what = guards.say_saved(max(steps, default=None)), "continue" if steps else "begin"
        raise KeyboardInterrupt(f"Interrupted; {saved}. Run the same command to {what}") from None
    except loop.Preempted as e:
        print(e, file=sys.stderr)
        return exit_codes.INTERRUPTED if isinstance(e, loop.Interrupted) else exit_codes.PREEMPTED
    except (guards.NonFiniteError, guards.CorruptDataError, DivergedError) as e:
        print(f"error: {e}", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE


def train(
    config: ConfigDict | str | os.PathLike | None,
    workdir: epath.PathLike,
    overrides: Mapping[str, Any] | None = None,
    callbacks: "Sequence[Callback]" = (),
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as `config` describes, continuing the run in `workdir` if there is one.

        summary = vit_jax.train("quickstart", "runs/quickstart", {"duration": "200 steps"})
        summary["test/top1"]

    Runs the same loop as the command: it prints progress and logs to the logger "vit_jax".

    Args:
      config, overrides: as in `load_config`; None: what was asked for at the last start of the run
        in `workdir`.
      workdir: folder for everything that the run writes.
      callbacks: functions f(step, state, metrics), called where the run has logged or evaluated:
        after `step` updates, with the `TrainState` that evaluators see (the running averages, if
        the run keeps them) and the values of that step, {"train/loss": 0.3, "test/top1": 0.9}. The
        state's arrays are gone after the next step: copy what you keep. What `f` returns is
        ignored. An error in it ends the run, and the same call resumes from the last save. In a
        job of several processes each calls it, with its shards of the state.
      data: images that you have in Python, by split; sets `data.name` to "arrays". A split is a
        pair (images, labels): uint8 (N, H, W, C) or (N, H, W), or a sequence of images, and N
        numbers from 0, N lists of them, or an array (N, classes) of 0 and 1. Or it is a sequence
        of pairs (image, label), or of dicts of both, as data sets of torch and of Hugging Face
        are. "class_names" names the classes. To go on with the run, give the same again.

            vit_jax.train("cifar10:small", "runs/mine", data={"train": (x, y), "test": (a, b)})

    Returns:
      The summary, as in `workdir/summary.json`.

    Raises:
      InputError: a ValueError that lists all faults; nothing has been written.
      NonFiniteError, CorruptDataError: see `run.train.train_and_evaluate`.
    """
    from vit_jax.data.sources.arrays import give
    from vit_jax.devices.mesh import start_backend
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.setup.validation import load_config, validate
    from vit_jax.run.train import train_and_evaluate

    limit_arenas()
    if config is None:
        config = read_asked(files.absolute(workdir))
    faults = [f"callbacks={callbacks!r}: needs a list of functions"]
    with give(data) as chosen:
        config = load_config(load_config(config, chosen), overrides)
        validate(config, faults * (not isinstance(callbacks, list | tuple)), "config")
        start_backend(config.mesh.platform)
        return train_and_evaluate(config, workdir, choose_layout=choose_layout, callbacks=callbacks)
