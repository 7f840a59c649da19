"""The exchanges between devices that a step's sharding needs, counted without a compiler."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.devices.chips import Chip
from vit_jax.devices.mesh import AXES, BATCH_AXES
from vit_jax.experiment.exchange import share_axis
from vit_jax.experiment.experiment import Experiment
from vit_jax.experiment.optimizers.masks import leaves_that_learn
from vit_jax.models.contract import Model, about, with_known
from vit_jax.objectives.contract import TokenPass
from vit_jax.planning.targets import Target

# The exchanges within a slice behind which the TPU compiler (libtpu 0.0.52) computes.
_HIDDEN = ("all-gather", "all-to-all")


def _learning(experiment: Experiment) -> dict[str, bool]:
    """{name: whether the leaf, or for scanned layers a part of it, is not frozen}."""
    params = experiment.abstract_state.params
    if experiment.freeze is None:
        return dict.fromkeys(tree.flatten_names(params), True)
    return tree.flatten_names(leaves_that_learn(params, experiment.freeze))


def _count_still(experiment: Experiment) -> int:
    """The number of the model's first parts (`tree.parts`) through which no gradient flows."""
    params, learning = experiment.abstract_state.params, _learning(experiment)
    learns = {
        # The tokens of hidden patches are the encoder's input.
        "embedding" if name == f"{tree.OBJECTIVE}/mask_token" else tree.part_of(unrolled)
        for name, leaf in tree.flatten_names(params).items()
        if learning[name]
        for unrolled in tree.unrolled_names(name, leaf)
    }
    return sum(1 for _ in itertools.takewhile(lambda part: part not in learns, tree.parts(params)))


def collective_table(
    experiment: Experiment,
    shape: Mapping[str, int],
    target: Target,
    images: int,
    accum_steps: int,
) -> list[dict[str, Any]]:
    """The collectives that the sharding needs, by the ring algorithm.

    On TPUs computation waits for sums over the devices of a slice, and for what is gathered after
    the update; on GPUs, and between slices, it goes on.

    A collective over several axes becomes one per axis: first between the nearest devices, then
    over the next axis with only each device's part. The collectives of parameters follow XLA's
    GPU programs:

    - Weights that are split over fsdp are gathered in every microbatch, in the dtype of their first
      use. Weights of layers are gathered again for the backward pass if they are stacked for a
      scan, which a ResNet's units are in every step, or rematerialised.
    - Gradients are summed in the dtype of the product that computes them, before the conversion to
      float32. Every microbatch reduce-scatters them over fsdp, and over data if the optimizer's
      state is split over it. If fsdp and data split different axes of an array, XLA all-reduces the
      whole gradient and each device keeps its slice. Over the other axes gradients are all-reduced
      once per step. On TPUs they are reduce-scattered over fsdp and all-reduced over data; see
      `sharding.gradient_shardings`.
    - Devices may keep shares of parameters (`experiment.exchange`). These are gathered once. Their
      gradients go to the shares all to all, and are then all-reduced over the other axes of the
      batch, in float32. Where devices compute their own rows, but keep
      whole parameters, gradients are all-reduced once per step, in float32.
    - Frozen parameters are only gathered.
    - Parameters whose optimizer state is split over data are gathered over data after the update,
      in float32.
    - The weights of teachers are gathered once per microbatch: frozen ones, and the averages that
      the objective reads.

    What an objective passes on from device to device, see `Objective.passed_on`, comes by on each
    device once, and waits for the slowest axis.

    `_add_activations` adds the collectives of activations over tensor. The sums of each batch
    statistic, and of its gradient, are all-reduced over the axes that split the batch.

    Args:
      images: number of examples per device and step.
    """
    exchanges = _Exchanges(shape, experiment.num_gradients)
    _add_parameters(exchanges, experiment, accum_steps, target.chip)
    _add_teachers(exchanges, experiment, accum_steps)
    if shape["tensor"] > 1:
        still = _count_still(experiment)
        for each in experiment.passes:
            _add_activations(exchanges, each, images, still)
    _add_statistics(exchanges, experiment)
    ways = math.prod(shape[axis] for axis in BATCH_AXES)
    if ways > 1 and experiment.objective.passed_on:
        slowest = next(axis for axis in BATCH_AXES if shape[axis] > 1)
        passed_on = images * ways * experiment.objective.passed_on
        exchanges.add("collective-permute", slowest, passed_on)
    return exchanges.table(target)


