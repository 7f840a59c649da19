"""Self-verifying checkpoints, and checks that copies of the state agree.

Importing this package does not import orbax.
"""

import os

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, InputError


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the section `checkpoint`, except for its durations."""
    folder = config.checkpoint.memory_dir
    faults.need(
        os.path.isabs(folder),
        f"checkpoint.memory_dir={folder!r}: must be an absolute path of a folder on each host",
    )


def check_memory_dir(config: ConfigDict) -> None:
    """Raise InputError if steps are to be kept in a folder that this host does not have."""
    folder = config.checkpoint.memory_dir
    if config.checkpoint.memory_every is not None and not os.path.isdir(folder):
        raise InputError(
            f"checkpoint.memory_dir={folder!r}: this host has no such folder; create it on each "
            "host, or choose another one"
        )
