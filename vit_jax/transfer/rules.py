"""Fits pretrained parameters to a model; each change is a named rule and is logged."""

import json
import logging
import math
import re
import types
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from vit_jax import tree
from vit_jax.data.ops import parse_calls, parse_ops
from vit_jax.errors import InputError
from vit_jax.models.batch_norm import BATCH_STATS
from vit_jax.models.fields import field_names, value_of, with_known
from vit_jax.models.forms import PLAIN
from vit_jax.models.layers import unconstrained
from vit_jax.models.t2t import CONSTANTS, T2TViT
from vit_jax.transfer.adapters import ADAPTER, is_of_head_norm
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
_POSITIONS = re.compile(rf"(encoder/layer_\d+/|{CONSTANTS}/)?pos_embedding(/(?P<table>\w+))?")

# Kernels that may see the pixels; the first that a model has does.
_FIRST_KERNELS = ("stem/conv_root/kernel", "trunk/conv_root/kernel", "embedding/kernel")

_IMAGENET_21K = (21_841, 21_843)  # numbers of classes in different releases

_ARCHITECTURE = (
    "width", "depth", "mlp_dim", "num_heads", "patch_size", "stages", "stem_width", "pool",
    "pos_embed", "pos_embed_class_token", "gelu", "norm", "norm_eps", "parallel", "qk_norm",
    "qkv_bias", "norm_pooled", "width_factor", "depth_factor", "token_module", "token_width",
)  # fmt: skip


class Cut(NamedTuple):
    """Resize and central crop in timm's parameters; `ops_of_cut` gives the ops.

    share: fraction of each side that the central crop keeps; the image is resized to size / share,
      rounded down.
    mode: "center" keeps the aspect ratio and covers that size; "squash" resizes each side
      separately.
    interpolation: Pillow's "bilinear" or "bicubic".
    """

    share: float = 1.0
    mode: str = "squash"
    interpolation: str = "bilinear"

    def resized(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) to which an image is resized before it is cropped to `image_size`."""
        return tuple(math.floor(side / self.share) for side in image_size)


class Spec(NamedTuple):
    """Facts about a pretrained model: preprocessing, loss, names of classes; None: not stated.

    image_size: (height, width) in pixels; None also for a model that takes any size.
    resize: the convention by which the source's library resamples position embeddings.
    mean, std: the model's input is (image / 255 - mean) / std, for each channel.
    class_names: in the order of the logits.
    cut: the resize and crop to the image size, as closely as a `Cut` can describe it; None resizes
      the whole image, each side separately.
    ops: the exact preprocessing string for `image_size`; None derives it from `cut`, as in
      `images.ops_for`.
    loss: the loss of the training, softmax or sigmoid; it turns logits into probabilities.
    holdout: the rule that held out images of the folder that the model was trained on, as
      `data.holdout`; None also if there was no folder.
    exif: whether images are turned by their EXIF orientation; None means yes.
    channels: number of channels of the images.
    fault: the reason why the stated preprocessing is not supported (`images.ops_for` raises it);
      None if it is supported.
    """

    image_size: tuple[int, int] | None
    resize: str
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    class_names: tuple[str, ...] | None = None
    cut: Cut | None = None
    ops: str | None = None
    loss: str | None = None
    holdout: str | None = None
    exif: bool | None = None
    channels: int = 3
    fault: str | None = None

    def at(self, image_size: tuple[int, int]) -> "Spec":
        """This spec for another image size; `ops` are kept if they contain no size."""
        if image_size == self.image_size:
            return self
        ops = self.ops if self.ops is not None and _follows_image_size(self.ops) else None
        return self._replace(image_size=image_size, ops=ops)


def _follows_image_size(ops: str) -> bool:
    calls = parse_calls(ops, "ops")
    return not any(args or "size" in kwargs for _, args, kwargs in calls)


def ops_of_cut(cut: Cut, image_size: tuple[int, int]) -> str:
    """The preprocessing string for `cut`, equivalent to timm's transforms_imagenet_eval.

    Values of pixels may differ by rounding: see `host_ops.torchvision_resize`.
    """
    height, width = cut.resized(image_size)
    quoted = repr(cut.interpolation)
    if cut.mode == "squash":
        if (height, width) == image_size:
            return f"decode|torchvision_resize(filter={quoted})"
        resize = f"torchvision_resize(({height}, {width}), {quoted})"
    elif height == width:
        resize = f"torchvision_resize({height}, {quoted})"
    else:
        resize = f"torchvision_resize(({height}, {width}), {quoted}, cover=True)"
    return f"decode|{resize}|torchvision_crop"


def share_of(side: int, resized: int) -> float:
    """The share for which `Cut.resized` turns `side` into `resized`, about side / resized."""
    share = side / resized
    while math.floor(side / share) < resized:
        share = math.nextafter(share, 0.0)
    return share


def read_preparation(
    stated: Mapping[str, Any], image_size: tuple[int, int] | None, source: str
) -> dict[str, Any]:
    """{"ops", "loss", "holdout", "exif"} of a Spec: keys that this project adds to a format's own.

    Raises:
      InputError: if `ops` cannot be parsed.
    """
    ops = stated.get("ops")
    if ops is not None:
        parse_ops(ops, image_size or (1, 1), key=f"init_from={source!r}: ops")
    return {"ops": ops} | {key: stated.get(key) for key in ("loss", "holdout", "exif")}


class Pretrained(NamedTuple):
    """A pretrained model.

    source: its name in messages.
    model: the source's model, unrolled.
    params: {leaf name: float32 array} of that model.
    spec: see `Spec`.
    run: step, config and results of a workdir's run; None for other sources.
    model_state: {name: float32 array} of its other variables, such as
      "batch_stats/trunk/norm_root/mean"; empty if the model has none.
    """

    source: str
    model: nn.Module
    params: dict[str, np.ndarray]
    spec: Spec
    run: dict[str, Any] | None = None
    model_state: Mapping[str, np.ndarray] = types.MappingProxyType({})

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for `model.apply`: {"params": ..., and the collections of model_state}."""
        return {
            "params": tree.unflatten_names(self.params),
            **tree.unflatten_names(self.model_state),
        }


