"""Prepare pictures for training: shards with checksums, from any source; print a summary as JSON.

  python -m vit_jax.main prepare folder --config.data.data_dir=IMAGES --output=data/birds
  python -m vit_jax.main prepare tar --config.data.data_dir=SHARDS --output=data/small --side=256
  python -m vit_jax.main prepare --verify --output=data/birds

SOURCE is a name as in data.name; --config.data.KEY sets its keys. Files that are JPEG or PNG keep
their bytes unless --side or --encoding ask for others. Pictures that cannot be read are left out,
counted, and listed in broken.csv. After an interruption run the same command again: finished shards
stay. The bytes do not depend on --workers or on the engine. --beam runs the same work by Apache
Beam, with the options of Beam: --beam='--runner=FlinkRunner --flink_master=HOST:PORT'.
"""

import argparse
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.packages import need_package
from vit_jax.commands.flags import (
    define_data_flags,
    find_data_faults,
    positive_int,
    read_data,
)
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.curation.shards import Plan

_SHARD_SIZE = 4096


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_data_flags(parser)
    parser.add_argument(
        "--format", default="array_record", choices=("array_record", "parquet", "tar", "tfrecord"),
        help="default: array_record, as TFDS reads it",
    )  # fmt: skip
    parser.add_argument("--splits", metavar="NAME,...", help="default: all of the source")
    parser.add_argument("--captions", action="store_true", help="keep the captions too")
    parser.add_argument(
        "--side", type=positive_int, help="shorter side of larger pictures; others stay as they are"
    )
    parser.add_argument("--encoding", choices=("jpeg", "png"), help="of all pictures")
    parser.add_argument("--quality", type=positive_int, default=95, help="of new JPEGs, 1 to 100")
    parser.add_argument(
        "--shard_size", type=positive_int, default=_SHARD_SIZE, help="records of each file"
    )
    parser.add_argument(
        "--shuffle_seed", type=int, help="store the records in the random order of this seed"
    )
    parser.add_argument("--verify", action="store_true", help="read the set in --output back")


def main(flags: argparse.Namespace) -> int:
    if flags.verify:
        return _verify(flags)
    faults = find_data_faults(flags, "prepare folder --output=data/birds")
    is_all = "all" in (flags.splits or "").split(",")
    faults.need(not is_all, "--splits=all: give the splits themselves, such as train,val")
    faults.need(flags.quality <= 100, f"--quality={flags.quality}: needs a number from 1 to 100")
    collect_faults(faults)
    files.check_folder(flags.output, "--output")

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    from vit_jax.curation.prepare import in_processes, prepare

    plan, runner = _read_plan(flags), in_processes(flags.workers)
    if flags.beam is not None:
        need_package("--beam", "apache_beam", "curation")
        from vit_jax.curation.beam import on_beam

        runner = on_beam(shlex.split(flags.beam))
    print(json.dumps(prepare(plan, _command(flags), runner), indent=2))
    return exit_codes.DONE


def _verify(flags: argparse.Namespace) -> int:
    """Read a set back by its manifest, print the faults, and return the exit code."""
    faults = Faults()
    faults.need(flags.output, "--output: missing; e.g. prepare --verify --output=data/birds")
    faults.need(
        not (flags.source or flags.overrides),
        "--verify: the manifest has the source and its keys; give --output=DIR only",
    )
    collect_faults(faults)
    from vit_jax.curation.prepare import verify

    said = verify(flags.output)
    for fault in said:
        print(f"error: {fault}", file=sys.stderr)
    print(json.dumps({"output": os.fspath(flags.output), "faults": len(said)}))
    return exit_codes.FAILED if said else exit_codes.DONE


def _read_plan(flags: argparse.Namespace) -> "Plan":
    """The plan that the flags describe; raises InputError that lists all faults."""
    from vit_jax.config import SOURCES
    from vit_jax.curation.pictures import Rule
    from vit_jax.curation.shards import Plan

    data = read_data(flags)
    if flags.encoding == "jpeg" and data.channels > 3:
        raise InputError("--encoding=jpeg: has no alpha; leave it out, or data.channels")
    splits = flags.splits.split(",") if flags.splits else None
    if splits is None:
        known = SOURCES.find(data.name).splits(data.name, data.data_dir)
        splits = [split for split in known if split != "all"] or ["train"]
    rule = Rule(flags.side, flags.encoding, flags.quality)
    return Plan(
        data, tuple(splits), flags.captions, os.fspath(flags.output), flags.format, rule,
        flags.shard_size, flags.shuffle_seed,
    )  # fmt: skip


def _command(flags: argparse.Namespace) -> str:
    """The command without what does not change the files: workers and engine."""
    words = ["vit_jax", "prepare", flags.source, f"--output={flags.output}"]
    words += [f"--config.{key}={value}" for key, value in flags.overrides]
    for name in ("format", "splits", "side", "encoding", "quality", "shard_size", "shuffle_seed"):
        if (value := getattr(flags, name)) is not None:
            words.append(f"--{name}={value}")
    return shlex.join([*words, *["--captions"] * flags.captions])
