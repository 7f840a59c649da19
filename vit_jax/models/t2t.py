"""T2T-ViT: a Vision Transformer whose tokens come from overlapping patches, joined step by step.

Axes: B images, H rows, W columns, C channels of a patch, N tokens, K token width, M random
features, D width.
Source: Yuan et al. 2021 (arXiv:2101.11986); sizes and details: github.com/yitu-opensource/T2T-ViT.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import POSITIONS, key
from vit_jax.models.block_ops import Constrain, unconstrained
from vit_jax.models.contract import CONSTANTS
from vit_jax.models.dense import Dense
from vit_jax.models.dot_product import dot_product_attention
from vit_jax.models.fields import FROM_1
from vit_jax.models.layers import REMAT_POLICIES, Mlp
from vit_jax.models.position import SINCOS_1D
from vit_jax.models.variants import VIT_VARIANTS, Variant
from vit_jax.models.vit import ViT

TOKEN_MODULES = ("performer", "transformer")
_FEATURE_RATIO = 2  # token width / number of random features
_EPS = 1e-8  # in the performer's denominator


class Split(NamedTuple):
    """A soft split: side, stride and zero padding of its patches, in positions of the map."""

    size: int
    stride: int
    padding: int


SPLITS = (Split(7, 4, 2), Split(3, 2, 1), Split(3, 2, 1))
STRIDE = math.prod(split.stride for split in SPLITS)


def soft_split(x_BHWC: jax.Array, split: Split) -> jax.Array:
    """Overlapping patches of a map, each flattened as (channel, row, column).

    A patch lies within two strides, so it is cut from two neighbouring blocks.

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, C size^2); the stride divides H and W.
    Source: Yuan et al. 2021 (arXiv:2101.11986), section 3.1.
    """
    size, stride, padding = split
    sides = (padding, stride - padding)
    x = jnp.pad(x_BHWC, ((0, 0), sides, sides, (0, 0)))
    x = rearrange(x, "b (h s) (w t) c -> b h s w t c", s=stride, t=stride)
    x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)[:, :, :size]
    x = jnp.concatenate([x[:, :, :, :-1], x[:, :, :, 1:]], axis=4)[:, :, :, :, :size]
    return rearrange(x, "b h s w t c -> b h w (c s t)")


def performer_attention(
    q_BNK: jax.Array, k_BNK: jax.Array, v_BNK: jax.Array, features_MK: jax.Array
) -> jax.Array:
    """Attention in time linear in N, by random features of queries and keys; float32.

        phi(q) (phi(k)^T v) / (phi(q) sum_n phi(k_n) + 1e-8)
        phi(x) = exp(W x - |x|^2 / 2) / sqrt(M)

    W x is computed in full float32 on every device, because phi is its exponential: TPUs and GPUs
    round the factors of a product by default.

    Shapes: three of (B, N, K), W (M, K) -> (B, N, K).
    Source: Choromanski et al. 2020 (arXiv:2009.14794), section 2.2.
    """
    q_BNK, k_BNK, v_BNK = (x.astype(jnp.float32) for x in (q_BNK, k_BNK, v_BNK))

    def phi(x_BNK: jax.Array) -> jax.Array:
        squares_BN1 = jnp.square(x_BNK).sum(axis=-1, keepdims=True) / 2
        projected_BNM = jnp.einsum("bnk,mk->bnm", x_BNK, features_MK, precision="highest")
        return jnp.exp(projected_BNM - squares_BN1) / math.sqrt(len(features_MK))

    q_BNM, k_BNM = phi(q_BNK), phi(k_BNK)
    sums_BN = jnp.einsum("bnm,bm->bn", q_BNM, k_BNM.sum(axis=1))
    products_BMK = jnp.einsum("bnm,bnk->bmk", k_BNM, v_BNK)
    return jnp.einsum("bnm,bmk->bnk", q_BNM, products_BMK) / (sums_BN[..., None] + _EPS)


def _init_features(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Orthogonal rows of length sqrt(M)."""
    return math.sqrt(shape[0]) * nn.initializers.orthogonal()(key, shape, jnp.float32)


