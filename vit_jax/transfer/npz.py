"""Models in published `.npz` files, in both variants of the reference code's names.

The first variant was published with Dosovitskiy et al. 2020 (arXiv:2010.11929) and Steiner et al.
2021 (arXiv:2106.10270); the later one with Zhai et al. 2021 (arXiv:2106.04560) and Beyer et al.
2022 (arXiv:2205.01580). In the later variant, positions are added before the class token is
prepended, and a file without positions has fixed sine-cosine positions.

Hybrids use the first variant; their ResNets, and Big Transfer's, are in resnet.py.

`write` also writes NAME.json for facts that the arrays do not show: the rows of a grid that is not
square, the value range, the names of the classes.
"""

import io
import logging
import tokenize
import zipfile
import zlib
from typing import Any

import flax.linen as nn
import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.config import image_hw
from vit_jax.errors import InputError
from vit_jax.files import write_whole
from vit_jax.models.bit import BiT
from vit_jax.models.hybrid import HybridViT
from vit_jax.models.resnet import map_stride
from vit_jax.models.vit import ViT
from vit_jax.transfer import layout, resnet
from vit_jax.transfer.common import (
    check_blocks,
    check_family,
    check_positions,
    square_side,
    to_json,
)
from vit_jax.transfer.layout import Entry, rearranged, same
from vit_jax.transfer.pretrained import Cut, Pretrained, Spec, class_names_of, read_preparation
from vit_jax.transfer.safetensors import read_json

logger = logging.getLogger("vit_jax")

_KINDS = {"mean": "three numbers", "std": "three positive numbers", "class_names": "a list",
          "crop": "a share above 0, at most 1", "crop_mode": "center or squash",
          "interpolation": "bilinear or bicubic", "ops": "text",
          "loss": "softmax or sigmoid",
          "exif": "true or false"}  # fmt: skip

# Names by variant: the position embedding, and a layer's second norm, attention and MLP.
_VARIANTS = {
    "first": (
        "Transformer/posembed_input/pos_embedding",
        "LayerNorm_2",
        "MultiHeadDotProductAttention_1",
        "MlpBlock_3",
    ),
    "later": ("pos_embedding", "LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0"),
}


