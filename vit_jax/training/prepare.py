"""What a run consists of, checked against files and devices, before anything is written."""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data, files, metrics, transfer
from vit_jax.checkpoints import restore
from vit_jax.config import SplitKey
from vit_jax.config.stored import continue_older
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.data.sources import FINGERPRINT_VERSION
from vit_jax.devices.mesh import check_accum_steps, check_batch_size, make_mesh
from vit_jax.errors import Faults, collect_faults
from vit_jax.evaluators import StateEvaluator, make_evaluators
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.training.agreement import compare_requests
from vit_jax.training.sources import (
    adopt_holdout,
    check_evaluated_images,
    check_images,
    data_fingerprint,
    open_sources,
    training_order,
)
from vit_jax.training.timetable import Timetable
from vit_jax.training.workdir import check_store, check_unchanged, check_writable
from vit_jax.transfer.resample import check_convention

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run needs, checked, with every text of the config parsed; nothing is written yet.

    config: resolved: the facts of the data set are filled in.
    preprocessing: image size and ops.
    sources: by the keys that `config.train_split` and `config.eval_splits` give.
    train_source: the split that is trained on; None for evaluation only.
    order: of the training records; None for evaluation only.
    evaluators: {name: evaluator} of `config.evals`.
    timetable: when the run logs, evaluates and saves.
    initial_params: {leaf name: array} that the model takes from `init_from`; None for none.
    """

    config: ConfigDict
    workdir: epath.Path
    mesh: Mesh
    preprocessing: Preprocessing
    sources: Mapping[SplitKey, data.Source]
    train_source: data.Source | None
    order: data.Order | None
    experiment: Experiment
    evaluators: Mapping[str, StateEvaluator]
    timetable: Timetable
    initial_params: Mapping[str, np.ndarray] | None = None

    def fingerprint_by(self, version: int) -> str:
        """The fingerprint of the training data by the rule of that version."""
        assert self.train_source is not None
        return data_fingerprint(self.config, self.train_source, version)

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a checkpoint keeps of the training data."""
        return {
            "data_fingerprint": self.fingerprint_by(FINGERPRINT_VERSION),
            "fingerprint_version": FINGERPRINT_VERSION,
        }


def prepare(config: ConfigDict, workdir: epath.PathLike, *, training: bool = True) -> Run:
    """The second check of a config, with files and devices; writes nothing.

    Args:
      config: valid as far as the first check sees.
      workdir: of the run.
      training: False: the run is only evaluated, so neither its training split nor `init_from` is
        needed, and the config of an earlier run in `workdir` need not agree.

    Raises:
      InputError: naming the key.
    """
    workdir, faults = files.absolute(workdir), Faults()
    if training:
        config = continue_older(config, workdir)
    mesh = check_mesh(config, faults)
    faults.check(check_writable if training else check_store, workdir)
    if training and config.log.wandb is not None:
        faults.check(metrics.check_installed, config.log.wandb)
    resumes = bool(restore.saved_steps(workdir / "checkpoints"))
    compare_requests(config, {"resumes": resumes})
    faults.check(check_convention, config.init_resize, "init_resize")
    weights = config_lib.weights_source(config) if training and not resumes else None
    pretrained = None if weights is None else faults.check(transfer.read_pretrained, weights)
    if pretrained is not None:
        config = faults.check(adopt_holdout, config, pretrained) or config
    preprocessing = parse_preprocessing(config)
    config, sources = faults.check(open_sources, config, training) or (config, {})
    if sources:
        check = check_images if training else check_evaluated_images
        faults.check(check, config, preprocessing, sources)
    collect_faults(faults)
    assert mesh is not None

    train_source = sources.get(config_lib.train_split(config)) if training else None
    if training:
        check_unchanged(config, workdir)
    experiment = make_experiment(config, mesh, preprocessing)
    return Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        preprocessing=preprocessing,
        sources=sources,
        train_source=train_source,
        order=None if train_source is None else training_order(config, train_source),
        experiment=experiment,
        evaluators=make_evaluators(config, preprocessing, experiment.model, mesh, sources),
        timetable=Timetable(experiment.durations),
        initial_params=None
        if pretrained is None
        else _first_weights(config, experiment, pretrained),
    )


def check_mesh(config: ConfigDict, faults: Faults) -> Mesh | None:
    """The mesh, whose devices every batch must divide into; None if the config gives none."""
    axes = {axis: size for axis, size in config.mesh.items() if axis != "platform"}
    mesh = faults.check(make_mesh, **axes)
    if mesh is not None:
        faults.check(check_batch_size, mesh, config.global_batch_size, "global_batch_size")
        accum_steps = config.optimizer.accum_steps
        faults.check(check_accum_steps, mesh, config.global_batch_size, accum_steps)
        for name, entry in config.evals.items():
            if entry.batch_size is not None:
                faults.check(check_batch_size, mesh, entry.batch_size, f"evals.{name}.batch_size")
    return mesh


def _first_weights(
    config: ConfigDict, experiment: Experiment, pretrained: transfer.Pretrained
) -> dict[str, np.ndarray]:
    """The parameters of `init_from`, fitted to the model."""
    compare_value_ranges(config, pretrained)
    keep_head = config.init_head == "kept"
    return transfer.init_params(
        pretrained, experiment.model, config.init_resize, keep_head=keep_head
    )


def compare_value_ranges(config: ConfigDict, pretrained: transfer.Pretrained) -> None:
    """Warns if the model of `init_from` has seen another range of pixels than `config.data`."""
    for key in ("mean", "std"):
        ours, theirs = config.data[key], getattr(pretrained.spec, key)
        if not np.allclose(ours, theirs, rtol=0, atol=1e-6):
            logger.warning(
                "data.%s=%s, and init_from=%s was trained with %s; set --config.data.%s=%s",
                key, ours, config.init_from, theirs, key, ",".join(map(str, theirs)),
            )  # fmt: skip