class TokenMixer(nn.Module):
    """Attention with one head from C to K channels, then an MLP: a layer of the token module.

    The values, not the tokens, are added to the output of attention. `kind` is one of
    TOKEN_MODULES. A transformer divides its logits by sqrt(C). A performer's random features (M, K)
    are in the collection CONSTANTS, drawn once by `init`. There is no dropout; in the authors' code
    a performer drops 10 % of its output and of its MLP's in training.

    Shapes: (B, N, C) -> (B, N, K), in `dtype`.
    Source: the authors' code, see the top of this module; Yuan et al. 2021, section 3.1.
    """

    kind: str
    width: int
    gelu: str
    norm_eps: float
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BNC: jax.Array) -> jax.Array:
        is_performer = self.kind == "performer"
        norm = partial(nn.LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        y_BNC = norm(name="norm_attention")(x_BNC)
        dense = partial(Dense, self.width, dtype=self.dtype)
        q_BNK, k_BNK, v_BNK = (
            dense(use_bias=is_performer, name=name)(y_BNC) for name in ("query", "key", "value")
        )
        if is_performer:
            shape = (self.width // _FEATURE_RATIO, self.width)
            features = self.variable(
                CONSTANTS, "random_features", lambda: _init_features(self.make_rng("params"), shape)
            )
            z_BNK = performer_attention(q_BNK, k_BNK, v_BNK, features.value).astype(self.dtype)
        else:
            q_BNK *= math.sqrt(self.width / x_BNC.shape[-1])  # attention divides by sqrt(K)
            z_BNK = dot_product_attention(*(x[:, :, None] for x in (q_BNK, k_BNK, v_BNK)))[:, :, 0]
        x_BNK = v_BNK + dense(name="out")(z_BNK)
        x_BNK = self.constrain(x_BNK, ("batch", None, None))
        mlp = Mlp(self.width, gelu=self.gelu, dtype=self.dtype, name="mlp")
        x_BNK += mlp(norm(name="norm_mlp")(x_BNK))
        return self.constrain(x_BNK, ("batch", None, None))


class TokensToToken(nn.Module):
    """The token module: three soft splits, with a `TokenMixer` after each of the first two.

    `remat` is a key of REMAT_POLICIES; the mixers get `fields`.

    Shapes: (B, H, W, channels) -> (B, H W / 16^2, 9 K).
    """

    remat: str
    fields: dict[str, Any]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        mixer = TokenMixer
        if self.remat != "none":
            mixer = nn.remat(TokenMixer, policy=REMAT_POLICIES[self.remat])
        x_BHWC = images
        for i, split in enumerate(SPLITS[:-1]):
            x_BHWC = soft_split(x_BHWC, split)
            x_BNC = rearrange(x_BHWC, "b h w c -> b (h w) c")
            x_BNK = mixer(**self.fields, name=f"mixer_{i}")(x_BNC)
            x_BHWC = rearrange(x_BNK, "b (h w) k -> b h w k", h=x_BHWC.shape[1])
        return rearrange(soft_split(x_BHWC, SPLITS[-1]), "b h w c -> b (h w) c")


# By the numbers of layers.
T2T_VARIANTS = {
    "7": Variant(256, 7, 512, 4),
    "10": Variant(256, 10, 512, 4),
    "12": Variant(256, 12, 512, 4),
    "14": Variant(384, 14, 1152, 6),
    "19": Variant(448, 19, 1344, 7),
    "24": Variant(512, 24, 1536, 8),
}
T2T_NAMES = tuple(f"T2T-ViT-{variant}" for variant in T2T_VARIANTS)


def t2t_fields(name: str) -> dict[str, Any]:
    """The fields of the model called `name`, e.g. "T2T-ViT-14".

    Raises:
      InputError: if it is not one of T2T_NAMES.
    """
    match = re.fullmatch(r"T2T-ViT-(\d+)", name)
    if match is None or match[1] not in T2T_VARIANTS:
        raise InputError(f"name={name!r}: no such T2T-ViT; {nearest(name, T2T_NAMES)}")
    fields = {"patch_size": STRIDE, "gelu": "exact", "norm_eps": 1e-5, "qkv_bias": False}
    return T2T_VARIANTS[match[1]]._asdict() | fields


class T2TViT(ViT):
    """ViT on the tokens of a token module, one for every 16 x 16 pixels.

    It has the fields of `ViT`. `token_module` is "performer" or "transformer", `token_width` the
    width K of its tokens. Of the options of blocks, only `gelu`, `norm_eps` and `remat` also apply
    to the layers of the token module; `remat_layers` does not count them. `patch_size` is always
    (16, 16). `pos_embed` may also be "sincos_1d", the default: fixed sinusoids of a token's number.

    The model has constants: `init` returns the collections "params" and "constants", with the
    performer's random features and the sinusoids. They are saved and exported with the parameters,
    but never trained; `apply` needs both collections.

    Raises: InputError for fields that contradict each other, or images of another size.
    """

    pos_embed: str = SINCOS_1D
    token_module: str = key("performer", "T2T-ViT: its layers", choices=TOKEN_MODULES)
    token_width: int = key(64, "T2T-ViT: width of its tokens", within=FROM_1)

    # The token module has one head and narrow tokens: tensor does not split it.
    split_params = ((r"mixer_\d/(\w+/)?\w+/kernel", (None, "fsdp")),)

    names = T2T_NAMES
    parse = staticmethod(t2t_fields)
    possible_names = T2T_NAMES
    embeds_patches = False
    takes_other_sizes = False  # its positions may be constants
    flops_by_sizes = None

    @classmethod
    def pos_embeds(cls) -> tuple[str, ...]:
        return tuple(POSITIONS)

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        return {"name": name, "token_width": 16} | VIT_VARIANTS["mu"]._asdict()

    def setup(self) -> None:
        super().setup()
        if self.position_class.collection == CONSTANTS:
            assert self.image_size is not None  # checked by find_faults
            positions = self.positions(self.image_size)
            table = self.variable(CONSTANTS, "pos_embedding", positions.init, None)
            self.pos_embedding = table.value
        fields = {
            "kind": self.token_module,
            "width": self.token_width,
            "gelu": self.gelu,
            "norm_eps": self.norm_eps,
            "dtype": self.dtype,
            "constrain": self.constrain,
        }
        self.stem = TokensToToken(self.remat, fields)

    def _embed(self, images: jax.Array) -> jax.Array:
        return self.embedding(self.stem(images))

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        del params
        return "the first tokens of a T2T-ViT come from attention over pixels, not from filters"

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults()
        if self.token_width % _FEATURE_RATIO:
            faults.append(
                f"token_width={self.token_width}: a performer has half as many random features; "
                "choose an even number"
            )
        if self.patch_size != (STRIDE, STRIDE):
            faults.append(f"patch_size={self.patch_size}: a T2T-ViT needs {STRIDE}")
        return faults
