"""Settings resolved without a run, by this machine's devices or by the training data."""

from jax.sharding import Mesh

from vit_jax import data
from vit_jax.config import Settings, train_split
from vit_jax.planning.search import choose_layout
from vit_jax.run.setup.opener import Tables, check_mesh
from vit_jax.run.setup.resolve import resolve


def settle_step(asked: Settings) -> tuple[Settings, Mesh]:
    """The resolved settings of a step on this machine's devices, in a run's layout, and the mesh.

    Raises:
      InputError: the config does not suit the devices.
    """
    mesh = check_mesh(asked)
    settings = resolve(asked, Tables(mesh)).settings
    if asked.run.auto:  # as a run
        settings = choose_layout(settings, mesh)
        mesh = check_mesh(settings)
    return settings, mesh


def open_training_data(asked: Settings) -> tuple[Settings, data.Source]:
    """The resolved settings and the training data."""
    tables = Tables(opens_data=True)
    settings = resolve(asked, tables).settings
    return settings, tables.sources[train_split(settings.data)]
