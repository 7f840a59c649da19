"""Measure how squares, own shapes and packed rows treat 500 photographs.

python tools/token_shares.py --data_dir=DIR

DIR holds imagenet_sample/VERSION, 500 photographs, as TFDS prepares them. It prints the table of
docs/how_to/training.md: the share of all pixels that a form stretches by more than a tenth in one
direction, the share that it cuts off, and the share of the places for patches that it leaves empty.
"""

import argparse
from functools import partial

import numpy as np
import tensorflow as tf

from vit_jax.base.errors import InputError
from vit_jax.data import make_source
from vit_jax.data.native import PatchRule

PATCH, MOST, PACK, STRETCHED = 16, 256, (256, 128, 64, 64), 1.1


def read_sides(data_dir: str) -> np.ndarray:
    """Height and width of each photograph, by the header of its file: (n, 2)."""
    source = make_source("imagenet_sample", split="train", image_size=(224, 224), data_dir=data_dir)
    numbers = tf.data.Dataset.range(source.num_examples)
    sides = numbers.map(lambda i: tf.io.extract_jpeg_shape(source.read(i)["image"])[:2])
    return np.array([*sides.as_numpy_iterator()])


def in_own_shape(sides: np.ndarray, pack: tuple[int, ...]) -> tuple[float, float, float]:
    """(share stretched, 0, share empty) with each of the numbers of patches for each picture."""
    rule, area, bent, filled = PatchRule((PATCH, PATCH), MOST), sides.prod(axis=1), 0.0, 0
    for most in pack:
        found = tf.data.Dataset.from_tensor_slices(sides).map(partial(rule.grid_of, most=most))
        grids = np.array([*found.as_numpy_iterator()])
        ratio = (grids[:, 0] * sides[:, 1]) / (grids[:, 1] * sides[:, 0])
        bent += area[np.maximum(ratio, 1 / ratio) > STRETCHED].sum() / area.sum()
        filled += grids.prod(axis=1).sum()
    return bent / len(pack), 0.0, 1 - filled / (len(sides) * sum(pack))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", required=True, help="holds imagenet_sample/VERSION")
    try:
        sides = read_sides(parser.parse_args().data_dir)
    except InputError as error:
        parser.error(f"--data_dir: needs a folder with the TFDS data set imagenet_sample; {error}")
    short, long, area = sides.min(axis=1), sides.max(axis=1), sides.prod(axis=1)
    table = {
        f"a square of {MOST} patches, resized": (
            area[long > STRETCHED * short].sum() / area.sum(), 0.0, 0.0
        ),
        f"a square of {MOST} patches, cropped": (0.0, 1 - (short**2).sum() / area.sum(), 0.0),
        f"`data.max_tokens={MOST}`": in_own_shape(sides, (MOST,)),
        f"the same, `data.pack={','.join(map(str, PACK))}`": in_own_shape(sides, PACK),
    }  # fmt: skip
    print(f"| {len(sides)} photographs | stretched | cut off | places left empty |")
    print("|---|---|---|---|")
    for form, shares in table.items():
        print(f"| {form} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
