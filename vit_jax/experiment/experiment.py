"""Builds the objects of a run from a resolved config, for training as well as for planning."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import tree
from vit_jax.config import model_fields, num_microbatches, optimizer_fields, step_fields
from vit_jax.data import (
    check_order,
    make_device_transform,
    pair_distance,
    resolve_order,
)
from vit_jax.data.device_ops import MIXING_OPS, DeviceTransform, per_channel
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.data.views import view_shapes
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.flops import program_flops
from vit_jax.devices.kernels import KERNELS, choose_forms
from vit_jax.devices.mesh import batch_sharding
from vit_jax.devices.sharding import constrain, gradient_shardings, state_shardings
from vit_jax.errors import Faults, InputError
from vit_jax.experiment.data_size import RULES
from vit_jax.experiment.durations import parse_durations, parse_milestones
from vit_jax.experiment.exchange import choose_exchange
from vit_jax.experiment.gradients import Gradients, make_gradients
from vit_jax.experiment.layer_norms import make_layer_norms
from vit_jax.experiment.optimizers import make_optimizer
from vit_jax.experiment.schedules import Schedule, make_schedule
from vit_jax.experiment.state import TrainState, init_state
from vit_jax.experiment.step import (
    AbstractBatch,
    JittedStep,
    Metrics,
    check_step,
    make_train_step,
)
from vit_jax.models import create_model, find_family
from vit_jax.models.fields import field_names, has_batch_statistics, with_known
from vit_jax.models.forms import PLAIN
from vit_jax.models.layers import unconstrained
from vit_jax.objectives import check_objective, make_objective
from vit_jax.objectives.contract import Objective, Setting, Teacher
from vit_jax.objectives.supervised import make_loss

logger = logging.getLogger("vit_jax")

# Remedies for keys that a batch lacks.
_SETS = {
    "image": "set --config.data.ops",
    "global_views": "set --config.data.num_global=2 and --config.data.global_ops",
    "local_views": "set --config.data.num_local=8, --config.data.local_ops and data.local_size",
}
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The model, schedule and jitted functions of a config on a mesh; nothing is computed yet.

    Use it under `jax.set_mesh(mesh)`.

    model, schedule: as configured.
    durations: {key: steps} for every duration that the config sets.
    init: () -> TrainState, jitted and sharded.
    train_step: (state, batch, *frozen) -> (state, metrics), jitted; donates the state.
    layer_norms: (state, batch, *frozen) -> norms by layer for that step, jitted; keeps the state.
    abstract_state, abstract_batch: shapes, dtypes and shardings of the arguments of a step.
    abstract_frozen: the same for the frozen arrays, the step's third argument: a tuple of one tree;
      () if the objective has none.
    freeze: regex over the names of parameters that do not change; None: all change.
    objective: what the step minimises.
    plain_gradients: freeze -> the gradients of a step without kernels, microbatches and what is
      recomputed, to count their FLOPs.
    """

    model: nn.Module
    schedule: Schedule
    durations: Mapping[str, int]
    init: Callable[[], TrainState]
    train_step: JittedStep[tuple[TrainState, Metrics]]
    layer_norms: JittedStep[Metrics]
    abstract_state: TrainState
    abstract_batch: AbstractBatch
    objective: Objective
    plain_gradients: Callable[[str | None], Gradients]
    freeze: str | None = None
    abstract_frozen: tuple[tree.PyTree, ...] = ()

    @property
    def arguments(self) -> tuple[TrainState, AbstractBatch, *tuple[tree.PyTree, ...]]:
        """Shapes, dtypes and shardings of all arguments of a step."""
        return self.abstract_state, self.abstract_batch, *self.abstract_frozen

    @property
    def shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    def lower(self) -> jax.stages.Lowered:
        """Lower the training step for the devices of its mesh, which need not be present.

        Training, planning and benchmarks all compile this program.
        """
        return self.trace().lower()

    def trace(self) -> jax.stages.Traced:
        """The training step before it is lowered."""
        return self.train_step.trace(*self.arguments)

    @functools.cached_property
    def flops_per_step(self) -> int:
        """FLOPs of a training step over all devices, including rematerialisation."""
        return program_flops(self.trace().jaxpr.jaxpr)

    @property
    def total_steps(self) -> int:
        """Number of steps in the whole run."""
        return self.durations["duration"]

    @property
    def num_params(self) -> int:
        """Number of parameters in the model."""
        return sum(x.size for x in jax.tree.leaves(self._model_params))

    @property
    def _model_params(self) -> tree.Params:
        params = self.abstract_state.params
        return {name: leaf for name, leaf in params.items() if name != tree.OBJECTIVE}

    @property
    def num_trained(self) -> int:
        """Number of parameters that are not frozen."""
        params = self._model_params
        if self.freeze is None:
            return self.num_params
        trained = jax.tree.map(
            lambda leaf, frozen: leaf.size - leaf.size * np.mean(frozen),
            params,
            tree.mask(params, self.freeze),
        )
        return round(sum(jax.tree.leaves(trained)))

    @functools.cached_property
    def flops_per_image(self) -> int:
        """FLOPs of a forward and a backward pass for one image, without rematerialisation.

        They count what the objective computes: a decoder and a teacher's forward pass count;
        patches that do not go through the model, and gradients of what is frozen, do not.
        """
        return self._count_per_image(self.freeze)

    @functools.cached_property
    def forward_flops_per_image(self) -> int:
        """FLOPs of the forward pass in `flops_per_image`."""
        return self._count_per_image(".*")

    def _count_per_image(self, freeze: str | None) -> int:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.arguments)
        traced = jax.make_jaxpr(self.plain_gradients(freeze))(*args)
        return program_flops(traced.jaxpr) // len(args[1]["mask"])


