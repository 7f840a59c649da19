"""Masked autoencoders: an encoder sees a quarter of the patches, a small decoder draws the rest.

Axes: B images, N patches, V visible ones, H hidden ones, T tokens of the encoder: its prefix tokens
and V patches; D width of the encoder, W width of the decoder, P values of a patch.
Source: He et al. 2021 (arXiv:2111.06377), section 3.
"""

import dataclasses
import math
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.pictures import Images, Pictures
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import POSITIVE, Settings, key
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import Model
from vit_jax.models.layers import NO_CONTEXT, Context, EncoderFields
from vit_jax.models.own_shapes import mean_of_first
from vit_jax.models.patches import (
    as_images,
    extract_patches,
    random_order,
    random_parts,
    row_keys,
    take,
    take_once,
)
from vit_jax.models.position import sincos_2d, sincos_of_pictures
from vit_jax.objectives import patches
from vit_jax.objectives.contract import (
    InForm,
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    TokenPass,
    as_it_is,
    sums_of_rows,
)
from vit_jax.objectives.patches import Reconstruction

_EPS = 1e-6  # added to the variance of a patch


class Decoder(EncoderFields, nn.Module):
    """Predicts hidden patches from the encoder's output for the visible ones.

    Visible tokens and one learned token for every hidden patch get fixed sine-cosine positions and
    pass through `depth` blocks; a prefix token gets none. The patches stay in the order of
    `order_BN`: all layers but the positions ignore it. Those of `pictures` in their own shape go
    back to raster order, so that padding comes last and no patch attends to it.

    Shapes: tokens (B, T, D), order (B, N) of raster indices, the visible patches first
      -> (B, H, num_outputs), float32, for the hidden patches in their order.
    Source: He et al. 2021 (arXiv:2111.06377), section 3, and its published code for the positions.
    """

    grid: tuple[int, int]
    max_tokens: int | None
    num_prefix: int
    num_outputs: int

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        order_BN: jax.Array,
        pictures: Pictures | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        visible = x_BTD.shape[1] - self.num_prefix
        x_BTW = nn.Dense(self.width, dtype=self.dtype, name="embedding")(x_BTD)
        token = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, self.width))
        hidden = (x_BTD.shape[0], order_BN.shape[1] - visible, 1)
        tokens_BHW = jnp.tile(token.astype(self.dtype), hidden)
        x_BNW = jnp.concatenate([x_BTW[:, self.num_prefix :], tokens_BHW], axis=1)
        context, span = NO_CONTEXT, self.width // 4
        if pictures is None:
            table_NW = jnp.asarray(sincos_2d(self.grid, self.width, span))
            x_BNW += jnp.take(table_NW, order_BN, axis=0).astype(self.dtype)
        else:
            x_BNW = take_once(x_BNW, jnp.argsort(order_BN, axis=1))
            x_BNW += sincos_of_pictures(pictures, self.width, span).astype(self.dtype)
            context = Context(num_keys_B=self.num_prefix + pictures.counts)
        x_BNW = jnp.concatenate([x_BTW[:, : self.num_prefix], x_BNW], axis=1)
        x_BNW = self.constrain(x_BNW, ("batch", None, None))
        encoder = self.make_encoder("encoder")
        x_BNW = encoder(x_BNW, context=context, train=train)
        if pictures is None:
            x_BHW = x_BNW[:, self.num_prefix + visible :]
        else:
            x_BHW = take_once(x_BNW[:, self.num_prefix :], order_BN[:, visible:])
        head = nn.Dense(self.num_outputs, dtype=self.dtype, name="head")
        return head(x_BHW).astype(jnp.float32)

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + (self.max_tokens or math.prod(self.grid))


