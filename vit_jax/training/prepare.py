"""What a run consists of, checked against files and devices, before anything is written."""

import copy
import dataclasses
import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data, files, metrics, transfer
from vit_jax.checkpoints import checkpoint
from vit_jax.config import SplitKey
from vit_jax.config import stored as stored_config
from vit_jax.config.evals import find_evaluator
from vit_jax.data.sources import FINGERPRINT_VERSION, fingerprint
from vit_jax.devices.mesh import check_accum_steps, check_batch_size, make_mesh
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators import make_evaluators
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.training.agreement import compare_requests
from vit_jax.transfer.resample import check_convention

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run needs, checked; nothing is written yet.

    config: resolved: what the data set says is filled in.
    sources: by what `config.train_split` and `config.eval_splits` give.
    evaluators: {name: evaluator} of `config.evals`.
    initial_params: {leaf name: array} that the model takes from `init_from`; None for none.
    """

    config: ConfigDict
    workdir: epath.Path
    mesh: Mesh
    sources: Mapping[SplitKey, data.Source]
    experiment: Experiment
    evaluators: Mapping[str, Any]
    initial_params: Any = None

    @property
    def train_source(self) -> data.Source:
        """The split that is trained on."""
        return self.sources[config_lib.train_split(self.config)]


def prepare(config: ConfigDict, workdir: epath.PathLike, *, training: bool = True) -> Run:
    """The second check of a config, with files and devices; writes nothing.

    Args:
      config: valid as far as `validation` sees.
      workdir: of the run.
      training: False: the run is evaluated only, so neither its training split nor `init_from`
        is needed, and an earlier run's config in `workdir` need not agree.

    Raises:
      InputError: naming the key.
    """
    workdir = files.absolute(workdir)
    if training:
        config = stored_config.continue_older(config, workdir)
    faults = Faults()
    mesh = check_mesh(config, faults)
    faults.check(check_writable if training else check_store, workdir)
    if training and config.log.wandb is not None:
        faults.check(metrics.check_installed, config.log.wandb)
    resumes = bool(checkpoint.saved_steps(workdir / "checkpoints"))
    compare_requests(config, {"resumes": resumes})
    weights_from = config_lib.weights_source(config)
    initialises = training and not resumes and weights_from is not None
    faults.check(check_convention, config.init_resize, "init_resize")
    pretrained = faults.check(transfer.read_pretrained, weights_from) if initialises else None
    if pretrained is not None:
        config = faults.check(adopt_holdout, config, pretrained) or config
    resolved = faults.check(open_sources, config, training)
    if resolved is not None:
        config, sources = resolved
        faults.check(check_images, config, sources)
    collect_faults(faults)
    if training:
        check_unchanged(config, workdir)
    experiment = make_experiment(config, mesh)
    evaluators = make_evaluators(config, experiment.model, mesh, sources)
    params = None
    if initialises:
        compare_value_ranges(config, pretrained)
        params = transfer.init_params(
            pretrained,
            experiment.model,
            config.init_resize,
            keep_head=config.init_head == "kept",
        )
    return Run(config, workdir, mesh, sources, experiment, evaluators, params)


def check_mesh(config: ConfigDict, faults: Faults) -> Mesh | None:
    """The mesh, whose devices every batch must divide into; None if there is none such."""
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


def adopt_holdout(config: ConfigDict, pretrained: transfer.Pretrained) -> ConfigDict:
    """`config` with the rule by which the run in `pretrained` held out images of its folder.

    So no image that the run was trained on is one to test with, nor the other way round.

    Raises:
      InputError: if `config` sets another rule.
    """
    run, own = pretrained.run and pretrained.run["config"], config.data.holdout
    if run is None or own == run["data"]["holdout"]:
        return config
    rule, default = run["data"]["holdout"], config_lib.base_config().data.holdout
    if rule == default and not config_lib.reads_folder(run):
        return config
    if own != default:
        raise InputError(
            f"data.holdout={own!r}: {pretrained.source} held out images by {rule!r}; leave "
            "data.holdout out, or images that it was trained on would be tested on"
        )
    config = copy.deepcopy(config)  # with the types of keys that are None
    config.data.holdout = rule
    if config_lib.reads_folder(config):
        logger.warning(
            "%s held out images of its folder by data.holdout=%r; so they are held out here "
            "(new runs: %r)",
            pretrained.source, rule, default,
        )  # fmt: skip
    return config


def open_sources(
    config: ConfigDict, training: bool
) -> tuple[ConfigDict, dict[SplitKey, data.Source]]:
    """The config with what the data set says filled in, and the source of every split.

    Without `training` the training split is left out; what it says is in the config already.
    """
    config, sources = open_training(config) if training else (config, {})
    d, faults = config.data, Faults()
    for name, entry in config.evals.items():
        for split_key, key in config_lib.eval_splits(config, entry).items():
            synthetic = key.data_name == "synthetic"
            learns = find_evaluator(entry.type).learns_classes
            if sources.get(key) is None:
                sources[key] = faults.check(
                    _open_split,
                    config,
                    key,
                    d.num_classes if synthetic else None,
                    d.num_examples if synthetic else None,
                    prefix=f"evals.{name}.{split_key}: ",
                )
            found = sources[key]
            if found is not None and not learns and found.num_classes != d.num_classes:
                faults.append(
                    f"evals.{name}.{split_key}: {found.name} {found.split} has "
                    f"{found.num_classes:,} classes, and the model {d.num_classes:,}; needs a data "
                    "set of the classes that it was trained on"
                )
    collect_faults(faults)
    return config, sources


def open_training(config: ConfigDict) -> tuple[ConfigDict, dict[SplitKey, data.Source]]:
    """The config with what the data set says filled in, and the sources that are trained on.

    Under `config.train_split(config)` is the whole of them, of a mixture the first by itself too.

    Raises:
      InputError: the data are missing, or not as the config says.
    """
    config = config.copy_and_resolve_references()
    d, faults = config.data, Faults()
    own, parts = SplitKey(d.name, d.split, d.data_dir, d.classes), data.parse_mix(d.mix)
    source = _open_split(config, own, d.num_classes, None if parts else d.num_examples)
    sources = {own: source}
    if parts:
        keys = [own._replace(data_name=part.name, split=part.split or d.split) for part in parts]
        others = [faults.check(_open_split, config, key, prefix="data.mix: ") for key in keys]
        collect_faults(faults)
        opened = [source, *others]
        if d.reader is None and not data.held_alike(opened):
            # By size and free memory some are held as pixels; what is mixed depends on neither.
            opened = [
                s if s.encoded or key.data_name in data.SOURCES
                else _open_split(config, key, reader=data.ON_DISK)
                for key, s in zip([own, *keys], opened, strict=True)
            ]  # fmt: skip
            sources[own] = opened[0]
        sources[config_lib.train_split(config)] = source = data.concatenate(opened)
    if d.num_examples not in (None, source.num_examples):
        raise InputError(
            f"data.num_examples={d.num_examples}: the data sets of data.mix and data.name have "
            f"{source.num_examples} together; leave it out"
        )
    d.num_classes, d.num_examples = source.num_classes, source.num_examples
    d.order, d.streams = data.resolve_order(
        d.order,
        d.streams,
        num_examples=d.num_examples,
        global_batch_size=config.global_batch_size,
        repeats=d.repeats,
    )
    return config, sources


def _open_split(
    config, key: SplitKey, num_classes=None, num_examples=None, reader=None
) -> data.Source:
    return data.make_source(
        key.data_name,
        split=key.split,
        classes=key.classes,
        reader=reader or config.data.reader,
        broken_labels=config.data.broken_labels,
        data_dir=key.data_dir,
        holdout=config.data.holdout,
        image_size=config_lib.image_hw(config.data.image_size),
        num_classes=num_classes,
        num_examples=num_examples,
        **config_lib.own_keys(config, "data"),
    )


def training_order(config: ConfigDict, source: data.Source) -> data.Order:
    """The order of training on `source`, by a config that `open_sources` has filled in."""
    d = config.data
    return data.make_order(
        d.order,
        source.part_sizes,
        config.seed,
        global_batch_size=config.global_batch_size,
        chunk_size=d.chunk_size,
        streams=d.streams,
        repeats=d.repeats,
        weights=[part.weight for part in data.parse_mix(d.mix)],
    )


def check_images(config: ConfigDict, sources: Mapping[SplitKey, data.Source]) -> None:
    """Raises InputError if the ops of training or of an evaluator do not give `data.image_size`."""
    image_size = config_lib.image_hw(config.data.image_size)
    one = {"global_batch_size": 1, "image_size": image_size, "rows": np.arange(1)}
    if config_lib.train_split(config) in sources:
        host_ops, _ = data.parse_ops(config.data.ops, image_size, pad_crops=config.data.pad_crops)
        source = sources[config_lib.train_split(config)]
        data.host_batches(source, host_ops, **one, seed=0, start_step=0, num_steps=0)
    check_evaluated_images(config, sources)


def check_evaluated_images(config: ConfigDict, sources: Mapping[SplitKey, data.Source]) -> None:
    """Raises InputError if the ops of an evaluator do not give `data.image_size`."""
    image_size = config_lib.image_hw(config.data.image_size)
    one = {"global_batch_size": 1, "image_size": image_size, "rows": np.arange(1)}
    for name, entry in config.evals.items():
        where = {"key": f"evals.{name}.ops", "pad_crops": config.data.pad_crops}
        host_ops, _ = data.parse_ops(entry.ops, image_size, **where)
        for key in config_lib.eval_splits(config, entry).values():
            data.host_eval_batches(sources[key], host_ops, **one, key=f"evals.{name}.ops")


def check_store(workdir: epath.Path) -> None:
    """Raises InputError if what checkpoints in `workdir` are read and written by is missing."""
    if os.fspath(workdir).startswith("gs://") and not _is_installed("google.cloud.storage"):
        raise InputError(
            f"--workdir={workdir}: checkpoints on gs:// need google-cloud-storage, which is not "
            "installed; pip install -e '.[gcs]'"
        )


def check_writable(workdir: epath.Path) -> None:
    """Raises InputError if `workdir` is no directory that can be made or written to."""
    check_store(workdir)
    there = next((path for path in [workdir, *workdir.parents] if path.exists()), None)
    if there is None or "://" in os.fspath(workdir):
        return
    if not there.is_dir():
        what = "" if there == workdir else f"{there} "
        raise InputError(f"--workdir={workdir}: {what}is a file; give a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--workdir={workdir}: {there} cannot be written to; choose another")


def compare_value_ranges(config: ConfigDict, pretrained: transfer.Pretrained) -> None:
    """Warns if the model of `init_from` has seen another range of pixels than `config.data`."""
    for key in ("mean", "std"):
        ours, theirs = config.data[key], getattr(pretrained.spec, key)
        if not np.allclose(ours, theirs, rtol=0, atol=1e-6):
            logger.warning(
                "data.%s=%s, and init_from=%s was trained with %s; set --config.data.%s=%s",
                key, ours, config.init_from, theirs, key, ",".join(map(str, theirs)),
            )  # fmt: skip


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def check_unchanged(config: ConfigDict, workdir: epath.Path) -> None:
    """Raises InputError if `workdir` holds a run of another config; warns of other evaluators."""
    if not (workdir / "config.json").exists():
        return
    stored = stored_config.read_config(workdir)
    collect_faults(
        config_lib.say_changes(config_lib.changed_keys(stored, config)),
        f"--workdir={workdir} holds a run of another config; set it back, or take a new --workdir",
    )
    both = {*stored.evals} & {*config.evals}
    changed = config_lib.changed_evals(stored, config)
    changed = {key: values for key, values in changed.items() if key.split(".")[1] in both}
    if changed:
        logger.warning(
            "%s: evaluators have changed since the run began, so results may not compare with "
            "earlier ones: %s",
            workdir,
            "; ".join(config_lib.say_changes(changed)),
        )


def data_fingerprint(run: Run, version: int = FINGERPRINT_VERSION) -> str:
    """Of all that decides which bytes the batch of a step holds, but for code.

    Raises:
      InputError: if `version` is newer than this code.
    """
    c = run.config
    if version > FINGERPRINT_VERSION:
        raise InputError(
            f"--workdir={run.workdir}: its checkpoints have a data fingerprint of version "
            f"{version}, and this vit_jax knows them up to {FINGERPRINT_VERSION}; use a newer one"
        )
    return fingerprint(
        run.train_source.fingerprints[version - 1],
        c.seed,
        c.global_batch_size,
        c.data.ops,
        config_lib.image_hw(c.data.image_size),
        [c.data.order, c.data.chunk_size, c.data.streams, c.data.repeats, c.data.mix],
    )