def make_experiment(
    config: ConfigDict,
    mesh: Mesh,
    preprocessing: Preprocessing | None = None,
    teachers: Sequence[Teacher] = (),
) -> Experiment:
    """Build the experiment of a config with known `data.num_classes` and `data.num_examples`.

    `preprocessing`: the config's, if it has been parsed already. `teachers`: the teachers
    of the objective, with arrays or their shapes.

    Raises:
      InputError: for faults that `validation.validate` cannot find.
    """
    assert None not in (config.data.num_classes, config.data.num_examples), "not resolved"
    preprocessing = preprocessing or parse_preprocessing(config)
    image_size = preprocessing.image_size
    durations, model = parse_durations(config), make_model(config, image_size, mesh)
    schedule = make_config_schedule(config, durations)
    total_steps = durations["duration"]
    tx = make_optimizer(**optimizer_fields(config), schedule=schedule, total_steps=total_steps)
    batch_shapes = _batch_shapes(config, preprocessing, batch_sharding(mesh))
    exchange = choose_exchange(model, config.objective.name, mesh)
    learner = model if exchange is None else with_known(model, constrain=unconstrained)
    objective_of = functools.partial(
        _make_objective, config, teachers=teachers, batch=batch_shapes, durations=durations
    )
    objective = objective_of(learner, functools.partial(_on_mesh, config=config, mesh=mesh))
    _check_needs(objective, config, batch_shapes)
    transform = _make_transform(config, preprocessing)
    parts = (objective, tx, transform, config.seed)
    step = step_fields(config)
    check_microbatches(model, config.model.name, step["accum_steps"])

    def plain_gradients(freeze: str | None) -> Gradients:
        plain = objective_of(with_known(_in_plain_form(model), remat="none"), _in_plain_form)
        return make_gradients(plain, transform, config.seed, 1, freeze)

    init = functools.partial(
        init_state,
        with_known(model, forms=PLAIN),  # of one image, which kernels do not split over devices
        tx,
        image_size,
        config.seed,
        with_ema=config.optimizer.ema_decay is not None,
        init_objective=objective.init,
    )
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init)
    shardings, batch = state_shardings(shapes, mesh), batch_sharding(mesh)
    grad_shardings = gradient_shardings(shardings.params, mesh)
    frozen = _abstract_frozen(objective, mesh)
    inputs = (shardings, batch, *jax.tree.map(lambda x: x.sharding, frozen))
    jit = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
    return Experiment(
        model=model,
        schedule=schedule,
        durations=durations,
        init=jit(init, out_shardings=shardings),
        train_step=jit(
            make_train_step(
                *parts,
                **step,
                total_steps=total_steps,
                grad_shardings=grad_shardings,
                exchange=exchange,
            ),
            in_shardings=inputs,
            out_shardings=(shardings, None),
            donate_argnums=0,
        ),
        layer_norms=jit(
            make_layer_norms(
                *parts,
                accum_steps=step["accum_steps"],
                freeze=step["freeze"],
                grad_shardings=grad_shardings,
                exchange=exchange,
            ),
            in_shardings=inputs,
        ),
        abstract_state=_with_sharding(shapes, shardings),
        abstract_batch=batch_shapes,
        objective=objective,
        plain_gradients=plain_gradients,
        freeze=step["freeze"],
        abstract_frozen=frozen,
    )


