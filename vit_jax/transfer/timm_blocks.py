"""The blocks of a Transformer in the names of `timm`, and the kinds of models that have them.

A kind is what a published model computes that its arrays do not show. Arrays in the names of the
authors of DINOv2, DINOv3 and ViT-5 are first renamed to timm's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from vit_jax.models.vit import ViT
from vit_jax.transfer.names import (
    HEADS_BY_WIDTH,
    LINEAR,
    NORM,
    Row,
    find_unheld,
    joined,
    layer,
    row,
)
from vit_jax.transfer.source import Source

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}

PATCHES_WEIGHT = "patch_embed.proj.weight"
_BLOCK, _LAYER = "blocks.{i}", "encoder/layer_{i}"
_FIRST = "blocks.0"
_TANH = r"patch32_siglip|large_patch16_siglip\w*_512|so400m_patch16_|giantopt_"


class Kind(NamedTuple):
    """The computations of a published model that its arrays do not show.

    eps: of the norms.
    act: timm's name of the activation.
    pool: timm's name of the pooling; None: as the arrays show.
    pixels: mean and standard deviation where no file states them.
    resize: the convention by which positions are resampled.
    heads: {width: heads} where they differ from the heads of a ViT of that width.
    fields: further fields of the model.
    """

    eps: float = 1e-6
    act: str = "gelu"
    pool: str | None = None
    pixels: Mapping[str, tuple[float, ...]] = MappingProxyType(HALF)
    resize: str = "antialiased"
    heads: Mapping[int, int] = MappingProxyType({})
    fields: Mapping[str, Any] = MappingProxyType({})


ROTARY_2D = {"rotary": "indices", "rotary_base": 1e4}
PLAIN = Kind()
DINOV2 = Kind(pixels=IMAGENET, heads={1536: 24})
_OF_AUTHORS = "half_pixel_surplus"  # of DINOv2 without registers
DINOV3 = Kind(
    1e-5, pool="avg", pixels=IMAGENET, heads={1280: 20, 4096: 32}, fields={"rotary": "normalised"}
)
SIGLIP = Kind(heads={1536: 16})
CLIP_TOWER = Kind(1e-5, pixels=CLIP)
EVA02 = Kind(act="silu", pixels=CLIP, fields=ROTARY_2D | {"rotary_side": 16})
VIT5 = Kind(pixels=IMAGENET, resize="half_pixel", fields=ROTARY_2D | {"rotary_registers": 100.0})


def eps_of_timm(pre_norm: bool) -> float:
    """The epsilon of the norms in timm's ViT, without rotary positions."""
    return (CLIP_TOWER if pre_norm else Kind()).eps


def find_kind(source: Source, architecture: str) -> Kind:
    """The kind of the model with the arrays of `source`, by them and by timm's name for it."""
    has = source.arrays.keys().__contains__
    separate = any(has(f"{_FIRST}.attn.{name}") for name in ("q_bias", "q_proj.weight"))
    if is_gated(source) and separate and has("pos_embed"):
        return EVA02
    if has(f"{_FIRST}.attn.rope.freqs"):
        return VIT5
    rotary = has(f"{_FIRST}.gamma_1") or has("rope_embed.periods") or "dinov3" in architecture
    if rotary and has("cls_token") and not has("pos_embed"):
        kind = DINOV3._replace(pool="token") if has("rope_embed.periods") else DINOV3
        return kind._replace(act="silu") if is_gated(source) else kind
    if has("norm_pre.weight"):
        return CLIP_TOWER._replace(act="quick_gelu" if "quickgelu" in architecture else "gelu")
    if "siglip" in architecture:
        return SIGLIP._replace(act="gelu_tanh" if re.search(_TANH, architecture) else "gelu")
    of_authors = has("mask_token") and source.arrays["mask_token"].ndim == 2
    if has("reg_token") or "dinov2" in architecture or is_gated(source) or of_authors:
        kind = DINOV2._replace(act="silu") if is_gated(source) else DINOV2
        return kind if has("reg_token") or not of_authors else kind._replace(resize=_OF_AUTHORS)
    return PLAIN


