"""Models in published `.npz` files, in both variants of the reference code's names.

The first variant was published with Dosovitskiy et al. 2020 (arXiv:2010.11929) and Steiner et al.
2021 (arXiv:2106.10270); the later one with Zhai et al. 2021 (arXiv:2106.04560) and Beyer et al.
2022 (arXiv:2205.01580). In the later variant, positions are added before the class token is
prepended, and a file without positions has fixed sine-cosine positions.

Hybrids use the first variant. Big Transfer's ResNets have names of their own. ResNets number blocks
and units from 1. A hybrid's GroupNorm leaves are published as (1, 1, 1, C), the only form that the
reference code reads; here (C,) is read too. Some of Big Transfer's files number their layers
(`standardized_conv2d_17`).

`write` also writes NAME.json for facts that the arrays do not show: the rows of a grid that is not
square, the value range, the names of the classes.
"""

import io
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.base.files import write_whole
from vit_jax.config import image_hw
from vit_jax.models.bit import BiT
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.resnet import map_stride
from vit_jax.models.vit import ViT
from vit_jax.transfer.names import (
    Row,
    find_unheld,
    layer,
    read_rows,
    row,
    rows_of,
    write_rows,
)
from vit_jax.transfer.pretrained import Cut, Pretrained, Spec, class_names_of, read_preparation
from vit_jax.transfer.source import READING, Source, write_json

logger = logging.getLogger("vit_jax")

# {key: field of a Cut}; "library" is absent in older files.
_CUT = {"crop": "share", "crop_mode": "mode"} | {k: k for k in ("interpolation", "library")}
_KINDS = {"mean": "three numbers", "std": "three positive numbers", "class_names": "a list",
          "crop": "a share above 0, at most 1", "crop_mode": "center or squash",
          "interpolation": "nearest, bilinear or bicubic", "ops": "text",
          "library": "timm, transformers or vit_jax", "loss": "softmax or sigmoid",
          **READING}  # fmt: skip

_DENSE = layer({"/kernel": ("kernel", ""), "/bias": ("bias", "")})
_NORM = layer({"/scale": ("scale", ""), "/bias": ("bias", "")})
_TO_HEADS = layer(
    {"/kernel": ("kernel", "d (heads k) -> d heads k"), "/bias": ("bias", "(heads k) -> heads k")}
)
_FROM_HEADS = layer({"/kernel": ("kernel", "(heads k) d -> heads k d"), "/bias": ("bias", "")})
_GROUP_NORM = layer({"/gamma": ("scale", ""), "/beta": ("bias", "")})
_FLAT_NORM = layer({"/scale": ("scale", "c -> 1 1 1 c"), "/bias": ("bias", "c -> 1 1 1 c")})


class Variant(NamedTuple):
    """The names in which the variants differ: of the positions, and of modules of a layer."""

    positions: str
    norm_mlp: str
    attention: str
    mlp: str

    def rows(self) -> list[Row]:
        """The table of names of ViTs and hybrids."""
        theirs, ours = "Transformer/encoderblock_{i}", "encoder/layer_{i}"
        return [
            row("embedding/kernel", "embedding/kernel", "(p q c) d -> p q c d"),
            row("embedding/bias", "embedding/bias"),
            *_stem_rows(),
            row("cls", "class_token"),
            row(self.positions, "pos_embedding"),
            *_NORM(f"{theirs}/LayerNorm_0", f"{ours}/norm_attention"),
            *_NORM(f"{theirs}/{self.norm_mlp}", f"{ours}/norm_mlp"),
            *_attention_rows(f"{theirs}/{self.attention}", f"{ours}/attention"),
            *_DENSE(f"{theirs}/{self.mlp}/Dense_0", f"{ours}/mlp/up"),
            *_DENSE(f"{theirs}/{self.mlp}/Dense_1", f"{ours}/mlp/down"),
            *_NORM("Transformer/encoder_norm", "encoder/norm"),
            row("MAPHead_0/probe", "map_head/probe"),
            *_NORM("MAPHead_0/LayerNorm_0", "map_head/norm"),
            *_attention_rows(f"MAPHead_0/{self.attention}", "map_head/attention"),
            *_DENSE(f"MAPHead_0/{self.mlp}/Dense_0", "map_head/mlp/up"),
            *_DENSE(f"MAPHead_0/{self.mlp}/Dense_1", "map_head/mlp/down"),
            *_DENSE("pre_logits", "head_hidden"),
            *_DENSE("head", "head"),
        ]


