"""Masked patch prediction: the encoder sees corrupted patches, and predicts what they were.

Axes: B images, N patches, M corrupted ones, D width, P values of a patch (row, column, channel),
S predictions for a patch, K colours.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.6 and appendix B.1.2.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from einops import rearrange

from vit_jax.base.errors import InputError
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import key
from vit_jax.models.contract import Model
from vit_jax.models.patches import (
    as_images,
    extract_patches,
    put_back,
    random_order,
    row_keys,
    take,
    take_once,
)
from vit_jax.objectives import patches
from vit_jax.objectives.contract import (
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    sums_of_rows,
)
from vit_jax.objectives.patches import Reconstruction

TARGETS = ("mean_colour", "small_patch", "pixels")
_LEVELS = 8  # of each channel: 3 bits
_SMALL = 4  # rows and columns of a small patch
_TO_MASK, _TO_OTHER = 0.8, 0.1  # what becomes of corrupted patches; the rest stay as they are


class Corruption(NamedTuple):
    """Random choices for each patch of each image, (B, N).

    order: a random order of the patches; the first M are corrupted.
    kind: uniform in [0, 1): the mask token below 0.8, another patch below 0.9, unchanged above.
    other: the raster index of another patch of the same image.
    """

    order: jax.Array
    kind: jax.Array
    other: jax.Array


def draw_corruption(keys_B: jax.Array, num: int) -> Corruption:
    """Draw the corruption of `num` patches with one key for each image."""
    order_key, kind_key, other_key = jax.vmap(lambda key: jax.random.split(key, 3))(keys_B).T
    kind = jax.vmap(lambda key: jax.random.uniform(key, (num,)))(kind_key)
    steps = jax.vmap(lambda key: jax.random.randint(key, (num,), 1, num))(other_key)
    other = (jnp.arange(num)[None] + steps) % num
    return Corruption(random_order(order_key, num), kind, other)


def corrupt(
    x_BND: jax.Array, corruption: Corruption, token_11D: jax.Array, number: int
) -> jax.Array:
    """The patches x_BND, the first `number` of the corruption's order corrupted."""
    place_BN = jnp.argsort(corruption.order, axis=1)
    is_corrupt_BN1 = (place_BN < number)[:, :, None]
    kind_BN1 = corruption.kind[:, :, None]
    changed_BND = jnp.where(
        kind_BN1 < _TO_MASK,
        token_11D.astype(x_BND.dtype),
        jnp.where(kind_BN1 < _TO_MASK + _TO_OTHER, take(x_BND, corruption.other), x_BND),
    )
    return jnp.where(is_corrupt_BN1, changed_BND, x_BND)


def colours(pixels: jax.Array) -> jax.Array:
    """The 3-bit colours of pixels (..., channels) from 0 to 255, int32 (...): r 8^2 + g 8 + b."""
    levels = jnp.minimum(jnp.floor(pixels * (_LEVELS / 256)), _LEVELS - 1).astype(jnp.int32)
    channels = pixels.shape[-1]
    places = jnp.array([_LEVELS ** (channels - 1 - i) for i in range(channels)])
    return (levels * jnp.reshape(places, (1,) * (pixels.ndim - 1) + (-1,))).sum(axis=-1)


