"""Checkpoints that certify themselves, and checks that copies of the state agree.

Importing this package loads no orbax.
"""

from ml_collections import ConfigDict

from vit_jax.errors import Faults


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks the section `checkpoint`, but for its durations."""
    keep = config.checkpoint.keep_last
    faults.need(
        keep >= 2, f"checkpoint.keep_last={keep}: needs at least 2, should the newest be damaged"
    )
