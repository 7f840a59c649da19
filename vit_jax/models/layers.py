"""The layers of a Transformer encoder.

Axes: B images, N tokens, D width, H heads, K = D / H width of a head, F hidden width of the MLP.
Parameters are float32; the computation uses `dtype`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.attention import NORM_EPS, NORMS, Attention, KernelAttention, choose_norm
from vit_jax.models.block_ops import PLAIN, BlockOps, Constrain, add_bias_plainly, unconstrained
from vit_jax.models.contract import AttentionShape, SplitLayer
from vit_jax.models.dense import Dense
from vit_jax.models.dropout import Dropout
from vit_jax.models.fields import field_names
from vit_jax.models.gelu import GELU
from vit_jax.models.packing import Parts, spread
from vit_jax.models.position import PositionEmbedding

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Mlp(nn.Module):
    """Two dense layers with an activation between, dropout after each.

    `scale_D` scales the output: see `LayerScale`. With `gated`, the activation of a third layer
    multiplies the first one's output; with `norm`, "layer" or "rms", what the last layer takes is
    normalised.

    Shapes: (B, N, D) -> (B, N, D).
    Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1 and appendix B.1; gated:
      Shazeer 2020 (arXiv:2002.05202), Eq. 6; norm: Fang et al. 2023 (arXiv:2303.11331).
    """

    mlp_dim: int
    gelu: str = "tanh"
    gated: bool = False
    norm: str | None = None
    norm_eps: float = NORM_EPS
    dropout: float = 0.0
    dtype: Any = jnp.float32
    ops: BlockOps = PLAIN
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(
        self, x_BND: jax.Array, *, scale_D: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        dense = partial(
            Dense,
            dtype=self.dtype,
            bias_init=nn.initializers.normal(1e-6),
            multiply=self.ops.multiply,
        )
        # TPUs sum the gradients of two biases best where the gate's gradients are computed.
        add_bias = add_bias_plainly if self.gated else self.ops.add_bias
        hidden = ("batch", None, "tensor")
        up = dense(self.mlp_dim, add_bias=add_bias, name="up")
        y_BNF, gated_BNF = self.constrain(up(x_BND), hidden), None
        if self.gated:
            gate, gated_BNF = dense(self.mlp_dim, add_bias=add_bias, name="gate"), y_BNF
            y_BNF = self.constrain(gate(x_BND), hidden)
        dropout = partial(Dropout, self.dropout, self.ops.draw_bytes)
        kept_BNF = dropout().draw_kept(y_BNF.shape, hidden, train=train)
        y_BNF = GELU[self.gelu](y_BNF, gated_BNF, kept_BNF, self.dropout)
        if self.norm is not None:
            norm = choose_norm(self.norm, self.ops)
            y_BNF = norm(epsilon=self.norm_eps, dtype=self.dtype, name="norm")(y_BNF)
        down = dense(x_BND.shape[-1], add_bias=self.ops.add_bias, name="down")
        y_BND = down(y_BNF, scale_D)
        return dropout()(y_BND, ("batch", None, None), train=train)


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch, initialised to `initial`; None: no factor.

    The branch's last layer multiplies its kernel and its bias by it, to the same effect.

    Shapes: -> (D,), float32; or None.
    Source: Touvron et al. 2021 (arXiv:2103.17239), section 2.
    """

    initial: float | None

    @nn.compact
    def __call__(self, width: int) -> jax.Array | None:
        if self.initial is None:
            return None
        return self.param("scale", nn.initializers.constant(self.initial), (width,))


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class BlockFields:
    """The fields of an encoder block, shared by the block, the encoder and the model.

    `parallel`: attention and MLP take the same normalised tokens, and both outputs are added to
    the residual. `qk_norm`, `qkv_bias`, `key_bias`, `lora_rank`: see `Attention`. `gated_mlp`,
    `mlp_norm`: see `Mlp`.
    """

    num_heads: int = key(..., "heads of attention in each layer", within=fields.FROM_1)
    mlp_dim: int = key(..., "width of the hidden layer of each MLP", within=fields.FROM_1)
    gelu: str = key("tanh", "the activation in MLPs", choices=tuple(GELU))
    gated_mlp: bool = key(False, "the activation of a third layer gates MLPs: SwiGLU with silu")
    mlp_norm: bool = key(False, "a norm before the last layer of each MLP")
    dropout: float = key(0.0, **fields.DROPOUT)
    attention_dropout: float = key(0.0, "rate, on attention weights", within=fields.RATE)
    parallel: bool = key(False, "attention and MLP in parallel")
    norm: str = key("layer", "the norms", choices=tuple(NORMS))
    norm_eps: float = key(NORM_EPS, **fields.NORM_EPS)
    qk_norm: bool = key(False, "norms of queries and keys")
    qkv_bias: bool = key(True, "biases of the projections to queries, keys and values")
    key_bias: bool = key(True, "False: with qkv_bias, only queries and values have biases")
    layer_scale: float | None = key(
        None, "initial value of a learned scale of each branch; None: no scale",
        within=fields.POSITIVE,
    )  # fmt: skip
    lora_rank: int | None = key(None, "rank of the LoRA adapters on query and value; None: none")
    dtype: Any = jnp.float32
    ops: BlockOps = PLAIN
    constrain: Constrain = unconstrained

    @nn.nowrap
    def block_fields(self, module: type[nn.Module] | None = None) -> dict[str, Any]:
        """The fields of this class that `module` has too (None: all), as {name: value}."""
        names = [f.name for f in dataclasses.fields(BlockFields)]
        known = names if module is None else field_names(module)
        return {name: getattr(self, name) for name in names if name in known}


