"""How well each order of data mixes: docs/explanation/shuffling.csv and shuffling_runs.csv.

python tools/shuffling.py statistic
python tools/shuffling.py train WORKDIR --data_dir=DIR [--seeds=2]

The statistic is of as many records as ImageNet-1k has, in batches of 4,096. Training takes CIFAR-10
in the order of its data set or sorted by class. Rows that a CSV has are not made again.
"""

import argparse
import itertools
import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row, has_row, train

from vit_jax.data import make_order

TABLE, RUNS = (ROOT / f"docs/explanation/{name}.csv" for name in ("shuffling", "shuffling_runs"))
RECORDS, CLASSES, BATCH = 1_281_167, 1000, 4096
# (order, chunk size, streams)
ORDERS = [("record", None, None), *(("chunk", c, v) for c in (64, 1024) for v in (16, 64, 256))]
STEPS = 300
# {run: (how the records are stored, the keys of its order)}
CASES = {
    "record": ("shuffled", "data.order=record"),
    "chunk": ("shuffled", "data.order=chunk"),
    "record, by class": ("sorted", "data.order=record"),
    "chunk, by class": ("sorted", "data.order=chunk"),
    "chunk of 1024, 4 streams, by class": (
        "sorted",
        "data.order=chunk data.chunk_size=1024 data.streams=4",
    ),
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


def make_data(data_dir: pathlib.Path, work: pathlib.Path) -> None:
    """Write shuffled.npz, train[:90%] as it is, and sorted.npz, the same class by class."""
    builder = tfds.builder("cifar10", data_dir=data_dir)
    found = tfds.as_numpy(builder.as_dataset(split="train[:90%]", batch_size=-1))
    names = np.array(builder.info.features["label"].names)
    by_class = np.argsort(found["label"], kind="stable")
    for name, ids in {"shuffled": np.arange(len(by_class)), "sorted": by_class}.items():
        columns = {"train_images": found["image"][ids], "train_labels": found["label"][ids]}
        np.savez(work / f"{name}.npz", class_names=names, **columns)


def run(case: str, seed: int, work: pathlib.Path, data_dir: pathlib.Path) -> dict:
    """Train once: CPU seconds and accuracy on train[90%:] in per cent."""
    stored, words = CASES[case]
    keys = [*words.split(), f"seed={seed}", f"duration={STEPS} steps", "data.split=train",
            "data.name=arrays", f"data.data_dir={work / stored}.npz",
            "evals.held_out.data_name=cifar10", f"evals.held_out.data_dir={data_dir}"]  # fmt: skip
    flags = ["--config=cifar10:fast,held_out", *(f"--config.{key}" for key in keys)]
    summary, cpu_s = train(flags, work / f"{case}_{seed}".replace(" ", "_"))
    return {"cpu_s": round(cpu_s), "top1": round(100 * summary["held_out/top1"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("statistic")
    of_training = commands.add_parser("train")
    of_training.add_argument("workdir", type=pathlib.Path)
    of_training.add_argument("--data_dir", type=pathlib.Path, required=True)
    of_training.add_argument("--seeds", type=int, default=2, help="number of seeds, from 0 on")
    args = parser.parse_args()
    if args.command == "statistic":
        for order in ORDERS:
            place = dict(zip(("order", "chunk_size", "streams"), map(str, order), strict=True))
            if not has_row(TABLE, place):
                add_row(TABLE, place | statistic(*order))
        return
    work, data_dir = args.workdir.resolve(), args.data_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "sorted.npz").exists():
        make_data(data_dir, work)
    for seed, case in itertools.product(range(args.seeds), CASES):
        place = {"run": case, "seed": str(seed), "steps": str(STEPS)}
        if not has_row(RUNS, place):
            add_row(RUNS, place | run(case, seed, work, data_dir))


if __name__ == "__main__":
    main()
