"""Curates an unbalanced CIFAR-10 and trains on the result: docs/explanation/curated_cifar10.csv.

python tools/curated_cifar10.py WORKDIR --data_dir=DIR [--seeds=3] [--arms random supervised]

The pool has 4,500 images of one class and 90 of another; from class to class the number falls by
the same factor. LeJEPA trains without labels on a random part of it, or on a part that `vit_jax
curate` chose by the features of a model that learned the pool's labels. It is judged by 20 nearest
neighbours and a linear probe among 5,000 other images, about 500 of each class. Runs that the CSV
has are not run again; one that was stopped begins anew.
"""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row, has_row, make_parser, train

from vit_jax.data import count_labels, make_source

TABLE = ROOT / "docs/explanation/curated_cifar10.csv"
LARGEST, SMALLEST = 4500, 90  # images of a class in the pool
KEPT, CLUSTERS = 2500, "500,50,10"
STEPS, STEPS_OF_LABELS = 600, 1500
ARMS = ("random", "supervised")


def class_sizes() -> list[int]:
    """The number of images of each class in the pool."""
    return [round(LARGEST * (SMALLEST / LARGEST) ** (i / 9)) for i in range(10)]


def make_pool(data_dir: pathlib.Path, pool: pathlib.Path) -> None:
    """Write the pool, images of train[:90%] in their order, as arrays."""
    builder = tfds.builder("cifar10", data_dir=data_dir)
    found = tfds.as_numpy(builder.as_dataset(split="train[:90%]", batch_size=-1))
    kept = [np.flatnonzero(found["label"] == i)[:size] for i, size in enumerate(class_sizes())]
    ids = np.sort(np.concatenate(kept))
    names = np.array(builder.info.features["label"].names)
    columns = {"train_images": found["image"][ids], "train_labels": found["label"][ids]}
    np.savez(pool, class_names=names, **columns)


class Runs:
    """The runs in a folder, and the files between them."""

    def __init__(self, work: pathlib.Path, data_dir: pathlib.Path):
        self.work, self.data_dir, self.pool = work, data_dir, work / "pool.npz"

    def part(self, arm: str, seed: int) -> str:
        """`data.subset` of a run; a curated part is made if it is not there."""
        if arm == "random":
            return str(KEPT)
        kept = self.work / f"kept_{seed}.npz"
        if not kept.exists():
            call("curate", self.features(), f"--clusters={CLUSTERS}", f"--keep={KEPT}",
                 f"--seed={seed}", f"--output={kept}")  # fmt: skip
        return str(kept)

    def features(self) -> pathlib.Path:
        """The folder of the pool's features; those that are there are not computed again."""
        features, model = self.work / "features", self.work / "labels"
        if (features / "summary.json").exists():
            return features
        if not (model / "summary.json").exists():
            keys = self.keys(STEPS_OF_LABELS, "held_out") | {"data.split": "train"}
            train(["--config=cifar10:fast,held_out", *as_flags(keys)], model)
        call("predict", f"--workdir={model}", "--data=arrays:train", f"--data_dir={self.pool}",
             f"--features={features}", "--batch_size=500")  # fmt: skip
        return features

    def keys(self, steps: int, *evals: str) -> dict:
        """The keys of a run on the pool, whose evaluators read CIFAR-10 itself."""
        keys = {"duration": f"{steps} steps", "data.name": "arrays", "data.data_dir": self.pool}
        for entry in evals:
            keys |= {f"evals.{entry}.data_name": "cifar10", f"evals.{entry}.every": "100 %"}
            keys[f"evals.{entry}.data_dir"] = self.data_dir
        return keys

    def run(self, arm: str, seed: int) -> dict:
        """Train once: how balanced the images are, CPU seconds, and accuracy in per cent."""
        part = self.part(arm, seed)
        keys = self.keys(STEPS, "near", "probe", "images") | {"seed": seed}
        keys |= {f"evals.{entry}.train_split": "train[90%:]" for entry in ("near", "probe")}
        keys |= {"evals.near.baselines": False, "data.subset": part, "data.subset_seed": seed}
        words = ["--config=lejepa:cifar10", *as_flags(keys)]
        summary, cpu_s = train(words, self.work / f"{arm}_{seed}")
        metrics = {"20nn": "near/20nn_top1", "probe": "probe/top1"}
        found = {key: round(100 * summary[metric], 2) for key, metric in metrics.items()}
        return self.balance(part, seed) | {"cpu_s": round(cpu_s)} | found

    def balance(self, part: str, seed: int) -> dict:
        """Numbers of images: all, and those of the largest and the smallest class; `classes`: the
        number of classes of equal size with the same entropy.
        """
        keys = {"split": "train", "image_size": (32, 32), "data_dir": self.pool}
        source = make_source("arrays", **keys, subset=(part, False, seed))
        counts = count_labels(source)
        shares = counts[counts > 0] / counts.sum()
        classes = np.exp(-(shares * np.log(shares)).sum())
        return {"images": counts.sum(), "largest": counts.max(), "smallest": counts.min(),
                "classes": round(float(classes), 2)}  # fmt: skip


def as_flags(keys: dict) -> list[str]:
    return [f"--config.{key}={value}" for key, value in keys.items()]


def call(*words: str | pathlib.Path) -> None:
    """Run a command of vit_jax."""
    subprocess.run([sys.executable, "-m", "vit_jax.main", *map(str, words)], cwd=ROOT, check=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=ARMS)
    args = parser.parse_args()
    runs = Runs(args.workdir, args.data_dir)
    runs.work.mkdir(parents=True, exist_ok=True)
    if not runs.pool.exists():
        make_pool(runs.data_dir, runs.pool)
    for seed, arm in itertools.product(range(args.seeds), args.arms):
        place = {"arm": arm, "seed": str(seed)}
        if not has_row(TABLE, place):
            add_row(TABLE, place | runs.run(arm, seed))


if __name__ == "__main__":
    main()
