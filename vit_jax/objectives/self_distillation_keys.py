"""The keys of self-distillation; checks of them, and of what surrounds them."""

import dataclasses
from typing import Any

from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.models.contract import Model
from vit_jax.objectives import centring
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.gram import NEGATIVES
from vit_jax.objectives.other_sizes import check_size

GLOBAL, LOCAL = "global_views", "local_views"  # keys of a batch


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of `config.objective` that self-distillation takes; durations are strings.

    num_prototypes: K, of each head.
    head_width, head_layers, bottleneck: of the heads; see `PrototypeHead`.
    patch_head: "shared": views and patches have one head, as in iBOT; "own": two, as the large
      models of DINOv2 have.
    centring: "centre", "sinkhorn" or, to show collapse, "none"; see centring.py.
    centre_momentum: of the centre.
    student_temperature: of the student's logits.
    teacher_temperature: of the teacher's logits; it rises linearly from `first_temperature` over
      the duration `temperature_warmup`.
    freeze_prototypes: duration at the start in which the prototypes get no gradients (weight decay
      only changes their length, which has no effect); None: none. AdamW's moments start at 0 but
      count from step 0, so the first hundred updates that follow are up to 6 times as large.
    patch_weight: weight of the loss of hidden patches; 0: no patches are hidden.
    masked_views: share of the global views of an image that have hidden patches, rounded to views.
    mask_min, mask_max: range of the share of their patches that are hidden.
    koleo_weight: weight of `koleo`, summed over the global views.
    koleo_group: rows that `koleo` compares with each other; None: all.
    gram_weight: weight of `gram_distance` to the Gram teacher, an older copy of the teacher.
    gram_every: interval at which the teacher is copied again, first at step 0.
    gram_group, gram_negatives: see `gram_distance`.
    """

    num_prototypes: int = 65_536
    head_width: int = 2048
    head_layers: int = 3
    bottleneck: int = 256
    patch_head: str = "shared"
    centring: str = "centre"
    centre_momentum: float = 0.9
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    first_temperature: float | None = None
    temperature_warmup: str | None = None
    freeze_prototypes: str | None = None
    patch_weight: float = 0.0
    masked_views: float = 0.5
    mask_min: float = 0.1
    mask_max: float = 0.5
    koleo_weight: float = 0.0
    koleo_group: int | None = None
    gram_weight: float = 0.0
    gram_every: str | None = None
    gram_group: int = 1
    gram_negatives: str = "kept"


def check_self_distillation(**own: Any) -> None:
    """Raise InputError if keys of `objective` are out of range, or contradict each other."""
    k, faults = Keys(**own), Faults()
    for key in ("num_prototypes", "head_width", "bottleneck", "gram_group"):
        faults.need_positive(f"objective.{key}", getattr(k, key))
    if k.first_temperature is not None:
        faults.need_positive("objective.first_temperature", k.first_temperature)
    faults.need(
        k.koleo_group is None or k.koleo_group > 1,
        f"objective.koleo_group={k.koleo_group}: needs at least 2 rows, so that each has a "
        "neighbour, or None for the whole batch",
    )
    for key in ("student_temperature", "teacher_temperature", "head_layers"):
        faults.need_positive(f"objective.{key}", getattr(k, key))
    faults.need_known("objective.patch_head", k.patch_head, ("shared", "own"))
    faults.need_known("objective.centring", k.centring, centring.CENTRINGS)
    faults.need_known("objective.gram_negatives", k.gram_negatives, NEGATIVES)
    for key in ("patch_weight", "koleo_weight", "gram_weight"):
        value = getattr(k, key)
        faults.need(value >= 0, f"objective.{key}={value}: must be at least 0; 0 turns it off")
    for key in ("centre_momentum", "masked_views"):
        value = getattr(k, key)
        faults.need(0 <= value <= 1, f"objective.{key}={value}: needs a number from 0 to 1")
    faults.need(
        0 < k.mask_min <= k.mask_max < 1,
        f"objective.mask_min={k.mask_min}: needs 0 < mask_min <= objective.mask_max < 1, which is "
        f"{k.mask_max}",
    )
    for key, needed in (("first_temperature", "temperature_warmup"), ("gram_weight", "gram_every")):
        faults.need(
            bool(getattr(k, key)) == (getattr(k, needed) is not None),
            f"objective.{needed}={getattr(k, needed)!r}: goes together with objective.{key}; set "
            "both or none",
        )
    collect_faults(faults)


def check_views(model: Model, setting: RunFacts, keys: Keys) -> None:
    """Raise InputError if the views of a batch do not suit the model and the keys."""
    views = setting.shapes.get(GLOBAL)
    if views is None:
        return  # reported by the experiment, with what a batch has
    rows, number = views[:2]
    if number < 2:
        raise InputError(
            f"data.num_global={number}: objective.name='self_distillation' compares global views "
            "with each other; set --config.data.num_global=2"
        )
    groups = {"koleo_group": keys.koleo_group or rows, "gram_group": keys.gram_group}
    for key, group in groups.items():
        if rows % group:
            raise InputError(
                f"objective.{key}={group}: must divide global_batch_size={rows}; choose a divisor"
            )
    if LOCAL in setting.shapes:
        _, _, height, width, _ = setting.shapes[LOCAL]
        check_size(model, (height, width), "data.local_size")
    if keys.patch_weight and not round(number * keys.masked_views):
        raise InputError(
            f"objective.masked_views={keys.masked_views}: leaves no view with hidden patches; set "
            "it to 0.5, or objective.patch_weight to 0"
        )
    patches_of_view = model.grid[0] * model.grid[1]
    if keys.patch_weight and patches_of_view * keys.mask_max < 1:
        raise InputError(
            f"objective.mask_max={keys.mask_max}: hides none of a view's {patches_of_view} "
            "patches; raise it, or set objective.patch_weight to 0"
        )
