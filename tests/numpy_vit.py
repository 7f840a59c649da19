"""The equations of ViT (arXiv:2010.11929, section 3.1) in NumPy, float64, one image at a time.

`p` holds the parameters of a module as nested dicts; x_ND holds the tokens of one image.
"""

import jax
import numpy as np
from scipy.special import erf


def random_params(module, *args, seed=0, scale=0.3, **kwargs):
    """Random parameters of `module`, none of them zero; `args` are the arguments of its call."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (scale * rng.standard_normal(leaf.shape)).astype(np.float32), shapes
    )


def random_variables(module, *args, **kwargs):
    """`random_params` and, for a module with batch statistics, positive ones, as variables."""
    variables = dict(jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs)))
    rng = np.random.default_rng(1)
    return {
        name: jax.tree.map(lambda leaf: rng.uniform(0.5, 1, leaf.shape).astype(np.float32), leaves)
        for name, leaves in variables.items()
    } | {"params": random_params(module, *args, **kwargs)}


def float64(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def gelu(x, form):
    if form == "exact":
        return x * 0.5 * (1 + erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def layer_norm(p, x_ND):
    if "bias" not in p:
        return x_ND / np.sqrt((x_ND**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    mean, variance = x_ND.mean(-1, keepdims=True), x_ND.var(-1, keepdims=True)
    return (x_ND - mean) / np.sqrt(variance + 1e-6) * p["scale"] + p["bias"]


def relative_vectors(tables, num_tokens, num_patches):
    """(N, N, K): for each pair of tokens the vector multiplied with the first one's query."""
    tables = {name: np.asarray(table, np.float64) for name, table in tables.items()}
    num_prefix = num_tokens - num_patches
    vectors_NNK = np.zeros((num_tokens, num_tokens, tables["offsets"].shape[1]))
    for query in range(num_tokens):
        for key in range(num_tokens):
            if min(query, key) >= num_prefix:
                vector = tables["offsets"][num_patches - 1 + query - key]
            elif "prefix" not in tables:
                continue
            elif query >= num_prefix:
                vector = tables["from_patches"][key, query - num_prefix]
            elif key >= num_prefix:
                vector = tables["to_patches"][query, key - num_prefix]
            else:
                vector = tables["prefix"][query, key]
            vectors_NNK[query, key] = vector
    return vectors_NNK


def attention(p, queries_ND, tokens_MD, num_heads, norm="layer", vectors_NNK=None):
    q_ND = dense(p["query"], queries_ND)
    k_MD, v_MD = dense(p["key"], tokens_MD), dense(p["value"], tokens_MD)
    head_width = q_ND.shape[1] // num_heads
    heads = []
    for i in range(num_heads):
        part = slice(i * head_width, (i + 1) * head_width)
        q_NK, k_MK = q_ND[:, part], k_MD[:, part]
        if "query_norm" in p:
            bias = {"bias": 0} if norm == "layer" else {}
            q_NK = layer_norm(p["query_norm"] | bias, q_NK)
            k_MK = layer_norm(p["key_norm"] | bias, k_MK)
        scores_NM = q_NK @ k_MK.T
        if vectors_NNK is not None:
            scores_NM += np.einsum("nk,nmk->nm", q_NK, vectors_NNK)
        scores_NM /= np.sqrt(head_width)
        weights_NM = np.exp(scores_NM - scores_NM.max(axis=1, keepdims=True))
        weights_NM /= weights_NM.sum(axis=1, keepdims=True)
        heads.append(weights_NM @ v_MD[:, part])
    return dense(p["out"], np.concatenate(heads, axis=1))


def mlp(p, x_ND, form):
    return dense(p["down"], gelu(dense(p["up"], x_ND), form))


def encoder_block(p, x_ND, num_heads, form, norm="layer", vectors_NNK=None):
    def scaled(branch, y_ND):
        return p[branch]["scale"] * y_ND if branch in p else y_ND

    if "norm" in p:
        y_ND = layer_norm(p["norm"], x_ND)
        attended_ND = attention(p["attention"], y_ND, y_ND, num_heads, norm, vectors_NNK)
        x_ND = x_ND + scaled("scale_attention", attended_ND)
        return x_ND + scaled("scale_mlp", mlp(p["mlp"], y_ND, form))
    y_ND = layer_norm(p["norm_attention"], x_ND)
    attended_ND = attention(p["attention"], y_ND, y_ND, num_heads, norm, vectors_NNK)
    x_ND = scaled("scale_attention", attended_ND) + x_ND
    return scaled("scale_mlp", mlp(p["mlp"], layer_norm(p["norm_mlp"], x_ND), form)) + x_ND


