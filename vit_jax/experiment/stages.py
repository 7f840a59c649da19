"""The check of a stage of a run with a schedule of image sizes; see `config.sizes`."""

import flax.linen as nn
from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.devices.mesh import check_accum_steps, check_batch_size
from vit_jax.experiment.state import TrainState
from vit_jax.models.contract import about
from vit_jax.objectives.other_sizes import check_size


def check_stage(settings: Settings, mesh: Mesh, last: nn.Module, state: TrainState) -> None:
    """Check an earlier stage than the last one.

    Args:
      settings: of the stage.
      last: the model of the last stage.
      state: of the run, or its shapes.

    Raises:
      InputError: the mesh does not split its batch, or positions cannot be resampled.
    """
    key, size, model = "data.image_size", settings.data.image_size, about(last)
    batch, accum_steps = settings.run.global_batch_size, settings.optimizer.accum_steps
    check_batch_size(mesh, batch, f"{key}: the batch of {size[0]} pixels")
    check_accum_steps(mesh, batch, accum_steps)
    if model.takes_other_sizes:
        check_size(model, size, key)
    elif model.why_no_positions is None:
        raise InputError(
            f"{key}: positions of a {type(last).__name__} are not resampled; give one size"
        )
    if any(name.endswith("pos_embedding") for name in tree.flatten_names(state.objective_state)):
        raise InputError(
            f"{key}: objective.name={settings.objective.name!r} keeps positions of one size in its "
            "state, as objective.gram_weight does; set it to 0, or give one size"
        )
