"""Captions of pictures, by a model whose run learned to write them."""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.data import Source, to_value_range
from vit_jax.inference.outputs import computed, why_unread
from vit_jax.models.captioner import Captioner, most_probable
from vit_jax.transfer.pretrained import Pretrained


def write_captions(
    pretrained: Pretrained,
    source: Source,
    *,
    beams: int = 1,
    top: int = 1,
    batch_size: int,
    progress: bool = True,
) -> Iterator[dict[str, Any]]:
    """{"file": ..., "captions": [{"caption", "log_probability"}, ...]} for each image of `source`.

    The most probable of the `top` captions comes first. An image that cannot be read yields
    {"file": ..., "error": ...}.

    Args:
      beams: of the beam search, see `captioner.most_probable`; with 1 it is greedy.
      top: number of captions of an image, at most `beams`.
      batch_size, progress: as in `outputs.computed`.

    Raises:
      InputError: the model writes no captions, or takes images of any size.
    """
    if top > beams:
        raise InputError(f"top={top}: the search keeps beams={beams} captions; set beams={top}")
    if pretrained.read_caption_side is None:
        raise InputError(
            f"captions: {pretrained.source}: the model writes none; needs a run with "
            "objective.name='captions', as --config=captions:folder"
        )
    side = pretrained.read_caption_side()
    tokenizer, spec = side.read_tokenizer(), pretrained.spec
    own = {f"{tree.OBJECTIVE}/{name}": array for name, array in side.params.items()}
    compute = jax.jit(functools.partial(
        _compute, model=pretrained.model, captioner=side.captioner, mean=spec.mean, std=spec.std,
        end_id=tokenizer.facts.end_id, beams=beams, top=top,
    ))  # fmt: skip
    with_decoder = pretrained._replace(params={**pretrained.params, **own})
    batches = computed(
        with_decoder, source, compute, batch_size=batch_size, progress=progress, keys=("mask",)
    )
    rows = (row for found, batch in batches for row in zip(*found, batch["mask"], strict=False))
    for record, (ids_KT, score_K, mask) in enumerate(rows):
        row: dict[str, Any] = {"file": source.record_name(record)}
        if mask == 0:
            yield row | {"error": why_unread(pretrained, source, record)}
            continue
        yield row | {"captions": [
            {"caption": tokenizer.text_of(ids), "log_probability": float(score)}
            for ids, score in zip(ids_KT, score_K, strict=True) if np.isfinite(score)
        ]}  # fmt: skip


def _compute(
    params: Any,
    model_state: tree.ModelState,
    images: jax.Array,
    *,
    model: nn.Module,
    captioner: Captioner,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    """`most_probable` captions of uint8 images (B, H, W, C); the decoder's are `params`' too."""
    values = to_value_range(images, mean, std)
    tokens_BMD = model.apply({"params": params, **model_state}, values, method="tokens")
    assert isinstance(tokens_BMD, jax.Array)
    return most_probable(captioner, {"params": params[tree.OBJECTIVE]}, tokens_BMD, **how)
