"""Writes parameters under the names of the published files, apart from the package's reader."""

import ml_dtypes


def publish(params, model):
    """{published name: array} of an unrolled model's parameters."""
    heads, (p, q) = model.num_heads, model.patch_size
    out = {
        "embedding/kernel": params["embedding"]["kernel"].reshape(p, q, 3, model.width),
        "embedding/bias": params["embedding"]["bias"],
        "Transformer/posembed_input/pos_embedding": params["pos_embedding"],
    }
    if model.pool == "token":
        out["cls"] = params["class_token"]
    for ours, theirs in (("head_hidden", "pre_logits"), ("head", "head")):
        if ours in params:
            out |= {f"{theirs}/{leaf}": params[ours][leaf] for leaf in ("kernel", "bias")}
    for leaf in ("scale", "bias"):
        out[f"Transformer/encoder_norm/{leaf}"] = params["encoder"]["norm"][leaf]
    for i in range(model.depth):
        layer, prefix = params["encoder"][f"layer_{i}"], f"Transformer/encoderblock_{i}"
        for leaf in ("scale", "bias"):
            out[f"{prefix}/LayerNorm_0/{leaf}"] = layer["norm_attention"][leaf]
            out[f"{prefix}/LayerNorm_2/{leaf}"] = layer["norm_mlp"][leaf]
        for leaf in ("kernel", "bias"):
            out[f"{prefix}/MlpBlock_3/Dense_0/{leaf}"] = layer["mlp"]["up"][leaf]
            out[f"{prefix}/MlpBlock_3/Dense_1/{leaf}"] = layer["mlp"]["down"][leaf]
        attention = f"{prefix}/MultiHeadDotProductAttention_1"
        for name in ("query", "key", "value"):
            kernel, bias = (layer["attention"][name][leaf] for leaf in ("kernel", "bias"))
            out[f"{attention}/{name}/kernel"] = kernel.reshape(model.width, heads, -1)
            out[f"{attention}/{name}/bias"] = bias.reshape(heads, -1)
        kernel = layer["attention"]["out"]["kernel"]
        out[f"{attention}/out/kernel"] = kernel.reshape(heads, -1, model.width)
        out[f"{attention}/out/bias"] = layer["attention"]["out"]["bias"]
    return out


def as_void(array):
    """As bfloat16, which NumPy writes as two bytes without a type."""
    return array.astype(ml_dtypes.bfloat16).view("V2")
