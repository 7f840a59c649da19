"""Multi-head attention: plain, and by a kernel.

Axes: B images, N queries, M tokens, D width, H heads, K = D / H width of a head.
Parameters are float32; the computation uses `dtype`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from vit_jax.models.block_ops import PLAIN, BlockOps, Constrain, add_bias_plainly, unconstrained
from vit_jax.models.dense import Dense, LoraProduct, Product
from vit_jax.models.dropout import draw_kept
from vit_jax.models.packing import Parts, attend_apart
from vit_jax.models.position import Relative
from vit_jax.models.rotary import turn

# RMSNorm does not subtract the mean and has no bias (arXiv:2302.05442, section 2).
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
NORM_EPS = 1e-6


def choose_norm(name: str, ops: BlockOps) -> type[nn.Module]:
    """The class of the norm `name`, a key of NORMS, in a block that computes with `ops`."""
    return _recomputed_norm(name) if ops.recompute_norms else NORMS[name]


@cache
def _recomputed_norm(name: str) -> type[nn.Module]:
    return nn.remat(NORMS[name])


class Attention(nn.Module):
    """Multi-head attention of queries (B, N, D) over tokens (B, M, D): MSA of Eq. 2.

    `qk_norm` normalises the queries and keys of each head, without bias and with one scale (K,)
    for all heads. `qkv_bias` gives the query, key and value projections a bias; `key_bias` False
    takes away the keys' bias, to which softmax is blind. `relative` holds relative positions, and
    `turns` rotary ones; queries and tokens must then be the same. Only the first `num_keys_B`
    tokens of each image count; None: all. `scale_D` scales the output, see `layers.LayerScale`.
    `lora_rank` adds an adapter of that rank to the query and value projections (`LoraProduct`), as
    in section 4.2 of its paper; None: none. `out_bias` gives the output a bias. With `parts`, rows
    of tokens hold several pictures, and each attends to itself: see `packing`.

    Shapes: (B, N, D), (B, M, D) -> (B, N, D). The tokens may have another width than the queries.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eqs. 5-8; qk_norm, qkv_bias: Dehghani et
      al. 2023 (arXiv:2302.05442), section 2.
    """

    num_heads: int
    dropout: float = 0.0
    norm: str = "layer"
    norm_eps: float = NORM_EPS
    qk_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    lora_rank: int | None = None
    out_bias: bool = True
    parts: Parts = ()
    dtype: Any = jnp.float32
    ops: BlockOps = PLAIN
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(
        self, queries_BND: jax.Array, tokens_BMD: jax.Array, *,
        relative: Relative | None = None, turns: jax.Array | None = None,
        scale_D: jax.Array | None = None, num_keys_B: jax.Array | None = None, train: bool = False,
    ) -> jax.Array:  # fmt: skip
        inputs = {"query": queries_BND, "key": tokens_BMD, "value": tokens_BMD}
        width = queries_BND.shape[-1]
        q_BNHK, k_BMHK, v_BMHK = (
            self._split_heads(name, add_bias_plainly(*self._project(name, x, width)), turns)
            for name, x in inputs.items()
        )
        attend = partial(self._attend_plainly, relative, train)
        out_BNHK = attend_apart(attend, self.parts, (q_BNHK, k_BMHK, v_BMHK), num_keys_B)
        return self._project_out(rearrange(out_BNHK, "b n h k -> b n (h k)"), scale_D)

    @nn.nowrap
    def _attend_plainly(
        self, relative: Relative | None, train: bool,
        q_BNHK: jax.Array, k_BMHK: jax.Array, v_BMHK: jax.Array, num_keys_B: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        bias_BHNM = None
        more: dict[str, Any] = {} if num_keys_B is None else {"num_keys_B": num_keys_B}
        if relative is not None:
            q_BHNK = jnp.swapaxes(q_BNHK, 1, 2) * q_BNHK.shape[-1] ** -0.5
            bias_BHNM = self.constrain(relative.logits(q_BHNK), ("batch", "tensor", None, None))
        if train and self.dropout > 0:
            B, N, H, _ = q_BNHK.shape
            shape, axes = (B, H, N, k_BMHK.shape[1]), ("batch", "tensor", None, None)
            key, draw = self.make_rng("dropout"), self.ops.draw_bytes
            kept_BHNM = draw_kept(draw, key, self.dropout, shape, axes)
            more |= {"kept_BHNM": kept_BHNM, "dropout": self.dropout}
        return self.ops.attend(q_BNHK, k_BMHK, v_BMHK, bias_BHNM=bias_BHNM, **more)

    @nn.nowrap
    def _project(
        self, name: str, x_BND: jax.Array, width: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Queries, keys or values (B, N, width) without bias, and the bias (width,) or None."""
        product: Callable[..., nn.Module] = Product
        if self.lora_rank is not None and name != "key":
            product = partial(LoraProduct, rank=self.lora_rank)
        return product(
            width,
            use_bias=self._has_bias(name),
            dtype=self.dtype,
            multiply=self.ops.multiply,
            name=name,
        )(x_BND)

    @nn.nowrap
    def _has_bias(self, name: str) -> bool:
        return self.qkv_bias and (self.key_bias or name != "key")

    @nn.nowrap
    def _split_heads(
        self, name: str, y_BND: jax.Array, turns: jax.Array | None = None
    ) -> jax.Array:
        """(B, N, D) -> (B, N, H, K); queries and keys normalised by `qk_norm`, then turned."""
        y_BNHK = rearrange(y_BND, "b n (h k) -> b n h k", h=self.num_heads)
        if self.qk_norm and name != "value":
            fields = {"epsilon": self.norm_eps, "dtype": self.dtype}
            fields |= {"use_bias": False} if self.norm == "layer" else {}
            norm = choose_norm(self.norm, self.ops)
            y_BNHK = norm(name=f"{name}_norm", **fields)(y_BNHK)
        if turns is not None and name != "value":
            y_BNHK = turn(y_BNHK, turns)
        return self.constrain(y_BNHK, ("batch", None, "tensor", None))

    @nn.nowrap
    def _project_out(self, out_BND: jax.Array, scale_D: jax.Array | None) -> jax.Array:
        return Dense(
            out_BND.shape[-1],
            use_bias=self.out_bias,
            dtype=self.dtype,
            multiply=self.ops.multiply,
            add_bias=self.ops.add_bias,
            name="out",
        )(out_BND, scale_D)


