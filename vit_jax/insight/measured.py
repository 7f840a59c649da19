"""What a model does with pictures, layer by layer: one pass over them, batch by batch.

Axes: I images, L layers, H heads, N tokens, B images of a batch, D width.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.data import Source, to_value_range
from vit_jax.inference import layers
from vit_jax.inference.predict import check_size, computed
from vit_jax.insight import attention_maps as maps
from vit_jax.insight.similarity import MIN_IMAGES, alignment, gram_matrix
from vit_jax.models.contract import about
from vit_jax.models.watched import watch
from vit_jax.transfer.pretrained import Pretrained


@dataclasses.dataclass
class Measured:
    """What a model does with I images; the first few of them are shown.

    names: of all images; those of the shown ones come first.
    distances, entropies, shares: (I, L, H), see `attention_maps`; None: no attention.
    norms: for each layer the lengths of its output's tokens (I, N), prefix tokens first.
    grams: for each batch `similarity.gram_matrix` of every layer, (L, B, B), unreadable images
      included; readable: for each batch, (B,).
    pictures: the shown images as the model gets them, uint8 (n, height, width, C).
    rollouts: (n, rows, columns); heads: (n, L, H, rows, columns); None: no attention.
    features: (n, rows, columns, D): the patches of the encoder's output.
    """

    names: list[str]
    norms: list[np.ndarray]
    grams: list[np.ndarray]
    readable: list[np.ndarray]
    pictures: np.ndarray
    features: np.ndarray
    distances: np.ndarray | None = None
    entropies: np.ndarray | None = None
    shares: np.ndarray | None = None
    rollouts: np.ndarray | None = None
    heads: np.ndarray | None = None


def with_size(pretrained: Pretrained) -> nn.Module:
    """The model with the image size of its spec.

    Raises:
      InputError: if the source states none, so that one must be chosen.
    """
    check_size(pretrained)
    return pretrained.model.clone(image_size=pretrained.spec.image_size)


def measure(
    pretrained: Pretrained,
    source: Source,
    *,
    record_ids: np.ndarray,
    batch_size: int,
    shown: int,
    progress: bool = True,
) -> Measured:
    """Run the model over the records and measure what `Measured` holds.

    Args:
      pretrained: the model, with an image size in its spec.
      source, record_ids: the images, int64 (n,).
      batch_size: a multiple of the number of devices.
      shown: number of images to keep maps of, from the first batch.

    Raises:
      InputError: if the model takes images of any size and none was chosen.
    """
    program = make_program(with_size(pretrained), pretrained.spec, min(shown, batch_size))
    found = computed(
        pretrained,
        source,
        program,
        batch_size=batch_size,
        record_ids=record_ids,
        progress=progress,
        keys=("image", "mask"),
        consequence="not in the figures",
    )
    parts: dict[str, list[Any]] = {}
    grams, readable, names, first = [], [], [], {}
    for results, batch in found:
        kept = batch["mask"] > 0
        ids = record_ids[sum(map(len, readable)) :][: len(kept)]
        names += [source.record_name(int(i)) for i in ids[kept]]
        if not readable:
            of_shown = kept[:shown]
            first = {
                name: np.asarray(x)[: len(of_shown)][of_shown]
                for name, x in results["shown"].items()
            }
            first["pictures"] = batch["image"][:shown][of_shown]
        readable.append(kept)
        grams.append(results["grams"][:, : len(kept), : len(kept)])
        for name, values in results["each"].items():
            whole = [x[: len(kept)][kept] for x in values]
            parts.setdefault(name, []).append(whole)
    norms = [np.concatenate(of_layer) for of_layer in zip(*parts.pop("norms"), strict=True)]
    by_head = {
        name: np.concatenate([np.stack(of_layers, axis=1) for of_layers in batches])
        for name, batches in parts.items()
    }
    return Measured(names, norms, grams, readable, **first, **by_head)


def make_program(
    model: nn.Module, spec: Any, shown: int
) -> Callable[[tree.Params, tree.ModelState, jax.Array], dict[str, Any]]:
    """The jitted function for `measure`: variables and uint8 images (B, H, W, C) to measurements.

    The attention weights of a layer are reduced before those of the next one are needed.
    """
    has_attention = about(model).why_no_weights is None
    grid, num_prefix = model.grid, model.num_prefix_tokens
    if has_attention:
        distances = maps.patch_distances(grid, model.token_stride)
        token_shares = maps.token_shares(model)

    @jax.jit
    def program(params, model_state, images):
        x = to_value_range(images, spec.mean, spec.std)
        rolled = []

        def see(weights):
            few = weights[:shown]
            rolled.append(maps.rollout_step(few, rolled[-1] if rolled else None))
            by_head = {
                "distances": maps.mean_distance(weights, distances),
                "entropies": maps.mean_entropy(weights),
                "shares": maps.prefix_share(weights, num_prefix),
            }
            return by_head, maps.over_patches(few, token_shares, grid)

        with watch() as found:
            if has_attention:
                seen = layers.watch_attention(model, params, x, see, model_state)
            else:
                seen = []
                layers.layer_outputs(model, params, x, model_state)
        each = {"norms": [_norms(layer) for layer in found.layers]}
        few = {"features": layers.as_map(model, found.tokens[:shown], spec.image_size)}
        if has_attention:
            for name in seen[0][0]:
                each[name] = [by_head[name] for by_head, _ in seen]
            few["heads"] = jnp.stack([of_heads for _, of_heads in seen], axis=1)
            few["rollouts"] = maps.over_patches(rolled[-1], token_shares, grid)
        few = {name: values.astype(jnp.float32) for name, values in few.items()}
        grams = jnp.stack([gram_matrix(layer) for layer in found.layers])
        return {"each": each, "shown": few, "grams": grams}

    return program


def _norms(x: jax.Array) -> jax.Array:
    """The lengths of tokens (B, ..., D), float32 (B, N)."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1).reshape(x.shape[0], -1)


def align(ours: Measured, theirs: Measured | None = None) -> np.ndarray | None:
    """The centred kernel alignment (L, M) of the layers of one model, or of two on the same images.

    None if no batch has enough images that both could read.
    """
    others = ours if theirs is None else theirs
    both = [a & b for a, b in zip(ours.readable, others.readable, strict=True)]
    enough = [i for i, kept in enumerate(both) if kept.sum() >= MIN_IMAGES]
    if not enough:
        return None

    def grams(model: Measured) -> Sequence[np.ndarray]:
        return [model.grams[i][:, both[i]][:, :, both[i]] for i in enough]

    return alignment(grams(ours), grams(others))


def norm_table(norms: list[np.ndarray], num_prefix: int, factor: float) -> dict[str, np.ndarray]:
    """Norms of patches by layer: median, percentiles, largest, share of outliers; prefix tokens.

    Outliers are patches longer than `factor` times their layer's median. "prefix" is the mean of
    the prefix tokens, NaN without any.

    Source: Darcet et al. 2023 (arXiv:2309.16588), section 2.1, for outlier tokens.
    """
    rows = []
    for of_layer in norms:
        prefix, patches = of_layer[:, :num_prefix], of_layer[:, num_prefix:]
        median = np.median(patches)
        low, high = np.percentile(patches, (5, 95))
        rows.append({
            "median": median,
            "p5": low,
            "p95": high,
            "largest": patches.max(),
            "outlier_share": (patches > factor * median).mean(),
            "prefix": prefix.mean() if num_prefix else np.nan,
        })  # fmt: skip
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