def pixels_of(colours: jax.Array, channels: int) -> jax.Array:
    """The pixels (..., channels) in the middle of 3-bit colours (...)."""
    places = [_LEVELS ** (channels - 1 - i) for i in range(channels)]
    levels = jnp.stack([colours // place % _LEVELS for place in places], axis=-1)
    return (levels + 0.5) * (256 / _LEVELS)


class MaskedPatches(ObjectivePart):
    """Predicts corrupted patches from the encoder's output for them.

    Of each image a share `mask_ratio` of the patch embeddings is corrupted: each of these becomes
    the learned mask token with probability 0.8, the embedding of another patch with 0.1, and stays
    with 0.1. The loss of an image is the mean over its corrupted patches. The other patch is one of
    the same image, so that no row depends on another. The mask token and a linear head are the
    objective's own parameters. Patches that `model.keep_tokens` leaves out count nowhere.

    Targets: "mean_colour": the mean colour in 3 bits per channel, 512 classes. "small_patch": the
    patch resized to 4 x 4 by means, 16 such colours. "pixels": all values, by their mean squared
    error.
    """

    fewest_images = None
    mask_ratio: float = key(0.5, "share of the patches that are hidden", within="(0, 1]")
    target: str = key("mean_colour", "what is predicted of a patch", choices=TARGETS)

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        model = patches.check_patches(model, "masked_patches")
        if self.target == "small_patch" and any(side % _SMALL for side in model.patch_size):
            raise InputError(
                f"objective.target='small_patch': {_SMALL} must divide model.patch_size, "
                f"{model.patch_size}; choose another"
            )
        bound = _MaskedPatches(model, facts, self.mask_ratio, self.target)
        return Objective(
            bound.loss,
            init=bound.init,
            reconstruct=bound.reconstruct,
            needs=("image", "mask"),
            collapse=patches.COLLAPSE,
        )


@dataclasses.dataclass(frozen=True)
class _MaskedPatches:
    """The functions of the objective `MaskedPatches` of a model."""

    model: Model
    facts: RunFacts
    mask_ratio: float
    target: str

    @property
    def num_patches(self) -> int:
        """N."""
        return self.model.grid[0] * self.model.grid[1]

    @property
    def num_corrupt(self) -> int:
        """M, at least 1."""
        return max(1, round(self.num_patches * self.mask_ratio))

    @property
    def head(self) -> nn.Dense:
        """D -> what is predicted for a patch: P values, or K scores for each of S colours."""
        channels = self.model.channels
        outputs = {
            "mean_colour": _LEVELS**channels,
            "small_patch": _SMALL**2 * _LEVELS**channels,
            "pixels": self.model.patch_size[0] * self.model.patch_size[1] * channels,
        }
        return nn.Dense(outputs[self.target], dtype=self.model.dtype)

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The mask token (1, 1, D) and the head; no state."""
        token_key, head_key = jax.random.split(rng)
        token = nn.initializers.normal(0.02)(token_key, (1, 1, self.model.width))
        head = self.head.init(head_key, jnp.zeros((1, self.model.width)))["params"]
        return {"mask_token": token, "head": head}, {}

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        """The sums over a batch; the corruption of row i is drawn by fold_in(key, i)."""
        corruption_key, dropout_key = jax.random.split(rng)
        images = batch["image"]
        keys_B = row_keys(corruption_key, images.shape[0])
        corruption = draw_corruption(keys_B, self.num_patches)
        found, seen_BM = self.predict(params, images, corruption, dropout_key)
        loss_B, metrics = self.compare(found, images, corruption, seen_BM)
        mask_B = batch["mask"]
        if seen_BM is not None:
            mask_B = mask_B * seen_BM.max(axis=1)
        sums = sums_of_rows(loss_B, mask_B, **metrics)
        return ObjectiveOutput(**sums, model_state=state.model_state)

    def predict(
        self,
        params: Params,
        images: jax.Array,
        corruption: Corruption,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """(the head's output for the corrupted patches, float32 (B, M, outputs); which are seen).

        The latter is 1.0 for a patch that the encoder has seen, (B, M); None: it has seen all.
        `dropout_key`: None leaves out the dropout.
        """
        own, options = cast(Any, params[OBJECTIVE]), patches.dropout_options(dropout_key)

        def encode(
            model: Any, images: jax.Array, corruption: Corruption, token: jax.Array, train: bool
        ) -> tuple[jax.Array, jax.Array | None]:
            x_BND = corrupt(model.embed(images), corruption, token, self.num_corrupt)
            keep = model.draw_keep(*x_BND.shape[:2], train=train)
            x_BND = model.encode(x_BND, keep=keep, train=train)
            return x_BND[:, model.num_prefix_tokens :], keep

        found: Any = self.model.apply(
            {"params": params}, images, corruption, own["mask_token"], method=encode, **options
        )
        (x_BND, keep), seen_BM = found, None
        corrupt_BM = corruption.order[:, : self.num_corrupt]
        if keep is not None:
            x_BND, seen_BN1 = (
                put_back(x, keep, self.num_patches) for x in (x_BND, jnp.ones((*keep.shape, 1)))
            )
            seen_BM = take_once(seen_BN1, corrupt_BM)[:, :, 0]
        x_BMD = take_once(x_BND, corrupt_BM)
        found = self.head.apply({"params": own["head"]}, x_BMD)
        return found.astype(jnp.float32), seen_BM

    def compare(
        self,
        found: jax.Array,
        images: jax.Array,
        corruption: Corruption,
        seen_BM: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss (B,), {metric: (B,)}) of predictions (B, M, outputs) for the corrupted patches.

        `seen_BM`: as of `predict`.
        """
        corrupt_BM = corruption.order[:, : self.num_corrupt]
        if self.target == "pixels":
            patches_BNP = extract_patches(images.astype(jnp.float32), self.model.patch_size)
            errors = jnp.square(found - take(patches_BNP, corrupt_BM))
            return _mean(errors, seen_BM), {}
        wanted_BMS = take(self._colours(images), corrupt_BM)
        scores_BMSK = rearrange(found, "b m (s k) -> b m s k", s=wanted_BMS.shape[2])
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(scores_BMSK, wanted_BMS)
        right = (scores_BMSK.argmax(axis=-1) == wanted_BMS).astype(jnp.float32)
        return _mean(loss, seen_BM), {"colour_top1": _mean(right, seen_BM)}

    def _colours(self, images: jax.Array) -> jax.Array:
        """The colours to predict for every patch, int32 (B, N, S)."""
        (rows, columns), (p, q) = self.model.grid, self.model.patch_size
        side = 1 if self.target == "mean_colour" else _SMALL
        pixels = patches.as_pixels(
            images.astype(jnp.float32), self.facts.mean, self.facts.std
        ).reshape(-1, rows, side, p // side, columns, side, q // side, images.shape[-1])
        return rearrange(colours(pixels.mean(axis=(3, 6))), "b h i w j -> b (h w) (i j)")

    def reconstruct(self, params: Params, images: jax.Array, keys_B: jax.Array) -> Reconstruction:
        """`Objective.reconstruct`: colours are drawn at the middle of their range."""
        model, corruption = self.model, draw_corruption(keys_B, self.num_patches)
        found, _ = self.predict(params, images, corruption)
        loss_B, _ = self.compare(found, images, corruption)
        if self.target != "pixels":
            found = self._values(found)
        place_BN = jnp.argsort(corruption.order, axis=1)
        is_corrupt_BN1 = (place_BN < self.num_corrupt)[:, :, None]
        patches_BNP = extract_patches(images, model.patch_size)
        padding = ((0, 0), (0, self.num_patches - self.num_corrupt), (0, 0))
        found_BNP = take(jnp.pad(found, padding), place_BN)

        def image_of(hidden_BNP: jax.Array) -> jax.Array:
            joined_BNP = jnp.where(is_corrupt_BN1, hidden_BNP, patches_BNP)
            return as_images(joined_BNP, model.grid, model.patch_size)

        return Reconstruction(loss_B, image_of(0 * found_BNP), image_of(found_BNP))

    def _values(self, scores: jax.Array) -> jax.Array:
        """The patches (B, M, P) in the model's range with the most likely colours of `scores`."""
        (p, q), channels = self.model.patch_size, self.model.channels
        side = 1 if self.target == "mean_colour" else _SMALL
        scores = rearrange(scores, "b m (i j k) -> b m i j k", i=side, j=side)
        mean, std = (jnp.reshape(jnp.asarray(x), (1, 1, 1, 1, -1)) for x in self.facts[:2])
        pixels = pixels_of(scores.argmax(axis=-1), channels)
        values = (pixels / 255 - mean) / std
        values = values.repeat(p // side, axis=2).repeat(q // side, axis=3)
        return rearrange(values, "b m p q c -> b m (p q c)")


def _mean(x_BMS: jax.Array, seen_BM: jax.Array | None) -> jax.Array:
    """The mean over the seen patches of each row, (B,); 0 of a row without any."""
    if seen_BM is None:
        return x_BMS.mean(axis=(1, 2))
    return (x_BMS.mean(axis=2) * seen_BM).sum(axis=1) / jnp.maximum(seen_BM.sum(axis=1), 1)