class KernelAttention(Attention):
    """`Attention` by a kernel: see `block_ops.AttentionKernel`. No dropout, no relative positions.

    Only the first `num_keys` tokens count, and of these the first `num_keys_B` of each image; the
    others are padding; None: all count. The kernel adds the biases, unless they are needed before,
    for `qk_norm`, and turns queries and keys.
    """

    num_keys: int | None = None

    @nn.compact
    def __call__(
        self, queries_BND: jax.Array, tokens_BMD: jax.Array, *,
        relative: Relative | None = None, turns: jax.Array | None = None,
        scale_D: jax.Array | None = None, num_keys_B: jax.Array | None = None, train: bool = False,
    ) -> jax.Array:  # fmt: skip
        assert self.dropout == 0 and relative is None

        def project(name: str, x_BND: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            y_BND, bias_D = self._project(name, x_BND, x_BND.shape[-1])
            if self.qk_norm:
                y_BND, bias_D = add_bias_plainly(y_BND, bias_D), None
            y_BNHK = self._split_heads(name, self._with_all_heads(y_BND))
            return y_BNHK, None if bias_D is None else bias_D.reshape(y_BNHK.shape[2:])

        inputs = {"query": queries_BND, "key": tokens_BMD, "value": tokens_BMD}
        qkv, biases = zip(*(project(name, x) for name, x in inputs.items()), strict=True)
        return self._attend(qkv, biases, turns, scale_D, num_keys_B)

    @nn.nowrap
    def _attend(
        self,
        qkv: tuple[jax.Array, ...],
        biases: tuple[jax.Array | None, ...],
        turns: jax.Array | None,
        scale_D: jax.Array | None,
        num_keys_B: jax.Array | None,
    ) -> jax.Array:
        assert self.ops.attention_kernel is not None
        num_keys = self.num_keys if num_keys_B is None else num_keys_B
        more = (self.parts,) if self.parts else ()
        out_BNHK = self.ops.attention_kernel(qkv, biases, turns, num_keys, *more)
        out_BND = self._with_all_heads(rearrange(out_BNHK, "b n h k -> b n (h k)"))
        return self._project_out(out_BND, scale_D)

    @nn.nowrap
    def _with_all_heads(self, y_BND: jax.Array) -> jax.Array:
        # Without this constraint XLA multiplies head by head, forward and backward, with results
        # that are copied into the order of the attention's kernel.
        return self.constrain(y_BND, ("batch", None, "tensor"))
