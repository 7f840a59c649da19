"""Measure the input pipeline or the training step of a config, or draw its augmentations.

  python -m vit_jax.main benchmark --what=input --config=pretrain:ViT-S/16,imagenet2012
  python -m vit_jax.main benchmark --what=step --config=pretrain:ViT-L/16,imagenet2012

input: CPU milliseconds per image, compared with decoding only and with a plain float32 pipeline on
the same images; only the training split is opened.
step: compile seconds, images/s, CPU seconds and GFLOP per image, MFU and memory; reads no data.
augmentations: a PNG, written to --output, of training images before and after augmentation.
"""

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Column, Table

from vit_jax import files
from vit_jax.commands.flags import (
    define_config_flags,
    load_valid_config,
    print_config,
    require_flags,
)
from vit_jax.config import num_microbatches
from vit_jax.devices.mesh import check_accum_steps, check_batch_size, make_mesh, start_backend
from vit_jax.errors import InputError, nearest
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")

FORMATS = ("table", "json")


def measure_input(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.input.measure_input`; `flags` are unused."""
    del flags
    from vit_jax.benchmarks import input as input_benchmark

    return input_benchmark.measure_input(config)


def measure_step(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.step.measure_step` for `flags.steps` steps."""
    from vit_jax.benchmarks import step
    from vit_jax.data.known import fill_in_sizes
    from vit_jax.experiment.microbatches import settle_microbatches
    from vit_jax.training.decided import decide

    config = decide(fill_in_sizes(config))
    mesh = make_mesh(**{axis: size for axis, size in config.mesh.items() if axis != "platform"})
    check_batch_size(mesh, config.global_batch_size, "global_batch_size")
    check_accum_steps(mesh, config.global_batch_size, num_microbatches(config))
    config = settle_microbatches(config, mesh)
    return step.measure_step(config, mesh, num_steps=flags.steps)


def draw_augmentations(config: ConfigDict, flags: argparse.Namespace) -> None:
    """Draw the picture of `benchmarks.augmentations` to the PNG `flags.output`."""
    if flags.output is None:
        raise InputError("--output: missing; name the PNG file to write")
    from vit_jax.benchmarks.augmentations import draw_contact_sheet

    draw_contact_sheet(config, flags.output)
    logger.info("drawn: %s", flags.output)


# Name given by --what -> function of the config and the flags. It returns the figures to print, or
# None if it has written --output itself.
BENCHMARKS: dict[str, Callable[[ConfigDict, argparse.Namespace], dict[str, Any] | None]] = {
    "input": measure_input,
    "step": measure_step,
    "augmentations": draw_augmentations,
}


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", help=", ".join(BENCHMARKS))
    define_config_flags(parser)
    parser.add_argument("--output", metavar="FILE", help="file for the figures (JSON) or the PNG")
    parser.add_argument("--format", default="table", help="standard output: table or json")
    parser.add_argument("--steps", type=int, help="steps to time; default: as many as fit in 20 s")


def main(flags: argparse.Namespace) -> int:
    if flags.print_config:
        return print_config(load_valid_config(flags))
    example = "python -m vit_jax.main benchmark --what=step --config=quickstart"
    require_flags(flags, ("what", "config"), example)
    for name, known in (("what", tuple(BENCHMARKS)), ("format", FORMATS)):
        value = getattr(flags, name)
        if value not in known:
            raise InputError(f"--{name}={value}: {nearest(value, known)}")
    if flags.steps is not None and flags.what != "step":
        raise InputError(f"--steps={flags.steps}: only for --what=step; leave it out")
    if flags.steps is not None and flags.steps < 1:
        raise InputError(f"--steps={flags.steps}: needs a positive number")
    output = None if flags.output is None else files.absolute(flags.output)
    if output is not None:
        files.check_output(output, "--output")
    config = load_valid_config(flags)

    from vit_jax import metrics  # imports TensorBoard, so only after the flags are checked
    from vit_jax.training.decided import read_fields

    metrics.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_backend(config.mesh.platform)
    figures = BENCHMARKS[flags.what](read_fields(config), flags)
    if figures is None:
        return exit_codes.DONE
    named = {"what": flags.what, "config": flags.config, "model": config.model.name, **figures}
    text = json.dumps(named, indent=2) + "\n"
    if output is not None:
        files.write_whole(output, text)
    if flags.format == "json":
        print(text, end="")
    else:
        Console().print(as_table(named))
    return exit_codes.DONE


def as_table(figures: Mapping[str, Any]) -> Table:
    """One row per figure; figures with a spread show median, least and greatest value."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), "least", "greatest")
    for name, value in _rows(figures):
        if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
            table.add_row(name, *(_readable(value[key]) for key in ("median", "min", "max")))
        else:
            table.add_row(name, _readable(value))
    return table


def _rows(figures: Mapping[str, Any], prefix: str = ""):
    """Pairs of name and value; the names of nested figures are joined as `outer.inner`."""
    for name, value in figures.items():
        if isinstance(value, dict) and "median" not in value:
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _readable(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
