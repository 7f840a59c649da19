"""Self-verifying checkpoints, and checks that copies of the state agree.

Importing this package does not import orbax.
"""

import os

from vit_jax.base.errors import InputError
from vit_jax.config.sections import Checkpoint


def check_memory_dir(checkpoint: Checkpoint) -> None:
    """Raise InputError if steps are to be kept in a folder that this host does not have."""
    folder = checkpoint.memory_dir
    if checkpoint.memory_every is not None and not os.path.isdir(folder):
        raise InputError(
            f"checkpoint.memory_dir={folder!r}: this host has no such folder; create it on each "
            "host, or choose another one"
        )
