"""Image-text models with the names of `open_clip`: a folder with open_clip_config.json.

It reads open_clip's own class CLIP, and SigLIP with a ViT of timm as image tower. Arrays of a timm
tower keep timm's names; all others get names of Hugging Face. These two formats then read them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from vit_jax.data.tokenizers import clean_as_open_clip
from vit_jax.transfer import huggingface, timm
from vit_jax.transfer.huggingface_texts import take_texts
from vit_jax.transfer.pretrained import Cut, Pretrained
from vit_jax.transfer.source import CONFIGS, OPEN_CLIP, Source
from vit_jax.transfer.timm_blocks import CLIP

_TOWER, _TRUNK = "visual.class_embedding", "visual.trunk.patch_embed.proj.weight"
_CLASS = "vision_model.embeddings.class_embedding"
_NAMES = {  # in this order; a text tower may be called `text`
    r"visual\.class_embedding": _CLASS,
    r"visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"visual\.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    r"visual\.ln_pre\.": "vision_model.pre_layrnorm.",
    r"visual\.ln_post\.": "vision_model.post_layernorm.",
    r"visual\.transformer\.resblocks\.": "vision_model.encoder.layers.",
    r"visual\.proj$": "visual_projection.weight",
    r"(text\.)?token_embedding\.": "text_model.embeddings.token_embedding.",
    r"(text\.)?positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"(text\.)?transformer\.resblocks\.": "text_model.encoder.layers.",
    r"(text\.)?ln_final\.": "text_model.final_layer_norm.",
    r"(text\.)?text_projection$": "text_projection.weight",
    r"text\.text_projection\.": "text_model.head.",
    r"(\w+\.encoder\.layers\.\d+\.)ln_": r"\1layer_norm",
    r"(\w+\.encoder\.layers\.\d+\.)attn\.": r"\1self_attn.",
    r"(\w+\.encoder\.layers\.\d+\.)mlp\.c_fc\.": r"\1mlp.fc1.",
    r"(\w+\.encoder\.layers\.\d+\.)mlp\.c_proj\.": r"\1mlp.fc2.",
}
_TURNED = ("visual_projection.weight", "text_projection.weight")  # stored as (in, out)
_KINDS = {"model_cfg": "an object", "preprocess_cfg": "an object"}
_TOWERS = {"vision_cfg": "an object", "text_cfg": "an object"}
_PIXELS = {"mean": "three numbers", "std": "three positive numbers",
           "interpolation": "nearest, bilinear or bicubic"}  # fmt: skip
_MODES = {"shortest": "center", "squash": "squash"}


def recognises(source: Source) -> bool:
    """Whether the arrays have open_clip's names."""
    return not source.arrays.keys().isdisjoint((_TOWER, _TRUNK))


def read(source: Source) -> Pretrained:
    """Make the models of the arrays.

    Raises:
      InputError: naming arrays or keys that do not fit; or there is no config.
    """
    if source.config is None:
        source.refuse([f"there is no {CONFIGS[OPEN_CLIP]}; give the folder that has it"])
    stated = source.read_stated(source.config, _KINDS)
    model = source.read_stated(stated.get("model_cfg"), _TOWERS)
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    has_trunk = _TRUNK in source.arrays
    _refuse_others(source, vision, text, has_trunk)
    _rename(source, has_trunk)
    pixels = source.read_stated(stated.get("preprocess_cfg"), _PIXELS)
    pixels = {key: list(value) for key, value in CLIP.items()} | pixels
    mode = pixels.get("resize_mode", "shortest")
    source.refuse([] if mode in _MODES else [f"resize_mode={mode!r}: needs {' or '.join(_MODES)}"])
    act = "quick_gelu" if model.get("quick_gelu") else "gelu"
    source.config = {"text_config": _tower_config(text, text.get("heads", 8), act)}
    if has_trunk:
        read_text_side = take_texts(source, "siglip_vision_model", **_tokenizer(text))
        source.rename({r"visual\.trunk\.": ""})
        source.config = {
            "architecture": vision.get("timm_model_name"),
            "model_args": {"img_size": vision["image_size"]} if "image_size" in vision else {},
            "pretrained_cfg": pixels,
        }
        pretrained = timm.read(source)._replace(read_text_side=read_text_side)
    else:
        heads = source.arrays[_CLASS].shape[-1] // vision.get("head_width", 64)
        of_images = {"image_size": vision.get("image_size")}
        source.config["vision_config"] = _tower_config(vision, heads, act) | of_images
        theirs = {f"image_{key}": pixels[key] for key in ("mean", "std")}
        pretrained = huggingface.read(source, theirs, **_tokenizer(text))
    cut = Cut(1.0, _MODES[mode], pixels.get("interpolation", "bicubic"))
    spec = pretrained.spec._replace(resize="antialiased", cut=cut, ops=None, fault=None)
    return pretrained._replace(spec=spec)


def _refuse_others(
    source: Source, vision: Mapping[str, Any], text: Mapping[str, Any], has_trunk: bool
) -> None:
    """Raise InputError for keys by which other towers are computed."""
    of_text = {"hf_model_name": None, "embed_cls": False, "no_causal_mask": has_trunk,
               "pool_type": "last" if has_trunk else "argmax"}  # fmt: skip
    of_images = {"timm_pool": "map", "timm_proj": "none"} if has_trunk else {"pool_type": "tok"}
    found = {"no_causal_mask": False, "pool_type": "argmax"} | dict(text)
    source.refuse([
        f"{cfg}.{key}={config[key]!r}: needs {value!r}"
        for cfg, config, needed in (("text_cfg", found, of_text), ("vision_cfg", vision, of_images))
        for key, value in needed.items() if config.get(key, value) != value
    ])  # fmt: skip


def _rename(source: Source, has_trunk: bool) -> None:
    """Give the arrays Hugging Face's names and shapes; arrays of a timm tower keep theirs."""
    source.rename(_NAMES)
    arrays = source.arrays
    for name in [name for name in arrays if ".self_attn.in_proj_" in name]:
        start, _, leaf = name.rpartition("in_proj_")
        parts = np.array_split(arrays.pop(name), 3)
        arrays |= {f"{start}{c}_proj.{leaf}": part for c, part in zip("qkv", parts, strict=True)}
    arrays |= {name: arrays[name].T for name in _TURNED if name in arrays}
    if has_trunk:
        arrays |= {n: arrays[n].reshape(-1) for n in ("logit_scale", "logit_bias") if n in arrays}


def _tower_config(stated: Mapping[str, Any], heads: int, act: str) -> dict[str, Any]:
    """Hugging Face's config of a tower that open_clip describes by `stated`."""
    is_tanh = stated.get("act_kwargs", {}).get("approximate") == "tanh"
    eps = stated.get("norm_kwargs", {}).get("eps", 1e-5)
    act = "gelu_pytorch_tanh" if is_tanh else act
    return {"num_attention_heads": heads, "hidden_act": act, "layer_norm_eps": eps}


def _tokenizer(text: Mapping[str, Any]) -> dict[str, Any]:
    """How open_clip uses the tokenizer: fields of `TokenizerFiles`."""
    if "hf_tokenizer_name" in text:
        kind = text.get("tokenizer_kwargs", {}).get("clean", "whitespace")
        return {"clean": partial(clean_as_open_clip, kind=kind)}
    clean = partial(clean_as_open_clip, kind="lower")
    return {"clean": clean, "pad": 0, "reads_specials": False}
