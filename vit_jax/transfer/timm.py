"""Models with the names of the `timm` library: VisionTransformer, distilled too.

`model_args` of the JSON file are arguments of VisionTransformer; absent arguments have timm's
defaults. `timm_config` holds the rest of the file, `timm_efficientnet` the other family of models.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults
from vit_jax.base.lazy import Lazy
from vit_jax.data.device_ops import to_value_range
from vit_jax.models.deit import DeiT
from vit_jax.models.efficientnet import EfficientNet
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.models.vit import ViT
from vit_jax.transfer import fit, timm_blocks, timm_config, timm_efficientnet, timm_naflex
from vit_jax.transfer.families import COMPUTES_OTHERWISE
from vit_jax.transfer.names import (
    LINEAR,
    NORM,
    PATCHES,
    Row,
    find_unheld,
    read_rows,
    row,
    rows_of,
    write_rows,
)
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.source import Source, int_or_pair
from vit_jax.transfer.timm_blocks import Form, Kind, eps_of_timm
from vit_jax.transfer.timm_config import Config

_GELU = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick", "silu": "silu"}
_ACT_LAYER = {ours: theirs for theirs, ours in _GELU.items()}
_POOLS = {"token": "token", "avg": "gap", "map": "map"}
_GLOBAL_POOL = {ours: theirs for theirs, ours in _POOLS.items()}
_DEFAULT_HEADS = 12
# timm's names of the sizes in VIT_VARIANTS, for the key `architecture`.
_NAMES = {"Ti": "tiny", "S": "small", "M": "medium", "B": "base", "L": "large", "H": "huge",
          "g": "giant", "G": "gigantic", "So400m": "so400m"}  # fmt: skip
# Arguments that change the computation, each with its only supported value.
_ONLY = {"pool_include_prefix": False, "scale_attn_norm": False,
         "scale_mlp_norm": False, "proj_bias": True, "final_norm": True, "use_post_norm": False,
         "rope_grid_offset": 0, "rope_grid_indexing": "ij",
         "pos_embed_rope_normalize_coords": "separate", "pos_embed_ar_preserving": False,
         "pos_embed_use_grid_sample": False}  # fmt: skip
_NORM_EPS = {"layernorm": 1e-6, "rmsnorm": 1e-6, "layernormbf16": 1e-5}  # by `norm_layer`

_PATCHES = timm_blocks.PATCHES_WEIGHT
_DOWN = "blocks.0.mlp.fc2.weight"
_LAYER_SCALE = ("blocks.0.ls1.gamma", "blocks.0.gamma_1")
_SMALL = 1e-3  # of the largest output; float16 changes outputs as much

logger = logging.getLogger("vit_jax")


def encoder_rows(model: nn.Module) -> list[Row]:
    """The rows of the class token, the blocks, the last norm and the head; of a T2T-ViT too."""
    return [
        row("cls_token", "class_token"),
        *timm_blocks.block_rows(model),
        *NORM("norm", "encoder/norm"),
        *LINEAR("head", "head"),
    ]


def vit_rows(model: nn.Module) -> list[Row]:
    """The rows of a ViT or a DeiT."""
    table = [
        *PATCHES("patch_embed.proj", "embedding"),
        row("pos_embed", "pos_embedding"),
        row("dist_token", "distillation_token"),
        row("reg_token", "register_tokens"),
        *NORM("norm_pre", "embedding_norm"),
        *encoder_rows(model),
        *NORM("fc_norm", "pooled_norm"),
        row("attn_pool.latent", "map_head/probe"),
        *LINEAR("attn_pool.q", "map_head/attention/query"),
        *LINEAR("attn_pool.kv", "map_head/attention/key", "map_head/attention/value"),
        *LINEAR("attn_pool.proj", "map_head/attention/out"),
        *NORM("attn_pool.norm", "map_head/norm"),
        *LINEAR("attn_pool.mlp.fc1", "map_head/mlp/up"),
        *LINEAR("attn_pool.mlp.fc2", "map_head/mlp/down"),
        *LINEAR("head_dist", "head_distillation"),
    ]
    return rows_of(table, model)


def recognises(source: Source) -> bool:
    """Whether the arrays have timm's names."""
    is_vit = not source.arrays.keys().isdisjoint((_PATCHES, timm_naflex.PATCHES))
    return is_vit or timm_efficientnet.recognises(source)


def read(source: Source) -> Pretrained:
    """Make the model of the arrays.

    Raises:
      InputError: naming arrays that do not fit such a model, or contradictions with its config.
    """
    is_efficientnet = timm_efficientnet.recognises(source)
    return timm_efficientnet.read(source) if is_efficientnet else _read_vit(source)


