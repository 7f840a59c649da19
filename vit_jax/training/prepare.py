"""The parts of a run, checked against files and devices before anything is written."""

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data, files, metrics, transfer
from vit_jax.checkpoints import restore
from vit_jax.config import SplitKey
from vit_jax.config.stored import read_config
from vit_jax.data.division import hash_of, read_division
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.devices.mesh import check_accum_steps, check_batch_size, make_mesh
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators import StateEvaluator, check_outputs, make_evaluators
from vit_jax.evaluators.declared import check_metrics
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.experiment.microbatches import settle_microbatches
from vit_jax.objectives.contract import Teacher
from vit_jax.training.agreement import compare_requests
from vit_jax.training.decided import decide, take_fields
from vit_jax.training.layout import ChooseLayout, settle_layout
from vit_jax.training.sources import (
    check_evaluated_images,
    check_images,
    data_fingerprint,
    find_places,
    open_sources,
    training_order,
)
from vit_jax.training.teachers import (
    check_same_teachers,
    classes_of,
    compare_classes,
    describe_teachers,
    gives_classes,
    read_teachers,
)
from vit_jax.training.timetable import Timetable
from vit_jax.training.workdir import check_store, check_unchanged, check_writable, continue_run
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.rules import reorder_head
from vit_jax.transfer.spec import class_names_of
from vit_jax.transfer.workdir import read_class_names

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass(frozen=True)
class Run:
    """The checked parts of a run, with every string of the config parsed; nothing is written yet.

    config: resolved, i.e. with the facts of the data set filled in.
    preprocessing: image size and ops.
    sources: keyed as by `config.train_split` and `config.eval_splits`.
    train_source: the training split; None for evaluation only.
    order: order of the training records; None for evaluation only.
    evaluators: {name: evaluator} for `config.evals`.
    timetable: the steps at which the run logs, evaluates and saves.
    initial_params: {leaf name: array} from `init_from`; None if it is not used.
    initial_model_state: {name: array} from `init_from`, such as batch statistics.
    pictures: content of `division.FILE` of a run that begins; empty if it has none of the user's.
    teachers: the frozen models that the objective learns from.
    described_teachers: source, weight and digest of each.
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
    initial_model_state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    pictures: bytes = b""
    teachers: tuple[Teacher, ...] = ()
    described_teachers: Sequence[Mapping[str, Any]] = ()

    @property
    def fingerprint(self) -> str:
        """Digest of the training data, saved in each checkpoint."""
        assert self.train_source is not None
        return data_fingerprint(self.config, self.train_source)


def prepare(
    config: ConfigDict,
    workdir: epath.PathLike,
    choose_layout: ChooseLayout | None = None,
    *,
    training: bool = True,
) -> Run:
    """Check a config against files and devices, and build the run; writes nothing.

    Args:
      config: has passed `validation.validate`.
      workdir: the run's directory.
      choose_layout: chooses under `auto`; None: the layout stays as it is.
      training: False if the run is only evaluated: the training split and `init_from` are not
        opened, and `config` need not match the run in `workdir`.

    Raises:
      InputError: names the key.
    """
    workdir, faults = files.absolute(workdir), Faults()
    chooses_microbatches = config.optimizer.accum_steps is None
    if training:
        config = continue_run(config, workdir)
    mesh = check_mesh(config, faults, training and not chooses_microbatches)
    resumes = _check_workdir(config, workdir, training, faults)
    is_begun = (workdir / "config.json").exists()
    pretrained = _read_weights(config, faults) if training and not resumes else None
    if pretrained is not None:
        config = faults.check(take_fields, config, pretrained) or config
    early = faults.check(_classes_from_teachers, config) if training else None
    divider = faults.check(_open_division, workdir, is_begun, training, pretrained)
    config, preprocessing, sources = _open_data(config, workdir, training, faults, early, divider)
    assert mesh is not None
    if pretrained is not None and config.init_head == "kept":
        class_names = sources[config_lib.train_split(config)].class_names
        pretrained = _match_head(pretrained, class_names)
    if training:
        config = decide(config)
        config, mesh = _settle(config, workdir, mesh, choose_layout, chooses_microbatches)
    teachers, described = _open_teachers(config, workdir, sources, early) if training else ((), [])
    train_source = sources.get(config_lib.train_split(config)) if training else None
    experiment = make_experiment(_of_step(config, training), mesh, preprocessing, teachers)
    check_outputs(config, experiment.model, preprocessing.image_size)
    evaluators = make_evaluators(
        config, preprocessing, experiment.model, mesh, sources, workdir if training else None
    )
    if training:
        check_metrics(config, evaluators, resumes=is_begun)
    return Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        preprocessing=preprocessing,
        sources=sources,
        train_source=train_source,
        order=None if train_source is None else training_order(config, train_source),
        experiment=experiment,
        evaluators=evaluators,
        timetable=Timetable(experiment.durations),
        teachers=teachers,
        described_teachers=described,
        pictures=_keep_division(divider, pretrained) if training and not is_begun else b"",
        **_first_weights(config, experiment, pretrained),
    )


def _settle(
    config: ConfigDict,
    workdir: epath.Path,
    mesh: Mesh,
    choose_layout: ChooseLayout | None,
    chooses_microbatches: bool,
) -> tuple[ConfigDict, Mesh]:
    """`config` and the mesh with the layout and the microbatches that suit the devices.

    Raises:
      InputError: the layout is invalid, or the run in `workdir` has other settings.
    """
    if config.auto and choose_layout is not None:
        config = settle_layout(config, mesh, workdir, choose_layout)
        mesh = _mesh_of_layout(config, not chooses_microbatches)
    if chooses_microbatches:
        config = settle_microbatches(config, mesh)
    check_unchanged(config, workdir, ("optimizer.accum_steps",) * chooses_microbatches)
    return config, mesh


def _check_workdir(config: ConfigDict, workdir: epath.Path, training: bool, faults: Faults) -> bool:
    """Check that the run can be written, or only read; return whether it resumes."""
    faults.check(check_writable if training else check_store, workdir)
    if training and config.log.wandb is not None:
        faults.check(metrics.check_installed, config.log.wandb)
    resumes = bool(restore.saved_steps(workdir / "checkpoints"))
    compare_requests(config, {"resumes": resumes})
    return resumes


def _classes_from_teachers(config: ConfigDict) -> tuple[Teacher, ...] | None:
    """The teachers of a run on unlabelled pictures, whose classes it takes; None for other runs."""
    return read_teachers(config) if gives_classes(config) else None


def _open_data(
    config: ConfigDict,
    workdir: epath.Path,
    training: bool,
    faults: Faults,
    teachers: Sequence[Teacher] | None,
    divider: data.Divider | None,
) -> tuple[ConfigDict, Preprocessing, dict[SplitKey, data.Source]]:
    """Open the splits and check their images: (config with their facts, preprocessing, sources).

    Unlabelled pictures have the classes of `teachers`. `divider` divides the user's pictures.

    Raises:
      InputError: lists `faults` and those of the data.
    """
    if config.data.image_size is None:  # the source would have given it
        collect_faults(faults)
    preprocessing = parse_preprocessing(config)
    class_names = None if training else _class_names(config, workdir)
    taught = None if teachers is None else classes_of(teachers)
    opened = faults.check(open_sources, config, training, class_names, taught, divider)
    config, sources = opened or (config, {})
    if sources:
        check = check_images if training else check_evaluated_images
        faults.check(check, config, preprocessing, sources)
    collect_faults(faults)
    return config, preprocessing, sources


def _open_division(
    workdir: epath.Path, is_begun: bool, training: bool, pretrained: transfer.Pretrained | None
) -> data.Divider:
    """Divides pictures as the run in `workdir` does; for a new run, as that of `init_from` did."""
    if is_begun:
        division = read_division(workdir, read_config(workdir))
        return data.Divider(division, "" if training else str(workdir))
    return data.Divider(data.Division() if pretrained is None else pretrained.division, anew=True)


def _keep_division(divider: data.Divider | None, pretrained: transfer.Pretrained | None) -> bytes:
    """`Run.pictures`: what was decided, and what else `init_from` holds out."""
    splits = {} if divider is None else divider.decided
    before = frozenset() if pretrained is None else pretrained.division.held_out()
    division = data.Division(splits, before - {hash_of(name) for name in splits})
    return division.to_bytes() if any(division) else b""


def _read_weights(config: ConfigDict, faults: Faults) -> transfer.Pretrained | None:
    """The source of the initial weights; None if there is none or it is faulty."""
    faults.check(check_convention, config.init_resize, "init_resize")
    source = config_lib.weights_source(config)
    return None if source is None else faults.check(transfer.read_pretrained, source)


def _match_head(
    pretrained: transfer.Pretrained, class_names: Sequence[str] | None
) -> transfer.Pretrained:
    """`pretrained` with the outputs of its head in the order of `class_names`.

    Raises:
      InputError: it lacks one of the classes.
    """
    source, theirs = f"init_from={pretrained.source!r}", pretrained.spec.class_names
    try:
        places = find_places(class_names, theirs, source)
    except InputError as e:
        raise InputError(
            f"init_head='kept': {e}; rename the classes, or set --config.init_head=new"
        ) from None
    if places is None:
        if class_names is not None:
            logger.warning("init_head='kept': %s gives no names of its classes; they are taken to "
                           "be those of the data, in the same order", source)  # fmt: skip
        return pretrained
    if places == list(range(len(theirs or ()))):
        return pretrained
    logger.info("%s: the outputs of the head are reordered by the names of the classes", source)
    return pretrained._replace(params=reorder_head(pretrained.params, places))


def _open_teachers(
    config: ConfigDict,
    workdir: epath.Path,
    sources: Mapping[SplitKey, data.Source],
    teachers: tuple[Teacher, ...] | None,
) -> tuple[tuple[Teacher, ...], list[dict[str, Any]]]:
    """The teachers of a run, unless they were read already, and their description.

    Raises:
      InputError: they do not suit the run, or have changed.
    """
    teachers = read_teachers(config) if teachers is None else teachers
    described = describe_teachers(teachers)
    check_same_teachers(workdir, described)
    class_names = sources[config_lib.train_split(config)].class_names
    return compare_classes(config, teachers, class_names), described


def _of_step(config: ConfigDict, training: bool) -> ConfigDict:
    """`config`, for evaluation with a supervised objective where its own has teachers."""
    if training or config.objective.teacher is None:
        return config
    config = copy.deepcopy(config)
    config.objective.update(config_lib.default_config().objective.to_dict())
    return config


def check_mesh(config: ConfigDict, faults: Faults, checks_microbatches: bool = True) -> Mesh | None:
    """The mesh of the config, or None if it is invalid; checks that batches divide over it.

    `checks_microbatches`: whether `optimizer.accum_steps` must divide them too.
    """
    axes = {axis: size for axis, size in config.mesh.items() if axis != "platform"}
    mesh = faults.check(make_mesh, **axes)
    if mesh is not None:
        faults.check(check_batch_size, mesh, config.global_batch_size, "global_batch_size")
        if checks_microbatches:
            accum_steps = config_lib.num_microbatches(config)
            faults.check(check_accum_steps, mesh, config.global_batch_size, accum_steps)
        for name, entry in config.evals.items():
            if entry.batch_size is not None:
                faults.check(check_batch_size, mesh, entry.batch_size, f"evals.{name}.batch_size")
    return mesh


def _mesh_of_layout(config: ConfigDict, checks_microbatches: bool) -> Mesh:
    """The mesh of a layout that was chosen under `auto`; raises InputError if it is invalid."""
    faults = Faults()
    mesh = check_mesh(config, faults, checks_microbatches)
    collect_faults(faults)
    assert mesh is not None
    return mesh


def _first_weights(
    config: ConfigDict, experiment: Experiment, pretrained: transfer.Pretrained | None
) -> dict[str, dict[str, np.ndarray]]:
    """The fields of `Run` with the weights of `init_from`, fitted to the model."""
    if pretrained is None:
        return {}
    compare_value_ranges(config, pretrained)
    keep_head = config.init_head == "kept"
    model = experiment.model
    params = transfer.init_params(pretrained, model, config.init_resize, keep_head=keep_head)
    model_state = transfer.init_model_state(pretrained, model, config.init_resize)
    return {"initial_params": params, "initial_model_state": model_state}


def _class_names(config: ConfigDict, workdir: epath.Path) -> tuple[str, ...] | None:
    """The names of the classes that the run in `workdir` was trained on; None: not stored."""
    return class_names_of(read_class_names(workdir), config.data.num_classes, str(workdir))


def compare_value_ranges(config: ConfigDict, pretrained: transfer.Pretrained) -> None:
    """Warn if the model of `init_from` was trained with another pixel range than `config.data`."""
    for key in ("mean", "std"):
        ours, theirs = config.data[key], getattr(pretrained.spec, key)
        if len({*theirs}) == 1:
            theirs = theirs[:1] * len(ours)  # of another number of channels
        if len(ours) == len(theirs) and not np.allclose(ours, theirs, rtol=0, atol=1e-6):
            logger.warning(
                "data.%s=%s, but init_from=%s was trained with %s; set --config.data.%s=%s",
                key, ours, config.init_from, theirs, key, ",".join(map(str, theirs)),
            )  # fmt: skip
