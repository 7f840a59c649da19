"""Measurements of a model on images, layer by layer: one pass over them, batch by batch.

Axes: I images, L and M layers, H heads, N tokens, B images of a batch, D width, F features.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures, counts_of, cut_out
from vit_jax.data import Source, order, to_value_range
from vit_jax.inference import layers
from vit_jax.inference.outputs import check_size, computed, in_own_shape
from vit_jax.insight import attention_maps as maps
from vit_jax.models.contract import about, for_one_size
from vit_jax.models.own_shapes import mean_of_first
from vit_jax.models.watched import as_map, watch
from vit_jax.transfer.pretrained import Pretrained

MIN_IMAGES = 4  # of a batch, for the unbiased estimate of the alignment

Maps = np.ndarray | list[np.ndarray]


@dataclasses.dataclass
class Attention:
    """Where the attention of a model goes; see `attention_maps`.

    distances, entropies, shares: (I, L, H).
    rollouts: (n, rows, columns); heads: (n, L, H, rows, columns).
    """

    distances: np.ndarray
    entropies: np.ndarray
    shares: np.ndarray
    rollouts: Maps
    heads: Maps


@dataclasses.dataclass
class Measured:
    """Measurements of a model on I readable images; the first few of them are shown.

    Pictures in their own shape give lists of n arrays in place of arrays (n, ...).

    names: of all images; the shown ones come first.
    norms: for each layer the lengths of its output's tokens (I, N), prefix tokens first.
    grams: for each batch `gram_matrix` of every layer, (L, B, B); of pictures in their own shape,
      whose tokens differ in number, of the means over the tokens.
    images: the shown images as the model gets them, uint8 (n, height, width, C).
    features: (n, rows, columns, D): the patches of the encoder's output.
    attention: None: the model has none.
    grids: int32 (I, 2), rows and columns of patches of pictures in their own shape; tokens of
      `norms` after them do not count. None: all images have the model's grid.
    """

    names: list[str]
    norms: list[np.ndarray]
    grams: list[np.ndarray]
    images: Maps
    features: Maps
    attention: Attention | None = None
    grids: np.ndarray | None = None

    @property
    def shown(self) -> dict[str, Maps]:
        """The shown images and their names."""
        return {"image": self.images, "name": np.array(self.names[: len(self.images)])}


def with_size(pretrained: Pretrained) -> nn.Module:
    """The model for images of the size of its spec, or for pictures in their own shape.

    Raises:
      InputError: if the source states none, so that one must be chosen.
    """
    check_size(pretrained)
    model = pretrained.model.clone(image_size=pretrained.spec.image_size)
    return model if pretrained.spec.rule is not None else for_one_size(model)


def measure(
    pretrained: Pretrained,
    source: Source,
    *,
    examples: int,
    batch_size: int,
    shown: int,
    progress: bool = True,
) -> Measured:
    """Run the model over images and measure what `Measured` holds.

    Args:
      pretrained: the model, with an image size in its spec.
      source: the images; at most `examples` of them, evenly spaced.
      batch_size: a multiple of the number of devices.
      shown: number of images to keep maps of, evenly spaced, at most a batch.

    Raises:
      InputError: if the model takes images of any size and none was chosen, or no image can be
        read.
    """
    record_ids = order.spread(examples, source.num_examples)
    firsts = order.spread(shown, len(record_ids))  # not all of the first class of a folder
    record_ids = np.concatenate([record_ids[firsts], np.delete(record_ids, firsts)])
    found = computed(
        pretrained,
        source,
        make_program(with_size(pretrained), pretrained.spec, shown),
        batch_size=batch_size,
        record_ids=record_ids,
        progress=progress,
        keys=("image", "mask"),
    )
    names, grams, each = [], [], []
    first: dict[str, Maps] = {}
    for i, (results, batch) in enumerate(found):
        kept = np.flatnonzero(batch["mask"] > 0)
        ids = record_ids[i * batch_size :][kept]
        names += [source.record_name(int(record)) for record in ids]
        grams.append(results["grams"][:, kept][:, :, kept])
        each.append(jax.tree.map(lambda x, kept=kept: x[kept], results["each"]))
        if i == 0:
            few = kept[kept < shown]
            first = {name: np.asarray(x)[few] for name, x in results["shown"].items()}
            images = jax.tree.map(lambda x, few=few: x[few], batch["image"])
            first["images"] = cut_out(images) if isinstance(images, Pictures) else images
    if not len(first["images"]):
        raise InputError("none of the first images could be read; give others")
    whole = jax.tree.map(lambda *batches: np.concatenate(batches), *each)
    if "grids" in whole:
        grids = whole["grids"][: len(first["images"])]
        of_tokens = functools.partial(in_own_shape, num_prefix=0)
        for name in first.keys() - {"images"}:
            first[name] = [*map(of_tokens if name == "features" else _map_of, first[name], grids)]
    attention = None
    if "heads" in first:
        distances, entropies, shares = whole["distances"], whole["entropies"], whole["shares"]
        attention = Attention(distances, entropies, shares, first["rollouts"], first["heads"])
    images, features = first["images"], first["features"]
    return Measured(names, whole["norms"], grams, images, features, attention, whole.get("grids"))


def _map_of(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """A picture's map (..., rows, columns) of values (..., 1, N): its patches, then padding."""
    return x[..., 0, : grid[0] * grid[1]].reshape(*x.shape[:-2], *grid)


