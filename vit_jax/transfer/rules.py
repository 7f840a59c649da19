"""How pretrained parameters are fitted to a model: each change is a named rule, and is logged."""

import logging
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.config import InputError, collect_faults
from vit_jax.transfer.resample import resample_grid

logger = logging.getLogger("vit_jax")

_HEAD = r"(head|head_hidden)/.*"


class Pretrained(NamedTuple):
    """What a source holds.

    source: for messages.
    model: as the source has it, unrolled.
    params: {leaf name: float32 array} of that model.
    resize: the convention by which the source's own library resamples position embeddings.
    """

    source: str
    model: nn.Module
    params: dict[str, np.ndarray]
    resize: str


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Unrolled parameters (encoder/layer_0, ...) as scanned ones (encoder/layers, stacked)."""
    encoder = dict(params["encoder"])
    layers = [encoder.pop(f"layer_{i}") for i in range(len(encoder)) if f"layer_{i}" in encoder]
    encoder["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return params | {"encoder": encoder}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Undoes `stack_layers`."""
    encoder = dict(params["encoder"])
    stacked = encoder.pop("layers")
    depth = jax.tree.leaves(stacked)[0].shape[0]
    for i in range(depth):
        encoder[f"layer_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    return params | {"encoder": encoder}


def abstract_params(model: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """{leaf name: shape} of the parameters of a model, which are not made."""
    size = model.image_size or model.patch_size  # where none is given, none matters
    images = jnp.zeros((1, *size, 3))
    return tree.flatten_names(jax.eval_shape(model.init, jax.random.key(0), images)["params"])


def same_head(a: nn.Module, b: nn.Module) -> bool:
    """Whether the heads of two models have the same parameters."""
    return (a.num_classes, a.hidden_head) == (b.num_classes, b.hidden_head)


def check_architecture(pretrained: Pretrained, model: nn.Module) -> None:
    """Raises InputError if `model` computes something else from parameters of the same shapes."""
    faults = []
    for field in ("num_heads", "pool", "pos_embed", "pos_embed_class_token", "gelu"):
        theirs, ours = getattr(pretrained.model, field), getattr(model, field)
        if theirs != ours:
            faults.append(f"model.{field}={ours!r}, and {theirs!r} in the source")
    collect_faults(faults, f"init_from={pretrained.source!r} holds another architecture")


def fit(pretrained: Pretrained, model: nn.Module, *, reset_head: bool) -> dict[str, np.ndarray]:
    """{leaf name: array} for the unrolled form of `model`, without its head if `reset_head`.

    Rules, in this order: the head is dropped (`reset_head`); the grid of `pos_embedding` is
    resampled if `model` has another.

    Raises:
      InputError: one error naming everything that no rule makes fit.
    """
    # Shapes alone matter here, so no layout of activations, which would need a mesh.
    plain = {"scan": False, "remat": "none", "constrain": pretrained.model.constrain}
    wanted = abstract_params(model.clone(**plain))
    found = dict(pretrained.params)
    if reset_head:
        found = {name: leaf for name, leaf in found.items() if not re.fullmatch(_HEAD, name)}
        wanted = {name: leaf for name, leaf in wanted.items() if not re.fullmatch(_HEAD, name)}
    if "pos_embedding" in found and "pos_embedding" in wanted:
        old, new = pretrained.model.grid, model.grid
        prefix = model.num_prefix_positions
        if old != new and pretrained.model.num_prefix_positions == prefix:
            found["pos_embedding"] = resample_grid(
                found["pos_embedding"], old, new, prefix=prefix, convention=pretrained.resize
            )
            logger.info("%s: position embedding resampled (%s) from a grid of %s to %s",
                        pretrained.source, pretrained.resize, old, new)  # fmt: skip
    faults = [f"{name} {leaf.shape}: the model has no such parameter"
              for name, leaf in sorted(found.items()) if name not in wanted]  # fmt: skip
    for name, leaf in sorted(wanted.items()):
        if name not in found:
            faults.append(f"{name} {leaf.shape}: absent from the source")
        elif found[name].shape != leaf.shape:
            faults.append(f"{name}: {found[name].shape} in the source, {leaf.shape} in the model")
    if faults:
        said = (
            f"init_from={pretrained.source!r} does not fit the model (set the fields of "
            "config.model as the source has them):"
        )
        raise InputError("\n  ".join([said, *faults]))
    if reset_head:
        logger.info("%s: the head is initialised anew", pretrained.source)
    return found
