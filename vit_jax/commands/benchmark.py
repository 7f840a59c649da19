"""Measure the input, the training step or the inference of a config, or draw its augmentations.

  python -m vit_jax.main benchmark --what=input --config=pretrain:ViT-S/16,imagenet2012
  python -m vit_jax.main benchmark --what=step --config=pretrain:ViT-L/16,imagenet2012
  python -m vit_jax.main benchmark --what=inference --config=... --topology=H100:1

input: CPU milliseconds per image, compared with decoding only and with a plain float32 pipeline on
the same images; only the training split is opened.
step: compile seconds, images/s, CPU seconds and GFLOP per image, MFU and memory, in the layout that
a run would take; reads no data.
inference: images/s of the forward pass on one device by batch size, memory, and the largest batch;
with --topology, a plan for a chip that you do not have: a TPU, or a GPU such as H100:1.
augmentations: a PNG, written to --output, of training images before and after augmentation.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_config_flags,
    define_format_flag,
    load_valid_config,
    positive_int,
    require_flags,
)
from vit_jax.config import Settings
from vit_jax.devices.chips import Slice, find_slice
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")


def measure_input(asked: Settings, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.input.measure_input` for `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import input as input_benchmark
    from vit_jax.diagnosis.settled import open_training_data

    settings, source = open_training_data(asked)
    return input_benchmark.measure_input(settings, source, num_rounds=flags.repeat)


def measure_step(asked: Settings, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.step.measure_step` for `flags.steps` steps in `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import step
    from vit_jax.diagnosis.settled import settle_step

    settings, mesh = settle_step(asked)
    return step.measure_step(settings, mesh, num_steps=flags.steps, num_rounds=flags.repeat)


def measure_inference(asked: Settings, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.inference.measure_inference` for `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import inference
    from vit_jax.run.setup.opener import Tables
    from vit_jax.run.setup.resolve import resolve

    return inference.measure_inference(resolve(asked, Tables()).settings, num_rounds=flags.repeat)


def plan_inference(asked: Settings, target_slice: Slice) -> dict[str, Any]:
    """Run `benchmarks.inference.plan_inference` for a chip of `target_slice`."""
    from vit_jax.diagnosis.benchmarks import inference
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.run.setup.opener import Tables
    from vit_jax.run.setup.resolve import resolve

    target = Target(target_slice)
    start_planning(target)
    return inference.plan_inference(resolve(asked, Tables()).settings, target)


def draw_augmentations(asked: Settings, flags: argparse.Namespace) -> None:
    """Draw the sheet of `benchmarks.augmentations` to the PNG `flags.output`."""
    require_flags(flags, ("output",), "--output=sheet.png")
    from vit_jax.diagnosis.benchmarks.augmentations import draw_contact_sheet
    from vit_jax.diagnosis.settled import open_training_data

    settings, source = open_training_data(asked)
    draw_contact_sheet(settings.data, settings.run.seed, source, flags.output)
    logger.info("drawn: %s", flags.output)


# Name given by --what -> function of the settings and the flags. It returns the figures to print,
# or None if it has written --output itself.
BENCHMARKS: dict[str, Callable[[Settings, argparse.Namespace], dict[str, Any] | None]] = {
    "input": measure_input,
    "step": measure_step,
    "inference": measure_inference,
    "augmentations": draw_augmentations,
}


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=BENCHMARKS, help="what to measure")
    define_config_flags(parser)
    parser.add_argument(
        "--output", type=files.absolute, metavar="FILE",
        help="file for the figures (JSON) or the PNG",
    )  # fmt: skip
    define_format_flag(parser)
    parser.add_argument(
        "--steps", type=positive_int, help="steps to time; default: as many as fit in 20 s"
    )
    parser.add_argument(
        "--repeat", type=positive_int, help="rounds to time; figures show their spread"
    )
    parser.add_argument(
        "--topology", metavar="SLICE", help="plan the inference on it; nothing runs"
    )


def main(flags: argparse.Namespace) -> int:
    example = "vit_jax benchmark --what=step --config=quickstart"
    require_flags(flags, ("what", "config"), example)
    target_slice = None if flags.topology is None else find_slice(flags.topology)
    if target_slice is not None and flags.what != "inference":
        raise InputError(f"--topology={flags.topology}: only for --what=inference; use plan")
    if flags.output is not None:
        files.check_output(flags.output, "--output")
    asked = Settings.of(load_valid_config(flags))

    from vit_jax.run import terminal  # imports TensorBoard, so only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    if target_slice is not None:
        figures: dict[str, Any] | None = plan_inference(asked, target_slice)
    else:
        start_backend(asked.mesh.platform)
        figures = BENCHMARKS[flags.what](asked, flags)
    if figures is None:
        return exit_codes.DONE
    named = {"what": flags.what, "config": flags.config, "model": asked.model.name, **figures}
    text = json.dumps(named, indent=2) + "\n"
    if flags.output is not None:
        files.write_whole(flags.output, text)
    if flags.format == "json":
        print(text, end="")
    else:
        Console().print(as_table(named))
    return exit_codes.DONE


def as_table(figures: Mapping[str, Any]) -> Table:
    """One row per figure; figures with a spread show median, least and greatest value."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), "least", "greatest")
    for name, value in _rows(figures):
        spread = value if isinstance(value, dict) else {"median": value}
        table.add_row(name, *map(_readable, spread.values()))
    return table


def _rows(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
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
