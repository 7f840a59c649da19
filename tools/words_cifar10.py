"""Trains `words:cifar10` and measures it by words: docs/explanation/words_cifar10.csv.

python tools/words_cifar10.py WORKDIR --data_dir=DIR [--seeds=3] [--steps=3600] [--runs sigmoid]

Captions are made from class names of nine tenths of train, and from known changes of a third of
these pictures. A run of 3,600 steps should take the CPU seconds of `cifar10:fast`; each reads the
test split once. Runs that the CSV has are not run again; one that was stopped begins anew.
"""

import argparse
import itertools
import pathlib

import numpy as np
import tensorflow_datasets as tfds
from measured_runs import ROOT, add_row, has_row, train

from vit_jax.data.words import names_in_words

TABLE = ROOT / "docs/explanation/words_cifar10.csv"
PROMPTS = ("this photo shows {}", "here is a picture of {}", "one can see {} here")
CHANGES = ("red {}", "green {}", "blue {}", "{} upside down", "{} at the top", "{} at the bottom",
           "{} shown twice", "{} shown four times")  # fmt: skip
# {run: (its loss, its training file, the most seeds)}
RUNS = {
    "sigmoid": ("sigmoid", "captions", 3),
    "softmax": ("softmax", "captions", 3),
    "sigmoid, shuffled captions": ("sigmoid", "shuffled", 1),
    "softmax, shuffled captions": ("softmax", "shuffled", 1),
}


def is_left_out(label: int, change: int) -> bool:
    """Whether no training picture of class `label`, 0 to 9, has that change: two a change."""
    return label % 5 == change % 5


def change_picture(image: np.ndarray, change: int) -> np.ndarray:
    """A copy of `image`, uint8 (32, 32, 3), after the change of that number in CHANGES."""
    found, small = np.zeros_like(image), image.reshape(16, 2, 16, 2, 3).mean((1, 3)).round()
    match change:
        case 0 | 1 | 2:
            found[...] = image // 2
            found[..., change] += 127
        case 3:
            found[...] = image[::-1]
        case 4 | 5:
            found[16 * (change - 4) :][:16, 8:24] = small
        case 6:
            found[8:24] = np.tile(small, (1, 2, 1))
        case 7:
            found[...] = np.tile(small, (2, 2, 1))
    return found


def make_data(data_dir: pathlib.Path, work: pathlib.Path) -> None:
    """Write captions.npz and shuffled.npz to train on, and pairs.npz: test's left-out pairs."""
    read = {}
    for split in ("train[:90%]", "test"):
        builder = tfds.builder("cifar10", data_dir=data_dir)
        read[split] = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    names, rng = builder.info.features["label"].names, np.random.default_rng(0)
    images, labels = read["train[:90%]"]["image"], read["train[:90%]"]["label"]
    pictures, phrases = [*images], [names[label] for label in labels]
    for i in rng.choice(len(images), len(images) // 3, replace=False):
        change = rng.choice([c for c in range(len(CHANGES)) if not is_left_out(labels[i], c)])
        pictures.append(change_picture(images[i], change))
        phrases.append(CHANGES[change].format(names[labels[i]]))
    words = [word for (word,) in names_in_words(phrases, "caption")]
    captions = np.array([[prompt.format(word) for prompt in PROMPTS] for word in words])
    for name, rows in {"captions": captions, "shuffled": rng.permutation(captions)}.items():
        np.savez(work / f"{name}.npz", train_images=np.stack(pictures), train_captions=rows)

    pairs = [(label, c) for label in range(len(names)) for c in range(len(CHANGES))]
    images, labels = read["test"]["image"], read["test"]["label"]
    shown = [(i, change) for i in range(len(images))
             for change in range(len(CHANGES)) if is_left_out(labels[i], change)]  # fmt: skip
    np.savez(
        work / "pairs.npz",
        test_images=np.stack([change_picture(images[i], change) for i, change in shown]),
        test_labels=np.array([pairs.index((labels[i], change)) for i, change in shown]),
        class_names=np.array([CHANGES[change].format(names[label]) for label, change in pairs]),
    )


def run(flags: list[str], workdir: pathlib.Path) -> dict:
    """Train once: CPU seconds of the whole process, and accuracies in per cent."""
    summary, cpu_s = train(["--config=words:cifar10", *flags], workdir)
    accuracy = {name: 100 * summary[f"{name}/top1"] for name in ("test", "pairs")}
    return {"cpu_s": cpu_s, **accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--data_dir", required=True, help="holds cifar10/VERSION")
    parser.add_argument("--steps", type=int, default=3600, help="of a run; fewer for a first look")
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=RUNS)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    args = parser.parse_args()
    work, data_dir = args.workdir.resolve(), pathlib.Path(args.data_dir).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "pairs.npz").exists():  # the last of the files
        make_data(data_dir, work)
    for seed, name in itertools.product(range(args.seeds), args.runs):
        loss, captions, most = RUNS[name]
        place = {"run": name, "seed": str(seed), "steps": str(args.steps)}
        if seed >= most or has_row(TABLE, place):
            continue
        keys = {"seed": seed, "duration": f"{args.steps} steps", "objective.loss": loss,
                "data.data_dir": work / f"{captions}.npz",
                "evals.pairs.data_dir": work / "pairs.npz",
                "evals.test.data_dir": data_dir}  # fmt: skip
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        workdir = work / "_".join(place.values()).replace(" ", "_")
        add_row(TABLE, place | run(flags, workdir))


if __name__ == "__main__":
    main()
