"""Flags shared by several commands, and functions that read them."""

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from vit_jax.config.sections import Data
    from vit_jax.data import Source
    from vit_jax.transfer import Pretrained


def require_flags(flags: argparse.Namespace, names: Sequence[str], example: str) -> None:
    """Raise InputError that lists the flags among `names` that are missing or empty."""
    missing = [f"--{name}" for name in names if getattr(flags, name) in (None, "")]
    if missing:
        raise InputError(f"{', '.join(missing)}: missing; e.g. {example}")


def define_config_flags(
    parser: argparse.ArgumentParser, required: Sequence[str] | None = None
) -> None:
    """Add the flags of a command that takes a config.

    `required`: keys that must be set; None: those that a training run needs.
    """
    parser.set_defaults(required=required)
    parser.add_argument(
        "--config", metavar="NAME[:words]", help="name from `configs`, or a .py file, and its words"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the keys in force as JSON and exit"
    )
    parser.add_argument(
        "--config.KEY", metavar="VALUE", help="set any key of the config, e.g. --config.mesh.fsdp=8"
    )


def define_format_flag(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add the flag that chooses a table for readers, JSON for programs, or one of `more`."""
    choices = ("table", "json", *more)
    parser.add_argument("--format", default="table", choices=choices, help="of standard output")


def positive_int(text: str) -> int:
    """The `type` of a flag that takes a positive int32."""
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a positive int, up to {2**31 - 1}")
    return int(text)


def amount(text: str) -> float:
    """The `type` of a flag that takes an amount of money."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a number from 0 on, e.g. 1.5")
    return found


def define_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that works on a set of pictures, and on no model."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="a name as in data.name")
    parser.add_argument(
        "--config.KEY", metavar="VALUE", help="set a key of data, e.g. --config.data.data_dir=DIR"
    )
    parser.add_argument("--output", type=files.absolute, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--workers", type=positive_int, default=os.cpu_count() or 1, help="processes"
    )
    parser.add_argument("--beam", metavar="OPTIONS", help="run by Apache Beam with its options")


def find_data_faults(flags: argparse.Namespace, example: str) -> Faults:
    """The faults of the flags of `define_data_flags`; `example`: of the command."""
    faults, command = Faults(), example.partition(" ")[0]
    faults.need(flags.source, f"SOURCE: missing; e.g. {example}")
    faults.need(flags.output, f"--output: missing; e.g. {example}")
    for key, _ in flags.overrides:
        is_data = key.startswith("data.")
        faults.need(is_data, f"--config.{key}: {command} takes keys of data only; leave it out")
    return faults


def read_data(flags: argparse.Namespace) -> "Data":
    """The keys of data that the flags of `define_data_flags` set; raises InputError."""
    from vit_jax.config import base_config, sections
    from vit_jax.config.text import apply_overrides

    config = base_config()
    config.data.name = flags.source
    collect_faults(apply_overrides(config, flags.overrides))
    data, faults = sections.Data.read(config.data)
    collect_faults([f"data.{fault}" for fault in faults])
    return data


def define_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that connect the processes of one job where no cluster is detected."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--num_processes", type=int, help="number of processes that must join")
    parser.add_argument("--process_id", type=int, help="number of this process, from 0")
    parser.add_argument("--num_devices", type=int, help="number of devices that must be found")


def start_job(flags: argparse.Namespace, config: "ConfigDict") -> None:
    """Join the processes, choose the backend, check processes and devices, start the watchdog.

    Raises:
      InputError: if other processes or devices are found than the flags ask for.
    """
    from vit_jax.devices import mesh
    from vit_jax.job import interrupts, processes, watchdog

    interrupts.watch()
    processes.start(
        flags.coordinator,
        flags.num_processes,
        flags.process_id,
        join_deadline_s=config.job.join_deadline_s,
        heartbeat_s=config.job.heartbeat_s,
    )
    interrupts.listen()
    mesh.start_backend(config.mesh.platform)
    processes.check_devices(flags.num_devices)
    watchdog.start(config.job)


def load_valid_config(flags: argparse.Namespace, *, of_run: bool = False) -> "ConfigDict":
    """Load the config given by `--config`, apply the overrides and validate it.

    Args:
      of_run: take what the run in `--workdir` was last started with instead of `--config`.

    Raises:
      InputError: if no config is named, or the config has faults; lists all faults.
    """
    if not of_run:
        require_flags(flags, ("config",), "--config=quickstart")
    from vit_jax.config import REQUIRED
    from vit_jax.config.stored import read_asked
    from vit_jax.config.text import apply_overrides
    from vit_jax.run.setup.validation import load_named, validate

    if of_run:
        workdir = files.absolute(flags.workdir)
        config, where = read_asked(workdir), f"{workdir}/config.json"
    else:
        config, where = load_named(flags.config), f"--config={flags.config}"
    faults = apply_overrides(config, flags.overrides)
    if config.stop.metric is None and "stop.patience" in dict(flags.overrides):
        faults.append(
            f"stop.patience={config.stop.patience}: has no effect without stop.metric; set that "
            "too, e.g. --config.stop.metric=val/top1"
        )
    validate(config, faults, where, flags.required or REQUIRED)
    return config


