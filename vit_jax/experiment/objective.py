"""The objective of a config, with what it learns from: labels, views, teachers, an average."""

from collections.abc import Callable, Iterable, Sequence

import flax.linen as nn

from vit_jax.base.errors import InputError
from vit_jax.config import Settings, sections
from vit_jax.data.batch import BatchSpec
from vit_jax.data.device_ops import per_channel
from vit_jax.data.tokenizers import Tokenizer
from vit_jax.models.zero_shot import TextSide
from vit_jax.objectives.contract import InForm, Objective, ObjectivePart, RunFacts, Teacher
from vit_jax.objectives.metrics import training_metrics

# Remedies for keys that a batch lacks.
_SETS = {
    "image": "set --config.data.ops",
    "global_views": "set --config.data.num_global=2 and --config.data.global_ops",
    "local_views": "set --config.data.num_local=8, --config.data.local_ops and data.local_size",
    "text": "set --config.data.text_length=16 for data with captions",
}


def make_objective(
    settings: Settings,
    batch: BatchSpec,
    teachers: Sequence[Teacher],
    model: nn.Module,
    in_form: InForm,
) -> Objective:
    """The objective of a config; `in_form` gives what computes beside `model` its form.

    Raises:
      InputError: it needs what batches or the state do not hold.
    """
    channels = batch.channels
    teachers = tuple(
        teacher._replace(
            model=in_form(teacher.model),
            mean=per_channel(teacher.mean, channels),
            std=per_channel(teacher.std, channels),
        )
        for teacher in teachers
    )
    data = settings.data
    mean, std = (per_channel(values, channels) for values in (data.mean, data.std))
    shapes = {name: leaf.shape for name, leaf in batch.arrays().items()}
    rows = training_metrics(settings.log, settings.loss, data).rows
    facts = RunFacts(mean, std, teachers, shapes, settings.durations, rows, in_form, batch.text)
    objective = settings.objective.bind(model, settings.loss.bind(), facts)
    _check_needs(objective, settings.objective.name, settings.optimizer, shapes)
    return objective


def texts_that_learn(
    objective: ObjectivePart, model: nn.Module, read_tokenizer: Callable[[], Tokenizer | None]
) -> Callable[[], TextSide] | None:
    """Gives the text side of `model` in training; None if `objective` has none.

    `read_tokenizer`: gives the tokenizer of the run, if it learns texts.
    """

    def read() -> TextSide:
        tokenizer = read_tokenizer()
        assert tokenizer is not None  # captions are what it learns
        return TextSide(objective.make_matcher(model, tokenizer.facts), {}, lambda: tokenizer)

    return read if objective.learns_texts else None


def say_no_teacher(optimizer: sections.Optimizer, objective: str) -> str:
    """The fault of an optimizer whose own average takes the place of an objective's teacher."""
    return (
        f"optimizer.name={optimizer.name!r}: averages the weights in its own way, and the teacher "
        f"of objective.name={objective!r} is the average by optimizer.ema_decay; take another "
        "optimizer, such as --config.optimizer.name=adamw"
    )


def _check_needs(
    objective: Objective, name: str, optimizer: sections.Optimizer, batch: Iterable[str]
) -> None:
    """Raise InputError if the objective `name` needs what batches or the state do not hold."""
    unset = [key for key in ("ema_decay", "ema_decay_end") if getattr(optimizer, key) is None]
    if objective.needs_average and optimizer.averages:
        raise InputError(say_no_teacher(optimizer, name))
    if objective.needs_average and unset:
        raise InputError(
            f"optimizer.{unset[0]}=None: the teacher of objective.name={name!r} is the running "
            "average of the parameters; set --config.optimizer.ema_decay=0.996 and "
            "--config.optimizer.ema_decay_end=1.0, or the same for a constant decay"
        )
    accum_steps = optimizer.accum_steps
    if objective.couples_rows and accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: the loss of an image depends on the others of "
            "its batch, so the batch cannot be computed in parts; set it to 1"
        )
    missing = sorted({*objective.needs} - {*batch})
    remedies = [_SETS[key] for key in missing if key in _SETS] or ["choose another objective"]
    if missing:
        raise InputError(
            f"objective.name={name!r}: needs {', '.join(missing)} in every batch, which has "
            f"{', '.join(batch)}; {'; '.join(remedies)}"
        )
