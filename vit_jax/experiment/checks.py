"""Checks of the sections objective, loss, optimizer and schedule: each part checks itself."""

from ml_collections import ConfigDict

from vit_jax.config import num_microbatches, optimizer_fields
from vit_jax.devices.kernels import KERNELS
from vit_jax.errors import Faults
from vit_jax.experiment.finetune_length import RULES
from vit_jax.experiment.gradients import check_num_microbatches
from vit_jax.experiment.model import check_microbatches
from vit_jax.experiment.optimizers import check_optimizer
from vit_jax.experiment.schedules import check_ema_decay, check_schedule
from vit_jax.models import model_of
from vit_jax.objectives import check_objective
from vit_jax.objectives.supervised import make_loss


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the sections objective, loss, optimizer and schedule, and model.kernels."""
    faults.need_known("model.kernels", config.model.kernels, KERNELS)
    faults.check(check_objective, config)
    faults.check(make_loss, **config.loss)
    faults.need(
        not (config.data.multi_label and config.loss.name == "softmax"),
        "loss.name='softmax': makes the classes of an image compete, and data.multi_label gives it "
        "several; set --config.loss.name=sigmoid",
    )
    faults.check(check_optimizer, **optimizer_fields(config))
    accum_steps, size = num_microbatches(config), config.global_batch_size
    faults.check(check_num_microbatches, accum_steps)
    faults.check(check_ema_decay, config.optimizer.ema_decay, config.optimizer.ema_decay_end)
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
    last_layers = config.optimizer.last_layers
    if last_layers is not None:
        faults.need_positive("optimizer.last_layers", last_layers)
    faults.check(check_schedule, config.schedule.name, config.optimizer.peak_lr or 0.0)