def is_run(workdir: str | None) -> bool:
    """Whether a run has begun in `workdir`; raises InputError if it cannot be read."""
    if not workdir:
        return False
    from vit_jax.run.setup.workdir import check_store

    check_store(files.absolute(workdir))
    return (files.absolute(workdir) / "config.json").exists()


def print_config(flags: argparse.Namespace) -> int:
    """Print the keys in force as JSON, for `--print_config`; return the exit code.

    Without `--config`, print the keys of the stored config of the run in `--workdir`. Keys of parts
    that are not chosen are left out unless they are set. Keys that depend on the data or the
    devices are null unless they are set.
    """
    from flax import traverse_util

    from vit_jax.config import flatten, values_in_force

    of_run = flags.config is None and is_run(getattr(flags, "workdir", None))
    config = load_valid_config(flags, of_run=of_run)
    values = {key: value for key, value in flatten(config).items() if value is not None}
    nested = traverse_util.unflatten_dict(values | values_in_force(config), sep=".")
    print(json.dumps(nested, indent=2))
    return exit_codes.DONE


def define_best_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that selects the best step of a run."""
    parser.add_argument(
        "--best", action="store_true",
        help="of a run, the step that checkpoint.keep_best kept instead of the newest",
    )  # fmt: skip


def define_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a model."""
    parser.add_argument(
        "--workdir", metavar="DIR", help="run directory; its newest valid checkpoint is used"
    )
    parser.add_argument(
        "--init_from", metavar="SOURCE", help="or another model: workdir, file, address or name"
    )
    define_best_flag(parser)
    parser.add_argument(
        "--weights", choices=("average", "raw"), help="if the run keeps a running average"
    )
    parser.add_argument(
        "--image_size", type=image_size, metavar="SIZE", help="new image size: 384, or 384,256"
    )
    parser.add_argument("--resize", help="how to resample positions to --image_size; default: as "
                        "the model's own library does")  # fmt: skip


def read_source(flags: argparse.Namespace) -> "Pretrained":
    """Read the model selected by the flags of `define_source_flags`.

    Raises:
      InputError: if no model is selected, or it cannot be read.
    """
    if (flags.workdir is None) == (flags.init_from is None):
        raise InputError("give either --workdir=DIR or --init_from=SOURCE")
    if flags.resize is not None and flags.image_size is None:
        raise InputError(f"--resize={flags.resize}: needs --image_size; give it, or leave out both")

    from vit_jax import transfer  # imports orbax, so only after the flags are checked
    from vit_jax.config import image_hw

    if flags.workdir is not None:
        transfer.check_workdir(flags.workdir)
    averaged = {None: None, "average": True, "raw": False}[flags.weights]
    source = flags.init_from or flags.workdir
    pretrained = transfer.read_pretrained(source, averaged=averaged, best=flags.best)
    if flags.image_size is None:
        return pretrained
    size = image_hw(flags.image_size, "--image_size")
    return transfer.with_image_size(pretrained, size, flags.resize)


def image_size(text: str) -> int | list[int]:
    """`type` of --image_size: an int, or HEIGHT,WIDTH."""
    sides = [int(side) for side in text.split(",")]
    return sides if len(sides) > 1 else sides[0]


def define_image_flags(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """Add the flags that select images; `batch_size`: the default."""
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="files and folders")
    parser.add_argument("--data", metavar="NAME:SPLIT", help="data set to read instead of files")
    parser.add_argument("--data_dir", metavar="DIR", help="folder that holds --data")
    parser.add_argument(
        "--batch_size", type=positive_int, default=batch_size,
        help="images at once, on all devices",
    )  # fmt: skip


def split_name(text: str) -> tuple[str, str]:
    """(NAME, SPLIT) of NAME:SPLIT; the split is "" if it is left out."""
    found = re.fullmatch("((?:hf:)?[^:]*):?(.*)", text)
    assert found is not None  # for a flag holds one line
    return found[1], found[2]


def open_source(
    flags: argparse.Namespace,
    pretrained: "Pretrained",
    paths: Sequence[str],
    read_as: str | None = None,
) -> "Source":
    """The source of --data, or of the files `paths`, read as the model's own data were.

    read_as: `labels` or `captions` numbers and divides the data as a new run on these does.

    Raises:
      InputError: names the flag.
    """
    from vit_jax import data
    from vit_jax.data.images.given import image_files

    spec = pretrained.spec
    if not flags.data:
        return image_files(paths, spec.reading)
    name, split = split_name(flags.data)
    where = {"data_dir": flags.data_dir, "image_size": spec.image_size or (1, 1)}
    where |= {"multi_label": None, **spec.reading._asdict()}
    if read_as == "captions":
        where |= {"captions": True, "multi_label": False}
    if name in ("folder", "list") and read_as is None:
        where["divider"] = data.Divider(
            pretrained.division, pretrained.source, class_names=spec.class_names
        )
    try:
        return data.make_source(name, split=split or "train", **where)
    except InputError as e:  # which names the config's key, and this command takes none
        raise InputError(
            *(f.replace("--config.data.data_dir", "--data_dir") for f in e.faults)
        ) from None
