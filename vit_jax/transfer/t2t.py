"""T2T-ViT with its authors' names (github.com/yitu-opensource/T2T-ViT), in safetensors files.

The JSON file next to the arrays has the form of timm's. Its `model_args` are arguments of the
authors' T2T_ViT; absent arguments are read from the arrays, or have the authors' defaults.
"""

import logging
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.models.contract import CONSTANTS
from vit_jax.models.position import SINCOS_1D
from vit_jax.models.t2t import SPLITS, STRIDE, T2T_VARIANTS, T2TViT
from vit_jax.transfer import fit, layout, safetensors, timm_config
from vit_jax.transfer.common import check_blocks, check_family, refuse, square_side
from vit_jax.transfer.layout import Entry, joined, same, torch_linear, torch_norm, transposed
from vit_jax.transfer.pretrained import Pretrained

logger = logging.getLogger("vit_jax")

_STEM = "tokens_to_token"
_PROJECT = f"{_STEM}.project.weight"
_HEAD_WIDTH = 64  # of every published size
_RESIZE = "half_pixel"  # the authors' convention for another image size
_QKV = ("query", "key", "value")


def knows(names: Iterable[str]) -> bool:
    """Whether the arrays have the authors' names."""
    return _PROJECT in names


def _entries(model: nn.Module) -> list[Entry]:
    entries = [same("cls_token", "class_token"), same("pos_embed", f"{CONSTANTS}/pos_embedding")]
    for i in range(len(SPLITS) - 1):
        entries += _mixer_entries(f"{_STEM}.attention{i + 1}", f"stem/mixer_{i}", model)
    entries += torch_linear(f"{_STEM}.project", "embedding")
    for i in range(model.depth):
        theirs, ours = f"blocks.{i}", f"encoder/layer_{i}"
        entries += torch_norm(f"{theirs}.norm1", f"{ours}/norm_attention")
        entries += torch_norm(f"{theirs}.norm2", f"{ours}/norm_mlp")
        entries += _fused(f"{theirs}.attn.qkv", f"{ours}/attention", _QKV, model.qkv_bias)
        entries += torch_linear(f"{theirs}.attn.proj", f"{ours}/attention/out")
        entries += torch_linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/up")
        entries += torch_linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/down")
    entries += torch_norm("norm", "encoder/norm")
    return entries + (torch_linear("head", "head") if model.num_classes is not None else [])


def _mixer_entries(theirs: str, ours: str, model: nn.Module) -> list[Entry]:
    entries = torch_norm(f"{theirs}.norm1", f"{ours}/norm_attention")
    entries += torch_norm(f"{theirs}.norm2", f"{ours}/norm_mlp")
    if model.token_module == "performer":
        entries += _fused(f"{theirs}.kqv", ours, ("key", "query", "value"), True)
        entries += torch_linear(f"{theirs}.proj", f"{ours}/out")
        entries.append(same(f"{theirs}.w", f"{CONSTANTS}/{ours}/random_features"))
        first, second = "mlp.0", "mlp.2"
    else:
        entries += _fused(f"{theirs}.attn.qkv", ours, _QKV, False)
        entries += torch_linear(f"{theirs}.attn.proj", f"{ours}/out")
        first, second = "mlp.fc1", "mlp.fc2"
    entries += torch_linear(f"{theirs}.{first}", f"{ours}/mlp/up")
    return entries + torch_linear(f"{theirs}.{second}", f"{ours}/mlp/down")


def _fused(theirs: str, ours: str, parts: tuple[str, ...], bias: bool) -> list[Entry]:
    kernels = joined(transposed, f"{theirs}.weight", [f"{ours}/{part}/kernel" for part in parts])
    biases = joined(same, f"{theirs}.bias", [f"{ours}/{part}/bias" for part in parts])
    return [kernels, biases] if bias else [kernels]


