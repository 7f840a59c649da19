"""The training step: state and batch in, state and metrics out."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import tree
from vit_jax.errors import InputError, collect_faults


@flax.struct.dataclass
class TrainState:
    """All that a run carries from step to step.

    step: int32 scalar, the number of updates made.
    params: float32 parameters.
    model_state: what else the model carries (batch statistics); {} where there is none.
    opt_state: the optimizer's.
    ema: the running average of the parameters, float32, a tree like `params`; {} where it is off.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    ema: Any = flax.struct.field(default_factory=dict)


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: tuple[int, int],
    seed: int,
    *,
    with_ema: bool = False,
) -> TrainState:
    """The state before the first step; pure, to be jitted with its shardings."""
    images = jnp.zeros((1, *image_size, 3))
    model_state = model.init(jax.random.key(seed), images)
    params = model_state.pop("params")
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, tx.init(params))
    return start_from(state, params) if with_ema else state


def start_from(state: TrainState, params: Any) -> TrainState:
    """`state` with other parameters, from which their average begins too, where it is on.

    The average has arrays of its own, so that the whole state can be donated.
    """
    return state.replace(params=params, ema=jax.tree.map(jnp.copy, params))


def make_train_step(
    objective: Callable,
    tx: optax.GradientTransformation,
    transform: Callable,
    seed: int,
    *,
    accum_steps: int = 1,
    ema_decay: float | None = None,
    freeze: str | None = None,
) -> Callable:
    """step(state, batch, frozen=None) -> (state, metrics); pure.

    Its randomness depends on (seed, state.step) only, that of `transform` on the row of the global
    batch besides.

    With `accum_steps` A the transformed batch is split into A microbatches, the i-th of the rows i,
    i + A, i + 2A, ..., so that every device keeps its own rows. Their gradients and sums are added,
    in float32, and divided once, by the weight of the whole batch: so a batch gives the same step
    whatever A is, but for rounding, and for what the model draws (microbatch i from fold_in(key,
    i)) or carries from one to the next in `model_state`.

    With `ema_decay`, after the update that follows `step` others:

        ema <- d * ema + (1 - d) * params,  d = min(ema_decay, (1 + step) / (10 + step))

    so that a short run's average is not that of its start.

    Args:
      objective: (params, model_state, batch, frozen, rng) -> sums over the batch.
      tx: the optimizer.
      transform: (batch, keys (B,)) -> batch with float32 images in the value range.
      seed: of the run.
      accum_steps: microbatches; it divides each device's share of the batch.
      ema_decay: of the running average of the parameters; None: there is none.
      freeze: as in `make_optimizer`; what it matches has no gradient.

    Raises:
      InputError: if a number is out of range.
    """
    faults = []
    if accum_steps < 1:
        faults.append(f"optimizer.accum_steps={accum_steps}: needs a positive number; 1 is off")
    if ema_decay is not None and not 0.0 < ema_decay < 1.0:
        faults.append(f"optimizer.ema_decay={ema_decay}: needs a number between 0 and 1, or None")
    collect_faults(faults)
    gradients = _make_gradients(objective, transform, seed, accum_steps, freeze)

    def train_step(state: TrainState, batch: dict, frozen=None):
        grads, sums = gradients(state, batch, frozen)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        weight = _at_least_one(sums.weight_sum)
        metrics = {name: total / weight for name, total in sums.metric_sums.items()}
        metrics |= {"loss": sums.loss_sum / weight, "grad_norm": optax.tree.norm(grads)}
        metrics["masked"] = (1.0 - batch["mask"]).sum()
        ema = state.ema
        if ema_decay is not None:
            keep = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
            # In this form the average of what does not change does not change either.
            ema = jax.tree.map(lambda e, p: e + (1.0 - keep) * (p - e), ema, params)
        state = state.replace(
            step=state.step + 1,
            params=params,
            model_state=sums.model_state,
            opt_state=opt_state,
            ema=ema,
        )
        return state, metrics

    return train_step


