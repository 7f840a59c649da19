"""The layers of a Transformer encoder.

Axes: B images, N tokens, D width, H heads, K = D / H width of a head, F hidden width of the MLP.
Parameters are float32; `dtype` is that of the computation.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from vit_jax.models.attention import dot_product_attention
from vit_jax.models.position import Positions, Relative

# constrain(x, axes) -> x: states how an activation is laid out over devices. `axes` names, for
# each axis of x, "batch", "tensor" or None. Models know no mesh: who has one brings it in.
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

# With `rms` a norm neither centres nor has a bias (arXiv:2302.05442, section 2).
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
NORM_EPS = 1e-6
Dense = partial(nn.Dense, kernel_init=nn.initializers.xavier_uniform())

GELU = {"tanh": partial(nn.gelu, approximate=True), "exact": partial(nn.gelu, approximate=False)}

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def unconstrained(x, axes):
    """The `Constrain` of a model that runs on one device."""
    del axes
    return x


class Attention(nn.Module):
    """Multi-head attention of queries (B, N, D) over tokens (B, M, D): MSA of Eq. 2.

    `qk_norm` normalises the queries and the keys of each head by a norm without bias, whose scale
    (K,) the heads share. `qkv_bias` says whether queries, keys and values have a bias. `attend` is
    the form of attention, as in models/attention.py. `relative` are the positions of the tokens,
    which are queries and keys, relative to each other.

    Shapes: (B, N, D), (B, M, D) -> (B, N, D).
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eqs. 5-8; qk_norm, qkv_bias: Dehghani et
      al. 2023 (arXiv:2302.05442), section 2.
    """

    num_heads: int
    dropout: float = 0.0
    norm: str = "layer"
    norm_eps: float = NORM_EPS
    qk_norm: bool = False
    qkv_bias: bool = True
    dtype: Any = jnp.float32
    attend: Callable = dot_product_attention
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, queries_BND, tokens_BMD, *, relative: Relative | None = None, train=False):
        width = queries_BND.shape[-1]

        def project(name, x_BND):
            y = Dense(width, use_bias=self.qkv_bias, dtype=self.dtype, name=name)(x_BND)
            y_BHNK = rearrange(y, "b n (h k) -> b h n k", h=self.num_heads)
            if self.qk_norm and name != "value":
                fields = {"epsilon": self.norm_eps, "dtype": self.dtype}
                fields |= {"use_bias": False} if self.norm == "layer" else {}
                y_BHNK = NORMS[self.norm](name=f"{name}_norm", **fields)(y_BHNK)
            return self.constrain(y_BHNK, ("batch", "tensor", None, None))

        q_BHNK = project("query", queries_BND)
        bias_BHNM = None
        if relative is not None:
            bias_BHNM = relative.logits(q_BHNK * q_BHNK.shape[-1] ** -0.5)
            bias_BHNM = self.constrain(bias_BHNM, ("batch", "tensor", None, None))
        out_BHNK = self.attend(
            q_BHNK,
            project("key", tokens_BMD),
            project("value", tokens_BMD),
            bias_BHNM=bias_BHNM,
            dropout_rate=self.dropout,
            dropout_key=self.make_rng("dropout") if train and self.dropout > 0 else None,
        )
        out_BND = rearrange(out_BHNK, "b h n k -> b n (h k)")
        return Dense(width, dtype=self.dtype, name="out")(out_BND)


class Mlp(nn.Module):
    """Two dense layers with a GELU between, dropout after each.

    Shapes: (B, N, D) -> (B, N, D).
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1 and appendix B.1.
    """

    mlp_dim: int
    gelu: str = "tanh"
    dropout: float = 0.0
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BND, *, train=False):
        dense = partial(Dense, dtype=self.dtype, bias_init=nn.initializers.normal(1e-6))
        y_BNF = dense(self.mlp_dim, name="up")(x_BND)
        y_BNF = self.constrain(y_BNF, ("batch", None, "tensor"))
        y_BNF = GELU[self.gelu](y_BNF)
        y_BNF = nn.Dropout(self.dropout, deterministic=not train)(y_BNF)
        y_BND = dense(x_BND.shape[-1], name="down")(y_BNF)
        return nn.Dropout(self.dropout, deterministic=not train)(y_BND)


class LayerScale(nn.Module):
    """A learned factor for each channel, of which all begin at `initial`.

    Shapes: (B, N, D) -> (B, N, D).
    Source: Touvron et al. 2021 (arXiv:2103.17239), section 2.
    """

    initial: float

    @nn.compact
    def __call__(self, x_BND):
        constant = nn.initializers.constant(self.initial)
        scale_D = self.param("scale", constant, x_BND.shape[-1:])
        return x_BND * jnp.reshape(scale_D.astype(x_BND.dtype), (1, 1, -1))


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class BlockFields:
    """The fields of an encoder's blocks: listed here for the block, the encoder and the model.

    `parallel`: attention and MLP take the same normalised tokens, and both are added to the
    residual. `gelu` is one of GELU, `norm` one of NORMS. `layer_scale` is the first value of the
    factors of a branch's channels; None: there are none. `qk_norm`, `qkv_bias`: as in `Attention`.
    """

    num_heads: int
    mlp_dim: int
    gelu: str = "tanh"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    parallel: bool = False
    norm: str = "layer"
    norm_eps: float = NORM_EPS
    qk_norm: bool = False
    qkv_bias: bool = True
    layer_scale: float | None = None
    dtype: Any = jnp.float32
    attend: Callable = dot_product_attention
    constrain: Constrain = unconstrained

    def block_fields(self) -> dict[str, Any]:
        """{name: value} of these fields, for a module inside this one."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(BlockFields)}


