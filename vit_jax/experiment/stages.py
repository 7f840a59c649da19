"""The experiments of a run of several stages; see `config.sizes`."""

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings, image_hw
from vit_jax.config.drawn import split_draws
from vit_jax.config.sections import Data, Optimizer
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.models.contract import Model, about
from vit_jax.objectives.contract import Teacher
from vit_jax.objectives.other_sizes import check_size


def make_stage(
    settings: Settings, mesh: Mesh, teachers: Sequence[Teacher], last: Experiment
) -> Experiment:
    """The experiment of a stage before the last one, with the state of the `last` experiment.

    `settings`: of the stage, from `Settings.by_stage`.

    Raises:
      InputError: as `check_batch`, or positions cannot be resampled.
    """
    key, size, model = "data.image_size", settings.data.image_size, about(last.model)
    patch_size = image_hw(settings.model.own.get("patch_size") or model.token_stride)
    preprocessing = parse_preprocessing(settings)._replace(text=last.batch.text)
    state = last.abstract_state.objective_state
    batch, optimizer = settings.run.global_batch_size, settings.optimizer
    if (size, batch) != (model.image_size, last.batch.size):
        check_batch(batch, settings.data, optimizer, mesh, preprocessing)
    if (size, patch_size) == (model.image_size, model.token_stride):
        return make_experiment(settings, mesh, preprocessing, teachers, last=last)
    if model.takes_other_sizes:
        check_size(model, size, key, patch_size)
    elif model.why_no_positions is None:
        name = type(model).__name__
        raise InputError(f"{key}: positions of a {name} are not resampled; give one size")
    if any(name.endswith("pos_embedding") for name in tree.flatten_names(state)):
        raise InputError(
            f"{key}: objective.name={settings.objective.name!r} keeps positions of one size in its "
            "state, as objective.gram_weight does; set it to 0, or give one size"
        )
    return make_experiment(settings, mesh, preprocessing, teachers, last=last)


def check_patch_sizes(model: Model, drawn: str | int) -> None:
    """Raise InputError if steps of `model` cannot have the patch sizes `drawn`."""
    key, sizes = f"model.patch_sizes={drawn!r}", [(side, side) for side, _ in split_draws(drawn)]
    if not model.embeds_patches:
        raise InputError(f"{key}: a {type(model).__name__} has patches of one size; choose a ViT")
    if model.token_stride not in sizes:
        raise InputError(
            f"{key}: model.patch_size, which the parameters have, is {model.token_stride}, and "
            "must be among them; draw it too, or set another --config.model.patch_size"
        )
    for size in sizes:
        check_size(model, model.image_size, f"{key}: data.image_size", size)


def check_batch(
    batch: int, data: Data, optimizer: Optimizer, mesh: Mesh, preprocessing: Preprocessing
) -> None:
    """Raise InputError if the batch of a stage before the last one does not divide.

    It consists of whole microbatches on the mesh, of whole pairs if data.ops mix images, and of
    whole data.repeats.
    """
    size, repeats, accum = data.image_size, data.repeats, optimizer.accum_steps
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    pairs = 1 + preprocessing.mixes
    if batch % (unit := math.lcm(ways * accum, repeats * pairs)):
        said = f"data.image_size: the stage of {size[0]} pixels"
        remedy = ", or data.image_size_keeps=batch"
        if data.max_tokens is not None:
            said, remedy = f"data.max_tokens: a step of {data.max_tokens} tokens", ""
        raise InputError(
            f"{said} has batches of {batch}, and needs a "
            f"multiple of {unit}: the mesh splits them {ways} ways, optimizer.accum_steps={accum}, "
            f"data.repeats={repeats}{', and data.ops mix pairs' * preprocessing.mixes}; choose "
            f"another global_batch_size{remedy}"
        )