def _entries(model: nn.Module, variant: str) -> list[Entry]:
    if isinstance(model, BiT):
        return resnet.bit_entries(model)
    positions, norm_mlp, attention, mlp = _VARIANTS[variant]
    p, q = model.patch_size
    entries = [
        rearranged("embedding/kernel", "embedding/kernel", "p q c d -> (p q c) d", p=p, q=q),
        same("embedding/bias", "embedding/bias"),
    ]
    if isinstance(model, HybridViT):
        entries += resnet.stem_entries(model)
    if model.has_class_token:
        entries.append(same("cls", "class_token"))
    if model.pos_embed == "learned_1d":
        entries.append(same(positions, "pos_embedding"))
    for i in range(model.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"encoder/layer_{i}"
        entries += _norm(f"{theirs}/LayerNorm_0", f"{ours}/norm_attention")
        entries += _norm(f"{theirs}/{norm_mlp}", f"{ours}/norm_mlp")
        entries += _attention(f"{theirs}/{attention}", f"{ours}/attention", model.num_heads)
        entries += _mlp(f"{theirs}/{mlp}", f"{ours}/mlp")
    entries += _norm("Transformer/encoder_norm", "encoder/norm")
    if model.pool == "map":
        theirs = "MAPHead_0"
        entries.append(same(f"{theirs}/probe", "map_head/probe"))
        entries += _norm(f"{theirs}/LayerNorm_0", "map_head/norm")
        entries += _attention(f"{theirs}/{attention}", "map_head/attention", model.num_heads)
        entries += _mlp(f"{theirs}/{mlp}", "map_head/mlp")
    if model.hidden_head:
        entries += _dense("pre_logits", "head_hidden")
    if model.num_classes is not None:
        entries += _dense("head", "head")
    return entries


def _dense(theirs: str, ours: str) -> list[Entry]:
    return [same(f"{theirs}/{leaf}", f"{ours}/{leaf}") for leaf in ("kernel", "bias")]


def _norm(theirs: str, ours: str) -> list[Entry]:
    return [same(f"{theirs}/{leaf}", f"{ours}/{leaf}") for leaf in ("scale", "bias")]


def _mlp(theirs: str, ours: str) -> list[Entry]:
    return _dense(f"{theirs}/Dense_0", f"{ours}/up") + _dense(f"{theirs}/Dense_1", f"{ours}/down")


def _attention(theirs: str, ours: str, h: int) -> list[Entry]:
    """The entries of an attention layer, whose kernels have an axis for the heads."""
    entries = []
    for name in ("query", "key", "value"):
        kernel, bias = f"{name}/kernel", f"{name}/bias"
        entries += [
            rearranged(f"{theirs}/{kernel}", f"{ours}/{kernel}", "d h k -> d (h k)", h=h),
            rearranged(f"{theirs}/{bias}", f"{ours}/{bias}", "h k -> (h k)", h=h),
        ]
    return [
        *entries,
        rearranged(f"{theirs}/out/kernel", f"{ours}/out/kernel", "h k d -> (h k) d", h=h),
        same(f"{theirs}/out/bias", f"{ours}/out/bias"),
    ]


# Encrypted members raise RuntimeError, unknown compression its subclass NotImplementedError.
_UNREADABLE = (MemoryError, ValueError, OSError, EOFError, RuntimeError, SyntaxError,
               tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip
_ZIP = b"PK\x03\x04"
# Prefixes of a ViT's parameters in files that also hold the optimizer's state or a text tower.
_PLACES = ("", "params/", "opt/target/", "params/img/")


def recognises(path: epath.Path) -> bool:
    """Whether `path` has the name of such a file."""
    return path.suffix == ".npz" and not path.is_dir()


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            if file.read(4) != _ZIP:
                raise ValueError("it is not a zip archive, as every .npz must be")
            file.seek(0)
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("it holds one array without a name")
            return {name: _as_float32(name, arrays[name]) for name in arrays.files}
    except _UNREADABLE as e:
        raise InputError(
            f"init_from={str(path)!r}: not a readable .npz of plain arrays ({e}); fetch it again"
        ) from None


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Convert weights to float32, also bfloat16, which NumPy stores as two bytes without a type."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is not an array")
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    return layout.as_float32(name, array)


def read(path: epath.Path) -> Pretrained:
    """Read the model in the file `path`; its architecture is inferred from the arrays.

    Raises:
      InputError: if the file cannot be read or holds another architecture.
    """
    source = str(path)
    arrays = _unstack_scanned(_find_model(path, _read_arrays(path)))
    beside = path.with_suffix(".json")
    content = read_json(beside) if beside.exists() else {}
    stated = layout.read_stated(content, _KINDS, str(beside))
    image_size = image_hw(stated["image_size"]) if "image_size" in stated else None
    variant = _tell_variant(arrays)
    if resnet.is_bit(arrays):
        arrays = resnet.without_numbers(arrays, source)
        model = resnet.infer_bit(arrays, image_size, source)
    else:
        arrays = resnet.fold_norms(arrays)
        model = _infer_model(source, variant, arrays, image_size)
    params = layout.read_entries(_entries(model, variant), arrays, model, source)
    names = class_names_of(stated.get("class_names"), model.num_classes, source)
    pixels = {key: tuple(stated[key]) for key in ("mean", "std") if key in stated}
    image_size = image_size or model.image_size
    pixels |= read_preparation(stated, image_size, str(beside))
    spec = Spec(image_size, "corner_aligned", class_names=names, cut=_read_cut(stated), **pixels)
    return Pretrained(source, model, params, spec)


def _read_cut(stated: dict[str, Any]) -> Cut | None:
    if "crop" not in stated:
        return None
    return Cut(float(stated["crop"]), stated["crop_mode"], stated["interpolation"])


def _find_model(path: epath.Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that belong to the model, by their names below its prefix."""
    place = next((place for place in _PLACES if f"{place}embedding/kernel" in arrays), "")
    found = {n.removeprefix(place): a for n, a in arrays.items() if n.startswith(place)}
    if len(found) < len(arrays):
        logger.info("%s: the model is read from %s; %d other arrays are ignored",
                    path, place, len(arrays) - len(found))  # fmt: skip
    return found


def _unstack_scanned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split layers that are stacked along the first axis into separate layers."""
    stacked, unstacked = "Transformer/encoderblock/", {}
    for name, array in arrays.items():
        if name.startswith(stacked) and array.ndim:
            rest = name.removeprefix(stacked)
            unstacked |= {f"Transformer/encoderblock_{i}/{rest}": a for i, a in enumerate(array)}
        else:
            unstacked[name] = array
    return unstacked


def _tell_variant(arrays: dict[str, np.ndarray]) -> str:
    """The variant whose distinctive names occur most often."""
    seen = {
        variant: sum(any(part in name for part in parts) for name in arrays)
        for variant, parts in (
            ("first", ("posembed_input/", *(f"/{part}/" for part in _VARIANTS["first"][1:]))),
            ("later", ("MAPHead_0/", *(f"/{part}/" for part in _VARIANTS["later"][1:]))),
        )
    }
    return max(seen, key=seen.get)


def _infer_model(source, variant, arrays, image_size) -> ViT:
    positions, _, attention, mlp = _VARIANTS[variant]
    first_layer = "Transformer/encoderblock_0"
    query, up = f"{first_layer}/{attention}/query/kernel", f"{first_layer}/{mlp}/Dense_0/kernel"
    needed = {"embedding/kernel": 4, query: 3, up: 2}
    if variant == "first" or positions in arrays:
        needed[positions] = 3
    layout.require(arrays, needed, source, {"head/kernel": 2})
    has_token, has_positions = "cls" in arrays, positions in arrays
    has_probe = "MAPHead_0/probe" in arrays
    class_token_has_position = variant == "first"
    patch_size = arrays["embedding/kernel"].shape[:2]
    stem = resnet.infer_stem(arrays, source) if resnet.is_hybrid(arrays) else {}
    if not has_positions:
        image_size = None
    elif image_size is None:
        num_patches = arrays[positions].shape[1] - int(has_token and class_token_has_position)
        side = square_side(num_patches, source)
        stride = map_stride(stem["stages"]) if stem else 1
        image_size = (side * stride * patch_size[0], side * stride * patch_size[1])
    return (HybridViT if stem else ViT)(
        **stem,
        num_classes=arrays["head/kernel"].shape[1] if "head/kernel" in arrays else None,
        image_size=image_size,
        patch_size=tuple(patch_size),
        width=arrays["embedding/kernel"].shape[3],
        depth=layout.count_layers(arrays, r"Transformer/encoderblock_(\d+)/", source),
        mlp_dim=arrays[up].shape[1],
        num_heads=arrays[query].shape[1],
        pool="map" if has_probe else "token" if has_token else "gap",
        hidden_head="pre_logits/kernel" in arrays,
        pos_embed="learned_1d" if has_positions else "sincos_2d",
        pos_embed_class_token=class_token_has_position or not (has_token and has_positions),
    )


def check(model: nn.Module, variant: str) -> list[str]:
    """The reasons why a file of the variant cannot hold `model`."""
    faults = check_family(model, *((ViT, HybridViT, BiT) if variant == "first" else (ViT,)))
    if faults or isinstance(model, BiT):
        return faults
    faults = check_blocks(model, qkv_bias=True)
    elsewhere = {"gelu": "tanh", "norm_eps": 1e-6, "norm_pooled": False, "layer_scale": None}
    for field, value in elsewhere.items():
        if getattr(model, field) != value:
            faults.append(f"{field}={getattr(model, field)!r}")
    if model.has_class_token and model.pool != "token":
        faults.append(f"a class token that pool={model.pool!r} does not use")
    if variant == "first" and model.pool == "map":
        faults.append("pool='map'")
    return faults + _find_position_faults(model, variant)


def _find_position_faults(model: nn.Module, variant: str) -> list[str]:
    if faults := check_positions(model):
        return faults
    known = ("learned_1d",) if variant == "first" else ("learned_1d", "sincos_2d")
    if model.pos_embed not in known:
        return [f"pos_embed={model.pos_embed!r}"]
    if variant == "first" and model.has_class_token and not model.pos_embed_class_token:
        return ["pos_embed_class_token=False"]
    return []


def _with_position_in_class_token(pretrained: Pretrained) -> Pretrained:
    """Add the class token's position to the token, because the later variant has no entry for it.

    The model starts with the same addition, so its logits stay the same to the bit.
    """
    model, params = pretrained.model, dict(pretrained.params)
    if not model.num_prefix_positions:
        return pretrained
    own, table = np.split(params["pos_embedding"], [1], axis=1)
    params |= {"class_token": params["class_token"] + own, "pos_embedding": table}
    logger.info("positions: the class token's entry is written as part of the token")
    model = model.clone(pos_embed_class_token=False)
    return pretrained._replace(model=model, params=params)


def write(path: epath.Path, pretrained: Pretrained, variant: str) -> list[str]:
    """Write NAME.npz, and NAME.json with facts that it cannot hold; return the files' names."""
    if path.suffix != ".npz":
        raise InputError(f"--output={path}: the name must end in .npz")
    if variant == "later":
        pretrained = _with_position_in_class_token(pretrained)
    model, spec = pretrained.model, pretrained.spec
    stated = {"mean": list(spec.mean), "std": list(spec.std)}
    if image_size := model.image_size or spec.image_size:
        stated["image_size"], spec = list(image_size), spec.at(image_size)
    if spec.cut is not None:
        share, mode, interpolation = spec.cut
        stated |= {"crop": share, "crop_mode": mode, "interpolation": interpolation}
    for key in ("ops", "loss"):
        if getattr(spec, key) is not None:
            stated[key] = getattr(spec, key)
    if spec.exif is False:
        stated["exif"] = False
    if spec.class_names:
        stated["class_names"] = list(spec.class_names)
    content = io.BytesIO()
    np.savez(content, **layout.write_entries(_entries(model, variant), pretrained.params))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".json"), to_json(stated))
    write_whole(path, content.getvalue())
    return [path.name, path.with_suffix(".json").name]