def is_gated(source: Source) -> bool:
    """Whether MLPs have a gate, as a layer of its own or packed with the layer that it gates."""
    packed = source.size(f"{_FIRST}.mlp.fc1.weight", 0)
    hidden = source.size(f"{_FIRST}.mlp.fc2.weight", 1)
    return f"{_FIRST}.mlp.fc1_g.weight" in source.arrays or packed == 2 * (hidden or 0) > 0


def rename_to_timm(source: Source) -> None:
    """Give the arrays of `source` timm's names where they have the names of the models' authors.

    DINOv3's `bias_mask` hides the biases of its keys, which are left out.
    """
    source.rename(
        {
            r"register_tokens|storage_tokens": "reg_token",
            r"(blocks\.\d+\.mlp\.)w12\.": r"\1fc1.",
            r"(blocks\.\d+\.mlp\.)w1\.": r"\1fc1_g.",
            r"(blocks\.\d+\.mlp\.)w2\.": r"\1fc1_x.",
            r"(blocks\.\d+\.mlp\.)w3\.": r"\1fc2.",
        }
    )
    if "rope_embed.periods" in source.arrays:
        source.rename({r"(blocks\.\d+\.)ls(\d)\.gamma": r"\1gamma_\2"})
        source.leave_out(r"local_cls_norm\..*", "a norm of its pretraining is")
    for name in [name for name in source.arrays if name.endswith("attn.qkv.bias_mask")]:
        mask, biases = source.arrays.pop(name), name.removesuffix("_mask")
        query, key, value = np.split(mask, 3)
        if key.any() or not (query.all() and value.all()):
            source.refuse([f"{name}: needs zeros for the keys, and ones elsewhere"])
        prefix = biases.removesuffix("qkv.bias")
        query, _, value = np.split(source.arrays.pop(biases), 3)
        source.arrays |= {f"{prefix}q_bias": query, f"{prefix}v_bias": value}


def block_fields(source: Source, kind: Kind) -> dict[str, Any]:
    """The fields of the model that the arrays and the kind determine, but for its sizes."""
    has = source.arrays.keys().__contains__
    attention, biases = f"{_FIRST}.attn", ("qkv.bias", "q_bias", "q_proj.bias")
    fields = {
        "registers": source.size("reg_token", 1) or 0,
        "pre_norm": has("norm_pre.weight"),
        "patch_bias": has("patch_embed.proj.bias"),
        "norm": "layer" if has(f"{_FIRST}.norm1.bias") else "rms",
        "qk_norm": has(f"{attention}.q_norm.weight"),
        "qkv_bias": any(has(f"{attention}.{name}") for name in biases),
        "gated_mlp": is_gated(source),
        "mlp_norm": has(f"{_FIRST}.mlp.norm.weight"),
        **kind.fields,
    }
    if not fields["registers"]:
        fields.pop("rotary_registers", None)
    if fields["qkv_bias"]:
        fields["key_bias"] = has(f"{attention}.qkv.bias") or has(f"{attention}.k_proj.bias")
    return fields


