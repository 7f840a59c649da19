"""Image towers with the names of Hugging Face's `transformers`, with or without a head.

It reads `ViTForImageClassification`, `ViTModel`, `DeiTForImageClassification(WithTeacher)`,
`DeiTModel`, the encoder of `ViTMAEForPreTraining` and `ViTMAEModel`, `Dinov2Model`,
`Dinov2WithRegistersModel`, both with a classifier too, `DINOv3ViTModel`, `SiglipVisionModel`,
`Siglip2VisionModel` (NaFlex, whose images keep their shape) and `CLIPVisionModel`, and the tower of
a `SiglipModel`, a `Siglip2Model` or a `CLIPModel`; from a file or a folder with config.json. The
pooler of a `ViTModel` becomes the hidden layer of the head; `method="pre_logits"` returns its
output. `huggingface_kinds` has the kinds of towers, `huggingface_texts` the text towers of pairs.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults
from vit_jax.base.files import write_whole
from vit_jax.base.lazy import Lazy
from vit_jax.config import image_hw
from vit_jax.data.native import PatchRule
from vit_jax.models.deit import DeiT
from vit_jax.models.vit import ViT
from vit_jax.models.zero_shot import need_text_side
from vit_jax.transfer.fit import require_image_size, with_learned_positions
from vit_jax.transfer.huggingface_images import (
    cuts_patches,
    read_pixels,
    with_patches,
    with_pixels,
    write_pixels,
)
from vit_jax.transfer.huggingface_kinds import (
    GELU,
    HIDDEN_ACT,
    KINDS,
    VITS,
    find_kind,
    find_misfits,
    find_name,
    find_ratio,
    make_rows,
)
from vit_jax.transfer.huggingface_labels import LOSSES, read_labels, write_labels
from vit_jax.transfer.huggingface_texts import (
    PAIRS,
    TEXTS,
    check_texts,
    take_texts,
    text_rows,
    tokenizer_files,
    write_text_config,
)
from vit_jax.transfer.names import HEADS_BY_WIDTH, held, read_rows, write_rows
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names_of
from vit_jax.transfer.source import Source, int_or_pair, write_json
from vit_jax.transfer.tensors import WEIGHTS, write_tensors

_CONFIG_FORMAT = "5.23.0"  # the version of transformers whose keys `write` uses
_STATED = {"num_channels": "a positive int", "num_attention_heads": "a positive int",
           "layer_norm_eps": "a positive number",
           "hidden_act": "text", "id2label": "an object", "rope_theta": "a positive number",
           "layerscale_value": "a positive number", "problem_type": "text",
           "pooler_act": "text"}  # fmt: skip
_CLASSIFIERS = ("classifier", "cls_classifier")
_DOWN = "encoder/layer_0/mlp/down/kernel"


def recognises(source: Source) -> bool:
    """Whether the arrays have transformers' names."""
    return find_kind(source) is not None


def read(source: Source, pixels: dict[str, Any] | None = None, **tokenizer: Any) -> Pretrained:
    """Make the model of the arrays.

    `pixels`: values of a preprocessor_config.json; None: of the file. `tokenizer`: as for
    `read_texts`.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with config.json.
    """
    found = find_kind(source)
    assert found is not None  # recognises(source)
    name, prefix = found
    kind, content = KINDS[name], source.config or {}
    of_head = {key: content[key] for key in ("id2label", "problem_type") if key in content}
    stated = source.read_stated((content.get("vision_config") or content) | of_head, _STATED)
    read_text_side = take_texts(source, name, **tokenizer)
    source.leave_out(r"decoder\..*", "the decoder of a masked autoencoder is")
    source.leave_out(TEXTS, "what is not the image tower is")
    source.leave_out(r".*embeddings\.(mask_token|position_ids)", "what the tower does not use is")
    model = _make_model(source, name, prefix, stated)
    params = read_rows(make_rows(name, prefix, model), source, model)
    names = class_names_of(read_labels(stated), model.num_classes, str(source.path))
    pixels = read_pixels(source) if pixels is None else pixels
    mean_std = {f"image_{key}": list(value) for key, value in kind.pixels.items()}
    loss = LOSSES.get(stated.get("problem_type", ""))
    mean, std = kind.pixels["mean"], kind.pixels["std"]
    spec = Spec(model.image_size, kind.resize, mean, std, names, loss=loss)
    if name == "siglip2_vision_model" and cuts_patches(pixels):
        spec = with_patches(spec, pixels, model.patch_size, str(source.path))
        assert spec.rule is not None
        model = model.clone(max_tokens=spec.rule.most)
    elif model.image_size is not None:
        processor = "DeiTImageProcessor" if name == "deit" and pixels else "ViTImageProcessor"
        spec = with_pixels(spec, pixels or mean_std, processor, str(source.path))
    assumed = {"num_attention_heads": model.num_heads, "hidden_act": HIDDEN_ACT[model.gelu],
               "layer_norm_eps": model.norm_eps}  # fmt: skip
    if pixels.get("do_normalize", True):
        assumed |= {"image_mean": spec.mean, "image_std": spec.std}
    spec = spec.of(model.channels)
    source.say_assumed(assumed, stated | pixels)
    return Pretrained(str(source.path), model, params, spec, read_text_side=read_text_side)


