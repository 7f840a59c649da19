"""T2T-ViT with its authors' names (github.com/yitu-opensource/T2T-ViT), in safetensors files.

The JSON file next to the arrays has the form of timm's. Its `model_args` are arguments of the
authors' T2T_ViT; absent arguments are read from the arrays, or have the authors' defaults.
"""

import logging
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.models.contract import CONSTANTS
from vit_jax.models.position import SINCOS_1D
from vit_jax.models.t2t import SPLITS, STRIDE, T2T_VARIANTS, T2TViT
from vit_jax.transfer import timm_config
from vit_jax.transfer.fit import require_image_size, split_leaves
from vit_jax.transfer.names import (
    LINEAR,
    NORM,
    Row,
    find_unheld,
    held,
    read_rows,
    row,
    rows_of,
    write_rows,
)
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.source import Source, int_or_pair
from vit_jax.transfer.timm import encoder_rows

logger = logging.getLogger("vit_jax")

_STEM = "tokens_to_token"
_PROJECT = f"{_STEM}.project.weight"
_UP = "blocks.0.mlp.fc1.weight"
_HEAD_WIDTH = 64  # of every published size


def _fused(theirs: str, ours: str, *parts: str) -> list[Row]:
    return LINEAR(theirs, *(f"{ours}/{part}" for part in parts))


def _mixer_rows(theirs: str, ours: str, token_module: str) -> list[Row]:
    rows = NORM(f"{theirs}.norm1", f"{ours}/norm_attention")
    rows += NORM(f"{theirs}.norm2", f"{ours}/norm_mlp")
    if token_module == "performer":
        rows += _fused(f"{theirs}.kqv", ours, "key", "query", "value")
        rows.append(row(f"{theirs}.w", f"{CONSTANTS}/{ours}/random_features"))
        proj, first, second = "proj", "mlp.0", "mlp.2"
    else:
        rows += _fused(f"{theirs}.attn.qkv", ours, "query", "key", "value")
        proj, first, second = "attn.proj", "mlp.fc1", "mlp.fc2"
    rows += LINEAR(f"{theirs}.{proj}", f"{ours}/out")
    rows += LINEAR(f"{theirs}.{first}", f"{ours}/mlp/up")
    return rows + LINEAR(f"{theirs}.{second}", f"{ours}/mlp/down")


def _rows(model: T2TViT) -> list[Row]:
    mixers = []
    for i in range(len(SPLITS) - 1):
        mixers += _mixer_rows(f"{_STEM}.attention{i + 1}", f"stem/mixer_{i}", model.token_module)
    table = [
        row("pos_embed", f"{CONSTANTS}/pos_embedding"),
        *mixers,
        *LINEAR(f"{_STEM}.project", "embedding"),
        *encoder_rows(model),
    ]
    return rows_of(table, model)


def recognises(source: Source) -> bool:
    """Whether the arrays have the authors' names."""
    return _PROJECT in source.arrays


def read(source: Source) -> Pretrained:
    """Make the model of the arrays.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with its config.
    """
    arrays = source.arrays
    source.require({_PROJECT: 2, _UP: 2, "pos_embed": 3, "cls_token": 3}, {"head.weight": 2})
    config = timm_config.Config(source)
    width, mlp_dim = arrays[_PROJECT].shape[0], arrays[_UP].shape[0]
    is_performer = f"{_STEM}.attention1.kqv.weight" in arrays
    found = {  # the authors' arguments that the arrays determine
        "tokens_type": "performer" if is_performer else "transformer",
        "token_dim": arrays[_PROJECT].shape[1] // SPLITS[-1].size ** 2,
        "embed_dim": width,
        "depth": source.count_layers(r"blocks\.(\d+)\."),
        "qkv_bias": "blocks.0.attn.qkv.bias" in arrays,
        "num_classes": source.size("head.weight", 0) or 0,
    }
    heads = config.args.get("num_heads", width // _HEAD_WIDTH)
    config.check_agreement(found, width, mlp_dim)
    if heads < 1 or width % heads:
        fault = f"num_heads={heads} does not divide the width {width}"
        source.refuse([f"{fault}; state num_heads in model_args"], "cannot be read")
    config.say_assumed(num_heads=heads)
    image_size = config.image_size
    if image_size is None:
        side = source.square_side(arrays["pos_embed"].shape[1] - 1) * STRIDE
        image_size = (side, side)
    model = T2TViT(
        found["num_classes"] or None,
        image_size,
        (STRIDE, STRIDE),
        width,
        found["depth"],
        mlp_dim=mlp_dim,
        num_heads=heads,
        token_module=found["tokens_type"],
        token_width=found["token_dim"],
        qkv_bias=found["qkv_bias"],
        gelu="exact",
        norm_eps=1e-5,
    )
    params, model_state = split_leaves(read_rows(_rows(model), source, model))
    if "qk_scale" in config.args:
        params |= _scale_queries(params, model, float(config.args["qk_scale"]), str(source.path))
    spec = config.read_spec(image_size, model.num_classes, "half_pixel")  # the authors' convention
    return Pretrained(str(source.path), model, params, spec, model_state=model_state)


def _scale_queries(
    params: dict[str, np.ndarray], model: T2TViT, qk_scale: float, source: str
) -> dict[str, np.ndarray]:
    """The query projections times qk_scale sqrt(K), because the model divides by sqrt(K)."""
    factor = qk_scale * np.sqrt(model.width / model.num_heads)
    if np.isclose(factor, 1.0):
        return {}
    logger.info("%s: qk_scale=%g multiplied into the queries", source, qk_scale)
    names = [f"encoder/layer_{i}/attention/query" for i in range(model.depth)]
    leaves = [name for name in params if name.rpartition("/")[0] in names]
    return {name: (params[name] * factor).astype(np.float32) for name in leaves}


_HELD = {
    "pool": ("token",), "hidden_head": (False,), "norm_pooled": (False,),
    "pos_embed": (SINCOS_1D,), "pos_embed_class_token": (True,), "layer_scale": (None,),
    "gelu": ("exact",), "norm_eps": (1e-5,),
}  # fmt: skip


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    return find_unheld(model, (T2TViT,), _HELD)


def write(path: epath.Path, pretrained: Pretrained, max_shard_size: str | None = None) -> list[str]:
    """Write the files of `timm_config.write`; return their names."""
    model, image_size = held(pretrained.model, T2TViT), require_image_size(pretrained)
    leaves = {**pretrained.params, **pretrained.model_state}
    arrays = write_rows(_rows(model), leaves, model)
    args = {
        "img_size": int_or_pair(image_size),
        "tokens_type": model.token_module,
        "num_classes": model.num_classes or 0,
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.num_heads,
        "mlp_ratio": model.mlp_dim / model.width,
        "token_dim": model.token_width,
        "qkv_bias": model.qkv_bias,
    }
    config: dict[str, Any] = {
        "architecture": _architecture(model),
        "num_classes": model.num_classes or 0,
        "model_args": args,
    }
    spec = pretrained.spec.at(image_size)
    return timm_config.write(path, config, arrays, spec, max_shard_size)


def _architecture(model: T2TViT) -> str:
    """The authors' name of the size, e.g. t2t_vit_14; the class's for others."""
    sizes = (model.width, model.depth, model.mlp_dim, model.num_heads)
    kind = "" if model.token_module == "performer" else "_t"
    number = next((name for name, variant in T2T_VARIANTS.items() if variant == sizes), None)
    return f"t2t_vit{kind}" + (f"_{number}" if number else "")
