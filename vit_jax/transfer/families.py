"""Weights that no format reads, named for what they are."""

import re

from vit_jax.base.errors import InputError
from vit_jax.transfer.source import Source

SUPPORTED = (
    "supported: ViT, DeiT, MAE and DINOv2 without registers of timm, ViT, DeiT and ViTMAE of "
    "Hugging Face, tf_efficientnet of timm, T2T-ViT, and the .npz files of ViT, hybrids and BiT"
)
# {family: pattern of the name of an array that only it has}; the first that matches counts.
_FAMILIES = {
    "DINOv2 or another ViT with registers, of timm": r"^reg_token$",
    "DINOv2 with registers, in its authors' names": r"^register_tokens$",
    "DINOv2 or DINOv3 with registers, of Hugging Face": r"embeddings\.register_tokens$",
    "DINOv2, of Hugging Face": r"layer_scale1\.lambda1$",
    "SigLIP's image tower, of Hugging Face": r"^vision_model\.head\.",
    "CLIP's image tower, of Hugging Face": r"^vision_model\.",
    "CLIP's image tower, in its authors' names": r"^visual\.",
    "CLIP's image tower, of timm": r"^norm_pre\.weight$",
    "Swin, of Hugging Face": r"^swin(v2)?\.",
    "Swin, of timm": r"^layers\.\d+\.blocks\.\d+\.attn\.(relative_position|logit_scale)",
    "ConvNeXt, of Hugging Face": r"^convnext(v2)?\.|\.dwconv\.weight$",
    "ConvNeXt, of timm": r"^stages\.\d+\.blocks\.\d+\.conv_dw\.",
    "BEiT, of Hugging Face": r"^beit\.",
    "EVA, of timm": r"^blocks\.\d+\.(attn\.(q_proj|inner_attn_ln|norm)\.|mlp\.(fc1_g|w1)\.)",
    "BEiT or EVA, of timm": r"^blocks\.\d+\.(gamma_1|attn\.q_bias)$",
    "a text model such as BERT": r"embeddings\.word_embeddings\.|\bembed_tokens\.",
}
_DECODER = "the decoder of a masked autoencoder, without its encoder"
_READ = r"vit(_mae|_hybrid)?$|deit$|vit_|deit3?_|(tf_)?efficientnet|t2t"


def name_family(source: Source) -> str | None:
    """What the weights of `source` are, by their arrays' names or else by the JSON file beside
    them; None: unknown, or a family that is read.
    """
    try:
        names, stated = [*source.arrays], source.config or {}
    except InputError:
        return None
    text = "\n".join(names)
    for family, pattern in _FAMILIES.items():
        if re.search(pattern, text, re.MULTILINE):
            return family
    if re.search(r"^decoder(_blocks|\.decoder_layers)\.", text, re.M) and "patch_embed" not in text:
        return _DECODER
    for key, library in (("model_type", "Hugging Face"), ("architecture", "timm")):
        name = stated.get(key)
        if names and isinstance(name, str) and not re.match(_READ, name):
            return f"{name}, of {library}"
    return None
