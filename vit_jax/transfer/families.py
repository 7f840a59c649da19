"""Weights that no format reads, named for what they are."""

import re

from vit_jax.base.errors import InputError
from vit_jax.transfer.source import Source

SUPPORTED = (
    "supported: ViT, DeiT, DeiT III, MAE, DINOv2, DINOv3, SigLIP, CLIP, EVA-02 and tf_efficientnet "
    "of timm; ViT, DeiT, ViTMAE, DINOv2, DINOv3, SigLIP and CLIP of Hugging Face; SigLIP and CLIP "
    "of open_clip; the authors' files of DINOv2, DINOv3, ViT-5 and T2T-ViT; the .npz files of ViT, "
    "hybrids and BiT"
)
# {family: pattern of the name of an array that only it has}; the first that matches counts.
_FAMILIES = {
    "CLIP with another image tower than a ViT, of open_clip": r"^visual\.(layer1|trunk\.st\w+)\.",
    "Swin, of Hugging Face": r"^swin(v2)?\.",
    "Swin, of timm": r"^layers\.\d+\.blocks\.\d+\.attn\.(relative_position|logit_scale)",
    "ConvNeXt, of Hugging Face": r"^convnext(v2)?\.|\.dwconv\.weight$",
    "ConvNeXt, of timm": r"^stages\.\d+\.blocks\.\d+\.conv_dw\.",
    "BEiT, of Hugging Face": r"^beit\.",
    "BEiT, of timm": r"^blocks\.\d+\.attn\.relative_position_bias_table$|^rel_pos_bias\.",
    "EVA with a norm inside attention, of timm": r"^blocks\.\d+\.attn\.(inner_attn_ln|norm)\.",
    "a text model such as BERT": r"embeddings\.word_embeddings\.|\bembed_tokens\.",
}
_DECODER = "the decoder of a masked autoencoder, without its encoder"
_READ = (
    r"vit(_mae|_hybrid|5)?$|deit$|vit_|deit3?_|dinov[23]|siglip2?(_vision_model)?$|"
    r"clip(_vision_model)?$|eva02_|naflexvit_|(tf_)?efficientnet|t2t"
)

# timm's models with the arrays of a ViT that compute something else with them: other rotary
# or resampled positions, or norms after the branches.
COMPUTES_OTHERWISE = re.compile(
    r"vit_(pe_|\w+_(rope|rpn)_)|eva02_enormous_|naflexvit_\w+_par(fac)?_"
)


def name_family(source: Source) -> str | None:
    """The kind of the weights of `source`, by their arrays' names or else by the JSON file beside
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
        if not names or not isinstance(name, str):
            continue
        if COMPUTES_OTHERWISE.match(name) or not re.match(_READ, name):
            return f"{name}, of {library}"
    return None
