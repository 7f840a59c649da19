"""Writes parameters under the names of the published files, independently of the package."""

import jax
import ml_dtypes
import numpy as np

from vit_jax.models import create_model
from vit_jax.models.contract import about

SIZES = {"width": 24, "depth": 2, "mlp_dim": 40, "num_heads": 2}

# Names of the second norm, attention and MLP in a layer or in attention pooling.
_MODULES = {
    "first": ("LayerNorm_2", "MultiHeadDotProductAttention_1", "MlpBlock_3"),
    "later": ("LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0"),
}


def random_model(name="ViT-mu/4", num_classes=5, image_size=(8, 12), **fields):
    """(model, variables) with random weights."""
    model = create_model(name, num_classes, image_size, **(SIZES | fields))
    images = np.zeros((1, *model.image_size, about(model).channels), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    rng = np.random.default_rng(0)
    return model, jax.tree.map(
        lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32), shapes
    )


def publish(params, model, variant="first"):
    """{published name: array} of an unrolled model's parameters."""
    p, q = model.patch_size
    out = {
        "embedding/kernel": params["embedding"]["kernel"].reshape(p, q, 3, model.width),
        "embedding/bias": params["embedding"]["bias"],
    }
    if model.pos_embed == "learned_1d":
        place = {"first": "Transformer/posembed_input/pos_embedding", "later": "pos_embedding"}
        out[place[variant]] = params["pos_embedding"]
    if model.pool == "token":
        out["cls"] = params["class_token"]
    for ours, theirs in (("head_hidden", "pre_logits"), ("head", "head")):
        if ours in params:
            out |= {f"{theirs}/{leaf}": params[ours][leaf] for leaf in ("kernel", "bias")}
    for leaf in ("scale", "bias"):
        out[f"Transformer/encoder_norm/{leaf}"] = params["encoder"]["norm"][leaf]
    norm, attention, mlp = _MODULES[variant]
    for i in range(model.depth):
        layer, prefix = params["encoder"][f"layer_{i}"], f"Transformer/encoderblock_{i}"
        for leaf in ("scale", "bias"):
            out[f"{prefix}/LayerNorm_0/{leaf}"] = layer["norm_attention"][leaf]
            out[f"{prefix}/{norm}/{leaf}"] = layer["norm_mlp"][leaf]
        out |= publish_attention(layer["attention"], f"{prefix}/{attention}", model.num_heads)
        out |= publish_mlp(layer["mlp"], f"{prefix}/{mlp}")
    if model.pool == "map":
        head = params["map_head"]
        out["MAPHead_0/probe"] = head["probe"]
        for leaf in ("scale", "bias"):
            out[f"MAPHead_0/LayerNorm_0/{leaf}"] = head["norm"][leaf]
        out |= publish_attention(head["attention"], f"MAPHead_0/{attention}", model.num_heads)
        out |= publish_mlp(head["mlp"], f"MAPHead_0/{mlp}")
    return out


def publish_mlp(params, prefix):
    return {
        f"{prefix}/{theirs}/{leaf}": params[ours][leaf]
        for ours, theirs in (("up", "Dense_0"), ("down", "Dense_1"))
        for leaf in ("kernel", "bias")
    }


def publish_attention(params, prefix, heads):
    out, width = {}, params["out"]["bias"].size
    for name in ("query", "key", "value"):
        kernel, bias = (params[name][leaf] for leaf in ("kernel", "bias"))
        out[f"{prefix}/{name}/kernel"] = kernel.reshape(width, heads, -1)
        out[f"{prefix}/{name}/bias"] = bias.reshape(heads, -1)
    kernel = params["out"]["kernel"]
    out[f"{prefix}/out/kernel"] = kernel.reshape(heads, -1, width)
    out[f"{prefix}/out/bias"] = params["out"]["bias"]
    return out


def as_scanned(arrays):
    """Published arrays with the layers stacked, as written by a scanned model."""
    out, layers = {}, {}
    for name, array in arrays.items():
        block, _, rest = name.removeprefix("Transformer/encoderblock_").partition("/")
        if name.startswith("Transformer/encoderblock_"):
            layers.setdefault(rest, {})[int(block)] = array
        else:
            out[name] = array
    for rest, by_layer in layers.items():
        out[f"Transformer/encoderblock/{rest}"] = np.stack(
            [by_layer[i] for i in range(len(by_layer))]
        )
    return out


def as_void(array):
    """Convert to bfloat16 in NumPy's stored form: two bytes without a type."""
    return array.astype(ml_dtypes.bfloat16).view("V2")
