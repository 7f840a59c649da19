"""A decoder that reads the tokens of an image and writes its caption.

Axes: B captions, T positions of a caption, M tokens of an image, C token ids, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.attention import NORMS, Attention
from vit_jax.models.dense import Dense, multiply_to_float32
from vit_jax.models.layers import NO_CONTEXT, Context, EncoderBlock, EncoderFields
from vit_jax.models.text import Causal


@struct.dataclass
class Sight:
    """Which tokens of its caption a position attends to, as relative positions of attention.

    is_parallel_B: whether it attends to all, else only to itself and those before it.
    """

    is_parallel_B: jax.Array

    def logits(self, q_BHTK: jax.Array) -> jax.Array:
        """The term added to the logits of attention to the caption: -> (B, H, T, T)."""
        causal_BHTT = Causal().logits(q_BHTK)
        return jnp.where(self.is_parallel_B[:, None, None, None], 0, causal_BHTT)


class DecoderBlock(EncoderBlock):
    """Pre-norm block of a decoder: attention to the caption, to the image, then an MLP.

    The projections of attention have no biases. Its `context` holds a `Sight` as positions, and the
    tokens of the image, whose width may differ from its own; captions have no padding, no turns.

    Shapes: (B, T, D) -> ((B, T, D), None).
    Source: Tschannen et al. 2023 (arXiv:2306.07915), section 3, and its published code.
    """

    @nn.compact
    def __call__(
        self,
        x_BND: jax.Array,
        drop_rate: float | jax.Array,
        train: bool,
        context: Context = NO_CONTEXT,
    ) -> tuple[jax.Array, None]:
        assert context.image_BMD is not None
        norm = partial(NORMS[self.norm], epsilon=self.norm_eps, dtype=self.dtype)
        add = partial(self.add, drop_rate=drop_rate, train=train)
        unbiased = {"qkv_bias": False, "out_bias": False}
        attention = partial(Attention, **self.block_fields(Attention) | unbiased)
        y_BND = norm(name="norm_attention")(x_BND)
        x_BND = add(x_BND, attention(name="attention")(y_BND, y_BND, relative=context.positions))
        y_BND = norm(name="norm_image")(x_BND)
        x_BND = add(x_BND, attention(name="image_attention")(y_BND, context.image_BMD))
        return add(x_BND, self.mlp_branch(norm(name="norm_mlp")(x_BND), train)), None


class Captioner(EncoderFields, nn.Module):
    """Predicts the tokens of captions from the tokens of their images.

    A position sees the caption's tokens before it or, of a row that is predicted in parallel, none:
    all its inputs are the mask token, and all positions attend to each other.

    Shapes: images (B, M, their width), ids (B, T), T at most `length` -> logits (B, T, C), float32.
    Source: Tschannen et al. 2023 (arXiv:2306.07915), section 3, and its published code, where the
      id of padding also begins the inputs.
    """

    image_width: int = key(..., "of the image's tokens", within=fields.FROM_1)
    vocabulary: int = key(..., "number of token ids", within=fields.FROM_1)
    length: int = key(..., "positions of a caption", within=fields.FROM_1)
    pad_id: int = key(..., "id of the first input")

    block_class = DecoderBlock
    sums_of_block: ClassVar[int] = 3

    def setup(self) -> None:
        normal = nn.initializers.normal(0.02)
        self.token_embedding = nn.Embed(
            self.vocabulary + 1, self.width, dtype=self.dtype, embedding_init=normal
        )
        self.pos_embedding = self.param("pos_embedding", normal, (self.length, self.width))
        self.encoder = self.make_encoder()
        self.head = Dense(
            self.vocabulary, dtype=self.dtype, kernel_init=nn.initializers.lecun_normal(),
            multiply=multiply_to_float32,
        )  # fmt: skip

    def __call__(
        self,
        image_BMD: jax.Array,
        ids_BT: jax.Array,
        is_parallel_B: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        if is_parallel_B is None:
            is_parallel_B = jnp.zeros(len(ids_BT), bool)
        before_BT = jnp.pad(ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=self.pad_id)
        inputs_BT = jnp.where(is_parallel_B[:, None], self.vocabulary, before_BT)
        positions_TD = self.pos_embedding[: ids_BT.shape[1]].astype(self.dtype)
        x_BTD = self.token_embedding(inputs_BT) + positions_TD[None]
        x_BTD = self.constrain(x_BTD, ("batch", None, None))
        context = Context(Sight(is_parallel_B), image_BMD=image_BMD.astype(self.dtype))
        x_BTD = self.encoder(x_BTD, context=context, train=train)
        return self.head(x_BTD)

    @property
    def num_tokens(self) -> int:
        return self.length

    @property
    def attention_shape(self) -> str:
        return "captions add a causal mask to the logits"

    @property
    def example_inputs(self) -> tuple[jax.Array, jax.Array]:
        """Inputs that give the parameters their shapes: tokens (1, 1, width), ids (1, T)."""
        return jnp.zeros((1, 1, self.image_width)), jnp.zeros((1, self.length), jnp.int32)


class CaptionSide(NamedTuple):
    """The part of a model that writes captions: all but its image tower.

    params: {leaf name: float32 array} of `captioner`.
    read_tokenizer: gives the model's `data.tokenizers.Tokenizer`.
    files, by_files: as in `zero_shot.TextSide`.
    """

    captioner: Captioner
    params: Mapping[str, np.ndarray]
    read_tokenizer: Callable[[], Any]
    files: Sequence[Any] = ()
    by_files: bool = True


def most_probable(
    captioner: Captioner,
    variables: Any,
    image_BMD: jax.Array,
    *,
    end_id: int,
    beams: int,
    top: int,
) -> tuple[jax.Array, jax.Array]:
    """The most probable captions that a beam search finds: ids (B, top, T), log probabilities.

    In each step the search keeps the `beams` most probable beginnings of an image, K of them; with
    one it is greedy. A caption ends with `end_id`, or at its last position. The search ends when
    the `top` best are complete, as no other can overtake them.

    Source: Graves 2012 (arXiv:1211.3711), section 2.5, for texts without blanks.
    """
    (B, *_), K, T, C = image_BMD.shape, beams, captioner.length, captioner.vocabulary
    images = jnp.repeat(image_BMD, K, axis=0)
    after_end_C = jnp.where(jnp.arange(C) == end_id, 0.0, -jnp.inf)  # only more ends

    def is_open(carry: Any) -> jax.Array:
        position, _, _, ended_BK = carry
        return (position < T) & ~ended_BK[:, :top].all()

    def extend(carry: Any) -> Any:
        position, ids_BKT, score_BK, ended_BK = carry
        logits = captioner.apply(variables, images, ids_BKT.reshape(B * K, T))
        logits = jax.lax.dynamic_index_in_dim(logits, position, axis=1, keepdims=False)
        logs_BKC = jax.nn.log_softmax(logits).reshape(B, K, C)
        logs_BKC = jnp.where(ended_BK[:, :, None], after_end_C[None, None], logs_BKC)
        total = (score_BK[:, :, None] + logs_BKC).reshape(B, K * C)
        score_BK, chosen_BK = jax.lax.top_k(total, K)
        beam_BK, id_BK = chosen_BK // C, chosen_BK % C
        ids_BKT = jnp.take_along_axis(ids_BKT, beam_BK[:, :, None], axis=1)
        ids_BKT = ids_BKT.at[:, :, position].set(id_BK)
        return position + 1, ids_BKT, score_BK, id_BK == end_id

    ids_BKT = jnp.full((B, K, T), end_id)
    score_BK = jnp.tile(jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf)[None], (B, 1))
    start = (jnp.zeros((), jnp.int32), ids_BKT, score_BK, jnp.zeros((B, K), bool))
    _, ids_BKT, score_BK, _ = jax.lax.while_loop(is_open, extend, start)
    return ids_BKT[:, :top], score_BK[:, :top]