def map_head(p, x_ND, num_heads, form):
    y_1D = attention(p["attention"], p["probe"][0], x_ND, num_heads)
    return (y_1D + mlp(p["mlp"], layer_norm(p["norm"], y_1D), form))[0]


def patches(image_HWC, patch_size):
    height, width, channels = image_HWC.shape
    p, q = patch_size
    rows = []
    for top in range(0, height, p):
        for left in range(0, width, q):
            rows.append(
                [
                    image_HWC[top + y, left + x, c]
                    for y in range(p)
                    for x in range(q)
                    for c in range(channels)
                ]
            )
    return np.array(rows, np.float64)


def sincos(grid, width):
    table = np.zeros((grid[0] * grid[1], width))
    quarter = width // 4
    for y in range(grid[0]):
        for x in range(grid[1]):
            for i in range(quarter):
                frequency = 10000 ** (-i / (quarter - 1))
                row = table[y * grid[1] + x]
                row[i] = np.sin(x * frequency)
                row[quarter + i] = np.cos(x * frequency)
                row[2 * quarter + i] = np.sin(y * frequency)
                row[3 * quarter + i] = np.cos(y * frequency)
    return table


def position_embedding(model, tables, grid):
    """(N, D): the table added to the tokens; zeros for tokens without a position."""
    num_tokens = model.num_prefix_tokens + grid[0] * grid[1]
    table_ND = np.zeros((num_tokens, model.width))
    if model.pos_embed == "sincos_2d":
        table_ND[-grid[0] * grid[1] :] = sincos(grid, model.width)
    elif model.pos_embed == "learned_1d":
        table_ND[-tables.shape[1] :] = tables[0]
    else:
        table_ND[: model.num_prefix_positions] = tables["prefix"][0] if "prefix" in tables else 0
        for y in range(grid[0]):
            for x in range(grid[1]):
                entry = np.concatenate([tables["columns"][0, x], tables["rows"][0, y]])
                table_ND[model.num_prefix_tokens + y * grid[1] + x] = entry
    return table_ND


def vit(model, params, image):
    """{"tokens": (N, D), "features": (D,), "pre_logits": (D,), "__call__": (C,)} for one image."""
    p = float64(params)
    x_ND = dense(p["embedding"], patches(image, model.patch_size))
    prefix = [p[name][0] for name in ("class_token", "distillation_token") if name in p]
    x_ND = np.concatenate([*prefix, x_ND])
    grid = [side // patch for side, patch in zip(image.shape, model.patch_size, strict=False)]
    place = model.pos_embed_at or ("layers" if model.pos_embed == "relative" else "stem")
    for i in range(model.depth):
        layer = p["encoder"][f"layer_{i}"]
        own = place == "layers" and model.pos_embed != "sincos_2d"
        tables, vectors_NNK = (layer if own else p).get("pos_embedding"), None
        if model.pos_embed == "relative":
            vectors_NNK = relative_vectors(tables, len(x_ND), grid[0] * grid[1])
        elif model.pos_embed != "none" and (i == 0 or place != "stem"):
            x_ND = x_ND + position_embedding(model, tables, grid)
        x_ND = encoder_block(layer, x_ND, model.num_heads, model.gelu, model.norm, vectors_NNK)
    if not model.norm_pooled:
        x_ND = layer_norm(p["encoder"]["norm"], x_ND)
    if model.pool == "token":
        x_D = x_ND[0]
    elif model.pool == "gap":
        x_D = x_ND[len(prefix) :].mean(axis=0)
    else:
        x_D = map_head(p["map_head"], x_ND[len(prefix) :], model.num_heads, model.gelu)
    if model.norm_pooled:
        x_D = layer_norm(p["pooled_norm"], x_D)
    y_D = np.tanh(dense(p["head_hidden"], x_D)) if model.hidden_head else x_D
    return {
        "tokens": x_ND,
        "features": x_D,
        "pre_logits": y_D,
        "__call__": dense(p["head"], y_D) if model.num_classes else x_D,
    }
