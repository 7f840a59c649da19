"""What rooms take, from configs and keys as tests write them."""

from vit_jax.config import (
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    Settings,
    declared_keys,
    eval_splits,
    flatten,
    with_values,
)
from vit_jax.experiment import optimizers, schedules

_DECIDED = {"data.order": "record", "data.chunk_size": 64, "optimizer.accum_steps": 1}


def decided(config):
    """`config` with what data and devices decide."""
    flat = flatten(config)
    return with_values(config, {k: v for k, v in _DECIDED.items() if flat[k] is None})


def settings_of(config):
    """The settings of `config`; open ones if more is open than data and devices decide."""
    config = decided(config)
    flat = flatten(config)
    is_open = any(k.decided and flat[name] is None for name, k in declared_keys(config).items())
    return Settings.of(config) if is_open else Settings.read(config)


def data_and_evals(config):
    settings = settings_of(config)
    return settings.data, settings.evals


def splits_of(config, name):
    """{key: split} of the evaluator `name`."""
    data, evals = data_and_evals(config)
    return eval_splits(data, evals[name])


def model_fields(config):
    """The fields that `config` gives its model."""
    model = settings_of(config).model
    return {"dtype": model.dtype, **model.own}


def make_loss(name, label_smoothing=0.0, z_loss=0.0, **keys):
    common = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    return LOSSES.make({"name": name, **common, **keys}).bind()


def make_optimizer(name, *, schedule, total_steps=1, **keys):
    return optimizers.make_optimizer(OPTIMIZERS.make({"name": name, **keys}), schedule, total_steps)


def make_schedule(name, *, peak_lr, total_steps, **keys):
    """`keys`: durations in steps, also those called `warmup_steps` and `cooldown_steps`."""
    kind = SCHEDULES.find(name)
    keys = {key.removesuffix("_steps"): value for key, value in keys.items()}
    keys = {"start": 0, "warmup": 0, "cooldown": 0} | keys
    decay = kind(name=name, **{k: v for k, v in keys.items() if k in kind.declared()})
    return schedules.make_schedule(decay, peak_lr, total_steps)


def teaching(config):
    """The sections that `read_teachers` takes."""
    settings = settings_of(config)
    return settings.objective, settings.data, settings.model
