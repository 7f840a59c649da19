"""BiT's ResNet and the stem of hybrids in NumPy, float64, one image at a time.

Sources: Kolesnikov et al. 2019 (arXiv:1912.11370); Dosovitskiy et al. 2020 (arXiv:2010.11929).
`p` holds the parameters of a module as nested dicts; `kind` is "bit" or "hybrid".
"""

import numpy as np
from numpy_vit import float64, vit

NORM_EPS = {"bit": 1e-5, "hybrid": 1e-6}


def standardize(kernel, kind):
    """The kernel with mean 0 and variance about 1 for each output (the last axis)."""
    mean, var = kernel.mean(axis=(0, 1, 2)), kernel.var(axis=(0, 1, 2))
    return (kernel - mean) / (np.sqrt(var + 1e-10) if kind == "bit" else np.sqrt(var) + 1e-5)


def group_norm(p, x_HWC, kind):
    """Group normalisation with 32 groups of neighbouring channels."""
    groups = []
    for x in np.split(x_HWC, 32, axis=-1):
        groups.append((x - x.mean()) / np.sqrt(x.var() + NORM_EPS[kind]))
    return np.concatenate(groups, axis=-1) * p["scale"] + p["bias"]


def windows(x_HWC, size, stride, kind, fill=0.0):
    """{(row, column) in a window: the values of all windows there, (H / stride, W / stride, C)}."""
    sides = [-(-side // stride) for side in x_HWC.shape[:2]]
    pads = []
    for side, side_out in zip(x_HWC.shape[:2], sides, strict=True):
        missing = max((side_out - 1) * stride + size - side, 0)
        half = size // 2
        pads.append((half, half) if kind == "bit" else (missing // 2, missing - missing // 2))
    padded = np.pad(x_HWC, [*pads, (0, 0)], constant_values=fill)
    h, w = (stride * (side - 1) + 1 for side in sides)
    return {
        (i, j): padded[i : i + h : stride, j : j + w : stride]
        for i in range(size)
        for j in range(size)
    }


def conv(p, x_HWC, kind, stride=1):
    kernel = standardize(p["kernel"], kind)
    taken = windows(x_HWC, kernel.shape[0], stride, kind)
    return sum(x @ kernel[place] for place, x in taken.items())


def max_pool(x_HWC, kind):
    """3 x 3 max-pooling with stride 2; BiT pads with zeros, the hybrid ignores the padding."""
    fill = 0.0 if kind == "bit" else -np.inf
    return np.max(list(windows(x_HWC, 3, 2, kind, fill).values()), axis=0)


def relu(x):
    return np.maximum(x, 0)


def bit_unit(p, x_HWC, stride):
    y_HWC = relu(group_norm(p["norm1"], x_HWC, "bit"))
    if "conv_proj" in p:
        x_HWC = conv(p["conv_proj"], y_HWC, "bit", stride)
    y_HWC = relu(group_norm(p["norm2"], conv(p["conv1"], y_HWC, "bit"), "bit"))
    y_HWC = relu(group_norm(p["norm3"], conv(p["conv2"], y_HWC, "bit", stride), "bit"))
    return x_HWC + conv(p["conv3"], y_HWC, "bit")


def hybrid_unit(p, x_HWC, stride):
    y_HWC = relu(group_norm(p["norm1"], conv(p["conv1"], x_HWC, "hybrid"), "hybrid"))
    y_HWC = relu(group_norm(p["norm2"], conv(p["conv2"], y_HWC, "hybrid", stride), "hybrid"))
    y_HWC = group_norm(p["norm3"], conv(p["conv3"], y_HWC, "hybrid"), "hybrid")
    if "conv_proj" in p:
        x_HWC = group_norm(p["norm_proj"], conv(p["conv_proj"], x_HWC, "hybrid", stride), "hybrid")
    return relu(x_HWC + y_HWC)


def stages(p, x_HWC, unit):
    """Apply all stages in `p`; each after the first halves the resolution."""
    for i in range(sum(name.startswith("stage_") for name in p)):
        for j in range(len(p[f"stage_{i}"])):
            x_HWC = unit(p[f"stage_{i}"][f"layer_{j}"], x_HWC, 2 if i and not j else 1)
    return x_HWC


def bit_tokens(params, image):
    """(N, D): the last feature map in raster order."""
    p = float64(params)["trunk"]
    x_HWC = max_pool(conv(p["conv_root"], image, "bit", 2), "bit")
    x_HWC = relu(group_norm(p["norm"], stages(p, x_HWC, bit_unit), "bit"))
    return x_HWC.reshape(-1, x_HWC.shape[-1])


def hybrid_tokens(model, params, image):
    """(N, D): the encoder's output for patches of the stem's feature map."""
    p = float64(params)["stem"]
    x_HWC = relu(group_norm(p["norm_root"], conv(p["conv_root"], image, "hybrid", 2), "hybrid"))
    x_HWC = stages(p, max_pool(x_HWC, "hybrid"), hybrid_unit)
    return vit(model, params, x_HWC)["tokens"]