def _attention_rows(theirs: str, ours: str) -> list[Row]:
    rows = []
    for name in ("query", "key", "value"):
        rows += _TO_HEADS(f"{theirs}/{name}", f"{ours}/{name}")
    return rows + _FROM_HEADS(f"{theirs}/out", f"{ours}/out")


def _stem_rows() -> list[Row]:
    """The ResNet of a hybrid."""
    theirs, ours = "block{block}/unit{unit}", "stem/stage_{stage}/layer_{layer}"
    rows = [row("conv_root/kernel", "stem/conv_root/kernel")]
    rows += _FLAT_NORM("gn_root", "stem/norm_root")
    for part in ("1", "2", "3", "_proj"):
        rows.append(row(f"{theirs}/conv{part}/kernel", f"{ours}/conv{part}/kernel"))
        rows += _FLAT_NORM(f"{theirs}/gn{part}", f"{ours}/norm{part}")
    return rows


def _bit_rows() -> list[Row]:
    """The names of Big Transfer's ResNets."""
    theirs, ours = "resnet/block{block}/unit{unit:02}", "trunk/stage_{stage}/layer_{layer}"
    rows = [row(_BIT_ROOT, "trunk/conv_root/kernel")]
    rows += _GROUP_NORM("resnet/group_norm", "trunk/norm")
    for part, number in zip("abc", "123", strict=True):
        kernel = f"{theirs}/{part}/standardized_conv2d/kernel"
        rows.append(row(kernel, f"{ours}/conv{number}/kernel"))
        rows += _GROUP_NORM(f"{theirs}/{part}/group_norm", f"{ours}/norm{number}")
    rows.append(row(f"{theirs}/a/proj/standardized_conv2d/kernel", f"{ours}/conv_proj/kernel"))
    rows.append(row(f"{_BIT_HEAD}/kernel", "head/kernel", "d c -> 1 1 d c"))
    return [*rows, row(f"{_BIT_HEAD}/bias", "head/bias")]


_BIT_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_BIT_HEAD = "resnet/head/conv2d"
_STEM_ROOT = "conv_root/kernel"

FIRST = Variant(
    "Transformer/posembed_input/pos_embedding",
    "LayerNorm_2",
    "MultiHeadDotProductAttention_1",
    "MlpBlock_3",
)
LATER = Variant("pos_embedding", "LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0")

# Prefixes of a ViT's parameters in files that also hold the optimizer's state or a text tower.
_PLACES = ("", "params/", "opt/target/", "params/img/")


def recognises(source: Source, variant: Variant) -> bool:
    """Whether it is such a file with the names of `variant`: more than of the other."""
    if not (source.has_arrays and source.path.suffix == ".npz"):
        return False
    seen = {
        own: sum(any(part in f"/{name}" for part in parts) for name in source.arrays)
        for own, parts in (
            (FIRST, ("posembed_input/", *(f"/{part}/" for part in FIRST[1:]))),
            (LATER, ("MAPHead_0/", *(f"/{part}/" for part in LATER[1:]))),
        )
    }
    return variant is max(seen, key=seen.__getitem__)