def _read_vit(source: Source) -> Pretrained:
    config, is_naflex = Config(source), timm_naflex.PATCHES in source.arrays
    if is_naflex:
        config.image_size = timm_naflex.read_naflex(source, config.args)
    timm_blocks.rename_to_timm(source)
    source.require({_PATCHES: 4, _DOWN: 2}, {"pos_embed": 3, "reg_token": 3, "head.weight": 2})
    arrays = source.arrays
    architecture = str(config.stated.get("architecture", ""))
    source.refuse(["its architecture"] if COMPUTES_OTHERWISE.match(architecture) else [])
    kind = (timm_naflex.naflex_kind(source, config.args, architecture) if is_naflex
            else timm_blocks.find_kind(source, architecture))  # fmt: skip
    source.leave_out(r"decoder_.*|mask_token", "what predicted hidden patches is")
    width, mlp_dim = arrays[_DOWN].shape
    fields = timm_blocks.block_fields(source, kind)
    found = {  # timm's arguments that the arrays determine
        "embed_dim": width,
        "depth": source.count_layers(r"blocks\.(\d+)\."),
        "class_token": "cls_token" in arrays,
        "qkv_bias": fields["qkv_bias"],
        "qk_norm": fields["qk_norm"],
        "reg_tokens": fields["registers"],
        "pre_norm": fields["pre_norm"],
        "patch_size": arrays[_PATCHES].shape[2:],
        "in_chans": arrays[_PATCHES].shape[1],
        "fc_norm": "fc_norm.weight" in arrays,
        "num_classes": source.size("head.weight", 0) or 0,
    }
    pool, act, heads, eps = _read_unseen(config, source, kind, width)
    defaults = {} if config.is_named else {"class_token": not is_naflex, "fc_norm": pool == "avg"}
    if fields["gated_mlp"]:  # whose ratio counts both layers or one, or is rounded
        config.args.pop("mlp_ratio", None)
    config.check_agreement(found, width, mlp_dim, **defaults)
    image_size, class_token_has_position = _read_positions(config, source)
    is_usual = found["class_token"] == (pool == "token")
    has_scale = not arrays.keys().isdisjoint(_LAYER_SCALE)
    model = (DeiT if "dist_token" in arrays else ViT)(
        num_classes=found["num_classes"] or None,
        image_size=image_size,
        patch_size=found["patch_size"],
        channels=found["in_chans"],
        width=width,
        depth=found["depth"],
        mlp_dim=mlp_dim,
        num_heads=heads,
        pool=_POOLS[pool],
        class_token=None if is_usual else found["class_token"],
        norm_pooled=found["fc_norm"],
        layer_scale=float(config.args.get("init_values", 1e-5)) if has_scale else None,
        pos_embed="learned_1d" if "pos_embed" in arrays else "none",
        pos_embed_class_token=class_token_has_position,
        gelu=_GELU[act],
        norm_eps=eps,
        **fields,
    )
    model = timm_blocks.check_rotary(source, model, config.args)
    params = read_rows(vit_rows(model), source, model)
    spec = config.read_spec(image_size, model.num_classes, kind.resize).of(model.channels)
    pretrained = Pretrained(str(source.path), model, params, spec)
    return timm_naflex.of_pictures(pretrained, config) if is_naflex else pretrained


def _read_unseen(
    config: Config, source: Source, kind: Kind, width: int
) -> tuple[str, str, int, float]:
    """timm's global_pool, act_layer, num_heads and eps, which the arrays do not determine.

    Raises:
      InputError: naming each argument that is not supported.
    """
    pool = _read_pool(config, source, kind)
    act = config.args.get("act_layer", kind.act)
    norm_layer = config.args.get("norm_layer", "")
    eps = _NORM_EPS.get(norm_layer, kind.eps)
    eps = float(config.args.get("eps", config.stated.get("norm_eps", eps)))
    has_default = "model_args" in config.stated and not config.is_named
    default_heads = _DEFAULT_HEADS if has_default else timm_blocks.heads_of(kind, width)
    heads: Any = config.args.get("num_heads", default_heads)  # None is refused below
    faults = Faults()
    for name, value in _ONLY.items():
        stated = config.args.get(name, value)
        faults.need(stated == value, f"{name}={stated!r} is not supported")
    faults.need_known("global_pool", pool, _POOLS)
    faults.need_known("act_layer", act, _GELU)
    faults.need_known("norm_layer", norm_layer or "layernorm", _NORM_EPS)
    faults.need(heads, f"number of heads: no published ViT is {width} wide; state num_heads in "
                "model_args")  # fmt: skip
    source.refuse(faults, "cannot be read")
    assumed = {"act_layer": act, "global_pool": pool, "num_heads": heads}
    if not config.exists:
        config.take_pixels(kind.pixels)
        assumed["eps"] = eps  # else timm's architecture decides it
    config.say_assumed(**assumed)
    return pool, act, heads, eps


