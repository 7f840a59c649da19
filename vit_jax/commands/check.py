"""Rerun the twins of the recipes and compare their numbers with the stored ones.

  python -m vit_jax.main check --list
  python -m vit_jax.main check quickstart augreg
  python -m vit_jax.main check --all --data_dir=DIR
  python -m vit_jax.main check quickstart --first_steps --config.model.remat=full

A twin is a short run with the settings of a recipe, small enough for a CPU. Its loss, gradient and
parameter norms at the first 20 steps must agree with stored ones to 0.1 %, and its curve must stay
inside a band over five seeds. --config.KEY=VALUE runs the twin with another setting, to see whether
the setting changes the numbers. DIR holds cifar10/VERSION as TFDS prepares it.

Exit codes: 0 every number is inside its limits; 1 a number is outside, or there was another
failure; 2 wrong input, such as missing data. The other twins still run.
"""

import argparse
import sys
import time

from vit_jax.errors import InputError
from vit_jax.job import exit_codes

_SHOWN = 5  # numbers that left at the same step


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="twins to run")
    parser.add_argument("--all", action="store_true", help="run every recorded twin")
    parser.add_argument("--list", action="store_true", help="list the twins")
    parser.add_argument(
        "--first_steps", action="store_true", help="only run and compare the first 20 steps"
    )
    parser.add_argument(
        "--record", action="store_true",
        help="run NAME with five seeds and store its numbers in place of the old ones",
    )  # fmt: skip
    parser.add_argument("--data_dir", metavar="DIR", help="folder of prepared TFDS data sets")
    parser.add_argument("--config.KEY", metavar="VALUE", help="run with another setting")


def main(flags: argparse.Namespace) -> int:
    if flags.list:
        return list_twins()
    if bool(flags.names) == flags.all:
        raise InputError("give NAMEs or --all, e.g. check quickstart; --list lists the twins")
    if flags.record and (flags.first_steps or flags.overrides):
        raise InputError("--record: stores all numbers of the twin itself; give only NAMEs, --all "
                         "and --data_dir with it")  # fmt: skip

    from rich.console import Console

    from vit_jax.devices.mesh import start_backend
    from vit_jax.insight.reference import is_recorded
    from vit_jax.insight.twins import TWINS, find_twin
    from vit_jax.run import terminal

    terminal.log_to_console(Console(stderr=True), quiet=True)  # of the runs only warnings
    twins = {name: find_twin(name) for name in flags.names or TWINS}
    if flags.all and not flags.record:
        left_out = [name for name in twins if not is_recorded(name)]
        twins = {name: twin for name, twin in twins.items() if name not in left_out}
        if left_out:
            print(f"left out, since not recorded: {', '.join(left_out)}", file=sys.stderr)
    platforms = [value for key, value in flags.overrides if key == "mesh.platform"]
    start_backend(platforms[-1] if platforms else "cpu")
    run = record_twin if flags.record else check_twin
    codes = []
    for name, twin in twins.items():
        try:
            codes.append(exit_codes.DONE if run(name, twin, flags) else exit_codes.FAILED)
        except InputError as e:  # such as missing data; the other twins still run
            print(f"error: {name}: {e}", file=sys.stderr, flush=True)
            codes.append(exit_codes.INPUT_WRONG)
    return exit_codes.FAILED if exit_codes.FAILED in codes else max(codes, default=exit_codes.DONE)


def list_twins() -> int:
    """Print every twin with its recipe, its config, and the data that it needs."""
    from vit_jax.insight.reference import is_recorded
    from vit_jax.insight.twins import TWINS

    width = max(map(len, TWINS)) + 2
    for name, twin in TWINS.items():
        data = "" if twin.data == "digits" else f"; needs {twin.data}"
        recorded = "" if is_recorded(name) else "; not recorded"
        print(f"{name:<{width}}{twin.recipe} ({twin.config}){data}{recorded}")
    return exit_codes.DONE


def record_twin(name, twin, flags: argparse.Namespace) -> bool:
    """Store the numbers of a twin; returns True."""
    from vit_jax.insight import reference

    since = time.perf_counter()
    path = reference.write(reference.record(twin, flags.data_dir), name)
    print(f"{name}: recorded in {time.perf_counter() - since:.0f} s, in {path}", flush=True)
    return True


def check_twin(name, twin, flags: argparse.Namespace) -> bool:
    """Run a twin and print the comparison; returns whether every number is inside."""
    from vit_jax.insight import reference
    from vit_jax.insight.trace import trace_run
    from vit_jax.insight.twins import twin_config

    stored, since = reference.read(name, twin), time.perf_counter()
    config = twin_config(twin, reference.SEEDS[0], flags.overrides, flags.data_dir)
    trace = trace_run(config, curve=not flags.first_steps)
    departures = reference.compare_first_steps(stored, trace)
    largest, where, step = reference.largest_difference(stored, trace)
    fine = (
        f"inside {reference.TOLERANCE:.1%}; the largest difference is {largest:.4%}, "
        f"of {where} at step {step}"
    )
    report(name, "first steps", departures, fine)
    if not flags.first_steps:
        left = reference.compare_curve(stored, trace)
        report(name, "curve", left, f"inside the band over {len(reference.SEEDS)} seeds")
        departures += left
    print(f"{name}: {time.perf_counter() - since:.0f} s", flush=True)
    return not departures


def report(name: str, what: str, departures, fine: str) -> None:
    """Print the numbers that left first, or `fine`."""
    if not departures:
        print(f"{name}: {what}: {fine}")
        return
    step = departures[0].step
    first = [departure for departure in departures if departure.step == step]
    print(f"{name}: {what}: LEFT at step {step}, the first of {len(departures)} values")
    for departure in first[:_SHOWN]:
        print(f"  {departure}")
    if len(first) > _SHOWN:
        print(f"  and {len(first) - _SHOWN} more at this step")