def read(source: Source, variant: Variant) -> Pretrained:
    """Read the model in the file; its architecture is inferred from the arrays.

    Raises:
      InputError: if the file cannot be read or holds another architecture.
    """
    source.arrays = _name_as_published(_find_model(source))
    stated = source.read_stated(source.config, _KINDS)
    image_size = image_hw(stated["image_size"]) if "image_size" in stated else None
    is_bit = any(name.startswith("resnet/") for name in source.arrays)
    model = _infer_bit(source, image_size) if is_bit else _infer_vit(source, variant, image_size)
    params = read_rows(_rows(model, variant), source, model)
    spec = Spec(
        image_size or model.image_size,
        "corner_aligned",
        class_names=class_names_of(stated.get("class_names"), model.num_classes, str(source.path)),
        cut=Cut(**{field: stated[key] for key, field in _CUT.items() if key in stated})
        if "crop" in stated
        else None,
        **read_preparation(stated, image_size or model.image_size, str(source.config_path))
        | {key: tuple(stated[key]) for key in ("mean", "std") if key in stated},
    )
    return Pretrained(str(source.path), model, params, spec)


def _find_model(source: Source) -> dict[str, np.ndarray]:
    """The arrays that belong to the model, by their names below its prefix."""
    arrays = source.arrays
    place = next((place for place in _PLACES if f"{place}embedding/kernel" in arrays), "")
    found = {n.removeprefix(place): a for n, a in arrays.items() if n.startswith(place)}
    if len(found) < len(arrays):
        logger.info("%s: the model is read from %s; %d other arrays are ignored",
                    source.path, place, len(arrays) - len(found))  # fmt: skip
    return found