class Context(NamedTuple):
    """What all blocks of an encoder get beside their tokens; a block takes what it can use.

    positions: from `PositionEmbedding.build`: vectors, or relative positions with `logits`.
    turns: of queries and keys, see `rotary.turn`.
    num_keys_B: so many first tokens of each image count, the others are padding; None: all count.
    image_BMD: tokens of the image; the blocks of a decoder attend to them after their own.
    """

    positions: Any = None
    turns: jax.Array | None = None
    num_keys_B: jax.Array | None = None
    image_BMD: jax.Array | None = None


NO_CONTEXT = Context()


class EncoderBlock(BlockFields, nn.Module):
    """Pre-norm block: attention, then MLP, each with a residual; or both at once (`parallel`).

        z' = MSA(LN(z)) + z
        z = MLP(LN(z')) + z'

    With `stochastic_depth`, training drops each residual branch of an example with probability
    `drop_rate`, a scalar that may be traced. With `positions` the block owns its position tables;
    the positions of its `context` come from tables that all blocks share. Positions are added to
    the block's input; relative positions to the attention logits. Only the first `num_tokens`
    tokens count, the others are padding; None: all count. With `parts`, a row of tokens holds
    several pictures: see `packing`.

    Shapes: (B, N, D) -> ((B, N, D), None); `nn.scan` needs the None.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eqs. 2-3; stochastic depth: Huang et al.
      2016 (arXiv:1603.09382); parallel: Dehghani et al. 2023 (arXiv:2302.05442), section 2.
    """

    stochastic_depth: bool = False
    positions: PositionEmbedding | None = None
    num_tokens: int | None = None
    parts: Parts = ()

    @nn.compact
    def __call__(
        self,
        x_BND: jax.Array,
        drop_rate: float | jax.Array,
        train: bool,
        context: Context = NO_CONTEXT,
    ) -> tuple[jax.Array, None]:
        x_BND, relative = self.place(x_BND, context.positions)
        norm_class = choose_norm(self.norm, self.ops)
        norm = partial(norm_class, epsilon=self.norm_eps, dtype=self.dtype)
        add = partial(self.add, drop_rate=drop_rate, train=train)
        of_keys = {"relative": relative, "turns": context.turns, "num_keys_B": context.num_keys_B}
        msa: Callable[..., jax.Array] = partial(self.attention_branch, train=train, **of_keys)
        mlp = partial(self.mlp_branch, train=train)
        if self.parallel:
            y_BND = norm(name="norm")(x_BND)
            return add(add(x_BND, msa(y_BND)), mlp(y_BND)), None
        x_BND = add(x_BND, msa(norm(name="norm_attention")(x_BND)))  # Eq. 2
        x_BND = add(x_BND, mlp(norm(name="norm_mlp")(x_BND)))  # Eq. 3
        return x_BND, None

    @nn.nowrap
    def attention_branch(self, y_BND: jax.Array, train: bool, **of_keys: Any) -> jax.Array:
        """The attention (B, N, D) of normalised tokens, with dropout.

        `of_keys`: `relative`, `turns` and `num_keys_B`, see `Attention`.
        """
        attention_class: Callable[..., nn.Module] = Attention
        if self.ops.attention_kernel is not None:
            attention_class = partial(KernelAttention, num_keys=self.num_tokens)
        fields = self.block_fields(Attention) | {"dropout": self.attention_dropout}
        attention = attention_class(**fields, parts=self.parts, name="attention")
        scale_D = LayerScale(self.layer_scale, name="scale_attention")(y_BND.shape[-1])
        y_BND = self.mix(attention, y_BND, **of_keys, scale_D=scale_D, train=train)
        dropout = Dropout(self.dropout, self.ops.draw_bytes)
        return dropout(y_BND, ("batch", None, None), train=train)

    @nn.nowrap
    def mlp_branch(self, y_BND: jax.Array, train: bool) -> jax.Array:
        """The MLP (B, N, D) of normalised tokens."""
        fields = self.block_fields(Mlp) | {"gated": self.gated_mlp}
        fields |= {"norm": self.norm if self.mlp_norm else None}
        scale_D = LayerScale(self.layer_scale, name="scale_mlp")(y_BND.shape[-1])
        return Mlp(**fields, name="mlp")(y_BND, scale_D=scale_D, train=train)

    @nn.nowrap
    def place(self, x_BND: jax.Array, positions: Any) -> tuple[jax.Array, Any]:
        """x with the block's positions, or those that all share; and relative ones, or None."""
        if self.positions is not None:
            positions = self.positions.build_checked(
                self.param("pos_embedding", self.positions.init)
            )
        if positions is None or hasattr(positions, "logits"):
            return x_BND, positions
        padding = x_BND.shape[1] - positions.shape[1]
        return x_BND + jnp.pad(positions.astype(self.dtype), ((0, 0), (0, padding), (0, 0))), None

    @nn.nowrap
    def draw_depth(
        self, x_BND: jax.Array, drop_rate: float | jax.Array, train: bool
    ) -> jax.Array | None:
        """The factor of each image's branch by stochastic depth; None: it is 1.

        Shapes: -> (B, 1, 1); with `parts` (R, T, 1), as a row has several images.
        """
        if not (train and self.stochastic_depth):
            return None
        keep_rate = 1.0 - drop_rate
        num_images = len(x_BND) * max(sum(number for number, _ in self.parts), 1)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep_rate, (num_images, 1, 1))
        factor_B11 = kept / keep_rate  # small: TPUs divide slowly
        return spread(factor_B11[..., 0], self.parts, x_BND.shape[1]) if self.parts else factor_B11

    @nn.nowrap
    def add(
        self, x_BND: jax.Array, branch_BND: jax.Array, drop_rate: float | jax.Array, train: bool
    ) -> jax.Array:
        """x plus its branch, by stochastic depth."""
        factor_B11 = self.draw_depth(x_BND, drop_rate, train)
        if factor_B11 is not None:
            branch_BND = (branch_BND * factor_B11).astype(branch_BND.dtype)
        return self.constrain(x_BND + branch_BND, ("batch", None, None))

    @nn.nowrap
    def mix(
        self, attention: Callable[..., jax.Array], y_BND: jax.Array, **kwargs: Any
    ) -> jax.Array:
        """The output of `attention` (B, N, D), where every token attends to all tokens."""
        return attention(y_BND, y_BND, **kwargs)


