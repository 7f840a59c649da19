"""The distance of a model's features to its teachers' features.

Axes: B images, D width.
Source: Wei et al. 2022 (arXiv:2205.14141), section 3.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.tree import ModelState, Params
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import about, with_known
from vit_jax.models.own_shapes import mean_of_first
from vit_jax.models.patches import count_kept_of, take_once
from vit_jax.models.watched import Outputs, as_map, watch
from vit_jax.objectives.contract import Teacher

DISTANCES = ("cosine", "smooth_l1")
_BETA = 2.0  # of the smooth L1 distance: quadratic up to it, then linear
_EPS = 1e-6  # of the normalisation of a teacher's features


class Pair(NamedTuple):
    """An output of the student and the teachers' output that it learns.

    name: of the term of the loss.
    student, teacher: "pooled", "tokens", or the number of a layer, negative from the end.
    """

    name: str
    student: str | int
    teacher: str | int


def parse_features(text: str) -> list[Pair]:
    """The pairs in `objective.features`, such as "pooled, tokens, 5:11".

    Raises:
      InputError: an entry has another form, or comes twice.
    """
    pairs = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(-?\d+)\s*:\s*(-?\d+)", entry)
        if match is None and entry not in ("pooled", "tokens"):
            raise InputError(
                f"features={text!r}: {entry!r} is none of pooled, tokens, and two layers "
                "such as 5:11, the student's first"
            )
        layers = match and Pair(f"layer_{match[1]}", int(match[1]), int(match[2]))
        pairs.append(layers or Pair(entry, entry, entry))
    if not pairs or len({pair.name for pair in pairs}) < len(pairs):
        raise InputError(f"features={text!r}: needs different outputs of the student")
    return pairs


class Features:
    """The distance of linear functions of the student's features to the teachers' features.

    Every pair of outputs has an adapter for each teacher: a dense layer in
    `params["objective"]["adapter_PAIR_TEACHER"]`, counted from 0.
    """

    def __init__(
        self, model: nn.Module, teachers: Sequence[Teacher], pairs: Sequence[Pair], distance: str
    ):
        self.model, self.teachers, self.pairs, self.distance = model, teachers, pairs, distance
        self.image_size = model.image_size
        _check_layers_are_seen(model, pairs)
        own = _outputs_of(model, self.image_size)
        its = [_outputs_of(t.model, t.model.image_size or self.image_size) for t in teachers]
        self.widths: dict[str, tuple[int, int]] = {}
        for i, pair in enumerate(pairs):
            width = _choose(own, pair.student, "the student", model).shape[-1]
            for j, (teacher, found) in enumerate(zip(teachers, its, strict=True)):
                wanted = _choose(found, pair.teacher, teacher.source, teacher.model).shape[-1]
                self.widths[f"adapter_{i}_{j}"] = width, wanted

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The adapters, and no state."""
        own: dict[str, Params] = {}
        for i, (name, (width, wanted)) in enumerate(self.widths.items()):
            layer, key = nn.Dense(wanted), jax.random.fold_in(rng, i)
            own[name] = layer.init(key, jnp.zeros((1, width)))["params"]
        return own, {}

    def __call__(
        self, own: Any, heads: Any, outputs: Outputs, taught: Sequence[tuple[Any, Outputs]],
        counts_B: jax.Array | None = None,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """{pair: distance (B,)}; `counts_B`: the patches of each picture in its own shape."""
        found: dict[str, Any] = {}
        for i, pair in enumerate(self.pairs):
            x = _choose(outputs, pair.student, "the student", self.model)
            pooled, model = pair.student == "pooled", about(self.model)
            keep, own_B = (None, None) if pooled else (outputs.keep, counts_B)
            if keep is not None or own_B is not None:
                x = x[:, model.num_prefix_tokens :]
            elif not pooled:
                x = as_map(self.model, x, self.image_size)
            if keep is not None and own_B is not None:
                own_B = count_kept_of(own_B, model.num_patches, model.keep_tokens)
            found[pair.name] = sum(
                teacher.weight
                * self._distance(own[f"adapter_{i}_{j}"], x, its, pair, teacher, keep, own_B)
                for j, ((_, its), teacher) in enumerate(zip(taught, self.teachers, strict=True))
            )
        return found

    def _distance(
        self,
        adapter: Params,
        x: jax.Array,
        outputs: Outputs,
        pair: Pair,
        teacher: Teacher,
        keep: jax.Array | None,
        counts_B: jax.Array | None,
    ) -> jax.Array:
        """(B,), for the student's pooled features (B, D), map (B, rows, columns, D), or the patches
        `keep` (B, M, D); of pictures in their own shape the first `counts_B` count.
        """
        y = _choose(outputs, pair.teacher, teacher.source, teacher.model)
        y = y.astype(jnp.float32)
        if counts_B is not None:
            y = y[:, about(teacher.model).num_prefix_tokens :]
        elif pair.teacher != "pooled":
            size = teacher.model.image_size or self.image_size
            y = as_map(teacher.model, y, size)
            grid = x.shape[1:3] if keep is None else about(self.model).grid
            if y.shape[1:3] != grid:
                y = jax.image.resize(y, (len(y), *grid, y.shape[-1]), "bilinear", antialias=True)
        if keep is not None:
            y = take_once(y.reshape(len(y), -1, y.shape[-1]), keep)
        layer = nn.Dense(y.shape[-1], dtype=x.dtype)
        x = cast(jax.Array, layer.apply({"params": adapter}, x)).astype(jnp.float32)
        each = cosine_distance(x, y) if self.distance == "cosine" else smooth_l1(x, y)
        if counts_B is not None:
            return mean_of_first(each[..., None], counts_B)[:, 0]
        return each.reshape(each.shape[0], -1).mean(axis=1)


def cosine_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """1 - cosine over the last axis: (..., D), (..., D) -> (...)."""
    norms = jnp.sqrt(jnp.square(x).sum(-1) * jnp.square(y).sum(-1) + _EPS**2)
    return 1 - (x * y).sum(-1) / norms


def smooth_l1(x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean over the last axis of the smooth L1 distance to `y`, normalised over that axis."""
    y = jax.nn.standardize(y, axis=-1, epsilon=_EPS)
    far = jnp.abs(x - y)
    return jnp.where(far < _BETA, far**2 / (2 * _BETA), far - _BETA / 2).mean(-1)


def _check_layers_are_seen(model: nn.Module, pairs: Sequence[Pair]) -> None:
    if all(isinstance(pair.student, str) for pair in pairs):
        return
    for field, plain in (("scan", False), ("remat", "none")):
        value = getattr(about(model), field)
        if value != plain:
            remedy = f"set --config.model.{field}={str(plain).lower()}"
            raise InputError(f"model.{field}={value}: hides layers of objective.features; {remedy}")


def _outputs_of(model: nn.Module, image_size: tuple[int, int]) -> Outputs:
    """The shapes of a model's outputs."""
    plain = with_known(model, scan=False, remat="none", constrain=unconstrained, ops=PLAIN)
    images = jnp.zeros((1, *image_size, about(model).channels))

    def call() -> tuple[Any, ...]:
        with watch() as outputs:
            plain.init_with_output(jax.random.key(0), images)
        return outputs.pooled, outputs.tokens, outputs.layers

    return Outputs(*jax.eval_shape(call))


def _choose(outputs: Outputs, which: str | int, who: str, model: nn.Module) -> jax.Array:
    """The output `which` of the model of `who`.

    Raises:
      InputError: the model has no such output.
    """
    if isinstance(which, str):
        if (found := getattr(outputs, which)) is None:
            raise InputError(f"objective.features: a {type(model).__name__} ({who}) has no {which}")
        return found
    depth = len(outputs.layers)
    if not -depth <= which < depth:
        raise InputError(
            f"objective.features: {who} has {depth} layers; {which} is none of 0 to {depth - 1}"
        )
    return outputs.layers[which]
