"""Distillation: a model learns from the outputs of frozen teachers, and from labels.

    loss = (1 - weight) * loss of the labels + weight * distance to the teachers

The teachers see the same augmented pixels as the student, each in its own value range and at its
own image size.

Axes: B images, C classes, D width.
Sources: Hinton et al. 2015 (arXiv:1503.02531), section 2, for soft labels; Touvron et al. 2020
(arXiv:2012.12877), section 4, for hard labels and two heads; Wei et al. 2022 (arXiv:2205.14141),
section 3, for features.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.models.fields import value_of, with_known
from vit_jax.models.forms import PLAIN
from vit_jax.models.layers import unconstrained
from vit_jax.models.watched import Outputs, as_map, watch
from vit_jax.objectives.contract import (
    Objective,
    ObjectiveOutput,
    Setting,
    State,
    Teacher,
    Term,
)
from vit_jax.objectives.forward import apply_in_training
from vit_jax.objectives.supervised import LossFn, hits, softmax_loss
from vit_jax.tree import OBJECTIVE, Batch, ModelState, Params

MODES = ("hard", "soft", "features")
DISTANCES = ("cosine", "smooth_l1")
Taught = tuple[Any, Outputs]  # a teacher's logits, or features without a head, and its outputs

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


def parse_teachers(text: str | None) -> dict[str, float]:
    """{source: weight} of `objective.teacher`; the weights add up to 1.

    "SOURCE" is one teacher, "SOURCE, SOURCE" are two with equal weights, "SOURCE=3, SOURCE=1" two
    with the weights 3/4 and 1/4.

    Raises:
      InputError: there is none, one is named twice, or a weight is not positive.
    """
    found: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        match = re.fullmatch(r"(.*\S)\s*=\s*([-+\d.eE]+)", entry)
        source, weight = (match[1], float(match[2])) if match else (entry, 1.0)
        if source in found or not 0 < weight < math.inf:
            raise InputError(
                f"objective.teacher={text!r}: needs every teacher once, with a positive weight, as "
                "in runs/a=3, runs/b=1"
            )
        found[source] = weight
    if not found:
        raise InputError(
            f"objective.teacher={text!r}: needs a source, as init_from takes: a workdir, a file or "
            "the name of published weights"
        )
    return {source: weight / sum(found.values()) for source, weight in found.items()}


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
                f"objective.features={text!r}: {entry!r} is none of pooled, tokens, and two layers "
                "such as 5:11, the student's first"
            )
        pair = Pair(entry, entry, entry)
        if match is not None:
            pair = Pair(f"layer_{match[1]}", int(match[1]), int(match[2]))
        pairs.append(pair)
    if not pairs or len({pair.name for pair in pairs}) < len(pairs):
        raise InputError(f"objective.features={text!r}: needs different outputs of the student")
    return pairs


def check_distillation(
    loss_name: str,
    *,
    teacher: str | None = None,
    mode: str = "hard",
    weight: float = 0.5,
    temperature: float | None = None,
    features: str | None = None,
    distance: str | None = None,
) -> None:
    """Raise InputError if the keys of `objective` contradict each other, or `loss.name`."""
    faults = Faults()
    faults.check(parse_teachers, teacher)
    faults.need_known("objective.mode", mode, MODES)
    faults.need(
        0 < weight <= 1, f"objective.weight={weight}: needs a number above 0, and at most 1"
    )
    faults.need_positive("objective.temperature", temperature)
    for key, value, needed in (
        ("temperature", temperature, "soft"),
        ("features", features, "features"),
        ("distance", distance, "features"),
    ):
        faults.need(
            value is None or mode == needed,
            f"objective.{key}={value!r}: goes with objective.mode={needed}; set it to None",
        )
    if features is not None:
        faults.check(parse_features, features)
    if distance is not None:
        faults.need_known("objective.distance", distance, DISTANCES)
    faults.need(
        mode == "features" or loss_name != "sigmoid",
        f"objective.mode={mode!r}: compares classes that exclude each other, and loss.name=sigmoid "
        "does not; set --config.objective.mode=features, or --config.loss.name=softmax",
    )
    collect_faults(faults)


def needs_labels(weight: float | None) -> bool:
    """Whether a distillation with `objective.weight` also learns labels."""
    return weight is None or weight < 1


def make_distillation(
    model: nn.Module,
    loss: LossFn,
    *,
    setting: Setting,
    teacher: str | None = None,
    mode: str = "hard",
    weight: float = 0.5,
    temperature: float = 3.0,
    features: str = "pooled",
    distance: str = "cosine",
) -> Objective:
    """Make the objective that learns from `setting.teachers`.

    A student with two heads, a DeiT, learns labels with the first and the teachers with the second;
    any other learns both with its only head. Several teachers give the mean of their probabilities
    by their weights, or of their distances.

    Args:
      model: the student.
      loss: of the labels.
      setting: see `Setting`.
      teacher: where `setting.teachers` come from.
      mode: "hard": the cross-entropy of the teachers' most likely class. "soft": T^2 KL(teachers |
        student), both at temperature T; with two heads also divided by C, as in DeiT. "features":
        the distance of the teachers' features to a linear function of the student's.
      weight: share of the teachers; with 1 no labels are read.
      temperature: T.
      features: what is compared; see `parse_features`. Of tokens and layers, only the patches; a
        teacher's map is resized to the student's grid.
      distance: "cosine": 1 - cosine. "smooth_l1": of the teacher's features, normalised to mean 0
        and variance 1, quadratic up to 2.

    Raises:
      InputError: a teacher does not fit the student.
    """
    teachers = setting.teachers
    learner: _Logits | _Features
    if mode == "features":
        learner = _Features(model, teachers, parse_features(features), distance)
    else:
        learner = _Logits(model, teachers, mode, temperature)
    learns_labels = needs_labels(weight)

    def loss_of_batch(
        params: Params, state: Any, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        mask_B = batch["mask"]
        heads, outputs, model_state = _call_student(model, params, state, batch, rng)
        taught = [
            _call(
                teacher.model, variables, as_seen_by(teacher, batch["image"], setting), train=False
            )
            for teacher, variables in zip(teachers, frozen, strict=True)
        ]
        logits_BC = cast(jax.Array, sum(heads) / len(heads))
        metrics = _agreement(logits_BC, [teacher for teacher, _ in taught], teachers)
        if learns_labels:
            label_B = loss(heads[0], batch["label"])
            metrics |= {"loss_label": label_B, "top1": hits(logits_BC, batch["label"])}
        distances = learner(params.get(OBJECTIVE), heads, outputs, taught)
        terms = {
            name: Term((mask_B * distance_B).sum(), mask_B.sum(), weight / len(distances))
            for name, distance_B in distances.items()
        }
        sums = {name: (mask_B * metric_B).sum() for name, metric_B in metrics.items()}
        loss_sum = (1 - weight) * sums["loss_label"] if learns_labels else jnp.zeros(())
        return ObjectiveOutput(loss_sum, mask_B.sum(), sums, model_state, terms)

    def forward(frozen: Any, images: jax.Array) -> list[Any]:
        plain = [with_known(t.model, constrain=unconstrained, forms=PLAIN) for t in teachers]
        return [
            model.apply(variables, as_seen_by(teacher, images, setting), train=False)
            for model, teacher, variables in zip(plain, teachers, frozen, strict=True)
        ]

    return Objective(
        loss_of_batch,
        init=learner.init,
        frozen=tuple(teacher.variables for teacher in teachers),
        forward=forward,
        needs=("image", "label", "mask") if learns_labels else ("image", "mask"),
    )


def as_seen_by(teacher: Teacher, images: jax.Array, setting: Setting) -> jax.Array:
    """The images (B, H, W, channels) of a batch in a teacher's value range and image size."""
    mean, std, its_mean, its_std = (
        jnp.reshape(jnp.asarray(numbers, jnp.float32), (1, 1, 1, -1))
        for numbers in (setting.mean, setting.std, teacher.mean, teacher.std)
    )
    if (setting.mean, setting.std) != (teacher.mean, teacher.std):
        images = (images * std + mean - its_mean) / its_std
    size = teacher.model.image_size
    if size is None or size == images.shape[1:3]:
        return images
    shape = (images.shape[0], *size, images.shape[-1])
    return jax.image.resize(images, shape, "bilinear", antialias=True)