class Mae(ObjectivePart):
    """Predicts hidden patches from the visible ones, with the decoder as its own parameters.

    The loss of an image is the mean squared error over the values of its hidden patches. Only the
    visible patches, and the prefix tokens, pass through the encoder. Pictures in their own shape
    hide this share of their own patches; at least one patch stays visible.
    """

    takes_pictures = True
    fewest_images = 5000

    mask_ratio: float = key(0.75, "share of the patches that are hidden", within="(0, 1)")
    norm_pixels: bool = key(True, "normalise each patch to predict by its mean and deviation")
    decoder_width: int = key(512, "width of the decoder's tokens", within="[8, inf)")
    decoder_depth: int = key(8, "number of its layers", within=POSITIVE)
    decoder_heads: int = key(16, "heads of attention in each of its layers", within=POSITIVE)
    decoder_mlp_dim: int | None = key(
        None, "hidden width of its MLPs; None: 4 times the width", within=POSITIVE
    )

    def check(self) -> list[str]:
        width, heads = self.decoder_width, self.decoder_heads
        faults = Faults()
        faults.need(width % heads == 0, f"decoder_heads={heads}: must divide decoder_width={width}")
        faults.need(width % 4 == 0, f"decoder_width={width}: needs a multiple of 4")
        return faults

    def conflicts(self, settings: Settings) -> list[str]:
        if settings.data.pack is None:
            return []
        return [
            f"data.pack={settings.data.pack}: objective.name='mae' encodes one picture a row; set "
            "--config.data.pack=None"
        ]

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        model = patches.check_patches(model, "mae")
        faults = Faults(f"objective.name='mae': {fault}" for fault in model.find_keep_faults())
        faults.need(
            model.keep_tokens == 1,
            f"model.keep_tokens={model.keep_tokens}: objective.name='mae' hides patches from the "
            "encoder by objective.mask_ratio; set it to 1",
        )
        collect_faults(faults)
        bound, prefix = _Mae(model, self, facts.in_form), model.num_prefix_tokens
        return Objective(
            bound.loss,
            init=bound.init,
            reconstruct=bound.reconstruct,
            passes=(
                TokenPass(model, prefix + bound.count_visible()),
                TokenPass(bound.decoder, prefix + bound.num_patches),
            ),
            needs=("image", "mask"),
            collapse=patches.COLLAPSE,
        )


