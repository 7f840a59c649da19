"""The loss over all pairs of an image and a text of the global batch.

Each device keeps its own images. The texts go round the devices that split the batch, and each
device compares the texts that pass with its images. The sums of a text (the softmax's denominator,
its gradient) travel with it and arrive where it began. So a device never holds more than the pairs
of as many texts as it has rows, whatever the number of devices. The backward pass computes the
pairs again.

To gather all texts would take B * E numbers on every device; their gradients would take as many.
A second round of the images, for the softmax over images, would send E numbers a row; the
denominator that goes with the text is one.

Axes: B rows of a batch, R rows of a device, C texts that pass, E common width.
Sources: Zhai et al. 2023 (arXiv:2303.15343), section 3; Radford et al. 2021 (arXiv:2103.00020),
figure 3.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.devices.sharding import free_axes

LOSSES = ("sigmoid", "softmax")
Axes = tuple[str, ...]  # of the mesh
_NEVER = -1e30  # the logit of a pair that does not count; finite, so that a masked row has no NaN


class Features(NamedTuple):
    """The inputs of the loss: logits = scale * (images @ texts') + bias.

    images, texts: (B, E), normalised.
    scale, bias: float32 scalars.
    """

    images: jax.Array
    texts: jax.Array
    scale: jax.Array
    bias: jax.Array


_SPLIT = Features._make((True, True, False, False))  # whether a field is split like rows


class Rows(NamedTuple):
    """Facts about the rows of a batch.

    mask: (B,), 0 for rows that are in no pair.
    keys: (B, n), equal for equal texts; see `keys_of`.
    """

    mask: jax.Array
    keys: jax.Array


class RowSums(NamedTuple):
    """Values of each row that is not masked, float32 (B,), else 0.

    image_to_text: 1 if no other text has as large a logit with the image.
    text_to_image: 1 if no other image has as large a logit with the text.
    duplicates: 1 if another row has the same text. Such a row is not in the way of the other two.
    """

    image_to_text: jax.Array
    text_to_image: jax.Array
    duplicates: jax.Array


class PairLoss(NamedTuple):
    """A loss over pairs.

    name: "sigmoid": -log sigmoid(z * logit) of all pairs, z = 1 for the text of the image, else -1.
      "softmax": the mean of the cross-entropies over the texts and over the images.
    ignores: whether a pair of unlike rows is left out if their texts are the same.
    """

    name: str
    ignores: bool = False

    def __call__(self, features: Features, rows: Rows) -> tuple[jax.Array, RowSums]:
        """The sum of the losses of all rows, and values of each row.

        It has the gradient of `features`. Rows are split over the mesh of `jax.set_mesh`; without
        one, all are computed here.
        """
        return _sums(self, features, rows)

    def _pairs(self, own: "_Own", text: "_Texts", is_home: bool) -> tuple[jax.Array, ...]:
        """(logits, whether a pair is one row's, counts else, is of equal texts), each (R, C)."""
        products_RC = _product(own.features.images, text.values.T)
        both_RC = (own.rows.mask[:, None] * text.rows.mask[None]) > 0
        row_RC = jnp.eye(len(both_RC), dtype=bool) & is_home
        other_RC = both_RC & ~row_RC
        same_RC = other_RC & (own.rows.keys[:, None] == text.rows.keys[None]).all(axis=-1)
        counts_RC = other_RC & ~same_RC if self.ignores else other_RC
        logits_RC = own.features.scale * products_RC + own.features.bias
        return logits_RC, both_RC & row_RC, counts_RC, same_RC

    def measure(self, own: "_Own", text: "_Texts", found: Any, is_home: bool) -> Any:
        """`found`, (of own rows, of texts), with what these texts add to it."""
        (total, best_R, norm_R, twice_R), (best_C, norm_C) = found
        logits_RC, match_RC, other_RC, same_RC = self._pairs(own, text, is_home)
        if self.name == "sigmoid":
            loss_RC = jax.nn.softplus(jnp.where(match_RC, -logits_RC, logits_RC))
            total += jnp.where(match_RC | other_RC, loss_RC, 0).sum()
        else:
            counted_RC = jnp.where(match_RC | other_RC, logits_RC, _NEVER)
            norm_R = jnp.logaddexp(norm_R, jax.nn.logsumexp(counted_RC, axis=1))
            norm_C = jnp.logaddexp(norm_C, jax.nn.logsumexp(counted_RC, axis=0))
        rivals_RC = jnp.where(other_RC & ~same_RC, logits_RC, _NEVER)
        best_R = jnp.maximum(best_R, rivals_RC.max(axis=1))
        best_C = jnp.maximum(best_C, rivals_RC.max(axis=0))
        return (total, best_R, norm_R, twice_R | same_RC.any(axis=1)), (best_C, norm_C)

    def differentiate(self, own: "_Own", text: "_Texts", found: Any, is_home: bool) -> Any:
        """`found`, (of own rows, of texts), with what these texts add to the gradients."""
        (sum_RE, bias), sum_CE = found
        logits_RC, match_RC, other_RC, _ = self._pairs(own, text, is_home)
        if self.name == "sigmoid":
            share_RC = jax.nn.sigmoid(logits_RC)
        else:
            over_texts_RC = jnp.exp(logits_RC - own.norms[:, None])
            share_RC = (over_texts_RC + jnp.exp(logits_RC - text.norms[None])) / 2
        grad_RC = jnp.where(match_RC | other_RC, share_RC - match_RC, 0)
        bias += grad_RC.sum()
        grad_RC = grad_RC.astype(text.values.dtype)
        sum_RE += _product(grad_RC, text.values)
        return (sum_RE, bias), sum_CE + _product(grad_RC.T, own.features.images)


class _Own(NamedTuple):
    """The rows of a device; norms: log of the softmax's denominator over texts, (R,)."""

    features: Features
    rows: Rows
    norms: jax.Array


class _Texts(NamedTuple):
    """Texts (C, E) that pass; norms: log of the softmax's denominator over images, (C,)."""

    values: jax.Array
    rows: Rows
    norms: jax.Array


def keys_of(ids_BT: jax.Array) -> jax.Array:
    """Two numbers of 32 bits for each text, (B, 2), equal for equal token ids.

    Different texts have equal numbers once in about 2^60 pairs.
    """
    factors_T2 = jax.random.bits(jax.random.key(0), (ids_BT.shape[1], 2), jnp.uint32) | 1
    return (ids_BT.astype(jnp.uint32)[:, :, None] * factors_T2[None]).sum(axis=1, dtype=jnp.uint32)


def bytes_passed_on(common_width: int) -> int:
    """The bytes of a row that go round in a step: its text twice, and its text's gradient."""
    return 3 * 4 * common_width


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest", preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(loss: PairLoss, features: Features, rows: Rows) -> tuple[jax.Array, RowSums]:
    return _forward(loss, features, rows)[0]


def _forward(loss: PairLoss, features: Features, rows: Rows) -> Any:
    def measure(axes: Axes, features: Features, rows: Rows) -> Any:
        never_R = jnp.full(rows.mask.shape, _NEVER)
        own, text = _Own(features, rows, never_R), _Texts(features.texts, rows, never_R)
        start = (jnp.zeros(()), never_R, never_R, jnp.zeros(rows.mask.shape, bool))
        found = _go_round(axes, partial(loss.measure, own), text, (start, (never_R, never_R)))
        (total, best_R, norm_R, twice_R), (best_C, norm_C) = found
        images, texts = (x.astype(jnp.float32) for x in features[:2])
        logits_R = features.scale * (images * texts).sum(axis=1) + features.bias
        if loss.name == "softmax":
            total = (rows.mask * ((norm_R + norm_C) / 2 - logits_R)).sum()
        right = (logits_R > best_R, logits_R > best_C, twice_R)
        total = jax.lax.psum(total, axes)
        return total, RowSums(*(rows.mask * x for x in right)), (norm_R, norm_C)

    total, of_rows, norms = _on_devices(measure, (False, True, True), features, rows)
    return (total, of_rows), (features, rows, norms)


def _backward(loss: PairLoss, kept: Any, cotangents: Any) -> tuple[Features, None]:
    def differentiate(axes: Axes, features: Features, rows: Rows, norms: Any) -> Features:
        own, text = _Own(features, rows, norms[0]), _Texts(features.texts, rows, norms[1])
        zeros_RE = jnp.zeros(features.images.shape)
        start = ((zeros_RE, jnp.zeros(())), zeros_RE)
        (sum_RE, bias), sum_CE = _go_round(axes, partial(loss.differentiate, own), text, start)
        scale = (features.images.astype(jnp.float32) * sum_RE).sum()
        return Features(sum_RE, sum_CE, *jax.lax.psum((scale, bias), axes))

    features, rows, norms = kept
    sums = _on_devices(differentiate, _SPLIT, features, rows, norms)
    factor, scale = cotangents[0], features.scale
    factors = Features(factor * scale, factor * scale, factor, factor)
    grads = [f * s.astype(x.dtype) for f, s, x in zip(factors, sums, features, strict=True)]
    return Features(*grads), None


_sums.defvjp(_forward, _backward)


def _on_devices(compute: Callable, split: Any, *args: Any) -> Any:
    """compute(axes, features, rows, ...) on each device's rows, which the mesh splits over `axes`.

    They are none without a mesh, and where each device computes its own rows already.

    Args:
      split: whether parts of the result are split like rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = free_axes(mesh)
    axes = tuple(axis for axis in BATCH_AXES if axis in free)
    if math.prod(mesh.shape[axis] for axis in axes) == 1:
        return compute((), *args)
    in_specs, out_specs = (
        jax.tree.map(lambda rows: P(axes) if rows else P(), tree)
        for tree in ((_SPLIT, True, True)[: len(args)], split)
    )
    return jax.shard_map(
        partial(compute, axes),
        in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False,
    )(*args)  # fmt: skip


def _go_round(axes: Axes, visit: Callable, text: _Texts, found: Any) -> tuple[Any, Any]:
    """visit(texts, (of rows, of texts), is_home) at every device, the texts' own one first.

    The sums of texts travel one visit behind them, so that no exchange waits for a visit.
    """
    ways = jax.lax.axis_size(axes) if axes else 1
    found = visit(text, found, True)
    if ways == 1:
        return found
    order = [(i, (i + 1) % ways) for i in range(ways)]

    def move(values: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, order), values)

    def pass_on(carry: Any, _: None) -> tuple[Any, None]:
        text, (of_rows, of_texts) = carry
        return (move(text), visit(text, (of_rows, move(of_texts)), False)), None

    carry = move(text), found
    (text, (of_rows, of_texts)), _ = jax.lax.scan(pass_on, carry, length=ways - 2)
    of_rows, of_texts = visit(text, (of_rows, move(of_texts)), False)  # nobody waits for `text`
    return of_rows, move(of_texts)
