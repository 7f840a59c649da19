"""The arrays of a global batch, and the images that host ops make of one record.

The input, the training step and its plans share this description. A record gives one `image`, views
(preprocessing.py), or both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.data import order
from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.native import PatchRule
from vit_jax.data.ops import HostOp, check_crops
from vit_jax.data.tokenizers import TextFacts

_OPS_OF_A_VIEW = 64  # at most; op i of view v draws from the key number 64 (v + 1) + i


class Crops(NamedTuple):
    """The images that a batch holds under one key.

    key: the config key of their ops.
    size: (height, width) of each; of pictures in their own shape, of each patch.
    host_ops: of each image.
    first_view: number of the first one; None: there is one image, without an axis of views.
    sized: the config key of their size.
    rule: cuts the image into patches, as `Pictures`; None: it keeps `size`.
    """

    key: str
    size: tuple[int, int]
    host_ops: tuple[tuple[HostOp, ...], ...]
    first_view: int | None = None
    sized: str = "data.image_size"
    rule: PatchRule | None = None

    def make(self, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """The images of a record: uint8 (h, w, channels), or (views, h, w, channels).

        Views are cut from pixels, so that a file is decoded once for all of them.
        """
        if self.first_view is None:
            return _apply(self.host_ops[0], image, key, 0)
        firsts = [_OPS_OF_A_VIEW * (self.first_view + v + 1) for v in range(len(self.host_ops))]
        views = [
            _apply(ops, image, key, first) for ops, first in zip(self.host_ops, firsts, strict=True)
        ]
        # Views of a wrong size would not stack; `check_made` finds the first of them.
        wrong = [view for view in views if tuple(view.shape)[:2] != self.size]
        return tf.stack(wrong[:1] or views)

    @property
    def distinct_ops(self) -> list[tuple[HostOp, ...]]:
        """`host_ops`, without repetitions."""
        return [*{tuple(op.text for op in ops): ops for ops in self.host_ops}.values()]

    def shape(self, channels: int) -> tuple[int, ...]:
        """The shape of the images of a record."""
        views = () if self.first_view is None else (len(self.host_ops),)
        views = views if self.rule is None else (self.rule.most,)
        return (*views, *self.size, channels)

    def check(self, source: Source) -> None:
        """Raise InputError if ops cannot start from the images of `source`, or crop too much."""
        any_size = source.encoded and source.image_shape is None
        for ops in self.distinct_ops:
            if any_size and not (ops and ops[0].takes_encoded):
                first = repr(ops[0].text) if ops else "no host op"
                raise InputError(
                    f"{self.key} begins with {first}, but the images of data.name={source.name!r} "
                    "are encoded; put 'decode' or 'inception_crop' first"
                )
            check_crops(ops, self.key, source.image_shape and source.image_shape[:2])

    def check_made(self, shape: Sequence[int | None], channels: int) -> None:
        """Raise InputError unless the images of a record have this `shape`."""
        found, needed = tuple(shape)[-3:], (*self.size, channels)
        if found != needed:
            texts = "; ".join("|".join(op.text for op in ops) for ops in self.distinct_ops)
            raise InputError(
                f"{self.key}={texts!r} gives images of {found}; needed: {needed}, from "
                f"{self.sized}; end the host ops with 'resize' or a crop"
            )


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The batches of a pass over the data; pipeline.py lists their arrays.

    size: B, the number of rows over all processes.
    crops: {key of a batch: its images}: `image`, views, or both.
    channels: of the images.
    label_size: C if labels are float32 (B, C); None: they are int32 (B,).
    text: of the tokenizer of the captions; None: they are not read.
    features: D if a row has the features of its image; None: it has none.
    """

    size: int
    crops: Mapping[str, Crops]
    channels: int = 3
    label_size: int | None = None
    text: TextFacts | None = None
    features: int | None = None

    def arrays(self, sharding: jax.sharding.Sharding | None = None) -> dict[str, Any]:
        """{key: the shape and dtype of its array}, with `sharding` if it is given.

        Pictures in their own shape are `Pictures` of shapes.
        """

        def array(dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.size, *shape), dtype, sharding=sharding)

        crops = self.crops.items()
        images: dict[str, Any] = {
            name: array(jnp.uint8, *crop.shape(self.channels)) for name, crop in crops
        }
        if "image" in images and self.crops["image"].rule is not None:
            images["image"] = Pictures(images["image"], array(jnp.int32, 2))
        label = array(jnp.int32)
        if self.label_size is not None:
            label = array(jnp.float32, self.label_size)
        texts = {}
        if self.text is not None:
            texts["text"] = array(jnp.int32, self.text.length)
            texts["text_mask"] = array(jnp.float32)
        if self.features is not None:
            images["features"] = array(jnp.float16, self.features)
        mask, ids = array(jnp.float32), array(jnp.int32)
        return {**images, "label": label, "mask": mask, "id": ids, **texts}


def image_batch(
    size: int,
    image_size: tuple[int, int],
    host_ops: Sequence[HostOp] = (),
    key: str = "data.ops",
    rule: PatchRule | None = None,
) -> BatchSpec:
    """A batch with one image (H, W) a row, made by `host_ops`; `key` is the ops' config key.

    `rule`: cuts it into patches; None: it keeps (H, W).
    """
    return BatchSpec(size, {"image": image_crops(key, image_size, host_ops, rule)})


def image_crops(
    key: str, image_size: tuple[int, int], host_ops: Sequence[HostOp], rule: PatchRule | None
) -> Crops:
    """The one image of a record; see `image_batch`."""
    if rule is None:
        return Crops(key, image_size, (tuple(host_ops),))
    return Crops(key, rule.patch_size, (tuple(host_ops),), sized="data.max_tokens", rule=rule)


def decode_early(source: Source, image: tf.Tensor, *, for_views: bool = False) -> tf.Tensor:
    """An encoded image before the first op: pixels, where all have one shape, or not 3 channels.

    Otherwise the first op decodes it, perhaps only a window of it; `for_views`: pixels always.
    """
    if source.image_shape is None and source.channels == 3 and not for_views:
        return image
    pixels = to_pixels(image, source.channels)
    return pixels if source.image_shape is None else tf.ensure_shape(pixels, source.image_shape)


def make_all(
    crops: Mapping[str, Crops], source: Source, image: tf.Tensor, key: tf.Tensor
) -> dict[str, tf.Tensor]:
    """{key of a batch: images} of a record, whose `image` is encoded or pixels."""
    image = decode_early(source, image)
    pixels = image
    if any(crop.first_view is not None for crop in crops.values()):
        pixels = decode_early(source, image, for_views=True)
    made: dict[str, tf.Tensor] = {}
    for name, crop in crops.items():
        found = crop.make(image if crop.first_view is None else pixels, key)
        made |= {name: found} if crop.rule is None else crop.rule.cut(found, key)
    return made


def _apply(host_ops: Iterable[HostOp], image: tf.Tensor, key: tf.Tensor, first: int) -> tf.Tensor:
    for i, op in enumerate(host_ops, first):
        image = op(image, order.fold_in(key, i))
    return image
