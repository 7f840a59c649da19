"""Fits pretrained parameters to a model; each change is a named rule and is logged.

What no file of another format holds, adapters and a norm before the head, is merged into kernels.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import InputError, collect_faults
from vit_jax.base.lazy import Lazy
from vit_jax.models.batch_norm import BATCH_STATS
from vit_jax.models.contract import CONSTANTS, about, field_names, with_known
from vit_jax.models.dense import adapter_update
from vit_jax.models.patches import resize_kernel
from vit_jax.models.position import RelativePositions, Resize
from vit_jax.models.t2t import T2TViT
from vit_jax.models.text import Matcher
from vit_jax.models.vit import HEAD_NORM_EPS
from vit_jax.models.zero_shot import TextSide
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.resample import (
    adapt_kernel,
    resample_axis,
    resample_grid,
    resample_offsets,
)
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

logger = logging.getLogger("vit_jax")

_HEAD_NORM = f"{BATCH_STATS}/head_norm/"
ADAPTER = re.compile(r"(?P<layer>.*)/lora_[ab]")
_POSITIONS = re.compile(rf"(?P<place>encoder/layer_\d+/|{CONSTANTS}/|)pos_embedding(/\w+)?")
_HEAD = r"(head|head_hidden|head_distillation)/.*"
_OUTPUTS = re.compile(r"(head|head_distillation)/(kernel|bias)")  # the last axis is the classes

# Kernels that may see the pixels; the first that a model has does.
_FIRST_KERNELS = (
    "stem/conv_root/kernel", "stem/conv_0/kernel", "trunk/conv_root/kernel", "embedding/kernel",
)  # fmt: skip

_ARCHITECTURE = (
    "width", "depth", "mlp_dim", "num_heads", "patch_size", "stages", "stem_width", "pool",
    "pos_embed", "pos_embed_class_token", "gelu", "norm", "norm_eps", "parallel", "qk_norm",
    "qkv_bias", "norm_pooled", "width_factor", "depth_factor", "token_module", "token_width",
    "registers", "pre_norm", "patch_bias", "key_bias", "gated_mlp", "mlp_norm", "rotary",
    "rotary_base", "rotary_side", "rotary_registers", "rotary_dtype", "stem_channels",
)  # fmt: skip

# Fields of a text tower that its source determines: the keys that set them.
_OF_TEXTS = {
    "length": "data.text_length", "width": "objective.text_width",
    "depth": "objective.text_depth", "num_heads": "objective.text_heads",
    "mlp_dim": "objective.text_mlp_dim", "causal": "objective.causal", "gelu": "model.gelu",
    "norm": "model.norm", "norm_eps": "model.norm_eps",
}  # fmt: skip


def stack_layers(
    params: dict[str, Any], stack: Callable[[Sequence[Any]], Any] = np.stack
) -> dict[str, Any]:
    """Convert unrolled parameters (encoder/layer_0, ...) to scanned ones (encoder/layers).

    `stack`: makes one array of the arrays of all layers.
    """
    encoder = dict(params["encoder"])
    layers = [encoder.pop(f"layer_{i}") for i in range(len(encoder)) if f"layer_{i}" in encoder]
    encoder["layers"] = jax.tree.map(lambda *leaves: stack(leaves), *layers)
    return params | {"encoder": encoder}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Convert scanned parameters to unrolled ones: the inverse of `stack_layers`."""
    encoder = dict(params["encoder"])
    stacked = encoder.pop("layers")
    depth = jax.tree.leaves(stacked)[0].shape[0]
    for i in range(depth):
        encoder[f"layer_{i}"] = jax.tree.map(
            lambda leaf, i=i: leaf.layer(i) if isinstance(leaf, Lazy) else leaf[i], stacked
        )
    return params | {"encoder": encoder}


def merge_adapters(
    model: nn.Module, params: Mapping[str, np.ndarray]
) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """`model` without its LoRA adapters, and `params` with each adapter added to its kernel.

    `params`: {leaf name: array} of the unrolled model.
    """
    merged = {name: leaf for name, leaf in params.items() if not ADAPTER.fullmatch(name)}
    for layer in {match["layer"] for match in map(ADAPTER.fullmatch, params) if match}:
        factors = (np.asarray(params[f"{layer}/lora_{factor}"]) for factor in "ab")
        kernel = np.asarray(params[f"{layer}/kernel"])
        merged[f"{layer}/kernel"] = kernel + adapter_update(*factors)
    return with_known(model, lora_rank=None), merged


