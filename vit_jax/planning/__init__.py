"""What a run will need and take on chips that are not there.

For TPUs the real training step is compiled ahead of time, on the CPU: memory, exchanges between
chips and cycles are what the compiler says. For GPUs they are calculated, and for TPUs where libtpu
is not installed. What follows from them, time and cost, is an estimate.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from vit_jax import files
from vit_jax.config import stored as stored_config
from vit_jax.config.plugins import digests
from vit_jax.job.software import software
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.compiled import compile_plan
from vit_jax.planning.targets import Target


def plan(config: ConfigDict, target: Target) -> dict[str, Any]:
    """All that is known of the run of `config` before it begins, as JSON takes it.

    What was planned once, with the same config, code and versions, is read from a cache.

    Args:
      config: with `data.num_classes` and `data.num_examples` set; no data are read.
      target: where it runs.

    Raises:
      InputError: the config does not suit the devices.
    """
    cached = cache_file(config, target)
    if cached.exists():
        return json.loads(cached.read_text())
    make_plan = compile_plan if target.is_compiled_for else calculate_plan
    figures = make_plan(config, target) | {"software": software()}
    cached.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(files.absolute(cached), json.dumps(figures) + "\n")
    return figures


def cache_file(config: ConfigDict, target: Target) -> pathlib.Path:
    """Where the plan of `config` for `target` is kept, by all that it depends on."""
    default = pathlib.Path.home() / ".cache"
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or default) / "vit_jax/plans"
    said = [
        stored_config.to_json(config),
        target.slice.name,
        target.num_slices,
        software() | digests(config.plugins),
    ]
    return root / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()}.json"
