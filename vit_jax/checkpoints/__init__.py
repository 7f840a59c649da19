"""Self-verifying checkpoints, and checks that copies of the state agree.

Importing this package does not import orbax.
"""

import os

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the section `checkpoint`, except for its durations."""
    folder = config.checkpoint.memory_dir
    faults.need(
        os.path.isabs(folder),
        f"checkpoint.memory_dir={folder!r}: must be an absolute path of a folder on each host",
    )
