"""Weights from elsewhere into this project's models. Foreign names stop here.

One file and one line in FORMATS for each kind of source.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax import tree
from vit_jax.config import InputError
from vit_jax.files import absolute
from vit_jax.models import check_fields
from vit_jax.transfer import npz, rules, workdir
from vit_jax.transfer.rules import Pretrained

logger = logging.getLogger("vit_jax")

# (whether a path is of this format, its reader); the first that says yes reads.
FORMATS = {
    "workdir": (workdir.recognises, workdir.read),
    "npz": (npz.recognises, npz.read),
}


def read_pretrained(source: str | os.PathLike) -> Pretrained:
    """The model and parameters that `source` holds.

    Args:
      source: a workdir of this project (its newest valid checkpoint), or a published `.npz`.

    Raises:
      InputError: if there is nothing, or nothing that can be read.
    """
    path = absolute(source)
    if not path.exists():
        raise InputError(f"init_from={str(source)!r}: no such file or directory")
    for recognises, read in FORMATS.values():
        if recognises(path):
            return read(path)
    raise InputError(
        f"init_from={str(source)!r}: not a source of a known format; known: a workdir (with "
        "config.json and checkpoints/), a .npz file"
    )


def load_pretrained(
    source: str | os.PathLike,
    num_classes: int | None = None,
    image_size: int | Sequence[int] | None = None,
    **fields: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """A pretrained model, whose architecture is inferred from the source.

        model, variables = vit_jax.load_pretrained("ViT-B_16.npz", image_size=(384, 256))
        logits = model.apply(variables, images)  # (B, 384, 256, 3), in the model's value range

    Args:
      source: see `read_pretrained`.
      num_classes: replaces the whole head by a zero-initialised linear one for that many classes;
        None keeps the head.
      image_size: resamples the position embedding to that size; None keeps it. Where the source
        tells no size (fixed positions) and None is given, the model takes images of any size.
      **fields: of the model's module, e.g. `scan`, `remat`, `dtype`, `dropout`.

    Raises:
      InputError: one error naming everything that does not fit.
    """
    pretrained = read_pretrained(source)
    changes = dict(fields)
    if num_classes is not None:
        changes |= {"num_classes": num_classes, "hidden_head": False}
    if image_size is not None:
        changes["image_size"] = image_size
    model = pretrained.model.clone(**check_fields(type(pretrained.model), changes, str(source)))
    named = rules.fit(pretrained, model, reset_head=num_classes is not None)
    if num_classes is not None:
        named["head/kernel"] = jnp.zeros((model.width, num_classes))
        named["head/bias"] = jnp.zeros((num_classes,))
    params = tree.unflatten_names(named)
    return model, {"params": rules.stack_layers(params) if model.scan else params}


def init_params(pretrained: Pretrained, model: nn.Module) -> dict[str, Any]:
    """{leaf name in `model`: array} of all that `model` takes over from what a source holds.

    The head is left out, to be initialised anew, if it does not fit: other classes, or with a
    hidden layer here and without there.

    Raises:
      InputError: one error naming everything else that does not fit.
    """
    rules.check_architecture(pretrained, model)
    named = rules.fit(pretrained, model, reset_head=not rules.same_head(pretrained.model, model))
    params = tree.unflatten_names(named)
    return tree.flatten_names(rules.stack_layers(params) if model.scan else params)
