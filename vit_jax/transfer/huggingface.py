"""Models with the names of Hugging Face's `transformers`: ViT and DeiT, with or without a head.

It reads `ViTForImageClassification`, `ViTModel`, `DeiTForImageClassification(WithTeacher)` and
`DeiTModel`, from a file or a folder with config.json, and the encoder of `ViTMAEForPreTraining` and
`ViTMAEModel`. The pooler of a `ViTModel` becomes the hidden
layer of the head; `method="pre_logits"` returns its output.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.config import image_hw
from vit_jax.files import write_whole
from vit_jax.models.deit import DeiT
from vit_jax.models.vit import ViT
from vit_jax.transfer import layout, safetensors
from vit_jax.transfer.common import (
    check_blocks,
    check_family,
    check_positions,
    refuse,
    square_side,
    to_json,
    with_learned_positions,
)
from vit_jax.transfer.huggingface_images import library_ops, read_pixels, with_pixels, write_pixels
from vit_jax.transfer.layout import Entry, same, torch_linear, torch_norm, torch_patches
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names_of

__all__ = ["check", "knows", "library_ops", "read", "write"]

logger = logging.getLogger("vit_jax")

_GELU = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
_DEFAULT_HEADS, _DEFAULT_EPS = 12, 1e-12  # defaults of ViTConfig and DeiTConfig
_CONFIG_FORMAT = "5.23.0"  # the version of transformers whose keys `write` uses
_KINDS = {"num_attention_heads": "a positive int", "layer_norm_eps": "a positive number",
          "hidden_act": "text", "id2label": "an object", "problem_type": "text"}  # fmt: skip
_LOSSES = {"single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
_PROBLEM_TYPE = {ours: theirs for theirs, ours in _LOSSES.items()}
_CLASSIFIERS = ("classifier", "cls_classifier")


def knows(names: Iterable[str]) -> bool:
    """Whether the arrays have transformers' names."""
    return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in names)


def _entries(model: nn.Module, prefix: str) -> list[Entry]:
    embeddings = f"{prefix}embeddings."
    entries = [
        same(f"{embeddings}cls_token", "class_token"),
        same(f"{embeddings}position_embeddings", "pos_embedding"),
        *torch_patches(f"{embeddings}patch_embeddings.projection", model.patch_size),
    ]
    if isinstance(model, DeiT):
        entries.append(same(f"{embeddings}distillation_token", "distillation_token"))
    for i in range(model.depth):
        theirs, ours = f"{prefix}encoder.layer.{i}", f"encoder/layer_{i}"
        entries += torch_norm(f"{theirs}.layernorm_before", f"{ours}/norm_attention")
        entries += torch_norm(f"{theirs}.layernorm_after", f"{ours}/norm_mlp")
        attention = f"{theirs}.attention"
        for name in ("query", "key", "value"):
            entries += torch_linear(
                f"{attention}.attention.{name}", f"{ours}/attention/{name}", model.qkv_bias
            )
        entries += torch_linear(f"{attention}.output.dense", f"{ours}/attention/out")
        entries += torch_linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up")
        entries += torch_linear(f"{theirs}.output.dense", f"{ours}/mlp/down")
    entries += torch_norm(f"{prefix}layernorm", "encoder/norm")
    if model.hidden_head:
        entries += torch_linear(f"{prefix}pooler.dense", "head_hidden")
    if model.num_classes is not None:
        two = isinstance(model, DeiT) and model.distillation_head
        entries += torch_linear("cls_classifier" if two else "classifier", "head")
        if two:
            entries += torch_linear("distillation_classifier", "head_distillation")
    return entries


