"""Own shapes beside squares of as many patches: docs/explanation/native_or_square.csv.

python tools/native_or_square.py WORKDIR [--seeds=3]

Two tasks of made pictures. The class of "ratio" is the ratio of a picture's sides; its texture is a
grid of 4 x 4 random colours, which fills every picture. The class of "print" is the digit that
covers a page of 1:4 or 4:1, handwritten and 8 pixels high; training and test show other hands. All
runs have the same model, 64 patches of 8 pixels and the same steps, and nothing was tuned. Rows
that the CSV has are not made again.
"""

import argparse
import itertools
import pathlib

import numpy as np
from measured_runs import ROOT, add_row, has_row
from PIL import Image
from sklearn.datasets import load_digits

import vit_jax

TABLE = ROOT / "docs/explanation/native_or_square.csv"
RATIOS, AREA, DIGIT, PAGE, STEPS = (1 / 4, 1 / 2, 2, 4), 64 * 64, 8, (32, 128), 300
SPLITS = {"train": 2000, "test": 500}
ARMS = {
    "own shape": ("folder:native", "decode"),
    "squashed": ("folder", "decode|resize"),
    "cropped": ("folder", "decode|resize_small(antialias=True)|central_crop"),
}
MODEL = {"width": 64, "depth": 3, "mlp_dim": 256, "num_heads": 4, "dropout": 0.0}


def draw_ratio(rng: np.random.Generator, label: int) -> np.ndarray:
    """A picture whose sides have the ratio RATIOS[label], of AREA or up to twice that."""
    height = (AREA * rng.uniform(1, 2) * RATIOS[label]) ** 0.5
    size = round(height / RATIOS[label]), round(height)
    texture = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    return np.asarray(texture.resize(size, Image.Resampling.BILINEAR))


def draw_page(rng: np.random.Generator, digits: np.ndarray) -> np.ndarray:
    """A wide or tall page that some of `digits`, each (8, 8) from 0 to 16, fill from an offset."""
    page = np.zeros(PAGE if rng.random() < 0.5 else PAGE[::-1], np.uint8)
    above, left = rng.integers(0, DIGIT // 2, 2)
    for y, x in itertools.product(range(above, page.shape[0] - DIGIT + 1, DIGIT),
                                  range(left, page.shape[1] - DIGIT + 1, DIGIT)):  # fmt: skip
        digit = digits[rng.integers(len(digits))]
        page[y : y + DIGIT, x : x + DIGIT] = np.uint8(np.minimum(digit * 16, 255))
    return np.repeat(page[..., None], 3, axis=2)


def make_data(task: str, seed: int) -> dict:
    """Pictures and labels of each split; the digits of a test page are no training page's."""
    found: dict = {}
    digits, of_digits = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8)
    for number, (split, pictures) in enumerate(SPLITS.items()):
        rng = np.random.default_rng((seed, number))
        labels = rng.integers(0, len(RATIOS) if task == "ratio" else 10, pictures)
        if task == "ratio":
            images = [draw_ratio(rng, label) for label in labels]
        else:
            hands = np.arange(len(digits)) % 5 == 0  # a fifth is for tests
            own = hands == (split == "test")
            images = [draw_page(rng, digits[own & (of_digits == label)]) for label in labels]
        found[split] = (images, labels)
    return found


def run(task: str, arm: str, seed: int, workdir: pathlib.Path) -> dict:
    """Train once; accuracy on test in per cent."""
    config, ops = ARMS[arm]
    changes = {"seed": seed, "duration": f"{STEPS} steps", "evals.val": None}
    changes |= {"data.ops": ops, "evals.test.ops": ops, "evals.test.split": "test"}
    changes |= {f"model.{key}": value for key, value in MODEL.items()}
    summary = vit_jax.train(config, workdir, changes, data=make_data(task, seed))
    return {"top1": round(100 * summary["test/top1"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    args = parser.parse_args()
    for arm, seed, task in itertools.product(ARMS, range(args.seeds), ("ratio", "print")):
        place = {"task": task, "form": arm, "seed": str(seed), "steps": str(STEPS)}
        if not has_row(TABLE, place):
            workdir = args.workdir / f"{task}_{arm}_{seed}".replace(" ", "_")
            add_row(TABLE, place | run(task, arm, seed, workdir))


if __name__ == "__main__":
    main()
