"""Builds the objects of a run from a resolved config, for training as well as for planning."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.data.batch import BatchSpec
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.data.preprocessing import (
    Preprocessing,
    describe_batch,
    make_transform,
    parse_preprocessing,
)
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.flops import program_flops
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.devices.sharding import gradient_shardings, state_shardings
from vit_jax.experiment.accumulation import Sums
from vit_jax.experiment.exchange import choose_exchange
from vit_jax.experiment.model import (
    in_plain_form,
    make_model,
    on_mesh,
)
from vit_jax.experiment.objective import make_objective
from vit_jax.experiment.optimizers import make_average, make_optimizer
from vit_jax.experiment.schedules import Schedule, schedule_of
from vit_jax.experiment.state import TrainState, init_state
from vit_jax.experiment.step import (
    AbstractBatch,
    Step,
    make_train_step,
)
from vit_jax.models.contract import about
from vit_jax.objectives.contract import InForm, Objective, Teacher, TokenPass
from vit_jax.objectives.other_sizes import as_resized

Tree = TypeVar("Tree")


class StepParts(NamedTuple):
    """The arguments of every training step of an experiment; see `make_train_step`."""

    transform: DeviceTransform
    seed: int
    freeze: str | None
    sam_radius: float | None
    accum_steps: int
    join: Callable[[Sums], Sums] | None
    shardings: tree.PyTree
    pack: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The model, schedule and jitted functions of a config on a mesh; nothing is computed yet.

    Use it under `jax.set_mesh(mesh)`.

    model, schedule: as configured.
    total_steps: number of steps in the whole run.
    batch: what every batch holds.
    objective: what the step minimises.
    plain: the same without kernels and what is recomputed, to count its FLOPs.
    tx: the optimizer.
    parts: what every step has, whatever its optimizer.
    arguments: shapes, dtypes and shardings of the arguments of a step: the state, the batch, and
      the frozen arrays if the objective has any, as one tree.
    jit: `jax.jit` with the options of the compiler.
    init: () -> TrainState, jitted and sharded.
    train_step: (state, batch, *frozen) -> (state, metrics), jitted; donates the state.
    """

    model: nn.Module
    schedule: Schedule
    total_steps: int
    batch: BatchSpec
    objective: Objective
    plain: Objective
    tx: optax.GradientTransformation
    parts: StepParts
    arguments: tuple[TrainState, AbstractBatch, *tuple[tree.PyTree, ...]]
    jit: Callable[..., jax.stages.Wrapped]
    init: Callable[[], TrainState]
    train_step: jax.stages.Wrapped

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.arguments[0]

    @property
    def abstract_batch(self) -> AbstractBatch:
        """Shapes, dtypes and shardings of a batch."""
        return self.arguments[1]

    @property
    def abstract_frozen(self) -> tuple[tree.PyTree, ...]:
        """Shapes, dtypes and shardings of the frozen arrays; () if the objective has none."""
        return self.arguments[2:]

    @property
    def freeze(self) -> str | None:
        """Regex over the names of parameters that do not change; None: all change."""
        return self.parts.freeze

    @property
    def num_gradients(self) -> int:
        """How often a step computes the gradients of its batch."""
        return 1 if self.parts.sam_radius is None else 2

    def step_with(self, tx: optax.GradientTransformation) -> Step:
        """The training step with another optimizer and no average; not jitted."""
        return make_train_step(self.objective, tx, **self.parts._asdict())

    @property
    def in_shardings(self) -> tuple[tree.PyTree, ...]:
        """The sharding of every leaf of the arguments."""
        return jax.tree.map(lambda x: x.sharding, self.arguments)

    @property
    def shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        return self.in_shardings[0]

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
    def passes(self) -> tuple[TokenPass, ...]:
        """The images of one example that pass through a model, or blocks, in a step."""
        return self.objective.passes or (TokenPass(self.model),)

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
        frozen = tree.mask(params, self.freeze or "")
        sizes = jax.tree.map(lambda leaf, share: leaf.size * (1 - np.mean(share)), params, frozen)
        return round(sum(jax.tree.leaves(sizes)))

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
        parts = self.parts._replace(freeze=freeze, accum_steps=1, join=None, shardings=None)
        step = make_train_step(self.plain, optax.identity(), **parts._asdict())
        traced = jax.make_jaxpr(step)(*args)
        return program_flops(traced.jaxpr) // len(args[1]["mask"])


