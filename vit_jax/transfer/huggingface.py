"""Models with the names of Hugging Face's `transformers`: ViT and DeiT, with or without a head.

Its other image towers are in `huggingface_vision`.

It reads `ViTForImageClassification`, `ViTModel`, `DeiTForImageClassification(WithTeacher)` and
`DeiTModel`, from a file or a folder with config.json, and the encoder of `ViTMAEForPreTraining` and
`ViTMAEModel`. The pooler of a `ViTModel` becomes the hidden layer of the head;
`method="pre_logits"` returns its output.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
from etils import epath

from vit_jax.base.errors import Faults
from vit_jax.config import image_hw
from vit_jax.models.deit import DeiT
from vit_jax.models.vit import ViT
from vit_jax.transfer import huggingface_vision as vision
from vit_jax.transfer.fit import with_learned_positions
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

_DEFAULT_HEADS, _DEFAULT_EPS = 12, 1e-12  # defaults of ViTConfig and DeiTConfig
_CONFIG_FORMAT = "5.23.0"  # the version of transformers whose keys `write` uses
_KINDS = {"num_attention_heads": "a positive int", "layer_norm_eps": "a positive number",
          "hidden_act": "text", "id2label": "an object", "problem_type": "text",
          "pooler_act": "text"}  # fmt: skip
_CLASSIFIERS = ("classifier", "cls_classifier")
_PATCHES = "embeddings.patch_embeddings.projection"


def _rows(model: nn.Module, prefix: str, head: str | None) -> list[Row]:
    """The rows of `model`; `prefix` and `head` are names that depend on transformers' class."""
    embeddings, encoder = f"{prefix}embeddings", f"{prefix}encoder.layer.{{i}}"
    ours = "encoder/layer_{i}"
    qkv = []
    for name in ("query", "key", "value"):
        qkv += LINEAR(f"{encoder}.attention.attention.{name}", f"{ours}/attention/{name}")
    table = [
        row(f"{embeddings}.cls_token", "class_token"),
        row(f"{embeddings}.position_embeddings", "pos_embedding"),
        *PATCHES(f"{prefix}{_PATCHES}", "embedding"),
        row(f"{embeddings}.distillation_token", "distillation_token"),
        *NORM(f"{encoder}.layernorm_before", f"{ours}/norm_attention"),
        *NORM(f"{encoder}.layernorm_after", f"{ours}/norm_mlp"),
        *qkv,
        *LINEAR(f"{encoder}.attention.output.dense", f"{ours}/attention/out"),
        *LINEAR(f"{encoder}.intermediate.dense", f"{ours}/mlp/up"),
        *LINEAR(f"{encoder}.output.dense", f"{ours}/mlp/down"),
        *NORM(f"{prefix}layernorm", "encoder/norm"),
        *LINEAR(f"{prefix}pooler.dense", "head_hidden"),
        *LINEAR(head or "", "head"),
        *LINEAR("distillation_classifier", "head_distillation"),
    ]
    return rows_of(table, model)


def recognises(source: Source) -> bool:
    """Whether the arrays have transformers' names."""
    return vision.recognises(source) or any(
        name.endswith(f"{_PATCHES}.weight") for name in source.arrays
    )


def read(source: Source) -> Pretrained:
    """Make the model of the arrays.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with config.json.
    """
    if vision.recognises(source):
        return vision.read(source)
    source.leave_out(r"decoder\..*", "the decoder of a masked autoencoder is")
    arrays = source.arrays
    prefix = next((p for p in ("vit.", "deit.") if f"{p}embeddings.cls_token" in arrays), "")
    patches, positions = f"{prefix}{_PATCHES}.weight", f"{prefix}embeddings.position_embeddings"
    first_layer = f"{prefix}encoder.layer.0"
    up = f"{first_layer}.intermediate.dense.weight"
    optional = {f"{name}.weight": 2 for name in _CLASSIFIERS}
    source.require({patches: 4, positions: 3, up: 2}, optional)
    found = {  # keys of config.json that the arrays determine
        "hidden_size": arrays[patches].shape[0],
        "num_hidden_layers": source.count_layers(rf"{prefix}encoder\.layer\.(\d+)\."),
        "intermediate_size": arrays[up].shape[0],
        "patch_size": arrays[patches].shape[2:],
    }
    stated = source.read_stated(source.config, _KINDS)
    if "patch_size" in stated:
        stated["patch_size"] = image_hw(stated["patch_size"], "patch_size")
    source.check_agreement(stated, found)
    head = next((n for n in _CLASSIFIERS if f"{n}.weight" in arrays), None)
    distilled = f"{prefix}embeddings.distillation_token" in arrays
    if distilled and head is None:
        source.leave_out(rf"{prefix}pooler\..*", "no head was trained with the pooler; it is")
    assumed = _read_unseen(source, stated, found["hidden_size"])
    number = arrays[positions].shape[1] - 1 - distilled
    family = partial(DeiT, distillation_head=head != "classifier") if distilled else ViT
    model = family(
        num_classes=head and source.size(f"{head}.weight", 0),
        image_size=_image_size(source, stated, number, found["patch_size"]),
        patch_size=found["patch_size"],
        width=found["hidden_size"],
        depth=found["num_hidden_layers"],
        mlp_dim=found["intermediate_size"],
        num_heads=assumed["num_attention_heads"],
        hidden_head=f"{prefix}pooler.dense.weight" in source.arrays,
        gelu=vision.GELU[assumed["hidden_act"]],
        norm_eps=assumed["layer_norm_eps"],
        qkv_bias=f"{first_layer}.attention.attention.query.bias" in arrays,
    )
    params = read_rows(_rows(model, prefix, head), source, model)
    labels = read_labels(stated)
    pixels, names = read_pixels(source), class_names_of(labels, model.num_classes, str(source.path))
    loss = LOSSES.get(stated.get("problem_type"))
    spec = Spec(model.image_size, "half_pixel", class_names=names, loss=loss)
    processor = "DeiTImageProcessor" if distilled and pixels else "ViTImageProcessor"
    spec = with_pixels(spec, pixels, processor, str(source.path))
    if pixels.get("do_normalize", True):
        assumed |= {"image_mean": spec.mean, "image_std": spec.std}
    source.say_assumed(assumed, stated | pixels)
    return Pretrained(str(source.path), model, params, spec)


