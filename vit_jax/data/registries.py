"""The data sets and the ops that a config can name: {name: "module:class"}, imported on first use.

A new one is one class in one file, and one line here; a plug-in adds its class to the same dicts.
"""

from typing import Any

from vit_jax.config.parts import Registry, Section


class DataSets(Registry[Any]):
    """Names that are not listed are those of TFDS data sets, and of VTAB's tasks (`vtab/dtd`)."""

    def find(self, name: str) -> Any:
        if name in self:
            return super().find(name)
        return super().find("vtab" if name.startswith("vtab/") else "tfds")


SOURCES = DataSets(
    "data.name",
    Section,
    {
        "digits": "vit_jax.data.sources:Digits",
        "folder": "vit_jax.data.images.folder:Folder",
        "list": "vit_jax.data.images.list:List",
        "pseudo": "vit_jax.data.pseudo:Pseudo",
        "synthetic": "vit_jax.data.sources:Synthetic",
        "tfds": "vit_jax.data.tfds:Tfds",
        "unlabelled": "vit_jax.data.images.folder:Unlabelled",
        "vtab": "vit_jax.data.vtab:Vtab",
    },
)

OPS: Registry[Any] = Registry(
    "op",
    Section,
    {
        "decode": "vit_jax.data.host_ops:Decode",
        "scaled_decode": "vit_jax.data.host_ops:ScaledDecode",
        "inception_crop": "vit_jax.data.host_ops:InceptionCrop",
        "scaled_inception_crop": "vit_jax.data.host_ops:ScaledInceptionCrop",
        "resize": "vit_jax.data.host_ops:Resize",
        "resize_small": "vit_jax.data.host_ops:ResizeSmall",
        "torchvision_resize": "vit_jax.data.host_ops:TorchvisionResize",
        "central_crop": "vit_jax.data.host_ops:CentralCrop",
        "torchvision_crop": "vit_jax.data.host_ops:TorchvisionCrop",
        "random_crop": "vit_jax.data.host_ops:RandomCrop",
        "pad_crop": "vit_jax.data.host_ops:PadCrop",
        "randaugment": "vit_jax.data.host_ops:RandAugment",
        "autoaugment": "vit_jax.data.host_ops:AutoAugment",
        "flip": "vit_jax.data.device_ops:Flip",
        "erase": "vit_jax.data.device_ops:Erase",
        "mixup": "vit_jax.data.device_ops:MixUp",
        "cutmix": "vit_jax.data.device_ops:CutMix",
        "mixup_or_cutmix": "vit_jax.data.device_ops:MixUpOrCutMix",
        "color_jitter": "vit_jax.data.device_ops:ColorJitter",
        "greyscale": "vit_jax.data.device_ops:Greyscale",
        "blur": "vit_jax.data.device_ops:Blur",
        "solarize": "vit_jax.data.device_ops:Solarize",
    },
)