def read(path: epath.Path, arrays: dict[str, np.ndarray]) -> Pretrained:
    """Make the model of `arrays`, which were read from `path`.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with config.json.
    """
    source = str(path)
    arrays = layout.without_decoder(arrays, r"decoder\..*", source)
    prefix = next((p for p in ("vit.", "deit.") if f"{p}embeddings.cls_token" in arrays), "")
    optional = {f"{name}.weight": 2 for name in _CLASSIFIERS}
    layout.require(arrays, _needed(prefix), source, optional)
    config = safetensors.read_config(path)
    found = _read_shapes(arrays, prefix, source)
    stated = layout.read_stated(config, _KINDS, source)
    if "patch_size" in stated:
        stated["patch_size"] = image_hw(stated["patch_size"], "patch_size")
    layout.check_agreement(stated, found, source)
    assumed = _read_unseen(config, stated, found["hidden_size"], source)
    head = next((n for n in _CLASSIFIERS if f"{n}.weight" in arrays), None)
    distilled = f"{prefix}embeddings.distillation_token" in arrays
    image_size = _image_size(arrays, prefix, stated, source)
    if distilled and head is None and f"{prefix}pooler.dense.weight" in arrays:
        logger.info("%s: the pooler is ignored; no head was trained with it", source)
        arrays = {name: a for name, a in arrays.items() if not name.startswith(f"{prefix}pooler.")}
    fields = {
        "num_classes": None if head is None else arrays[f"{head}.weight"].shape[0],
        "image_size": image_size,
        "patch_size": found["patch_size"],
        "width": found["hidden_size"],
        "depth": found["num_hidden_layers"],
        "mlp_dim": found["intermediate_size"],
        "num_heads": assumed["num_attention_heads"],
        "hidden_head": f"{prefix}pooler.dense.weight" in arrays,
        "gelu": _GELU[assumed["hidden_act"]],
        "norm_eps": assumed["layer_norm_eps"],
        "qkv_bias": f"{prefix}encoder.layer.0.attention.attention.query.bias" in arrays,
    }
    of_deit = {"distillation_head": head != "classifier"}
    model = DeiT(**fields, **of_deit) if distilled else ViT(**fields)
    params = layout.read_entries(_entries(model, prefix), arrays, model, source)
    pixels = read_pixels(path)
    spec = Spec(
        image_size=model.image_size,
        resize="half_pixel",
        class_names=_class_names(stated, model, source),
        loss=_LOSSES.get(stated.get("problem_type")),
    )
    spec = with_pixels(spec, pixels, distilled, source)
    if pixels.get("do_normalize", True):
        assumed |= {"image_mean": spec.mean, "image_std": spec.std}
    safetensors.say_assumed(path, config, assumed, stated | pixels)
    return Pretrained(source, model, params, spec)


def _needed(prefix: str) -> dict[str, int]:
    """{name: number of axes} of the arrays that determine the model's sizes."""
    return {
        f"{prefix}embeddings.patch_embeddings.projection.weight": 4,
        f"{prefix}embeddings.position_embeddings": 3,
        f"{prefix}encoder.layer.0.intermediate.dense.weight": 2,
    }


def _read_shapes(arrays: dict[str, np.ndarray], prefix: str, source: str) -> dict[str, Any]:
    """{key of config.json: value} for keys that the arrays determine."""
    projection, _, up = (arrays[name] for name in _needed(prefix))
    layers = rf"{re.escape(prefix)}encoder\.layer\.(\d+)\."
    return {
        "hidden_size": projection.shape[0],
        "num_hidden_layers": layout.count_layers(arrays, layers, source),
        "intermediate_size": up.shape[0],
        "num_channels": 3,
        "pooler_act": "tanh",
        "patch_size": tuple(projection.shape[2:]),
    }


def _read_unseen(
    config: dict[str, Any] | None, stated: dict[str, Any], width: int, source: str
) -> dict[str, Any]:
    """{key of config.json: value or default} for keys that the arrays do not determine.

    Raises:
      InputError: naming each value, and the loss, if it is not supported.
    """
    default_heads = _DEFAULT_HEADS if config is not None else layout.heads_by_width(width)
    heads = stated.get("num_attention_heads", default_heads)
    act = stated.get("hidden_act", "gelu")
    eps = float(stated.get("layer_norm_eps", _DEFAULT_EPS))
    faults = []
    if heads is None:
        faults.append(
            f"number of heads: no published ViT is {width} wide; put config.json next to the file"
        )
    if act not in _GELU:
        faults.append(f"hidden_act={act!r}: known: {', '.join(_GELU)}")
    problem = stated.get("problem_type")
    if problem not in (None, *_LOSSES):
        faults.append(f"problem_type={problem!r}: known: {', '.join(_LOSSES)}")
    refuse(faults, f"init_from={source!r}: its architecture cannot be inferred")
    return {"num_attention_heads": heads, "hidden_act": act, "layer_norm_eps": eps}


