"""The pictures of a folder that are most like others, or like texts, by a model's features."""

import io
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from PIL import Image, ImageDraw, ImageOps

from vit_jax import transfer
from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import Reading, to_known_format, to_pixels
from vit_jax.data.images.given import find_images, image_files
from vit_jax.inference.index import Index, features_of, open_index
from vit_jax.inference.outputs import why_unread
from vit_jax.inference.predict import Predictor
from vit_jax.models.text import unit
from vit_jax.models.zero_shot import embed_texts, need_text_side
from vit_jax.transfer.pretrained import Pretrained

_SIDE, _TEXT = 128, 14  # pixels of a picture of the sheet, and of the line below it


def search(
    folder: str | os.PathLike,
    source: "epath.PathLike | Pretrained | Predictor",
    *,
    texts: str | Sequence[str] = (),
    images: Any = (),
    top: int = 5,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Search the pictures of a folder by texts and by pictures.

        vit_jax.search("IMAGES", "runs/words", texts="a red car")[0]["neighbours"][0]["file"]

    The folder's features are kept beside it, see `index.open_index`.

    Args:
      folder: searched at any depth.
      source: a source of `load_pretrained`, or a model from `read_pretrained` or, for many
        questions, `load_predictor`; texts need one with a text tower.
      texts, images: one or a list; images are paths of files and folders.
      top: number of pictures to find for each.
      batch_size: images at once, over all devices.

    Returns:
      First for each text {"text", "neighbours"}, then for each image {"file", "neighbours"}, or its
      "error"; neighbours are [{"file", "similarity"}], as in `nearest`.

    Raises:
      InputError: a ValueError; names the argument.
    """
    faults = Faults()
    faults.need_positive("top", top)
    collect_faults(faults)
    loaded = source if isinstance(source, Predictor) else None
    of_source = source.pretrained if isinstance(source, Predictor) else source
    pretrained = transfer.read_pretrained(of_source)
    texts = [texts] if isinstance(texts, str) else texts
    paths = [images] if isinstance(images, str | os.PathLike) else images
    if not (texts or paths):
        raise InputError("texts=(), images=(): nothing to search by; give texts, images or both")
    how: dict[str, Any] = {"top": top, "batch_size": batch_size, "progress": False}
    how["facts"] = loaded and loaded.facts
    return [*nearest(pretrained, folder, texts, find_images(paths) if paths else [], **how)]


def nearest(
    pretrained: Pretrained,
    folder: str | os.PathLike,
    texts: Sequence[str],
    paths: Sequence[str],
    *,
    top: int,
    batch_size: int,
    progress: bool = True,
    facts: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of `search`; `facts`: see `open_index`.

    The `top` most similar files of the folder come first to last; a file is no neighbour of itself,
    and one that cannot be read is none. Similarity is the cosine of the angle between features.
    """
    side, vectors_KE = None, np.zeros((0, 0))
    if texts:  # refused before pictures are read
        side = need_text_side(pretrained.read_text_side, f"text: {pretrained.source}")
        tokenizer, faults = side.read_tokenizer(), Faults()
        for text in texts:
            why = tokenizer.find_fault(text)
            faults.need(not why, f"text: {text!r}: {why}")
        collect_faults(faults)
        vectors_KE = embed_texts(side, tokenizer(texts))
    how: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    index = open_index(pretrained, folder, **how, facts=facts)
    to_common = side and side.params.get("image_head/kernel")
    x_NE = index.x_ND if to_common is None else unit(index.x_ND @ to_common)
    for text, x_E in zip(texts, vectors_KE, strict=True):
        yield {"text": text, "neighbours": _best(x_NE @ x_E, index, top)}
    x_MD = features_of(pretrained, paths, batch_size, progress) if paths else ()
    places = {os.path.realpath(path): i for i, path in enumerate(index.files)}
    for path, x_D in zip(paths, x_MD, strict=True):
        if np.isnan(x_D).all():
            source = image_files([path], pretrained.spec.reading)
            yield {"file": path, "error": why_unread(pretrained, source, 0)}
            continue
        similarity_N = index.x_ND @ x_D
        if (own := places.get(os.path.realpath(path))) is not None:
            similarity_N[own] = np.nan
        yield {"file": path, "neighbours": _best(similarity_N, index, top)}


def _best(similarity_N: np.ndarray, index: Index, top: int) -> list[dict[str, Any]]:
    order = np.argsort(-similarity_N, kind="stable")  # NaN comes last
    best = [i for i in order[:top] if not np.isnan(similarity_N[i])]
    return [{"file": index.files[i], "similarity": float(similarity_N[i])} for i in best]


def write_sheet(path: epath.Path, rows: Sequence[Mapping[str, Any]], reading: Reading) -> None:
    """Write a PNG with a line of pictures for each row of `nearest`: the one asked for, its own.

    `reading`: of the model.

    Raises: InputError if every row is an error.
    """
    lines = [row for row in rows if "neighbours" in row]
    if not lines:
        raise InputError("--sheet: there is nothing to draw, as none of the images can be read")
    columns = 1 + max(len(row["neighbours"]) for row in lines)
    step = _SIDE + 4
    sheet = Image.new("RGB", (columns * step + 12, len(lines) * (step + _TEXT)), "white")
    for i, row in enumerate(lines):
        first = row.get("file")
        shown = [(first, os.path.basename(first) if first else row["text"])]
        shown += [(one["file"], f"{one['similarity']:.3f}") for one in row["neighbours"]]
        for j, (file, text) in enumerate(shown):
            sheet.paste(_tile(file, text, reading), (j * step + 12 * (j > 0), i * (step + _TEXT)))
    content = io.BytesIO()
    sheet.save(content, "png")
    files.write_whole(path, content.getvalue())


def _tile(file: str | None, text: str, reading: Reading) -> Image.Image:
    """A picture as the model sees it, or none, and the beginning of a text below it."""
    tile = Image.new("RGB", (_SIDE, _SIDE + _TEXT), "white")
    if file is not None:
        known = to_known_format(pathlib.Path(file).read_bytes(), reading._replace(channels=3))
        upright = Image.fromarray(to_pixels(tf.constant(known)).numpy())
        tile.paste(ImageOps.pad(upright, (_SIDE, _SIDE), color="white"))
    ImageDraw.Draw(tile).text((2, _SIDE + 1), text, fill="black")
    return tile
