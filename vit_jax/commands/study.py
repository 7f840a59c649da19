"""Runs a study: training runs that depend on each other's results, and a report of them all.

  python -m vit_jax.main study --config=finetune_study:ViT-B/16,cifar10 \\
    --workdir=runs/cifar10 --config.init_from=ViT-B/16@imagenet21k

Members run one after another, each as the command that is printed, in WORKDIR/MEMBER. The same
command goes on where a study was: what is finished is not run again. A member whose loss is not
finite has diverged, and is a choice that is lost; other failures do not keep the rest from running,
and are tried again by the same command. The report is WORKDIR/study.md and study.json.

With --launcher="python launch/slurm.py --nodes=1" each member is handed to that command, behind
`--`. Where the launcher returns before the run is finished, as slurm.py does, all that can run now
are handed over and the study ends; once they are finished, the same command goes on.

Exit codes: 0 complete, or handed over; 1 a member failed, or so many diverged that there is no
result; 2 the first member was refused; 3 it does not fit by the launcher's plan; 75 and 143 a
member was told to stop, 130 by Ctrl-C: no other is run then.
"""

import argparse
import shlex

from rich.console import Console

from vit_jax import files
from vit_jax.commands.flags import (
    define_config_flags,
    load_valid_config,
    print_config,
    require_flags,
)
from vit_jax.errors import InputError, collect_faults, nearest


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="of the study; members are below it")
    parser.add_argument("--launcher", metavar="COMMAND", help="that each member is handed to")
    parser.add_argument(
        "--again", action="store_true", help="hand over once more what has not finished"
    )


def main(flags: argparse.Namespace) -> int:
    if flags.print_config:
        return print_config(load_valid_config(flags))
    example = (
        "python -m vit_jax.main study --config=finetune_study:ViT-B/16,cifar10 "
        "--workdir=runs/cifar10"
    )
    require_flags(flags, ("config", "workdir"), example)
    if flags.again and flags.launcher is None:
        raise InputError("--again: is for --launcher=COMMAND; leave it out")
    launcher = None if flags.launcher is None else shlex.split(flags.launcher)
    if launcher == []:
        raise InputError("--launcher: is empty; e.g. --launcher='python launch/slurm.py'")
    config = load_valid_config(flags)

    from vit_jax import metrics
    from vit_jax.studies import STUDIES, running
    from vit_jax.training.workdir import check_writable

    metrics.log_to_console(Console(stderr=True))
    name = config.study.name
    if name is None:
        raise InputError(
            f"study.name: not set by {flags.config}, which is one run; take a config of a study, "
            "such as finetune_study"
        )
    if name not in STUDIES:
        raise InputError(f"study.name={name!r}: {nearest(name, list(STUDIES))}")
    study = STUDIES[name]
    study.check(config)
    sets = study.sets(config)
    collect_faults([f"--config.{key}: the study {name} sets it for each member; leave it out"
                    for key, _ in flags.overrides if key in sets])  # fmt: skip
    workdir = files.absolute(flags.workdir)
    check_writable(workdir)
    call = running.Call(
        flags.config, flags.overrides, workdir, launcher, flags.again, flags.trust_plugins
    )
    for member in study.members(config, {}):
        running.check_member(config, call, member)
    workdir.mkdir(parents=True, exist_ok=True)
    return running.conduct_study(study, config, call)
