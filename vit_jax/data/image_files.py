"""Images by their paths as a source: no classes, every label is 0."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from vit_jax.data.host_tf import tf
from vit_jax.data.image_folder import EXTENSIONS
from vit_jax.data.sources import Source, same_fingerprints
from vit_jax.errors import InputError, collect_faults


def find_images(paths: Sequence[str | os.PathLike]) -> list[str]:
    """The files among `paths`, and the JPEG and PNG files at any depth below its folders, sorted.

    Raises: InputError naming every path where there is nothing.
    """
    found, faults = [], []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            below = sorted(
                os.path.join(parent, name)
                for parent, _, names in os.walk(path, followlinks=True)
                for name in names
                if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
            )
            found += below
            if not below:
                faults.append(f"{path}: holds no file ending in {', '.join(EXTENSIONS)}")
        elif path.exists():
            found.append(os.fspath(path))
        else:
            faults.append(f"{path}: no such file or folder")
    collect_faults(faults)
    if not found:
        raise InputError("no images; give files or folders")
    return found


def image_files(paths: Sequence[str]) -> Source:
    """The files `paths` in their order, read when their record is asked for."""
    paths_tensor = tf.constant(list(paths))

    def read(record_id):
        return {
            "image": tf.io.read_file(tf.gather(paths_tensor, record_id)),
            "label": tf.zeros([], tf.int32),
            "mask": tf.ones([]),
        }

    return Source(
        name="files",
        split="all",
        num_examples=len(paths),
        num_classes=1,
        class_names=None,
        image_shape=None,
        fingerprints=same_fingerprints("files", list(paths)),
        read=read,
        record_name=lambda record: paths[record],
        encoded=True,
    )
