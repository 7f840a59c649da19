"""Measure the input, the training step or the inference of a config, or draw its augmentations.

  python -m vit_jax.main benchmark --what=input --config=pretrain:ViT-S/16,imagenet2012
  python -m vit_jax.main benchmark --what=step --config=pretrain:ViT-L/16,imagenet2012
  python -m vit_jax.main benchmark --what=step --config=... --topology=v5e:4x4

input: CPU milliseconds per image, compared with decoding only and with a plain float32 pipeline on
the same images; only the training split is opened.
step: compile seconds, images/s, CPU seconds and GFLOP per image, MFU and memory, in the layout that
a run would take; reads no data.
With --topology nothing runs; it prints the TPU compiler's cycles and the bundles of each kernel.
inference: images/s of the forward pass on one device by batch size, memory, and the largest batch;
with --topology, a plan for a chip that you do not have: a TPU, or a GPU such as H100:1.
augmentations: a PNG, written to --output, of training images before and after augmentation.
"""

import argparse
import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
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
from vit_jax.devices.chips import Slice, find_slice
from vit_jax.devices.mesh import start_backend
from vit_jax.job import exit_codes

logger = logging.getLogger("vit_jax")


def measure_input(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.input.measure_input` for `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import input as input_benchmark

    return input_benchmark.measure_input(config, num_rounds=flags.repeat)


def measure_step(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.step.measure_step` for `flags.steps` steps in `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import step
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.opener import Tables, check_mesh
    from vit_jax.run.resolve import resolve

    mesh = check_mesh(config)
    config = resolve(config, Tables(mesh)).config
    if config.auto:  # as a run
        config = choose_layout(config, mesh)
        mesh = check_mesh(config)
    return step.measure_step(config, mesh, num_steps=flags.steps, num_rounds=flags.repeat)


def measure_inference(config: ConfigDict, flags: argparse.Namespace) -> dict[str, Any]:
    """Run `benchmarks.inference.measure_inference` for `flags.repeat` rounds."""
    from vit_jax.diagnosis.benchmarks import inference
    from vit_jax.run.opener import Tables
    from vit_jax.run.resolve import resolve

    return inference.measure_inference(resolve(config, Tables()).config, num_rounds=flags.repeat)


def plan_inference(config: ConfigDict, slice_: Slice) -> dict[str, Any]:
    """Run `benchmarks.inference.plan_inference` for a chip of `slice_`."""
    from vit_jax.diagnosis.benchmarks import inference
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.run.opener import Tables
    from vit_jax.run.resolve import resolve

    target = Target(slice_)
    start_planning(target)
    return inference.plan_inference(resolve(config, Tables()).config, target)


def compile_step(config: ConfigDict, slice_: Slice) -> dict[str, Any]:
    """Figures of the step of `config` on `slice_` by the TPU compiler, from its plan."""
    from vit_jax.planning import plan
    from vit_jax.planning.estimates import estimate
    from vit_jax.planning.search import plan_layouts, rank_layouts
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.run.opener import Tables
    from vit_jax.run.resolve import resolve

    target = Target(slice_)
    start_planning(target)
    if not target.is_compiled_for:
        raise InputError(
            f"--topology={slice_.name}: needs a TPU slice, and libtpu, which compiles for it: pip "
            "install -e '.[plan]'; the command plan calculates figures for others"
        )
    layouts = rank_layouts(resolve(config, Tables()).config, target)
    _, figures = plan_layouts(layouts, functools.partial(plan, target=target))
    kept = ("topology", "mesh", "global_batch_size", "num_params", "compile_s", "compiler_cycles")
    kernels = {
        f"{i} {row['name']}": {key: value for key, value in row.items() if key != "name"}
        for i, row in enumerate(figures["kernels"], 1)
    }
    timing = estimate(figures, None)["compiler"]
    return {key: figures[key] for key in kept} | {
        "kernels": kernels,
        "memory_per_device_bytes": figures["memory_bytes"]["peak"],
        "fits": figures["memory_bytes"]["fits"],
        "step_s": timing and timing["step_s"],
        "mfu": timing and timing["mfu"],
    }


def draw_augmentations(config: ConfigDict, flags: argparse.Namespace) -> None:
    """Draw the sheet of `benchmarks.augmentations` to the PNG `flags.output`."""
    if flags.output is None:
        raise InputError("--output: missing; name the PNG file to write")
    from vit_jax.diagnosis.benchmarks.augmentations import draw_contact_sheet

    draw_contact_sheet(config, flags.output)
    logger.info("drawn: %s", flags.output)


# Name given by --what -> function of the config and the flags. It returns the figures to print, or
# None if it has written --output itself.
BENCHMARKS: dict[str, Callable[[ConfigDict, argparse.Namespace], dict[str, Any] | None]] = {
    "input": measure_input,
    "step": measure_step,
    "inference": measure_inference,
    "augmentations": draw_augmentations,
}


# Name given by --what -> function of the config and of a slice that is not here.
PLANNED = {"step": compile_step, "inference": plan_inference}


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=BENCHMARKS, help="what to measure")
    define_config_flags(parser)
    parser.add_argument("--output", metavar="FILE", help="file for the figures (JSON) or the PNG")
    define_format_flag(parser)
    parser.add_argument(
        "--steps", type=positive_int, help="steps to time; default: as many as fit in 20 s"
    )
    parser.add_argument(
        "--repeat", type=positive_int, help="rounds to time; figures show their spread"
    )
    parser.add_argument(
        "--topology", metavar="SLICE", help="plan the step or the inference on it; nothing runs"
    )


def main(flags: argparse.Namespace) -> int:
    example = "vit_jax benchmark --what=step --config=quickstart"
    require_flags(flags, ("what", "config"), example)
    if flags.topology is not None and flags.what not in PLANNED:
        raise InputError(
            f"--topology={flags.topology}: only for --what={' and '.join(PLANNED)}; leave it out"
        )
    slice_ = None if flags.topology is None else find_slice(flags.topology)
    output = None if flags.output is None else files.absolute(flags.output)
    if output is not None:
        files.check_output(output, "--output")
    config = load_valid_config(flags)

    from vit_jax.run import terminal  # imports TensorBoard, so only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    if slice_ is not None:
        figures: dict[str, Any] | None = PLANNED[flags.what](config, slice_)
    else:
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
