"""Classifiers made of an image tower and of texts that describe the classes.

Axes: B images, K classes, n texts of a class, T positions of a text, D width, E common width.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import key
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import field_names
from vit_jax.models.conv_stem import ViTC
from vit_jax.models.text import Matcher, unit
from vit_jax.models.vit import ViT

_BATCH = 64  # texts at once; of fewer, the next power of two


class TextSide(NamedTuple):
    """The text side of a model of images and texts: all but its image tower.

    params: {leaf name: float32 array} of `matcher`; {}: they are the objective's of a train state.
    read_tokenizer: gives the model's `data.tokenizers.Tokenizer`.
    files: paths of that tokenizer's files, if it has some.
    by_files: whether the files alone say how texts are cleaned and padded, as Hugging Face does.
    """

    matcher: Matcher
    params: Mapping[str, np.ndarray]
    read_tokenizer: Callable[[], Any]
    files: Sequence[Any] = ()
    by_files: bool = True

    @property
    def variables(self) -> dict[str, Any]:
        """For `matcher.apply`."""
        return {"params": tree.unflatten_names(self.params)}


def need_text_side(read: Callable[[], TextSide] | None, where: str) -> TextSide:
    """The text side that `read` gives; for None raises InputError, which begins with `where`."""
    if read is None:
        raise InputError(
            f"{where}: the model has no text tower; needs one with both towers: CLIP, SigLIP, or "
            "SigLIP 2 of a fixed size"
        )
    return read()


class CosineHead(nn.Module):
    """Features (B, D) -> logits (B, K), float32: of normalised features, perhaps projected."""

    num_classes: int
    width: int | None

    @nn.compact
    def __call__(self, x_BD: jax.Array) -> jax.Array:
        if self.width is not None:
            x_BD = nn.Dense(self.width, use_bias=False, name="projection")(x_BD)
        return nn.Dense(self.num_classes, name="classes")(unit(x_BD.astype(jnp.float32)))


class ZeroShotViT(ViT):
    """A ViT that classifies by `CosineHead`; `projection`: the common width, if it projects."""

    projection: int | None = key(None, "width that features are projected to", within="[1, inf)")

    @nn.nowrap
    def _make_head(self, num_classes: int) -> nn.Module:
        return CosineHead(num_classes, self.projection)


class ZeroShotViTC(ZeroShotViT, ViTC):
    """A ViTC with the head of `ZeroShotViT`."""


# {type of an image tower: the model that classifies by texts}
TOWERS: dict[type[nn.Module], type[ZeroShotViT]] = {ViT: ZeroShotViT, ViTC: ZeroShotViTC}


def zero_shot_model(model: nn.Module, matcher: Matcher, num_classes: int) -> ZeroShotViT:
    """`model`, of a type in `TOWERS` or made here, with a head for classes described by texts."""
    fields = {name: getattr(model, name) for name in field_names(type(model))}
    width = None if matcher.image_width is None else matcher.text.common_width
    kind = type(model) if isinstance(model, ZeroShotViT) else TOWERS[type(model)]
    return kind(**fields | {"num_classes": num_classes, "projection": width})


def zero_shot_head(
    side: TextSide, texts: Sequence[np.ndarray], whole: jax.sharding.Sharding | None = None
) -> dict[str, np.ndarray]:
    """{leaf name: array} of the head of `zero_shot_model` for classes described by `texts`.

    The vector of a class is the mean of its texts' normalised features, normalised.

    Args:
      side: of the same model.
      texts: token ids of each class, int (n, T), n from 1.
      whole: the sharding of an array that every process has; None: one process computes.

    Raises:
      InputError: the ids are not the model's.

    Source: Radford et al. 2021 (arXiv:2103.00020), section 3.1.4.
    """
    matcher, params = side.matcher, side.params
    texts_NE = embed_texts(side, np.concatenate(texts), whole)
    ends = np.cumsum([len(ids) for ids in texts])[:-1]
    classes_KE = jnp.stack([of_class_nE.mean(axis=0) for of_class_nE in np.split(texts_NE, ends)])
    bias = np.asarray(params["logit_bias"]) if matcher.has_bias else 0
    scale = np.asarray(matcher.scale_of(np.asarray(params["logit_scale"])))
    head = {
        "head/classes/kernel": scale * np.asarray(unit(classes_KE)).T,
        "head/classes/bias": np.full(len(texts), bias, np.float32),
    }
    if matcher.image_width is not None:
        head["head/projection/kernel"] = params["image_head/kernel"]
    return head


def check_ids(side: TextSide, ids: np.ndarray) -> None:
    """Raise InputError if token ids are not the model's."""
    vocabulary = side.matcher.text.vocabulary
    if (last := ids.max()) >= vocabulary:
        known = f"the text tower knows {vocabulary}"
        raise InputError(f"tokenizer: gives the token {last}, and {known}; copy the model's own")


def embed_texts(
    side: TextSide, ids_NT: np.ndarray, whole: jax.sharding.Sharding | None = None
) -> np.ndarray:
    """The features (N, E) of texts, each of length 1.

    The arguments and the errors are as in `zero_shot_head`, for the token ids of all texts.
    """
    check_ids(side, ids_NT)
    embed = partial(_embed_texts(side.matcher, whole), side.variables)
    batch = min(_BATCH, 1 << (len(ids_NT) - 1).bit_length())
    padded = np.pad(ids_NT, ((0, -len(ids_NT) % batch), (0, 0)))
    found = [np.asarray(embed(part)) for part in np.split(padded, len(padded) // batch)]
    return np.asarray(unit(jnp.concatenate(found)[: len(ids_NT)]))


@functools.lru_cache(maxsize=4)
def _embed_texts(matcher: Matcher, whole: jax.sharding.Sharding | None) -> Callable:
    """(variables, ids (K, T)) -> features (K, E), jitted; every device computes all."""
    plain = matcher.clone(text=matcher.text.clone(constrain=unconstrained, ops=PLAIN))
    return jax.jit(partial(plain.apply, method="text_features"), out_shardings=whole)
