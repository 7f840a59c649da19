"""EfficientNets with the names of the `timm` library.

They have the form of the tf_efficientnet_* models, which pad as TensorFlow does and normalise with
epsilon 1e-3. timm's own efficientnet_* models have the same arrays, but pad evenly and use another
epsilon; they are refused. The JSON file states `architecture`, such as tf_efficientnet_b0, or for
other sizes `width` and `depth`, the factors by which B0 is scaled.
"""

from typing import Any

import flax.linen as nn
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.models.efficientnet import EFFICIENTNET_VARIANTS, EfficientNet
from vit_jax.transfer import fit, timm_config
from vit_jax.transfer.names import (
    LINEAR,
    NORM,
    Row,
    find_unheld,
    held,
    layer,
    read_rows,
    row,
    rows_of,
    write_rows,
)
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.source import Source
from vit_jax.transfer.timm_config import Config

_TF = "tf_efficientnet_"
_CONV = layer({".weight": ("kernel", "h w c d -> d c h w")})
_SQUEEZED = layer({".weight": ("kernel", "c d -> d c 1 1"), ".bias": ("bias", "")})


def _normed(conv: str, norm: str, place: str, part: str) -> list[Row]:
    """A convolution and its batch norm, whose statistics belong to the model state."""
    ours = f"{place}/norm_{part}"
    return [
        *_CONV(conv, f"{place}/conv_{part}"),
        *NORM(norm, ours),
        row(f"{norm}.running_mean", f"batch_stats/{ours}/mean"),
        row(f"{norm}.running_var", f"batch_stats/{ours}/var"),
    ]


_BLOCK, _STAGE = "blocks.{i}.{j}", "trunk/stage_{i}/layer_{j}"
_ROWS = [
    *_normed("conv_stem", "bn1", "trunk", "root"),
    *_normed(f"{_BLOCK}.conv_pw", f"{_BLOCK}.bn1", _STAGE, "expand"),
    *_normed(f"{_BLOCK}.conv_dw", f"{_BLOCK}.{{second}}", _STAGE, "depthwise"),
    *_normed(f"{_BLOCK}.{{last}}", f"{_BLOCK}.{{third}}", _STAGE, "project"),
    *_SQUEEZED(f"{_BLOCK}.se.conv_reduce", f"{_STAGE}/se_reduce"),
    *_SQUEEZED(f"{_BLOCK}.se.conv_expand", f"{_STAGE}/se_expand"),
    *_normed("conv_head", "bn2", "trunk", "last"),
    *LINEAR("classifier", "head"),
]


def _rows_of(model: EfficientNet) -> list[Row]:
    """The rows of `model`; in a block without expansion conv_pw is the projection."""
    layers = [
        {"i": i, "j": j}
        | ({"second": "bn2", "third": "bn3", "last": "conv_pwl"} if stage.expansion > 1 else
           {"second": "bn1", "third": "bn2", "last": "conv_pw"})
        for i, stage in enumerate(model.stage_sizes)
        for j in range(stage.blocks)
    ]  # fmt: skip
    return rows_of(_ROWS, model, layers)


def recognises(source: Source) -> bool:
    """Whether the arrays have timm's names of an EfficientNet."""
    needed = {"conv_stem.weight", "conv_head.weight", "blocks.0.0.conv_dw.weight"}
    return source.arrays.keys() >= needed


def read(source: Source) -> Pretrained:
    """Make the model of the arrays; as `timm.read`."""
    source.require({"conv_stem.weight": 4, "conv_head.weight": 4}, {"classifier.weight": 2})
    config = Config(source)
    architecture = str(config.stated.get("architecture", _TF))
    if not architecture.startswith(_TF):
        raise InputError(
            f"init_from={str(source.path)!r}: {architecture} pads its images evenly, and only "
            f"timm's {_TF}* models, which pad as TensorFlow does, can be read; take one of those"
        )
    num_classes = source.size("classifier.weight", 0)
    source.check_agreement(config.stated, {"num_classes": num_classes or 0})
    config.say_assumed()
    model = EfficientNet(num_classes, config.image_size, *_find_factors(config, source))
    params, model_state = fit.split_leaves(read_rows(_rows_of(model), source, model))
    spec = config.read_spec(model.image_size, num_classes, "antialiased")
    return Pretrained(str(source.path), model, params, spec, model_state=model_state)


def _find_factors(config: Config, source: Source) -> tuple[float, float]:
    """The factors of width and depth: as stated, or of the published size that fits."""
    if "width" in config.stated and "depth" in config.stated:
        return float(config.stated["width"]), float(config.stated["depth"])
    layers = {name for name in source.arrays if name.endswith(".conv_dw.weight")}
    for variant in EFFICIENTNET_VARIANTS.values():
        model = EfficientNet(None, None, variant.width_factor, variant.depth_factor)
        theirs = {
            f"blocks.{i}.{j}.conv_dw.weight"
            for i, stage in enumerate(model.stage_sizes)
            for j in range(stage.blocks)
        }
        if len(source.arrays["bn2.bias"]) == model.width and layers == theirs:
            return variant.width_factor, variant.depth_factor
    raise InputError(
        f"init_from={str(source.path)!r}: has no published size of an EfficientNet; state the "
        'factors of width and depth in the JSON file next to the weights, e.g. {"width": 1.1, '
        '"depth": 1.2}'
    )


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`, an EfficientNet."""
    return find_unheld(model, (EfficientNet,), {"norm_eps": (1e-3,)})


def write(path: epath.Path, pretrained: Pretrained, max_shard_size: str | None = None) -> list[str]:
    """As `timm.write`."""
    model, spec = held(pretrained.model, EfficientNet), pretrained.spec
    factors = model.width_factor, model.depth_factor
    names = {v[:2]: name for name, v in EFFICIENTNET_VARIANTS.items()}
    config: dict[str, Any] = {
        "architecture": f"{_TF}{names.get(factors, 'B0').lower()}",
        "num_classes": model.num_classes or 0,
        "num_features": model.width,
    }
    if factors not in names:
        config |= {"width": model.width_factor, "depth": model.depth_factor}
    leaves = {**pretrained.params, **pretrained.model_state}
    arrays = write_rows(_rows_of(model), leaves, model)
    spec = spec.at(model.image_size) if model.image_size else spec
    return timm_config.write(path, config, arrays, spec, max_shard_size)
