"""Features of the training images by a frozen model, computed once and kept in the workdir.

Where neither the model nor its images change, each epoch would compute the same features again.
"""

import dataclasses
import io
import logging
from typing import IO, cast

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.base.tree import Batch
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.evaluators.inputs import EvalInputs, fetch
from vit_jax.experiment.state import TrainState
from vit_jax.job import processes, watchdog
from vit_jax.run.build import Run

logger = logging.getLogger("vit_jax")

_WAIT_S = 24 * 3600.0  # for process 0, which reads and writes the file


def with_kept_features(run: Run, state: TrainState) -> Run:
    """`run` whose training data have the features of their images, if it trains on them.

    They are read from WORKDIR/features.DIGEST.npy, by the digest of the data, which the model of
    `state` makes at step 0, or if it is not there: float16 (n, D), NaN for images that cannot be
    read. All processes call it, and each holds all features.

    Raises:
      InputError: a feature is too large for float16.
    """
    if not run.settings.data.keep_features:
        return run
    source = run.train_source
    path = run.workdir / f"features.{source.fingerprint[:12]}.npy"

    def is_kept() -> bool:
        return int(state.step) > 0 and path.exists()  # at step 0 the weights may be others

    if not processes.say_to_all("features that are kept", is_kept, _WAIT_S):
        logger.info("features: computed for %s images, once", f"{source.num_examples:,}")
        x_ND = _compute(run, state)
        if jax.process_index() == 0:
            np.save(content := io.BytesIO(), x_ND)
            files.write_whole(path, content.getvalue())
        processes.agree("the features", {}, _WAIT_S)
    logger.info("features: training reads no images, only %s", path)
    with cast("IO[bytes]", path.open("rb")) as file:
        x_ND = np.load(file)
    return dataclasses.replace(run, train_source=dataclasses.replace(source, features=x_ND))


def _compute(run: Run, state: TrainState) -> np.ndarray:
    """The features of all training images, see `with_kept_features`."""
    settings, model = run.settings, run.experiment.model
    host_ops, size = parse_preprocessing(settings).host_ops, settings.data.image_size
    sources = {"data": run.train_source}
    inputs = EvalInputs("train", settings, model, run.mesh, sources, host_ops, size)

    @inputs.jit
    def compute(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_BD = inputs.apply(state, batch["image"], "features").astype(jnp.float16)
        return x_BD, batch["id"], batch["mask"]

    batches = inputs.batches("data", batch_size=settings.run.global_batch_size)
    x_ND = np.full((run.train_source.num_examples, model.width), np.nan, np.float16)
    for x_BD, id_B, mask_B in fetch(compute(state, batch) for batch in batches):
        with watchdog.phase("evaluation"):  # which each batch begins anew
            if not np.isfinite(found := x_BD[mask_B > 0]).all():
                raise InputError(
                    "data.keep_features=True: the model's features of an image are not finite in "
                    "float16; set --config.data.keep_features=false"
                )
            x_ND[id_B[mask_B > 0]] = found
    return x_ND
