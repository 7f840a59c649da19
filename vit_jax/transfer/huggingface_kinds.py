"""Image towers of Hugging Face's `transformers`: their arrays' names, and the models they hold."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn

from vit_jax.models.deit import DeiT
from vit_jax.models.vit import ViT
from vit_jax.transfer.names import LINEAR, NORM, PATCHES, Row, find_unheld, row, rows_of
from vit_jax.transfer.source import Source
from vit_jax.transfer.timm_blocks import CLIP, HALF, IMAGENET

GELU = {"gelu": "exact", "gelu_python": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh",
        "gelu_fast": "tanh", "gelu_accurate": "tanh", "gelu_python_tanh": "tanh",
        "quick_gelu": "quick", "silu": "silu", "swish": "silu"}  # fmt: skip
HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu", "silu": "silu"}
VITS = ("vit", "deit")  # keys of KINDS
_OURS = "encoder/layer_{i}"


def block_rows(
    theirs: str, norms: str, attention: str, out: str, scale: str = "", up: str = "mlp.fc1",
    down: str = "mlp.fc2", gate: str = "", packed: str = "",
) -> list[Row]:  # fmt: skip
    """The rows of the blocks called `theirs`; {} in a name stands for its number or its letter."""
    of_attention, of_mlp = norms.split()
    rows = [
        *NORM(f"{theirs}.{of_attention}", f"{_OURS}/norm_attention"),
        *NORM(f"{theirs}.{of_mlp}", f"{_OURS}/norm_mlp"),
        *LINEAR(f"{theirs}.{out}", f"{_OURS}/attention/out"),
    ]
    for name in ("query", "key", "value"):
        rows += LINEAR(f"{theirs}.{attention.format(name, name[0])}", f"{_OURS}/attention/{name}")
    if scale:
        rows.append(row(f"{theirs}.{scale.format(1)}", f"{_OURS}/scale_attention/scale"))
        rows.append(row(f"{theirs}.{scale.format(2)}", f"{_OURS}/scale_mlp/scale"))
    if packed:
        rows += LINEAR(f"{theirs}.{packed}", f"{_OURS}/mlp/gate", f"{_OURS}/mlp/up")
    else:
        rows += LINEAR(f"{theirs}.{up}", f"{_OURS}/mlp/up")
        rows += LINEAR(f"{theirs}.{gate}", f"{_OURS}/mlp/gate")
    return rows + LINEAR(f"{theirs}.{down}", f"{_OURS}/mlp/down")


def _vit(
    norms: str = "norm1 norm2", up: str = "mlp.fc1", down: str = "mlp.fc2", **names: str
) -> list[Row]:
    return [
        row("embeddings.cls_token", "class_token"),
        row("embeddings.register_tokens", "register_tokens"),
        row("embeddings.position_embeddings", "pos_embedding"),
        *PATCHES("embeddings.patch_embeddings.projection", "embedding"),
        row("embeddings.distillation_token", "distillation_token"),
        *block_rows(
            "encoder.layer.{i}", norms, "attention.attention.{}", "attention.output.dense",
            up=up, down=down, **names,
        ),
        *NORM("layernorm", "encoder/norm"),
        *LINEAR("pooler.dense", "head_hidden"),
    ]  # fmt: skip


def _dinov3() -> list[Row]:
    return [
        row("embeddings.cls_token", "class_token"),
        row("embeddings.register_tokens", "register_tokens"),
        *PATCHES("embeddings.patch_embeddings", "embedding"),
        *block_rows(
            "layer.{i}", "norm1 norm2", "attention.{1}_proj", "attention.o_proj",
            "layer_scale{}.lambda1", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj",
        ),
        *NORM("norm", "encoder/norm"),
    ]  # fmt: skip


def _siglip(patches: Callable[..., list[Row]] = PATCHES) -> list[Row]:
    probe = "head.attention.in_proj_"
    ours = [f"map_head/attention/{name}" for name in ("query", "key", "value")]
    return [
        row("embeddings.class_embedding", "class_token", "1 1 d -> d"),
        row("embeddings.position_embedding.weight", "pos_embedding", "1 n d -> n d"),
        *patches("embeddings.patch_embedding", "embedding"),
        *NORM("pre_layrnorm", "embedding_norm"),
        *block_rows(
            "encoder.layers.{i}", "layer_norm1 layer_norm2", "self_attn.{1}_proj",
            "self_attn.out_proj",
        ),
        *NORM("post_layernorm", "pooled_norm"),  # a model has one of the two
        *NORM("post_layernorm", "encoder/norm"),
        row("head.probe", "map_head/probe"),
        Row(f"{probe}weight", tuple(f"{name}/kernel" for name in ours), "i o -> o i"),
        Row(f"{probe}bias", tuple(f"{name}/bias" for name in ours)),
        *LINEAR("head.attention.out_proj", "map_head/attention/out"),
        *NORM("head.layernorm", "map_head/norm"),
        *LINEAR("head.mlp.fc1", "map_head/mlp/up"),
        *LINEAR("head.mlp.fc2", "map_head/mlp/down"),
    ]  # fmt: skip


class Kind(NamedTuple):
    """A kind of tower.

    architecture: transformers' class of the tower.
    rows: the rows of the tower, without its prefix.
    needed: the fields of the models that it holds, as for `names.find_unheld`.
    eps, act, num_heads: transformers' defaults.
    resize: the convention by which transformers resamples positions.
    pixels: mean and standard deviation where no file states them.
    heads: {width: number of heads}, where a ViT of that width has another number.
    square: the sizes that must be square.
    packed: the rows of a tower whose gate and up are one array.
    """

    architecture: str
    rows: Sequence[Row]
    needed: Mapping[str, Sequence]
    eps: float = 1e-6
    act: str = "gelu"
    num_heads: int = 12
    resize: str = "half_pixel"
    pixels: Mapping[str, tuple[float, ...]] = MappingProxyType(IMAGENET)
    heads: Mapping[int, int] = MappingProxyType({1280: 20, 1536: 24, 4096: 32})
    square: tuple[str, ...] = ("image_size", "patch_size")
    packed: Sequence[Row] = ()


_OF_TOWER: dict[str, Sequence] = {
    "pool": ("token",), "norm_pooled": (False,), "pos_embed": ("learned_1d",),
    "pos_embed_class_token": (True,), "hidden_head": (False,), "head_batch_norm": (False,),
    "gelu": tuple(HIDDEN_ACT), "num_classes": (None,),
}  # fmt: skip
_OF_DINO = _OF_TOWER | {"gated_mlp": (False, True), "registers": range(100)}
_OF_DINOV3 = _OF_DINO | {
    "pos_embed": ("none",), "rotary": ("normalised",), "key_bias": (False, True),
    "rotary_dtype": ("float32",), "rotary_registers": (None,),
}  # fmt: skip
_OF_OTHERS = _OF_TOWER | {"layer_scale": (None,), "qkv_bias": (True,)}
_OF_CLIP = _OF_OTHERS | {"pre_norm": (True,), "patch_bias": (False,), "norm_pooled": (True,)}

_HEADS: dict[int, int] = {1536: 16, 4096: 32}
_VIT: dict[str, Any] = {
    "rows": _vit("layernorm_before layernorm_after", "intermediate.dense", "output.dense"),
    "needed": {"pool": ("token",), "norm_pooled": (False,), "layer_scale": (None,)},
    "eps": 1e-12, "pixels": HALF, "heads": {}, "square": (),
}  # fmt: skip
_SCALE = "layer_scale{}.lambda1"
_DINOV2: dict[str, Any] = {
    "rows": _vit(scale=_SCALE), "needed": _OF_DINO, "square": ("image_size",),
    "packed": _vit(scale=_SCALE, packed="mlp.weights_in", down="mlp.weights_out"),
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "needed": _OF_OTHERS | {"pool": ("map",), "class_token": (False,)},
    "act": "gelu_pytorch_tanh", "pixels": HALF, "heads": _HEADS,
}  # fmt: skip
KINDS = {
    "vit": Kind("ViT", **_VIT),
    "deit": Kind("DeiT", **_VIT),
    "dinov2": Kind("Dinov2", **_DINOV2),
    "dinov2_with_registers": Kind("Dinov2WithRegisters", resize="antialiased", **_DINOV2),
    "dinov3_vit": Kind("DINOv3ViT", _dinov3(), _OF_DINOV3, 1e-5, num_heads=6, square=()),
    "siglip_vision_model": Kind("SiglipVision", _siglip(), **_SIGLIP),
    "siglip2_vision_model": Kind(
        "Siglip2Vision",
        _siglip(patches=LINEAR),
        resize="linear_antialiased",
        **_SIGLIP | {"needed": _SIGLIP["needed"] | {"pos_filter": ("bilinear",)}},
    ),
    "clip_vision_model": Kind(
        "CLIPVision", _siglip(), _OF_CLIP, 1e-5, "quick_gelu", pixels=CLIP, heads=_HEADS
    ),
}
_PATCH_ENDS = ("embeddings.patch_embedding.weight", "embeddings.patch_embeddings.weight",
               "embeddings.patch_embeddings.projection.weight")  # fmt: skip


def find_kind(source: Source) -> tuple[str, str] | None:
    """(key of KINDS, prefix of the tower's arrays); None: the source is no tower."""
    for name, array in source.arrays.items():
        end = next((end for end in _PATCH_ENDS if name.endswith(end)), None)
        if end is None:
            continue
        prefix = name.removesuffix(end)
        has = {known.removeprefix(prefix) for known in source.arrays}.__contains__
        if has("layer.0.attention.q_proj.weight"):
            return "dinov3_vit", prefix
        if has("encoder.layer.0.layer_scale1.lambda1"):
            registers = "_with_registers" if has("embeddings.register_tokens") else ""
            return f"dinov2{registers}", prefix
        if has("encoder.layers.0.self_attn.q_proj.weight"):
            if has("pre_layrnorm.weight"):
                return "clip_vision_model", prefix
            return ("siglip2" if array.ndim == 2 else "siglip") + "_vision_model", prefix
        if end == _PATCH_ENDS[-1]:
            return "deit" if has("embeddings.distillation_token") else "vit", prefix
    return None


def find_name(model: nn.Module) -> str:
    """The key of KINDS of the tower that `model` is; also where none can hold it."""
    if type(model) is not ViT:
        return "deit" if isinstance(model, DeiT) else "vit"
    if model.max_tokens is not None:
        return "siglip2_vision_model"  # the others take images of one size
    name = "clip_vision_model" if model.pre_norm else "siglip_vision_model"
    if model.layer_scale and model.rotary == "normalised":
        name = "dinov3_vit"
    elif model.layer_scale and find_ratio(model):
        name = "dinov2_with_registers" if model.registers else "dinov2"
    return "vit" if find_misfits(name, model) else name


def find_misfits(name: str, model: nn.Module) -> list[str]:
    """The reasons why a tower of the kind `name` cannot hold `model`."""
    needed, has_head = dict(KINDS[name].needed), getattr(model, "num_classes", None) is not None
    if name != "siglip2_vision_model":
        needed["channels"] = range(1, 100)
    if name in VITS and has_head:
        needed["hidden_head"] = (False,)
    if name.startswith("dinov2"):
        needed["num_classes"] = (model.num_classes,)
        needed["pool"] = ("token_gap" if has_head else "token",)
        needed["gelu"] = ("silu",) if model.gated_mlp else tuple(HIDDEN_ACT)
    return find_unheld(model, (ViT, DeiT) if name in VITS else (ViT,), needed)


def find_ratio(model: ViT) -> int | None:
    """The mlp_ratio of a Dinov2; None: it has no such width."""
    for ratio in range(1, 17):
        hidden = ratio * model.width
        if model.mlp_dim == ((hidden * 2 // 3 + 7) // 8 * 8 if model.gated_mlp else hidden):
            return ratio
    return None


def make_rows(name: str, prefix: str, model: ViT) -> list[Row]:
    """The rows of `model` as a tower of the kind `name`; `prefix` stands before its arrays."""
    kind = KINDS[name]
    rows = kind.packed if kind.packed and model.gated_mlp else kind.rows
    of_tower = [row._replace(theirs=prefix + row.theirs) for row in rows]
    head = "cls_classifier" if getattr(model, "distillation_head", False) else "classifier"
    heads = [*LINEAR(head, "head"), *LINEAR("distillation_classifier", "head_distillation")]
    return rows_of([*of_tower, *heads], model)