def _make_model(source: Source, name: str, prefix: str, stated: Mapping[str, Any]) -> ViT:
    """The model of a tower's arrays and of its config."""
    arrays, kind = source.arrays, KINDS[name]
    is_packed = kind.packed and f"{prefix}encoder.layer.0.mlp.weights_in.weight" in arrays
    rows = (row.numbered({"i": 0}) for row in (kind.packed if is_packed else kind.rows))
    theirs = {ours: prefix + row.theirs for row in rows for ours in row.ours}

    def has(ours: str) -> bool:
        return theirs.get(ours) in arrays

    is_dino, is_v3 = name.startswith("dino"), name == "dinov3_vit"
    width, mlp_dim, patch_size = _read_sizes(source, name, theirs)
    channels = 3 if name == "siglip2_vision_model" else arrays[theirs["embedding/kernel"]].shape[1]
    layers = re.escape(theirs[_DOWN].rpartition(".0.")[0])
    depth = source.count_layers(rf"{layers}\.(\d+)\.")
    registers = source.size(theirs.get("register_tokens", ""), 1) or 0
    found = {  # keys of config.json that the arrays determine
        "hidden_size": width,
        "num_hidden_layers": depth,
        "patch_size": patch_size,
        "num_channels": channels,
        "num_register_tokens": registers,
    }
    if not name.startswith("dinov2"):  # which states a ratio
        found["intermediate_size"] = mlp_dim
    stated = dict(stated)
    if is_packed:
        stated["hidden_act"] = "silu"  # whatever is stated
    if "patch_size" in stated:
        stated["patch_size"] = image_hw(stated["patch_size"], "patch_size")
    source.check_agreement(stated, found)
    head = _find_head(source, name, prefix)
    arrays = source.arrays
    heads, act = _read_unseen(source, name, stated, width, head, has("head_hidden/kernel"))
    image_size = _image_size(source, name, stated, theirs, patch_size)
    pool = "token" if _has_token(name) else "map" if has("map_head/probe") else "gap"
    family = partial(DeiT, distillation_head=head != "classifier") if name == "deit" else ViT
    return family(
        num_classes=source.size(f"{head}.weight", 0),
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=heads,
        hidden_head=has("head_hidden/kernel"),
        pool="token_gap" if head and is_dino else pool,
        registers=registers,
        pos_embed="none" if is_v3 else "learned_1d",
        rotary="normalised" if is_v3 else None,
        rotary_base=float(stated.get("rope_theta", 100.0)),
        pre_norm=has("embedding_norm/scale"),
        patch_bias=has("embedding/bias"),
        norm_pooled=name == "clip_vision_model",
        layer_scale=float(stated.get("layerscale_value", 1.0)) if is_dino else None,
        gelu=GELU[act],
        norm_eps=float(stated.get("layer_norm_eps", kind.eps)),
        qkv_bias=(has_query := has("encoder/layer_0/attention/query/bias")),
        key_bias=has("encoder/layer_0/attention/key/bias") or not has_query,
        gated_mlp=has("encoder/layer_0/mlp/gate/kernel"),
    )


def _has_token(name: str) -> bool:
    return not name.startswith("siglip")