def _make_objective(
    config: ConfigDict,
    model: nn.Module,
    in_form: Callable[[nn.Module], nn.Module],
    teachers: Sequence[Teacher],
    batch: AbstractBatch,
    durations: Mapping[str, int],
) -> Objective:
    """The objective of a config; `in_form` gives the teachers' models the form to compute in."""
    channels = config.data.channels
    teachers = tuple(
        teacher._replace(
            model=in_form(teacher.model),
            mean=per_channel(teacher.mean, channels),
            std=per_channel(teacher.std, channels),
        )
        for teacher in teachers
    )
    mean, std = (per_channel(config.data[key], channels) for key in ("mean", "std"))
    shapes = {name: leaf.shape for name, leaf in batch.items()}
    setting = Setting(mean, std, teachers, shapes, durations, config.data.multi_label)
    loss = make_loss(**config.loss)
    return make_objective(model, loss, setting=setting, **config.objective)


def _check_needs(objective: Objective, config: ConfigDict, batch: AbstractBatch) -> None:
    """Raise InputError if the objective needs what batches or the state do not hold."""
    name = config.objective.name
    if objective.needs_average and config.optimizer.ema_decay is None:
        raise InputError(
            f"optimizer.ema_decay=None: the teacher of objective.name={name!r} is the running "
            "average of the parameters; set --config.optimizer.ema_decay=0.996 and "
            "--config.optimizer.ema_decay_end=1.0"
        )
    if objective.needs_average and config.optimizer.ema_decay_end is None:
        raise InputError(
            f"optimizer.ema_decay_end=None: the average would follow the parameters closely in the "
            f"first steps, and is the teacher of objective.name={name!r}; set "
            f"--config.optimizer.ema_decay_end=1.0, or {config.optimizer.ema_decay} for a constant "
            "decay"
        )
    missing = sorted({*objective.needs} - {*batch})
    remedies = [_SETS[key] for key in missing if key in _SETS] or ["choose another objective"]
    if missing:
        raise InputError(
            f"objective.name={name!r}: needs {', '.join(missing)} in every batch, which has "
            f"{', '.join(batch)}; {'; '.join(remedies)}"
        )


def _abstract_frozen(objective: Objective, mesh: Mesh) -> tuple[tree.PyTree, ...]:
    """`Experiment.abstract_frozen`."""
    if objective.frozen is None:
        return ()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), objective.frozen)
    return (_with_sharding(shapes, state_shardings(shapes, mesh)),)


def make_model(config: ConfigDict, image_size: tuple[int, int], mesh: Mesh) -> nn.Module:
    """The model of a resolved config, sharded over `mesh`, in the fastest forms for it."""
    model = create_model(
        config.model.name,
        config.data.num_classes,
        image_size,
        channels=config.data.channels,
        **model_fields(config),
    )
    model = _on_mesh(model, config, mesh)
    _warn_of_uneven_split(model, mesh)
    return model


def _on_mesh(model: nn.Module, config: ConfigDict, mesh: Mesh) -> nn.Module:
    """`model` sharded over `mesh`, in the fastest forms for it."""
    return choose_forms(with_known(model, constrain=constrain), mesh, config.model.kernels)


def _in_plain_form(model: nn.Module) -> nn.Module:
    """`model` on one device, without kernels."""
    return with_known(model, constrain=unconstrained, forms=PLAIN)


