"""The pictures of a folder that are most like others, by a model's features."""

import io
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from PIL import Image, ImageDraw, ImageOps

from vit_jax.base import files
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import Reading, to_known_format, to_pixels
from vit_jax.data.images.given import image_files
from vit_jax.inference.predict import outputs, why_unread, without_masked
from vit_jax.models.text import unit
from vit_jax.transfer.pretrained import Pretrained

_SIDE, _TEXT = 128, 14  # pixels of a picture of the sheet, and of the line below it


def nearest(
    pretrained: Pretrained, paths: Sequence[str], among: Sequence[str], *, top: int, batch_size: int
) -> Iterator[dict[str, Any]]:
    """{"file": ..., "neighbours": [{"file", "similarity"}, ...]} for each of `paths`.

    The `top` most similar files of `among` come first to last; a file is no neighbour of itself,
    and one that cannot be read is none. Similarity is the cosine of the angle between features. For
    a path that cannot be read: {"file": ..., "error": ...}.
    """

    def features(some: Sequence[str]) -> Iterator[np.ndarray]:
        source = image_files(some, pretrained.spec.reading)
        for x_BD, batch in outputs(pretrained, source, what="features", batch_size=batch_size):
            yield without_masked(unit(x_BD), batch)

    index_ND = np.concatenate([*features(among)])
    places = {os.path.realpath(path): i for i, path in enumerate(among)}
    rows = itertools.chain.from_iterable(x_BD @ index_ND.T for x_BD in features(paths))
    for path, similarity_N in zip(paths, rows, strict=True):
        if np.isnan(similarity_N).all():
            source = image_files([path], pretrained.spec.reading)
            yield {"file": path, "error": why_unread(pretrained, source, 0)}
            continue
        if (own := places.get(os.path.realpath(path))) is not None:
            similarity_N[own] = np.nan
        order = np.argsort(-similarity_N, kind="stable")  # NaN comes last
        best = [i for i in order[:top] if not np.isnan(similarity_N[i])]
        yield {"file": path, "neighbours": [
            {"file": among[i], "similarity": float(similarity_N[i])} for i in best
        ]}  # fmt: skip


def write_sheet(path: epath.Path, rows: Sequence[Mapping[str, Any]], reading: Reading) -> None:
    """Write a PNG with a line of pictures for each row of `nearest`: the one asked for, its own.

    `reading`: of the model.
    """
    lines = [row for row in rows if "neighbours" in row]
    columns = 1 + max((len(row["neighbours"]) for row in lines), default=0)
    step = _SIDE + 4
    sheet = Image.new("RGB", (columns * step + 12, len(lines) * (step + _TEXT)), "white")
    for i, row in enumerate(lines):
        shown = [(row["file"], os.path.basename(row["file"]))]
        shown += [(one["file"], f"{one['similarity']:.3f}") for one in row["neighbours"]]
        for j, (file, text) in enumerate(shown):
            sheet.paste(_tile(file, text, reading), (j * step + 12 * (j > 0), i * (step + _TEXT)))
    content = io.BytesIO()
    sheet.save(content, "png")
    files.write_whole(path, content.getvalue())


def _tile(file: str, text: str, reading: Reading) -> Image.Image:
    """A picture as the model sees it, and the beginning of a text below it."""
    known = to_known_format(pathlib.Path(file).read_bytes(), reading._replace(channels=3))
    upright = Image.fromarray(to_pixels(tf.constant(known)).numpy())
    tile = Image.new("RGB", (_SIDE, _SIDE + _TEXT), "white")
    tile.paste(ImageOps.pad(upright, (_SIDE, _SIDE), color="white"))
    ImageDraw.Draw(tile).text((2, _SIDE + 1), text, fill="black")
    return tile