def _read_sizes(
    source: Source, name: str, theirs: Mapping[str, str]
) -> tuple[int, int, tuple[int, int]]:
    """Width, `mlp_dim` and patch size by the arrays, whose ranks are checked.

    `theirs`: {our name: the array's name}.
    """
    patches, is_flat = theirs["embedding/kernel"], name == "siglip2_vision_model"
    ranks = {patches: 2 if is_flat else 4, theirs[_DOWN]: 2}
    if name != "dinov3_vit":
        ranks[theirs["pos_embedding"]] = 3 if name in VITS or name.startswith("dino") else 2
    source.require(ranks, {f"{classifier}.weight": 2 for classifier in _CLASSIFIERS})
    width, mlp_dim = source.arrays[theirs[_DOWN]].shape
    shape = source.arrays[patches].shape
    return width, mlp_dim, (math.isqrt(shape[1] // 3),) * 2 if is_flat else shape[2:]


def _find_head(source: Source, name: str, prefix: str) -> str | None:
    """The name of the classifier; leaves out what it does not take."""
    head = next((n for n in _CLASSIFIERS if f"{n}.weight" in source.arrays), None)
    if name == "deit" and head is None:
        source.leave_out(rf"{prefix}pooler\..*", "no head was trained with the pooler; it is")
    if head and not _has_token(name):
        source.leave_out(rf"{prefix}head\..*",
                         "the pooling, which the classifier does not take, is")  # fmt: skip
    return head


def _read_unseen(
    source: Source,
    name: str,
    stated: Mapping[str, Any],
    width: int,
    head: str | None,
    has_pooler: bool,
) -> tuple[int, str]:
    """The number of heads and the activation, which the arrays do not determine.

    Raises:
      InputError: naming each value, and the loss, if it is not supported.
    """
    kind, faults = KINDS[name], Faults()
    usual = kind.heads.get(width, HEADS_BY_WIDTH.get(width))
    heads = stated.get("num_attention_heads", usual if source.config is None else kind.num_heads)
    act = stated.get("hidden_act", kind.act)
    faults.need(heads, f"number of heads: no published ViT is {width} wide; put config.json next "
                "to the file")  # fmt: skip
    faults.need_known("hidden_act", act, GELU)
    if "problem_type" in stated:
        faults.need_known("problem_type", stated["problem_type"], LOSSES)
    if has_pooler:
        faults.need_known("pooler_act", stated.get("pooler_act", "tanh"), ("tanh",))
    faults.need(not head or name != "clip_vision_model",
                "classifier: CLIP's takes patches without the last norm")  # fmt: skip
    source.refuse(faults, "its architecture cannot be inferred")
    return heads, act


def _image_size(
    source: Source,
    name: str,
    stated: Mapping[str, Any],
    theirs: Mapping[str, str],
    patch_size: tuple[int, int],
) -> tuple[int, int] | None:
    """The stated size. If none is stated, all positions make a square. None: any size."""
    if "image_size" in stated:
        size = source.whole_patches(image_hw(stated["image_size"], "image_size"), patch_size)
        if name.startswith("dinov2") and size[0] != size[1]:
            source.refuse([
                "image_size={!r}: transformers takes its positions for a square's; state "
                "the size of that square, and load it for images of {} x {}".format(size, *size)
            ])  # fmt: skip
        return size
    if name == "dinov3_vit":
        return None
    positions = math.prod(source.arrays[theirs["pos_embedding"]].shape[:-1])
    side = source.square_side(positions - _has_token(name) - (name == "deit"))
    return side * patch_size[0], side * patch_size[1]


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    kind = KINDS[name := find_name(model)]
    sizes = {key: size for key in kind.square if (size := getattr(model, key))}
    oblong = [f"{key}={size!r}, but {kind.architecture} of transformers needs a square"
              for key, size in sizes.items() if size[0] != size[1]]  # fmt: skip
    return find_misfits(name, model) + oblong


def write(path: epath.Path, pretrained: Pretrained, max_shard_size: str | None = None) -> list[str]:
    """Write a folder that `transformers` opens; return the files' names."""
    return _write_folder(path, *_as_folder(path, pretrained), max_shard_size)


def check_pair(model: nn.Module) -> list[str]:
    """The reasons why `model` cannot be the image tower of a CLIPModel or a SiglipModel."""
    if find_name(model) in PAIRS:
        return check(model)
    return ["its image tower is not CLIP's or SigLIP's, without a head"]


def write_pair(
    path: epath.Path, pretrained: Pretrained, max_shard_size: str | None = None
) -> list[str]:
    """Write a CLIPModel or a SiglipModel, with its tokenizer; return the files' names."""
    side = need_text_side(pretrained.read_text_side, pretrained.source)
    tower, arrays, spec = _as_folder(path, pretrained)
    name = tower["model_type"]
    check_texts(side.matcher, name)
    text = write_text_config(side.matcher, name)
    config = {
        "architectures": [f"{KINDS[name].architecture.removesuffix('Vision')}Model"],
        "model_type": PAIRS[name],
        "dtype": "float32",
        "projection_dim": text.get("projection_dim"),
        "text_config": text,
        "vision_config": {k: v for k, v in tower.items() if k not in ("architectures", "dtype")},
    }
    scale = {"logit_scale": np.asarray(side.matcher.bound(side.params["logit_scale"]))}
    arrays |= write_rows(text_rows(side.matcher), {**side.params, **scale}, side.matcher)
    files = _write_folder(path, config, arrays, spec, max_shard_size)
    tokenizer = tokenizer_files(side)
    for file, content in tokenizer.items():
        write_whole(path / file, content)
    return [*files, *tokenizer]


def _as_folder(
    path: epath.Path, pretrained: Pretrained
) -> tuple[dict[str, Any], dict[str, np.ndarray | Lazy], Spec]:
    """config.json, the arrays and the spec of a tower; `path` is named in messages."""
    image_size = require_image_size(pretrained)
    name = find_name(pretrained.model)
    if name in VITS:
        pretrained = with_learned_positions(pretrained, class_token_has_one=True)
    model = held(pretrained.model, ViT)
    architecture, prefix = f"{KINDS[name].architecture}Model", ""
    if name.endswith("vision_model"):
        prefix = "" if name.startswith("siglip2") else "vision_model."
    elif model.num_classes is not None:
        teacher = "WithTeacher" if getattr(model, "distillation_head", False) else ""
        architecture = f"{KINDS[name].architecture}ForImageClassification{teacher}"
        prefix = f"{name}."
    arrays: dict[str, np.ndarray | Lazy] = {
        **write_rows(make_rows(name, prefix, model), pretrained.params, model)
    }
    if name.startswith("dino"):
        shape = (1, 1, model.width) if name == "dinov3_vit" else (1, model.width)
        arrays[f"{prefix}embeddings.mask_token"] = np.zeros(shape, np.float32)
    rule = None
    if name == "siglip2_vision_model" and model.max_tokens is not None:
        rule = PatchRule(model.patch_size, model.max_tokens)
    spec = pretrained.spec.at(image_size).of(model.channels)._replace(rule=rule)
    config = {"architectures": [architecture], **_config(name, model, image_size)}
    if name in VITS or model.num_classes is not None:
        # As in transformers, a model without classes is described with ten labels.
        config |= write_labels(path, spec, model.num_classes or 10)
    return config, arrays, spec


def _write_folder(
    path: epath.Path,
    config: dict[str, Any],
    arrays: Mapping[str, np.ndarray | Lazy],
    spec: Spec,
    max_shard_size: str | None,
) -> list[str]:
    write_json(path / "config.json", config)
    write_json(path / "preprocessor_config.json", write_pixels(spec))
    files = write_tensors(path / WEIGHTS, arrays, max_shard_size)
    return ["config.json", "preprocessor_config.json", *files]


def _config(name: str, model: ViT, image_size: tuple[int, int]) -> dict[str, Any]:
    """The values of transformers' config: all of a ViT's, of others those that may change."""
    config = {
        "model_type": name,
        "dtype": "float32",
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.num_heads,
        "hidden_act": HIDDEN_ACT[model.gelu],
        "layer_norm_eps": model.norm_eps,
        "image_size": int_or_pair(image_size),
        "patch_size": int_or_pair(model.patch_size),
        "num_channels": model.channels,
    }
    if name.startswith("dinov2"):
        config |= {"mlp_ratio": find_ratio(model), "use_swiglu_ffn": model.gated_mlp,
                   "qkv_bias": model.qkv_bias, "layerscale_value": model.layer_scale}  # fmt: skip
    else:
        config["intermediate_size"] = model.mlp_dim
    if name in VITS:
        config |= {"attention_probs_dropout_prob": 0.0, "encoder_stride": 16,
                   "hidden_dropout_prob": 0.0, "initializer_range": 0.02, "pooler_act": "tanh",
                   "pooler_output_size": model.width, "qkv_bias": model.qkv_bias,
                   "transformers_version": _CONFIG_FORMAT}  # fmt: skip
        config = dict(sorted(config.items()))
    if name == "dinov3_vit":
        has_key = model.qkv_bias and model.key_bias
        config |= {"rope_theta": model.rotary_base, "layerscale_value": model.layer_scale,
                   "query_bias": model.qkv_bias, "key_bias": has_key,
                   "value_bias": model.qkv_bias, "use_gated_mlp": model.gated_mlp}  # fmt: skip
    if name in ("dinov2_with_registers", "dinov3_vit"):
        config["num_register_tokens"] = model.registers
    if name.startswith("siglip"):
        config["vision_use_head"] = True
    if name == "siglip2_vision_model":  # of any shape; this is the square of its positions
        del config["image_size"]
        config |= {"num_patches": math.prod(model.grid), "patch_size": model.patch_size[0]}
    return config
