"""Choose a part of a data set by its features, to train on; print a summary as JSON.

  python -m vit_jax.main predict --init_from=SOURCE --data=NAME:train --features=features
  python -m vit_jax.main curate features --clusters=1000,100,10 --keep=5000 --output=balanced.npz
  python -m vit_jax.main curate features --near=features_of_mine --output=near.npz
  python -m vit_jax.main --config=... --config.data.subset=balanced.npz --workdir=runs/balanced

FEATURES is a folder that `predict --features=DIR` wrote. --clusters finds so many clusters by
k-means, then clusters of clusters; --keep records are split evenly over the top clusters, and each
share over the clusters below. --near keeps the records most like another set, whose features
the same model computed. The same seed gives the same file.
"""

import argparse
import json
import os

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.commands.flags import positive_int
from vit_jax.job import exit_codes


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("features", nargs="?", metavar="FEATURES", help="folder of features")
    parser.add_argument("--output", metavar="FILE", help=".npz file to write, for data.subset")
    parser.add_argument(
        "--clusters", type=_numbers, metavar="K,...", help="clusters of each level, the most first"
    )
    parser.add_argument("--keep", type=positive_int, help="records to keep, with --clusters")
    parser.add_argument("--near", metavar="FEATURES", help="features of the set to be like")
    parser.add_argument(
        "--neighbours", type=positive_int, default=4, help="records to keep for each one of --near"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the clusters and the draw")


def _numbers(text: str) -> list[int]:
    return [positive_int(number) for number in text.split(",")]


def main(flags: argparse.Namespace) -> int:
    faults = Faults()
    faults.need(flags.features, "FEATURES: missing; give the folder of predict --features=DIR")
    faults.need(flags.output, "--output: missing; give a file, e.g. --output=balanced.npz")
    faults.need(
        (flags.clusters is None) != (flags.near is None),
        "give either --clusters=1000,100,10 with --keep=5000, or --near=FEATURES",
    )
    faults.need(
        (flags.clusters is None) == (flags.keep is None), "--clusters, --keep: give both, or none"
    )
    clusters = flags.clusters or []
    given = ",".join(map(str, clusters))
    falling = clusters == sorted({*clusters}, reverse=True)
    faults.need(falling, f"--clusters={given}: needs falling numbers, such as 1000,100,10")
    collect_faults(faults)

    from vit_jax.curation.features import Features
    from vit_jax.data.id_files import ids_to_bytes
    from vit_jax.inference.saved import check_output

    output = check_output(flags.output, "--output", ".npz")
    features = Features.open(files.absolute(flags.features), "FEATURES")
    if flags.near is None:
        from vit_jax.curation.clusters import find_clusters, sample_balanced

        label_N, parents = find_clusters(features, flags.clusters, flags.seed)
        kept = sample_balanced(label_N, parents, flags.keep, flags.seed)
    else:
        from vit_jax.curation.nearest import find_nearest

        targets = Features.open(files.absolute(flags.near), "--near")
        if targets.model != features.model:
            raise InputError(f"--near={flags.near}: another model computed these features")
        kept = find_nearest(features, targets, flags.neighbours)
    files.write_whole(output, ids_to_bytes(kept, features.fingerprint))
    print(json.dumps({"output": os.fspath(output), "kept": len(kept), "of": len(features)}))
    return exit_codes.DONE
