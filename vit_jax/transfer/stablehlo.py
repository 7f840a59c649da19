"""Models as programs of `jax.export`, parameters included: written, but not read again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import write_whole
from vit_jax.models.contract import about
from vit_jax.transfer.pretrained import Pretrained

PLATFORMS = ("cpu", "cuda", "tpu")
_MOST_BYTES = 2**31 - 2**20  # maximum size of a serialised program, whose lengths have 31 bits


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write the program images (b, H, W, C) -> logits (b, classes), for any b."""
    model, variables = pretrained.model, pretrained.variables
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(variables))
    if num_bytes > _MOST_BYTES:
        raise InputError(
            f"--format=stablehlo: the parameters have {num_bytes / 2**30:.1f} GiB, but a "
            "serialised program holds at most 2; export as timm, hf or npz"
        )
    size = model.image_size or pretrained.spec.image_size
    if size is None:
        raise InputError(
            f"{pretrained.source}: takes images of any size; choose the size of the exported "
            "program with --image_size"
        )
    batch = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((*batch, *size, about(model).channels), jnp.float32)
    program = jax.jit(lambda images: model.apply(variables, images))
    exported = jax.export.export(program, platforms=PLATFORMS)(images)
    write_whole(path, bytes(exported.serialize()))
    return [path.name]


def open_program(path: epath.Path) -> Callable[[np.ndarray], Any]:
    """The function images -> logits in a file of `write`."""
    return jax.export.deserialize(bytearray(path.read_bytes())).call