def make_experiment(
    settings: Settings,
    mesh: Mesh,
    preprocessing: Preprocessing | None = None,
    teachers: Sequence[Teacher] = (),
    last: Experiment | None = None,
) -> Experiment:
    """Build the experiment of a resolved config.

    Args:
      preprocessing: the config's, if it has been parsed already.
      teachers: of the objective, with arrays or their shapes.
      last: the experiment of the run's last stage, whose state this one takes; None: `settings` are
        of the last stage. See `stages.make_stage`.

    Raises:
      InputError: for faults that `validation.validate` cannot find.
    """
    run, data, o = settings.run, settings.data, settings.optimizer
    _check_rows(data.pack, run.global_batch_size, o.accum_steps, mesh)
    preprocessing = preprocessing or parse_preprocessing(settings)
    model = make_model(settings.model, data, mesh)
    width = about(model).width if data.keep_features else None
    batch = describe_batch(data, run.global_batch_size, preprocessing, width)

    def objective_of(model: nn.Module, in_form: InForm) -> Objective:
        made = make_objective(settings, batch, teachers, model, in_form)
        return made if last is None else as_resized(made, about(model), about(last.model))

    to_mesh = partial(on_mesh, mesh=mesh, kernels=settings.model.kernels)
    objective = objective_of(model, to_mesh)
    shares = settings.mesh.shares
    exchange = choose_exchange(model, objective, mesh, o.freeze, o.accum_steps, shares)

    schedule = schedule_of(settings)
    tx = make_optimizer(o, schedule, run.duration)
    ema_decay = make_average(o, run.duration)

    init = partial(init_state, model, tx, data.image_size, run.seed)
    init = partial(init, with_ema=ema_decay is not None, init_objective=objective.init)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init) if last is None else last.abstract_state
        state = with_shardings(shapes, mesh, exchange.shares)
    frozen = () if objective.frozen is None else (with_shardings(objective.frozen, mesh),)
    arguments = (state, batch.arrays(batch_sharding(mesh)), *frozen)
    shardings = jax.tree.map(lambda x: x.sharding, arguments)

    parts = StepParts(
        transform=make_transform(data, run.global_batch_size, preprocessing),
        seed=run.seed,
        freeze=o.freeze,
        sam_radius=o.sam_radius,
        accum_steps=o.accum_steps,
        join=exchange.join and partial(exchange.join, shardings=shardings[0].params),
        shardings=None if exchange.join else gradient_shardings(shardings[0].params, mesh),
        pack=data.pack,
    )
    train_step = make_train_step(objective, tx, ema_decay=ema_decay, **parts._asdict())
    # Every process needs the whole sums over classes.
    whole = NamedSharding(mesh, P()) if settings.log.metrics else None
    of_step = {"in_shardings": shardings, "out_shardings": (shardings[0], whole)}
    options = compiler_options(mesh, exchange.options, settings.mesh.deterministic)
    jit = partial(jax.jit, compiler_options=options)
    return Experiment(
        model=model,
        schedule=schedule,
        total_steps=run.duration,
        batch=batch,
        objective=objective,
        plain=objective_of(in_plain_form(model), in_plain_form),
        tx=tx,
        parts=parts,
        arguments=arguments,
        jit=jit,
        init=jit(init, out_shardings=shardings[0]) if last is None else last.init,
        train_step=jit(train_step, **of_step, donate_argnums=0),
    )


def _check_rows(pack: tuple[int, ...] | None, size: int, accum_steps: int, mesh: Mesh) -> None:
    """Raise InputError if the devices do not get whole rows of `data.pack` of a batch of `size`."""
    if pack is None:
        return
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if size % (unit := len(pack) * ways):
        raise InputError(
            f"data.pack={pack}: a row holds {len(pack)} pictures, and the mesh splits the rows "
            f"{ways} ways, so global_batch_size={size} must be a multiple of {unit}; try "
            f"{max(size // unit, 1) * unit}"
        )
    if accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: a batch of data.pack={pack} is computed at "
            "once; set it to 1"
        )


def with_shardings(arrays: Tree, mesh: Mesh, shares: str | None = None) -> Tree:
    """The shape, dtype and sharding over `mesh` of each leaf."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        state_shardings(arrays, mesh, shares),
    )