def merge_head_norm(
    model: nn.Module, params: Mapping[str, np.ndarray], model_state: Mapping[str, np.ndarray]
) -> tuple[nn.Module, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`model`, `params` and `model_state` with the batch norm before the head in the head.

    The norm has no scale and shift of its own, so a linear head with other numbers gives the same
    logits. Leaves are named as in the unrolled model.
    """
    if not getattr(model, "head_batch_norm", False):
        return model, dict(params), dict(model_state)
    state = {name: x for name, x in model_state.items() if not name.startswith(_HEAD_NORM)}
    merged = dict(params)
    if model.num_classes is not None:
        mean, var = (np.asarray(model_state[f"{_HEAD_NORM}{name}"]) for name in ("mean", "var"))
        kernel = params["head/kernel"] / np.sqrt(var + HEAD_NORM_EPS)[:, None]
        merged |= {"head/kernel": kernel, "head/bias": params["head/bias"] - mean @ kernel}
    return model.clone(head_batch_norm=False), merged, state


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
    if _has_patches_to_resize(pretrained.model, model):
        del values["patch_size"]
    flags = []
    for field in sorted(values.keys() & shared):
        theirs, ours = (getattr(m, values[field]) for m in (pretrained.model, model))
        if theirs != ours:
            faults.append(f"model.{field}={ours!r}, but {theirs!r} in the source")
            written = ",".join(map(str, theirs)) if isinstance(theirs, tuple) else theirs
            flags.append(f"--config.model.{field}={written}")
    if flags:
        faults[-1] += f"; to match the source: {' '.join(flags)}"
    collect_faults(faults, f"init_from={pretrained.source!r} has another architecture")


def fit_texts(
    side: TextSide, matcher: Matcher, source: str, *, other_images: bool = False
) -> dict[str, np.ndarray]:
    """{leaf name: array} of `matcher`, in its form, from the text side of `source`.

    Both take the same tokenizer. Token ids that it never gives are left out. With `other_images`,
    `matcher` compares texts with images of another tower: the projections to the common width, the
    scale and the bias are left out, as they start anew.

    Raises:
      InputError: with the flags to set, if the text sides differ, or if the tokenizer gives ids
        that the source has no embedding of.
    """
    both = side.matcher, matcher
    values = {key: [getattr(m.text, name) for m in both] for name, key in _OF_TEXTS.items()}
    if not other_images:
        values["objective.loss"] = [m.loss for m in both]
        values["objective.common_width"] = [m.image_width and m.text.common_width for m in both]
    other = {key: theirs for key, (theirs, ours) in values.items() if theirs != ours}
    if other:
        flags = " ".join(f"--config.{key}={theirs}" for key, theirs in other.items())
        said = ", ".join(f"{key}={values[key][1]!r}, but {other[key]!r}" for key in other)
        raise InputError(f"{source} has another text tower: {said}; set {flags}")
    params, name = dict(side.params), "text/token_embedding/embedding"
    if len(params[name]) < matcher.text.vocabulary:
        raise InputError(
            f"{source}: its text tower has {len(params[name])} token ids, its "
            f"tokenizer {matcher.text.vocabulary}; take a source whose files belong together"
        )
    params[name] = params[name][: matcher.text.vocabulary]
    found = tree.unflatten_names(params)
    if matcher.text.scan:
        found |= {"text": stack_layers(found["text"])}
    found = tree.flatten_names(found)
    if not other_images:
        return found
    return {n: leaf for n, leaf in found.items() if re.match("text/(?!head/)", n)}


def fit(
    pretrained: Pretrained, model: nn.Module, *, reset_head: bool, resize: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameters, model state) by leaf name, for the unrolled form of `model`.

    Rules, in this order: the head is dropped (`reset_head`); LoRA adapters and a norm before the
    head, which no source has, are left out; the first kernel is adapted if `model` takes another
    number of channels, and resized if it takes patches of another size; position tables are
    resampled if it has another grid, by the convention `resize` (None: the source's).

    Raises:
      InputError: one error naming every leaf that no rule makes fit.
    """
    wanted = abstract_params(with_known(model, scan=False)) | abstract_model_state(model)
    adapters = [name for name in wanted if ADAPTER.fullmatch(name)]
    new = {*adapters, *(name for name in wanted if name.startswith(_HEAD_NORM))}
    found = {**pretrained.params, **pretrained.model_state}
    if reset_head:
        new |= {name for name in wanted if is_of_head(name)}
        found = {name: leaf for name, leaf in found.items() if not is_of_head(name)}
    wanted = {name: leaf for name, leaf in wanted.items() if name not in new}
    found = _resize_patches(_adapt_channels(found, pretrained, model), pretrained, model)
    if any(_POSITIONS.fullmatch(name) for name in found.keys() & wanted):
        found = _resample_positions(found, pretrained, model, resize or pretrained.spec.resize)
    faults = [f"{name} {leaf.shape}: the model has no such parameter"
              for name, leaf in sorted(found.items()) if name not in wanted]  # fmt: skip
    for name, leaf in sorted(wanted.items()):
        if name not in found:
            faults.append(f"{name} {leaf.shape}: absent from the source")
        elif found[name].shape != leaf.shape:
            faults.append(f"{name}: {found[name].shape} in the source, {leaf.shape} in the model")
    collect_faults(
        faults,
        f"init_from={pretrained.source!r} does not fit the model (set the fields of config.model "
        "to the source's values)",
    )
    if reset_head:
        logger.info("%s: the head is initialised anew", pretrained.source)
    if adapters:
        logger.info("%s: LoRA adapters of rank %d are added", pretrained.source, model.lora_rank)
    return split_leaves(found)


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
    return found | {first: adapt_kernel(np.asarray(found[first]), old, new)}


def _resize_patches(
    found: dict[str, np.ndarray], pretrained: Pretrained, model: nn.Module
) -> dict[str, np.ndarray]:
    """`found` with the embedding of patches for the patch size of `model`; see `resize_kernel`."""
    models, name = (pretrained.model, model), "embedding/kernel"
    if not _has_patches_to_resize(*models):
        return found
    old, new = (about(each).token_stride for each in models)
    if old == new:
        return found
    logger.info("%s: the embedding of patches is resized from %s to %s pixels",
                pretrained.source, old, new)  # fmt: skip
    return found | {name: np.asarray(resize_kernel(np.asarray(found[name]), old, new))}


def _has_patches_to_resize(*models: nn.Module) -> bool:
    """Whether all embed a patch of pixels by one kernel, which `resize_kernel` takes."""
    return all(about(model).embeds_patches for model in models)


def position_tables(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """{place: tables} of the positions in {name: leaf}; a place is "" or "encoder/layer_3/"."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in leaves.items():
        if match := _POSITIONS.fullmatch(name):
            tables = found.setdefault(match["place"], {})
            tables[name.removeprefix(match["place"])] = np.asarray(leaf)
    return {place: tree.unflatten_names(tables)["pos_embedding"] for place, tables in found.items()}


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
    positions = pretrained.model.positions(pretrained.model.image_size)
    functions = resample_grid, resample_axis, resample_offsets
    resize = Resize(*(partial(function, convention=convention) for function in functions))
    resampled: dict[str, np.ndarray] = {}
    for place, tables in position_tables(found).items():
        new_tables = {"pos_embedding": positions.resampled(tables, new, resize)}
        resampled |= {place + name: leaf for name, leaf in tree.flatten_names(new_tables).items()}
    is_relative = isinstance(positions, RelativePositions)
    means = ", averaged over each offset" if is_relative else ""
    logger.info("%s: position embedding resampled (%s%s) from a grid of %s to %s",
                pretrained.source, convention, means, old, new)  # fmt: skip
    return found | resampled


def require_image_size(pretrained: Pretrained) -> tuple[int, int]:
    """The model's image size; raises InputError if it has none, for formats that need one."""
    if pretrained.model.image_size is None:
        raise InputError(
            f"{pretrained.source}: has no image size, but the format needs one; give image_size"
        )
    return pretrained.model.image_size


def with_learned_positions(pretrained: Pretrained, *, class_token_has_one: bool) -> Pretrained:
    """Convert positions at the stem to equivalent learned 1-D ones, for formats without others.

    With `class_token_has_one`, a class token without a position gets one of zeros.
    """
    require_image_size(pretrained)
    model, params = pretrained.model, dict(pretrained.params)
    if model.pos_embed != "learned_1d":
        has_some = model.num_prefix_positions > 0
        rows, columns = model.grid
        table = np.zeros((1, rows * columns, model.width), np.float32)
        if model.position_class.acts_on != "nothing":
            tables = tree.unflatten_names(params).get("pos_embedding")
            table = np.asarray(model.positions(model.image_size).build_checked(tables))
            placed, prefix = model.num_prefix_positions, model.num_prefix_tokens
            table = np.concatenate([table[:, :placed], table[:, prefix:]], axis=1)
        params = {name: leaf for name, leaf in params.items() if not _POSITIONS.fullmatch(name)}
        params["pos_embedding"] = table
        logger.info("positions: writing %s as a table", model.pos_embed)
        model = model.clone(pos_embed="learned_1d", pos_embed_class_token=has_some)
    if class_token_has_one and not model.num_prefix_positions:
        none = np.zeros((1, model.num_named_tokens, model.width), np.float32)
        params["pos_embedding"] = np.concatenate([none, params["pos_embedding"]], axis=1)
        logger.info("positions: the class token's entry is written as zeros")
        model = model.clone(pos_embed_class_token=True)
    return pretrained._replace(model=model, params=params)


def without_class_position(pretrained: Pretrained) -> Pretrained:
    """Add the position of the class token to it, for formats that give registers one too, or none.

    To the same effect, if positions are added at the stem.
    """
    first, patches = np.split(pretrained.params["pos_embedding"], [1], axis=1)
    folded = {"class_token": pretrained.params["class_token"] + first, "pos_embedding": patches}
    model = pretrained.model.clone(pos_embed_class_token=False)
    return pretrained._replace(model=model, params={**pretrained.params, **folded})