def _name_as_published(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`arrays` with layers apart that are stacked, norms in their published shape, no numbers."""
    stacked = "Transformer/encoderblock/"
    found: dict[str, np.ndarray] = {}
    is_flat_norm = re.compile(r"(.*/)?gn(\d|_root|_proj)/(scale|bias)").fullmatch
    for name, array in arrays.items():
        if name.startswith(stacked) and array.ndim:
            rest = name.removeprefix(stacked)
            found |= {f"Transformer/encoderblock_{i}/{rest}": a for i, a in enumerate(array)}
        elif is_flat_norm(name) and array.ndim == 1:
            found[name] = array.reshape(1, 1, 1, -1)
        elif name.startswith("resnet/"):
            found[re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+", r"\1", name)] = array
        else:
            found[name] = array
    return found


def _rows(model: nn.Module, variant: Variant) -> list[Row]:
    return rows_of(_bit_rows() if isinstance(model, BiT) else variant.rows(), model)


def _count_units(source: Source, prefix: str) -> tuple[int, ...]:
    """The number of units of each block of a ResNet."""
    matches = (re.match(rf"{prefix}block(\d+)/unit(\d+)/", name) for name in source.arrays)
    units: dict[int, int] = {}
    for block, unit in ((int(m[1]), int(m[2])) for m in matches if m):
        units[block] = max(unit, units.get(block, 1))
    return tuple(units.get(block, 1) for block in range(1, max(units, default=0) + 1))


def _infer_bit(source: Source, image_size: tuple[int, int] | None) -> BiT:
    """The model of a BiT's arrays, which do not determine the image size."""
    source.require({_BIT_ROOT: 4}, {f"{_BIT_HEAD}/kernel": 4})
    return BiT(
        num_classes=source.size(f"{_BIT_HEAD}/kernel", 3),
        image_size=image_size,
        stages=_count_units(source, "resnet/"),
        stem_width=source.arrays[_BIT_ROOT].shape[3],
    )


def _infer_vit(source: Source, variant: Variant, image_size: tuple[int, int] | None) -> ViT:
    """The ViT or hybrid of the arrays; `image_size` as stated."""
    arrays, positions = source.arrays, variant.positions
    first_layer = "Transformer/encoderblock_0"
    query = f"{first_layer}/{variant.attention}/query/kernel"
    up = f"{first_layer}/{variant.mlp}/Dense_0/kernel"
    is_first, has_token, has_positions = variant is FIRST, "cls" in arrays, positions in arrays
    needed = {"embedding/kernel": 4, query: 3, up: 2} | ({positions: 3} if is_first else {})
    source.require(needed, {"head/kernel": 2, positions: 3, _STEM_ROOT: 4})
    p, q = arrays["embedding/kernel"].shape[:2]
    stages, stem = _count_units(source, ""), arrays.get(_STEM_ROOT)
    family = ViT if stem is None else partial(HybridViT, stages=stages, stem_width=stem.shape[3])
    if not has_positions:
        image_size = None
    elif image_size is None:
        side = source.square_side(arrays[positions].shape[1] - (has_token and is_first))
        stride = 1 if stem is None else map_stride(stages)
        image_size = (side * stride * p, side * stride * q)
    return family(
        num_classes=source.size("head/kernel", 1),
        image_size=image_size,
        patch_size=(p, q),
        width=arrays["embedding/kernel"].shape[3],
        depth=source.count_layers(r"Transformer/encoderblock_(\d+)/"),
        mlp_dim=arrays[up].shape[1],
        num_heads=arrays[query].shape[1],
        pool="map" if "MAPHead_0/probe" in arrays else "token" if has_token else "gap",
        hidden_head="pre_logits/kernel" in arrays,
        pos_embed="learned_1d" if has_positions else "sincos_2d",
        pos_embed_class_token=is_first or not (has_token and has_positions),
    )


_HELD: dict[str, Sequence] = {
    "gelu": ("tanh",), "norm_eps": (1e-6,), "norm_pooled": (False,), "layer_scale": (None,),
    "qkv_bias": (True,),
}  # fmt: skip
_HELD_BY = {
    FIRST: _HELD | {"pool": ("token", "gap"), "pos_embed": ("learned_1d",)},
    LATER: _HELD | {"pos_embed": ("learned_1d", "sincos_2d")},
}


def check(model: nn.Module, variant: Variant) -> list[str]:
    """The reasons why a file of the variant cannot hold `model`."""
    families = (ViT, HybridViT, BiT) if variant is FIRST else (ViT,)
    if faults := find_unheld(model, families, _HELD_BY[variant]):
        return faults
    has_class_token = getattr(model, "has_class_token", False)
    if has_class_token and model.pool != "token":
        return [f"a class token that pool={model.pool!r} does not use"]
    if variant is FIRST and has_class_token and not model.pos_embed_class_token:
        return ["pos_embed_class_token=False"]
    return []


def _with_position_in_class_token(pretrained: Pretrained) -> Pretrained:
    """Add the class token's position to the token, because the later variant has no entry for it.

    The model starts with the same addition, so its logits stay the same to the bit.
    """
    model, params = pretrained.model, dict(pretrained.params)
    if not model.num_prefix_positions:
        return pretrained
    own, table = np.split(params["pos_embedding"], [1], axis=1)
    params |= {"class_token": params["class_token"] + own, "pos_embedding": table}
    logger.info("positions: the class token's entry is written as part of the token")
    model = model.clone(pos_embed_class_token=False)
    return pretrained._replace(model=model, params=params)


def write(path: epath.Path, pretrained: Pretrained, variant: Variant) -> list[str]:
    """Write NAME.npz, and NAME.json with facts that it cannot hold; return the files' names."""
    if variant is LATER:
        pretrained = _with_position_in_class_token(pretrained)
    model, spec = pretrained.model, pretrained.spec
    image_size = model.image_size or spec.image_size
    stated: dict[str, Any] = {"mean": list(spec.mean), "std": list(spec.std)}
    if image_size:
        stated["image_size"], spec = list(image_size), spec.at(image_size)
    if spec.cut is not None:
        stated |= {key: getattr(spec.cut, field) for key, field in _CUT.items()}
    stated |= {"ops": spec.ops, "loss": spec.loss, **spec.stated_reading}
    stated["class_names"] = list(spec.class_names) if spec.class_names else None
    content = io.BytesIO()
    arrays: dict[str, Any] = write_rows(_rows(model, variant), pretrained.params, model)
    np.savez(content, **arrays)
    write_json(path.with_suffix(".json"), stated)
    write_whole(path, content.getvalue())
    return [path.name, path.with_suffix(".json").name]