def parameter_table(
    experiment: Experiment, shape: Mapping[str, int], target: Target, accum_steps: int
) -> list[dict[str, Any]]:
    """The rows of `collective_table` for weights, gradients and updates, for any family."""
    exchanges = _Exchanges(shape, experiment.num_gradients)
    _add_parameters(exchanges, experiment, accum_steps, target.chip)
    return exchanges.table(target)


class _Exchanges:
    """The collectives over the axes of a mesh of `shape`, summed by kind, axis and use.

    num_gradients: how often a step repeats those that are not of the update.
    """

    def __init__(self, shape: Mapping[str, int], num_gradients: int):
        self.shape, self.num_gradients = shape, num_gradients
        self._counts: Counter[tuple[str, str, bool]] = Counter()
        self._bytes: Counter[tuple[str, str, bool]] = Counter()

    def add(
        self, kind: str, axis: str, number: int, times: int = 1, *, of_update: bool = False
    ) -> None:
        """Add `times` collectives of `number` bytes each, if the axis has several devices.

        `of_update`: they are at the end of the step, where no computation is left.
        """
        times *= 1 if of_update else self.num_gradients
        if self.shape[axis] > 1:
            self._counts[kind, axis, of_update] += times
            self._bytes[kind, axis, of_update] += times * number

    def table(self, target: Target) -> list[dict[str, Any]]:
        """One row for each kind, axis and use, sorted by bytes sent, largest first."""
        networks = {axis: _network(axis, self.shape, target) for axis in self.shape}
        rows = [
            {
                "kind": kind,
                "axes": [axis],
                "network": networks[axis],
                "asynchronous": networks[axis] == "DCN"
                or (not of_update and (target.chip.is_gpu or kind in _HIDDEN)),
                "count": self._counts[kind, axis, of_update],
                "bytes": number,
                "sent_bytes": number
                * (1 - 1 / self.shape[axis])
                * (2 if kind == "all-reduce" else 1),
            }
            for (kind, axis, of_update), number in self._bytes.items()
        ]
        return sorted(rows, key=lambda row: -row["sent_bytes"])


def _add_parameters(
    exchanges: _Exchanges, experiment: Experiment, accum_steps: int, chip: Chip
) -> None:
    """Add the collectives of weights, gradients and updates; see `collective_table`."""
    model, shape = about(experiment.model), exchanges.shape
    specs, learning = update_specs(experiment), _learning(experiment)
    params, is_joined = experiment.abstract_state.params, experiment.parts.join is not None
    still = set(tree.parts(params)[: _count_still(experiment)])
    for name, leaf in tree.flatten_names(params).items():
        weight_size, gradient_size = _sizes_in_use(name, model)
        arrays = leaf.shape[0] if tree.is_stacked(name) else 1
        share = math.prod(leaf.sharding.shard_shape(leaf.shape)) // arrays
        split = [
            {axis for axis in axes_of(part) if axis in BATCH_AXES and shape[axis] > 1}
            for part in specs[name]
        ]
        scattered = set().union(*split)
        kind = over_data = "reduce-scatter" if scattered in split else "all-reduce"
        if {"data", "fsdp"} <= scattered and not chip.is_gpu:
            kind, over_data = "reduce-scatter", "all-reduce"
        if is_joined and (over := share_axis(shape)) in leaf.sharding.spec:
            whole = share * shape[over]
            exchanges.add("all-gather", over, whole * weight_size, arrays)
            exchanges.add("all-to-all", over, whole * gradient_size, arrays)
            for axis in {*BATCH_AXES} - {over}:
                exchanges.add("all-reduce", axis, share * leaf.dtype.itemsize, arrays)
            continue
        times = accum_steps
        if is_joined:
            over_data, gradient_size, times = "all-reduce", leaf.dtype.itemsize, 1
        whole = share * shape["fsdp"]
        if "fsdp" in scattered:
            has_backward = tree.part_of(tree.unrolled_names(name, leaf)[0]) not in still
            passes = 1 + (has_backward and model.reads_again(name))
            exchanges.add("all-gather", "fsdp", whole * weight_size, arrays * passes * accum_steps)
        if not learning[name]:
            continue
        if "fsdp" in scattered:
            exchanges.add(kind, "fsdp", whole * gradient_size, arrays * accum_steps)
        if "data" in scattered:
            exchanges.add(over_data, "data", share * gradient_size, arrays * times)
            number = share * leaf.dtype.itemsize
            exchanges.add("all-gather", "data", number, arrays, of_update=True)
            share //= shape["data"]
        for axis in reversed(BATCH_AXES):
            if axis not in scattered:
                exchanges.add("all-reduce", axis, share * gradient_size, arrays)
                share //= shape[axis]


