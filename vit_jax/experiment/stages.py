"""The experiments of a run of several stages; see `config.sizes`."""

from collections.abc import Sequence

from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.mesh import check_accum_steps, check_batch_size
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.models.contract import about
from vit_jax.objectives.contract import Teacher
from vit_jax.objectives.other_sizes import check_size


def make_stage(
    settings: Settings, mesh: Mesh, teachers: Sequence[Teacher], last: Experiment
) -> Experiment:
    """The experiment of a stage before the last one, with the state of the `last` experiment.

    `settings`: of the stage, from `Settings.by_stage`.

    Raises:
      InputError: the mesh does not split its batch, data.ops mix an odd number of images or
        data.repeats does not divide it, or positions cannot be resampled.
    """
    key, size, model = "data.image_size", settings.data.image_size, about(last.model)
    if size == model.image_size:
        return make_experiment(settings, mesh, teachers=teachers, last=last)
    batch, state = settings.run.global_batch_size, last.abstract_state.objective_state
    check_batch_size(mesh, batch, f"{key}: the batch of {size[0]} pixels")
    check_accum_steps(mesh, batch, settings.optimizer.accum_steps)
    preprocessing, repeats = parse_preprocessing(settings), settings.data.repeats
    if batch % (unit := repeats * (1 + preprocessing.mixes)):
        why = " of mixed pairs" * preprocessing.mixes + f" with data.repeats={repeats}"
        raise InputError(
            f"{key}: the batch of {size[0]} pixels={batch}: must be a multiple of {unit}, because "
            f"it consists{why}; choose another global_batch_size, or data.image_size_keeps=batch"
        )
    if model.takes_other_sizes:
        check_size(model, size, key)
    elif model.why_no_positions is None:
        name = type(model).__name__
        raise InputError(f"{key}: positions of a {name} are not resampled; give one size")
    if any(name.endswith("pos_embedding") for name in tree.flatten_names(state)):
        raise InputError(
            f"{key}: objective.name={settings.objective.name!r} keeps positions of one size in its "
            "state, as objective.gram_weight does; set it to 0, or give one size"
        )
    return make_experiment(settings, mesh, preprocessing, teachers, last=last)
