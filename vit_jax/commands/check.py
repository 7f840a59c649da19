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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax.base.errors import InputError
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.diagnosis.twins import Departure, Twin


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="twins to run")
    parser.add_argument("--all", action="store_true", help="run every twin")
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
    from rich.console import Console

    from vit_jax.devices.mesh import start_backend
    from vit_jax.diagnosis.twins import read_twin, record, twin_names, write_twin
    from vit_jax.run import terminal

    twins = {name: read_twin(name) for name in flags.names or twin_names()}
    if flags.list:
        for name, twin in twins.items():
            data = "" if twin.data == "digits" else f"; needs {twin.data}"
            print(f"{name:<{max(map(len, twins)) + 2}}{twin.recipe} ({twin.config}){data}")
        return exit_codes.DONE
    if bool(flags.names) == flags.all:
        raise InputError("give NAMEs or --all, e.g. check quickstart; --list lists the twins")
    terminal.log_to_console(Console(stderr=True), quiet=True)  # of the runs only warnings
    start_backend(dict(flags.overrides).get("mesh.platform", "cpu"))
    codes = {exit_codes.DONE}
    for name, twin in twins.items():
        since = time.perf_counter()
        try:
            if flags.record:
                path = write_twin(record(twin, flags.data_dir), name)
                print(f"{name}: recorded in {path}")
            elif not check_twin(name, twin, flags):
                codes.add(exit_codes.FAILED)
            print(f"{name}: {time.perf_counter() - since:.0f} s", flush=True)
        except InputError as e:  # such as missing data; the other twins still run
            print(f"error: {name}: {e}", file=sys.stderr, flush=True)
            codes.add(exit_codes.INPUT_WRONG)
    return exit_codes.FAILED if exit_codes.FAILED in codes else max(codes)


def check_twin(name: str, twin: "Twin", flags: argparse.Namespace) -> bool:
    """Run a twin and print the comparison; returns whether every number is inside."""
    from vit_jax.diagnosis import trace, twins

    if not twin.first_steps:
        raise InputError(f"no stored numbers; record them with check --record {name}")
    asked = twins.twin_settings(twin, twins.SEEDS[0], flags.overrides, flags.data_dir)
    found = trace.trace_runs([asked], curve=not flags.first_steps)
    limits = twins.first_limits(twin)
    left = twins.find_departures(limits, found.first_steps)
    inside = show(f"{name}: first steps", left, f"inside {twins.TOLERANCE:.1%}")
    if flags.first_steps:
        return inside
    curve = {place: value for place, (value,) in found.curve.items()}
    left = twins.find_departures(twins.curve_limits(twin), curve)
    return show(f"{name}: curve", left, f"inside the band over {len(twins.SEEDS)} seeds") and inside


def show(what: str, departures: Sequence["Departure"], fine: str) -> bool:
    """Print the numbers that left first, or `fine`; returns whether there are none."""
    if not departures:
        print(f"{what}: {fine}")
        return True
    step = departures[0].step
    first = [departure for departure in departures if departure.step == step]
    print(f"{what}: LEFT at step {step}, the first of {len(departures)} values")
    for departure in first:
        print(f"  {departure}")
    return False
