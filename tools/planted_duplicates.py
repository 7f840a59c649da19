"""Planted near duplicates: how many of each kind are found, and how many pairs are wrong.

  python tools/planted_duplicates.py --data_dir=DIR --output=docs/how_to/planted_duplicates.csv

DIR holds the TFDS sets cifar10 and imagenet_sample (500 photographs). 2,000 changed copies of the
photographs, and 2,000 of test pictures of CIFAR-10, are planted among the 60,000 pictures of
CIFAR-10. A copy is found if it is paired with its original; a pair of a copy with anything else
than its original and its other copies is wrong, also if CIFAR-10 has that picture twice. With
--init_from=MODEL the same is counted for the cosine of its features.
"""

import argparse
import csv
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

from vit_jax.curation.duplicates import near_hashes, of_records, pairs_of_features
from vit_jax.curation.looks import look_at
from vit_jax.curation.pictures import Rule, read_pictures
from vit_jax.data import Source, make_source
from vit_jax.data.images.given import open_images

PLANTED = 2000  # of each set
DISTANCES = (8, 16, 24, 31)
SIMILARITIES = (0.9, 0.95, 0.98)
HEAD = ("pictures", "by", "kind", "recall", "found", "copies")


def crop(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Nine tenths of each side, anywhere."""
    width, height = picture.size
    left, top = rng.integers(0, width // 10 + 1), rng.integers(0, height // 10 + 1)
    return picture.crop((left, top, left + round(0.9 * width), top + round(0.9 * height)))


def scale(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    return picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS)


def flip(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.mirror(picture)


def colour(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A fifth brighter, with half the saturation."""
    return ImageEnhance.Color(ImageEnhance.Brightness(picture).enhance(1.2)).enhance(0.5)


def text(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """White letters of a tenth of the height over the lower part."""
    found, size = picture.copy(), max(picture.height // 10, 6)
    place = picture.width // 20, round(0.8 * picture.height)
    ImageDraw.Draw(found).text(place, "www.example.org", "white", ImageFont.load_default(size))
    return found


def border(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Black, a twentieth of the shorter side wide."""
    return ImageOps.expand(picture, max(min(picture.size) // 20, 1), "black")


# A picture of 32 x 32 pixels changes by JPEG's quality only: all copies are JPEGs.
KINDS: dict[str, tuple[Callable[[Image.Image, np.random.Generator], Image.Image], int]] = {
    "crop": (crop, 95),
    "scale": (scale, 95),
    "quality": (lambda picture, rng: picture, 30),
    "flip": (flip, 95),
    "colour": (colour, 95),
    "text": (text, 95),
    "border": (border, 95),
}


def plant(source: Source, rng: np.random.Generator) -> tuple[list[str], list[int], Source]:
    """(kinds, originals, the copies) of PLANTED pictures of a source."""
    names = [*itertools.islice(itertools.cycle(KINDS), PLANTED)]
    originals = [i % source.num_examples for i in range(PLANTED)]
    pictures = {p.record: p.image for p in read_pictures(source, np.unique(originals), Rule())}
    copies = []
    for name, original in zip(names, originals, strict=True):
        change, quality = KINDS[name]
        picture = Image.open(io.BytesIO(pictures[original])).convert("RGB")
        content = io.BytesIO()
        change(picture, rng).save(content, "JPEG", quality=quality)
        copies.append(content.getvalue())
    return names, originals, open_images(copies)


def rows_of(
    pictures: str, by: str, pairs: np.ndarray, names: list[str], family: np.ndarray, first: int
) -> Iterator[tuple[object, ...]]:
    """The rows of HEAD for the copies from `first` on; `family`: the original of each record."""
    last = first + len(names)
    a, b = pairs.T
    mine = (b >= first) & (b < last)
    a, b = a[mine], b[mine]
    right = family[a] == family[b]
    found = np.unique(b[right & (a == family[b])]) - first
    for kind in KINDS:
        places = np.flatnonzero(np.array(names) == kind)
        number = np.isin(places, found).sum()
        yield pictures, by, kind, f"{number / len(places):.3f}", number, len(places)
    yield pictures, by, "all", f"{len(found) / len(names):.3f}", len(found), len(names)
    share = f"{right.mean():.4f}" if len(a) else ""
    yield pictures, by, "right pairs", share, right.sum(), len(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--init_from")
    flags = parser.parse_args()
    where = {"image_size": (32, 32), "data_dir": flags.data_dir, "reader": "offsets"}
    photographs = make_source("imagenet_sample", split="train", **where)
    test = make_source("cifar10", split="test", **where)
    sources, rng = (
        [photographs, test, make_source("cifar10", split="train", **where)],
        (np.random.default_rng(0)),
    )
    planted = {"photographs": plant(photographs, rng), "CIFAR-10": plant(test, rng)}
    sources += [copies for _, _, copies in planted.values()]
    first_ids = np.cumsum([0, *(source.num_examples for source in sources)])
    family = np.arange(first_ids[-1])
    for k, (_, originals, _) in enumerate(planted.values()):
        family[first_ids[3 + k] : first_ids[4 + k]] = first_ids[k] + np.array(originals)
    hashes = np.concatenate([look_at(s, 0, s.num_examples).hashes for s in sources])
    found = of_records(near_hashes(hashes, max(DISTANCES)))
    by = {f"{d} bits": found[found[:, 2] <= d, :2] for d in DISTANCES}
    if flags.init_from:
        by |= by_features(flags.init_from, sources)
    with flags.output.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(HEAD)
        for k, (name, (names, _, _)) in enumerate(planted.items()):
            for how, pairs in by.items():
                rows.writerows(rows_of(name, how, pairs, names, family, first_ids[3 + k]))
        for how, pairs in by.items():
            crowd = (pairs < first_ids[3]).all(1).sum()
            rows.writerow(("60,500 without copies", how, "pairs", "", crowd, ""))


def by_features(model: str, sources: list[Source]) -> dict[str, np.ndarray]:
    """The pairs by the cosine of a model's features."""
    from vit_jax import transfer
    from vit_jax.inference.outputs import outputs

    pretrained = transfer.read_pretrained(model)
    how = {"what": "features", "batch_size": 256, "progress": False}
    x_ND = np.concatenate([x for s in sources for x, _ in outputs(pretrained, s, **how)])
    pairs, cosine = pairs_of_features(x_ND, min(SIMILARITIES))
    return {f"cosine {least}": pairs[cosine >= least] for least in SIMILARITIES}


if __name__ == "__main__":
    main()
