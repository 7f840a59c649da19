"""Models from published `.npz` files: both variants in which the reference family names its ViTs.

The first variant is that of the files published with Dosovitskiy et al. 2020 (arXiv:2010.11929)
and Steiner et al. 2021 (arXiv:2106.10270); the later one that of Zhai et al. 2021
(arXiv:2106.04560) and Beyer et al. 2022 (arXiv:2205.01580). In the later one the class token joins
after the positions are added, and a file without positions has fixed sine-cosine ones.
"""

import logging
import math
import re
import zipfile
import zlib

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.config import InputError
from vit_jax.models.vit import ViT
from vit_jax.transfer.rules import Pretrained

logger = logging.getLogger("vit_jax")


def _names(positions: str, norm_mlp: str, attention: str, mlp: str) -> list[tuple[str, str]]:
    """(the file's name, ours), as regular expression and replacement, of a variant's arrays."""
    theirs, ours = r"Transformer/encoderblock_(\d+)", r"encoder/layer_\1"
    return [
        (r"cls", r"class_token"),
        (r"embedding/(kernel|bias)", r"embedding/\1"),
        (positions, r"pos_embedding"),
        (rf"{theirs}/LayerNorm_0/(.*)", rf"{ours}/norm_attention/\2"),
        (rf"{theirs}/{norm_mlp}/(.*)", rf"{ours}/norm_mlp/\2"),
        (rf"{theirs}/{attention}/(.*)", rf"{ours}/attention/\2"),
        (rf"{theirs}/{mlp}/Dense_0/(.*)", rf"{ours}/mlp/up/\2"),
        (rf"{theirs}/{mlp}/Dense_1/(.*)", rf"{ours}/mlp/down/\2"),
        (r"Transformer/encoder_norm/(.*)", r"encoder/norm/\1"),
        (r"pre_logits/(.*)", r"head_hidden/\1"),
        (r"head/(.*)", r"head/\1"),
    ]


_VARIANTS = {
    "first": _names(
        "Transformer/posembed_input/pos_embedding",
        "LayerNorm_2",
        "MultiHeadDotProductAttention_1",
        "MlpBlock_3",
    ),
    "later": [
        *_names("pos_embedding", "LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0"),
        (r"MAPHead_0/probe", r"map_head/probe"),
        (r"MAPHead_0/LayerNorm_0/(.*)", r"map_head/norm/\1"),
        (r"MAPHead_0/MultiHeadDotProductAttention_0/(.*)", r"map_head/attention/\1"),
        (r"MAPHead_0/MlpBlock_0/Dense_0/(.*)", r"map_head/mlp/up/\1"),
        (r"MAPHead_0/MlpBlock_0/Dense_1/(.*)", r"map_head/mlp/down/\1"),
    ],
}

# Where a file holds more than a ViT's parameters, they stand below one of these: beside the
# optimizer's state, or as the image tower beside a text tower.
_PLACES = ("", "params/", "opt/target/", "params/img/")


def recognises(path: epath.Path) -> bool:
    """Whether `path` is named as such a file is."""
    return path.suffix == ".npz"


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("one array without a name")
            return {name: _as_float32(arrays[name]) for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(
            f"init_from={str(path)!r}: not a readable .npz of plain arrays ({e}); fetch it again"
        ) from None


def _as_float32(array: np.ndarray) -> np.ndarray:
    """Widened from bfloat16, which NumPy stores as two bytes without a type."""
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32)


