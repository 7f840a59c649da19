"""Measures which method learns from 5,000 pictures in twenty CPU minutes: learn_small.csv in docs.

python tools/learn_small.py WORKDIR [--methods=dino,mae] [--seeds=3] [--cpu_s=1200]

WORKDIR/images gets 5,000 images of CIFAR-10 ($VIT_JAX_DATA) as files of varying sizes, in a folder
for each class, which no self-supervised run reads. Each method is a shipped recipe on these files.
A short run measures its CPU seconds a step, and gives the number of steps that fit. The result is
20-NN and a linear probe on 2,000 images of the test set, by the same images' features. Rows that
the CSV has are not measured again; the same command goes on.
"""

import argparse
import csv
import io
import json
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image

from vit_jax.base.files import write_whole

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/explanation/learn_small.csv"
DATA = os.environ.get("VIT_JAX_DATA", ROOT.parent / "shared/data")
MAIN = (sys.executable, "-m", "vit_jax.main")
PICTURES, PROBED_STEPS = 5000, 20
SIZE = ("--config.data.image_size=32",)
VIEWS = ("--config.data.local_size=16",)
LEJEPA = (
    "--config.objective.name=lejepa", "--config.objective.directions=256",
    "--config.objective.embedding_width=32", "--config.optimizer.ema_decay=None",
    "--config.optimizer.ema_decay_end=None",
)  # fmt: skip
METHODS = {  # name: the words of its command
    "supervised": ("--config=folder",),
    "mae": ("--config=mae:folder",),
    "masked patches": ("--config=mae:folder", "--config.objective.name=masked_patches"),
    "dino": ("--config=dino:folder", *VIEWS),
    "ibot": ("--config=ibot:folder", *VIEWS),
    "selfsup": ("--config=selfsup:folder", *VIEWS),
    "lejepa": ("--config=dino:folder", *VIEWS, *LEJEPA),
}


def make_images(folder: pathlib.Path) -> None:
    """Write the pictures, each enlarged or reduced by a factor between 0.75 and 3 of its own."""
    if folder.exists():
        return
    images = tfds.load("cifar10", split=f"train[:{PICTURES}]", data_dir=DATA)
    factors = np.random.default_rng(0).uniform(0.75, 3, (PICTURES, 2))
    part = folder.with_name("images.part")
    for i, (row, factor) in enumerate(zip(tfds.as_numpy(images), factors, strict=True)):
        place = part / str(row["label"])
        place.mkdir(parents=True, exist_ok=True)
        size = [round(32 * side) for side in factor]
        image = Image.fromarray(row["image"]).resize(size, Image.Resampling.BICUBIC)
        image.save(place / f"{i:04d}.png")
    part.rename(folder)


def call(*words: str) -> float:
    """Run a command of the program; its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*MAIN, *words], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(method: str, seed: int, cpu_s: float, work: pathlib.Path) -> dict:
    """Train, then judge the features on the test set of CIFAR-10."""
    workdir = work / f"{method.replace(' ', '_')}_{seed}"
    how = (*METHODS[method], *SIZE, f"--config.data.data_dir={work / 'images'}")
    both = []
    for steps in (PROBED_STEPS, 3 * PROBED_STEPS):
        both.append(call(*how, f"--config.duration={steps} steps", f"--workdir={workdir}_{steps}"))
    step_s = (both[1] - both[0]) / (2 * PROBED_STEPS)
    steps = int((cpu_s - both[0]) / step_s) + PROBED_STEPS
    used = call(*how, f"--config.duration={steps} steps", f"--config.seed={seed}",
                f"--workdir={workdir}")  # fmt: skip
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    near = [row["near/20nn_top1"] for row in rows if "near/20nn_top1" in row]
    first = rows[0] if rows[0]["step"] == 0 else {}
    words = ["evaluate", f"--init_from={workdir}", "--config=evaluate:knn,probe,cifar10", *SIZE,
             f"--config.data.data_dir={DATA}", "--config.evals.probe.l2=0.01",
             "--config.evals.knn.num_neighbours=20", "--quiet"]  # fmt: skip
    words += [
        f"--config.evals.{name}.{split}_split={split}[:{share}%]"
        for name in ("knn", "probe")
        for split, share in (("train", 10), ("test", 20))
    ]
    judged = subprocess.run(
        [*MAIN, *words], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(judged.stdout)
    return {
        "method": method, "seed": seed, "steps": steps, "cpu_s": round(used),
        "20nn": found["knn/20nn_top1"], "probe": found["probe/top1"],
        "held_out_20nn": " ".join(f"{value:.3f}" for value in near),
        "held_out_pixels": first.get("near/pixels_20nn_top1", ""),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cpu_s", type=float, default=1200)
    flags = parser.parse_args()
    work = flags.workdir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_images(work / "images")
    rows = [*csv.DictReader(TABLE.read_text().splitlines())] if TABLE.exists() else []
    known = {(row["method"], row["seed"]) for row in rows}
    for seed in range(flags.seeds):
        for method in flags.methods.split(","):
            if (method, str(seed)) not in known:
                rows.append(measure(method, seed, flags.cpu_s, work))
                text = io.StringIO(newline="")
                writer = csv.DictWriter(text, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
                write_whole(epath.Path(TABLE), text.getvalue())
                print(rows[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
