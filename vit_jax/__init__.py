"""Pretrain Vision Transformers at TPU scale and carry them over to new tasks.

    model = vit_jax.create_model("ViT-B/16", num_classes=10, image_size=32)
    model, variables = vit_jax.load_pretrained("ViT-B_16.npz")
    logits = model.apply(variables, images, train=False)

Importing this touches no device, no flag and no TensorFlow.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "create_model": "vit_jax.models",
    "load_image": "vit_jax.transfer.images",
    "load_pretrained": "vit_jax.transfer",
    "pretrained_spec": "vit_jax.transfer",
    "save_pretrained": "vit_jax.transfer",
}
__all__ = ["create_model", "load_image", "load_pretrained", "pretrained_spec", "save_pretrained"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
