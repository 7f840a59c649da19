"""Models with the names of the `timm` library: VisionTransformer and its distilled form.

`model_args` of the JSON file are arguments of VisionTransformer; absent arguments have timm's
defaults. `timm_config` holds the rest of the file, `timm_efficientnet` the names of EfficientNet.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.config import image_hw
from vit_jax.models.deit import DeiT
from vit_jax.models.efficientnet import EfficientNet
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.models.vit import ViT
from vit_jax.transfer import layout, safetensors, timm_config, timm_efficientnet
from vit_jax.transfer.common import (
    check_blocks,
    check_family,
    check_positions,
    refuse,
    require_image_size,
    square_side,
    with_learned_positions,
)
from vit_jax.transfer.layout import (
    Entry,
    joined,
    same,
    torch_linear,
    torch_norm,
    torch_patches,
    transposed,
)
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.timm_config import Config, read_config

logger = logging.getLogger("vit_jax")

_GELU = {"gelu": "exact", "gelu_tanh": "tanh"}
_ACT_LAYER = {ours: theirs for theirs, ours in _GELU.items()}
_POOLS = {"token": "token", "avg": "gap", "map": "map"}
_GLOBAL_POOL = {ours: theirs for theirs, ours in _POOLS.items()}
_DEFAULT_HEADS, _DEFAULT_EPS = 12, 1e-6
# timm's names of the sizes in VIT_VARIANTS, for the key `architecture`.
_NAMES = {"Ti": "tiny", "S": "small", "M": "medium", "B": "base", "L": "large", "H": "huge",
          "g": "giant", "G": "gigantic", "So400m": "so400m"}  # fmt: skip
# Arguments that change the computation, each with its only supported value.
_ONLY = {"pre_norm": False, "reg_tokens": 0, "pool_include_prefix": False, "in_chans": 3,
         "scale_attn_norm": False, "scale_mlp_norm": False, "proj_bias": True,
         "final_norm": True}  # fmt: skip


def knows(names: Iterable[str]) -> bool:
    """Whether the arrays have timm's names."""
    return "patch_embed.proj.weight" in names


def _entries(model: nn.Module) -> list[Entry]:
    entries = torch_patches("patch_embed.proj", model.patch_size)
    if model.has_class_token:
        entries.append(same("cls_token", "class_token"))
    if model.pos_embed == "learned_1d":
        entries.append(same("pos_embed", "pos_embedding"))
    if isinstance(model, DeiT):
        entries.append(same("dist_token", "distillation_token"))
    for i in range(model.depth):
        theirs, ours = f"blocks.{i}", f"encoder/layer_{i}"
        entries += torch_norm(f"{theirs}.norm1", f"{ours}/norm_attention")
        entries += torch_norm(f"{theirs}.norm2", f"{ours}/norm_mlp")
        fused = [f"{ours}/attention/{name}" for name in ("query", "key", "value")]
        entries += _fused(f"{theirs}.attn.qkv", fused, model.qkv_bias)
        entries += torch_linear(f"{theirs}.attn.proj", f"{ours}/attention/out")
        entries += torch_linear(f"{theirs}.mlp.fc1", f"{ours}/mlp/up")
        entries += torch_linear(f"{theirs}.mlp.fc2", f"{ours}/mlp/down")
        if model.layer_scale is not None:
            entries.append(same(f"{theirs}.ls1.gamma", f"{ours}/scale_attention/scale"))
            entries.append(same(f"{theirs}.ls2.gamma", f"{ours}/scale_mlp/scale"))
    if model.norm_pooled:
        entries += torch_norm("fc_norm", "pooled_norm")
    else:
        entries += torch_norm("norm", "encoder/norm")
    if model.pool == "map":
        entries.append(same("attn_pool.latent", "map_head/probe"))
        entries += torch_linear("attn_pool.q", "map_head/attention/query")
        entries += _fused("attn_pool.kv", [f"map_head/attention/{n}" for n in ("key", "value")])
        entries += torch_linear("attn_pool.proj", "map_head/attention/out")
        entries += torch_norm("attn_pool.norm", "map_head/norm")
        entries += torch_linear("attn_pool.mlp.fc1", "map_head/mlp/up")
        entries += torch_linear("attn_pool.mlp.fc2", "map_head/mlp/down")
    if model.num_classes is not None:
        entries += torch_linear("head", "head")
        if isinstance(model, DeiT):
            entries += torch_linear("head_dist", "head_distillation")
    return entries


def _fused(theirs: str, ours: list[str], bias: bool = True) -> list[Entry]:
    """The entries of several dense layers with the same inputs, stored as one."""
    entries = [joined(transposed, f"{theirs}.weight", [f"{name}/kernel" for name in ours])]
    return entries + [joined(same, f"{theirs}.bias", [f"{name}/bias" for name in ours])] * bias