def _tokens_of(model: Any, images: Images, shown: int) -> tuple[Any, ...]:
    """The tokens of images, for `make_program`.

    Returns:
      (grid, distances, shares): as in `attention_maps`. For pictures, the grid has their patches in
        one row, with padding, and the shares are those of the first `shown`.
      real: (B, N), which tokens are no padding; None: all.
      per_token, per_patch: (B, 1), the factors that turn a mean over all places into a mean over
        the real tokens, or patches.
    """
    if not isinstance(images, Pictures):
        distances = maps.patch_distances(model.grid, model.token_stride)
        return model.grid, distances, maps.token_shares(model), None, 1.0, 1.0
    _, most, height, width, _ = images.shape
    prefix, counts = model.num_prefix_tokens, images.counts[:, None]
    in_row = for_one_size(model.clone(image_size=(height, most * width)))
    real = np.arange(prefix + most)[None] < prefix + counts
    shares = (maps.token_shares(about(in_row))[None] * real)[:shown]
    shares /= shares.sum(axis=1, keepdims=True)
    distances = maps.patch_distances(images, model.patch_size)
    return in_row.grid, distances, shares, real, (prefix + most) / (prefix + counts), most / counts


def _see_attention(
    model: nn.Module,
    params: tree.Params,
    model_state: tree.ModelState,
    images: Images,
    x: Images,
    shown: int,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Measure the attention on `images`, which are `x` in the model's value range.

    The weights of a layer are reduced before the next layer's are needed.

    Returns:
      By name the results (B, L, H), and the heads and rollouts of the first `shown` images.
    """
    grid, distances, shares, real, per_token, per_patch = _tokens_of(model, images, shown)
    rolled: list[jax.Array] = []

    def see(weights: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        if real is not None:
            weights = jnp.where(real[:, None, :, None], weights, 0)
        few = weights[:shown]
        rolled.append(maps.rollout_step(few, rolled[-1] if rolled else None))
        by_head = {
            "distances": maps.mean_distance(weights, distances) * per_patch,
            "entropies": maps.mean_entropy(weights) * per_token,
            "shares": maps.prefix_share(weights, model.num_prefix_tokens) * per_patch,
        }
        return by_head, maps.over_patches(few, shares, grid)

    by_head, heads = zip(*layers.watch_attention(model, params, x, see, model_state), strict=True)
    each = jax.tree.map(lambda *of_layers: jnp.stack(of_layers, axis=1), *by_head)
    rollouts = maps.over_patches(rolled[-1], shares, grid)
    return each, {"heads": jnp.stack(heads, axis=1), "rollouts": rollouts}


def make_program(
    model: nn.Module, spec: Any, shown: int
) -> Callable[[tree.Params, tree.ModelState, Images], dict[str, Any]]:
    """The jitted function for `measure`: variables and uint8 images (B, H, W, C), or pictures.

    Padding of pictures counts nowhere. The Gram matrices are of the mean of each picture's tokens.
    """
    has_attention = about(model).why_no_weights is None

    @jax.jit
    def program(
        params: tree.Params, model_state: tree.ModelState, images: Images
    ) -> dict[str, Any]:
        x = to_value_range(images, spec.mean, spec.std)
        each: dict[str, Any] = {}
        few: dict[str, jax.Array] = {}
        with watch() as found:
            if has_attention:
                each, few = _see_attention(model, params, model_state, images, x, shown)
            else:
                layers.layer_outputs(model, params, x, model_state)
        assert found.tokens is not None  # both call the model's `tokens`
        outputs = [layer.astype(jnp.float32) for layer in found.layers]
        lengths = [jnp.linalg.norm(layer, axis=-1) for layer in outputs]
        each["norms"] = [norm.reshape(len(norm), -1) for norm in lengths]
        if isinstance(images, Pictures):
            each["grids"], ends = images.grid, model.num_prefix_tokens + images.counts
            outputs = [mean_of_first(layer, ends) for layer in outputs]
        few["features"] = as_map(model, found.tokens, spec.image_size, counts_of(images))[:shown]
        few = {name: values.astype(jnp.float32) for name, values in few.items()}
        return {"each": each, "shown": few, "grams": jnp.stack([*map(gram_matrix, outputs)])}

    return program


def gram_matrix(x: jax.Array) -> jax.Array:
    """The inner products of the images' features, float32 (B, B), for features (B, ...).

    The mean over the images is taken off first, for precision.
    """
    x_BF = x.reshape(x.shape[0], -1).astype(jnp.float32)
    x_BF -= x_BF.mean(axis=0, keepdims=True)
    return jnp.matmul(x_BF, x_BF.T, precision=jax.lax.Precision.HIGHEST)


def alignment(batches: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray | None:
    """The centred kernel alignment (CKA) of each pair of layers, float64 (L, M).

    1 for representations that are equal up to rotation, shift and scale; about 0 for independent
    ones, with the sign of the noise. HSIC is averaged over the batches before it is divided. None
    if no batch has at least 4 images.

    Args:
      batches: the `gram_matrix` of each layer, (L, B, B), for every batch of images.
      others: the same for layers of this or another model and the same images, (M, B, B).

    Source: Kornblith et al. 2019 (arXiv:1905.00414); by batches, with the unbiased estimate:
      Nguyen et al. 2020 (arXiv:2010.15327), Eqs. 3-5.
    """
    pairs = [
        (_centred(ours), _centred(theirs))
        for ours, theirs in zip(batches, others, strict=True)
        if ours.shape[-1] >= MIN_IMAGES
    ]
    if not pairs:
        return None
    between_LM = np.sum([ours @ theirs.T for ours, theirs in pairs], axis=0)
    own_L, own_M = (
        np.sum([np.square(rows).sum(axis=1) for rows in of_model], axis=0)
        for of_model in zip(*pairs, strict=True)
    )
    scale_LM = np.sqrt(own_L[:, None] * own_M[None])
    return np.divide(between_LM, scale_LM, out=np.full_like(scale_LM, np.nan), where=scale_LM > 0)


def _centred(grams_LBB: np.ndarray) -> np.ndarray:
    """Rows whose inner products are unbiased estimates of HSIC, float64 (L, B B).

    Source: Song et al. 2012, Feature Selection via Dependence Maximization, Eq. 5: the terms are
    collected in U-centred matrices, whose diagonal is 0.
    """
    grams = np.array(grams_LBB, np.float64)
    num = grams.shape[-1]
    diagonal = np.arange(num)
    grams[:, diagonal, diagonal] = 0
    sums_LB = grams.sum(axis=-1)
    total_L = sums_LB.sum(axis=-1)
    grams -= (sums_LB[:, :, None] + sums_LB[:, None]) / (num - 2)
    grams += (total_L / ((num - 1) * (num - 2)))[:, None, None]
    grams[:, diagonal, diagonal] = 0
    return grams.reshape(len(grams), -1) / np.sqrt(num * (num - 3))


def norm_table(seen: Measured, num_prefix: int, factor: float) -> dict[str, np.ndarray]:
    """Norms of patches by layer: median, percentiles, largest, share of outliers; prefix tokens.

    Outliers are patches longer than `factor` times their layer's median. "prefix" is the mean of
    the prefix tokens, NaN without any.

    Source: Darcet et al. 2023 (arXiv:2309.16588), section 2.1, for outlier tokens.
    """
    rows = []
    for of_layer in seen.norms:
        prefix, patches = of_layer[:, :num_prefix], of_layer[:, num_prefix:]
        if seen.grids is not None:
            patches = patches[np.arange(patches.shape[1]) < seen.grids.prod(axis=1)[:, None]]
        low, median, high = np.percentile(patches, (5, 50, 95))
        outlier_share = (patches > factor * median).mean()
        of_prefix = prefix.mean() if num_prefix else np.nan
        rows.append((median, low, high, patches.max(), outlier_share, of_prefix))
    names = ("median", "p5", "p95", "largest", "outlier_share", "prefix")
    return dict(zip(names, np.array(rows).T, strict=True))