@dataclasses.dataclass(frozen=True)
class _Mae:
    """The functions of the objective `Mae` of a model.

    in_form: see `RunFacts`.
    """

    model: Model
    keys: Mae
    in_form: InForm = as_it_is

    @property
    def num_patches(self) -> int:
        """N, padding included."""
        return self.model.max_tokens or math.prod(self.model.grid)

    def count_visible(self) -> int:
        """Number of patches that the encoder sees: N (1 - mask_ratio), rounded down.

        Pictures in their own shape have at least one.
        """
        visible, number = self._visible_of(self.num_patches), self.num_patches
        if not visible and self.model.max_tokens is None:
            raise InputError(
                f"objective.mask_ratio={self.keys.mask_ratio}: leaves none of {number} patches "
                "visible; set a smaller one, or take larger images"
            )
        return max(visible, 1)

    def _visible_of(self, num_patches: int) -> int:
        return int(num_patches * (1 - self.keys.mask_ratio))

    def _count_visible_of(self, pictures: Pictures) -> jax.Array:
        """How many of its own patches the encoder sees of each picture, int32 (B,); at least 1."""
        counts = [max(self._visible_of(number), 1) for number in range(self.num_patches + 1)]
        return jnp.asarray(counts, jnp.int32)[pictures.counts]

    def _draw_order(self, keys_B: jax.Array, images: Images) -> jax.Array:
        """A random order of the patches of each row, (B, N); the first V are visible."""
        if not isinstance(images, Pictures):
            return random_order(keys_B, self.num_patches)
        sizes = self.num_patches, self.count_visible()
        return random_parts(keys_B, images.counts, self._count_visible_of(images), *sizes)

    @property
    def decoder(self) -> Decoder:
        """The decoder, in the dtype of the encoder."""
        model = self.model
        same = ("gelu", "norm", "norm_eps", "dtype", "constrain", "grid", "max_tokens", "scan",
                "remat")  # fmt: skip
        decoder = Decoder(
            num_heads=self.keys.decoder_heads,
            mlp_dim=self.keys.decoder_mlp_dim or 4 * self.keys.decoder_width,
            num_prefix=model.num_prefix_tokens,
            width=self.keys.decoder_width,
            depth=self.keys.decoder_depth,
            num_outputs=model.patch_size[0] * model.patch_size[1] * model.channels,
            **{name: getattr(model, name) for name in same},
        )
        return cast(Decoder, self.in_form(decoder))

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The decoder's parameters, and no state."""
        tokens = self.model.num_prefix_tokens + self.count_visible()
        tokens_1TD = jnp.zeros((1, tokens, self.model.width))
        order_1N = jnp.arange(self.num_patches)[None]
        decoder = self.decoder.clone(constrain=unconstrained, ops=PLAIN)
        return decoder.init(rng, tokens_1TD, order_1N)["params"], {}

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        """The sums over a batch; the patches of row i are drawn by fold_in(key, i)."""
        order_key, dropout_key = jax.random.split(rng)
        images = batch["image"]
        order_BN = self._draw_order(row_keys(order_key, images.shape[0]), images)
        loss_B, _ = self.predict(params, images, order_BN, dropout_key)
        sums = sums_of_rows(loss_B, batch["mask"])
        return ObjectiveOutput(**sums, model_state=state.model_state)

    def predict(
        self,
        params: Params,
        images: Images,
        order_BN: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(loss (B,), predicted hidden patches (B, H, P)); the order's first V are visible.

        `dropout_key`: None leaves out the dropout. In both parts of the order of a picture, padding
        follows its own patches, see `random_parts`. A picture of one patch has a loss of 0.
        """
        visible, options = self.count_visible(), patches.dropout_options(dropout_key)
        own_shapes, more, seen_B = None, dict[str, Any](), None
        if isinstance(images, Pictures):
            own_shapes, seen_B = images, self._count_visible_of(images)
            more = {"pictures": images, "counts_B": seen_B}

        def encode(model: Any, images: Images, keep: jax.Array, train: bool) -> jax.Array:
            return model.encode(model.embed(images), keep=keep, **more, train=train)

        keep_BV, hidden_BH = order_BN[:, :visible], order_BN[:, visible:]
        tokens_BTD = self.model.apply({"params": params}, images, keep_BV, method=encode, **options)
        own = {"params": cast(Params, params[OBJECTIVE])}
        found_BHP = cast(
            jax.Array, self.decoder.apply(own, tokens_BTD, order_BN, own_shapes, **options)
        )
        wanted_BHP, _, _ = self._targets(images, hidden_BH)
        far_BHP = jnp.square(found_BHP - wanted_BHP)
        if own_shapes is None:
            return far_BHP.mean(axis=(1, 2)), found_BHP
        hidden_B = own_shapes.counts - seen_B  # 0 of a picture of one patch
        loss_B = mean_of_first(far_BHP, jnp.maximum(hidden_B, 1)).mean(axis=1)
        return loss_B * (hidden_B > 0), found_BHP

    def _extract(self, images: Images) -> jax.Array:
        """The patches (B, N, P)."""
        if isinstance(images, Pictures):
            return self.model.flat_patches(images, self.model.patch_size, self.model.channels)
        return extract_patches(images, self.model.patch_size)

    def _targets(
        self, images: Images, hidden_BH: jax.Array
    ) -> tuple[jax.Array, jax.Array | float, jax.Array | float]:
        """(targets (B, H, P), their mean, their standard deviation, each (B, H, 1) or a number)."""
        patches_BNP = self._extract(images).astype(jnp.float32)
        wanted_BHP = take(patches_BNP, hidden_BH)
        if not self.keys.norm_pixels:
            return wanted_BHP, 0.0, 1.0
        mean_BH1 = wanted_BHP.mean(axis=2, keepdims=True)
        std_BH1 = jnp.sqrt(wanted_BHP.var(axis=2, keepdims=True, ddof=1) + _EPS)
        return (wanted_BHP - mean_BH1) / std_BH1, mean_BH1, std_BH1

    def reconstruct(self, params: Params, images: Images, keys_B: jax.Array) -> Reconstruction:
        """`Objective.reconstruct`: normalised patches get the mean and deviation of their own."""
        grid, patch_size, visible = self.model.grid, self.model.patch_size, self.count_visible()
        order_BN = self._draw_order(keys_B, images)
        loss_B, found_BHP = self.predict(params, images, order_BN)
        _, mean, std = self._targets(images, order_BN[:, visible:])
        seen_BVP = take(self._extract(images), order_BN[:, :visible])
        back_BN = jnp.argsort(order_BN, axis=1)

        def image_of(hidden_BHP: jax.Array) -> Images:
            joined_BNP = take(jnp.concatenate([seen_BVP, hidden_BHP], axis=1), back_BN)
            if isinstance(images, Pictures):
                return images._replace(patches=joined_BNP.reshape(images.shape))
            return as_images(joined_BNP, grid, patch_size)

        restored_BHP = found_BHP * std + mean
        return Reconstruction(loss_B, image_of(0 * found_BHP), image_of(restored_BHP))
