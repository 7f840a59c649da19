"""The JSON file in the form of the `timm` library, next to a model's arrays.

It holds facts that the arrays do not show: arguments of the architecture, and the preprocessing.
"""

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base.lazy import Lazy
from vit_jax.config import image_hw
from vit_jax.transfer.pretrained import (
    Cut,
    Spec,
    class_names_of,
    ops_for,
    ops_of_cut,
    read_preparation,
)
from vit_jax.transfer.source import READING, Source, write_json
from vit_jax.transfer.tensors import WEIGHTS, write_tensors
from vit_jax.transfer.timm_blocks import IMAGENET

logger = logging.getLogger("vit_jax")

_KINDS = {"model_args": "an object", "pretrained_cfg": "an object", "label_names": "a list",
          "ops": "text", "global_pool": "text", "loss": "softmax or sigmoid",
          "max_tokens": "a positive int", "norm_eps": "a positive number",
          **READING, "width": "a positive number",
          "depth": "a positive number"}  # fmt: skip
_ARGUMENTS = {"num_heads": "a positive int", "mlp_ratio": "a positive number",
              "eps": "a positive number", "init_values": "a positive number", "act_layer": "text",
              "global_pool": "text", "qk_scale": "a positive number"}  # fmt: skip
_PIXELS = {"mean": "numbers of channels", "std": "positive numbers of channels",
           "input_size": "a list",
           "crop_pct": "a share above 0, at most 1", "crop_mode": "center or squash",
           "interpolation": "nearest, bilinear or bicubic"}  # fmt: skip


class Config:
    """The JSON file next to the arrays of `source`.

    exists: whether there is such a file.
    stated, args, pixels: the values of the file, of its model_args and of its pretrained_cfg.
    is_named: whether the architecture is registered in timm, such as vit_base_patch16_224. Then
      only the arrays show its arguments; otherwise VisionTransformer's defaults apply.
    mean, std: of pixels in [0, 1]: as stated, else timm's default; 0.5 without the file.
    image_size: as `model_args`, or else `pretrained_cfg`, states it; None if neither does.

    Raises:
      InputError: naming each value that has the wrong kind for its key.
    """

    def __init__(self, source: Source):
        self._source = source
        content = source.config
        self.exists = content is not None
        self.stated = source.read_stated(content, _KINDS)
        self.args = source.read_stated(self.stated.get("model_args"), _ARGUMENTS)
        # timm's older files have the keys of pretrained_cfg at the top level.
        self.pixels = source.read_stated(self.stated.get("pretrained_cfg", content), _PIXELS)
        name = str(self.stated.get("architecture", ""))
        self.is_named = not self.exists or re.match(r"\w+_\w+_patch\d+", name) is not None
        self.take_pixels(IMAGENET if self.exists else {})
        self.image_size = None
        if "img_size" in self.args:
            self.image_size = image_hw(self.args["img_size"], "img_size")
        elif "input_size" in self.pixels:
            self.image_size = image_hw(self.pixels["input_size"][1:], "input_size")

    def take_pixels(self, default: Mapping[str, tuple[float, ...]]) -> None:
        """Set mean and std: as stated, else by `default`, else 0.5."""
        self.mean, self.std = (
            tuple(self.pixels.get(key, default.get(key, (0.5,) * 3))) for key in ("mean", "std")
        )

    def say_assumed(self, **assumed: Any) -> None:
        """Log the values in `assumed` and of the pixels that the file does not state."""
        assumed |= {"mean": self.mean, "std": self.std}
        self._source.say_assumed(assumed, self.stated | self.args | self.pixels)

    def check_agreement(
        self, found: Mapping[str, Any], width: int, mlp_dim: int, **defaults: Any
    ) -> None:
        """Raise InputError if the file contradicts `found`, the arguments that the arrays show.

        `defaults` are values of absent arguments.
        """
        wanted = defaults | {key: self.args[key] for key in found if key in self.args}
        wanted.setdefault("num_classes", self.stated.get("num_classes"))
        if "patch_size" in self.args:
            wanted["patch_size"] = image_hw(self.args["patch_size"], "patch_size")
        if "mlp_ratio" in self.args:
            wanted["mlp_dim"] = int(width * self.args["mlp_ratio"])
        self._source.check_agreement(wanted, {**found, "mlp_dim": mlp_dim})

    def read_spec(
        self, image_size: tuple[int, int] | None, num_classes: int | None, resize: str
    ) -> Spec:
        """The preprocessing, the loss and the class names; `resize`: see `Spec`."""
        named, source = self.stated.get("label_names"), str(self._source.path)
        cut = {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic"}
        share, mode, interpolation = (self.pixels.get(key, cut[key]) for key in cut)
        return Spec(
            image_size,
            resize,
            self.mean,
            self.std,
            class_names_of(named, num_classes, source),
            Cut(float(share), mode, interpolation) if self.exists else None,
            **read_preparation(self.stated, image_size, source),
        )


def library_ops(spec: Spec) -> str:
    """The preprocessing string equivalent to what timm does with files of `write`."""
    return ops_of_cut((spec.cut or Cut())._replace(library="timm"), spec.need_size())


def write(
    path: epath.Path,
    config: dict[str, Any],
    arrays: Mapping[str, np.ndarray | Lazy],
    spec: Spec,
    max_shard_size: str | None = None,
) -> list[str]:
    """Write model.safetensors and config.json into a folder, or NAME.safetensors and NAME.json.

    `config` holds the facts of the architecture; the facts of `spec` are added. The weights become
    several files only by `max_shard_size`, because timm reads one. Returns the files' names.
    """
    share, mode, interpolation, _ = spec.cut or Cut()
    size = spec.image_size
    pixels = {
        "mean": list(spec.mean),
        "std": list(spec.std),
        **({} if size is None else {"input_size": [spec.channels, *size]}),
        "crop_pct": share,
        "crop_mode": mode,
        "interpolation": interpolation,
    }
    ops_are_own = size is not None and ops_for(spec) != library_ops(spec)
    config = config | {
        "pretrained_cfg": pixels,
        "label_names": list(spec.class_names) if spec.class_names else None,
        "loss": spec.loss,
        **spec.stated_reading,
        "ops": spec.ops or ops_for(spec) if ops_are_own else None,
    }
    alone = path.suffix == ".safetensors"
    beside = path.with_suffix(".json") if alone else path / "config.json"
    write_json(beside, config)
    weights = path if alone else path / WEIGHTS
    files = write_tensors(weights, arrays, max_shard_size or sys.maxsize)
    if len(files) > 1:
        logger.warning(
            "max_shard_size=%s: vit_jax reads the %d files of weights, but timm reads one file "
            "only; leave it out for timm", max_shard_size, len(files) - 1,
        )  # fmt: skip
    return [beside.name, *files]
