"""Models in the names of Hugging Face's `transformers`: ViT and DeiT, with or without a head.

Read: `ViTForImageClassification`, `ViTModel`, `DeiTForImageClassification(WithTeacher)`,
`DeiTModel`, as a file or as a folder with config.json. The pooler of a `ViTModel` is the hidden
layer of the head, whose output `method="pre_logits"` gives.
"""

import logging
import operator
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
from vit_jax.transfer import layout, rules, safetensors
from vit_jax.transfer.images import ops_for
from vit_jax.transfer.layout import Entry, same, torch_linear, torch_norm, torch_patches
from vit_jax.transfer.rules import Cut, Pretrained, Spec

logger = logging.getLogger("vit_jax")

_GELU = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
_DEFAULT_HEADS, _DEFAULT_EPS = 12, 1e-12  # of ViTConfig and DeiTConfig
_CONFIG_FORMAT = "5.23.0"  # the version of transformers whose keys are written
_KINDS = {"num_attention_heads": "a positive int", "layer_norm_eps": "a positive number",
          "hidden_act": "text", "id2label": "an object", "problem_type": "text"}  # fmt: skip
_LOSSES = {"single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
_PROBLEM_TYPE = {ours: theirs for theirs, ours in _LOSSES.items()}

_PIXELS = {
    "do_resize": "true or false", "do_center_crop": "true or false", "do_rescale": "true or false",
    "do_normalize": "true or false", "do_pad": "true or false", "resample": "a positive int",
    "rescale_factor": "a positive number", "image_mean": "three numbers",
    "image_std": "three positive numbers", "image_processor_type": "text",
    "feature_extractor_type": "text", "ops": "text",
}  # fmt: skip
_PROCESSOR = re.compile(r"(ViT|DeiT|Bit)(ImageProcessor(Fast|Pil)?|FeatureExtractor)")
# What a class of image processors does where a file does not state it. ViT's and DeiT's resize to
# (height, width), each side by itself; so does an int. Bit's keeps the proportion.
_PROCESSORS = {
    "ViT": {"resample": 2, "do_center_crop": False},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Bit": {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True,
            "crop_size": 224, "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711]},
}  # fmt: skip
_FILTERS = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
_RESAMPLE = {ours: theirs for theirs, ours in _FILTERS.items()}


def knows(names: Iterable[str]) -> bool:
    """Whether arrays are named so."""
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
    """The model that `arrays`, read from `path`, are.

    Raises:
      InputError: naming what is no such model's, or what config.json says otherwise.
    """
    source = str(path)
    prefix = next((p for p in ("vit.", "deit.") if f"{p}embeddings.cls_token" in arrays), "")
    projection = f"{prefix}embeddings.patch_embeddings.projection.weight"
    up = f"{prefix}encoder.layer.0.intermediate.dense.weight"
    positions = f"{prefix}embeddings.position_embeddings"
    classifiers = ("classifier", "cls_classifier")
    optional = {f"{name}.weight": 2 for name in classifiers}
    layout.require(arrays, {projection: 4, positions: 3, up: 2}, source, optional)
    config = safetensors.read_config(path)
    width, patch_size = arrays[projection].shape[0], arrays[projection].shape[2:]
    found = {
        "hidden_size": width,
        "num_hidden_layers": layout.count_layers(
            arrays, rf"{re.escape(prefix)}encoder\.layer\.(\d+)\.", source
        ),
        "intermediate_size": arrays[up].shape[0],
        "num_channels": 3,
        "pooler_act": "tanh",
    }
    distilled = f"{prefix}embeddings.distillation_token" in arrays
    stated = layout.read_stated(config, _KINDS, source)
    if "patch_size" in stated:
        stated["patch_size"] = image_hw(stated["patch_size"], "patch_size")
    layout.check_agreement(stated, found | {"patch_size": patch_size}, source)
    default_heads = _DEFAULT_HEADS if config is not None else layout.heads_by_width(width)
    heads = stated.get("num_attention_heads", default_heads)
    act = stated.get("hidden_act", "gelu")
    eps = float(stated.get("layer_norm_eps", _DEFAULT_EPS))
    faults = []
    if heads is None:
        faults.append(f"its heads: no published ViT is {width} wide; put config.json beside it")
    if act not in _GELU:
        faults.append(f"hidden_act={act!r}: known: {', '.join(_GELU)}")
    problem = stated.get("problem_type")
    if problem not in (None, *_LOSSES):
        faults.append(f"problem_type={problem!r}: known: {', '.join(_LOSSES)}")
    rules.refuse(faults, f"init_from={source!r}: cannot tell")
    num_patches = arrays[positions].shape[1] - 1 - distilled
    if "image_size" in stated:
        image_size = image_hw(stated["image_size"], "image_size")
    else:
        side = rules.square_side(num_patches, source)
        image_size = (side * patch_size[0], side * patch_size[1])
    head = next((n for n in classifiers if f"{n}.weight" in arrays), None)
    if distilled and head is None and f"{prefix}pooler.dense.weight" in arrays:
        logger.info("%s: its pooler, which no head has learned with, is left out", source)
        arrays = {name: a for name, a in arrays.items() if not name.startswith(f"{prefix}pooler.")}
    fields = {
        "num_classes": None if head is None else arrays[f"{head}.weight"].shape[0],
        "image_size": image_size,
        "patch_size": tuple(patch_size),
        "width": width,
        "depth": found["num_hidden_layers"],
        "mlp_dim": found["intermediate_size"],
        "num_heads": heads,
        "hidden_head": f"{prefix}pooler.dense.weight" in arrays,
        "gelu": _GELU[act],
        "norm_eps": eps,
        "qkv_bias": f"{prefix}encoder.layer.0.attention.attention.query.bias" in arrays,
    }
    of_deit = {"distillation_head": head != "classifier"}
    model = DeiT(**fields, **of_deit) if distilled else ViT(**fields)
    params = layout.read_entries(_entries(model, prefix), arrays, model, source)
    pixels = _read_pixels(path)
    assumed = {"num_attention_heads": heads, "hidden_act": act, "layer_norm_eps": eps}
    spec = Spec(
        image_size=model.image_size,
        resize="half_pixel",
        class_names=_class_names(stated, model, source),
        loss=_LOSSES.get(problem),
    )
    spec = _with_pixels(spec, pixels, distilled, source)
    if pixels.get("do_normalize", True):
        assumed |= {"image_mean": spec.mean, "image_std": spec.std}
    safetensors.say_assumed(path, config, assumed, stated | pixels)
    return Pretrained(source, model, params, spec)


def _read_pixels(path: epath.Path) -> dict[str, Any]:
    """What preprocessor_config.json states, where there is one."""
    file = path / "preprocessor_config.json"
    content = safetensors.read_json(file) if path.is_dir() and file.exists() else {}
    return layout.read_stated(content, _PIXELS, str(file))


def _with_pixels(spec: Spec, pixels: dict[str, Any], distilled: bool, source: str) -> Spec:
    """`spec` with what `pixels`, of a preprocessor_config.json, say of images.

    Raises:
      InputError: naming each key that asks for what cannot be done here.
    """
    default = "DeiTImageProcessor" if distilled and pixels else "ViTImageProcessor"
    processor = pixels.get("image_processor_type") or pixels.get("feature_extractor_type", default)
    match = _PROCESSOR.fullmatch(processor)
    where = f"init_from={source!r}: images cannot be prepared as its preprocessor_config.json says"
    if match is None:
        rules.refuse([f"image_processor_type={processor!r}: needs ViTImageProcessor, "
                      "DeiTImageProcessor or BitImageProcessor"], where)  # fmt: skip
    height, width = spec.image_size
    given = {"size": {"height": height, "width": width}} | _PROCESSORS[match[1]] | pixels
    if match[1] == "Bit" and isinstance(given["size"], int):
        given["size"] = {"shortest_edge": given["size"]}
    faults = []
    if not given.get("do_resize", True):
        faults.append("do_resize=False: needs true, as the model takes images of one size")
    if given.get("do_pad"):
        faults.append("do_pad=True: needs false; padding is not supported")
    if given["resample"] not in _FILTERS:
        faults.append(f"resample={given['resample']}: needs 2 (bilinear) or 3 (bicubic)")
    resized = _height_width(given["size"])
    in_proportion = isinstance(given["size"], dict) and given["size"].keys() == {"shortest_edge"}
    cropped = _height_width(given.get("crop_size")) if given["do_center_crop"] else resized
    if resized is None:
        faults.append(f"size={given['size']!r}: needs an int, height and width, or shortest_edge")
    elif in_proportion and not given["do_center_crop"]:
        faults.append(f"size={given['size']!r}: needs do_center_crop=true, as the images of such a "
                      "size have the proportions of the files")  # fmt: skip
    elif cropped != spec.image_size:
        key = "crop_size" if given["do_center_crop"] else "size"
        faults.append(
            f"{key}={given.get(key)!r}: needs {height} x {width}, the image_size of config.json"
        )
    elif any(map(operator.lt, resized, cropped)):
        faults.append(f"size={given['size']!r}: needs at least crop_size={given['crop_size']!r}, "
                      "as a larger crop has a black border")  # fmt: skip
    rules.refuse(faults, where)
    scale = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    mean, std = (0.0,) * 3, (1.0,) * 3
    if given.get("do_normalize", True):
        mean, std = (tuple(given.get(key, (0.5,) * 3)) for key in ("image_mean", "image_std"))
    interpolation = _FILTERS[given["resample"]]
    nearest = max if in_proportion else min  # where no share gives both sides
    share = nearest(map(rules.share_of, spec.image_size, resized))
    cut = Cut(share, "center" if in_proportion else "squash", interpolation)
    ops = pixels.get("ops") or _ops(resized, in_proportion, interpolation, spec.image_size)
    spec = spec._replace(
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
        cut=cut,
        **rules.read_preparation({"ops": ops, "loss": spec.loss}, spec.image_size, source),
    )
    return spec._replace(ops=None) if ops == rules.ops_of_cut(cut, spec.image_size) else spec


def _height_width(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size as transformers states it; None if it is of no known form."""
    match size:
        case {"height": height, "width": width, **rest} if not rest:
            pass
        case {"shortest_edge": height, **rest} if not rest:
            width = height
        case [height, width]:
            pass
        case _:
            height = width = size
    return (height, width) if all(type(s) is int and s > 0 for s in (height, width)) else None


def _ops(
    resized: tuple[int, int], in_proportion: bool, interpolation: str, image_size: tuple[int, int]
) -> str:
    """What an image processor of transformers does, as a preprocessing string."""
    if in_proportion:
        return f"decode|torchvision_resize({resized[0]}, {interpolation!r})|central_crop"
    if resized == image_size:
        return f"decode|torchvision_resize(filter={interpolation!r})"
    return f"decode|torchvision_resize({resized}, {interpolation!r})|central_crop"


def _class_names(stated: dict[str, Any], model: nn.Module, source: str) -> tuple[str, ...] | None:
    names = stated.get("id2label")
    if names is None or names == {str(i): f"LABEL_{i}" for i in range(len(names))}:
        return None  # such are what transformers writes where there are none
    names = [names.get(str(i)) for i in range(len(names))]
    return rules.class_names_of(names, model.num_classes, source)


def check(model: nn.Module) -> list[str]:
    """What of `model` the format cannot hold."""
    if faults := rules.check_family(model, ViT, DeiT):
        return faults
    faults = rules.check_positions(model)
    if model.pool != "token":
        faults.append(f"pool={model.pool!r}, and it classifies the class token")
    if model.hidden_head and model.num_classes is not None:
        faults.append("hidden_head=True, and its head is linear")
    if model.norm_pooled:
        faults.append("norm_pooled=True, and it normalises the tokens")
    faults += rules.check_blocks(model)
    if model.layer_scale is not None:
        faults.append(f"layer_scale={model.layer_scale}")
    return faults


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Writes a folder that `transformers` opens; returns the files' names."""
    pretrained = rules.with_learned_positions(pretrained, class_token_has_one=True)
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
    # As transformers has it, a model without classes is described with ten.
    count = model.num_classes or 10
    labels = pretrained.spec.class_names or [f"LABEL_{i}" for i in range(count)]
    config = {
        "architectures": [architecture],
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
        "encoder_stride": 16,
        "hidden_act": _HIDDEN_ACT[model.gelu],
        "hidden_dropout_prob": 0.0,
        "hidden_size": model.width,
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "image_size": _int_or_pair(model.image_size),
        "initializer_range": 0.02,
        "intermediate_size": model.mlp_dim,
        "label2id": {name: i for i, name in enumerate(labels)},
        "layer_norm_eps": model.norm_eps,
        "model_type": kind,
        "num_attention_heads": model.num_heads,
        "num_channels": 3,
        "num_hidden_layers": model.depth,
        "patch_size": _int_or_pair(model.patch_size),
        "pooler_act": "tanh",
        "pooler_output_size": model.width,
        "qkv_bias": model.qkv_bias,
        "transformers_version": _CONFIG_FORMAT,
    }
    spec = pretrained.spec.at(model.image_size)
    if spec.loss is not None:
        config["problem_type"] = _PROBLEM_TYPE[spec.loss]
    pixels = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
        "rescale_factor": 1 / 255,
        **_write_cut(spec.cut or Cut(), spec.image_size),
    }
    if ops_for(spec) != library_ops(spec):
        pixels["ops"] = ops_for(spec)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "config.json", rules.to_json(config))
    write_whole(path / "preprocessor_config.json", rules.to_json(pixels))
    safetensors.write_arrays(path / "model.safetensors", arrays)
    return ["config.json", "preprocessor_config.json", "model.safetensors"]


def _write_cut(cut: Cut, image_size: tuple[int, int]) -> dict[str, Any]:
    """The keys of preprocessor_config.json that say `cut`, and the class that has always read them.

    In proportion there is one size for both sides: the larger, of images that are no squares.
    """
    (height, width), resized = image_size, cut.resized(image_size)
    pixels = {"resample": _RESAMPLE[cut.interpolation], "do_center_crop": False}
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    squashed = {"height": resized[0], "width": resized[1]}
    if cut.mode == "center":
        processor, size = "BitImageProcessor", {"shortest_edge": max(resized)}
    else:
        processor, size = "DeiTImageProcessor", squashed
        if resized == image_size:
            processor, crop = "ViTImageProcessor", {}
    return pixels | crop | {"image_processor_type": processor, "size": size}


def library_ops(spec: Spec) -> str:
    """How transformers cuts images by a file that `write` made, as a preprocessing string."""
    cut = spec.cut or Cut()
    in_proportion, resized = cut.mode == "center", cut.resized(spec.image_size)
    if in_proportion:
        resized = (max(resized),) * 2
    return _ops(resized, in_proportion, cut.interpolation, spec.image_size)


def _int_or_pair(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