def _image_size(
    source: Source, stated: Mapping[str, Any], number: int, patch_size: tuple[int, int]
) -> tuple[int, int]:
    """As stated, else that of a square of `number` patches."""
    if "image_size" in stated:
        return image_hw(stated["image_size"], "image_size")
    side = source.square_side(number)
    return side * patch_size[0], side * patch_size[1]


def _read_unseen(source: Source, stated: dict[str, Any], width: int) -> dict[str, Any]:
    """{key of config.json: value or default} for keys that the arrays do not determine.

    Raises:
      InputError: naming each value, and the loss, if it is not supported.
    """
    default_heads = HEADS_BY_WIDTH.get(width) if source.config is None else _DEFAULT_HEADS
    heads = stated.get("num_attention_heads", default_heads)
    act = stated.get("hidden_act", "gelu")
    faults = Faults()
    faults.need(heads, f"number of heads: no published ViT is {width} wide; put config.json next "
                "to the file")  # fmt: skip
    faults.need_known("hidden_act", act, vision.GELU)
    if "problem_type" in stated:
        faults.need_known("problem_type", stated["problem_type"], LOSSES)
    if any(name.endswith("pooler.dense.weight") for name in source.arrays):
        faults.need_known("pooler_act", stated.get("pooler_act", "tanh"), ("tanh",))
    source.refuse(faults, "its architecture cannot be inferred")
    eps = float(stated.get("layer_norm_eps", _DEFAULT_EPS))
    return {"num_attention_heads": heads, "hidden_act": act, "layer_norm_eps": eps}


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    if vision.find_name(model) is not None:
        return vision.find_oblong(model)
    of_head = {} if getattr(model, "num_classes", None) is None else {"hidden_head": (False,)}
    needed = {"pool": ("token",), "norm_pooled": (False,), "layer_scale": (None,)}
    return find_unheld(model, (ViT, DeiT), needed | of_head)


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write a folder that `transformers` opens; return the files' names."""
    if vision.find_name(pretrained.model) is not None:
        return vision.write(path, pretrained)
    pretrained = with_learned_positions(pretrained, class_token_has_one=True)
    model = pretrained.model
    distilled = isinstance(model, DeiT)
    kind = "deit" if distilled else "vit"
    two_heads = distilled and model.distillation_head
    architecture, prefix = f"{type(model).__name__}Model", ""
    if model.num_classes is not None:
        teacher = "WithTeacher" if two_heads else ""
        architecture = f"{type(model).__name__}ForImageClassification{teacher}"
        prefix = f"{kind}."
    head = "cls_classifier" if two_heads else "classifier"
    arrays = write_rows(_rows(model, prefix, head), pretrained.params, model)
    spec = pretrained.spec.at(model.image_size)
    # As in transformers, a model without classes is described with ten labels.
    labels = write_labels(path, spec, model.num_classes or 10)
    config = {"architectures": [architecture], **_config(model, kind), **labels}
    write_json(path / "config.json", config)
    write_json(path / "preprocessor_config.json", write_pixels(spec))
    write_tensors(path / WEIGHTS, arrays)
    return ["config.json", "preprocessor_config.json", WEIGHTS]


def _config(model: nn.Module, kind: str) -> dict[str, Any]:
    """The values of ViTConfig or DeiTConfig; `kind` is vit or deit."""
    return {
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
        "encoder_stride": 16,
        "hidden_act": vision.HIDDEN_ACT[model.gelu],
        "hidden_dropout_prob": 0.0,
        "hidden_size": model.width,
        "image_size": int_or_pair(model.image_size),
        "initializer_range": 0.02,
        "intermediate_size": model.mlp_dim,
        "layer_norm_eps": model.norm_eps,
        "model_type": kind,
        "num_attention_heads": model.num_heads,
        "num_channels": 3,
        "num_hidden_layers": model.depth,
        "patch_size": int_or_pair(model.patch_size),
        "pooler_act": "tanh",
        "pooler_output_size": model.width,
        "qkv_bias": model.qkv_bias,
        "transformers_version": _CONFIG_FORMAT,
    }
