"""A model's intermediate outputs, collected while it is called.

Axes: B images, N tokens, D width.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from vit_jax.models.efficientnet import MBConv
from vit_jax.models.layers import EncoderBlock
from vit_jax.models.resnet import BIT, Bottleneck


@dataclasses.dataclass
class Outputs:
    """The layers that one call of a model has passed through.

    pooled: what the head gets, (B, D); None: the model has no method "features".
    tokens: (B, N, D), after the final norm; None: the model has no method "tokens".
    layers: the output of every layer: (B, N, D), or maps (B, rows, columns, D). A hybrid's layers
      are its Transformer's.
    keep: int32 (B, M), the patches that tokens and layers hold, by the model's `keep_tokens`; None:
      all patches.
    """

    pooled: jax.Array | None = None
    tokens: jax.Array | None = None
    layers: list[jax.Array] = dataclasses.field(default_factory=list)
    keep: jax.Array | None = None


@contextlib.contextmanager
def watch() -> Iterator[Outputs]:
    """Collects the outputs of the one call of a model within this context.

    Layers are seen only where they are neither scanned nor recomputed.
    """
    outputs = Outputs()

    def collect(
        call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        output = call(*args, **kwargs)
        module, method = context.module, context.method_name
        if method == "__call__" and isinstance(module, EncoderBlock):
            outputs.layers.append(output[0][:, : module.num_tokens])  # without their padding
        elif method == "__call__" and (
            isinstance(module, MBConv)
            or (isinstance(module, Bottleneck) and module.convention == BIT)
        ):
            outputs.layers.append(output)
        elif module.path == () and method == "tokens":
            outputs.tokens = output
        elif module.path == () and method == "represent":  # of a ViT, which then calls no `tokens`
            outputs.tokens = args[0]
        elif module.path == () and method == "draw_keep":
            outputs.keep = output
        elif module.path == () and method == "features":
            outputs.pooled = output
        elif module.path == () and method == "_representations":  # of a DeiT, one for each head
            outputs.pooled = sum(output) / len(output) if module.distillation_head else output[0]
        return output

    with nn.intercept_methods(collect):
        yield outputs


def as_map(
    model: nn.Module, x: jax.Array, image_size: tuple[int, int], counts_B: jax.Array | None = None
) -> jax.Array:
    """The patches of tokens (B, N, D) as a map (B, rows, columns, D); maps are returned as is.

    Pictures in their own shape have `counts_B` patches, and no map: their patches (B, S, D), then
    NaN.
    """
    if x.ndim == 4:
        return x
    patches = x[:, model.num_prefix_tokens :]
    if counts_B is not None:
        real_BS = np.arange(patches.shape[1])[None] < counts_B[:, None]
        return jnp.where(real_BS[..., None], patches, jnp.nan)
    rows, columns = model.clone(image_size=image_size).grid
    return rearrange(patches, "b (r c) d -> b r c d", r=rows, c=columns)
