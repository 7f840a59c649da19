"""Parameters and multiply-adds of the Transformers and ResNets that several families have."""

import math

# Vision Transformers in the papers' tables: width, layers, MLP, heads.
SIZES = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
    "22B": (6144, 48, 24576, 48),
}


STAGES = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}


def vit_params(
    variant, patch_size, *, grid, num_classes, pool="token", hidden_head=False, channels=3
):
    width, depth, mlp_dim, num_heads = SIZES[variant]
    norm, attention = 2 * width, 4 * (width * width + width)
    mlp = width * mlp_dim + mlp_dim + mlp_dim * width + width
    block = 2 * norm + attention + mlp
    if variant == "22B":  # one norm per block, no bias in it or in q, k, v; q and k normalised
        norm, attention = width, attention - 3 * width
        block = norm + attention + mlp + 2 * (width // num_heads)
    token = int(pool == "token")
    total = (patch_size[0] * patch_size[1] * channels + 1) * width  # embedding
    total += token * width + (token + grid[0] * grid[1]) * width
    total += depth * block + norm
    if pool == "map":
        total += width + attention + norm + mlp
    if hidden_head:
        total += width * width + width
    if num_classes:
        total += width * num_classes + num_classes
    return total


def vit_macs(variant, patch_size, *, grid, num_classes, prefix=1, channels=3, num_heads=1):
    width, depth, mlp_dim, _ = SIZES[variant]
    patches = grid[0] * grid[1]
    pools = variant == "22B"  # attention pooling, no class token
    tokens = patches + (0 if pools else prefix)
    total = patches * patch_size[0] * patch_size[1] * channels * width
    total += depth * (tokens * width * (4 * width + 2 * mlp_dim) + 2 * tokens**2 * width)
    if pools:
        total += 2 * width**2 + 2 * tokens * width**2 + 2 * tokens * width + 2 * width * mlp_dim
    return total + num_heads * width * num_classes


def resnet(stages, root_width, image_size, *, is_bit):
    """(parameters, multiply-adds, channels and side of the feature map), without the head."""
    side = math.ceil(image_size / 2)
    params = macs = 0

    def conv(size, channels_in, channels_out, side_out):
        nonlocal params, macs
        params += size**2 * channels_in * channels_out
        macs += size**2 * channels_in * channels_out * side_out**2

    def norm(channels):
        nonlocal params
        params += 2 * channels

    conv(7, 3, root_width, side)
    side = math.ceil(side / 2)
    channels = root_width
    if not is_bit:
        norm(root_width)
    for stage, units in enumerate(stages):
        middle = root_width * 2**stage
        for unit in range(units):
            before, side = side, math.ceil(side / 2) if stage and not unit else side
            conv(1, channels, middle, before)
            conv(3, middle, middle, side)
            conv(1, middle, 4 * middle, side)
            norm(middle)
            norm(middle)
            norm(channels if is_bit else 4 * middle)
            if not unit:
                conv(1, channels, 4 * middle, side)
                if not is_bit:
                    norm(4 * middle)
            channels = 4 * middle
    if is_bit:
        norm(channels)
    return params, macs, channels, side