def _call_student(
    model: nn.Module, params: Params, state: State, batch: Batch, rng: jax.Array
) -> tuple[list[jax.Array], Outputs, ModelState]:
    """(logits (B, C) of each head, `Outputs`, the new model state) in training."""
    with watch() as outputs:
        logits, model_state = apply_in_training(model, params, state.model_state, batch, rng)
    return jax.tree.leaves(logits), outputs, model_state


def _call(model: nn.Module, variables: Any, images: jax.Array, **how: Any) -> tuple[Any, Outputs]:
    with watch() as outputs:
        return model.apply(variables, images, **how), outputs


def _agreement(
    logits_BC: jax.Array, taught: Sequence[jax.Array], teachers: Sequence[Teacher]
) -> dict[str, jax.Array]:
    """1.0 where the student and the mean of the teachers prefer one class; {} without classes."""
    if any(logits.shape != logits_BC.shape for logits in taught):
        return {}
    label_B = _mean_log_p(taught, teachers, 1.0).argmax(axis=1)
    return {"teacher_agreement": (logits_BC.argmax(axis=1) == label_B).astype(jnp.float32)}


def _mean_log_p(
    taught: Sequence[jax.Array], teachers: Sequence[Teacher], temperature: float
) -> jax.Array:
    """Logarithm of the weighted mean of the teachers' probabilities, (B, C)."""
    log_p = [jax.nn.log_softmax(logits / temperature) for logits in taught]
    if len(log_p) == 1:
        return log_p[0]
    weighted = [x + math.log(t.weight) for x, t in zip(log_p, teachers, strict=True)]
    return jax.nn.logsumexp(jnp.stack(weighted), axis=0)


