"""EfficientNet with the names of the `timm` library, in the form of its tf_efficientnet_* models.

These pad as TensorFlow does and normalise with epsilon 1e-3. timm's own efficientnet_* models have
the same arrays, but pad evenly and use another epsilon; they are refused. The JSON file states
`architecture`, such as tf_efficientnet_b0, or for other sizes `width` and `depth`, the factors by
which B0 is scaled.
"""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.errors import InputError
from vit_jax.models.efficientnet import EFFICIENTNET_VARIANTS, EfficientNet
from vit_jax.transfer import fit, layout, safetensors, timm_config
from vit_jax.transfer.layout import Entry, rearranged, same, torch_linear
from vit_jax.transfer.pretrained import Pretrained

_EPS = 1e-3
_TF = "tf_efficientnet_"
_MEAN = ".running_mean"
COUNTER = ".num_batches_tracked"  # an array of each norm, which has no influence


def knows(names: Iterable[str]) -> bool:
    """Whether the arrays have timm's names of an EfficientNet."""
    return {"conv_stem.weight", "conv_head.weight", "blocks.0.0.conv_dw.weight"} <= set(names)


def _entries(model: EfficientNet) -> list[Entry]:
    entries = _conv("conv_stem", "trunk/conv_root") + _norm("bn1", "trunk/norm_root")
    for i, stage in enumerate(model.stage_sizes):
        # Without an expansion conv_pw is the projection.
        names = (
            ("conv_pw", "conv_dw", "conv_pwl") if stage.expansion > 1 else ("conv_dw", "conv_pw")
        )
        parts = ("expand", "depthwise", "project")[-len(names) :]
        for j in range(stage.blocks):
            theirs, ours = f"blocks.{i}.{j}", f"trunk/stage_{i}/layer_{j}"
            for number, (name, part) in enumerate(zip(names, parts, strict=True), 1):
                entries += _conv(f"{theirs}.{name}", f"{ours}/conv_{part}")
                entries += _norm(f"{theirs}.bn{number}", f"{ours}/norm_{part}")
            for part in ("reduce", "expand"):
                dense, kernel = f"{theirs}.se.conv_{part}", f"{ours}/se_{part}/kernel"
                pattern = "d c h w -> (h w c) d"
                entries.append(rearranged(f"{dense}.weight", kernel, pattern, h=1, w=1))
                entries.append(same(f"{dense}.bias", f"{ours}/se_{part}/bias"))
    entries += _conv("conv_head", "trunk/conv_last") + _norm("bn2", "trunk/norm_last")
    if model.num_classes is not None:
        entries += torch_linear("classifier", "head")
    return entries


def _conv(theirs: str, ours: str) -> list[Entry]:
    return [rearranged(f"{theirs}.weight", f"{ours}/kernel", "d c h w -> h w c d")]


def _norm(theirs: str, ours: str) -> list[Entry]:
    stats = f"batch_stats/{ours}"
    return [
        same(f"{theirs}.weight", f"{ours}/scale"),
        same(f"{theirs}.bias", f"{ours}/bias"),
        same(f"{theirs}{_MEAN}", f"{stats}/mean"),
        same(f"{theirs}.running_var", f"{stats}/var"),
    ]


def read(path: epath.Path, arrays: dict[str, np.ndarray]) -> Pretrained:
    """Make the model of `arrays`, which were read from `path`.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with its config.
    """
    source = str(path)
    needed = {"conv_stem.weight": 4, "conv_head.weight": 4}
    layout.require(arrays, needed, source, {"classifier.weight": 2})
    config = timm_config.read_config(path)
    architecture = str(config.stated.get("architecture", _TF))
    if not architecture.startswith(_TF):
        raise InputError(
            f"init_from={source!r}: {architecture} pads its images evenly, and only timm's "
            f"{_TF}* models, which pad as TensorFlow does, can be read; take one of those"
        )
    num_classes = len(arrays["classifier.weight"]) if "classifier.weight" in arrays else 0
    found = {"num_classes": num_classes}
    layout.check_agreement({"num_classes": config.stated.get("num_classes")}, found, source)
    mean, std = config.value_range()
    assumed, given = {"mean": mean, "std": std}, config.stated | config.args | config.pixels
    safetensors.say_assumed(path, config.content, assumed, given)
    model = EfficientNet(
        num_classes or None, config.image_size(), **_find_factors(config, arrays, source)
    )
    leaves = layout.read_entries(_entries(model), arrays, model, source)
    params, model_state = fit.split_leaves(leaves)
    spec = timm_config.read_spec(config, model, source)
    return Pretrained(source, model, params, spec, model_state=model_state)


def _find_factors(
    config: timm_config.Config, arrays: dict[str, np.ndarray], source: str
) -> dict[str, float]:
    """{"width_factor", "depth_factor"}: as stated, else those of the published sizes that fit."""
    if "width" in config.stated and "depth" in config.stated:
        return {f"{side}_factor": float(config.stated[side]) for side in ("width", "depth")}
    for variant in EFFICIENTNET_VARIANTS.values():
        factors = {"width_factor": variant.width_factor, "depth_factor": variant.depth_factor}
        entries = _entries(EfficientNet(None, None, **factors))
        own = {name for name in arrays if not name.startswith("classifier.")}
        width = EfficientNet(None, None, **factors).width
        if {entry.theirs for entry in entries} == own and len(arrays["bn2.bias"]) == width:
            return factors
    raise InputError(
        f"init_from={source!r}: has no published size of an EfficientNet; state the factors of "
        "width and depth in the JSON file next to the weights, e.g. "
        '{"width": 1.1, "depth": 1.2}'
    )


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    return (
        [] if model.norm_eps == _EPS else [f"norm_eps={model.norm_eps}, but the format's is 1e-3"]
    )


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write the files of `timm_config.write`; return their names."""
    model = pretrained.model
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
    arrays = layout.write_entries(_entries(model), leaves)
    norms = [name.removesuffix(_MEAN) for name in arrays if name.endswith(_MEAN)]
    arrays |= {f"{norm}{COUNTER}": np.zeros((), np.int64) for norm in norms}
    spec = pretrained.spec
    return timm_config.write(path, config, arrays, spec.at(model.image_size or spec.image_size))
