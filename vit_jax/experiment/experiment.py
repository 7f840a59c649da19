"""Builds the objects of a run from a resolved config, for training as well as for planning."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.base import tree
from vit_jax.config import num_microbatches
from vit_jax.data.batch import BatchSpec
from vit_jax.data.preprocessing import (
    Preprocessing,
    describe_batch,
    make_transform,
    parse_preprocessing,
)
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.flops import program_flops
from vit_jax.devices.mesh import batch_sharding
from vit_jax.devices.sharding import gradient_shardings, state_shardings
from vit_jax.experiment.durations import parse_durations
from vit_jax.experiment.exchange import choose_exchange
from vit_jax.experiment.layer_norms import make_layer_norms, watched
from vit_jax.experiment.model import (
    in_plain_form,
    make_model,
    on_mesh,
)
from vit_jax.experiment.objective import make_config_objective
from vit_jax.experiment.optimizers import make_config_average, make_config_optimizer
from vit_jax.experiment.replay import make_replay
from vit_jax.experiment.row_losses import make_row_losses
from vit_jax.experiment.schedules import Schedule, make_config_schedule
from vit_jax.experiment.state import TrainState, init_state
from vit_jax.experiment.step import (
    AbstractBatch,
    Step,
    make_inputs,
    make_train_step,
    skip_step,
)
from vit_jax.objectives.contract import Objective, Teacher, TokenPass

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The model, schedule and jitted functions of a config on a mesh; nothing is computed yet.

    Use it under `jax.set_mesh(mesh)`.

    model, schedule: as configured.
    durations: {key: steps} for every duration that the config sets.
    batch: what every batch holds.
    init: () -> TrainState, jitted and sharded.
    train_step: (state, batch, *frozen) -> (state, metrics), jitted; donates the state.
    layer_norms: (state, batch, *frozen) -> norms by layer for that step, jitted; keeps the state.
    inputs: as `step.make_inputs` makes, jitted; keeps the state.
    replay: (digest, flip) -> as `make_replay` makes, of these inputs, jitted; keeps the state.
    row_losses: as `make_row_losses` makes, jitted; keeps the state.
    skip_step: as `step.skip_step`, jitted; donates the state.
    abstract_state, abstract_batch: shapes, dtypes and shardings of the arguments of a step.
    abstract_frozen: the same for the frozen arrays, the step's third argument: a tuple of one tree;
      () if the objective has none.
    freeze: regex over the names of parameters that do not change; None: all change.
    num_gradients: how often a step computes the gradients of its batch.
    objective: what the step minimises.
    watched_step: the training step with its optimizer `watched`, not jitted.
    plain_step: freeze -> the step without optimizer, kernels, microbatches and what is recomputed,
      to count its FLOPs.
    """

    model: nn.Module
    schedule: Schedule
    durations: Mapping[str, int]
    batch: BatchSpec
    init: Callable[[], TrainState]
    train_step: jax.stages.Wrapped
    layer_norms: jax.stages.Wrapped
    abstract_state: TrainState
    abstract_batch: AbstractBatch
    inputs: jax.stages.Wrapped
    replay: Callable[..., jax.stages.Wrapped]
    row_losses: jax.stages.Wrapped
    skip_step: jax.stages.Wrapped
    objective: Objective
    watched_step: Step
    plain_step: Callable[[str | None], Step]
    freeze: str | None = None
    num_gradients: int = 1
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
    def passes(self) -> tuple[TokenPass, ...]:
        """The images of one example that pass through a model, or blocks, in a step."""
        return self.objective.passes or (TokenPass(self.model),)

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
        traced = jax.make_jaxpr(self.plain_step(freeze))(*args)
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
    image_size, batch = preprocessing.image_size, describe_batch(config, preprocessing)
    durations, o = parse_durations(config), config.optimizer
    total_steps = durations["duration"]

    model = make_model(config, image_size, mesh)
    objective_of = partial(make_config_objective, config, batch, durations, teachers)
    to_mesh = partial(on_mesh, mesh=mesh, kernels=config.model.kernels)
    objective = objective_of(model, to_mesh)
    exchange = choose_exchange(model, objective, mesh, o.freeze)

    schedule = make_config_schedule(config, durations)
    tx = make_config_optimizer(config, schedule, total_steps)
    ema_decay = make_config_average(config, total_steps)

    init = partial(init_state, model, tx, image_size, config.seed)
    init = partial(init, with_ema=ema_decay is not None, init_objective=objective.init)
    with jax.set_mesh(mesh):
        state = with_shardings(jax.eval_shape(init), mesh, exchange.splits_params)
    frozen = () if objective.frozen is None else (with_shardings(objective.frozen, mesh),)
    arguments = (state, batch.arrays(batch_sharding(mesh)), *frozen)
    shardings = jax.tree.map(lambda x: x.sharding, arguments)

    transform = make_transform(config, preprocessing)
    drawn: dict[str, Any] = {"transform": transform, "seed": config.seed}
    make_step = partial(
        make_train_step, transform=transform, seed=config.seed, sam_radius=o.sam_radius
    )
    in_parts: dict[str, Any] = {"freeze": o.freeze, "accum_steps": num_microbatches(config)}
    step_with = partial(
        make_step,
        objective,
        **in_parts,
        join=exchange.join and partial(exchange.join, shardings=shardings[0].params),
        shardings=gradient_shardings(shardings[0].params, mesh),
    )

    plain = objective_of(in_plain_form(model), in_plain_form)

    def plain_step(freeze: str | None) -> Step:
        return make_step(plain, optax.identity(), freeze=freeze)

    def replay(**how: Any) -> jax.stages.Wrapped:
        function = make_replay(objective, mesh, **in_parts, **how)
        return whole(function, in_shardings=(*shardings[:1], *of_inputs, None, *shardings[2:]))

    jit = partial(jax.jit, compiler_options={**compiler_options(mesh), **exchange.options})
    of_inputs = batch_sharding(mesh), NamedSharding(mesh, P())
    whole = partial(jit, out_shardings=NamedSharding(mesh, P()))
    # Of sums over classes every process needs the whole.
    out_shardings = shardings[0], of_inputs[1] if config.log.metrics else None
    train_step, watched_step = step_with(tx, ema_decay=ema_decay), step_with(watched(tx))
    return Experiment(
        model=model,
        schedule=schedule,
        durations=durations,
        batch=batch,
        init=jit(init, out_shardings=shardings[0]),
        train_step=jit(
            train_step, in_shardings=shardings, out_shardings=out_shardings, donate_argnums=0
        ),
        layer_norms=jit(make_layer_norms(watched_step), in_shardings=shardings),
        inputs=jit(make_inputs(**drawn), in_shardings=shardings[:2], out_shardings=of_inputs),
        replay=replay,
        row_losses=whole(
            make_row_losses(objective, **drawn, accum_steps=num_microbatches(config)),
            in_shardings=shardings,
        ),
        skip_step=jit(
            partial(skip_step, objective), out_shardings=(shardings[0], None), donate_argnums=0
        ),
        abstract_state=state,
        abstract_batch=arguments[1],
        objective=objective,
        watched_step=watched_step,
        plain_step=plain_step,
        freeze=o.freeze,
        num_gradients=1 if o.sam_radius is None else 2,
        abstract_frozen=frozen,
    )


def with_shardings(arrays: Tree, mesh: Mesh, splits_params: bool = False) -> Tree:
    """The shape, dtype and sharding over `mesh` of each leaf."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        state_shardings(arrays, mesh, splits_params),
    )