class Encoder(BlockFields, nn.Module):
    """`depth` blocks, then a norm (Eqs. 2-4) unless `final_norm` is False.

    With `scan`, one block is compiled once and its parameters (`layers`) have the layer as first
    axis; without, the blocks are `layer_0`, `layer_1`, ... Both compute the same. `remat` selects
    the part that the backward pass recomputes: "none", "dots" (all but the dense layers' matrix
    products) or "full" (the whole block). It applies to the first `remat_layers` blocks; None: to
    all. In a scan it applies to all, or with 0 to none. The rate of stochastic depth grows linearly
    from 0 in the first block to `stochastic_depth` in the last; with `uniform_depth` it is the same
    in all. `positions`, the `context` and, unless None, the `grid` of the tokens go to every block,
    a `block_class` or, with kernels of rows, the block of `ops.rows`; so do `parts`, if there are
    any.

    Shapes: (B, N, D) -> (B, N, D).
    """

    depth: int
    stochastic_depth: float = 0.0
    uniform_depth: bool = False
    positions: PositionEmbedding | None = None
    final_norm: bool = True
    scan: bool = False
    remat: str = "none"
    remat_layers: int | None = None
    block_class: type[nn.Module] = EncoderBlock

    @nn.compact
    def __call__(
        self,
        x_BND: jax.Array,
        *,
        grid: tuple[int, int] | None = None,
        context: Context = NO_CONTEXT,
        parts: Parts = (),
        train: bool = False,
    ) -> jax.Array:
        num_tokens = x_BND.shape[1]
        padding = -num_tokens % self.ops.token_multiple
        x_BND = jnp.pad(x_BND, ((0, 0), (0, padding), (0, 0)))
        if context.turns is not None:
            turns = jnp.pad(context.turns, ((0, 0), (0, padding), (0, 0)))
            context = context._replace(turns=turns)
        fields = self.block_fields() | {"stochastic_depth": self.stochastic_depth > 0}
        fields |= {"positions": self.positions, "num_tokens": num_tokens}
        fields |= {} if grid is None else {"grid": grid}
        fields |= {"parts": parts} if parts else {}
        drop_rates = self.stochastic_depth * jnp.arange(self.depth) / max(self.depth - 1, 1)
        if self.uniform_depth:
            drop_rates = jnp.full(self.depth, self.stochastic_depth)
        if self.scan:
            block, fields["ops"] = self._block(0)
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=self.depth,
            )
            layer = layers(name="layers", **fields)
            x_BND, _ = layer(x_BND, drop_rates, train, context)
        else:
            for i in range(self.depth):
                block, fields["ops"] = self._block(i)
                layer = block(name=f"layer_{i}", **fields)
                x_BND, _ = layer(x_BND, drop_rates[i], train, context)
        if self.final_norm:  # before the padding goes, as TPUs copy an odd number of tokens
            norm = choose_norm(self.norm, self.ops)
            x_BND = norm(epsilon=self.norm_eps, dtype=self.dtype, name="norm")(x_BND)
        return x_BND[:, :num_tokens]

    @nn.nowrap
    def _block(self, layer: int) -> tuple[Callable[..., nn.Module], BlockOps]:
        """The class of block number `layer`, which the backward pass may recompute, and its ops."""
        num_layers = self.depth if self.remat_layers is None else self.remat_layers
        block_class = self.block_class if self.ops.rows is None else self.ops.rows.block
        if self.remat == "none" or layer >= num_layers:
            return block_class, self.ops
        block = nn.remat(
            block_class,
            policy=REMAT_POLICIES[self.remat],
            prevent_cse=not self.scan,
            static_argnums=(3,),  # train; 0 is self
        )
        return block, self.ops.recomputed


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EncoderFields(BlockFields):
    """The fields of a module that an objective adds to a model, and that holds an `Encoder`."""

    width: int = key(..., "of a token", within=fields.FROM_1)
    depth: int = key(..., "number of layers", within=fields.FROM_1)
    scan: bool = False
    remat: str = "none"

    block_class: ClassVar[type[nn.Module]] = EncoderBlock
    sums_of_block: ClassVar[int] = 2  # see `split_blocks`

    @property
    def num_tokens(self) -> int:
        """Tokens of an example."""
        raise NotImplementedError

    @property
    def attention_shape(self) -> AttentionShape | str:
        """As `Model.attention_shape`."""
        width = self.width // self.num_heads
        return AttentionShape(self.num_heads, width, self.num_tokens, 0.0, relative=False)

    @nn.nowrap
    def make_encoder(self, name: str | None = None) -> Encoder:
        more: dict[str, Any] = {"depth": self.depth, "scan": self.scan, "remat": self.remat}
        more["block_class"] = self.block_class
        return Encoder(**self.block_fields(), **more, name=name)

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer]:
        """Its blocks, which are no part of the model, and always learn."""
        values = (self.num_tokens if tokens is None else tokens) * self.width
        recomputed = self.depth if self.remat != "none" else 0
        blocks = split_blocks(self.depth, recomputed, values, self.sums_of_block)
        return [block._replace(part=None) for block in blocks]