def loss_of(pretrained: Pretrained, assumed: str = "softmax") -> str:
    """The loss that turns the logits of a source into probabilities: as stated, else `assumed`.

    The assumption is logged, as a warning for ImageNet-21k's number of classes, because its
    published models were trained with the sigmoid.
    """
    if pretrained.spec.loss is None:
        of_21k = pretrained.model.num_classes in _IMAGENET_21K
        logger.log(
            logging.WARNING if of_21k else logging.INFO,
            "%s: the loss is not stated; assuming %s%s", pretrained.source, assumed,
            "; models for ImageNet-21k are often trained with the sigmoid: state the loss in the "
            "JSON file next to the weights" if of_21k else "",
        )  # fmt: skip
    return pretrained.spec.loss or assumed


def refuse(faults: Sequence[str], where: str) -> None:
    """Raise one InputError for all `faults`, if there are any; `where` names the source."""
    if faults:
        raise InputError(join_faults(faults, where))


def join_faults(faults: Sequence[str], where: str) -> str:
    """One text for all `faults` (at least one); `where` names the source."""
    if len(faults) == 1:
        return f"{where}: {faults[0]}"
    return "\n  ".join([f"{where}: {len(faults)} faults", *faults])


def class_names_of(names: Any, num_classes: int | None, source: str) -> tuple[str, ...] | None:
    """The source's class names; None if it states none.

    Raises:
      InputError: if their number is not the number of classes, or they are not strings.
    """
    if names is None or num_classes is None:
        return None
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"init_from={source!r}: its class names are not a list of strings")
    if len(names) != num_classes:
        raise InputError(
            f"init_from={source!r}: {len(names)} class names for {num_classes} classes"
        )
    return tuple(names)


def square_side(num_patches: int, source: str) -> int:
    """The side of a square grid of patches, for a source that does not state its rows.

    Raises:
      InputError: if the number of patches is not a square.
    """
    side = math.isqrt(max(num_patches, 0))
    if side < 1 or side**2 != num_patches:
        raise InputError(
            f"init_from={source!r}: its {num_patches} patches do not form a square grid; state "
            "the image size in the JSON file next to the weights"
        )
    return side


def to_json(content: dict[str, Any]) -> str:
    """Format a JSON object as the text of a file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def check_family(model: nn.Module, *held: type[nn.Module]) -> list[str]:
    """The reason why a format that holds only the families `held` cannot hold `model`, if any."""
    return [] if type(model) in held else [f"it is a {type(model).__name__}"]


def check_blocks(model: nn.Module, **needed: Any) -> list[str]:
    """The fields of the blocks of `model` that no foreign format holds, or that are not `needed`.

    `needed`: {field: value} that the format requires in addition.
    """
    needed = {"parallel": False, "norm": "layer", "qk_norm": False} | needed
    return [
        f"{field}={getattr(model, field)!r}"
        for field, value in needed.items()
        if getattr(model, field) != value
    ]


def check_positions(model: nn.Module) -> list[str]:
    """The position fields of `model` that no foreign format holds."""
    if model.pos_embed == "relative":
        return ["pos_embed='relative'"]
    if model.positions_at != "stem":
        return [f"pos_embed_at={model.pos_embed_at!r}"]
    return []


def require_image_size(pretrained: Pretrained) -> None:
    """Raise InputError if the model has no image size, for formats that need one."""
    if pretrained.model.image_size is None:
        raise InputError(
            f"{pretrained.source}: has no image size, but the format needs one; give image_size"
        )


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
        if model.pos_embed != "none":
            tables = tree.unflatten_names(params).get("pos_embedding")
            table = np.asarray(model.positions(model.image_size).build(tables))
            table = table if has_some else table[:, model.num_prefix_tokens :]
        params = {name: leaf for name, leaf in params.items() if not _POSITIONS.fullmatch(name)}
        params["pos_embedding"] = table
        logger.info("positions: writing %s as a table", model.pos_embed)
        model = model.clone(pos_embed="learned_1d", pos_embed_class_token=has_some)
    if class_token_has_one and not model.num_prefix_positions:
        none = np.zeros((1, model.num_prefix_tokens, model.width), np.float32)
        params["pos_embedding"] = np.concatenate([none, params["pos_embedding"]], axis=1)
        logger.info("positions: the class token's entry is written as zeros")
        model = model.clone(pos_embed_class_token=True)
    return pretrained._replace(model=model, params=params)


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
    if any(_POSITIONS.fullmatch(name) for name in found.keys() & wanted):
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
    if any(_POSITIONS.fullmatch(name) for name in found.keys() & wanted):
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
    old, new = (value_of(m, "channels") for m in (pretrained.model, model))
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
        match = _POSITIONS.fullmatch(name)
        if match and match["table"] in resample:
            resampled[name] = resample[match["table"]](leaf, convention=convention)
    means = ", averaged over each offset" if model.pos_embed == "relative" else ""
    logger.info("%s: position embedding resampled (%s%s) from a grid of %s to %s",
                pretrained.source, convention, means, old, new)  # fmt: skip
    return found | resampled
