"""Images of several shapes as one padded batch."""

import jax.numpy as jnp
import numpy as np

from vit_jax.base.pictures import Pictures
from vit_jax.models.patches import extract_patches

MOST, PATCH = 11, 4  # patches of a picture, and pixels of a side of one


def as_pictures(images, padding=0.0):
    """The images, each (1, H, W, 3), as one batch; `padding` fills the rest."""
    patches = np.full((len(images), MOST, PATCH * PATCH * 3), padding, np.float32)
    grids = [(image.shape[1] // PATCH, image.shape[2] // PATCH) for image in images]
    for row, image in zip(patches, images, strict=True):
        cut = extract_patches(image, (PATCH, PATCH))[0]
        row[: len(cut)] = cut
    shape = (len(images), MOST, PATCH, PATCH, 3)
    return Pictures(jnp.asarray(patches.reshape(shape)), jnp.asarray(grids, jnp.int32))
