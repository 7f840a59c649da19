"""How well each order of data mixes: docs/explanation/shuffling.csv and shuffling_runs.csv.

python tools/shuffling.py statistic
python tools/shuffling.py train WORKDIR [--seeds=3]

The statistic is of as many records as ImageNet-1k has, in batches of 4,096. Training takes the
1,437 handwritten digits as they are or sorted by class, in batches of 64. Rows that a CSV has are
not made again.
"""

import argparse
import itertools
import pathlib

import numpy as np
import tensorflow as tf
from measured_runs import ROOT, add_row, has_row

import vit_jax
from vit_jax.data import make_order, make_source

TABLE, RUNS = (ROOT / f"docs/explanation/{name}.csv" for name in ("shuffling", "shuffling_runs"))
RECORDS, CLASSES, BATCH = 1_281_167, 1000, 4096
# (order, chunk size, streams)
ORDERS = [("record", None, None), *(("chunk", c, v) for c in (64, 1024) for v in (16, 64, 256))]
STEPS = 600
# {run: (whether the records are stored class by class, the keys of its order)}
CASES = {
    "record": (False, {"order": "record"}),
    "chunk": (False, {"order": "chunk"}),
    "record, by class": (True, {"order": "record"}),
    "chunk, by class": (True, {"order": "chunk"}),
    "chunk of 64 in 2 streams, by class": (True, {"order": "chunk", "streams": 2}),
}


def statistic(order: str, chunk_size: int | None, streams: int | None) -> dict:
    """Numbers of two epochs.

    classes: the mean number of classes in a batch, if the records are stored class by class.
    again: of two records of a batch, the chance that a batch of the next epoch has both.
    """
    data_order = make_order(
        order, (RECORDS,), 0, global_batch_size=BATCH, chunk_size=chunk_size or 64, streams=streams
    )
    whole = RECORDS // BATCH  # batches of an epoch
    ids = data_order(tf.range(2 * RECORDS, dtype=tf.int64)).numpy()
    first = ids[: whole * BATCH].reshape(whole, BATCH)
    label = first * CLASSES // RECORDS
    next_batch = np.empty(RECORDS, np.int64)
    next_batch[ids[RECORDS:]] = np.arange(RECORDS) // BATCH
    pairs = [np.bincount(next_batch[batch]) for batch in first]
    again = np.mean([(n * (n - 1)).sum() / (BATCH * (BATCH - 1)) for n in pairs])
    classes = np.mean([len(np.unique(batch)) for batch in label])
    return {"classes": round(float(classes), 1), "again": f"{again:.5f}"}


def run(case: str, seed: int, workdir: pathlib.Path) -> dict:
    """Train once; accuracy on test in per cent."""
    by_class, keys = CASES[case]
    splits = {split: make_source("digits", split=split, image_size=(8, 8))
              for split in ("train", "test")}  # fmt: skip
    found = {split: source.read(np.arange(source.num_examples)) for split, source in splits.items()}
    data = {split: (x["image"].numpy(), x["label"].numpy()) for split, x in found.items()}
    if by_class:
        images, labels = data["train"]
        ids = np.argsort(labels, kind="stable")
        data["train"] = images[ids], labels[ids]
    data["class_names"] = list("0123456789")
    changes = {"seed": seed, "duration": f"{STEPS} steps"}
    changes |= {f"data.{key}": value for key, value in keys.items()}
    summary = vit_jax.train("quickstart", workdir, changes, data=data)
    return {"top1": round(100 * summary["test/top1"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("statistic")
    of_training = commands.add_parser("train")
    of_training.add_argument("workdir", type=pathlib.Path)
    of_training.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    args = parser.parse_args()
    if args.command == "statistic":
        for order in ORDERS:
            place = dict(zip(("order", "chunk_size", "streams"), map(str, order), strict=True))
            if not has_row(TABLE, place):
                add_row(TABLE, place | statistic(*order))
        return
    for seed, case in itertools.product(range(args.seeds), CASES):
        place = {"run": case, "seed": str(seed), "steps": str(STEPS)}
        if not has_row(RUNS, place):
            workdir = args.workdir / f"{case}_{seed}".replace(" ", "_").replace(",", "")
            add_row(RUNS, place | run(case, seed, workdir))


if __name__ == "__main__":
    main()
