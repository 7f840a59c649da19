"""Checks of the sections objective, loss, optimizer and schedule: each part checks itself."""

from vit_jax.base.errors import Faults
from vit_jax.config import Part, Settings
from vit_jax.config.drawn import find_fault_of_draws
from vit_jax.config.plugins import warn_of_removal
from vit_jax.experiment.finetune_length import RULES
from vit_jax.experiment.model import check_microbatches
from vit_jax.experiment.objective import say_no_teacher
from vit_jax.experiment.stages import check_patch_sizes
from vit_jax.models import model_of
from vit_jax.objectives.contract import ObjectivePart
from vit_jax.objectives.metrics import find_metrics

_OF_STEPS = {"loss", "grad_norm", "masked", "lr", "corrupt"}  # names in every row


def check_experiment(settings: Settings, faults: Faults) -> None:
    """Check the sections objective, loss, optimizer and schedule together with others.

    A section whose part is in fault has none, and is not checked further.
    """
    loss, o, schedule = settings.loss, settings.optimizer, settings.schedule
    objective = settings.objective
    if isinstance(objective, Part):
        _check_objective(settings, objective, faults)
    if isinstance(loss, Part):
        faults.check(loss.bind)
        learns = settings.model.name is not None and getattr(objective, "learns_labels", False)
        is_used = learns or not all(entry.learns_classes for entry in settings.evals.values())
        faults.need(
            not (settings.data.multi_label and loss.excludes and is_used),
            f"loss.name={loss.name!r}: makes the classes of an image compete, and "
            "data.multi_label gives it several; set --config.loss.name=sigmoid",
        )
    faults.need(
        schedule.lowered == 1 or o.on_spike == "lower",
        f"schedule.lowered={schedule.lowered}: needs a branch of a run with "
        "optimizer.on_spike=lower, which sets it; leave it out",
    )
    if o.averages and isinstance(objective, Part) and objective.needs_average:
        faults.append(say_no_teacher(o, objective.name))
    else:
        faults.need(
            not (o.ema_decay is not None and o.averages),
            f"optimizer.ema_decay={o.ema_decay}: optimizer.name={o.name!r} keeps its own average "
            "of the weights; set it to None",
        )
    # models.check_model reports a name that is unknown.
    name = settings.model.name
    model = Faults().check(model_of, settings.model, settings.data) if name else None
    if model is not None:
        faults.check(check_microbatches, model, name, o.accum_steps or 1)
        drawn = settings.values["model.patch_sizes"]
        if drawn is not None and not find_fault_of_draws(drawn):
            faults.check(check_patch_sizes, model, drawn)
    until = settings.values["model.keep_tokens_until"]
    faults.need(
        until is None or settings.values.get("model.keep_tokens") not in (None, 1),
        f"model.keep_tokens_until={until!r}: needs model.keep_tokens below 1; set both or neither",
    )
    if schedule.rule is not None:
        faults.need_known("schedule.rule", schedule.rule, RULES)


def _check_objective(settings: Settings, objective: ObjectivePart, faults: Faults) -> None:
    """Check `settings.objective` together with the sections from which it learns."""
    names = settings.log.metrics
    name = objective.name
    faults += objective.conflicts(settings)
    if type(objective).find_conflicts is not ObjectivePart.find_conflicts:
        warn_of_removal("find_conflicts(config)", "conflicts(settings)")
        faults += objective.find_conflicts(settings.to_config())
    faults.need(
        settings.data.max_tokens is None or objective.takes_pictures,
        f"objective.name={name!r}: learns from images of one size; set data.image_size and "
        "--config.data.max_tokens=None",
    )
    of_texts = settings.run.init_texts_from
    faults.need(
        of_texts is None or objective.learns_texts,
        f"init_texts_from={of_texts!r}: objective.name={name!r} learns no texts; leave it out",
    )
    faults.need(
        not settings.data.keep_features or objective.takes_features,
        f"data.keep_features=True: objective.name={name!r} reads images; set it to False",
    )
    faults.need(
        settings.model.patch_sizes is None or objective.takes_patch_sizes,
        f"objective.name={name!r}: learns from patches of one size; set "
        "--config.model.patch_sizes=None",
    )
    faults.check(find_metrics, names or (), settings.data.multi_label, section="log.")
    for metric in {*(names or ())} & _OF_STEPS:
        faults.append(f"log.metrics={metric!r}: every step logs that already; leave it out")
    faults.need(
        not names or objective.learns_labels,
        f"log.metrics={names!r}: objective.name={name!r} learns no labels; set it to None",
    )
