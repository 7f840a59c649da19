"""Parameters and multiply-adds of every family, from independent formulas and tables."""

import math
import re

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


# B0's stages: blocks, kernel, stride, expansion, channels; factors of width and depth by size.
MBCONVS = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80),
           (3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))  # fmt: skip
FACTORS = {"B0": (1.0, 1.0), "B1": (1.0, 1.1), "B2": (1.1, 1.2), "B3": (1.2, 1.4), "B4": (1.4, 1.8),
           "B5": (1.6, 2.2), "B6": (1.8, 2.6), "B7": (2.0, 3.1), "B8": (2.2, 3.6),
           "L2": (4.3, 5.3)}  # fmt: skip


def efficientnet(variant, image_size, num_classes):
    """(parameters, multiply-adds)."""
    wider, deeper = FACTORS[variant]

    def scaled(channels):
        low = int(channels * wider) // 8 * 8
        nearest = low + 8 * (channels * wider - low >= 4)
        return nearest + 8 * (nearest < 0.9 * channels * wider)

    side, channels, last = math.ceil(image_size / 2), scaled(32), scaled(1280)
    params, macs = 27 * channels + 2 * channels, 27 * channels * side**2
    for blocks, kernel, stride, expansion, width in MBCONVS:
        for block in range(math.ceil(blocks * deeper)):
            inner, squeezed, width_out = expansion * channels, channels // 4, scaled(width)
            if expansion > 1:
                params += channels * inner + 2 * inner
                macs += channels * inner * side**2
            side = math.ceil(side / stride) if block == 0 else side
            params += kernel**2 * inner + 2 * inner + inner * width_out + 2 * width_out
            params += 2 * inner * squeezed + squeezed + inner
            macs += (kernel**2 + width_out) * inner * side**2 + 2 * inner * squeezed
            channels = width_out
    params += channels * last + 2 * last + (last + 1) * num_classes
    return params, macs + channels * last * side**2 + last * num_classes


# Width, layers, MLP.
T2T = {"7": (256, 7, 512), "10": (256, 10, 512), "12": (256, 12, 512), "14": (384, 14, 1152),
       "19": (448, 19, 1344), "24": (512, 24, 1536)}  # fmt: skip


def t2t(number, image_size, num_classes, module="performer"):
    """(trained parameters, multiply-adds), with tokens of width 64 and 32 random features."""
    width, depth, mlp_dim = T2T[number]
    side, params, macs = image_size, 0, 0
    for inputs, stride in ((7 * 7 * 3, 4), (3 * 3 * 64, 2)):
        side //= stride
        positions = side**2
        params += 2 * inputs + 2 * 64 + inputs * 3 * 64 + 3 * (64 * 64 + 64)
        macs += positions * (inputs * 3 * 64 + 3 * 64 * 64)
        if module == "performer":
            params += 3 * 64
            macs += positions * 32 * (64 + 64 + 64 + 64 + 1)
        else:
            macs += 2 * positions**2 * 64
    tokens, patch = (side // 2) ** 2 + 1, 3 * 3 * 64
    block = 4 * width**2 + width + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    params += (patch + 1) * width + width + depth * block + 2 * width + (width + 1) * num_classes
    macs += (tokens - 1) * patch * width + width * num_classes
    macs += depth * (tokens * width * (4 * width + 2 * mlp_dim) + 2 * tokens**2 * width)
    return params, macs


def axial(variant, patch, image_size, num_classes):
    """(parameters, multiply-adds): each block twice, with weights in rows, then in columns."""
    width, depth, mlp_dim, _ = SIZES[variant]
    side = image_size // patch
    tokens = side**2
    block = 4 * (width**2 + width) + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    params = (3 * patch**2 + 1 + tokens) * width + 2 * depth * block + 2 * width
    macs = tokens * 3 * patch**2 * width + width * num_classes
    macs += 2 * depth * tokens * width * (4 * width + 2 * mlp_dim + 2 * side)
    return params + (width + 1) * num_classes, macs


def by_hand(name, image_size=224, num_classes=1000):
    """(parameters, multiply-adds) of the model called `name`."""
    if name.startswith("T2T-ViT-"):
        return t2t(name.removeprefix("T2T-ViT-"), image_size, num_classes)
    if found := re.fullmatch(r"Axial-ViT-(\w+)/(\d+)", name):
        return axial(found[1], int(found[2]), image_size, num_classes)
    if bit := re.fullmatch(r"BiT-R(\d+)x(\d)", name):
        stages, factor = STAGES[bit[1]], int(bit[2])
        params, macs, channels, _ = resnet(stages, 64 * factor, image_size, is_bit=True)
        return params + (channels + 1) * num_classes, macs + channels * num_classes
    if name.startswith("EfficientNet-"):
        return efficientnet(name.removeprefix("EfficientNet-"), image_size, num_classes)
    family, variant, size = re.fullmatch(r"([^-]+)-(\w+)/(\d+)", name).groups()
    patch, sizes = int(size), {"num_classes": num_classes}
    if family in ("ViT", "DeiT"):
        grid, patch_size = (image_size // patch,) * 2, (patch, patch)
        pool = "map" if variant == "22B" else "token"
        params = vit_params(variant, patch_size, grid=grid, pool=pool, **sizes)
        if family == "ViT":
            return params, vit_macs(variant, patch_size, grid=grid, **sizes)
        width = SIZES[variant][0]  # one more token, position and head
        macs = vit_macs(variant, patch_size, grid=grid, prefix=2, num_heads=2, **sizes)
        return params + 2 * width + (width + 1) * num_classes, macs
    layers = re.fullmatch(r"R(\d*)\+ViT", family)[1]
    stages = STAGES[layers] if layers else ()
    if layers and patch == 16:
        stages = (*stages[:2], stages[2] + stages[3])
    params, macs, channels, side = resnet(stages, 64, image_size, is_bit=False)
    on_map = 1 if layers else patch // 2
    sizes |= {"grid": (side // on_map,) * 2, "channels": channels}
    params += vit_params(variant, (on_map, on_map), **sizes)
    return params, macs + vit_macs(variant, (on_map, on_map), **sizes)