def read(path: epath.Path) -> Pretrained:
    """The model in the file `path`; its architecture is inferred from the arrays.

    Raises:
      InputError: if the file cannot be read or holds another architecture.
    """
    arrays = _unstack_scanned(_find_model(path, _read_arrays(path)))
    variant, names, foreign = _rename(arrays)
    params, heads, patch_size = {}, set(), None
    for ours, theirs in names.items():
        array = arrays[theirs]
        if ours == "embedding/kernel":  # a convolution's, (P, P, 3, D)
            patch_size = array.shape[:2]
            array = array.reshape(-1, array.shape[-1])
        elif re.search(r"/(query|key|value)/kernel$", ours):  # (D, heads, D_h)
            heads.add(array.shape[1])
            array = array.reshape(array.shape[0], -1)
        elif re.search(r"/(query|key|value)/bias$", ours):  # (heads, D_h)
            array = array.reshape(-1)
        elif re.search(r"/attention/out/kernel$", ours):  # (heads, D_h, D)
            array = array.reshape(-1, array.shape[-1])
        params[ours] = array
    needed = ("embedding/kernel", "encoder/norm/scale", "encoder/layer_0/mlp/up/kernel")
    absent = [name for name in needed if name not in params]
    if foreign or absent or len(heads) != 1:
        shown = [f"{name} {arrays[name].shape}" for name in foreign[:5]]
        shown += [f"... {len(foreign) - 5} more"] * (len(foreign) > 5)
        raise InputError(
            f"init_from={str(path)!r}: not a Vision Transformer of the {variant} published "
            f"variant; unknown arrays: {', '.join(shown) or 'none'}; "
            f"absent: {', '.join(absent) or 'none'}"
        )
    model = _infer_model(path, variant, params, patch_size, heads.pop())
    return Pretrained(str(path), model, params, resize="corner_aligned")


def _find_model(path: epath.Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of the model alone, by their names from its root on."""
    place = next((place for place in _PLACES if f"{place}embedding/kernel" in arrays), "")
    found = {n.removeprefix(place): a for n, a in arrays.items() if n.startswith(place)}
    if len(found) < len(arrays):
        logger.info("%s: the model is read from %s; the %d arrays elsewhere are left out",
                    path, place, len(arrays) - len(found))  # fmt: skip
    return found


def _unstack_scanned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Layers stored as one, the layer being the first axis, as layers of their own."""
    stacked, unstacked = "Transformer/encoderblock/", {}
    for name, array in arrays.items():
        if name.startswith(stacked) and array.ndim:
            rest = name.removeprefix(stacked)
            unstacked |= {f"Transformer/encoderblock_{i}/{rest}": a for i, a in enumerate(array)}
        else:
            unstacked[name] = array
    return unstacked


def _rename(arrays: dict[str, np.ndarray]) -> tuple[str, dict[str, str], list[str]]:
    """The variant that knows most of the names, {our name: the file's}, and the unknown names."""
    readings = []
    for variant, rules in _VARIANTS.items():
        names, foreign = {}, []
        for name in arrays:
            rule = next((rule for rule in rules if re.fullmatch(rule[0], name)), None)
            if rule is None:
                foreign.append(name)
            else:
                names[re.sub(*rule, name)] = name
        readings.append((variant, names, foreign))
    return min(readings, key=lambda reading: len(reading[2]))


def _infer_model(path, variant, params, patch_size, num_heads) -> ViT:
    has_token, has_positions = "class_token" in params, "pos_embedding" in params
    class_token_has_position = variant == "first"
    image_size = None
    if has_positions:
        prefix = int(has_token and class_token_has_position)
        num_patches = params["pos_embedding"].shape[1] - prefix
        side = math.isqrt(num_patches)
        if side**2 != num_patches:
            raise InputError(
                f"init_from={str(path)!r}: its {num_patches} patches are no square grid, and the "
                "file does not tell their rows"
            )
        image_size = (side * patch_size[0], side * patch_size[1])
    elif variant == "first":
        raise InputError(f"init_from={str(path)!r}: no position embedding, so no image size")
    layers = {int(m[1]) for name in params if (m := re.match(r"encoder/layer_(\d+)/", name))}
    return ViT(
        num_classes=params["head/kernel"].shape[1] if "head/kernel" in params else None,
        image_size=image_size,
        patch_size=tuple(patch_size),
        width=params["embedding/kernel"].shape[1],
        depth=max(layers) + 1,
        mlp_dim=params["encoder/layer_0/mlp/up/kernel"].shape[1],
        num_heads=num_heads,
        pool="map" if "map_head/probe" in params else "token" if has_token else "gap",
        hidden_head="head_hidden/kernel" in params,
        pos_embed="learned_1d" if has_positions else "sincos_2d",
        pos_embed_class_token=class_token_has_position or not (has_token and has_positions),
    )
