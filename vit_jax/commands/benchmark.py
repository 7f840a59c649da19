"""Measures the input pipeline or the training step of a config, or draws what augmentation does.

  python -m vit_jax.main benchmark --what=input --config=pretrain:ViT-S/16,imagenet2012
  python -m vit_jax.main benchmark --what=step --config=pretrain:ViT-L/16,imagenet2012

input: CPU milliseconds an image, beside the mere decoding of the same images and beside a plain
float32 pipeline; of the data only the training split is opened.
step: seconds to compile, images/s, CPU seconds and GFLOP an image, MFU, memory; no data are read.
augmentations: a picture of some training images and of what is made of them, as PNG in --output.
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
from vit_jax.devices.mesh import check_accum_steps, check_batch_size, make_mesh, start_backend
from vit_jax.errors import InputError, nearest
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")

FORMATS = ("table", "json")


def measure_input(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """See `benchmarks.input`; `flags` say nothing to it."""
    del flags
    from vit_jax.benchmarks import input as input_benchmark

    return input_benchmark.measure_input(config)


def measure_step(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """See `benchmarks.step`; takes `flags.steps`."""
    from vit_jax.benchmarks import step
    from vit_jax.data.known import fill_in_sizes

    config = fill_in_sizes(config)
    mesh = make_mesh(**{axis: size for axis, size in config.mesh.items() if axis != "platform"})
    check_batch_size(mesh, config.global_batch_size, "global_batch_size")
    check_accum_steps(mesh, config.global_batch_size, config.optimizer.accum_steps)
    return step.measure_step(config, mesh, num_steps=flags.steps)


def draw_augmentations(config: ConfigDict, flags: argparse.Namespace) -> None:
    """See `benchmarks.augmentations`; the PNG is `flags.output`."""
    if flags.output is None:
        raise InputError("--output: missing; give the PNG file that the picture goes to")
    from vit_jax.benchmarks.augmentations import draw_contact_sheet

    draw_contact_sheet(config, flags.output)
    logger.info("drawn: %s", flags.output)


# What --what names -> its function of the config and the flags. It returns the figures to be
# shown, or, having written --output itself, None.
BENCHMARKS: dict[str, Callable[[ConfigDict, argparse.Namespace], dict[str, Any] | None]] = {
    "input": measure_input,
    "step": measure_step,
    "augmentations": draw_augmentations,
}


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", help=" or ".join(BENCHMARKS))
    define_config_flags(parser)
    parser.add_argument("--output", metavar="FILE", help="of the figures, as JSON, or the picture")
    parser.add_argument("--format", default="table", help="of standard output: table or json")
    parser.add_argument("--steps", type=int, help="to be timed; otherwise what 20 seconds hold")


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
        raise InputError(f"--steps={flags.steps}: is for --what=step; leave it out")
    if flags.steps is not None and flags.steps < 1:
        raise InputError(f"--steps={flags.steps}: needs a positive number")
    output = None if flags.output is None else files.absolute(flags.output)
    if output is not None:
        files.check_output(output, "--output")
    config = load_valid_config(flags)

    from vit_jax import metrics  # TensorBoard only now, that a typo is answered at once

    metrics.log_to_console(Console(stderr=True))
    start_backend(config.mesh.platform)
    figures = BENCHMARKS[flags.what](config, flags)
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
    """One row a figure; those with a spread as median, least and greatest."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), "least", "greatest")
    for name, value in _rows(figures):
        if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
            table.add_row(name, *(_readable(value[key]) for key in ("median", "min", "max")))
        else:
            table.add_row(name, _readable(value))
    return table


def _rows(figures: Mapping[str, Any], prefix: str = ""):
    """Every figure by its name; `outer.inner` where one holds several."""
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
