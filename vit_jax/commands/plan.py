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
import collections
import functools
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_config_flags,
    define_format_flag,
    load_valid_config,
    require_flags,
)
from vit_jax.config import Settings
from vit_jax.devices.chips import CHIPS, Slice, find_slice
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.planning.measured import Certificate

logger = logging.getLogger("vit_jax")


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument(
        "--topology", metavar="SLICE", help="TPU slice or GPUs: v5e:4x4, v5p:4x8x8 or H100:64"
    )
    parser.add_argument("--num_slices", type=int, default=1, help="TPU slices, joined by DCN")
    define_format_flag(parser)
    parser.add_argument("--price_per_chip_hour", type=float, help="in any currency; adds the cost")
    parser.add_argument(
        "--goodput_of", metavar="RUN", help="run, or folder of runs; adds their time beside steps"
    )
    parser.add_argument(
        "--measured", metavar="FILE", type=files.absolute,
        help="certificate.json of `certify`: its time and memory in the place of assumptions; a "
        "CPU's needs no --topology",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, help="list shipped recipes that cost no more on chips of --topology"
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
    certificate = _read_measured(flags.measured)
    if certificate is not None and certificate.is_of_cpu and flags.topology is None:
        require_flags(flags, ("config",), example)
        slice_ = certificate.slice
    else:
        require_flags(flags, ("config", "topology"), example)
        slice_ = _find_slice(flags.topology, flags.num_slices)
    if certificate is not None:
        certificate.check_chip(slice_.chip)
    config = load_valid_config(flags)
    known = _read_known(flags.price_per_chip_hour, flags.goodput_of)

    from vit_jax.planning import plan_tables as tables
    from vit_jax.planning.plan_figures import show_sharding
    from vit_jax.planning.search import find_layouts
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.run import terminal  # imports TensorBoard, so only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    may_compile = not (flags.no_compile or certificate)
    target = Target(slice_, flags.num_slices, may_compile=may_compile)
    settings = _settle(config, target)
    start_planning(target)
    if flags.show_sharding:
        return _show(flags, show_sharding(settings, target), tables.sharding_table)
    if flags.search is not None:
        rows = find_layouts(settings, target, batches=flags.search == "batch", **known)
        return _show(flags, rows, tables.layouts_table, rows[0]["fits"])
    figures = _plan(settings, target, known, certificate)
    return _show(flags, figures, tables.print_plan, figures["memory_bytes"]["fits"])


def plan(
    config: ConfigDict | str | os.PathLike,
    topology: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    num_slices: int = 1,
    price_per_chip_hour: float | None = None,
    goodput_of: str | os.PathLike | None = None,
    measured: str | os.PathLike | None = None,
    may_compile: bool = True,
) -> dict[str, Any]:
    """Estimate memory, communication, time and cost of a run on hardware you do not have.

        figures = vit_jax.plan("pretrain:ViT-L/16,imagenet21k", "v5e:4x4")
        figures["memory_bytes"]["fits"], figures["estimate"]["run"]["hours"]

    JAX then computes on the CPU, also later in this process.

    Args:
      config, overrides: as in `load_config`.
      topology: a TPU slice or GPUs: "v5e:4x4", "H100:64".
      num_slices: TPU slices, joined by DCN.
      price_per_chip_hour: in any currency; None: no cost.
      goodput_of: a run on such machines, or a folder of runs, by whose share of steps the hours are
        divided; None: input, evaluations and saves are left out.
      measured: certificate.json of `certify`, made on such chips; None: no measurement is used.
      may_compile: False: calculate in seconds, without a compiler.

    Returns:
      What the command prints with --format=json.

    Raises:
      InputError: a ValueError that names the key or the argument.
    """
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.run.setup.validation import load_config, validate

    certificate = _read_measured(measured)
    slice_ = _find_slice(topology, num_slices)
    if certificate is not None:
        certificate.check_chip(slice_.chip)
    target = Target(slice_, num_slices, may_compile=may_compile and certificate is None)
    config = load_config(config, overrides)
    validate(config, [], "config")
    known = _read_known(price_per_chip_hour, goodput_of)
    start_planning(target)
    return _plan(_settle(config, target), target, known, certificate)


def _settle(config: ConfigDict, target: Any) -> Settings:
    """The resolved settings. On a CPU, which has a certificate, a run may take microbatches."""
    from vit_jax.devices.mesh import AXES, make_mesh
    from vit_jax.planning.targets import describe_devices
    from vit_jax.run.setup.opener import Tables
    from vit_jax.run.setup.resolve import resolve

    mesh = None
    if target.chip.platform == "cpu":
        axes = {axis: config.mesh[axis] for axis in AXES}
        mesh = make_mesh(**axes, devices=describe_devices(target))
    return resolve(config, Tables(mesh)).settings


def _read_known(
    price_per_chip_hour: float | None, goodput_of: str | os.PathLike | None
) -> dict[str, float | None]:
    """What `estimate` gets to know: the price, and the goodput of runs."""
    known: dict[str, float | None] = {"price_per_chip_hour": price_per_chip_hour, "goodput": None}
    if goodput_of is None:
        return known
    from vit_jax.insight.runs import read_all
    from vit_jax.run.watch.ledger import goodput

    seconds: collections.Counter[str] = collections.Counter()
    for run in read_all([goodput_of])[0]:
        seconds.update(run.seconds)
    if not (found := goodput(seconds)):
        raise InputError(f"--goodput_of={goodput_of}: no step is timed yet; give a longer run")
    return known | {"goodput": found}


def _list_recipes(flags: argparse.Namespace) -> int:
    """Print the shipped recipes that --budget pays for; exit code 3 if there are none."""
    example = "vit_jax plan --budget=500 --topology=v5e:4x4 --price_per_chip_hour=1.2"
    require_flags(flags, ("topology", "price_per_chip_hour"), example)
    others = ("config", "search", "show_sharding", "measured", "no_compile")
    given = [f"--{name}" for name in others if getattr(flags, name)]
    given += ["--num_slices"] * (flags.num_slices != 1)
    if given:
        raise InputError(f"--budget: lists shipped recipes; leave out {', '.join(given)}")
    from vit_jax.planning.plan_tables import recipes_table
    from vit_jax.planning.recipe_costs import affordable, without_costs

    known = _read_known(flags.price_per_chip_hour, flags.goodput_of)
    target = find_slice(flags.topology)
    rows = affordable(flags.budget, target, **known)
    draw = functools.partial(recipes_table, asked=target.name, without=without_costs(target))
    return _show(flags, rows, draw, bool(rows))


def _find_slice(topology: str, num_slices: int) -> Slice:
    found = find_slice(topology)
    if num_slices < 1 or (num_slices > 1 and CHIPS[found.chip].is_gpu):
        raise InputError(
            f"--num_slices={num_slices}: needs a positive number, for GPUs 1; give the number of "
            "all GPUs in --topology"
        )
    return found


def _read_measured(path: str | os.PathLike | None) -> "Certificate | None":
    """The certificate of --measured; None: none is given."""
    if path is None:
        return None
    from vit_jax.planning.measured import read_certificate

    return read_certificate(files.absolute(path))


def _plan(
    settings: Settings,
    target: Any,
    known: Mapping[str, Any],
    certificate: "Certificate | None" = None,
) -> dict[str, Any]:
    """The figures of the fastest layout that a config leaves open, given what is `known`."""
    from vit_jax import planning
    from vit_jax.planning.search import plan_layouts, rank_layouts

    layouts = rank_layouts(settings, target)
    if target.is_compiled_for and not planning.cache_file(layouts[0], target).exists():
        logger.info("%s", _first_answer(layouts[0], target, known))
    settings, figures = plan_layouts(layouts, functools.partial(planning.plan, target=target))
    if certificate is not None:
        figures = certificate.correct(figures, target)
        known = {**known, "share_of_peak": certificate.nearest_to(figures).share_of_peak}
    return _estimated(figures, settings, target, known)


def _estimated(
    figures: dict[str, Any], settings: Settings, target: Any, known: Mapping[str, Any]
) -> dict[str, Any]:
    """`figures` of the plan of `settings` with time and cost, and if it does not fit with remedies.

    The remedies are found by calculation or by the compiler, as the figures were.
    """
    from vit_jax.planning.estimates import estimate
    from vit_jax.planning.search import find_remedies

    figures |= {"estimate": estimate(figures, **known)}
    if not figures["memory_bytes"]["fits"]:
        by_calculation = figures["by"] != "compiler"
        figures["remedies"] = find_remedies(settings, target, figures, calculate=by_calculation)
    return figures


def _first_answer(settings: Settings, target: Any, known: Mapping[str, Any]) -> str:
    """The answer by calculation, which takes seconds, while the compiler takes minutes."""
    from vit_jax.planning.calculated import calculate_plan
    from vit_jax.planning.plan_tables import answer

    try:
        figures = calculate_plan(settings, target)
    except InputError:  # there are no formulas for it, or the compiler's plan is refused too
        return "No quick answer by calculation. The compiler's figures follow."
    shown = answer(_estimated(figures, settings, target, known))
    return f"{shown}. The compiler's figures follow."


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
