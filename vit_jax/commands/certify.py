"""Certify these devices: what holds, how fast they are, and whether a kill costs a bit.

  python -m vit_jax.main certify --output=certificate
  python -m vit_jax.main certify --output=certificate --config=pretrain:ViT-B/16,imagenet2012

It measures products, memory, exchanges, kernels, the steps of three models and of --config, the
input of --config and saves; it compares a gradient with its repetition and a killed run with a
whole one. It writes certificate.json, for `plan --measured`, page.html and summary.txt, which hold
no names of hosts, paths or keys. Under a launcher each process runs the same command.

Exit codes: 0 all held; 1 something did not hold, or failed.
"""

import argparse
import signal
import sys

from ml_collections import ConfigDict
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.commands.flags import (
    define_config_flags,
    define_process_flags,
    load_valid_config,
    positive_int,
    require_flags,
    start_job,
)
from vit_jax.config import Settings, base_config
from vit_jax.diagnosis import certificate
from vit_jax.job import exit_codes

_PROCESS_FLAGS = ("coordinator", "num_processes", "process_id")


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument(
        "--output", type=files.absolute, metavar="DIR", help="folder for the certificate"
    )
    parser.add_argument(
        "--minutes", type=positive_int, default=10, help="after which no part goes on"
    )
    parser.add_argument(
        "--models", default=",".join(certificate.MODELS), help="whose steps are measured"
    )
    parser.add_argument("--part", choices=certificate.PARTS, help="run this part only")
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    require_flags(flags, ("output",), "vit_jax certify --output=certificate")
    models = tuple(name.strip() for name in flags.models.split(","))
    _check_models(models)
    files.check_folder(flags.output, "--output")
    config = load_valid_config(flags) if flags.config is not None else None
    if flags.part is not None:
        return _run_part(flags, models, config)

    from vit_jax.diagnosis.certificate import page

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part too
    (flags.output / "parts").mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, quiet=flags.quiet)
    words = ["certify", f"--output={flags.output}", f"--models={flags.models}"]
    words += [f"--config={flags.config}"] if flags.config else []
    words += [f"--config.{key}={value}" for key, value in flags.overrides]
    words += _process_words(flags)
    made = certificate.certify(
        flags.output, words, 60 * flags.minutes,
        lambda line: console.print(line, soft_wrap=True, markup=False), _is_first(flags),
    )  # fmt: skip
    if not made:  # another process writes it
        return exit_codes.DONE
    text = page.as_text(made)
    files.write_whole(flags.output / "summary.txt", text)
    files.write_whole(flags.output / "page.html", page.as_html(made))
    print(text, end="")
    return exit_codes.DONE if made["held"] else exit_codes.FAILED


def _check_models(models: tuple[str, ...]) -> None:
    from vit_jax.models import known_names

    if unknown := [name for name in models if name not in known_names()]:
        raise InputError(
            f"--models={','.join(models)}: {unknown[0]} is no model; e.g. --models=ViT-S/16"
        )


def _is_first(flags: argparse.Namespace) -> bool:
    """Whether this is process 0 of its job, which may not have begun."""
    from vit_jax.job import processes

    cluster = None if flags.coordinator else processes.find_cluster()
    return not (cluster.get_process_id() if cluster else flags.process_id)


def _process_words(flags: argparse.Namespace) -> list[str]:
    given = {name: getattr(flags, name) for name in _PROCESS_FLAGS}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _run_part(flags: argparse.Namespace, models: tuple[str, ...], config: ConfigDict | None) -> int:
    """Run one part in this process, and write its figures on process 0."""
    from vit_jax.diagnosis.certificate.context import Context

    asked = None if config is None else Settings.of(config)
    context = Context(flags.output, models, asked, tuple(_process_words(flags)), _is_first(flags))
    if flags.part != "recovery":  # whose runs are the job
        start_job(flags, base_config() if config is None else config)
    certificate.keep(context, flags.part, certificate.run_part(flags.part, context))
    return exit_codes.DONE
