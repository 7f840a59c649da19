"""Trains without labels on 5,000 small pictures: docs/explanation/selfsup_cifar10.csv.

python tools/selfsup_cifar10.py WORKDIR --data_dir=DIR [--seeds=3] [--runs MAE] [--judge=held_out]

The pictures are CIFAR-10's train[:10%], as JPEGs of 32 to 96 pixels. Each run is a shipped recipe,
with as many steps as about 1,200 CPU seconds of two cores take. It is judged ten times, by 20
nearest neighbours among these pictures, of 2,000 images of the test split, and in the end by a
linear probe, outside its seconds. Choices are made with --judge=held_out, which judges by 2,000
images of train[96%:]. Runs that the CSV has are not run again; one that was stopped begins anew.
"""

import itertools
import json
import pathlib
import shutil

import numpy as np
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row, has_row, make_parser, train
from PIL import Image

import vit_jax

TABLE = ROOT / "docs/explanation/selfsup_cifar10.csv"
SPLITS = {"test": "test[:20%]", "held_out": "train[96%:]"}
OPS = "decode|resize_small(antialias=True)|central_crop"
# {run: its config, and the steps of about 1,200 CPU seconds}
RUNS = {
    "MAE": ("mae:folder", 3000),
    "DINO": ("dino:folder", 320),
    "iBOT": ("ibot:folder", 300),
    "LeJEPA": ("lejepa:folder", 1000),
}


def make_pictures(data_dir: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the pictures to folder/CLASS/NUMBER.jpg, each enlarged to a random side."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    builder = tfds.builder("cifar10", data_dir=data_dir)
    names, rng = builder.info.features["label"].names, np.random.default_rng(0)
    for i, row in enumerate(tfds.as_numpy(builder.as_dataset(split="train[:10%]"))):
        side, place = int(rng.integers(32, 97)), part / names[row["label"]]
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(row["image"]).resize((side, side), Image.Resampling.BICUBIC)
        picture.save(place / f"{i:04}.jpg", quality=95)
    part.rename(folder)


def run(name: str, seed: int, judge: str, data_dir: pathlib.Path, work: pathlib.Path) -> dict:
    """Train once: CPU seconds of the whole process, training's PFLOP, and accuracies in per cent.

    `random` and `pixels` are judged before the first step; `best` is of the ten evaluations.
    """
    config, steps = RUNS[name]
    near = {"data_name": "cifar10", "data_dir": data_dir, "ops": OPS, "every": "10 %",
            "train_split": "train[:10%]", "test_split": SPLITS[judge]}  # fmt: skip
    flags = [f"--config.evals.near.{key}={value}" for key, value in near.items()]
    flags += [f"--config.data.data_dir={work / 'pictures'}", f"--config.seed={seed}"]
    workdir = work / f"{name}_{seed}_{judge}"
    given = [f"--config={config}", *flags, f"--config.duration={steps} steps"]
    summary, cpu_s = train(given, workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "near/20nn_top1" in row]
    scores = [100 * row["near/20nn_top1"] for row in rows]
    probe = vit_jax.evaluate(workdir, "evaluate:probe,cifar10", {
        "data.data_dir": str(data_dir), "evals.probe.train_split": "train[:10%]",
        "evals.probe.test_split": SPLITS[judge], "evals.probe.l2": (0.01,),
    })  # fmt: skip
    found = {
        "cpu_s": cpu_s, "pflop": 1e3 * summary["exaflops"], "random": scores[0],
        "pixels": 100 * rows[0]["near/pixels_20nn_top1"], "best": max(scores[1:]),
        "last": scores[-1], "probe": 100 * probe["probe/top1"],
    }  # fmt: skip
    return {"steps": steps} | {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=RUNS)
    parser.add_argument("--judge", default="test", choices=SPLITS)
    args = parser.parse_args()
    work, data_dir = args.workdir, args.data_dir
    if not (work / "pictures").exists():
        make_pictures(data_dir, work / "pictures")
    for seed, name in itertools.product(range(args.seeds), args.runs):
        place = {"judge": args.judge, "run": name, "seed": str(seed)}
        if not has_row(TABLE, place):
            add_row(TABLE, place | run(name, seed, args.judge, data_dir, work))


if __name__ == "__main__":
    main()
