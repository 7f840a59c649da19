"""Label images by a model, for self-training; print a summary as JSON.

  python -m vit_jax.main label --config=noisy_student --config.init_from=runs/teacher \\
    --workdir=runs/labels

Labels the images of --config.study.unlabelled=NAME@SPLIT. The result, WORKDIR/labels.npz, is a
data set for training: --config.data.mix=pseudo@WORKDIR/labels.npz=0.75. After an interruption
run the same command again; finished labels are kept. Several processes share the work if a launcher
starts them. The study noisy_student calls this command.
"""

import argparse
import json
import signal

from rich.console import Console

from vit_jax.commands.flags import (
    define_best_flag,
    define_config_flags,
    define_process_flags,
    load_valid_config,
    require_flags,
    start_job,
)
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="folder for the labels")
    define_best_flag(parser)
    define_process_flags(parser)


def main(flags: argparse.Namespace) -> int:
    require_flags(flags, ("config", "workdir"), "--config=noisy_student --workdir=runs/labels")
    config = load_valid_config(flags)

    import jax

    from vit_jax import transfer
    from vit_jax.base.errors import InputError
    from vit_jax.config import Settings, sections
    from vit_jax.inference.pseudo_labels import label
    from vit_jax.run import terminal

    settings = Settings.of(config)
    study, _ = sections.Study.read(config.study)
    teacher = settings.run.weights_source
    if teacher is None:
        raise InputError("init_from: not set; give the teacher by --config.init_from=SOURCE")
    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    start_job(flags, config)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # every part is written whole
    pretrained = transfer.read_pretrained(teacher, best=flags.best)
    summary = label(study, settings, pretrained, flags.workdir)
    if jax.process_index() == 0:
        print(json.dumps(summary, indent=2))
    return exit_codes.DONE
