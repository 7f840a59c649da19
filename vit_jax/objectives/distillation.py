"""Distillation: a model learns from the outputs of frozen teachers, and from labels.

    loss = (1 - weight) * loss of the labels + weight * distance to the teachers

The teachers see the same augmented pixels as the student, each in its own value range and at its
own image size; of pictures in their own shape, the same patches.

Axes: B images, C classes, D width.
Sources: Hinton et al. 2015 (arXiv:1503.02531), section 2, for soft labels; Touvron et al. 2020
(arXiv:2012.12877), section 4, for hard labels and two heads; Wei et al. 2022 (arXiv:2205.14141),
section 3, for features.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.pictures import Images, Pictures, counts_of
from vit_jax.base.tree import OBJECTIVE, Batch, Params
from vit_jax.config import LOSSES, POSITIVE, key
from vit_jax.config.settings import Settings
from vit_jax.models.contract import about, for_one_size, with_known
from vit_jax.models.watched import Outputs, watch
from vit_jax.objectives.contract import (
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    Teacher,
    Term,
    TokenPass,
    sum_rows,
)
from vit_jax.objectives.features import DISTANCES, Features, parse_features
from vit_jax.objectives.forward import apply_in_training
from vit_jax.objectives.losses import cross_entropy

TeacherOutput = tuple[Any, Outputs]  # logits, or features without a head, and its outputs


def parse_teachers(text: str) -> dict[str, float]:
    """{source: weight} of `objective.teacher`; the weights add up to 1.

    "SOURCE" is one teacher, "SOURCE, SOURCE" are two with equal weights, "SOURCE=3, SOURCE=1" two
    with the weights 3/4 and 1/4.

    Raises:
      InputError: there is none, one is named twice, or a weight is not positive.
    """
    found: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(.*\S)\s*=\s*([-+\d.eE]+)", entry)
        source, weight = (match[1], float(match[2])) if match else (entry, 1.0)
        if source in found or not 0 < weight < math.inf:
            raise InputError(f"teacher={text!r}: needs every teacher once, with a positive weight")
        found[source] = weight
    if not found:
        raise InputError(f"teacher={text!r}: needs a source, as init_from takes")
    return {source: weight / sum(found.values()) for source, weight in found.items()}


class Distillation(ObjectivePart):
    """Learns from frozen teachers, and from labels.

    A student with two heads, a DeiT, learns labels with the first and the teachers with the second;
    any other learns both with its only head. Several teachers give the mean of their probabilities
    by their weights, or of their distances.

    Modes: "hard": the cross-entropy of the teachers' most likely class. "soft": T^2 KL(teachers |
    student), both at temperature T; with two heads also divided by C, as in DeiT. "features": the
    distance of the teachers' features to a linear function of the student's; of tokens and layers,
    only the patches, and a teacher's map is resized to the student's grid.

    Distances: "cosine": 1 - cosine. "smooth_l1": of the teacher's features, normalised to mean 0
    and variance 1, quadratic up to 2.
    """

    teacher: str = key(..., 'source, as init_from takes, or several: "runs/a=3, runs/b=1"')
    mode: str = key("hard", "what the teachers give", choices=("hard", "soft", "features"))
    weight: float = key(0.5, "share of the teachers; with 1 no labels are read", within="(0, 1]")
    temperature: float | None = key(None, "of the mode soft; None: 3", within=POSITIVE)
    features: str | None = key(
        None, 'of the mode features: "pooled", "tokens", pairs of layers "5:11" (the student\'s '
        "first), or several with commas; None: pooled",
    )  # fmt: skip
    distance: str | None = key(None, "of the features; None: cosine", choices=DISTANCES)

    splits_unasked = True
    takes_pictures = True

    @property
    def learns_labels(self) -> bool:
        return self.weight < 1

    @property
    def teachers(self) -> Mapping[str, float]:
        return parse_teachers(self.teacher)

    @property
    def learns_logits(self) -> bool:
        return self.mode != "features"

    @property
    def watches_layers(self) -> bool:
        return ":" in (self.features or "")

    def check(self) -> list[str]:
        faults = Faults()
        faults.check(parse_teachers, self.teacher)
        for name, mode in (
            ("temperature", "soft"), ("features", "features"), ("distance", "features"),
        ):  # fmt: skip
            value = getattr(self, name)
            faults.need(
                value is None or self.mode == mode,
                f"{name}={value!r}: goes with objective.mode={mode}; set it to None",
            )
        faults.check(parse_features, self.features or "pooled")
        return faults

    def conflicts(self, settings: Settings) -> list[str]:
        loss, faults = settings.loss, Faults()
        faults.need(
            self.mode == "features" or loss.excludes is not False,
            f"objective.mode={self.mode!r}: needs classes that exclude each other, which "
            f"loss.name={loss.name} has not; set --config.objective.mode=features",
        )
        faults.need(
            settings.data.pack is None or (self.features or "pooled").strip(" ,") == "pooled",
            f"data.pack={settings.data.pack}: objective.features={self.features!r} compares "
            "patches of one picture a row; set --config.data.pack=None or "
            "--config.objective.features=pooled",
        )
        return faults

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        taught = tuple(with_images_of(model, teacher) for teacher in facts.teachers)
        facts = facts._replace(teachers=taught)
        learner: _Logits | Features
        if self.mode == "features":
            pairs = parse_features(self.features or "pooled")
            learner = Features(model, facts.teachers, pairs, self.distance or "cosine")
        else:
            learner = _Logits(model, facts.teachers, self.mode, self.temperature or 3.0)
        bound = _Distillation(model, loss, facts, learner, self.weight)
        models = tuple(
            teacher.model.clone(image_size=teacher.model.image_size or model.image_size)
            for teacher in facts.teachers
        )
        return Objective(
            bound.loss,
            init=learner.init,
            frozen=tuple(teacher.variables for teacher in facts.teachers),
            frozen_models=models,
            passes=(TokenPass(model), *(TokenPass(taught, learns=False) for taught in models)),
            needs=("image", "label", "mask") if self.learns_labels else ("image", "mask"),
        )


class _Distillation(NamedTuple):
    """The functions of the objective `Distillation` of a model."""

    model: nn.Module
    loss_of_labels: LossFn
    facts: RunFacts
    learner: Any
    weight: float

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        mask_B, teachers = batch["mask"], self.facts.teachers
        with watch() as outputs:
            found = apply_in_training(self.model, params, state.model_state, batch, rng)
        logits, model_state = found
        heads = jax.tree.leaves(logits)
        taught: list[TeacherOutput] = []
        for teacher, variables in zip(teachers, frozen, strict=True):
            seen = as_seen_by(teacher, batch["image"], self.facts)
            with watch() as its:
                taught.append((teacher.model.apply(variables, seen, train=False), its))
        logits_BC = cast(jax.Array, sum(heads) / len(heads))
        metrics = _agreement(logits_BC, [found for found, _ in taught], teachers)
        if self.weight < 1:
            label_B = self.loss_of_labels(heads[0], batch["label"])
            metrics["loss_label"] = label_B
            metrics |= self.facts.metrics(logits_BC, batch)
        sums = sum_rows(metrics, mask_B)
        counts_B = counts_of(batch["image"])
        distances = self.learner(params.get(OBJECTIVE), heads, outputs, taught, counts_B)
        terms = {
            name: Term((mask_B * distance_B).sum(), mask_B.sum(), self.weight / len(distances))
            for name, distance_B in distances.items()
        }
        loss_sum = (1 - self.weight) * sums.get("loss_label", jnp.zeros(()))
        return ObjectiveOutput(loss_sum, mask_B.sum(), sums, model_state, terms)


def with_images_of(model: nn.Module, teacher: Teacher) -> Teacher:
    """The teacher, whose model takes pictures in their own shape if the student `model` does.

    Raises:
      InputError: its model takes images of one size only, or has patches of another size.
    """
    most = about(model).max_tokens
    if most is None:
        return teacher._replace(model=for_one_size(teacher.model))
    where = f"objective.teacher={teacher.source!r}: a {type(teacher.model).__name__}"
    remedy = "or set data.image_size and --config.data.max_tokens=None"
    why = ""
    try:
        its = with_known(teacher.model, max_tokens=most, pack=None)
    except InputError as e:
        its, why = teacher.model, f" ({e})"
    if about(its).max_tokens != most:
        raise InputError(
            f"{where} takes images of one size{why}; choose a ViT whose positions pictures can "
            f"have, {remedy}"
        )
    has, needed = about(its).token_stride, about(model).token_stride
    if has != needed:
        raise InputError(
            f"{where} with patches of {has} pixels, but the student's have {needed}; choose a "
            f"teacher with such patches, {remedy}"
        )
    return teacher._replace(model=its)


def as_seen_by(teacher: Teacher, images: Images, facts: RunFacts) -> Images:
    """The images (B, H, W, channels) of a batch in a teacher's value range and image size.

    Pictures in their own shape keep their size.
    """
    if isinstance(images, Pictures):
        return images._replace(patches=_in_range_of(teacher, images.patches, facts))
    images, size = _in_range_of(teacher, images, facts), teacher.model.image_size
    if size is None or size == images.shape[1:3]:
        return images
    shape = (images.shape[0], *size, images.shape[-1])
    return jax.image.resize(images, shape, "bilinear", antialias=True)


def _in_range_of(teacher: Teacher, images: jax.Array, facts: RunFacts) -> jax.Array:
    """Pixels (..., channels) of the run's value range in the teacher's."""
    mean, std, its_mean, its_std = (
        jnp.reshape(jnp.asarray(numbers, jnp.float32), (1,) * (images.ndim - 1) + (-1,))
        for numbers in (facts.mean, facts.std, teacher.mean, teacher.std)
    )
    if (facts.mean, facts.std) != (teacher.mean, teacher.std):
        images = (images * std + mean - its_mean) / its_std
    return images


def _agreement(
    logits_BC: jax.Array, taught: Sequence[jax.Array], teachers: Sequence[Teacher]
) -> dict[str, jax.Array]:
    """1.0 where the student and the mean of the teachers prefer one class.

    {} if a teacher has no classes, or is known to have others.
    """
    same = all(teacher.same_classes for teacher in teachers)
    if not same or any(logits.shape != logits_BC.shape for logits in taught):
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
                    f"{needed:,}; fine-tune it first, or set --config.objective.mode=features"
                )
            elif mode == "soft" and teacher.loss and LOSSES.find(teacher.loss).excludes is False:
                faults.append(
                    f"objective.teacher={teacher.source!r}: was trained with loss.name="
                    f"{teacher.loss}, so its classes do not exclude each other; set "
                    "--config.objective.mode=hard"
                )
        collect_faults(faults)

    def __call__(
        self,
        own: Any,
        heads: list[jax.Array],
        outputs: Outputs,
        taught: list[TeacherOutput],
        counts_B: jax.Array | None,
    ) -> dict[str, jax.Array]:
        logits_BC, logits = heads[-1], [found for found, _ in taught]
        if self.mode == "hard":
            label_B = _mean_log_p(logits, self.teachers, 1.0).argmax(axis=1)
            return {"hard": cross_entropy(logits_BC, label_B)}
        log_p_BC = _mean_log_p(logits, self.teachers, self.temperature)
        loss_B = soft_loss(logits_BC, log_p_BC, self.temperature)
        return {"soft": loss_B / (logits_BC.shape[1] if len(heads) > 1 else 1)}


def soft_loss(logits_BC: jax.Array, log_p_BC: jax.Array, temperature: float) -> jax.Array:
    """T^2 KL(p | softmax(logits / T)) -> (B,), T the temperature (Hinton et al., section 2)."""
    log_q_BC = jax.nn.log_softmax(logits_BC / temperature)
    kl_B = (jnp.exp(log_p_BC) * (log_p_BC - log_q_BC)).sum(axis=1)
    return temperature**2 * kl_B
