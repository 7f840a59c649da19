"""The layout of a run under `auto`: chosen at its start, and again where its devices differ."""

import logging
from collections.abc import Callable

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import LAYOUT_KEYS
from vit_jax.config.stored import read_config
from vit_jax.job import watchdog
from vit_jax.training.decided import take_stored
from vit_jax.training.starts import last_devices

logger = logging.getLogger("vit_jax")

# choose(config, mesh) -> config with the fastest layout that fits the devices of the mesh.
ChooseLayout = Callable[[ConfigDict, Mesh], ConfigDict]


def settle_layout(
    config: ConfigDict, mesh: Mesh, workdir: epath.Path, choose: ChooseLayout
) -> ConfigDict:
    """`config` with a layout for the devices of `mesh`.

    A run that goes on with the devices of its last start keeps its layout. On others it keeps only
    `model.scan`, since its checkpoints hold the layers in that form.
    """
    if (workdir / "config.json").exists():
        stored, devices = read_config(workdir), mesh.devices.flat
        if last_devices(workdir) == (len(devices), devices[0].device_kind):
            return take_stored(config, stored, LAYOUT_KEYS)
        logger.info("auto: the devices differ from those of the last start")
        config = take_stored(config, stored, ("model.scan",))
    with watchdog.phase("compile"):
        return choose(config, mesh)
