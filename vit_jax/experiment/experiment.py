"""From a resolved config to the objects of a run, the same for training and for planning."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import model_fields, optimizer_fields, step_fields
from vit_jax.data import (
    check_order,
    make_device_transform,
    pair_distance,
    resolve_order,
)
from vit_jax.data.device_ops import MIXING_OPS, DeviceTransform
from vit_jax.data.ops import Op
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.flops import count_flops, jaxpr_flops
from vit_jax.devices.mesh import batch_sharding
from vit_jax.devices.sharding import constrain, state_shardings
from vit_jax.errors import Faults
from vit_jax.experiment.durations import parse_durations, parse_milestones
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
from vit_jax.models import create_model
from vit_jax.models.attention import choose_attention
from vit_jax.models.fields import field_names, with_known
from vit_jax.models.layers import unconstrained
from vit_jax.objectives import OBJECTIVES, make_objective
from vit_jax.objectives.supervised import make_loss

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a config describes, on a mesh; nothing is computed or placed on a device yet.

    To be used under `jax.set_mesh(mesh)`.

    model, schedule: of the config.
    durations: {key: steps} of every duration that the config sets.
    init: () -> TrainState, jitted, sharded.
    train_step: (state, batch) -> (state, metrics), jitted; the state is donated.
    layer_norms: (state, batch) -> norms by layer of that step, jitted; the state is kept.
    abstract_state, abstract_batch: shapes and dtypes of a step's arguments, with their shardings.
    """

    model: nn.Module
    schedule: Schedule
    durations: Mapping[str, int]
    init: Callable[[], TrainState]
    train_step: JittedStep[tuple[TrainState, Metrics]]
    layer_norms: JittedStep[Metrics]
    abstract_state: TrainState
    abstract_batch: AbstractBatch

    @property
    def shardings(self) -> TrainState:
        """Of every leaf of the state."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    def lower(self) -> jax.stages.Lowered:
        """The training step, for the devices of its mesh, which need not be there.

        Training, planning and measuring all compile this.
        """
        return self.train_step.lower(self.abstract_state, self.abstract_batch)

    @functools.cached_property
    def flops_per_step(self) -> int:
        """FLOPs of the training step, over all devices, with what rematerialisation adds."""
        traced = self.train_step.trace(self.abstract_state, self.abstract_batch)
        return jaxpr_flops(traced.jaxpr.jaxpr)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.durations["duration"]

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(x.size for x in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def flops_per_image(self) -> int:
        """FLOPs of a forward and a backward pass, without what rematerialisation adds."""
        model = with_known(self.model, remat="none", constrain=unconstrained)

        def loss(params, images):
            logits = model.apply({"params": params, **self.abstract_state.model_state}, images)
            assert isinstance(logits, jax.Array)
            return logits.sum()

        images = jax.ShapeDtypeStruct((1, *self.model.image_size, 3), jnp.float32)
        return count_flops(jax.grad(loss), self.abstract_state.params, images)


def make_experiment(
    config: ConfigDict, mesh: Mesh, preprocessing: Preprocessing | None = None
) -> Experiment:
    """The experiment of a config in which `data.num_classes` and `data.num_examples` are set.

    `preprocessing` is that of the config; None: it has not been parsed yet.

    Raises:
      InputError: for what the config's first validation cannot see.
    """
    if None in (config.data.num_classes, config.data.num_examples):
        raise ValueError(
            "the config is not resolved: data.num_classes or data.num_examples is None"
        )
    image_size, _, device_ops, _ = preprocessing or parse_preprocessing(config)
    durations = parse_durations(config)
    model = make_model(config, image_size, mesh)
    schedule = _make_schedule(config, durations)
    tx = make_optimizer(**optimizer_fields(config), schedule=schedule)
    objective = make_objective(model, make_loss(**config.loss), **config.objective)
    parts = (objective, tx, _make_transform(config, device_ops), config.seed)
    step = step_fields(config)

    with_ema = config.optimizer.ema_decay is not None
    init = functools.partial(init_state, model, tx, image_size, config.seed, with_ema=with_ema)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init)
    shardings, batch = state_shardings(shapes, mesh), batch_sharding(mesh)
    jit = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
    return Experiment(
        model=model,
        schedule=schedule,
        durations=durations,
        init=jit(init, out_shardings=shardings),
        train_step=jit(
            make_train_step(*parts, **step),
            in_shardings=(shardings, batch),
            out_shardings=(shardings, None),
            donate_argnums=0,
        ),
        layer_norms=jit(
            make_layer_norms(*parts, accum_steps=step["accum_steps"], freeze=step["freeze"]),
            in_shardings=(shardings, batch),
        ),
        abstract_state=_with_sharding(shapes, shardings),
        abstract_batch=_batch_shapes(config.global_batch_size, image_size, batch),
    )


def make_model(config: ConfigDict, image_size: tuple[int, int], mesh: Mesh) -> nn.Module:
    """The model of a resolved config, laid out over `mesh`, with its fastest form of attention."""
    model = create_model(
        config.model.name,
        config.data.num_classes,
        image_size,
        **model_fields(config),
    )
    attend = choose_attention(mesh.devices.flat[0].platform)
    model = with_known(model, constrain=constrain, attend=attend)
    _warn_of_uneven_split(model, mesh)
    return model


def _make_schedule(config: ConfigDict, durations: Mapping[str, int]) -> Schedule:
    return make_schedule(
        config.schedule.name,
        peak_lr=config.optimizer.peak_lr,
        total_steps=durations["duration"],
        warmup_steps=durations["schedule.warmup"],
        cooldown_steps=durations["schedule.cooldown"],
        timescale=durations["schedule.timescale"],
        milestones=parse_milestones(config),
    )


def _make_transform(config: ConfigDict, device_ops: Sequence[Op]) -> DeviceTransform:
    mixes = any(op.name in MIXING_OPS for op in device_ops)
    return make_device_transform(
        device_ops,
        config.data.mean,
        config.data.std,
        num_classes=config.data.num_classes,
        distance=_pair_distance(config, mixes),
    )


def _pair_distance(config: ConfigDict, mixes: bool) -> int:
    """Raises InputError if data.ops `mixes` and a batch is not made of pairs so far apart."""
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
            "mesh.tensor=%d does not divide %s: activations are copied between devices instead of "
            "split; choose a size that does",
            tensor,
            " and ".join(f"model.{f}={getattr(model, f)}" for f in uneven),
        )


def _with_sharding(shapes: TrainState, shardings: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _batch_shapes(
    size: int, image_size: tuple[int, int], sharding: jax.sharding.Sharding
) -> AbstractBatch:
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {
        "image": array((size, *image_size, 3), jnp.uint8),
        "label": array((size,), jnp.int32),
        "mask": array((size,), jnp.float32),
        "id": array((size,), jnp.int32),
    }


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks the sections objective, loss, optimizer and schedule."""
    faults.need_known("objective.name", config.objective.name, OBJECTIVES)
    faults.check(make_loss, **config.loss)
    faults.check(make_optimizer, **optimizer_fields(config), schedule=lambda step: 0.0)
    accum_steps, size = config.optimizer.accum_steps, config.global_batch_size
    faults.check(check_step, accum_steps, config.optimizer.ema_decay)
    faults.need(
        size is None or accum_steps < 1 or size % accum_steps == 0,
        f"optimizer.accum_steps={accum_steps}: must divide global_batch_size={size}",
    )
    peak_lr = config.optimizer.peak_lr or 0.0
    faults.check(make_schedule, config.schedule.name, peak_lr=peak_lr, total_steps=1)
