"""Estimate memory, communication, time and cost of a run on hardware you do not have.

  python -m vit_jax.main plan --config=pretrain:ViT-L/16,imagenet21k --topology=v5e:4x4

The real training step is compiled ahead of time for a TPU slice or GPUs, on any Linux machine
without them. Without their compiler (libtpu, JAX's plugin for CUDA), and with --no_compile, memory
is calculated instead. Own images are only counted, no other data are read. Results are cached. Exit
code 3: the run does not fit, in any layout that the config leaves open.

  python -m vit_jax.main plan --budget=500 --topology=v5e:4x4 --price_per_chip_hour=1.2

This lists the shipped recipes that cost at most 500, cheapest first; prices are yours to give.
"""

import argparse
import functools
import json
import logging
import sys
from typing import Any

from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    amount,
    define_config_flags,
    define_format_flag,
    load_valid_config,
    require_flags,
)
from vit_jax.config import Settings
from vit_jax.devices.chips import find_slice, find_slices
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument(
        "--topology", metavar="SLICE", help="TPU slice or GPUs: v5e:4x4, v5p:4x8x8 or H100:64"
    )
    parser.add_argument("--num_slices", type=int, default=1, help="TPU slices, joined by DCN")
    define_format_flag(parser)
    parser.add_argument("--price_per_chip_hour", type=amount, help="in any currency; adds the cost")
    parser.add_argument(
        "--goodput_of", metavar="RUN", help="run, or folder of runs; adds their time beside steps"
    )
    parser.add_argument(
        "--measured", metavar="FILE", type=files.absolute,
        help="certificate.json of `certify`: its time and memory in the place of assumptions; a "
        "CPU's needs no --topology",
    )  # fmt: skip
    parser.add_argument(
        "--budget",
        type=amount,
        help="list shipped recipes that cost no more on chips of --topology",
    )
    parser.add_argument(
        "--search", nargs="?", const="layout", choices=("layout", "batch"),
        help="layout: the fastest mesh and remat that fit; batch: the largest batch that fits each",
    )  # fmt: skip
    parser.add_argument(
        "--no_compile",
        action="store_true",
        help="calculate, without a compiler; large models take a minute",
    )
    parser.add_argument(
        "--show_sharding", action="store_true", help="only show how each parameter is sharded"
    )


def main(flags: argparse.Namespace) -> int:
    if flags.budget is not None:
        return _list_recipes(flags)
    example = "vit_jax plan --config=pretrain:ViT-L/16,imagenet21k --topology=v5e:4x4"
    if flags.measured is not None and flags.search is not None:
        raise InputError("--measured: plans one layout; leave out --search")
    given = flags.topology
    found = None if given is None else find_slices(given, flags.num_slices)
    certificate = None
    if flags.measured is not None:
        from vit_jax.planning.measured import read_certificate

        certificate = read_certificate(flags.measured)
    is_known = certificate is not None and certificate.is_of_cpu
    require_flags(flags, ("config",) if is_known else ("config", "topology"), example)
    config = load_valid_config(flags)
    known = _known(flags)

    from vit_jax.planning import plan_tables as tables
    from vit_jax.planning.plan_figures import show_sharding
    from vit_jax.planning.run_plan import find_target, plan_run
    from vit_jax.planning.search import find_layouts
    from vit_jax.planning.targets import settle, start_planning
    from vit_jax.run import terminal  # imports TensorBoard, so only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    target = find_target(found, flags.num_slices, certificate, not flags.no_compile)
    settings = settle(Settings.of(config), target)
    start_planning(target)
    if flags.show_sharding:
        return _show(flags, show_sharding(settings, target), tables.sharding_table)
    if flags.search is not None:
        rows = find_layouts(settings, target, batches=flags.search == "batch", **known)
        return _show(flags, rows, tables.layouts_table, rows[0]["fits"])
    figures = plan_run(settings, target, known, certificate)
    return _show(flags, figures, tables.print_plan, figures["memory_bytes"]["fits"])


def _known(flags: argparse.Namespace) -> dict[str, float | None]:
    """The price and the goodput of `estimate`."""
    goodput = None
    if flags.goodput_of is not None:
        from vit_jax.insight.runs import read_goodput

        goodput = read_goodput(flags.goodput_of, "--goodput_of")
    return {"price_per_chip_hour": flags.price_per_chip_hour, "goodput": goodput}


def _list_recipes(flags: argparse.Namespace) -> int:
    """Print the shipped recipes that --budget pays for; exit code 3 if there are none."""
    example = "vit_jax plan --budget=500 --topology=v5e:4x4 --price_per_chip_hour=1.2"
    require_flags(flags, ("topology", "price_per_chip_hour"), example)
    others = ("config", "search", "show_sharding", "measured", "no_compile")
    given = [f"--{name}" for name in others if getattr(flags, name)]
    given += ["--num_slices"] * (flags.num_slices != 1)
    if given:
        raise InputError(f"--budget: lists shipped recipes; leave out {', '.join(given)}")
    target = find_slice(flags.topology)
    from vit_jax.planning.plan_tables import recipes_table
    from vit_jax.planning.recipe_costs import affordable, without_costs

    price, goodput = flags.price_per_chip_hour, _known(flags)["goodput"]
    found = affordable(flags.budget, target, price, goodput)
    if flags.format == "json":
        return _show(flags, found.rows, None, bool(found.rows))
    draw = functools.partial(recipes_table, asked=target.name, without=without_costs(target))
    return _show(flags, found, draw, bool(found.rows))


def _show(flags: argparse.Namespace, result: Any, draw: Any, fits: bool = True) -> int:
    """Print the result, as JSON or by `draw`; return the exit code."""
    if flags.format == "json":
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        console = Console()
        for part in draw(result):
            console.print(part, soft_wrap=isinstance(part, str))  # the answer is one line
    return exit_codes.DONE if fits else exit_codes.DOES_NOT_FIT
