"""Checks of the sections objective, loss, optimizer and schedule: each part checks itself."""

from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base.errors import Faults
from vit_jax.config import LOSSES, OPTIMIZERS, num_microbatches
from vit_jax.experiment.finetune_length import RULES
from vit_jax.experiment.model import check_microbatches
from vit_jax.models import model_of
from vit_jax.objectives.losses import make_loss


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the sections objective, loss, optimizer and schedule, and model.kernels."""
    objectives.check_config(config, faults)
    faults.check(make_loss, **config.loss)
    loss = Faults().check(LOSSES.find, config.loss.name)
    faults.need(
        not (config.data.multi_label and loss is not None and loss.excludes),
        f"loss.name={config.loss.name!r}: makes the classes of an image compete, and "
        "data.multi_label gives it several; set --config.loss.name=sigmoid",
    )
    o = config.optimizer
    faults.need(
        o.ema_decay_end is None or o.ema_decay is not None,
        f"optimizer.ema_decay_end={o.ema_decay_end}: needs optimizer.ema_decay at the start of the "
        "run; None keeps the decay constant",
    )
    faults.need(
        config.schedule.lowered == 1 or o.on_spike == "lower",
        f"schedule.lowered={config.schedule.lowered}: needs a branch of a run with "
        "optimizer.on_spike=lower, which sets it; leave it out",
    )
    optimizer = Faults().check(OPTIMIZERS.find, o.name)
    faults.need(
        not (o.ema_decay is not None and optimizer is not None and optimizer.averages),
        f"optimizer.ema_decay={o.ema_decay}: optimizer.name={o.name!r} keeps its own average of "
        "the weights; set it to None",
    )
    # models.check_config reports a name that is unknown.
    model = config.model.name and Faults().check(model_of, config)
    if model:
        faults.check(check_microbatches, model, config.model.name, num_microbatches(config))
    if config.schedule.rule is not None:
        faults.need_known("schedule.rule", config.schedule.rule, RULES)
