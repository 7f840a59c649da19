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
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import POSITIVE, key
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import Model
from vit_jax.models.layers import EncoderFields
from vit_jax.models.patches import as_images, extract_patches, random_order, row_keys, take
from vit_jax.models.position import sincos_2d
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
    `order_BN`: all layers but the positions ignore it.

    Shapes: tokens (B, T, D), order (B, N) of raster indices, the visible patches first
      -> (B, H, num_outputs), float32, for the hidden patches in their order.
    Source: He et al. 2021 (arXiv:2111.06377), section 3, and its published code for the positions.
    """

    grid: tuple[int, int]
    num_prefix: int
    num_outputs: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array, order_BN: jax.Array, *, train: bool = False) -> jax.Array:
        visible = x_BTD.shape[1] - self.num_prefix
        x_BTW = nn.Dense(self.width, dtype=self.dtype, name="embedding")(x_BTD)
        token = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, self.width))
        hidden = (x_BTD.shape[0], order_BN.shape[1] - visible, 1)
        tokens_BHW = jnp.tile(token.astype(self.dtype), hidden)
        x_BNW = jnp.concatenate([x_BTW[:, self.num_prefix :], tokens_BHW], axis=1)
        table_NW = jnp.asarray(sincos_2d(self.grid, self.width, span=self.width // 4))
        x_BNW += jnp.take(table_NW, order_BN, axis=0).astype(self.dtype)
        x_BNW = jnp.concatenate([x_BTW[:, : self.num_prefix], x_BNW], axis=1)
        x_BNW = self.constrain(x_BNW, ("batch", None, None))
        encoder = self.make_encoder("encoder")
        x_BHW = encoder(x_BNW, train=train)[:, self.num_prefix + visible :]
        head = nn.Dense(self.num_outputs, dtype=self.dtype, name="head")
        return head(x_BHW).astype(jnp.float32)

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + math.prod(self.grid)


class Mae(ObjectivePart):
    """Predicts hidden patches from the visible ones, with the decoder as its own parameters.

    The loss of an image is the mean squared error over the values of its hidden patches. Only the
    visible patches, and the prefix tokens, pass through the encoder.
    """

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
        """N."""
        return self.model.grid[0] * self.model.grid[1]

    def count_visible(self) -> int:
        """Number of patches that the encoder sees: N (1 - mask_ratio), rounded down."""
        visible = int(self.num_patches * (1 - self.keys.mask_ratio))
        if not visible:
            raise InputError(f"objective.mask_ratio={self.keys.mask_ratio}: hides all patches")
        return visible

    @property
    def decoder(self) -> Decoder:
        """The decoder, in the dtype of the encoder."""
        model = self.model
        same = ("gelu", "norm", "norm_eps", "dtype", "constrain", "grid", "scan", "remat")
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
        keys_B = row_keys(order_key, images.shape[0])
        order_BN = random_order(keys_B, self.num_patches)
        loss_B, _ = self.predict(params, images, order_BN, dropout_key)
        sums = sums_of_rows(loss_B, batch["mask"])
        return ObjectiveOutput(**sums, model_state=state.model_state)

    def predict(
        self,
        params: Params,
        images: jax.Array,
        order_BN: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(loss (B,), predicted hidden patches (B, H, P)); the order's first V are visible.

        `dropout_key`: None leaves out the dropout.
        """
        visible, options = self.count_visible(), patches.dropout_options(dropout_key)

        def encode(model: Any, images: jax.Array, keep: jax.Array, train: bool) -> jax.Array:
            return model.encode(model.embed(images), keep=keep, train=train)

        keep_BV, hidden_BH = order_BN[:, :visible], order_BN[:, visible:]
        tokens_BTD = self.model.apply({"params": params}, images, keep_BV, method=encode, **options)
        own = {"params": cast(Params, params[OBJECTIVE])}
        found_BHP = cast(jax.Array, self.decoder.apply(own, tokens_BTD, order_BN, **options))
        wanted_BHP, _, _ = self._targets(images, hidden_BH)
        return jnp.square(found_BHP - wanted_BHP).mean(axis=(1, 2)), found_BHP

    def _targets(
        self, images: jax.Array, hidden_BH: jax.Array
    ) -> tuple[jax.Array, jax.Array | float, jax.Array | float]:
        """(targets (B, H, P), their mean, their standard deviation, each (B, H, 1) or a number)."""
        patches_BNP = extract_patches(images.astype(jnp.float32), self.model.patch_size)
        wanted_BHP = take(patches_BNP, hidden_BH)
        if not self.keys.norm_pixels:
            return wanted_BHP, 0.0, 1.0
        mean_BH1 = wanted_BHP.mean(axis=2, keepdims=True)
        std_BH1 = jnp.sqrt(wanted_BHP.var(axis=2, keepdims=True, ddof=1) + _EPS)
        return (wanted_BHP - mean_BH1) / std_BH1, mean_BH1, std_BH1

    def reconstruct(self, params: Params, images: jax.Array, keys_B: jax.Array) -> Reconstruction:
        """`Objective.reconstruct`: normalised patches get the mean and deviation of their own."""
        grid, patch_size, visible = self.model.grid, self.model.patch_size, self.count_visible()
        order_BN = random_order(keys_B, self.num_patches)
        loss_B, found_BHP = self.predict(params, images, order_BN)
        _, mean, std = self._targets(images, order_BN[:, visible:])
        patches_BNP = extract_patches(images, patch_size)
        seen_BVP = take(patches_BNP, order_BN[:, :visible])
        back_BN = jnp.argsort(order_BN, axis=1)

        def image_of(hidden_BHP: jax.Array) -> jax.Array:
            joined_BNP = jnp.concatenate([seen_BVP, hidden_BHP], axis=1)
            return as_images(take(joined_BNP, back_BN), grid, patch_size)

        restored_BHP = found_BHP * std + mean
        return Reconstruction(loss_B, image_of(0 * found_BHP), image_of(restored_BHP))
