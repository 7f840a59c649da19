"""Find near duplicates within a set of pictures and between it and test sets, and list them.

  python -m vit_jax.main duplicates folder --config.data.data_dir=IMAGES --output=DUPLICATES
  python -m vit_jax.main duplicates cifar100 --config.data.data_dir=DIR --against=cifar10:test \\
    --against=cifar100:test --output=DUPLICATES
  python -m vit_jax.main --config=folder --config.data.data_dir=IMAGES \\
    --config.data.exclude=DUPLICATES/exclude.npz --workdir=runs/birds

SOURCE and --config.data.KEY name the set as in `prepare`; it is the split data.split. Pictures of
the sets in --against stay, and of several near ones the first in SOURCE. DIR gets exclude.npz, the
records to leave out; pairs.csv, the pairs; and page.html, some of them to look at, for which run
pip install -e '.[report]'. Pictures are near by the PDQ hash, also if one is mirrored, and with
--features by a model too. After an interruption run the same command again.
"""

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from vit_jax.base import files
from vit_jax.base.errors import InputError, collect_faults
from vit_jax.base.packages import need_package
from vit_jax.commands.flags import (
    define_data_flags,
    find_data_faults,
    read_data,
    split_name,
)
from vit_jax.job import exit_codes

_MOST_BITS = 31  # up to here all near hashes of a small set are found

if TYPE_CHECKING:
    from vit_jax.config.sections import Data


def define_flags(parser: argparse.ArgumentParser) -> None:
    define_data_flags(parser)
    parser.add_argument(
        "--against", metavar="NAME:SPLIT", help="a set whose pictures SOURCE must not have",
        action="append", default=[],
    )  # fmt: skip
    parser.add_argument(
        "--against_dir", metavar="DIR", help="folder of these sets; default: the folder of SOURCE"
    )
    parser.add_argument(
        "--distance", type=int, default=_MOST_BITS,
        help="the most bits, of 256, in which hashes of near pictures differ; default: 31",
    )  # fmt: skip
    parser.add_argument(
        "--features", metavar="FILE",
        help="of `predict --features=FILE.npz`, first for SOURCE, then for each --against",
        action="append", default=[],
    )  # fmt: skip
    parser.add_argument(
        "--similarity", type=float, default=0.95,
        help="the least cosine of features of near pictures; default: 0.95, a guess: see page.html",
    )  # fmt: skip


def main(flags: argparse.Namespace) -> int:
    faults = find_data_faults(flags, "duplicates folder --output=DUPLICATES")
    number, needed = len(flags.features), 1 + len(flags.against)
    faults.need(
        number in (0, needed),
        f"--features: {number} files; needed: {needed}, for SOURCE and for each --against",
    )
    for text in flags.against:
        named = all(split_name(text))
        faults.need(named, f"--against={text}: needs NAME:SPLIT, e.g. --against=cifar10:test")
    for flag, most in (("distance", _MOST_BITS), ("similarity", 1)):
        value = getattr(flags, flag)
        faults.need(0 <= value <= most, f"--{flag}={value}: needs a number from 0 to {most}")
    collect_faults(faults)
    files.check_folder(flags.output, "--output")
    need_package("--output", "jinja2", "report")
    if flags.features:
        need_package("--features", "usearch", "curation")

    from vit_jax.run import terminal  # heavy imports only after the flags are checked

    terminal.log_to_console(Console(stderr=True), quiet=flags.quiet)
    from vit_jax.curation import duplicates as found_in
    from vit_jax.curation.prepare import Progress, in_processes
    from vit_jax.curation.shards import open_split
    from vit_jax.data.id_files import ids_to_bytes
    from vit_jax.insight.pages import write_page
    from vit_jax.insight.tables import as_csv

    runner = in_processes(flags.workers)
    finder: Callable[[Sequence[found_in.Part], int], np.ndarray] = found_in.pairs_here
    if flags.beam is not None:
        need_package("--beam", "apache_beam", "curation")
        from vit_jax.curation.beam import on_beam, pairs_on_beam

        options = shlex.split(flags.beam)
        runner, finder = on_beam(options), pairs_on_beam(options, flags.output)
    sets = _sets(flags)
    sources = [open_split(d, d.split, d.text_length is not None) for d in sets]
    in_order = zip(flags.features[1:] + flags.features[:1], sources, strict=True)
    features = [found_in.read_features(*pair) for pair in in_order] if flags.features else []
    parts = found_in.parts_of(flags.output, [*zip(sets, sources, strict=True)])
    flags.output.mkdir(parents=True, exist_ok=True)
    runner(found_in.hash_part, parts, Progress(len(parts)))
    by_hash = finder(parts, flags.distance)
    found = found_in.find(sources, by_hash, features, flags.similarity)
    out = np.flatnonzero(found.out)
    files.write_whole(flags.output / "pairs.csv", as_csv([*found_in.table_of(found, sources)]))
    files.write_whole(flags.output / "exclude.npz", ids_to_bytes(out, sources[-1].fingerprint))
    page = write_page("Near duplicates", found_in.sections_of(found, sources))
    files.write_whole(flags.output / "page.html", page)
    counts = {"records": sources[-1].num_examples, "pairs": len(found.pairs), "left_out": len(out)}
    print(json.dumps({"output": os.fspath(flags.output), **counts}))
    return exit_codes.DONE


def _sets(flags: argparse.Namespace) -> list["Data"]:
    """The sets in --against, then SOURCE."""
    own = read_data(flags)
    for key in ("exclude", "classes", "subset"):
        if (value := getattr(own, key)) is not None:
            raise InputError(
                f"data.{key}={value!r}: the list names records of the whole split; leave it out"
            )
    sets = [own]
    for text in reversed(flags.against):
        name, split = split_name(text)
        other = dataclasses.replace(
            own, name=name, split=split, data_dir=flags.against_dir or own.data_dir,
            own=own.own if name == own.name else {}, text_length=None, multi_label=False,
        )  # fmt: skip
        sets.insert(0, other)
        if (name, split, sets[0].data_dir) == (own.name, own.split, own.data_dir):
            raise InputError(f"--against={text}: is SOURCE itself; leave it out")
    return sets