def _add_teachers(exchanges: _Exchanges, experiment: Experiment, accum_steps: int) -> None:
    """Add the gathers of the weights of teachers; see `collective_table`."""
    state, objective, model = experiment.abstract_state, experiment.objective, experiment.model
    frozen = experiment.abstract_frozen
    taught: list[tuple[nn.Module, tree.Params]] = [(model, state.objective_state)]
    for variables in frozen:
        models = objective.frozen_models
        taught += zip(models, variables, strict=True) if models else [(model, variables)]
    if objective.needs_average:
        taught.append((model, state.ema))
    for of, variables in taught:
        for name, leaf in tree.flatten_names(variables).items():
            size, _ = _sizes_in_use(name.removeprefix("params/"), about(of))
            arrays = leaf.shape[0] if tree.is_stacked(name) else 1
            share = math.prod(leaf.sharding.shard_shape(leaf.shape)) // arrays
            for axis in BATCH_AXES:
                if any(axis in axes_of(part) for part in leaf.sharding.spec):
                    share *= exchanges.shape[axis]
                    exchanges.add("all-gather", axis, share * size, arrays * accum_steps)


def _add_activations(exchanges: _Exchanges, own: TokenPass, examples: int, still: int) -> None:
    """Add the collectives of the activations of a pass over `tensor`; see `Model.split_layers`.

    No gradient flows through the first `still` parts of the model.

    Raises:
      InputError: the model does not say what its layers exchange.
    """
    model = about(own.model if own.learns else with_known(own.model, keep_tokens=1.0))
    layers = model.split_layers(own.tokens)
    if layers is None:
        raise InputError(
            f"model {type(own.model).__name__}: its exchanges over mesh.tensor cannot be "
            "calculated; set --config.mesh.tensor=1, or plan it for TPUs with their compiler "
            "(pip install -e '.[plan]', and no --no_compile)"
        )
    arrays: dict[str, tuple[int, ...]] = {"all-reduce": (), "all-gather": ()}
    for layer in layers:
        learns = own.learns and (layer.part is None or layer.part >= still)
        forward = 1 + (learns and layer.recomputed)
        arrays["all-reduce"] += layer.reduced * forward + layer.reduced_back * learns
        arrays["all-gather"] += layer.gathered * forward
    for kind, values in arrays.items():
        if values:
            number = examples * own.images * sum(values) * jnp.dtype(model.dtype).itemsize
            exchanges.add(kind, "tensor", number // len(values), len(values))


def _add_statistics(exchanges: _Exchanges, experiment: Experiment) -> None:
    """Add the collectives of batch statistics, in float32; none for a model without them."""
    if not about(experiment.model).has_batch_statistics:
        return
    for leaf in jax.tree.leaves(experiment.abstract_state.model_state):
        for axis in BATCH_AXES:
            exchanges.add("all-reduce", axis, leaf.size * leaf.dtype.itemsize, 2)


def update_specs(experiment: Experiment) -> dict[str, PartitionSpec]:
    """{parameter name: sharding of its update}.

    The update is sharded like the parameter's optimizer state if that is split over data, else like
    the parameter.
    """
    state = experiment.abstract_state
    followers = {
        name: leaf.sharding.spec
        for name, leaf in tree.flatten_names(state.opt_state).items()
        if any("data" in axes_of(part) for part in leaf.sharding.spec)
    }
    return {
        name: next(
            (spec for other, spec in followers.items() if other.endswith(f"/{name}")),
            leaf.sharding.spec,
        )
        for name, leaf in tree.flatten_names(state.params).items()
    }


def axes_of(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one axis of an array."""
    return part if isinstance(part, tuple) else (part,) if part else ()


def _sizes_in_use(name: str, model: Model) -> list[int]:
    """Bytes per value of a weight at its first use, and of its gradient when it is computed."""
    return [jnp.dtype(dtype).itemsize for dtype in model.dtypes_in_use(name)]


def _network(axis: str, shape: Mapping[str, int], target: Target) -> str:
    if not target.chip.is_gpu:
        return "DCN" if axis == "replica" and target.num_slices > 1 else "ICI"
    # The devices along the mesh's last axes are neighbours.
    within = math.prod(shape[inner] for inner in AXES[AXES.index(axis) :])
    is_on_host = target.slice.chips_per_host % within == 0
    return target.chip.fast_network if is_on_host else "network"
