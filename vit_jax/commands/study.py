"""Run a study: training runs that depend on each other's results, and a report on all of them.

  python -m vit_jax.main study --config=finetune_study:ViT-B/16,cifar10 \\
    --workdir=runs/cifar10 --config.init_from=ViT-B/16@imagenet21k

  python -m vit_jax.main study --config=quickstart --workdir=runs/sweep \\
    --sweep=optimizer.peak_lr=1e-3,3e-3 --sweep=seed=0,1

--sweep=KEY=VALUE,VALUE makes a study of any config: one run for each combination of values. Mean
and deviation are over `seed`, if it is swept.

The runs of a study are its members. They run one after another in WORKDIR/MEMBER, each by a
command that is printed. Run the same command again to continue a study; finished members are kept.
A member whose loss becomes non-finite has diverged: it is recorded and not chosen. After any other
failure the remaining members still run, and the same command retries the failed one. It ends with a
table, the best first, and the winner: its metrics, its workdir and the commands that evaluate it
and train it longer. They are also in WORKDIR/study.md and study.json; study.csv has a row for each
run.

--launcher="python launch/slurm.py --nodes=1" passes each member's command to that launcher, after
`--`. If the launcher returns before the run has finished, as slurm.py does, the study hands over
every member that can run now and exits; once they have finished, the same command continues.
--plan=v5e:4x4 runs nothing: it calculates the cost of the members on these chips. Members that
depend on results are planned as if all before them had finished. --price_per_chip_hour=NUMBER adds
the price.

As one Slurm array: python launch/slurm.py --nodes=1 -- study ..., then this command again.

Exit codes: 0 complete, or handed over; 1 a member failed, or too many diverged for a result; 2 the
first member was rejected; 3 it does not fit, by the launcher's plan; 75 or 143 a member was
stopped by SIGTERM; 130 Ctrl-C. After 75, 143 and 130 no other member is started.
"""

import argparse
import shlex
from typing import TYPE_CHECKING

from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    amount,
    define_config_flags,
    load_valid_config,
    require_flags,
)
from vit_jax.devices.chips import find_slice
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.studies.engine import Study
    from vit_jax.studies.running import Call


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder of the study and its members")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE",
        help="one run for each value; repeat the flag for all combinations",
    )  # fmt: skip
    parser.add_argument("--launcher", metavar="COMMAND", help="command that starts each member")
    parser.add_argument(
        "--plan", metavar="SLICE", help="run nothing; plan the cost on these chips, e.g. v5e:4x4"
    )
    parser.add_argument("--price_per_chip_hour", type=amount, help="with --plan: adds the price")
    parser.add_argument(
        "--again", action="store_true", help="hand over unfinished members once more"
    )


def main(flags: argparse.Namespace) -> int:
    if flags.again and flags.launcher is None:
        raise InputError("--again: only works with --launcher=COMMAND; leave it out")

    if flags.plan is not None:
        return plan_study(flags)
    if flags.price_per_chip_hour is not None:
        raise InputError("--price_per_chip_hour: only works with --plan=SLICE; leave it out")

    from vit_jax.run import terminal
    from vit_jax.studies.running import conduct_study

    study, call = read_study(flags)
    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    return conduct_study(study, call)


def plan_study(flags: argparse.Namespace) -> int:
    """Print what the members of a study cost on the chips of --plan; nothing is written."""
    target_slice = find_slice(flags.plan, "--plan")
    flags.workdir = flags.workdir or "WORKDIR"  # stands in commands only

    from vit_jax.planning.estimates import USUAL_SHARE
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.studies.planned import Planner, plan_members
    from vit_jax.studies.running import print_table

    study, _ = read_study(flags, writes=False)
    target = Target(target_slice)
    start_planning(target)
    title = f"{flags.config}: {study.config.study.name} on {target_slice.name}"
    print_table(plan_members(study, Planner(target, flags.price_per_chip_hour)), title)
    Console().print(
        f"By calculation: steps at {USUAL_SHARE:.0%} of the peak, or less where memory or the "
        "network bind; no start-up, input, evaluation or saving.", soft_wrap=True,
    )  # fmt: skip
    return exit_codes.DONE


def read_study(flags: argparse.Namespace, *, writes: bool = True) -> "tuple[Study, Call]":
    """The study that the flags ask for, and how it was called; writes nothing.

    `writes`: whether its workdir will be written to, and must be writable.

    Raises:
      InputError: it is none, or naming what is wrong with it.
    """
    example = "vit_jax study --config=finetune_study:ViT-B/16,cifar10 --workdir=runs/cifar10"
    require_flags(flags, ("config", "workdir"), example)
    launcher = None if flags.launcher is None else shlex.split(flags.launcher)
    if launcher == []:
        raise InputError("--launcher: is empty; e.g. --launcher='python launch/slurm.py'")
    config = load_valid_config(flags)

    from vit_jax.studies.preparation import prepare_study
    from vit_jax.studies.running import Call

    call = Call(
        flags.config, flags.overrides, files.absolute(flags.workdir), launcher, flags.again,
        flags.trust_plugins, flags.quiet,
    )  # fmt: skip
    return prepare_study(config, call, flags.sweep, writes=writes), call
