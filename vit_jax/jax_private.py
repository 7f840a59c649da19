"""The parts of JAX without a public name that this package uses; nothing else imports `jax._src`.

`tests/test_jax_private.py` says for each what would no longer work where JAX moves it.
"""

import sys
from typing import Any


def has_devices() -> bool:
    """Whether JAX has started its devices in this process. Does not import JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def distributed_state() -> Any:
    """The state of `jax.distributed`: process_id, num_processes, coordinator_address, client.

    `client` is the connection to the key-value store of the job, None in a job of one process.
    """
    from jax._src import distributed

    return distributed.global_state


def find_cluster() -> Any:
    """The cluster that `jax.distributed.initialize` would detect; None: there is none.

    It has `name` and `get_process_count()`, which may raise anything.
    """
    from jax._src import clusters

    for cluster in clusters.ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return cluster
    return None
