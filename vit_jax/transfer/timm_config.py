"""The JSON file in the form of the `timm` library, next to a model's arrays.

It holds facts that the arrays do not show: arguments of the architecture, and the preprocessing.
"""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.config import image_hw
from vit_jax.files import write_whole
from vit_jax.transfer import layout, safetensors
from vit_jax.transfer.common import to_json
from vit_jax.transfer.images import ops_for
from vit_jax.transfer.pretrained import Cut, Spec, class_names_of, ops_of_cut, read_preparation

_DEFAULT_CUT = Cut(0.875, "center", "bicubic")
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

_KINDS = {"model_args": "an object", "pretrained_cfg": "an object", "label_names": "a list",
          "ops": "text", "loss": "softmax or sigmoid",
          "exif": "true or false", "width": "a positive number",
          "depth": "a positive number"}  # fmt: skip
_ARGUMENTS = {"num_heads": "a positive int", "mlp_ratio": "a positive number",
              "eps": "a positive number", "init_values": "a positive number",
              "qk_scale": "a positive number"}  # fmt: skip
_PIXELS = {"mean": "three numbers", "std": "three positive numbers", "input_size": "a list",
           "crop_pct": "a share above 0, at most 1", "crop_mode": "center or squash",
           "interpolation": "bilinear or bicubic"}  # fmt: skip


class Config(NamedTuple):
    """The JSON file next to the arrays.

    content: the whole file; None if it does not exist.
    stated, args, pixels: the values of the file, of its model_args and of its pretrained_cfg.
    """

    content: dict[str, Any] | None
    stated: dict[str, Any]
    args: dict[str, Any]
    pixels: dict[str, Any]

    @property
    def is_named(self) -> bool:
        """Whether the architecture is registered in timm, such as vit_base_patch16_224.

        Then only the arrays show its arguments; otherwise VisionTransformer's defaults apply.
        """
        name = str(self.stated.get("architecture", ""))
        return self.content is None or re.match(r"\w+_\w+_patch\d+", name) is not None

    def value_range(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of pixels in [0, 1]: as stated, else timm's default; 0.5 without the file."""
        unknown = self.content is None
        mean, std = (
            tuple(self.pixels.get(key, (0.5,) * 3 if unknown else default))
            for key, default in _IMAGENET.items()
        )
        return mean, std

    def image_size(self) -> tuple[int, int] | None:
        """The image size that `model_args`, or else `pretrained_cfg`, states."""
        if "img_size" in self.args:
            return image_hw(self.args["img_size"], "img_size")
        if "input_size" in self.pixels:
            return image_hw(self.pixels["input_size"][1:], "input_size")
        return None


def read_config(path: epath.Path) -> Config:
    """Read the file next to the arrays at `path`.

    Raises:
      InputError: naming each value that has the wrong kind for its key.
    """
    source = str(path)
    content = safetensors.read_config(path)
    stated = layout.read_stated(content, _KINDS, source)
    args = layout.read_stated(stated.get("model_args"), _ARGUMENTS, source)
    # timm's older files have the keys of pretrained_cfg at the top level.
    pixels = layout.read_stated(stated.get("pretrained_cfg", content), _PIXELS, source)
    return Config(content, stated, args, pixels)


def read_spec(config: Config, model: nn.Module, source: str) -> Spec:
    """The preprocessing, the loss and the class names of a source."""
    mean, std = config.value_range()
    names = config.stated.get("label_names")
    return Spec(
        image_size=model.image_size,
        resize="antialiased",
        mean=mean,
        std=std,
        class_names=class_names_of(names, model.num_classes, source),
        cut=None if config.content is None else _read_cut(config.pixels),
        **read_preparation(config.stated, model.image_size, source),
    )


def _read_cut(pixels: dict[str, Any]) -> Cut:
    share, mode, interpolation = _DEFAULT_CUT
    return Cut(
        float(pixels.get("crop_pct", share)),
        pixels.get("crop_mode", mode),
        pixels.get("interpolation", interpolation),
    )


def _pretrained_cfg(spec: Spec) -> dict[str, Any]:
    """timm's preprocessing config."""
    share, mode, interpolation = spec.cut or Cut()
    size = {} if spec.image_size is None else {"input_size": [3, *spec.image_size]}
    return {
        "mean": list(spec.mean),
        "std": list(spec.std),
        **size,
        "crop_pct": share,
        "crop_mode": mode,
        "interpolation": interpolation,
    }


def library_ops(spec: Spec) -> str:
    """The preprocessing string equivalent to what timm does with files of `write`."""
    return ops_of_cut(spec.cut or Cut(), spec.image_size)


def write(
    path: epath.Path, config: dict[str, Any], arrays: dict[str, np.ndarray], spec: Spec
) -> list[str]:
    """Write model.safetensors and config.json into a folder, or NAME.safetensors and NAME.json.

    `config` holds the facts of the architecture; those of `spec` are added. Returns the files'
    names.
    """
    config = config | {"pretrained_cfg": _pretrained_cfg(spec)}
    if spec.class_names:
        config["label_names"] = list(spec.class_names)
    if spec.loss is not None:
        config["loss"] = spec.loss
    if spec.exif is False:
        config["exif"] = False
    if spec.image_size is not None and ops_for(spec) != library_ops(spec):
        config["ops"] = spec.ops or ops_for(spec)
    alone = path.suffix == ".safetensors"
    beside = path.with_suffix(".json") if alone else path / "config.json"
    path = path if alone else path / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(beside, to_json(config))
    safetensors.write_arrays(path, arrays)
    return [beside.name, path.name]