def make_layer_norms(
    objective: Callable,
    tx: optax.GradientTransformation,
    transform: Callable,
    seed: int,
    *,
    accum_steps: int = 1,
    freeze: str | None = None,
) -> Callable:
    """norms(state, batch, frozen=None) -> scalars of the step that `state` has before it; pure.

    For each PART of `tree.parts(params)`: `grad_norm/PART` (before clipping), `param_norm/PART`
    (before the update), `update_norm/PART`, and `update_ratio/PART`, update over parameter norm (0
    where that is 0). The arguments are those of `make_train_step`.

    It computes the gradients once more. In the training step itself they would have been for
    nothing, but they would have made it another program, which the compiler may round otherwise.
    """
    gradients = _make_gradients(objective, transform, seed, accum_steps, freeze)

    def layer_norms(state: TrainState, batch: dict, frozen=None):
        grads, _ = gradients(state, batch, frozen)
        updates, _ = tx.update(grads, state.opt_state, state.params)
        grad, param, update = (_norms_by_part(x) for x in (grads, state.params, updates))
        norms = {}
        for part in tree.parts(state.params):
            norms |= {
                f"grad_norm/{part}": grad[part],
                f"param_norm/{part}": param[part],
                f"update_norm/{part}": update[part],
                f"update_ratio/{part}": update[part]
                / jnp.where(param[part] > 0, param[part], jnp.inf),
            }
        return norms

    return layer_norms


def _make_gradients(objective, transform, seed, accum_steps, freeze) -> Callable:
    """gradients(state, batch, frozen) -> (of the mean loss, the objective's sums)."""

    def objective_of(params, model_state, batch, frozen, key):
        if freeze is not None:
            params = _stop_gradients(params, freeze)
        return objective(params, model_state, batch, frozen, key)

    def whole_batch(state, batch, frozen, key):
        def loss_fn(params):
            out = objective_of(params, state.model_state, batch, frozen, key)
            return out.loss_sum / _at_least_one(out.weight_sum), out

        return jax.grad(loss_fn, has_aux=True)(state.params)

    def microbatches(state, batch, frozen, key):
        split = jax.tree.map(lambda x: _split_rows(x, accum_steps), batch)

        def loss_fn(params, model_state, i):
            rows = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), split
            )
            rng = jax.random.fold_in(key, i)
            out = objective_of(params, model_state, rows, frozen, rng)
            return out.loss_sum, out

        grads_and_sums = jax.grad(loss_fn, has_aux=True)

        def add(total, i):
            grads, sums = total
            more_grads, out = grads_and_sums(state.params, sums.model_state, i)
            model_state, out = out.model_state, out._replace(model_state=())
            sums = jax.tree.map(jnp.add, sums._replace(model_state=()), out)
            sums = sums._replace(model_state=model_state)
            return (jax.tree.map(jnp.add, grads, more_grads), sums), None

        shapes = jax.eval_shape(grads_and_sums, state.params, state.model_state, 0)
        grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        start = (grads, sums._replace(model_state=state.model_state))
        (grads, sums), _ = jax.lax.scan(add, start, jnp.arange(accum_steps))
        weight = _at_least_one(sums.weight_sum)
        return jax.tree.map(lambda g: g / weight, grads), sums

    def gradients(state, batch, frozen):
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        rows = jnp.arange(batch["image"].shape[0])
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(transform_key, rows)
        batch = transform(batch, row_keys)
        of_batch = whole_batch if accum_steps == 1 else microbatches
        return of_batch(state, batch, frozen, model_key)

    return gradients


def _at_least_one(weight: jax.Array) -> jax.Array:
    return jnp.maximum(weight, 1.0)  # a batch may be masked altogether


def _split_rows(x: jax.Array, accum_steps: int) -> jax.Array:
    """(B, ...) -> (B / A, A, ...): microbatch i is [:, i], and the first axis lies as before."""
    if x.shape[0] % accum_steps:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: does not divide the batch of {x.shape[0]}"
        )
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:])


def _stop_gradients(params: Any, freeze: str) -> Any:
    """`params`, of which nothing flows back to those, or to those layers, that `freeze` matches."""

    def stop(frozen, leaf):
        if not np.any(frozen):
            return leaf
        stopped = jax.lax.stop_gradient(leaf)
        return stopped if np.all(frozen) else jnp.where(frozen, stopped, leaf)

    return jax.tree.map(stop, tree.mask(params, freeze), params)


def _norms_by_part(leaves: Any) -> dict[str, jax.Array]:
    """{part: Euclidean norm of all that belongs to it} of a tree like the parameters."""
    squares: dict[str, Any] = {}
    for name, leaf in tree.flatten_names(leaves).items():
        axes = tuple(range(int(tree.is_stacked(name)), leaf.ndim))
        totals = jnp.ravel(jnp.square(leaf).sum(axis=axes))
        for unrolled, total in zip(tree.unrolled_names(name, leaf), totals, strict=True):
            part = tree.part_of(unrolled)
            squares[part] = squares.get(part, 0.0) + total
    return {part: jnp.sqrt(total) for part, total in squares.items()}
