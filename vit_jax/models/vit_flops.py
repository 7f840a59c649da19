"""FLOPs of a Vision Transformer, by a formula of its sizes.

For N tokens of width D and an MLP of width F, a block needs 2 N D (4 D + 2 F) + 4 N^2 D FLOPs, with
a gate 2 N D F more. The backward pass costs twice the forward pass, except for the patch embedding,
which needs no gradient with respect to the pixels.
"""

import math
from typing import Any


def count_flops(vit: Any) -> int:
    """FLOPs of forward and backward pass of one image; `vit` is a `ViT` with an image size."""
    tokens, d, f = vit.num_tokens_in_training, vit.width, vit.mlp_dim
    values = math.prod(vit.patch_size) * vit.channels
    embedding = 2 * vit.num_patches * values * d
    matrices = 4 * d + (2 + vit.gated_mlp) * f
    layers = vit.depth * (2 * tokens * d * matrices + 4 * tokens**2 * d)
    heads = 2 if vit.pool == "token_gap" else max(vit.num_pooled_tokens, 1)
    head = heads * 2 * d * (vit.num_classes or 0) + 2 * d**2 * vit.hidden_head
    if vit.pool == "map":  # one query: the probe
        head += 2 * d * (2 * d + 2 * f) + 4 * tokens * d**2 + 4 * tokens * d
    return 2 * embedding + 3 * (layers + head)