class _Logits:
    """The distance of a head's logits to the teachers' classes."""

    init = None

    def __init__(
        self, model: nn.Module, teachers: Sequence[Teacher], mode: str, temperature: float
    ):
        self.teachers, self.mode, self.temperature = teachers, mode, temperature
        faults = []
        for teacher in teachers:
            classes, needed = teacher.model.num_classes, model.num_classes
            if classes != needed:
                has = "no classes" if classes is None else f"{classes:,} classes"
                faults.append(
                    f"objective.teacher={teacher.source!r}: has {has}, and the data have "
                    f"{needed:,}; fine-tune it on these data first, or set "
                    "--config.objective.mode=features"
                )
            elif mode == "soft" and teacher.loss == "sigmoid":
                faults.append(
                    f"objective.teacher={teacher.source!r}: was trained with the sigmoid, so its "
                    "classes do not exclude each other; set --config.objective.mode=hard"
                )
        collect_faults(faults)

    def __call__(
        self, own: Any, heads: list[jax.Array], outputs: Outputs, taught: list[Taught]
    ) -> dict[str, jax.Array]:
        del own, outputs
        logits_BC, logits = heads[-1], [found for found, _ in taught]
        if self.mode == "hard":
            label_B = _mean_log_p(logits, self.teachers, 1.0).argmax(axis=1)
            return {"hard": softmax_loss(logits_BC, label_B, 0.0)}
        t = self.temperature
        log_p_BC = _mean_log_p(logits, self.teachers, t)
        log_q_BC = jax.nn.log_softmax(logits_BC / t)
        kl_B = (jnp.exp(log_p_BC) * (log_p_BC - log_q_BC)).sum(axis=1)
        return {"soft": t**2 * kl_B / (logits_BC.shape[1] if len(heads) > 1 else 1)}


class _Features:
    """The distance of linear functions of the student's features to those of the teachers.

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
        self, own: Any, heads: list[jax.Array], outputs: Outputs, taught: list[Taught]
    ) -> dict[str, jax.Array]:
        del heads
        found: dict[str, Any] = {}
        for i, pair in enumerate(self.pairs):
            x = _choose(outputs, pair.student, "the student", self.model)
            x = x if pair.student == "pooled" else as_map(self.model, x, self.image_size)
            found[pair.name] = sum(
                teacher.weight * self._distance(own[f"adapter_{i}_{j}"], x, its, pair, teacher)
                for j, ((_, its), teacher) in enumerate(zip(taught, self.teachers, strict=True))
            )
        return found

    def _distance(self, adapter, x, outputs, pair, teacher):
        """(B,), for the student's pooled features (B, D) or map (B, rows, columns, D)."""
        y = _choose(outputs, pair.teacher, teacher.source, teacher.model)
        y = y.astype(jnp.float32)
        if pair.teacher != "pooled":
            size = teacher.model.image_size or self.image_size
            y = as_map(teacher.model, y, size)
            if y.shape[1:3] != x.shape[1:3]:
                y = jax.image.resize(y, (*x.shape[:3], y.shape[-1]), "bilinear", antialias=True)
        layer = nn.Dense(y.shape[-1], dtype=x.dtype)
        x = cast(jax.Array, layer.apply({"params": adapter}, x)).astype(jnp.float32)
        each = _cosine_distance(x, y) if self.distance == "cosine" else _smooth_l1(x, y)
        return each.reshape(each.shape[0], -1).mean(axis=1)


def _cosine_distance(x, y):
    """1 - cosine over the last axis."""
    norms = jnp.sqrt(jnp.square(x).sum(-1) * jnp.square(y).sum(-1) + _EPS**2)
    return 1 - (x * y).sum(-1) / norms


def _smooth_l1(x, y):
    """Mean over the last axis of the smooth L1 distance to `y`, normalised over that axis."""
    y = jax.nn.standardize(y, axis=-1, epsilon=_EPS)
    far = jnp.abs(x - y)
    return jnp.where(far < _BETA, far**2 / (2 * _BETA), far - _BETA / 2).mean(-1)


def _check_layers_are_seen(model: nn.Module, pairs: Sequence[Pair]) -> None:
    if all(isinstance(pair.student, str) for pair in pairs):
        return
    for field, plain in (("scan", False), ("remat", "none")):
        if value_of(model, field) != plain:
            raise InputError(
                f"model.{field}={value_of(model, field)}: hides the layers that objective.features "
                f"compares; set --config.model.{field}={str(plain).lower()}"
            )


def _outputs_of(model: nn.Module, image_size: tuple[int, int]) -> Outputs:
    """The shapes of a model's outputs."""
    plain = with_known(model, scan=False, remat="none", constrain=unconstrained, forms=PLAIN)
    images = jnp.zeros((1, *image_size, value_of(model, "channels")))

    def call():
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
        found = outputs.pooled if which == "pooled" else outputs.tokens
        if found is None:
            raise InputError(f"objective.features: a {type(model).__name__} ({who}) has no {which}")
        return found
    depth = len(outputs.layers)
    if not -depth <= which < depth:
        raise InputError(
            f"objective.features: {who} has {depth} layers; {which} is none of 0 to {depth - 1}"
        )
    return outputs.layers[which]
