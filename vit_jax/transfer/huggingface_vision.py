"""Image towers with the names of Hugging Face's `transformers`: DINOv2, DINOv3, SigLIP, CLIP.

It reads `Dinov2Model`, `Dinov2WithRegistersModel`, both with a classifier too, `DINOv3ViTModel`,
`SiglipVisionModel`, `Siglip2VisionModel` (NaFlex, whose images keep their shape) and
`CLIPVisionModel`, and the tower of a `SiglipModel`, a `Siglip2Model` or a `CLIPModel`.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults
from vit_jax.config import image_hw
from vit_jax.models.vit import ViT
from vit_jax.transfer.fit import require_image_size
from vit_jax.transfer.huggingface_images import read_pixels, with_pixels, write_pixels
from vit_jax.transfer.huggingface_labels import LOSSES, read_labels, write_labels
from vit_jax.transfer.names import (
    HEADS_BY_WIDTH,
    LINEAR,
    NORM,
    PATCHES,
    Row,
    find_unheld,
    read_rows,
    row,
    rows_of,
    write_rows,
)
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names_of
from vit_jax.transfer.source import WEIGHTS, Source, int_or_pair, write_json, write_tensors
from vit_jax.transfer.timm_blocks import CLIP, HALF, IMAGENET

logger = logging.getLogger("vit_jax")

GELU = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh",
        "quick_gelu": "quick", "silu": "silu"}  # fmt: skip
HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu", "silu": "silu"}
_KINDS = {"num_attention_heads": "a positive int", "layer_norm_eps": "a positive number",
          "hidden_act": "text", "id2label": "an object", "rope_theta": "a positive number",
          "layerscale_value": "a positive number", "problem_type": "text"}  # fmt: skip
_OURS = "encoder/layer_{i}"


def _blocks(
    theirs: str, norms: str, attention: str, out: str, scale: str = "", up: str = "mlp.fc1",
    down: str = "mlp.fc2", gate: str = "", packed: str = "",
) -> list[Row]:  # fmt: skip
    """The rows of the blocks called `theirs`; {} in a name stands for its number or its letter."""
    rows = [
        *NORM(f"{theirs}.{norms.format(1)}", f"{_OURS}/norm_attention"),
        *NORM(f"{theirs}.{norms.format(2)}", f"{_OURS}/norm_mlp"),
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


def _dinov2(model: ViT) -> list[Row]:
    mlp = {"packed": "mlp.weights_in", "down": "mlp.weights_out"} if model.gated_mlp else {}
    return [
        row("embeddings.cls_token", "class_token"),
        row("embeddings.register_tokens", "register_tokens"),
        row("embeddings.position_embeddings", "pos_embedding"),
        *PATCHES("embeddings.patch_embeddings.projection", "embedding"),
        *_blocks(
            "encoder.layer.{i}", "norm{}", "attention.attention.{}", "attention.output.dense",
            "layer_scale{}.lambda1", **mlp,
        ),
        *NORM("layernorm", "encoder/norm"),
    ]  # fmt: skip


def _dinov3(model: ViT) -> list[Row]:
    del model
    return [
        row("embeddings.cls_token", "class_token"),
        row("embeddings.register_tokens", "register_tokens"),
        *PATCHES("embeddings.patch_embeddings", "embedding"),
        *_blocks(
            "layer.{i}", "norm{}", "attention.{1}_proj", "attention.o_proj",
            "layer_scale{}.lambda1", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj",
        ),
        *NORM("norm", "encoder/norm"),
    ]  # fmt: skip


def _siglip(model: ViT, patches: Callable[..., list[Row]] = PATCHES) -> list[Row]:
    probe = "head.attention.in_proj_"
    ours = [f"map_head/attention/{name}" for name in ("query", "key", "value")]
    return [
        row("embeddings.class_embedding", "class_token", "1 1 d -> d"),
        row("embeddings.position_embedding.weight", "pos_embedding", "1 n d -> n d"),
        *patches("embeddings.patch_embedding", "embedding"),
        *NORM("pre_layrnorm", "embedding_norm"),
        *_blocks("encoder.layers.{i}", "layer_norm{}", "self_attn.{1}_proj", "self_attn.out_proj"),
        *NORM("post_layernorm", "pooled_norm" if model.norm_pooled else "encoder/norm"),
        row("head.probe", "map_head/probe"),
        Row(f"{probe}weight", tuple(f"{name}/kernel" for name in ours), "i o -> o i"),
        Row(f"{probe}bias", tuple(f"{name}/bias" for name in ours)),
        *LINEAR("head.attention.out_proj", "map_head/attention/out"),
        *NORM("head.layernorm", "map_head/norm"),
        *LINEAR("head.mlp.fc1", "map_head/mlp/up"),
        *LINEAR("head.mlp.fc2", "map_head/mlp/down"),
    ]


class Kind(NamedTuple):
    """A kind of tower.

    rows: model -> the rows of the tower, without its prefix.
    architecture: transformers' class of the tower.
    eps, act: transformers' defaults.
    resize: the convention by which transformers resamples positions.
    pixels: mean and standard deviation where no file states them.
    """

    rows: Callable[[ViT], list[Row]]
    architecture: str
    eps: float = 1e-6
    act: str = "gelu"
    resize: str = "half_pixel"
    pixels: Mapping[str, tuple[float, ...]] = MappingProxyType(IMAGENET)


_TANH = {"act": "gelu_pytorch_tanh", "pixels": HALF}
KINDS = {
    "dinov2": Kind(_dinov2, "Dinov2"),
    "dinov2_with_registers": Kind(_dinov2, "Dinov2WithRegisters", resize="antialiased"),
    "dinov3_vit": Kind(_dinov3, "DINOv3ViT", 1e-5),
    "siglip_vision_model": Kind(_siglip, "SiglipVision", **_TANH),
    "siglip2_vision_model": Kind(
        partial(_siglip, patches=LINEAR), "Siglip2Vision", resize="linear_antialiased", **_TANH
    ),
    "clip_vision_model": Kind(_siglip, "CLIPVision", 1e-5, "quick_gelu", pixels=CLIP),
}
_PATCH_ENDS = ("embeddings.patch_embedding.weight", "embeddings.patch_embeddings.weight",
               "embeddings.patch_embeddings.projection.weight")  # fmt: skip
_HEADS = {1536: 16, 4096: 32}  # by width, where they differ from those of a ViT
_HEADS_OF_DINO = {1280: 20, 1536: 24, 4096: 32}


def recognises(source: Source) -> bool:
    """Whether the arrays are those of a tower."""
    return _find_kind(source) is not None


def _find_kind(source: Source) -> tuple[str, str] | None:
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
    return None


def read(source: Source) -> Pretrained:
    """Make the model of the arrays.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with config.json.
    """
    found = _find_kind(source)
    assert found is not None  # recognises(source)
    name, prefix = found
    kind, content = KINDS[name], source.config or {}
    of_head = {key: content[key] for key in ("id2label", "problem_type") if key in content}
    stated = source.read_stated((content.get("vision_config") or content) | of_head, _KINDS)
    source.leave_out(r"(text_model|text_projection|visual_projection|logit_\w+)(\..*)?",
                     "what is not the image tower is")  # fmt: skip
    source.leave_out(r".*embeddings\.(mask_token|position_ids)", "what the tower does not use is")
    source.rename({re.escape(prefix): ""})
    model = _make_model(source, name, stated)
    params = read_rows(_rows(name, model), source, model)
    names = class_names_of(read_labels(stated), model.num_classes, str(source.path))
    pixels = read_pixels(source)
    mean_std = {f"image_{key}": list(value) for key, value in kind.pixels.items()}
    loss = LOSSES.get(stated.get("problem_type"))
    spec = Spec(model.image_size, kind.resize, *kind.pixels.values(), class_names=names, loss=loss)
    if model.image_size is not None:
        spec = with_pixels(spec, pixels or mean_std, "ViTImageProcessor", str(source.path))
    assumed = {"num_attention_heads": model.num_heads, "layer_norm_eps": model.norm_eps,
               "hidden_act": HIDDEN_ACT[model.gelu], "image_mean": spec.mean,
               "image_std": spec.std}  # fmt: skip
    source.say_assumed(assumed, stated | pixels)
    return Pretrained(str(source.path), model, params, spec)


def _make_model(source: Source, name: str, stated: Mapping[str, Any]) -> ViT:
    """The model of a tower's arrays, without their prefix, and of its config."""
    arrays, kind = source.arrays, KINDS[name]
    is_dino, is_v3 = name.startswith("dino"), name == "dinov3_vit"
    block = next(b for b in ("encoder.layer.", "encoder.layers.", "layer.")
                 if any(array.startswith(b) for array in arrays))  # fmt: skip
    ends = (".mlp.fc2.weight", ".mlp.weights_out.weight", ".mlp.down_proj.weight")
    down = next((f"{block}0{end}" for end in ends if f"{block}0{end}" in arrays), None)
    source.refuse([] if down else [f"{block}0{ends[0]}: absent"])
    patches = next(end for end in _PATCH_ENDS if end in arrays)
    width, mlp_dim = arrays[down].shape
    biases = (rf"{re.escape(block)}0\..*\b({n}|{n[0]}_proj)\.bias" for n in ("query", "key"))
    has_query, has_key = (any(re.fullmatch(bias, n) for n in arrays) for bias in biases)
    gated = any(f"{block}0.mlp.{n}.weight" in arrays for n in ("weights_in", "gate_proj"))
    flat = source.size(patches, 1) if arrays[patches].ndim == 2 else None
    patch_size = (math.isqrt(flat // 3),) * 2 if flat else arrays[patches].shape[2:]
    found = {
        "hidden_size": width,
        "num_hidden_layers": source.count_layers(rf"{re.escape(block)}(\d+)\."),
        "patch_size": patch_size,
        "num_register_tokens": source.size("embeddings.register_tokens", 1) or 0,
    }
    if not name.startswith("dinov2"):  # which states a ratio
        found["intermediate_size"] = mlp_dim
    stated = dict(stated)
    if "patch_size" in stated:
        stated["patch_size"] = image_hw(stated["patch_size"], "patch_size")
    source.check_agreement(stated, found)
    usual = (_HEADS_OF_DINO if is_dino else _HEADS).get(width, HEADS_BY_WIDTH.get(width))
    if source.config is not None:
        usual = 6 if is_v3 else 12  # transformers' defaults
    heads, act = stated.get("num_attention_heads", usual), stated.get("hidden_act", kind.act)
    if gated and not is_v3:
        act = "silu"  # whatever is stated
    faults = Faults()
    faults.need(heads, f"number of heads: no published ViT is {width} wide; put config.json next "
                "to the file")  # fmt: skip
    faults.need_known("hidden_act", act, GELU)
    if "problem_type" in stated:
        faults.need_known("problem_type", stated["problem_type"], LOSSES)
    has_head, has_token = "classifier.weight" in arrays, not name.startswith("siglip")
    if has_head and not has_token:
        source.leave_out(r"head\..*", "the pooling, which the classifier does not take, is")
    faults.need(not has_head or name != "clip_vision_model",
                "classifier: CLIP's takes patches without the last norm")  # fmt: skip
    source.refuse(faults, "its architecture cannot be inferred")
    image_size = _image_size(source, stated, found["patch_size"], has_token)
    if name.startswith("dinov2") and image_size[0] != image_size[1]:
        source.refuse([
            "image_size={!r}: transformers takes its positions for those of a square; state the "
            "size of that square, and load it for images of {} x {}".format(image_size, *image_size)
        ])  # fmt: skip
    pool = "token" if has_token else "map" if "head.probe" in source.arrays else "gap"
    return ViT(
        num_classes=source.size("classifier.weight", 0),
        image_size=image_size,
        patch_size=patch_size,
        width=width,
        depth=found["num_hidden_layers"],
        mlp_dim=mlp_dim,
        num_heads=heads,
        pool="token_gap" if has_head and has_token else pool,
        registers=found["num_register_tokens"],
        pos_embed="none" if is_v3 else "learned_1d",
        rotary="normalised" if is_v3 else None,
        rotary_base=float(stated.get("rope_theta", 100.0)),
        pre_norm="pre_layrnorm.weight" in arrays,
        patch_bias=patches.replace(".weight", ".bias") in arrays,
        norm_pooled=name == "clip_vision_model",
        layer_scale=float(stated.get("layerscale_value", 1.0)) if is_dino else None,
        gelu=GELU[act],
        norm_eps=float(stated.get("layer_norm_eps", kind.eps)),
        qkv_bias=has_query,
        key_bias=has_key or not has_query,
        gated_mlp=gated,
    )


def _image_size(
    source: Source, stated: Mapping[str, Any], patch: tuple[int, int], has_token: bool
) -> tuple[int, int] | None:
    """As config.json states it, else of a square grid of positions; None: of any size."""
    if "image_size" in stated:
        return source.whole_patches(image_hw(stated["image_size"], "image_size"), patch)
    positions = source.size("embeddings.position_embeddings", 1)
    if positions is None:
        positions = source.size("embeddings.position_embedding.weight", 0)
    if positions is None:
        return None
    side = source.square_side(positions - has_token)
    return side * patch[0], side * patch[1]


def _rows(name: str, model: ViT) -> list[Row]:
    return rows_of([*KINDS[name].rows(model), *LINEAR("classifier", "head")], model)


def find_name(model: nn.Module) -> str | None:
    """The key of KINDS of the tower that `model` is; None: it is none."""
    if type(model) is not ViT:
        return None
    if model.rotary == "normalised":
        name = "dinov3_vit"
    elif model.layer_scale is not None:
        name = "dinov2_with_registers" if model.registers else "dinov2"
    elif model.pre_norm:
        name = "clip_vision_model"
    else:
        name = "siglip_vision_model"
    return None if _find_unheld(name, model) else name


def find_oblong(model: nn.Module) -> list[str]:
    """The sizes of a tower of transformers that its class needs to be square, and are not."""
    name = find_name(model)
    both = ("image_size", "patch_size")
    of_kind = {"dinov3_vit": (), "siglip_vision_model": both, "clip_vision_model": both}
    keys = of_kind.get(name, ("image_size",))
    sizes = {key: size for key in keys if (size := getattr(model, key))}
    return [f"{key}={size!r}, but {KINDS[name].architecture} of transformers needs a square"
            for key, size in sizes.items() if size[0] != size[1]]  # fmt: skip


def _find_unheld(name: str, model: ViT) -> list[str]:
    """The reasons why a tower of the kind `name` cannot hold `model`."""
    has_head = model.num_classes is not None
    needed: dict[str, tuple] = {
        "hidden_head": (False,), "head_batch_norm": (False,), "mlp_norm": (False,),
        "pool": ("token",), "norm_pooled": (False,), "pos_embed": ("learned_1d",),
        "registers": range(100), "key_bias": (True,), "gelu": tuple(HIDDEN_ACT),
        "num_classes": (None,),
    }  # fmt: skip
    if name == "siglip_vision_model":
        needed |= {"pool": ("map",), "class_token": (False,), "registers": (0,),
                   "qkv_bias": (True,)}  # fmt: skip
    elif name == "clip_vision_model":
        needed |= {"pre_norm": (True,), "patch_bias": (False,), "norm_pooled": (True,),
                   "registers": (0,), "qkv_bias": (True,)}  # fmt: skip
    elif name == "dinov3_vit":
        needed |= {"pos_embed": ("none",), "rotary": ("normalised",), "gated_mlp": (False, True),
                   "key_bias": (False, True), "rotary_dtype": ("float32",),
                   "rotary_registers": (None,)}  # fmt: skip
    else:
        gelu = ("silu",) if model.gated_mlp else tuple(HIDDEN_ACT)
        needed |= {"pool": ("token_gap",) if has_head else ("token",), "gelu": gelu,
                   "num_classes": (model.num_classes,), "gated_mlp": (False, True)}  # fmt: skip
    if name not in ("clip_vision_model", "siglip_vision_model"):
        needed |= {"layer_scale": (model.layer_scale,) if model.layer_scale else (1.0,)}
    faults = find_unheld(model, (ViT,), needed | {"pos_embed_class_token": (True,)})
    if name.startswith("dinov2") and not faults and _ratio(model) is None:
        faults.append(f"mlp_dim={model.mlp_dim}: no ratio of transformers' Dinov2 gives it")
    return faults


def _ratio(model: ViT) -> int | None:
    """The mlp_ratio of a Dinov2; None: it has no such width."""
    for ratio in range(1, 17):
        hidden = ratio * model.width
        if model.mlp_dim == ((hidden * 2 // 3 + 7) // 8 * 8 if model.gated_mlp else hidden):
            return ratio
    return None


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write a folder that `transformers` opens; return the files' names."""
    require_image_size(pretrained)
    model, name = pretrained.model, find_name(pretrained.model)
    assert name is not None  # the format has been checked
    arrays = write_rows(_rows(name, model), pretrained.params, model)
    kind, spec = KINDS[name], pretrained.spec.at(model.image_size)
    architecture = f"{kind.architecture}Model"
    if name.startswith("dinov2") and model.num_classes is not None:
        prefix = f"{name}."
        arrays = {n if n.startswith("classifier") else prefix + n: a for n, a in arrays.items()}
        architecture = f"{kind.architecture}ForImageClassification"
    elif name.startswith(("siglip", "clip")):
        arrays = {f"vision_model.{n}": a for n, a in arrays.items()}
    config = {"architectures": [architecture], **_config(name, model)}
    if model.num_classes is not None:
        config |= write_labels(path, spec, model.num_classes)
    if name.startswith("dino"):
        prefix = next(n for n in arrays if n.endswith("cls_token")).removesuffix("cls_token")
        shape = (1, 1, model.width) if name == "dinov3_vit" else (1, model.width)
        arrays[f"{prefix}mask_token"] = np.zeros(shape, np.float32)
    write_json(path / "config.json", config)
    write_json(path / "preprocessor_config.json", write_pixels(spec))
    write_tensors(path / WEIGHTS, arrays)
    return ["config.json", "preprocessor_config.json", WEIGHTS]


def _config(name: str, model: ViT) -> dict[str, Any]:
    """The values of transformers' config that are not its defaults, or may change."""
    config = {
        "model_type": name,
        "dtype": "float32",
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.num_heads,
        "hidden_act": HIDDEN_ACT[model.gelu],
        "layer_norm_eps": model.norm_eps,
        "image_size": int_or_pair(model.image_size),
        "patch_size": int_or_pair(model.patch_size),
        "num_channels": 3,
    }
    if name.startswith("dinov2"):
        config |= {"mlp_ratio": _ratio(model), "use_swiglu_ffn": model.gated_mlp,
                   "qkv_bias": model.qkv_bias, "layerscale_value": model.layer_scale}  # fmt: skip
    else:
        config["intermediate_size"] = model.mlp_dim
    if name == "dinov3_vit":
        has_key = model.qkv_bias and model.key_bias
        config |= {"rope_theta": model.rotary_base, "layerscale_value": model.layer_scale,
                   "query_bias": model.qkv_bias, "key_bias": has_key,
                   "value_bias": model.qkv_bias, "use_gated_mlp": model.gated_mlp}  # fmt: skip
    if name in ("dinov2_with_registers", "dinov3_vit"):
        config["num_register_tokens"] = model.registers
    if name == "siglip_vision_model":
        config["vision_use_head"] = True
    return config
