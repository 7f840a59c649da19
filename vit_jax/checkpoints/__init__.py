"""Self-verifying checkpoints, and checks that copies of the state agree.

Importing this package does not import orbax.
"""

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the section `checkpoint`, except for its durations."""
    keep = config.checkpoint.keep_last
    faults.need(
        keep >= 2, f"checkpoint.keep_last={keep}: must be at least 2, in case the newest is damaged"
    )
