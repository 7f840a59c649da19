"""Published weights that are read by name, with what a user must know of them.

Sources: the model cards of the Hugging Face Hub, the registry of `timm`, and for ViT-5 its authors'
README and licence, github.com/wangf3014/ViT-5. None of these files is in the tests. The parity was
measured on a small model of the same kind: the library wrote its file and computed its outputs
(tests/transfer/test_modern.py, and test_foreign.py for `vit`).
"""

from typing import NamedTuple

# The largest difference from the library's outputs, of the largest value, by the name of a golden.
PARITY = {
    "vit": 1e-6, "timm_clip": 9e-7, "timm_deit3": 9e-7, "timm_dinov2": 1e-6,
    "timm_dinov2_swiglu": 1e-6, "timm_dinov3": 1e-6, "timm_dinov3_plus": 2e-6,
    "timm_eva02": 2e-6, "timm_eva02_small": 1e-6, "timm_siglip": 2e-6, "timm_siglip_gap": 1e-6,
    "vit5": 2e-6, "meta_dinov3": 2e-6, "hf_dinov2": 1e-6, "hf_dinov2_swiglu": 2e-6,
    "hf_dinov2_with_registers": 1e-6, "hf_dinov2_with_registers_classifier": 1e-6,
    "hf_dinov3": 1e-6, "hf_dinov3_swiglu": 4e-6, "hf_siglip": 2e-6, "hf_siglip_text": 1e-6,
    "hf_clip": 3e-7,
}  # fmt: skip


class Weights(NamedTuple):
    """A published model.

    name: for `init_from`; a pickle (.pth) must be written to a .safetensors file first.
    model: family and size.
    image_size: pixels of a side of the positions, or of the images where positions are computed.
    pixels: mean and standard deviation that its pixels are normalised by.
    pool: what its features are.
    licence: of the weights; of the code, where no other is known.
    golden: the small model of its kind, a key of PARITY.
    """

    name: str
    model: str
    image_size: int
    pixels: str
    pool: str
    licence: str
    golden: str

    @property
    def parity(self) -> float:
        """The largest difference of its kind from the library's outputs, of the largest."""
        return PARITY[self.golden]


def _rows() -> list[Weights]:
    rows = []
    for size, golden in (("small", ""), ("base", ""), ("large", ""), ("giant", "_swiglu")):
        model = f"{size[0].upper() if size != 'giant' else 'g'}/14"
        rows += [
            Weights(f"hf:facebook/dinov2-{size}", f"DINOv2 {model}", 518, "ImageNet", "token",
                    "Apache 2.0", f"hf_dinov2{golden}"),
            Weights(f"timm:vit_{size}_patch14_reg4_dinov2.lvd142m", f"DINOv2 {model}, 4 registers",
                    518, "ImageNet", "token", "Apache 2.0", f"timm_dinov2{golden}"),
        ]  # fmt: skip
    for name, model, golden in (("vits16", "S/16", ""), ("vits16plus", "S+/16", "_swiglu"),
                                ("vitb16", "B/16", ""), ("vitl16", "L/16", ""),
                                ("vith16plus", "H+/16", "_swiglu"),
                                ("vit7b16", "7B/16", "_swiglu")):  # fmt: skip
        name = f"hf:facebook/dinov3-{name}-pretrain-lvd1689m"
        rows.append(Weights(name, f"DINOv3 {model}", 224, "ImageNet", "token", "DINOv3",
                            f"hf_dinov3{golden}"))  # fmt: skip
    rows += [
        Weights("timm:vit_base_patch16_dinov3.lvd1689m", "DINOv3 B/16", 256, "ImageNet", "gap",
                "DINOv3", "timm_dinov3"),
        Weights("hf:google/siglip-base-patch16-224", "SigLIP B/16", 224, "0.5", "map",
                "Apache 2.0", "hf_siglip"),
        Weights("hf:google/siglip2-base-patch16-224", "SigLIP 2 B/16", 224, "0.5", "map",
                "Apache 2.0", "hf_siglip"),
        Weights("hf:google/siglip2-so400m-patch16-256", "SigLIP 2 So400m/16", 256, "0.5", "map",
                "Apache 2.0", "hf_siglip"),
        Weights("timm:vit_base_patch16_siglip_224.v2_webli", "SigLIP 2 B/16", 224, "0.5", "map",
                "Apache 2.0", "timm_siglip"),
        Weights("hf:openai/clip-vit-base-patch32", "CLIP B/32", 224, "CLIP", "token", "MIT",
                "hf_clip"),
        Weights("timm:vit_base_patch16_clip_224.openai", "CLIP B/16", 224, "CLIP", "token", "MIT",
                "timm_clip"),
        Weights("timm:vit_large_patch14_clip_224.openai", "CLIP L/14", 224, "CLIP", "token", "MIT",
                "timm_clip"),
        Weights("timm:eva02_small_patch14_224.mim_in22k", "EVA-02 S/14", 224, "CLIP", "gap", "MIT",
                "timm_eva02_small"),
        Weights("timm:eva02_base_patch14_224.mim_in22k", "EVA-02 B/14", 224, "CLIP", "gap", "MIT",
                "timm_eva02"),
        Weights("timm:eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", "EVA-02 L/14", 448, "CLIP",
                "gap", "MIT", "timm_eva02"),
        Weights("timm:deit3_base_patch16_224.fb_in22k_ft_in1k", "DeiT III B/16", 224, "ImageNet",
                "token", "Apache 2.0", "timm_deit3"),
        Weights("timm:deit3_large_patch16_384.fb_in22k_ft_in1k", "DeiT III L/16", 384, "ImageNet",
                "token", "Apache 2.0", "timm_deit3"),
        *(
            Weights(f"FengWang3211/ViT-5/vit5_{size}_patch16_{px}.pth",
                    f"ViT-5 {size[0].upper()}/16", px, "ImageNet", "token", "Apache 2.0 (code)",
                    "vit5")
            for size, px in (("small", 224), ("base", 224), ("base", 384), ("large", 224))
        ),
        Weights("timm:vit_base_patch16_224.mae", "MAE B/16", 224, "ImageNet", "token",
                "CC BY-NC 4.0", "vit"),
        Weights("timm:vit_large_patch16_224.augreg_in21k", "ViT-L/16", 224, "0.5", "token",
                "Apache 2.0", "vit"),
        Weights("hf:google/vit-base-patch16-224", "ViT-B/16", 224, "0.5", "token", "Apache 2.0",
                "vit"),
    ]  # fmt: skip
    return rows


WEIGHTS = _rows()
