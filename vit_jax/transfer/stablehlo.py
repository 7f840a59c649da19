"""Programs of `jax.export`, for any number of images: written and run, but not read as models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np
from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.transfer.program import Program

PLATFORMS = ("cpu", "cuda", "tpu")
PACKAGES = ("jax",)
DEVICE = None
PRECISIONS = ("float32",)
SPLITS = False


def convert(path: epath.Path, program: Program) -> tuple[list[str], dict[str, Any]]:
    """Write the program; return the names of the files, and facts for the receipt."""
    exported = jax.export.export(jax.jit(program.call), platforms=PLATFORMS)(program.inputs)
    write_whole(path, bytes(exported.serialize()))
    return [path.name], {}


def load(path: epath.Path) -> Callable[[np.ndarray], Any]:
    """The function images -> outputs of a file of `convert`."""
    return jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call)
