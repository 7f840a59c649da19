"""The Vision Transformer.

Axes: B images, N tokens, D width, C classes.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import collect_faults
from vit_jax.base.pictures import Images, Pictures
from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.attention import NORMS
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.contract import AttentionShape, Model, SplitLayer
from vit_jax.models.dense import Dense
from vit_jax.models.dropout import Dropout
from vit_jax.models.fields import check_image_shape, find_undivided
from vit_jax.models.layers import BlockFields, Context, Encoder, EncoderBlock, MapHead, split_blocks
from vit_jax.models.own_shapes import mean_of_first
from vit_jax.models.patches import count_kept, extract_patches, take_after
from vit_jax.models.picture_fields import PictureFields
from vit_jax.models.position import PLACES, PositionChoice, PositionEmbedding
from vit_jax.models.rotary import RotaryFields
from vit_jax.models.variants import VIT_NAMES, VIT_VARIANTS, vit_fields
from vit_jax.models.vit_flops import count_flops

HEAD_NORM_EPS = 1e-6
_HEAD_MOMENTUM = 0.9  # of the running statistics before the head
POOLS = ("token", "gap", "token_gap", "map")


class ViT(BlockFields, RotaryFields, PositionChoice, PictureFields, Model):
    """Vision Transformer: images (B, H, W, channels) in its value range -> logits (B, C), float32.

    It takes `Pictures` in place of images. In training (`train=True`), dropout and stochastic depth
    need the random stream `dropout`.

    Fields:
      num_classes: C; with None the model has no head and `__call__` returns the features.
      image_size: height and width in pixels. It may be None if no positions are learned; the model
        then takes any image size that the patch size divides.
      pool: "token" (the class token), "gap" (mean over the patches), "token_gap" (both, one after
        the other: 2 D values) or "map" (attention pooling over the patches).
      class_token: whether a learned token precedes the patches; None adds it if `pool` needs it.
      registers: number of learned tokens between class token and patches; they have no learned
        positions (Darcet et al. 2023, arXiv:2309.16588).
      pre_norm: normalise the tokens, with their positions, before the first layer.
      norm_pooled: normalise the pooled representation instead of the tokens.
      head_batch_norm: normalise the head's input by its mean and variance over the batch, without
        scale and shift, as in the linear probes of self-supervised models. Such a model has batch
        statistics: see `EfficientNet`.
      hidden_head: add a dense layer of width D with tanh before the linear one, as in pretraining.
      pos_embed_at: where positions are added: "stem", before the first layer; "layers", at the
        input of every layer, each layer with its own tables; "layers_shared", the same with one
        set of tables for all layers. None means "stem", or "layers" for relative positions, which
        act inside attention.
      pos_embed_class_token: whether the class token has a learned position too.
      rotary, ...: rotary positions; see `RotaryFields`. max_tokens, ...: see `PictureFields`.
      parallel, qk_norm, layer_scale, lora_rank, gated_mlp, mlp_norm: options of the encoder blocks
        (`layers.EncoderBlock`, `Attention`, `LayerScale`, `LoraProduct`, `Mlp`), off by default;
        the pooling head has none of them.
      keep_tokens: the share of the patches that pass through the encoder in training, drawn for
        each image and step (Liu et al. 2022, arXiv:2208.07220); evaluation sees all.
      scan, remat, remat_layers: see `layers.Encoder`.
      norm, norm_eps, qkv_bias: apply to the whole model, the pooling head included.
      ops: how the blocks compute; see `block_ops.BlockOps`.

    Methods: "tokens" -> (B, N, D), the encoder's output, the class token first if there is one;
      "features" -> (B, D), the input of the head; "pre_logits" -> (B, D), the output of the head's
      hidden layer, which a model without classes may also have. For objectives that hide or change
      patches: tokens = encode(embed(images)), features = represent(tokens).
    Raises: InputError for fields that contradict each other, or images of another size.
    """

    num_classes: int | None = key(..., **fields.NUM_CLASSES)
    image_size: tuple[int, int] | None = key(..., "of the images")
    patch_size: tuple[int, int] = key(..., "of a patch in pixels")
    width: int = key(..., "of a token", within=fields.FROM_1)
    depth: int = key(..., "number of layers", within=fields.FROM_1)
    patch_bias: bool = key(True, "bias of the embedding of patches")
    pool: str = key("token", "what the head classifies", choices=POOLS)
    class_token: bool | None = key(None, "a token before the patches; None: if `pool` needs it")
    registers: int = key(0, "learned tokens without positions", within="[0, inf)")
    pre_norm: bool = key(False, "a norm before the first layer")
    norm_pooled: bool = key(False, "final norm after pooling instead of before")
    hidden_head: bool = key(False, "a hidden layer before the last linear layer")
    head_bias: float = key(0.0, **fields.HEAD_BIAS)
    head_batch_norm: bool = key(False, "normalise the head's input over the batch")
    pos_embed: str = key("learned_1d", "positions of the patches")
    pos_embed_at: str | None = key(None, "None: as pos_embed needs", choices=PLACES)
    pos_embed_class_token: bool = key(True, "False: only patches have positions")
    stochastic_depth: float = key(0.0, **fields.STOCHASTIC_DEPTH)
    uniform_depth: bool = key(False, "all layers have the rate stochastic_depth")
    keep_tokens: float = key(1.0, "share of the patches that training encodes", within="(0, 1]")
    scan: bool = key(False, **fields.SCAN)
    remat: str = key("none", **fields.REMAT)
    remat_layers: int | None = key(None, "so many first layers recompute; None: all")
    channels: int = key(3, "of the images", within=fields.FROM_1)

    names = VIT_NAMES
    parse = staticmethod(vit_fields)
    block_class: ClassVar[type[nn.Module]] = EncoderBlock  # of each of the `depth` blocks
    sums_of_block: ClassVar[int] = 2  # see `layers.split_blocks`
    embeds_patches = True
    takes_other_sizes = True

    def setup(self) -> None:
        # The reference embeds patches by a convolution: initialise as it does, not as `Dense`.
        self.embedding = nn.Dense(
            self.width,
            use_bias=self.patch_bias,
            dtype=self.dtype,
            kernel_init=nn.initializers.lecun_normal(),
        )
        self.prefix_tokens = self._make_prefix_tokens()
        self.pos_embedding, of_layers = None, None
        if self.position_class.collection == "params":
            assert self.image_size is not None  # checked by find_faults
            positions = self.positions(self.image_size)
            if self.positions_at == "layers":
                of_layers = positions
            else:
                self.pos_embedding = self.param("pos_embedding", positions.init)
        norm = partial(NORMS[self.norm], epsilon=self.norm_eps, dtype=self.dtype)
        if self.pre_norm:
            self.embedding_norm = norm()
        if self.norm_pooled:
            self.pooled_norm = norm()
        self.embedding_dropout = Dropout(self.dropout, self.ops.draw_bytes)
        self.encoder = Encoder(
            **self.block_fields(),
            depth=self.depth,
            stochastic_depth=self.stochastic_depth,
            uniform_depth=self.uniform_depth,
            positions=of_layers,
            final_norm=not self.norm_pooled,
            scan=self.scan,
            remat=self.remat,
            remat_layers=self.remat_layers,
            block_class=self.block_class,
        )
        if self.pool == "map":
            self.map_head = MapHead(**self.block_fields())
        if self.hidden_head:
            self.head_hidden = Dense(self.width, dtype=self.dtype)
        if self.num_classes is not None:
            self.head = self._make_head(self.num_classes)
            if self.head_batch_norm:
                self.head_norm = BatchNorm(_HEAD_MOMENTUM, HEAD_NORM_EPS, affine=False)

    @nn.nowrap
    def _make_prefix_tokens(self) -> list[jax.Array]:
        """Create the learned tokens, each (1, 1, D), that precede the patches."""
        tokens = []
        if self.has_class_token:
            tokens.append(self.param("class_token", nn.initializers.zeros, (1, 1, self.width)))
        if self.registers:
            normal = nn.initializers.normal(0.02)
            tokens.append(self.param("register_tokens", normal, (1, self.registers, self.width)))
        return tokens

    @nn.nowrap
    def _make_head(self, num_classes: int) -> nn.Module:
        return nn.Dense(
            num_classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(self.head_bias),
        )

    def tokens(self, images: Images, *, train: bool = False) -> jax.Array:
        """The encoder's output (B, N, D), normalised unless `norm_pooled` (Eqs. 1-4)."""
        return self.encode_all(images, train)[0]

    def embed(self, images: Images) -> jax.Array:
        """The patches of the images as tokens without positions (B, N, D), N = rows x columns.

        Objectives replace patches, for example by a mask token, before `encode` adds the
        positions.
        """
        if isinstance(images, Pictures):
            patches = self.flat_patches(images, self.patch_size, self.channels)
            return self.constrain(self.embedding(patches.astype(self.dtype)), ("batch", None, None))
        check_image_shape(images.shape, self.image_size, self.channels)
        image_size = self.image_size or images.shape[1:3]
        collect_faults(find_undivided(image_size, self.patch_size, self.token_stride))
        return self.constrain(self._embed(images.astype(self.dtype)), ("batch", None, None))

    def encode(
        self,
        x_BND: jax.Array,
        *,
        keep: jax.Array | None = None,
        image_size: tuple[int, ...] | None = None,
        pictures: Pictures | None = None,
        counts_B: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """The encoder's output for patches from `embed`: prefix tokens and positions are added.

        Args:
          x_BND: all patches of the images, in raster order, without positions.
          keep: (B, M) int32, the raster indices of the patches that go through the encoder, in the
            order in which they come out; the prefix tokens always do. None: all patches.
          image_size: height and width of the images in pixels; None: `image_size` of the model.
          pictures: those cut into the patches; None: the patches are of images.
          counts_B: how many first patches of `keep` count, of pictures.
          train: whether dropout and stochastic depth are on.

        Returns:
          (B, P + N, D), or (B, P + M, D) with `keep`; the P prefix tokens come first.

        Raises:
          InputError: `keep` is given, but the model needs all patches; see `find_keep_faults`.
        """
        if keep is not None:
            collect_faults(self.find_keep_faults())
        image_size = self.image_size if image_size is None else image_size
        assert image_size is not None
        x_BND, context = self.place_all(x_BND, keep, image_size, pictures, counts_B, train)
        grid = self.grid_of(image_size) if self.needs_grid else None
        return self.encoder(x_BND, grid=grid, context=context, train=train)

    @nn.nowrap
    def place_all(
        self, x_BND: jax.Array, keep: jax.Array | None, image_size: tuple[int, ...],
        pictures: Pictures | None, counts_B: jax.Array | None, train: bool,
    ) -> tuple[jax.Array, Context]:  # fmt: skip
        """The input of the first layer, and the context of all layers; arguments of `encode`."""
        if self.prefix_tokens:
            prefix_1ND = jnp.concatenate(self.prefix_tokens, axis=1)
            rows = x_BND.shape[0]  # in an export, a number that is not known
            prefix_BND = self.ops.repeat(prefix_1ND, rows, self.dtype)
            prefix_BND = jnp.tile(prefix_BND, (rows // prefix_BND.shape[0], 1, 1))
            x_BND = jnp.concatenate([prefix_BND, x_BND], axis=1)
        shared, acts_on = None, self.position_class.acts_on
        if self.positions_at != "layers":
            given = self.pos_embedding, pictures, self.pos_filter
            shared = self.positions(image_size).build_checked(*given)
        if acts_on == "tokens" and self.positions_at == "stem":
            assert shared is not None
            if pictures is None:
                shared = self.ops.repeat(shared, x_BND.shape[0], self.dtype)
            x_BND, shared = x_BND + shared.astype(self.dtype), None
        sizes = self.num_prefix_tokens, self.registers, self.width // self.num_heads
        turns = self.make_turns(pictures or self.grid_of(image_size), *sizes, train)
        if acts_on == "turns":
            turns, shared = shared, None
        if keep is not None:
            x_BND = take_after(self.num_prefix_tokens, x_BND, keep)
            shared, turns = (
                x if x is None else take_after(self.num_prefix_tokens, x, keep)
                for x in (shared, turns)
            )
        if self.pre_norm:
            x_BND = self.embedding_norm(x_BND)
        x_BND = self.embedding_dropout(x_BND, ("batch", None, None), train=train)
        x_BND = self.constrain(x_BND, ("batch", None, None))
        if pictures is None:
            return x_BND, Context(shared, turns)
        counts_B = pictures.counts if counts_B is None else counts_B
        return x_BND, Context(shared, turns, self.num_prefix_tokens + counts_B)

    def _embed(self, images: jax.Array) -> jax.Array:
        """Embed each patch of the images as a token: the first part of Eq. 1."""
        return self.embedding(extract_patches(images, self.patch_size))

    def features(self, images: Images, *, train: bool = False) -> jax.Array:
        """The pooled representation: class token, mean of the patches, or attention pool.

        Shapes: -> (B, D); (B, 2 D) with `pool` token_gap.
        """
        x_BND, counts_B = self.encode_all(images, train)
        return self.represent(x_BND, counts_B)

    def represent(self, x_BND: jax.Array, counts_B: jax.Array | None = None) -> jax.Array:
        """The features (B, D) of the encoder's output (B, N, D); see `features`.

        `counts_B`: so many first patches of each picture count; None: all.
        """
        patches_BND = x_BND[:, self.num_prefix_tokens :]
        if self.pool == "map":
            x_BD = self.map_head(patches_BND, counts_B)
        else:
            pooled = {"token": x_BND[:, 0], "gap": mean_of_first(patches_BND, counts_B)}
            x_BD = jnp.concatenate([pooled[kind] for kind in self.pool.split("_")], axis=1)
        return self.pooled_norm(x_BD) if self.norm_pooled else x_BD

    def pre_logits(self, images: Images, *, train: bool = False) -> jax.Array:
        """The features (B, D) after the head's hidden layer; the features if there is none."""
        return self._hidden(self.features(images, train=train))

    def _hidden(self, x_BD: jax.Array) -> jax.Array:
        return jnp.tanh(self.head_hidden(x_BD)) if self.hidden_head else x_BD

    def __call__(
        self, images: Images, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x_BD = self.features(images, train=train)
        y_BD = self._hidden(x_BD)  # if there are no classes, only creates its parameters
        if self.num_classes is None:
            return x_BD
        if self.head_batch_norm:
            y_BD = self.head_norm(y_BD[:, None, None], mask, train)[:, 0, 0]
        return self.head(y_BD)

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        start, _, patch = name.rpartition("/")
        return {"name": f"{start.rpartition('-')[0]}-mu/{patch}"}

    @property
    def possible_names(self) -> Sequence[str]:
        start = self.names[0].rpartition("-")[0]
        return [f"{start}-{variant}/{self.patch_size[0]}" for variant in VIT_VARIANTS]

    @property
    def is_random(self) -> bool:
        return super().is_random or self.rotary_is_random

    @property
    def needs_grid(self) -> bool:
        return self.block_class is not EncoderBlock

    @property
    def has_batch_statistics(self) -> bool:
        """Whether the rows of a training batch depend on each other."""
        return self.head_batch_norm

    @property
    def token_stride(self) -> tuple[int, int]:
        """Height and width in pixels of the image area behind one token."""
        return self.patch_size

    @property
    def has_class_token(self) -> bool:
        """Whether a class token precedes the patches."""
        return "token" in self.pool if self.class_token is None else self.class_token

    @property
    def num_named_tokens(self) -> int:
        """Number of tokens before the registers and the patches."""
        return int(self.has_class_token)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return self.num_named_tokens + self.registers

    @property
    def num_prefix_positions(self) -> int:
        """Number of the first prefix tokens that have entries in a table of positions."""
        has_table = self.position_class.collection != ""
        return self.num_named_tokens if has_table and self.pos_embed_class_token else 0

    @nn.nowrap
    def positions(self, image_size: tuple[int, ...]) -> PositionEmbedding:
        """The position embedding for images of that size."""
        prefix = self.num_prefix_tokens, self.num_prefix_positions
        return self.position_class(self.grid_of(image_size), *prefix, self.width, self.num_heads)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one image; the model must have an image size."""
        return self.num_patches + self.num_prefix_tokens

    @property
    def num_patches(self) -> int:
        """Number of patches of one image, padding included."""
        return math.prod(self.grid) if self.max_tokens is None else self.max_tokens

    @property
    def num_tokens_in_training(self) -> int:
        """Number of tokens of one image that training encodes, prefix included; see `pack`."""
        sizes = self.pack or (self.num_patches,)
        kept = sum(count_kept(number, self.keep_tokens) for number in sizes)
        return -(-kept // len(sizes)) + self.num_prefix_tokens

    @property
    def attention_shape(self) -> AttentionShape | str:
        tokens = None if self.image_size is None else self.num_tokens_in_training
        head, relative = self.width // self.num_heads, self.position_class.acts_on == "logits"
        return AttentionShape(self.num_heads, head, tokens, self.attention_dropout, relative)

    @property
    def num_pooled_tokens(self) -> int:
        return int(self.pool == "token")

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The columns of the patch embedding."""
        return params["embedding/kernel"].reshape(*self.patch_size, self.channels, -1)

    @property
    def block_bytes(self) -> int:
        hidden = self.mlp_dim * (1 + self.gated_mlp)
        tokens = self.num_tokens_in_training
        return 4 * tokens * (hidden + self.num_heads * tokens)

    @property
    def flops_by_sizes(self) -> int | None:
        """See `Model` and `vit_flops`; None with relative positions, or `pack`."""
        return None if self.position_class.acts_on == "logits" or self.pack else count_flops(self)

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer]:
        recomputed = self.depth if self.remat_layers is None else self.remat_layers
        values = (self.num_tokens_in_training if tokens is None else tokens) * self.width
        recomputed *= self.remat != "none"
        return split_blocks(self.depth, recomputed, values, self.sums_of_block)

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults() + self.find_position_faults() + self.find_picture_faults()
        if "token" in self.pool and self.class_token is False:
            faults.append(f"class_token=False: pool={self.pool!r} needs it; choose pool gap or map")
        if self.pool == "token_gap" and (self.norm_pooled or self.hidden_head):
            faults.append(
                "pool='token_gap': it gives 2 D values, which norm_pooled and hidden_head do not "
                "take; set them to False"
            )
        if 0 < self.keep_tokens < 1:
            faults += [f"keep_tokens={self.keep_tokens}: {f}" for f in self.find_keep_faults()]
        if self.num_heads > 0:
            faults += self.find_rotary_faults(self.width // self.num_heads, self.registers)
        if self.lora_rank is not None and not 1 <= self.lora_rank <= self.width:
            faults.append(
                f"lora_rank={self.lora_rank}: needs a number from 1 to width={self.width}, or None"
            )
        if self.remat_layers is not None and not 0 <= self.remat_layers <= self.depth:
            faults.append(
                f"remat_layers={self.remat_layers}: needs a number from 0 to depth={self.depth}, "
                "or None"
            )
        if self.image_size is not None:
            faults += find_undivided(self.image_size, self.patch_size, self.token_stride)
        if self.num_heads > 0 and self.width % self.num_heads:
            faults.append(
                f"num_heads={self.num_heads} does not divide width={self.width}; "
                "choose one that does"
            )
        return faults