def read(path: epath.Path, arrays: dict[str, np.ndarray]) -> Pretrained:
    """Make the model of `arrays`, which were read from `path`.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with its config.
    """
    source = str(path)
    arrays = layout.without_decoder(arrays, r"decoder_.*|mask_token", source)
    needed = {"patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2}
    layout.require(arrays, needed, source, {"pos_embed": 3, "head.weight": 2})
    config = read_config(path)
    found = _read_shapes(arrays, source)
    pool = _read_pool(config, arrays)
    act = config.args.get("act_layer") or "gelu"
    heads = _num_heads(config, found["embed_dim"])
    _check_supported(config, pool, act, heads, found["embed_dim"], source)
    mean, std = config.value_range()
    assumed = {"act_layer": act, "global_pool": pool, "num_heads": heads, "eps": _DEFAULT_EPS,
               "mean": mean, "std": std}  # fmt: skip
    given = config.stated | config.args | config.pixels
    safetensors.say_assumed(path, config.content, assumed, given)
    mlp_dim = arrays["blocks.0.mlp.fc1.weight"].shape[0]
    _check_agreement(config, found, mlp_dim, pool, source)
    image_size, class_token_has_position = _read_positions(config, arrays, source)
    fields = {
        "num_classes": found["num_classes"] or None,
        "image_size": image_size,
        "patch_size": found["patch_size"],
        "width": found["embed_dim"],
        "depth": found["depth"],
        "mlp_dim": mlp_dim,
        "num_heads": heads,
        "pool": _POOLS[pool],
        "norm_pooled": found["fc_norm"],
        "pos_embed": "learned_1d" if "pos_embed" in arrays else "none",
        "pos_embed_class_token": class_token_has_position,
        "gelu": _GELU[act],
        "norm_eps": float(config.args.get("eps", _DEFAULT_EPS)),
        "qkv_bias": found["qkv_bias"],
    }
    if found["class_token"] != (_POOLS[pool] == "token"):
        fields["class_token"] = found["class_token"]
    if "blocks.0.ls1.gamma" in arrays:
        fields["layer_scale"] = float(config.args.get("init_values") or 1e-5)
    model = DeiT(**fields) if "dist_token" in arrays else ViT(**fields)
    params = layout.read_entries(_entries(model), arrays, model, source)
    return Pretrained(source, model, params, timm_config.read_spec(config, model, source))


def _read_shapes(arrays: dict[str, np.ndarray], source: str) -> dict[str, Any]:
    """{timm's argument: value} for arguments that the arrays determine."""
    return {
        "embed_dim": arrays["patch_embed.proj.weight"].shape[0],
        "depth": layout.count_layers(arrays, r"blocks\.(\d+)\.", source),
        "class_token": "cls_token" in arrays,
        "qkv_bias": "blocks.0.attn.qkv.bias" in arrays,
        "qk_norm": False,
        "patch_size": tuple(arrays["patch_embed.proj.weight"].shape[2:]),
        "fc_norm": "fc_norm.weight" in arrays,
        "num_classes": arrays["head.weight"].shape[0] if "head.weight" in arrays else 0,
    }


def _read_pool(config: Config, arrays: dict[str, np.ndarray]) -> Any:
    """timm's global_pool: as stated, else inferred from the arrays, else the default."""
    pool = config.args.get("global_pool", config.stated.get("global_pool"))
    if pool is not None:
        return pool
    if not config.is_named:
        return "token"
    if "attn_pool.latent" in arrays:
        return "map"
    of_patches = "fc_norm.weight" in arrays or "cls_token" not in arrays
    return "avg" if of_patches else "token"


def _check_supported(
    config: Config, pool: Any, act: Any, heads: int | None, width: int, source: str
) -> None:
    """Raise InputError naming each argument that is not supported."""
    faults = [
        f"{name}={config.args[name]!r} is not supported" for name, value in _ONLY.items()
        if config.args.get(name, value) != value
    ]  # fmt: skip
    if pool not in _POOLS:
        faults.append(f"global_pool={pool!r}: known: {', '.join(_POOLS)}")
    if act not in _GELU:
        faults.append(f"act_layer={act!r}: known: {', '.join(_GELU)}")
    if heads is None:
        faults.append(
            f"number of heads: no published ViT is {width} wide; state num_heads in model_args"
        )
    refuse(faults, f"init_from={source!r}: cannot be read")


def _check_agreement(
    config: Config, found: dict[str, Any], mlp_dim: int, pool: str, source: str
) -> None:
    """Raise InputError if `config` contradicts `found`, the values from the arrays."""
    wanted = {key: config.args[key] for key in found if key in config.args}
    wanted.setdefault("num_classes", config.stated.get("num_classes"))
    if not config.is_named:
        wanted.setdefault("class_token", True)
        if wanted.get("fc_norm") is None:
            wanted["fc_norm"] = pool == "avg"
    if "patch_size" in config.args:
        wanted["patch_size"] = image_hw(config.args["patch_size"], "patch_size")
    if "mlp_ratio" in config.args:
        found = found | {"mlp_dim": mlp_dim}
        wanted["mlp_dim"] = int(found["embed_dim"] * config.args["mlp_ratio"])
    layout.check_agreement(wanted, found, source)


def _read_positions(
    config: Config, arrays: dict[str, np.ndarray], source: str
) -> tuple[tuple[int, int] | None, bool]:
    """(image size, whether the class token has a position).

    The image size is the stated one, else that of the square grid that the positions fill, else
    None.
    """
    p, q = arrays["patch_embed.proj.weight"].shape[2:]
    prefix = sum(token in arrays for token in ("cls_token", "dist_token"))
    no_embed_class = config.args.get("no_embed_class")
    num_positions = arrays["pos_embed"].shape[1] if "pos_embed" in arrays else None
    image_size = config.image_size()
    if num_positions is not None and prefix and no_embed_class is None:
        # True if there are as many positions as patches; without a size, if they form a square.
        patches = None if image_size is None else (image_size[0] // p) * (image_size[1] // q)
        square = math.isqrt(num_positions) ** 2 == num_positions
        no_embed_class = square if patches is None else num_positions == patches
    if image_size is None and num_positions is not None:
        side = square_side(num_positions - (0 if no_embed_class else prefix), source)
        image_size = (side * p, side * q)
    return image_size, not no_embed_class


def _num_heads(config: Config, width: int) -> int | None:
    """The number of heads: as stated, else timm's default, else that of ViTs of this width."""
    if "num_heads" in config.args:
        return config.args["num_heads"]
    by_width = layout.heads_by_width(width)
    if "model_args" in config.stated and not config.is_named:
        return _DEFAULT_HEADS
    if by_width is not None:
        logger.info("assuming %d heads, as in published ViTs of width %d", by_width, width)
    return by_width


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    if isinstance(model, EfficientNet):
        return timm_efficientnet.check(model)
    if faults := check_family(model, ViT, DeiT):
        return faults
    faults = check_positions(model)
    if model.hidden_head:
        faults.append("hidden_head=True, but the format's head is linear")
    if isinstance(model, DeiT) and not model.distillation_head and model.num_classes is not None:
        faults.append("distillation_head=False, but the format's DeiT has two heads")
    faults += check_blocks(model)
    if model.pool == "map" and not model.qkv_bias:
        faults.append("qkv_bias=False with pool='map', but the format's pooling has biases")
    return faults


def write(path: epath.Path, pretrained: Pretrained) -> list[str]:
    """Write model.safetensors and config.json into a folder, or NAME.safetensors and NAME.json.

    Returns the files' names.
    """
    if isinstance(pretrained.model, EfficientNet):
        return timm_efficientnet.write(path, pretrained)
    require_image_size(pretrained)
    # timm's distilled model always has a position for every token.
    distilled = isinstance(pretrained.model, DeiT)
    if pretrained.model.pos_embed != "none" or distilled:
        pretrained = with_learned_positions(pretrained, class_token_has_one=distilled)
    model = pretrained.model
    arrays = layout.write_entries(_entries(model), pretrained.params)
    args = _model_args(model)
    config = {
        "architecture": _architecture(model),
        "num_classes": model.num_classes or 0,
        "num_features": model.width,
        "global_pool": args["global_pool"],
        "model_args": args,
    }
    return timm_config.write(path, config, arrays, pretrained.spec.at(model.image_size))


def _model_args(model: nn.Module) -> dict[str, Any]:
    """The arguments of VisionTransformer that make `model`."""
    args = {
        "img_size": layout.int_or_pair(model.image_size),
        "patch_size": layout.int_or_pair(model.patch_size),
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.num_heads,
        "mlp_ratio": _mlp_ratio(model),
        "qkv_bias": model.qkv_bias,
        "global_pool": _GLOBAL_POOL[model.pool],
        "class_token": model.has_class_token,
        "no_embed_class": not model.pos_embed_class_token,
        "fc_norm": model.norm_pooled,
        "act_layer": _ACT_LAYER[model.gelu],
    }
    if model.pos_embed == "none":
        args["pos_embed"] = "none"
    if model.layer_scale is not None:
        args["init_values"] = model.layer_scale
    if model.norm_eps != _DEFAULT_EPS:
        # Not an argument of timm: timm refuses it, which is better than using another epsilon.
        args["eps"] = model.norm_eps
    return args


def _architecture(model: nn.Module) -> str:
    """A registered architecture, if possible of the model's size; model_args override it."""
    sizes = {v.width: _NAMES[name] for name, v in VIT_VARIANTS.items() if name in _NAMES}
    size = sizes.get(model.width, "base")
    if isinstance(model, DeiT):
        size = size if size in ("tiny", "small", "base") else "base"
        return f"deit_{size}_distilled_patch16_224"
    return f"vit_{size}_patch{14 if size in ('huge', 'giant', 'gigantic') else 16}_224"


def _mlp_ratio(model: nn.Module) -> float:
    """The ratio for which timm's int(width * ratio) is the hidden width."""
    ratio = model.mlp_dim / model.width
    while int(model.width * ratio) < model.mlp_dim:
        ratio = math.nextafter(ratio, math.inf)
    return int(ratio) if ratio.is_integer() else ratio