def split_blocks(depth: int, recomputed: int, values: int, sums: int = 2) -> list[SplitLayer]:
    """`Model.split_layers` of `depth` blocks with `values` numbers in their tokens.

    A block is split over heads and hidden units. Its forward pass sums the outputs of attention and
    MLP, its backward pass the gradients of their inputs: `sums` arrays each.

    Args:
      recomputed: number of the first blocks that the backward pass computes again.
    """
    arrays = (values,) * sums
    return [SplitLayer(1 + i, i < recomputed, arrays, arrays) for i in range(depth)]


class MapHead(BlockFields, nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens, then an MLP.

    It ignores the block fields `dropout`, `attention_dropout`, `gated_mlp`, `mlp_norm`, `parallel`,
    `qk_norm`, `key_bias`, `layer_scale`, `lora_rank` and `ops`: it computes without kernels.

    Only the first `num_keys_B` tokens of each image count; None: all.

    Shapes: (B, N, D) -> (B, D).
    Source: Zhai et al. 2021 (arXiv:2106.04560), section 3.2, after Lee et al. 2019
      (arXiv:1810.00825).
    """

    @nn.compact
    def __call__(self, tokens_BND: jax.Array, num_keys_B: jax.Array | None = None) -> jax.Array:
        batch, _, width = tokens_BND.shape
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, width))
        probe_B1D = jnp.tile(probe.astype(self.dtype), (batch, 1, 1))
        shared = {"dtype": self.dtype, "constrain": self.constrain}
        attention = Attention(self.num_heads, qkv_bias=self.qkv_bias, name="attention", **shared)
        x_B1D = attention(probe_B1D, tokens_BND, num_keys_B=num_keys_B)
        norm = NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype, name="norm")
        y_B1D = norm(x_B1D)
        x_B1D += Mlp(self.mlp_dim, gelu=self.gelu, name="mlp", **shared)(y_B1D)
        return x_B1D[:, 0]
