"""Text towers, and the comparison of texts with images by features of a common width.

Axes: B images, K texts, T positions of a text, D width of a tower, E common width.
"""

import math
from functools import partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.layers import Context, EncoderFields

Rows = TypeVar("Rows", jax.Array, np.ndarray)


@struct.dataclass
class Causal:
    """Lets each token attend to itself and to those before it, as relative positions do."""

    def logits(self, q_BHNK: jax.Array) -> jax.Array:
        """The term added to the attention logits: (B, H, N, K) -> (B, H, N, N)."""
        shape = (*q_BHNK.shape[:3], q_BHNK.shape[2])
        seen_NN = jnp.tri(shape[2], dtype=bool)
        mask_NN = jnp.where(seen_NN, 0, -jnp.inf).astype(q_BHNK.dtype)
        return jnp.broadcast_to(mask_NN[None, None], shape)


class TextTower(EncoderFields, nn.Module):
    """The text tower of CLIP or of SigLIP: token ids (K, T) -> features (K, E), not normalised.

    Fields:
      causal: True for CLIP's: each token attends to those before it, and the head, without bias,
        takes the end token; so padding behind the end does not matter. False for SigLIP's: every
        token attends to all, and the head, with bias, takes the last position; so the padding's id
        and its side belong to the model.
      end_id: the end token is the first of this id, or position 0 if there is none; None: the
        largest id of the text.

    Methods: "tokens" -> (K, T, D), the encoder's output. T is at most `length`.
    Sources: Radford et al. 2021 (arXiv:2103.00020), section 2.4; Zhai et al. 2023
      (arXiv:2303.15343), section 3; github.com/openai/CLIP for the start values.
    """

    vocabulary: int = key(..., "number of token ids", within=fields.FROM_1)
    length: int = key(..., "positions of a text", within=fields.FROM_1)
    common_width: int = key(..., "of the features of texts and images", within=fields.FROM_1)
    causal: bool = key(..., "a causal mask, and the end token is pooled; False: the last position")
    end_id: int | None = key(None, "id of the end token; None: the largest id of a text")

    def setup(self) -> None:
        normal = nn.initializers.normal
        self.token_embedding = nn.Embed(
            self.vocabulary, self.width, dtype=self.dtype, embedding_init=normal(0.02)
        )
        self.pos_embedding = self.param("pos_embedding", normal(0.01), (self.length, self.width))
        self.encoder = self.make_encoder()
        self.head = nn.Dense(self.common_width, use_bias=not self.causal)

    def tokens(self, ids_KT: jax.Array, *, train: bool = False) -> jax.Array:
        """The encoder's output (K, T, D), normalised."""
        positions_TD = self.pos_embedding[: ids_KT.shape[1]].astype(self.dtype)
        x_KTD = self.token_embedding(ids_KT) + positions_TD[None]
        x_KTD = self.constrain(x_KTD, ("batch", None, None))
        context = Context(Causal() if self.causal else None)
        return self.encoder(x_KTD, context=context, train=train)

    @property
    def num_tokens(self) -> int:
        return self.length

    @property
    def attention_shape(self) -> Any:
        return "texts add a causal mask to the logits" if self.causal else super().attention_shape

    def __call__(self, ids_KT: jax.Array, *, train: bool = False) -> jax.Array:
        pooled_K = jnp.full_like(ids_KT[:, 0], ids_KT.shape[1] - 1)
        if self.causal:
            is_end = ids_KT if self.end_id is None else ids_KT == self.end_id
            pooled_K = is_end.argmax(axis=1)  # the first
        x_KTD = self.tokens(ids_KT, train=train)
        # Not take_along_axis, which jax2onnx 0.13 cannot convert with jax 0.12.
        is_pooled_KT = jnp.arange(ids_KT.shape[1])[None] == pooled_K[:, None]
        return self.head(jnp.where(is_pooled_KT[..., None], x_KTD, 0).sum(axis=1))


class Matcher(nn.Module):
    """Compares texts with images by the features of an image tower.

    Shapes: features (B, D), token ids (K, T) -> logits (B, K).

        logits = scale * cosine of the features of image and text + logit_bias
        scale = min(exp(logit_scale), max_scale)

    Fields:
      image_width: D of the images' features, if they are projected to the common width.
      has_bias: whether there is a logit_bias, for the sigmoid of each pair (SigLIP); without one,
        texts compete by the softmax (CLIP).
      max_scale: the factor of the cosines is at most this; None: any.

    Methods: "image_features" (B, D) -> (B, E) and "text_features", ids (K, T) -> (K, E), not
    normalised.
    Sources: Radford et al. 2021 (arXiv:2103.00020), figure 3; Zhai et al. 2023 (arXiv:2303.15343),
      algorithm 1; their start values.
    """

    text: TextTower
    image_width: int | None
    has_bias: bool
    max_scale: float | None = None

    def setup(self) -> None:
        if self.image_width is not None:
            self.image_head = nn.Dense(self.text.common_width, use_bias=False)
        scale = math.log(10.0 if self.has_bias else 1 / 0.07)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(scale), ())
        if self.has_bias:
            self.logit_bias = self.param("logit_bias", nn.initializers.constant(-10.0), ())

    def image_features(self, x_BD: jax.Array) -> jax.Array:
        return x_BD if self.image_width is None else self.image_head(x_BD)

    def text_features(self, ids_KT: jax.Array, *, train: bool = False) -> jax.Array:
        return self.text(ids_KT, train=train)

    def __call__(self, x_BD: jax.Array, ids_KT: jax.Array, *, train: bool = False) -> jax.Array:
        images_BE = unit(self.image_features(x_BD))
        texts_KE = unit(self.text_features(ids_KT, train=train))
        logits_BK = self.scale_of(self.logit_scale) * images_BE @ texts_KE.T
        return logits_BK + self.logit_bias if self.has_bias else logits_BK

    @nn.nowrap
    def bound(self, log_scale: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        """The `logit_scale` that counts, for the value of the parameter."""
        if self.max_scale is None:
            return log_scale
        return _at_most(log_scale, math.log(self.max_scale))

    @nn.nowrap
    def scale_of(self, log_scale: jax.typing.ArrayLike) -> jax.Array:
        """The factor of the cosines, for the value of the parameter `logit_scale`."""
        return jnp.exp(self.bound(log_scale))

    @property
    def loss(self) -> str:
        """The loss that turns its logits into probabilities of the texts."""
        return "sigmoid" if self.has_bias else "softmax"

    @property
    def example_inputs(self) -> tuple[jax.Array, jax.Array]:
        """Inputs that give the parameters their shapes: features (1, D), token ids (1, T)."""
        width = self.image_width or self.text.common_width
        return jnp.zeros((1, width)), jnp.zeros((1, self.text.length), jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _at_most(x: jax.typing.ArrayLike, most: float) -> jax.Array:
    """min(x, most); above `most` only a gradient that lowers x passes, as if x were clipped."""
    return jnp.minimum(x, most)


_at_most.defvjp(
    lambda x, most: (_at_most(x, most), x > most),
    lambda most, is_above, grad: (jnp.where(is_above, jnp.maximum(grad, 0), grad),),
)


def unit(x_BE: Rows) -> Rows:
    """The rows of `x_BE`, of JAX or NumPy, with length 1; rows of zeros stay zero."""
    own = x_BE.__array_namespace__()
    squares_B1 = own.square(x_BE).sum(axis=-1, keepdims=True)
    return x_BE / own.sqrt(own.where(squares_B1 > 0, squares_B1, 1))  # the gradient of 0 is finite