def read(path: epath.Path, arrays: dict[str, np.ndarray]) -> Pretrained:
    """Make the model of `arrays`, which were read from `path`.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with its config.
    """
    source = str(path)
    needed = {_PROJECT: 2, "blocks.0.mlp.fc1.weight": 2, "pos_embed": 3, "cls_token": 3}
    layout.require(arrays, needed, source, {"head.weight": 2})
    config = timm_config.read_config(path)
    found = _read_shapes(arrays, source)
    heads = config.args.get("num_heads", found["embed_dim"] // _HEAD_WIDTH)
    _check(config, found, heads, arrays, source)
    mean, std = config.value_range()
    assumed = {"num_heads": heads, "mean": mean, "std": std}
    given = config.stated | config.args | config.pixels
    safetensors.say_assumed(path, config.content, assumed, given)
    image_size = config.image_size()
    if image_size is None:
        side = square_side(arrays["pos_embed"].shape[1] - 1, source) * STRIDE
        image_size = (side, side)
    model = T2TViT(
        found["num_classes"] or None,
        image_size,
        (STRIDE, STRIDE),
        found["embed_dim"],
        found["depth"],
        mlp_dim=arrays["blocks.0.mlp.fc1.weight"].shape[0],
        num_heads=heads,
        token_module=found["tokens_type"],
        token_width=found["token_dim"],
        qkv_bias=found["qkv_bias"],
        gelu="exact",
        norm_eps=1e-5,
    )
    leaves = layout.read_entries(_entries(model), arrays, model, source)
    params, model_state = fit.split_leaves(leaves)
    if "qk_scale" in config.args:
        params |= _scale_queries(params, model, float(config.args["qk_scale"]), source)
    spec = timm_config.read_spec(config, model, source)._replace(resize=_RESIZE)
    return Pretrained(source, model, params, spec, model_state=model_state)


def _read_shapes(arrays: dict[str, np.ndarray], source: str) -> dict[str, Any]:
    """{the authors' argument: value} for arguments that the arrays determine."""
    is_performer = f"{_STEM}.attention1.kqv.weight" in arrays
    return {
        "tokens_type": "performer" if is_performer else "transformer",
        "token_dim": arrays[_PROJECT].shape[1] // SPLITS[-1].size ** 2,
        "embed_dim": arrays[_PROJECT].shape[0],
        "depth": layout.count_layers(arrays, r"blocks\.(\d+)\.", source),
        "qkv_bias": "blocks.0.attn.qkv.bias" in arrays,
        "num_classes": arrays["head.weight"].shape[0] if "head.weight" in arrays else 0,
    }


def _check(
    config: timm_config.Config,
    found: dict[str, Any],
    heads: int,
    arrays: dict[str, np.ndarray],
    source: str,
) -> None:
    """Raise InputError if the config contradicts the arrays, or shows no number of heads."""
    width = found["embed_dim"]
    wanted = {key: config.args[key] for key in found if key in config.args}
    wanted.setdefault("num_classes", config.stated.get("num_classes"))
    if "mlp_ratio" in config.args:
        found = found | {"mlp_dim": arrays["blocks.0.mlp.fc1.weight"].shape[0]}
        wanted["mlp_dim"] = int(width * config.args["mlp_ratio"])
    layout.check_agreement(wanted, found, source)
    faults = []
    if heads < 1 or width % heads:
        faults.append(
            f"num_heads={heads} does not divide the width {width}; state num_heads in model_args"
        )
    if config.args.get("in_chans", 3) != 3:
        faults.append(f"in_chans={config.args['in_chans']} is not supported")
    refuse(faults, f"init_from={source!r}: cannot be read")


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


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    if faults := check_family(model, T2TViT):
        return faults
    needed = {
        "pool": "token",
        "hidden_head": False,
        "norm_pooled": False,
        "pos_embed": SINCOS_1D,
        "positions_at": "stem",
        "pos_embed_class_token": True,
        "layer_scale": None,
        "gelu": "exact",
        "norm_eps": 1e-5,
    }
    return check_blocks(model, **needed)


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write the files of `timm_config.write`; return their names."""
    model = pretrained.model
    leaves = {**pretrained.params, **pretrained.model_state}
    arrays = layout.write_entries(_entries(model), leaves)
    args = {
        "img_size": layout.int_or_pair(model.image_size),
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
    return timm_config.write(path, config, arrays, pretrained.spec.at(model.image_size))


def _architecture(model: T2TViT) -> str:
    """The authors' name of the size, e.g. t2t_vit_14; the class's for others."""
    sizes = (model.width, model.depth, model.mlp_dim, model.num_heads)
    kind = "" if model.token_module == "performer" else "_t"
    number = next((name for name, variant in T2T_VARIANTS.items() if variant == sizes), None)
    return f"t2t_vit{kind}" + (f"_{number}" if number else "")
