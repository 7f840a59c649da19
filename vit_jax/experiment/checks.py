"""Checks of the sections objective, loss, optimizer and schedule: each part checks itself."""

from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base.errors import Faults
from vit_jax.config import num_microbatches
from vit_jax.experiment.finetune_length import RULES
from vit_jax.experiment.model import check_microbatches
from vit_jax.models import model_of
from vit_jax.objectives.losses import make_loss


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the sections objective, loss, optimizer and schedule, and model.kernels."""
    objectives.check_config(config, faults)
    faults.check(make_loss, **config.loss)
    faults.need(
        not (config.data.multi_label and config.loss.name == "softmax"),
        "loss.name='softmax': makes the classes of an image compete, and data.multi_label gives it "
        "several; set --config.loss.name=sigmoid",
    )
    o, accum_steps, size = config.optimizer, num_microbatches(config), config.global_batch_size
    faults.need(
        o.ema_decay_end is None or o.ema_decay is not None,
        f"optimizer.ema_decay_end={o.ema_decay_end}: needs optimizer.ema_decay at the start of the "
        "run; None keeps the decay constant",
    )
    faults.need(
        size is None or accum_steps < 1 or size % accum_steps == 0,
        f"optimizer.accum_steps={accum_steps}: must divide global_batch_size={size}",
    )
    # models.check_config reports a name that is unknown.
    model = config.model.name and Faults().check(model_of, config)
    if model:
        faults.check(check_microbatches, model, config.model.name, accum_steps)
    if config.schedule.rule is not None:
        faults.need_known("schedule.rule", config.schedule.rule, RULES)