class EncoderBlock(BlockFields, nn.Module):
    """Pre-norm block: attention, then MLP, each with a residual; or both at once (`parallel`).

    In training a residual branch of an example is dropped with probability `drop_rate` (a scalar,
    which may be traced; used only where `stochastic_depth` says so). `positions` makes the block
    own tables of positions; `shared`, from `Positions.build`, comes from tables that all blocks
    share. Positions are added to the block's input, relative ones to the logits.

    Shapes: (B, N, D) -> (B, N, D), and None: the form that `nn.scan` needs.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eqs. 2-3; stochastic depth: Huang et al.
      2016 (arXiv:1603.09382); parallel: Dehghani et al. 2023 (arXiv:2302.05442), section 2.
    """

    stochastic_depth: bool = False
    positions: Positions | None = None

    @nn.compact
    def __call__(self, x_BND, drop_rate, train, shared=None):
        def add(x_BND, branch_BND, scale_name):
            if self.layer_scale is not None:
                branch_BND = LayerScale(self.layer_scale, name=scale_name)(branch_BND)
            if train and self.stochastic_depth:
                keep_rate = 1.0 - drop_rate
                kept = jax.random.bernoulli(
                    self.make_rng("dropout"), keep_rate, (x_BND.shape[0], 1, 1)
                )
                branch_BND = jnp.where(kept, branch_BND / keep_rate, 0).astype(branch_BND.dtype)
            return self.constrain(x_BND + branch_BND, ("batch", None, None))

        positions = shared
        if self.positions is not None:
            tables = self.param("pos_embedding", self.positions.init)
            positions = self.positions.build(tables)
        relative = positions if isinstance(positions, Relative) else None
        if positions is not None and relative is None:
            x_BND += positions.astype(self.dtype)

        common = {"dtype": self.dtype, "constrain": self.constrain}
        norm = partial(NORMS[self.norm], epsilon=self.norm_eps, dtype=self.dtype)
        y_BND = norm(name="norm" if self.parallel else "norm_attention")(x_BND)
        attention = Attention(
            self.num_heads,
            dropout=self.attention_dropout,
            norm=self.norm,
            norm_eps=self.norm_eps,
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            attend=self.attend,
            name="attention",
            **common,
        )
        z_BND = attention(y_BND, y_BND, relative=relative, train=train)
        z_BND = nn.Dropout(self.dropout, deterministic=not train)(z_BND)
        x_BND = add(x_BND, z_BND, "scale_attention")
        if not self.parallel:
            y_BND = norm(name="norm_mlp")(x_BND)
        mlp = Mlp(self.mlp_dim, gelu=self.gelu, dropout=self.dropout, name="mlp", **common)
        return add(x_BND, mlp(y_BND, train=train), "scale_mlp"), None


class Encoder(BlockFields, nn.Module):
    """`depth` blocks, then a LayerNorm (Eqs. 2-4), which `final_norm` False leaves out.

    With `scan` the blocks are one, compiled once, whose parameters (`layers`) have the layer as
    first axis; without, they are `layer_0`, `layer_1`, ... Both compute the same. `remat` says
    what the backward pass recomputes: "none" nothing, "dots" all but the dense layers' products,
    "full" the whole block. The rate of stochastic depth grows linearly from 0 in the first block
    to `stochastic_depth` in the last. `positions` and `shared`: of all blocks alike.

    Shapes: (B, N, D) -> (B, N, D).
    """

    depth: int
    stochastic_depth: float = 0.0
    positions: Positions | None = None
    final_norm: bool = True
    scan: bool = False
    remat: str = "none"

    @nn.compact
    def __call__(self, x_BND, *, shared=None, train=False):
        block = EncoderBlock
        if self.remat != "none":
            block = nn.remat(
                block,
                policy=REMAT_POLICIES[self.remat],
                prevent_cse=not self.scan,
                static_argnums=(3,),  # train; 0 is self
            )
        fields = self.block_fields() | {
            "stochastic_depth": self.stochastic_depth > 0,
            "positions": self.positions,
        }
        drop_rates = self.stochastic_depth * jnp.arange(self.depth) / max(self.depth - 1, 1)
        if self.scan:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=self.depth,
            )
            x_BND, _ = layers(name="layers", **fields)(x_BND, drop_rates, train, shared)
        else:
            for i in range(self.depth):
                x_BND, _ = block(name=f"layer_{i}", **fields)(x_BND, drop_rates[i], train, shared)
        if not self.final_norm:
            return x_BND
        return NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype, name="norm")(x_BND)


class MapHead(BlockFields, nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens, then an MLP.

    It has neither dropout, `parallel`, `qk_norm` nor `layer_scale`, whatever the blocks have, and
    its attention is the default form.

    Shapes: (B, N, D) -> (B, D).
    Source: Zhai et al. 2021 (arXiv:2106.04560), section 3.2, after Lee et al. 2019
      (arXiv:1810.00825).
    """

    @nn.compact
    def __call__(self, tokens_BND):
        batch, _, width = tokens_BND.shape
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width))
        probe_B1D = jnp.tile(probe.astype(self.dtype), (batch, 1, 1))
        shared = {"dtype": self.dtype, "constrain": self.constrain}
        attention = Attention(self.num_heads, qkv_bias=self.qkv_bias, name="attention", **shared)
        x_B1D = attention(probe_B1D, tokens_BND)
        norm = NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype, name="norm")
        y_B1D = norm(x_B1D)
        x_B1D += Mlp(self.mlp_dim, gelu=self.gelu, name="mlp", **shared)(y_B1D)
        return x_B1D[:, 0]
