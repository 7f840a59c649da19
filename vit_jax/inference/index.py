"""The features of a folder's pictures, kept in a file beside it for the next question."""

import io
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base import files
from vit_jax.data.contract import fingerprint
from vit_jax.data.images.files import INDEX
from vit_jax.data.images.given import find_images, image_files, stamp_of
from vit_jax.inference.outputs import check_size, outputs, without_masked
from vit_jax.inference.parts import facts_of_model
from vit_jax.models.text import unit
from vit_jax.transfer.pretrained import Pretrained

logger = logging.getLogger("vit_jax")


class Index(NamedTuple):
    """Pictures to search among.

    files: n paths.
    x_ND: their features, float32 (n, D), each of length 1; NaN for those that cannot be read.
    """

    files: Sequence[str]
    x_ND: np.ndarray


def open_index(
    pretrained: Pretrained,
    folder: str | os.PathLike,
    *,
    batch_size: int,
    progress: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> Index:
    """The index of the pictures in `folder`, at any depth; or of the picture, if it is a file.

    It is kept beside the folder as FOLDER.DIGEST.index.npz, for each model by the digest of its
    parameters and its preprocessing. Only pictures are read whose size or time of change differs
    from those in that file.

    facts: `facts_of_model` of files, if they are known.

    Raises:
      InputError: there are no pictures, or the model takes images of any size.
    """
    check_size(pretrained)
    found, place = find_images([folder]), os.path.abspath(folder)
    key = fingerprint(facts or facts_of_model(pretrained))
    path = epath.Path(f"{place}.{key[:12]}{INDEX}")
    kept = _read(path)
    stamps = [f"{os.path.relpath(file, place)} {stamp_of(file)}" for file in found]
    new = [i for i, stamp in enumerate(stamps) if stamp not in kept]
    if new:
        features = features_of(pretrained, [found[i] for i in new], batch_size, progress)
        kept |= zip([stamps[i] for i in new], features, strict=True)
    x_ND = np.stack([kept[stamp] for stamp in stamps])
    if new or len(kept) > len(stamps):
        content = io.BytesIO()
        np.savez(content, stamps=np.array(stamps), x_ND=x_ND)
        try:
            files.write_whole(path, content.getvalue())
        except OSError as e:
            logger.warning("%s: the index cannot be kept (%s)", path, e.strerror)
    return Index(found, x_ND)


def features_of(
    pretrained: Pretrained, paths: Sequence[str], batch_size: int, progress: bool = True
) -> np.ndarray:
    """The features (n, D) of pictures, each of length 1; NaN for those that cannot be read."""
    source = image_files(paths, pretrained.spec.reading)
    how = {"batch_size": batch_size, "progress": progress}
    parts = outputs(pretrained, source, what="features", **how)
    return np.concatenate([without_masked(unit(x_BD), batch) for x_BD, batch in parts])


def _read(path: epath.Path) -> dict[str, np.ndarray]:
    """{stamp of a picture: its features} of an index; {} if there is none, or it is damaged."""
    try:
        with np.load(path) as kept:
            return dict(zip(kept["stamps"].tolist(), kept["x_ND"], strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as e:
        logger.warning("%s: not readable (%s); made anew", path, e)
        return {}
