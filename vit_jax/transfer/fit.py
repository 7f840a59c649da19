"""Fits pretrained parameters to a model; each change is a named rule and is logged."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from vit_jax.errors import InputError
from vit_jax.models.batch_norm import BATCH_STATS
from vit_jax.models.contract import CONSTANTS, about, field_names, with_known
from vit_jax.models.forms import PLAIN, unconstrained
from vit_jax.models.t2t import T2TViT
from vit_jax.transfer.common import POSITIONS, refuse
from vit_jax.transfer.merge import ADAPTER, is_of_head_norm
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.resample import (
    adapt_kernel,
    resample_axis,
    resample_grid,
    resample_offsets,
    resample_patches,
)
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

logger = logging.getLogger("vit_jax")

_HEAD = r"(head|head_hidden|head_distillation)/.*"
_OUTPUTS = re.compile(r"(head|head_distillation)/(kernel|bias)")  # the last axis is the classes

# Kernels that may see the pixels; the first that a model has does.
_FIRST_KERNELS = ("stem/conv_root/kernel", "trunk/conv_root/kernel", "embedding/kernel")

_ARCHITECTURE = (
    "width", "depth", "mlp_dim", "num_heads", "patch_size", "stages", "stem_width", "pool",
    "pos_embed", "pos_embed_class_token", "gelu", "norm", "norm_eps", "parallel", "qk_norm",
    "qkv_bias", "norm_pooled", "width_factor", "depth_factor", "token_module", "token_width",
)  # fmt: skip


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Convert unrolled parameters (encoder/layer_0, ...) to scanned ones (encoder/layers)."""
    encoder = dict(params["encoder"])
    layers = [encoder.pop(f"layer_{i}") for i in range(len(encoder)) if f"layer_{i}" in encoder]
    encoder["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return params | {"encoder": encoder}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Convert scanned parameters to unrolled ones: the inverse of `stack_layers`."""
    encoder = dict(params["encoder"])
    stacked = encoder.pop("layers")
    depth = jax.tree.leaves(stacked)[0].shape[0]
    for i in range(depth):
        encoder[f"layer_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    return params | {"encoder": encoder}


def split_leaves(
    leaves: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameters, model state) of leaves by name; the latter start with their collection."""
    is_state = {name: name.startswith((f"{BATCH_STATS}/", f"{CONSTANTS}/")) for name in leaves}
    params = {name: leaf for name, leaf in leaves.items() if not is_state[name]}
    return params, {name: leaf for name, leaf in leaves.items() if is_state[name]}


def is_of_head(name: str) -> bool:
    """Whether the leaf called `name` belongs to the head, which is replaced for other classes."""
    return re.fullmatch(_HEAD, name) is not None


def reorder_head(params: Mapping[str, np.ndarray], places: Sequence[int]) -> dict[str, np.ndarray]:
    """`params` of a model whose output i is the output `places[i]` of the model of `params`."""
    return {
        name: leaf[..., places] if _OUTPUTS.fullmatch(name) else leaf
        for name, leaf in params.items()
    }


def check_architecture(pretrained: Pretrained, model: nn.Module) -> None:
    """Raise InputError, with the flags to set, if the architecture of `model` differs."""
    faults = []
    if type(pretrained.model) is not type(model):
        families = type(model).__name__, type(pretrained.model).__name__
        faults.append("model.name: a {}, but a {} in the source".format(*families))
    shared = set(field_names(type(pretrained.model))) & set(field_names(type(model)))
    # Compare `positions_at`, because pos_embed_at may be None for a default.
    values = {field: field for field in _ARCHITECTURE} | {"pos_embed_at": "positions_at"}
    flags = []
    for field in sorted(values.keys() & shared):
        theirs, ours = (getattr(m, values[field]) for m in (pretrained.model, model))
        if theirs != ours:
            faults.append(f"model.{field}={ours!r}, but {theirs!r} in the source")
            written = ",".join(map(str, theirs)) if isinstance(theirs, tuple) else theirs
            flags.append(f"--config.model.{field}={written}")
    if flags:
        faults[-1] += f"; to match the source: {' '.join(flags)}"
    refuse(faults, f"init_from={pretrained.source!r} has another architecture")


def fit(
    pretrained: Pretrained, model: nn.Module, *, reset_head: bool, resize: str | None = None
) -> dict[str, np.ndarray]:
    """{leaf name: array} for the unrolled form of `model`, without its head if `reset_head`.

    Rules, in this order: the head is dropped (`reset_head`); LoRA adapters, which no source has,
    are left out; the first kernel is adapted if `model` takes another number of channels; position
    tables are resampled if it has another grid, by the convention `resize` (None: the source's).

    Raises:
      InputError: one error naming every parameter that no rule makes fit.
    """
    # Only shapes matter here; sharding activations would need a mesh.
    plain = with_known(model, scan=False, remat="none", constrain=unconstrained, forms=PLAIN)
    wanted = abstract_params(plain)
    adapters = [name for name in wanted if ADAPTER.fullmatch(name)]
    wanted = {name: leaf for name, leaf in wanted.items() if name not in adapters}
    found = dict(pretrained.params)
    if reset_head:
        found = {name: leaf for name, leaf in found.items() if not is_of_head(name)}
        wanted = {name: leaf for name, leaf in wanted.items() if not is_of_head(name)}
    found = _adapt_channels(found, pretrained, model)
    if any(POSITIONS.fullmatch(name) for name in found.keys() & wanted):
        found = _resample_positions(found, pretrained, model, resize or pretrained.spec.resize)
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
            "config.model to the source's values):"
        )
        raise InputError("\n  ".join([said, *faults]))
    if reset_head:
        logger.info("%s: the head is initialised anew", pretrained.source)
    if adapters:
        logger.info("%s: LoRA adapters of rank %d are added", pretrained.source, model.lora_rank)
    return found


def fit_model_state(
    pretrained: Pretrained, model: nn.Module, resize: str | None = None
) -> dict[str, np.ndarray]:
    """{name: array} of the model state of `model`, from the source.

    A table of positions is resampled if the model has another grid, by the convention `resize`
    (None: the source's).

    Raises:
      InputError: one error naming everything that does not fit.
    """
    wanted = abstract_model_state(model)
    # Like the head itself, the norm before it may be new; sources hold none.
    wanted = {name: leaf for name, leaf in wanted.items() if not is_of_head_norm(name)}
    found = dict(pretrained.model_state)
    if any(POSITIONS.fullmatch(name) for name in found.keys() & wanted):
        found = _resample_positions(found, pretrained, model, resize or pretrained.spec.resize)
    faults = [f"{name}: the model has no such variable" for name in found if name not in wanted]
    for name, leaf in wanted.items():
        if name not in found:
            faults.append(f"{name} {leaf.shape}: absent from the source")
        elif found[name].shape != leaf.shape:
            faults.append(f"{name}: {found[name].shape} in the source, {leaf.shape} in the model")
    refuse(sorted(faults), f"init_from={pretrained.source!r} does not fit the model")
    return found


def _adapt_channels(
    found: dict[str, np.ndarray], pretrained: Pretrained, model: nn.Module
) -> dict[str, np.ndarray]:
    """`found` with its first kernel for the channels of `model`; see `adapt_kernel`."""
    old, new = (about(m).channels for m in (pretrained.model, model))
    first = next((name for name in _FIRST_KERNELS if name in found), None)
    # The token module of a T2T-ViT normalises its patches, so no kernel alone sees the pixels.
    if old == new or first is None or isinstance(model, T2TViT):
        return found
    logger.info("%s: %s adapted from %d channels to %d", pretrained.source, first, old, new)
    return found | {first: adapt_kernel(found[first], old, new)}


def _resample_positions(
    found: dict[str, np.ndarray], pretrained: Pretrained, model: nn.Module, convention: str
) -> dict[str, np.ndarray]:
    """`found` with the position tables of all layers resampled to the grid of `model`.

    Tables are left unchanged, and so do not fit, if prefix tokens have positions in only one of the
    two models.
    """
    old, new, prefix = pretrained.model.grid, model.grid, model.num_prefix_positions
    if old == new or pretrained.model.num_prefix_positions != prefix:
        return found
    (rows, columns), (new_rows, new_columns) = old, new
    resample = {
        None: partial(resample_grid, old=old, new=new, prefix=prefix),
        "rows": partial(resample_axis, old=rows, new=new_rows),
        "columns": partial(resample_axis, old=columns, new=new_columns),
        "offsets": partial(resample_offsets, old=old, new=new),
        "to_patches": partial(resample_patches, old=old, new=new),
        "from_patches": partial(resample_patches, old=old, new=new),
    }
    resampled = {}
    for name, leaf in found.items():
        match = POSITIONS.fullmatch(name)
        if match and match["table"] in resample:
            resampled[name] = resample[match["table"]](leaf, convention=convention)
    means = ", averaged over each offset" if model.pos_embed == "relative" else ""
    logger.info("%s: position embedding resampled (%s%s) from a grid of %s to %s",
                pretrained.source, convention, means, old, new)  # fmt: skip
    return found | resampled