def _read_pool(config: Config, source: Source, kind: Kind) -> str:
    """timm's global_pool: as stated, else the kind's, else inferred from the arrays."""
    arrays, found = source.arrays, kind.pool or "token"
    if config.is_named and "attn_pool.latent" in arrays:
        found = "map"
    elif (
        config.is_named
        and kind.pool is None
        and ("fc_norm.weight" in arrays or "cls_token" not in arrays)
    ):
        found = "avg"
    return config.args.get("global_pool", config.stated.get("global_pool", found))


def _read_positions(config: Config, source: Source) -> tuple[tuple[int, int] | None, bool]:
    """(image size, whether the class token has a position).

    The image size is the stated one, else the size of the square grid that the positions fill, else
    None. Positions of registers are added to the registers, which have none here.
    """
    p, q = source.arrays[_PATCHES].shape[2:]
    named = sum(token in source.arrays for token in ("cls_token", "dist_token"))
    registers = source.size("reg_token", 1) or 0
    image_size, num_positions = config.image_size, source.size("pos_embed", 1)
    placed = named
    if num_positions is not None:
        patches = None if image_size is None else (image_size[0] // p) * (image_size[1] // q)
        # As many tokens as leave the number of patches; without a size, as leave a square.
        any_of = (0, named, named + registers)
        by_stated: dict[bool | None, tuple[int, ...]] = {True: any_of[:1], False: any_of[1:]}
        possible = by_stated.get(config.args.get("no_embed_class"), any_of)
        rests = {number: num_positions - number for number in possible}
        fitting = (n for n, r in rests.items() if r == (patches or math.isqrt(max(r, 0)) ** 2))
        placed = next(fitting, named)
        if placed > named:
            first, added, last = np.split(source.arrays["pos_embed"], [named, placed], axis=1)
            source.arrays["reg_token"] = source.arrays["reg_token"] + added
            source.arrays["pos_embed"] = np.concatenate([first, last], axis=1)
            num_positions, placed = num_positions - registers, named
    if image_size is None and num_positions is not None:
        side = source.square_side(num_positions - placed)
        image_size = (side * p, side * q)
    if image_size is not None:
        image_size = source.whole_patches(image_size, (p, q))
    return image_size, placed == named


def _held(model: nn.Module) -> dict[str, Sequence]:
    """{field: values} of a VisionTransformer, or of a DINOv2 where MLPs have a gate."""
    gated = getattr(model, "gated_mlp", False)
    return {
        "channels": range(1, 100),
        "hidden_head": (False,),
        "registers": (0,) if isinstance(model, DeiT) else range(100),
        "pre_norm": (False, True),
        "patch_bias": (not getattr(model, "pre_norm", False),),
        "gated_mlp": (False, True),
        "gelu": ("silu",) if gated else tuple(_ACT_LAYER),
    }


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    if type(model) is EfficientNet:
        return timm_efficientnet.check(model)
    if timm_naflex.is_naflex(model):
        return timm_naflex.check(model)
    if (form := timm_blocks.find_form(model)) is not None:
        return timm_blocks.find_faults(form, model)
    if faults := find_unheld(model, (ViT, DeiT), _held(model)):
        return faults
    if isinstance(model, DeiT) and not model.distillation_head and model.num_classes is not None:
        return ["distillation_head=False, but the format's DeiT has two heads"]
    if model.pool == "map" and not model.qkv_bias:
        return ["qkv_bias=False with pool='map', but the format's pooling has biases"]
    return []


def write(path: epath.Path, pretrained: Pretrained, max_shard_size: str | None = None) -> list[str]:
    """Write model.safetensors and config.json into a folder, or NAME.safetensors and NAME.json.

    Returns the files' names.
    """
    if isinstance(pretrained.model, EfficientNet):
        return timm_efficientnet.write(path, pretrained, max_shard_size)
    fit.require_image_size(pretrained)
    # timm's distilled model always has a position for every token.
    distilled = isinstance(pretrained.model, DeiT)
    if pretrained.model.position_class.acts_on != "nothing" or distilled:
        pretrained = fit.with_learned_positions(pretrained, class_token_has_one=distilled)
    flexible = timm_naflex.is_naflex(pretrained.model)
    if (pretrained.model.registers or flexible) and pretrained.model.num_prefix_positions:
        pretrained = fit.without_class_position(pretrained)
    model, form = pretrained.model, timm_blocks.find_form(pretrained.model)
    rows = timm_naflex.to_naflex(vit_rows(model)) if flexible else vit_rows(model)
    arrays: dict[str, np.ndarray | Lazy] = {**write_rows(rows, pretrained.params, model)}
    if flexible:
        args, architecture = timm_naflex.to_args(_model_args(model), model)
        positions = np.asarray(arrays["embeds.pos_embed"])
        arrays["embeds.pos_embed"] = positions.reshape(1, *model.grid, model.width)
    elif form is None:
        args, architecture = _model_args(model), _architecture(model)
    else:
        args, architecture = _rotary_args(model, form), form.architecture(model)
        if architecture == "vit5":
            arrays |= timm_blocks.stored_frequencies(model)
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes or 0,
        "num_features": model.width,
        "global_pool": args["global_pool"],
        "model_args": args,
        **({"max_tokens": model.max_tokens} if flexible else {}),
    }
    spec = pretrained.spec.at(model.image_size).of(model.channels)
    if "eps" in args and (difference := _difference_by_eps(pretrained, spec)) <= _SMALL:
        config["norm_eps"] = args.pop("eps")
        logger.warning(
            "--format=timm: timm computes norms with its own epsilon, %g, and this model with %g: "
            "features differ by up to %.2g of the largest", eps_of_timm(model.pre_norm),
            model.norm_eps, difference,
        )  # fmt: skip
    spec = spec._replace(cut=None) if flexible else spec
    return timm_config.write(path, config, arrays, spec, max_shard_size)