def check_rotary(source: Source, model: ViT, config: Mapping[str, Any]) -> ViT:
    """`model` with the base that the file states; its stored frequencies are compared, and dropped.

    Raises:
      InputError: the arrays have the frequencies of another base.
    """
    if model.rotary is None:
        return model
    stated = config.get("pos_embed_rope_base", config.get("rope_temperature", model.rotary_base))
    model = model.clone(rotary_base=float(stated))
    if model.rotary_registers is not None:
        own = float(config.get("reg_theta", model.rotary_registers))
        model = model.clone(rotary_registers=own)
    faults, rounded = [], model.clone(rotary_dtype="bfloat16")
    for name in [name for name in source.arrays if re.search(r"rope\w*\.(freqs|periods)$", name)]:
        base = model.rotary_registers if "rope_reg" in name else model.rotary_base
        if base is None:
            continue  # `read_rows` refuses frequencies of registers that are not there
        array = source.arrays.pop(name)
        stored = array if name.endswith("periods") else 1 / array
        exact, half = (m.periods(base, model.width // model.num_heads) for m in (model, rounded))
        if stored.shape == half.shape and np.array_equal(stored, half):
            model = rounded
        elif stored.shape != exact.shape or not np.allclose(stored, exact, rtol=1e-5):
            faults.append(f"{name}: not the periods of base {base:g}; state the base in the file")
    source.refuse(faults)
    return model


def block_rows(model: nn.Module) -> list[Row]:
    """The rows of the blocks of `model`, in the form of the published models with its fields.

    Heads that turn adjacent pairs are stored so; here the halves of a head are paired.
    """
    ours, mlp = f"{_LAYER}/attention", f"{_LAYER}/mlp"
    attention = f"{_BLOCK}.attn"
    pairs = model.rotary == "indices"
    paired = "i (heads two k) -> (heads k two) i" if pairs else "i o -> o i"
    of_bias = "(heads two k) -> (heads k two)" if pairs else ""
    turned = layer({".weight": ("kernel", paired), ".bias": ("bias", of_bias)})
    names = [f"{ours}/{name}" for name in ("query", "key", "value")]
    if model.mlp_norm:
        rows = [
            *turned(f"{attention}.q_proj", names[0]),
            *turned(f"{attention}.k_proj", names[1]),
            *LINEAR(f"{attention}.v_proj", names[2]),
        ]
    else:
        axes = (paired, paired, "i o -> o i")
        rows = [joined(f"{attention}.qkv.weight", [f"{n}/kernel" for n in names], axes)]
        if model.key_bias:
            biases = [f"{n}/bias" for n in names]
            rows.append(joined(f"{attention}.qkv.bias", biases, (of_bias, of_bias, "")))
        else:
            rows += [
                row(f"{attention}.q_bias", f"{names[0]}/bias", of_bias),
                row(f"{attention}.v_bias", f"{names[2]}/bias"),
            ]
    of_norm = "(two k) -> (k two)" if pairs else ""
    for name in ("q", "k"):
        full = {"q": "query", "k": "key"}[name]
        rows.append(row(f"{attention}.{name}_norm.weight", f"{ours}/{full}_norm/scale", of_norm))
    rows += LINEAR(f"{attention}.proj", f"{ours}/out")
    if not model.gated_mlp:
        rows += LINEAR(f"{_BLOCK}.mlp.fc1", f"{mlp}/up")
    elif model.mlp_norm or model.rotary == "normalised":
        rows += LINEAR(f"{_BLOCK}.mlp.fc1_g", f"{mlp}/gate")
        rows += LINEAR(f"{_BLOCK}.mlp.fc1_x", f"{mlp}/up")
    else:
        rows += LINEAR(f"{_BLOCK}.mlp.fc1", f"{mlp}/gate", f"{mlp}/up")
    scale = "gamma_{}" if model.rotary is not None else "ls{}.gamma"
    return [
        *rows,
        *NORM(f"{_BLOCK}.mlp.norm", f"{mlp}/norm"),
        *LINEAR(f"{_BLOCK}.mlp.fc2", f"{mlp}/down"),
        *NORM(f"{_BLOCK}.norm1", f"{_LAYER}/norm_attention"),
        *NORM(f"{_BLOCK}.norm2", f"{_LAYER}/norm_mlp"),
        row(f"{_BLOCK}.{scale.format(1)}", f"{_LAYER}/scale_attention/scale"),
        row(f"{_BLOCK}.{scale.format(2)}", f"{_LAYER}/scale_mlp/scale"),
    ]


def heads_of(kind: Kind, width: int) -> int | None:
    """The number of heads of the published model of that width; None: there is none."""
    return kind.heads.get(width, HEADS_BY_WIDTH.get(width))


class Form(NamedTuple):
    """How a kind of model with rotary positions is written.

    needed: {field: values that it holds}, but for those that every format needs.
    architecture: model -> the registered architecture whose arguments are its own.
    args: {timm's argument: field of the model}, but for the sizes.
    """

    needed: Mapping[str, Sequence]
    architecture: Callable[[nn.Module], str]
    args: Mapping[str, str] = MappingProxyType({})


_DINOV3_ARGS = {"num_reg_tokens": "registers", "rope_temperature": "rotary_base"}
_EVERY: dict[str, Sequence] = {
    "hidden_head": (False,), "head_batch_norm": (False,), "class_token": (True,),
    "rotary_dtype": ("float32",), "pos_embed_class_token": (True,),
}  # fmt: skip
_FORMS = {
    "dinov3": Form(
        {"rotary": ("normalised",), "pos_embed": ("none",), "norm_eps": (1e-5,),
         "norm_pooled": (False,), "pool": ("gap", "token"), "registers": range(100),
         "rotary_registers": (None,)},
        lambda m: "vit_small{}_patch16_dinov3{}".format(
            "_plus" * m.gated_mlp, "_qkvb" * m.qkv_bias
        ),
        {**_DINOV3_ARGS, "init_values": "layer_scale"},
    ),
    "eva02": Form(
        {"rotary": ("indices",), "rotary_side": (16,), "rotary_base": (1e4,),
         "rotary_registers": (None,), "pos_embed": ("learned_1d",), "norm_eps": (1e-6,),
         "pool": ("gap",), "norm_pooled": (True,), "layer_scale": (None,), "qkv_bias": (True,),
         "mlp_norm": (False, True)},
        lambda m: f"eva02_{'base' if m.mlp_norm else 'small'}_patch14_224",
    ),
    "vit5": Form(
        {"rotary": ("indices",), "rotary_side": (None,), "rotary_base": (1e4,), "norm": ("rms",),
         "qk_norm": (True,), "qkv_bias": (False,), "pos_embed": ("learned_1d",),
         "pos_embed_class_token": (False,), "norm_eps": (1e-6,), "pool": ("token",),
         "norm_pooled": (False,), "registers": range(100), "gelu": ("exact",)},
        lambda m: "vit5",
        {"num_registers": "registers", "reg_theta": "rotary_registers"},
    ),
}  # fmt: skip


def find_form(model: nn.Module) -> Form | None:
    """The form in which `model` is written; None: as a ViT without rotary positions."""
    if getattr(model, "rotary", None) is None:
        return None
    of_indices = "vit5" if model.norm == "rms" else "eva02"
    return _FORMS["dinov3" if model.rotary == "normalised" else of_indices]


def find_faults(form: Form, model: nn.Module) -> list[str]:
    """The reasons why `form` cannot hold `model`."""
    needed = {**_EVERY, **form.needed}
    if form is not _FORMS["vit5"]:
        gated = (True,) if form is _FORMS["eva02"] else (False, True)
        needed |= {"gated_mlp": gated, "gelu": ("silu" if model.gated_mlp else "exact",),
                   "key_bias": (not model.qkv_bias,)}  # fmt: skip
    if form is not _FORMS["eva02"]:
        needed |= {"layer_scale": (1e-5 if model.layer_scale is None else model.layer_scale,)}
    return find_unheld(model, (ViT,), needed)


def stored_frequencies(model: nn.Module) -> dict[str, np.ndarray]:
    """The arrays of frequencies that a ViT-5 stores in each block."""
    arrays: dict[str, np.ndarray] = {}
    head_width = model.width // model.num_heads
    bases = {"rope": model.rotary_base, "rope_reg": model.rotary_registers}
    for name, base in bases.items():
        if base is not None:
            of_base = 1 / np.asarray(model.periods(base, head_width))
            arrays |= {f"blocks.{i}.attn.{name}.freqs": of_base for i in range(model.depth)}
    return arrays