def _image_size(
    arrays: dict[str, np.ndarray], prefix: str, stated: dict[str, Any], source: str
) -> tuple[int, int]:
    """The stated image size; else the size of the square grid that the positions fill."""
    if "image_size" in stated:
        return image_hw(stated["image_size"], "image_size")
    projection, positions, _ = (arrays[name] for name in _needed(prefix))
    num_prefix = 1 + (f"{prefix}embeddings.distillation_token" in arrays)
    side = square_side(positions.shape[1] - num_prefix, source)
    return (side * projection.shape[2], side * projection.shape[3])


def _class_names(stated: dict[str, Any], model: nn.Module, source: str) -> tuple[str, ...] | None:
    names = stated.get("id2label")
    if names is None or names == {str(i): f"LABEL_{i}" for i in range(len(names))}:
        return None  # transformers writes these names if there are none
    names = [names.get(str(i)) for i in range(len(names))]
    return class_names_of(names, model.num_classes, source)


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    if faults := check_family(model, ViT, DeiT):
        return faults
    faults = check_positions(model)
    if model.pool != "token":
        faults.append(f"pool={model.pool!r}, but the format classifies the class token")
    if model.hidden_head and model.num_classes is not None:
        faults.append("hidden_head=True, but the format's head is linear")
    if model.norm_pooled:
        faults.append("norm_pooled=True, but the format normalises the tokens")
    faults += check_blocks(model)
    if model.layer_scale is not None:
        faults.append(f"layer_scale={model.layer_scale}")
    return faults


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write a folder that `transformers` opens; return the files' names."""
    pretrained = with_learned_positions(pretrained, class_token_has_one=True)
    model = pretrained.model
    distilled = isinstance(model, DeiT)
    kind = "deit" if distilled else "vit"
    if model.num_classes is None:
        architecture, prefix = ("DeiTModel" if distilled else "ViTModel"), ""
    else:
        teacher = "WithTeacher" if distilled and model.distillation_head else ""
        family = "DeiT" if distilled else "ViT"
        architecture, prefix = f"{family}ForImageClassification{teacher}", f"{kind}."
    arrays = layout.write_entries(_entries(model, prefix), pretrained.params)
    spec = pretrained.spec.at(model.image_size)
    config = {"architectures": [architecture], **_config(model, kind, spec.class_names)}
    if spec.loss in _PROBLEM_TYPE:
        config["problem_type"] = _PROBLEM_TYPE[spec.loss]
    elif spec.loss is not None:  # a plug-in's loss
        logger.warning("%s: omits the loss %s, which transformers lacks", path, spec.loss)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "config.json", to_json(config))
    write_whole(path / "preprocessor_config.json", to_json(write_pixels(spec)))
    safetensors.write_arrays(path / "model.safetensors", arrays)
    return ["config.json", "preprocessor_config.json", "model.safetensors"]


def _config(model: nn.Module, kind: str, class_names: tuple[str, ...] | None) -> dict[str, Any]:
    """The values of ViTConfig or DeiTConfig; `kind` is vit or deit."""
    # As in transformers, a model without classes is described with ten labels.
    labels = class_names or [f"LABEL_{i}" for i in range(model.num_classes or 10)]
    return {
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
        "encoder_stride": 16,
        "hidden_act": _HIDDEN_ACT[model.gelu],
        "hidden_dropout_prob": 0.0,
        "hidden_size": model.width,
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "image_size": layout.int_or_pair(model.image_size),
        "initializer_range": 0.02,
        "intermediate_size": model.mlp_dim,
        "label2id": {name: i for i, name in enumerate(labels)},
        "layer_norm_eps": model.norm_eps,
        "model_type": kind,
        "num_attention_heads": model.num_heads,
        "num_channels": 3,
        "num_hidden_layers": model.depth,
        "patch_size": layout.int_or_pair(model.patch_size),
        "pooler_act": "tanh",
        "pooler_output_size": model.width,
        "qkv_bias": model.qkv_bias,
        "transformers_version": _CONFIG_FORMAT,
    }