def _size_args(model: nn.Module) -> dict[str, Any]:
    """The arguments of every Transformer of timm."""
    return {
        "img_size": int_or_pair(model.image_size),
        "patch_size": int_or_pair(model.patch_size),
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.num_heads,
        "mlp_ratio": _mlp_ratio(model),
        "global_pool": _GLOBAL_POOL[model.pool],
    }


def _rotary_args(model: nn.Module, form: Form) -> dict[str, Any]:
    """The arguments of timm's Eva, or of a ViT-5, that make `model`."""
    of_form = {name: getattr(model, field) for name, field in form.args.items()}
    return _size_args(model) | {name: v for name, v in of_form.items() if v is not None}


def _model_args(model: nn.Module) -> dict[str, Any]:
    """The arguments of VisionTransformer that make `model`."""
    args = _size_args(model) | {
        "qkv_bias": model.qkv_bias,
        "class_token": model.has_class_token,
        # timm's positions of the class token go with positions of registers: none here.
        "no_embed_class": model.registers > 0 or not model.pos_embed_class_token,
        "fc_norm": model.norm_pooled,
        "act_layer": _ACT_LAYER[model.gelu],
        # Stated even where unset: some architectures set them, such as NaFlexVit's.
        "init_values": model.layer_scale,
        "reg_tokens": model.registers,
    }
    if model.position_class.acts_on == "nothing":
        args["pos_embed"] = "none"
    args |= {"in_chans": model.channels} if model.channels != 3 else {}
    args |= {"pre_norm": True} if model.pre_norm else {}
    if model.norm_eps != eps_of_timm(model.pre_norm):
        # Not an argument of timm: timm refuses it, which is better than computing something else.
        args["eps"] = model.norm_eps
    return args


def _difference_by_eps(pretrained: Pretrained, spec: Spec) -> float:
    """How much the outputs change with timm's epsilon, as a share of the largest.

    For noise, black and white: the norms of a plain image have the smallest variance.
    """
    model = pretrained.model.clone(dtype=jnp.dtype("float32"))  # bfloat16 would hide it
    variables = jax.device_put(pretrained.variables)
    noise = jax.random.uniform(jax.random.key(0), (*model.image_size, model.channels), maxval=255)
    pixels = jnp.stack([noise, 0 * noise, 255 + 0 * noise])
    images = to_value_range(pixels, spec.mean, spec.std)
    own, theirs = (
        jax.jit(partial(each.apply, method="features"))(variables, images)
        for each in (model, model.clone(norm_eps=eps_of_timm(model.pre_norm)))
    )
    return float(jnp.abs(own - theirs).max() / jnp.abs(own).max())


def _architecture(model: nn.Module) -> str:
    """A registered architecture, if possible of the model's size; model_args override it."""
    sizes = {v.width: _NAMES[name] for name, v in VIT_VARIANTS.items() if name in _NAMES}
    size = sizes.get(model.width, "base")
    if model.gated_mlp:
        return f"vit_giant_patch14{'_reg4' if model.registers else ''}_dinov2"
    if model.pre_norm:  # the only ones with this epsilon
        return "vit_base_patch16_clip_224"
    if isinstance(model, DeiT):
        size = size if size in ("tiny", "small", "base") else "base"
        return f"deit_{size}_distilled_patch16_224"
    return f"vit_{size}_patch{14 if size in ('huge', 'giant', 'gigantic') else 16}_224"


def _mlp_ratio(model: nn.Module) -> float:
    """The ratio for which timm's int(width * ratio) is the hidden width.

    A DINOv2 with a gate counts the units of both layers.
    """
    hidden = model.mlp_dim * (2 if model.gated_mlp and model.rotary is None else 1)
    ratio = hidden / model.width
    while int(model.width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return int(ratio) if ratio.is_integer() else ratio