def make_config_schedule(config: ConfigDict, durations: Mapping[str, int]) -> Schedule:
    """The learning rate of a resolved config, whose durations in steps are `durations`."""
    return make_schedule(
        config.schedule.name,
        peak_lr=config.optimizer.peak_lr,
        total_steps=durations["duration"],
        warmup_steps=durations["schedule.warmup"],
        cooldown_steps=durations["schedule.cooldown"],
        timescale=durations["schedule.timescale"],
        milestones=parse_milestones(config),
    )


def _make_transform(config: ConfigDict, preprocessing: Preprocessing) -> DeviceTransform:
    device_ops = preprocessing.device_ops
    mixes = any(op.name in MIXING_OPS for op in device_ops)
    return make_device_transform(
        device_ops,
        config.data.mean,
        config.data.std,
        num_classes=config.data.num_classes,
        distance=_pair_distance(config, mixes),
        views=preprocessing.views,
    )


def _pair_distance(config: ConfigDict, mixes: bool) -> int:
    """Distance of paired rows; raises InputError if data.ops `mixes` and the order has no pairs."""
    d = config.data
    batch = {"global_batch_size": config.global_batch_size, "repeats": d.repeats}
    name, streams = resolve_order(d.order, d.streams, num_examples=d.num_examples, **batch)
    check_order(name, chunk_size=d.chunk_size, streams=streams, **batch, mixes=mixes)
    return pair_distance(name, streams, **batch)


def _warn_of_uneven_split(model: nn.Module, mesh: Mesh) -> None:
    tensor = mesh.shape["tensor"]
    split = [f for f in ("num_heads", "mlp_dim", "stem_width") if f in field_names(type(model))]
    uneven = [field for field in split if getattr(model, field) % tensor]
    if uneven:
        logger.warning(
            "mesh.tensor=%d does not divide %s: activations are replicated instead of split; "
            "choose a size that divides them",
            tensor,
            " and ".join(f"model.{f}={getattr(model, f)}" for f in uneven),
        )


def _with_sharding(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _batch_shapes(
    config: ConfigDict, preprocessing: Preprocessing, sharding: jax.sharding.Sharding
) -> AbstractBatch:
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    size, channels = config.global_batch_size, config.data.channels
    images = view_shapes(preprocessing.views, channels)
    if preprocessing.has_image:
        images |= {"image": (*preprocessing.image_size, channels)}
    label = array((size,), jnp.int32)
    if config.data.multi_label or config.data.soft_labels:
        label = array((size, config.data.num_classes), jnp.float32)
    return {
        **{name: array((size, *shape), jnp.uint8) for name, shape in images.items()},
        "label": label,
        "mask": array((size,), jnp.float32),
        "id": array((size,), jnp.int32),
    }


def check_microbatches(model: nn.Module | type[nn.Module], name: str, accum_steps: int) -> None:
    """Raise InputError if `model` cannot be trained in `accum_steps` microbatches."""
    if has_batch_statistics(model) and accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: the batch statistics of model.name={name!r} are "
            "those of the whole batch; set --config.optimizer.accum_steps=1, with a smaller "
            "--config.global_batch_size or --config.model.remat=full if memory is short"
        )


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
    faults.check(make_optimizer, **optimizer_fields(config), schedule=lambda step: 0.0)
    accum_steps, size = num_microbatches(config), config.global_batch_size
    decays = config.optimizer.ema_decay, config.optimizer.ema_decay_end
    faults.check(check_step, accum_steps, *decays)
    faults.need(
        size is None or accum_steps < 1 or size % accum_steps == 0,
        f"optimizer.accum_steps={accum_steps}: must divide global_batch_size={size}",
    )
    # models.check_config reports a name that is unknown.
    family = config.model.name and Faults().check(find_family, config.model.name)
    if family:
        faults.check(check_microbatches, family.module, config.model.name, accum_steps)
    if config.schedule.rule is not None:
        faults.need_known("schedule.rule", config.schedule.rule, RULES)
    last_layers = config.optimizer.last_layers
    if last_layers is not None:
        faults.need_positive("optimizer.last_layers", last_layers)
    peak_lr = config.optimizer.peak_lr or 0.0
    faults.check(make_schedule, config.schedule.name, peak_lr=peak_lr, total_steps=1)
