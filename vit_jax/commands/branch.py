"""Train a run longer, or to another end: a new workdir that goes on from one of its saved steps.

  python -m vit_jax.main branch --init_from=runs/a --workdir=runs/b \\
      --rule=constant --config.duration='20 epochs'
  python -m vit_jax.main branch --init_from=runs/a/checkpoints/3000 --workdir=runs/c \\
      --rule=cooldown --config.duration='4000 steps'
  python -m vit_jax.main --workdir=runs/b

The first two commands make a workdir, with all state of that step: weights, optimizer, averages,
the place in the data. The last one trains it. --rule says how the learning rate goes on from its
last value: constant; cosine, to 0; rsqrt; cooldown, linear to 0. duration counts from the start
of the run that the branch came from; without it the run's own end stays. You may also set
optimizer.peak_lr, schedule.warmup, schedule.cooldown and schedule.timescale.
"""

import argparse

from vit_jax.commands.flags import require_flags
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--init_from", metavar="RUN", help="workdir of a run, or one of its RUN/checkpoints/STEP"
    )
    parser.add_argument("--workdir", metavar="DIR", help="new folder, for the branch")
    parser.add_argument("--rule", help="constant, cosine, rsqrt or cooldown")
    parser.add_argument("--config.KEY", metavar="VALUE", help="set a key of the new end")


def main(flags: argparse.Namespace) -> int:
    example = "vit_jax branch --init_from=runs/a --workdir=runs/b --rule=constant"
    require_flags(flags, ("init_from", "workdir", "rule"), example)
    from vit_jax.devices.mesh import start_backend
    from vit_jax.run import terminal
    from vit_jax.run.setup.branch import branch

    terminal.log_to_console(quiet=flags.quiet)
    start_backend("cpu")
    overrides = {key: text for key, text in flags.overrides if key != "plugins"}
    branch(flags.init_from, flags.workdir, flags.rule, overrides)
    return exit_codes.DONE
