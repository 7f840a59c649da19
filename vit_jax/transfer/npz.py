"""Models from the `.npz` files of the reference release of ViT (its first variant).

Source: the files published with Dosovitskiy et al. 2020 (arXiv:2010.11929).
"""

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

# (the file's name, ours), as regular expression and replacement; the first match counts.
_NAMES = [
    (r"cls", r"class_token"),
    (r"embedding/(kernel|bias)", r"embedding/\1"),
    (r"Transformer/posembed_input/pos_embedding", r"pos_embedding"),
    (r"Transformer/encoderblock_(\d+)/LayerNorm_0/(.*)", r"encoder/layer_\1/norm_attention/\2"),
    (r"Transformer/encoderblock_(\d+)/LayerNorm_2/(.*)", r"encoder/layer_\1/norm_mlp/\2"),
    (
        r"Transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_1/(.*)",
        r"encoder/layer_\1/attention/\2",
    ),
    (r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_0/(.*)", r"encoder/layer_\1/mlp/up/\2"),
    (r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_1/(.*)", r"encoder/layer_\1/mlp/down/\2"),
    (r"Transformer/encoder_norm/(.*)", r"encoder/norm/\1"),
    (r"pre_logits/(.*)", r"head_hidden/\1"),
    (r"head/(.*)", r"head/\1"),
]


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
    arrays = _read_arrays(path)
    params, heads, foreign = {}, set(), []
    patch_size = None
    for name, array in arrays.items():
        rule = next((r for r in _NAMES if re.fullmatch(r[0], name)), None)
        if rule is None:
            foreign.append(f"{name} {array.shape}")
            continue
        ours = re.sub(*rule, name)
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
        shown = foreign[:5] + [f"... {len(foreign) - 5} more"] * (len(foreign) > 5)
        raise InputError(
            f"init_from={str(path)!r}: not a Vision Transformer of the first published variant; "
            f"unknown arrays: {', '.join(shown) or 'none'}; absent: {', '.join(absent) or 'none'}"
        )
    model = _infer_model(path, params, patch_size, heads.pop())
    return Pretrained(str(path), model, params, resize="corner_aligned")


def _infer_model(path, params, patch_size, num_heads) -> ViT:
    width = params["embedding/kernel"].shape[1]
    has_token, has_positions = "class_token" in params, "pos_embedding" in params
    if not has_positions:
        raise InputError(f"init_from={str(path)!r}: no position embedding, so no image size")
    num_patches = params["pos_embedding"].shape[1] - has_token
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise InputError(
            f"init_from={str(path)!r}: its {num_patches} patches are no square grid, and the file "
            "does not tell their rows"
        )
    layers = {int(m[1]) for name in params if (m := re.match(r"encoder/layer_(\d+)/", name))}
    return ViT(
        num_classes=params["head/kernel"].shape[1] if "head/kernel" in params else None,
        image_size=(side * patch_size[0], side * patch_size[1]),
        patch_size=tuple(patch_size),
        width=width,
        depth=max(layers) + 1,
        mlp_dim=params["encoder/layer_0/mlp/up/kernel"].shape[1],
        num_heads=num_heads,
        pool="token" if has_token else "gap",
        hidden_head="head_hidden/kernel" in params,
    )
