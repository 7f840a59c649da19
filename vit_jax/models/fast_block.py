"""The encoder block with kernels of rows: the norm and the projections of attention, and the MLP.

Axes: B images, N tokens, D width, H heads, K = D / H width of a head, F hidden width of the MLP,
R = B N rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.attention import NORMS, Attention, KernelAttention
from vit_jax.models.dense import ProductParams
from vit_jax.models.dropout import Dropout
from vit_jax.models.layers import NO_CONTEXT, Context, EncoderBlock, LayerScale, Mlp


class NormParams(nn.Module):
    """The scale and the shift (D,) of a norm that a kernel computes; an RMSNorm's shift is 0.

    Shapes: D -> (D,), (D,), float32.
    """

    norm: str

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
        scale_D = self.param("scale", nn.initializers.ones, (width,))
        if self.norm == "rms":
            return scale_D, jnp.zeros(width)
        return scale_D, self.param("bias", nn.initializers.zeros, (width,))


class RowMlp(Mlp):
    """x plus its `Mlp` by a kernel, which also computes the norm before, by its `NormParams`.

    `norm` is that norm, and `kernel` is from `RowKernels.find_mlp`. `factor_B11`, unless None,
    multiplies the branch of each image.

    Shapes: (B, N, D) -> (B, N, D).
    """

    @nn.compact
    def __call__(  # type: ignore[override] # a kernel
        self,
        x_BND: jax.Array,
        norm_params: tuple[jax.Array, jax.Array],
        kernel: Callable[..., jax.Array],
        factor_B11: jax.Array | None,
        scale_D: jax.Array | None,
        train: bool,
    ) -> jax.Array:
        (B, N, D), F = x_BND.shape, self.mlp_dim

        def draw(columns: int, axis: str | None) -> jax.Array | None:
            dropout = Dropout(self.dropout, self.ops.draw_bytes)
            drawn = dropout.draw_bytes((B, N, columns), ("batch", None, axis), train=train)
            return None if drawn is None else drawn.reshape(B * N, columns)

        layer = partial(ProductParams, dtype=self.dtype, bias_init=nn.initializers.normal(1e-6))
        params: tuple[Any, ...] = (
            *norm_params,
            *layer(F, name="up")(D),
            *layer(D, name="down")(F, scale_D),
        )
        if self.gated:
            params += layer(F, name="gate")(D)
        drawn = [draw(F, "tensor"), draw(D, None)]
        if factor_B11 is not None:
            factor_BN1 = jnp.broadcast_to(factor_B11.astype(jnp.float32), (B, N, 1))
            drawn.append(factor_BN1.reshape(B * N, 1))
        assert self.ops.rows is not None
        fields = {"gelu": self.gelu, "dropout": self.dropout, "norm": self.norm}
        fields |= {"norm_eps": self.norm_eps, "keeps_hidden": self.ops.rows.keeps_hidden}
        return kernel(x_BND.reshape(B * N, D), params, drawn, **fields).reshape(B, N, D)


class RowAttention(KernelAttention):
    """`KernelAttention` by a kernel that also computes the norm before; it returns x beside it.

    `kernel` is from `RowKernels.find_projections`; the x that it returns is for the residual.
    Neither `qk_norm` nor `lora_rank` goes with it.

    Shapes: (B, N, D) -> (B, N, D), (B, N, D).
    """

    @nn.compact
    def __call__(  # type: ignore[override] # it gives x too
        self,
        x_BND: jax.Array,
        norm_params: tuple[jax.Array, jax.Array],
        kernel: Callable[..., tuple[jax.Array, ...]],
        *,
        turns: jax.Array | None = None,
        scale_D: jax.Array | None = None,
        num_keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        B, N, D = x_BND.shape
        names, layers = ("query", "key", "value"), []
        for name in names:
            layer = ProductParams(D, use_bias=self._has_bias(name), dtype=self.dtype, name=name)
            kernel_DD, bias_D = layer(D)
            layers.append((kernel_DD, jnp.zeros(D) if bias_D is None else bias_D))
        fields = {"norm": self.norm, "norm_eps": self.norm_eps}
        outs = kernel(x_BND.reshape(B * N, D), norm_params, tuple(layers), **fields)
        *parts, x_BND = (x_RD.reshape(B, N, D) for x_RD in outs)
        qkv = tuple(map(self._split_heads, names, parts))
        return self._attend(qkv, (None,) * 3, turns, scale_D, num_keys_B), x_BND


class FastBlock(EncoderBlock):
    """`EncoderBlock` with the parts that the kernels of `ops.rows` find for its tokens.

    It takes the place of a block that is not `parallel`, and has neither adapters nor relative
    positions.
    """

    @nn.compact
    def __call__(
        self,
        x_BND: jax.Array,
        drop_rate: float | jax.Array,
        train: bool,
        context: Context = NO_CONTEXT,
    ) -> tuple[jax.Array, None]:
        x_BND, _ = self.place(x_BND, context.positions)
        assert self.ops.rows is not None
        D, rows = x_BND.shape[-1], self.ops.rows
        norm = partial(NORMS[self.norm], epsilon=self.norm_eps, dtype=self.dtype)
        add = partial(self.add, drop_rate=drop_rate, train=train)
        of_keys = {"turns": context.turns, "num_keys_B": context.num_keys_B}
        kernel = None if self.qk_norm else rows.find_projections(x_BND)
        if kernel is None:
            y_BND = norm(name="norm_attention")(x_BND)
            y_BND = self.attention_branch(y_BND, train, **of_keys)
        else:
            fields = self.block_fields(Attention) | {"dropout": self.attention_dropout}
            fields |= {"num_keys": self.num_tokens, "parts": self.parts}
            attention = RowAttention(**fields, name="attention")
            params = NormParams(self.norm, name="norm_attention")(D)
            scale_D = LayerScale(self.layer_scale, name="scale_attention")(D)
            y_BND, x_BND = attention(x_BND, params, kernel, scale_D=scale_D, **of_keys)
            dropout = Dropout(self.dropout, self.ops.draw_bytes)
            y_BND = dropout(y_BND, ("batch", None, None), train=train)
        x_BND = add(x_BND, y_BND)

        kernel = None if self.mlp_norm else rows.find_mlp(x_BND, self.mlp_dim, self.gated_mlp)
        if kernel is None:
            return add(x_BND, self.mlp_branch(norm(name="norm_mlp")(x_BND), train)), None
        params = NormParams(self.norm, name="norm_mlp")(D)
        factor_B11 = self.draw_depth(x_BND, drop_rate, train)
        scale_D = LayerScale(self.layer_scale, name="scale_mlp")(D)
        mlp = RowMlp(**self.block_fields(Mlp), gated=self.gated_mlp, name="mlp")
        return mlp(x_BND, params, kernel, factor_B11, scale_D, train), None
