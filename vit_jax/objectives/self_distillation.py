"""Self-distillation: a model predicts the outputs of its own running average for other views.

    loss = cross-entropy of the views' prototypes          (DINO)
         + patch_weight * the same of hidden patches       (iBOT)
         + koleo_weight * KoLeo of the global views        (DINOv2)
         + gram_weight * distance to an older teacher's patch similarities  (DINOv3)

The teacher is `state.ema`, the running average of all parameters, the heads included. It sees the
global views without hidden patches; the student sees all views. No view is compared with itself.

Axes: B images, G global views, V all views of the student, M hidden patches of a view, D width,
K prototypes.
Sources: Caron et al. 2021 (arXiv:2104.14294); Zhou et al. 2021 (arXiv:2111.07832); Oquab et al.
2023 (arXiv:2304.07193); Siméoni et al. 2025 (arXiv:2508.10104).
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import FROM_0, POSITIVE, SHARE, key
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import Model, with_known
from vit_jax.models.patches import put_back, row_keys, take_once
from vit_jax.objectives import centring, patches
from vit_jax.objectives.block_masks import Hidden, draw_hidden
from vit_jax.objectives.contract import (
    Collapse,
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    Term,
    TokenPass,
    sums_of_rows,
)
from vit_jax.objectives.gram import NEGATIVES, gram_distance
from vit_jax.objectives.koleo import koleo
from vit_jax.objectives.other_sizes import at_size, check_resizable, check_size, resize_tokens
from vit_jax.objectives.prototypes import PrototypeHead, cross_entropies, patch_entropies

GLOBAL, LOCAL, GRAM = "global_views", "local_views", "gram_views"  # keys of a batch


class SelfDistillation(ObjectivePart):
    """Predicts the outputs of its own running average, the teacher, for other views of an image.

    The loss is the cross-entropy between the two outputs, over prototypes (DINO). Three keys add
    terms: `patch_weight` for hidden patches (iBOT), `koleo_weight` to spread the views apart
    (DINOv2), `gram_weight` to keep the patches' similarities of an older teacher (DINOv3).
    """

    num_prototypes: int = key(65_536, "prototypes of each head", within=POSITIVE)
    head_width: int = key(2048, "width of the hidden layers of the head", within=POSITIVE)
    head_layers: int = key(3, "dense layers before the prototypes", within=POSITIVE)
    bottleneck: int = key(256, "width of the prototypes", within=POSITIVE)
    patch_head: str = key(
        "shared", "the head of the patches: shared with the views, as in iBOT; or one of their "
        "own, as in the large models of DINOv2", choices=("shared", "own"),
    )  # fmt: skip
    centring: str = key("centre", "what keeps targets apart", choices=centring.CENTRINGS)
    centre_momentum: float = key(0.9, "share of the centre that stays in a step", within=SHARE)
    student_temperature: float = key(0.1, "of the student's logits", within=POSITIVE)
    teacher_temperature: float = key(0.04, "of the teacher's logits", within=POSITIVE)
    first_temperature: float | None = key(
        None, "teacher's temperature at the start, from which it rises linearly over "
        "temperature_warmup; None: none", within=POSITIVE,
    )  # fmt: skip
    temperature_warmup: int | None = key(None, "goes with first_temperature", form="duration")
    # AdamW's moments start at 0 but count from step 0, so the first hundred updates after it are up
    # to 6 times as large. Weight decay only changes the prototypes' length, which has no effect.
    freeze_prototypes: int | None = key(
        None, "duration at the start without gradients of the prototypes; None: they learn",
        form="duration",
    )  # fmt: skip
    patch_weight: float = key(0.0, "of the loss of hidden patches; 0: none are", within=FROM_0)
    masked_views: float = key(
        0.5, "share of the global views of an image that have hidden patches", within=SHARE
    )
    mask_min: float = key(0.1, "least share of hidden patches", within="(0, 1)")
    mask_max: float = key(0.5, "largest share of hidden patches", within="(0, 1)")
    koleo_weight: float = key(0.0, "of what spreads the global views apart", within=FROM_0)
    koleo_group: int | None = key(None, "rows that are spread apart; None: all", within="[2, inf)")
    gram_weight: float = key(0.0, "of the distance to the Gram teacher", within=FROM_0)
    gram_every: int | None = key(
        None, "between copies of the teacher, from step 0; goes with gram_weight", form="interval"
    )
    gram_size: int | tuple[int, int] | None = key(
        None, "of the Gram teacher's crops, int or (height, width) in pixels: cut as the global "
        "views without ops on colours, its patches resampled to theirs; None: the global views"
    )  # fmt: skip
    gram_group: int = key(1, "images whose patches are compared", within=POSITIVE)
    gram_negatives: str = key("kept", "what becomes of negative similarities", choices=NEGATIVES)

    needs_average = True
    fewest_images = None
    split_params = ((r"(bottleneck|prototypes)/kernel", ("fsdp", None)), (r"centre/\w+", ()))

    @property
    def further_views(self) -> Mapping[str, tuple[str, Any]]:
        return {} if self.gram_size is None else {GRAM: ("gram_size", self.gram_size)}

    def check(self) -> list[str]:
        faults = Faults()
        faults.need(
            self.mask_min <= self.mask_max,
            f"mask_min={self.mask_min}: must be at most objective.mask_max={self.mask_max}",
        )
        for name, other in (
            ("first_temperature", "temperature_warmup"), ("gram_weight", "gram_every"),
        ):  # fmt: skip
            value, needed = getattr(self, name), getattr(self, other)
            faults.need(
                bool(value) == (needed is not None),
                f"{other}={needed!r}: goes together with objective.{name}; set both or none",
            )
        faults.need(
            self.gram_size is None or self.gram_weight > 0,
            f"gram_size={self.gram_size!r}: without a Gram teacher it does nothing; set "
            "objective.gram_weight too",
        )
        return faults

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        model = check_resizable(model, "self_distillation")
        _check_views(model, facts, self)
        _check_start(facts.durations)
        temperature = f"objective.teacher_temperature, now {self.teacher_temperature}"
        bound = _SelfDistillation(model, self, facts.durations)
        return Objective(
            bound.loss,
            init=bound.init,
            skip=bound.skip if self.gram_weight else None,
            passes=_passes(model, facts.shapes, self.gram_weight > 0),
            needs=(GLOBAL, "mask"),
            couples_rows=True,
            needs_average=self.needs_average,
            collapse=Collapse(
                low_rank="Lower optimizer.peak_lr, or raise objective.koleo_weight",
                entropy_limit=math.log(self.num_prototypes),
                low_entropy=f"Raise {temperature}, or set objective.centring=sinkhorn, now "
                f"{self.centring}",
                high_entropy=f"Lower {temperature}, or optimizer.peak_lr",
            ),
        )


def _passes(model: Model, shapes: Mapping, anchors: bool) -> tuple[TokenPass, ...]:
    """`Objective.passes`: all views through the student, the global ones through the teachers."""
    if GLOBAL not in shapes:
        return ()  # the experiment refuses the run
    student = TokenPass(model, images=shapes[GLOBAL][1])
    found = [student, student._replace(learns=False)]
    if anchors:
        size = shapes.get(GRAM, shapes[GLOBAL])[2:4]
        found.append(found[1]._replace(model=model.clone(image_size=tuple(size))))
    if LOCAL in shapes:
        _, number, *size, _ = shapes[LOCAL]
        found.append(TokenPass(model.clone(image_size=tuple(size)), images=number))
    return tuple(found)


def _check_start(durations: Mapping[str, int]) -> None:
    """Raise InputError for what begins with the run and does not end within it."""
    total = durations.get("duration", math.inf)
    collect_faults([
        f"objective.{name}: {steps:,} steps are longer than the run of {total:,}; shorten it"
        for name in ("temperature_warmup", "freeze_prototypes")
        if (steps := durations.get(f"objective.{name}", 0)) > total
    ])  # fmt: skip


def _check_views(model: Model, facts: RunFacts, keys: SelfDistillation) -> None:
    """Raise InputError if the views of a batch do not suit the model and the keys."""
    views = facts.shapes.get(GLOBAL)
    if views is None:
        return  # reported by the experiment, with what a batch has
    rows, number = views[:2]
    if number < 2:
        raise InputError(
            f"data.num_global={number}: objective.name='self_distillation' compares global views; "
            "set --config.data.num_global=2"
        )
    groups = {"koleo_group": keys.koleo_group or rows, "gram_group": keys.gram_group}
    collect_faults([
        f"objective.{name}={group}: must divide global_batch_size={rows}; choose a divisor"
        for name, group in groups.items()
        if rows % group
    ])  # fmt: skip
    if LOCAL in facts.shapes:
        _, _, height, width, _ = facts.shapes[LOCAL]
        check_size(model, (height, width), "data.local_size")
    if GRAM in facts.shapes:
        _, _, height, width, _ = facts.shapes[GRAM]
        check_size(model, (height, width), "objective.gram_size")
    num = model.grid[0] * model.grid[1]
    for name, hidden in (
        ("masked_views", round(number * keys.masked_views)), ("mask_max", int(num * keys.mask_max)),
    ):  # fmt: skip
        if keys.patch_weight and not hidden:
            value = getattr(keys, name)
            raise InputError(f"objective.{name}={value}: leaves no hidden patches; raise it")


@dataclasses.dataclass(frozen=True)
class _SelfDistillation:
    """The functions of the objective `SelfDistillation` of a model.

    durations: {config key: steps}.
    """

    model: Model
    keys: SelfDistillation
    durations: Mapping[str, int]

    @property
    def head(self) -> PrototypeHead:
        """Of views, and of patches."""
        k = self.keys
        return PrototypeHead(
            k.num_prototypes, k.head_width, k.bottleneck, k.head_layers, self.model.dtype
        )

    @property
    def hides(self) -> bool:
        """Whether patches are hidden."""
        return self.keys.patch_weight > 0

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The heads and the mask token (1, 1, D); the centres and the Gram teacher."""
        head_key, patch_key, token_key = jax.random.split(rng, 3)
        features, k = jnp.zeros((1, self.model.width)), self.keys
        own: dict[str, Any] = {"head": self.head.init(head_key, features)["params"]}
        state: dict[str, Any] = {}
        if self.hides and k.patch_head == "own":
            own["patch_head"] = self.head.init(patch_key, features)["params"]
        if self.hides:
            own["mask_token"] = 0.02 * jax.random.normal(token_key, (1, 1, self.model.width))
        if k.centring == "centre":
            names = ("views", "patches") if self.hides else ("views",)
            state["centre"] = {name: jnp.zeros(k.num_prototypes) for name in names}
        if k.gram_weight:
            model = with_known(self.model, constrain=unconstrained, ops=PLAIN)
            assert self.model.image_size is not None
            images = jnp.zeros((1, *self.model.image_size, self.model.channels))
            shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
            state["gram_teacher"] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return own, state

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        """The sums over a batch; the hidden patches of row i are drawn by fold_in(key, i)."""
        k, mask_B, images = self.keys, batch["mask"], batch[GLOBAL]
        hidden_key, dropout_key = jax.random.split(rng)
        num_global, hidden = images.shape[1], None
        if self.hides:
            keys_B, masked = row_keys(hidden_key, len(images)), k.masked_views * num_global
            shares = k.mask_min, k.mask_max
            hidden = draw_hidden(keys_B, self.model.grid, num_global, round(masked), shares)
        teacher = jax.lax.stop_gradient(self._see(state.ema, images, hidden, None))
        learns = state.step >= self.durations.get("objective.freeze_prototypes", 0)
        student = self._study(params, batch, hidden, dropout_key, learns)
        centres = dict(cast(Any, state.objective_state.get("centre", {})))
        targets, centres["views"] = self._targets(
            teacher["views"], jnp.repeat(mask_B, num_global), centres.get("views"), state.step
        )
        loss_B = cross_entropies(student["views"], targets, k.student_temperature)
        entropy_B = centring.entropy(targets).mean(axis=1)
        terms: dict[str, Term] = {}
        if hidden is not None:
            weights = (mask_B[:, None, None] * hidden.counts).reshape(-1)
            patch_targets, centres["patches"] = self._targets(
                teacher["patches"], weights, centres.get("patches"), state.step
            )
            terms["patches"] = self._patch_term(student, patch_targets, mask_B, num_global)
        if k.koleo_weight:
            each_GB = [
                koleo(student["features"][:, g], mask_B, _fit(k.koleo_group, len(mask_B)))
                for g in range(num_global)
            ]
            sum_B = mask_B * sum(each_GB)
            terms["koleo"] = Term(sum_B.sum(), mask_B.sum(), k.koleo_weight)
        new_state: dict[str, Any] = {}
        if k.centring == "centre":
            new_state["centre"] = centres
        if k.gram_weight:
            crops = batch.get(GRAM, images)
            terms["gram"], new_state["gram_teacher"] = self._gram(state, student, crops, mask_B)
        return ObjectiveOutput(
            **sums_of_rows(
                loss_B, mask_B, teacher_entropy=entropy_B, teacher_kl=loss_B - entropy_B
            ),
            model_state=state.model_state,
            terms=terms,
            objective_state=new_state,
        )

    def _study(
        self, params: Params, batch: Batch, hidden: Hidden | None, dropout_key: jax.Array,
        learns: jax.Array | bool,
    ) -> dict[str, Any]:  # fmt: skip
        """The student's outputs for all views, as `_see`; local views follow the global ones."""
        found = self._see(params, batch[GLOBAL], hidden, dropout_key, hides=True, learns=learns)
        if LOCAL in batch:
            small, resampled = at_size(self.model, params, batch[LOCAL].shape[2:4])
            key = jax.random.fold_in(dropout_key, 1)
            local = self._see(resampled, batch[LOCAL], None, key, small, learns=learns)
            found["views"] = jnp.concatenate([found["views"], local["views"]], axis=1)
        return found

    def _see(
        self, params: Params, images: jax.Array, hidden: Hidden | None,
        dropout_key: jax.Array | None, model: Model | None = None, *,
        hides: bool = False, learns: jax.Array | bool = True,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """Outputs of the model and of the heads for views (B, V, H, W, channels).

        Args:
          params: of the model and the objective.
          images: the views.
          hidden: the patches whose outputs are wanted.
          dropout_key: None leaves out the dropout.
          model: None: the run's.
          hides: whether the model sees the mask token in place of the `hidden` patches.
          learns: whether gradients flow to the prototypes.

        Returns:
          {"features": (B, V, D), "tokens": (B, V, N, D) of the patches, "keep": (B, V, N) their
          raster indices (None: all), "views": logits (B, V, K), and with `hidden` "patches": logits
          (B, U, M, K), "counts": (B, U, M), 0 where the encoder has not seen the patch}.
        """
        model, own = model or self.model, cast(Any, params[OBJECTIVE])
        options = patches.dropout_options(dropout_key)

        def encode(model: Any, images: jax.Array, train: bool) -> tuple[Any, ...]:
            x = model.embed(images)
            if hides and hidden is not None:
                masked = hidden.in_all_views(images.shape[0])
                x = jnp.where(masked[:, :, None], own["mask_token"].astype(x.dtype), x)
            keep = model.draw_keep(*x.shape[:2], train=train)
            x = model.encode(x, keep=keep, image_size=images.shape[1:3], train=train)
            return model.represent(x), x[:, model.num_prefix_tokens :], keep

        rows, views = images.shape[:2]
        flat = images.reshape(rows * views, *images.shape[2:])
        found: Any = model.apply({"params": params}, flat, method=encode, **options)
        found = jax.tree.map(lambda x: x.reshape(rows, views, *x.shape[1:]), found)
        features, tokens, keep = found
        found = {"features": features, "tokens": tokens, "keep": keep}
        found["views"] = self.head.apply({"params": own["head"]}, features, learns)
        if hidden is not None:

            def choose(x: jax.Array) -> jax.Array:
                return jax.vmap(take_once)(take_once(x, hidden.views), hidden.which)

            found["counts"] = hidden.counts
            if keep is not None:
                put = jax.vmap(partial(put_back, num=hidden.mask.shape[2]))
                found["counts"] *= choose(put(jnp.ones((*keep.shape, 1)), keep))[..., 0]
                tokens = put(tokens, keep)
            chosen = choose(tokens)
            head = own.get("patch_head", own["head"])
            found["patches"] = self.head.apply({"params": head}, chosen, learns)
        return found

    def _targets(
        self, logits: jax.Array, weights_N: jax.Array, centre_K: jax.Array | None, step: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """The teacher's probabilities, as `logits` (..., K); the new centre, or None."""
        k, temperature = self.keys, self._temperature(step)
        flat_NK = logits.reshape(-1, logits.shape[-1])
        if k.centring == "sinkhorn":
            found = centring.sinkhorn(flat_NK, temperature, weights_N)
            return found.reshape(logits.shape), None
        if centre_K is None:
            return jax.nn.softmax(logits / temperature, axis=-1), None
        moved_K = centring.moved_centre(centre_K, flat_NK, weights_N, k.centre_momentum)
        return centring.centred(logits, centre_K, temperature), moved_K

    def _temperature(self, step: jax.Array) -> jax.Array:
        k = self.keys
        if k.first_temperature is None:
            return jnp.float32(k.teacher_temperature)
        warmup = max(self.durations["objective.temperature_warmup"], 1)
        rise = jnp.minimum(step / warmup, 1.0)
        return k.first_temperature + rise * (k.teacher_temperature - k.first_temperature)

    def _patch_term(
        self, student: Mapping[str, jax.Array], targets: jax.Array, mask_B: jax.Array,
        num_global: int,
    ) -> Term:  # fmt: skip
        """The mean over all global views; those without hidden patches count as 0."""
        each_BU = patch_entropies(
            student["patches"], targets, student["counts"], self.keys.student_temperature
        )
        sum_B = mask_B * each_BU.sum(axis=1)
        return Term(sum_B.sum(), mask_B.sum() * num_global, self.keys.patch_weight)

    def skip(self, state: State) -> ModelState:
        """`Objective.skip`: the Gram teacher is copied where that is due."""
        return {**state.objective_state, "gram_teacher": self._gram_teacher(state)}

    def _gram_teacher(self, state: State) -> Params:
        """The Gram teacher of a step, copied anew where that is due."""
        due = state.step % self.durations["objective.gram_every"] == 0
        ema = {name: leaf for name, leaf in state.ema.items() if name != OBJECTIVE}
        old = state.objective_state["gram_teacher"]
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), ema, old)

    def _gram(
        self, state: State, student: Mapping[str, jax.Array], images: jax.Array, mask_B: jax.Array
    ) -> tuple[Term, Params]:
        """The term, and the Gram teacher."""
        k, teacher = self.keys, self._gram_teacher(state)
        flat = images.reshape(-1, *images.shape[2:])
        model, resampled = at_size(self.model, teacher, flat.shape[1:3])
        tokens: Any = model.apply({"params": resampled}, flat, method="tokens")
        tokens = jax.lax.stop_gradient(tokens[:, model.num_prefix_tokens :])
        tokens = resize_tokens(tokens, model.grid, self.model.grid)
        tokens = tokens.reshape(*images.shape[:2], *tokens.shape[1:])
        if student["keep"] is not None:
            tokens = jax.vmap(take_once)(tokens, student["keep"])
        group = _fit(k.gram_group, len(mask_B))
        counts_R = mask_B.reshape(-1, group).min(axis=1)
        each_GR = [
            gram_distance(student["tokens"][:, g], tokens[:, g], group, k.gram_negatives)
            for g in range(images.shape[1])
        ]
        each_R = sum(each_GR) / len(each_GR)
        term = Term((counts_R * each_R).sum(), counts_R.sum(), k.gram_weight)
        return term, teacher


def _fit(group: int | None, rows: int) -> int:
    """Rows in a group; None: all. In a replay, which has fewer rows, the greatest common divisor of
    both.
    """
    return math.gcd(group or rows, rows)
