"""Evaluation without training: of a run in its workdir, and of a model from any source."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import files, transfer, tree
from vit_jax.checkpoints import restore
from vit_jax.config import with_values
from vit_jax.config.evals import EVALUATORS, learning_kinds
from vit_jax.config.stored import read_config
from vit_jax.data import Divider, Source
from vit_jax.data.division import read_division
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.devices.kernels import choose_forms
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain, place, state_shardings
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.evaluators import check_outputs, make_evaluators
from vit_jax.evaluators import evaluate as evaluate_one
from vit_jax.evaluators.classification import Examples
from vit_jax.evaluators.inputs import Measure
from vit_jax.evaluators.multilabel import Shown
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.models.fields import check_fields, value_of, with_known
from vit_jax.run.agreement import compare_findings, compare_requests, compare_weights
from vit_jax.run.opener import check_mesh
from vit_jax.run.sources import (
    check_evaluated_images,
    find_absent,
    find_other_names,
    open_evaluated,
)
from vit_jax.run.workdir import check_store
from vit_jax.transfer.images import ops_for
from vit_jax.transfer.pretrained import Pretrained, class_names_of, loss_of
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.workdir import read_class_names

logger = logging.getLogger("vit_jax")

# Called with an evaluator's name, its predictions and its data, once for each evaluator of the
# model's own classes; on every process.
OnPredictions = Callable[[str, Examples | Shown, Source], None]
Predictions = dict[str, Examples | Shown]  # of the evaluator that ran last


def evaluate(
    config: ConfigDict,
    workdir: epath.PathLike,
    on_predictions: OnPredictions | None = None,
) -> dict[str, float]:
    """Evaluate the newest valid checkpoint: {"step": ..., "test/top1": ..., ...}; writes nothing.

    `config` is the run's resolved config (`config.stored.read_config`), perhaps with other
    data or an open mesh. `on_predictions` gets the prediction for each image.

    Raises:
      InputError: if no checkpoint can be read.
    """
    workdir, faults = files.absolute(workdir), Faults()
    trained = read_config(workdir)
    mesh = _mesh_like(trained, config, faults)
    faults.check(check_store, workdir)
    saved = restore.saved_steps(workdir / "checkpoints")
    compare_requests(config, {"saved steps": bool(saved)})
    names = class_names_of(read_class_names(workdir), config.data.num_classes, str(workdir))
    collect_faults(faults)
    divider = Divider(read_division(workdir, trained), str(workdir))
    config, preprocessing, sources = _open_data(config, names, divider)
    experiment = make_experiment(_of_labels(config), mesh, preprocessing)
    model = experiment.model
    check_outputs(config, model, preprocessing.image_size)
    seen: Predictions = {}
    see = None if on_predictions is None else seen.setdefault  # the main weights come first
    evaluators = make_evaluators(config, preprocessing, model, mesh, sources, see=see)
    _warn_of_other_classes(config, names, str(workdir), sources)
    compare_findings(config, sources, {"checkpoints in --workdir": saved})
    with jax.set_mesh(mesh):
        wanted = {
            field: getattr(experiment.abstract_state, field)
            for field in ("params", "model_state", "ema", "ema_model_state")
        }
        restored = restore.restore_newest(workdir / "checkpoints", wanted, partial=True)
        if restored is None:
            raise InputError(
                f"--workdir={workdir}: has no checkpoint yet; wait for the run's first one"
            )
        found, meta = restored
        state = TrainState(jnp.int32(meta["step"]), **found, opt_state=())
        logger.info("evaluating step %d of %s", meta["step"], workdir)
        return {"step": meta["step"]} | _evaluate_all(
            evaluators, state, config, sources, seen, on_predictions
        )


def _mesh_like(trained: ConfigDict, config: ConfigDict, faults: Faults) -> Mesh | None:
    """The mesh of `config`; None if it is invalid.

    If it is open, these devices split parameters as far as those of `trained`, if they can.
    """
    mesh = check_mesh(with_values(config, {"optimizer.accum_steps": None}), faults)
    if mesh is None or config.mesh.data is not None or config.mesh.fsdp is not None:
        return mesh
    fsdp = math.gcd(mesh.shape["data"], trained.mesh.fsdp or 1)
    return make_mesh(replica=mesh.shape["replica"], fsdp=fsdp, tensor=mesh.shape["tensor"])


def evaluate_pretrained(
    config: ConfigDict,
    pretrained: Pretrained,
    on_predictions: OnPredictions | None = None,
) -> dict[str, float]:
    """Evaluate a model from any source by `config.evals`: {"knn/10nn_top1": ..., ...}.

    The source determines the value range, the loss, the image size unless `config.data.image_size`
    is set, and the preprocessing of evaluators without ops. `config.model` may set only fields that
    do not change the model's function, such as `dtype`. `on_predictions` gets the prediction for
    each image. The validation pictures of a folder are those that the source holds out, if it holds
    some.

    Raises:
      InputError: naming the key, before anything is computed.
    """
    config = config.copy_and_resolve_references()
    faults = Faults()
    mesh = check_mesh(config, faults)
    _fill_in(config, pretrained, faults)
    faults.check(check_convention, config.init_resize, "init_resize")
    collect_faults(faults)
    compare_requests(config, {"--init_from": pretrained.source})
    names = pretrained.spec.class_names
    divider = Divider(pretrained.division, pretrained.source)
    config, preprocessing, sources = _open_data(config, names, divider, pretrained)
    model = _model_on(mesh, config, preprocessing.image_size, pretrained)
    params = transfer.init_params(pretrained, model, config.init_resize, keep_head=True)
    model_state = transfer.init_model_state(pretrained, model, config.init_resize)
    _warn_of_other_classes(config, pretrained.spec.class_names, pretrained.source, sources)
    check_outputs(config, model, preprocessing.image_size)
    _fill_in_loss(config, pretrained)
    seen: Predictions = {}
    see = None if on_predictions is None else seen.setdefault  # the main weights come first
    evaluators = make_evaluators(config, preprocessing, model, mesh, sources, see=see)
    compare_findings(config, sources, {})
    compare_weights(config, params, model_state)
    with jax.set_mesh(mesh):
        found = {
            "params": tree.unflatten_names(params),
            "model_state": tree.unflatten_names(model_state),
        }
        placed = jax.tree.map(place, found, state_shardings(found, mesh))
        state = TrainState(jnp.int32(0), **placed, opt_state=())
        logger.info("evaluating %s", pretrained.source)
        step = {} if pretrained.run is None else {"step": pretrained.run["step"]}
        return step | _evaluate_all(evaluators, state, config, sources, seen, on_predictions)


def _open_data(
    config: ConfigDict,
    class_names: Sequence[str] | None,
    divider: Divider,
    pretrained: Pretrained | None = None,
) -> tuple[ConfigDict, Preprocessing, dict[config_lib.SplitKey, Source]]:
    """(config without evaluators whose split is not there, preprocessing, sources).

    Evaluators without ops get those of `pretrained`.
    """
    config = with_values(config, find_absent(config, training=False))
    sources = open_evaluated(config, class_names, divider)
    if pretrained is not None:
        _fill_in_ops(config, pretrained, sources)
    preprocessing = parse_preprocessing(config)
    check_evaluated_images(config, preprocessing, sources)
    return config, preprocessing, sources


def _of_labels(config: ConfigDict) -> ConfigDict:
    """`config` with a supervised objective where its own has teachers, which are not read."""
    if config.objective.teacher is None:
        return config
    config = copy.deepcopy(config)
    config.objective.update(config_lib.default_config().objective.to_dict())
    return config


def _fill_in(config: ConfigDict, pretrained: Pretrained, faults: Faults) -> None:
    """Copy the source's settings into `config`."""
    d, spec = config.data, pretrained.spec
    if d.image_size is None:
        d.image_size = spec.image_size
    if d.image_size is None:
        faults.append(
            f"data.image_size=None: {pretrained.source} takes images of any size; "
            "choose one with --config.data.image_size"
        )
        return
    d.channels = value_of(pretrained.model, "channels")
    d.exif = spec.exif is not False
    d.mean, d.std, d.num_classes = spec.mean, spec.std, pretrained.model.num_classes
    if pretrained.run is not None:
        config_lib.add_plugins(config, pretrained.run["config"]["plugins"])
        config.loss.update(pretrained.run["config"]["loss"])
        d.multi_label = pretrained.run["config"]["data"]["multi_label"]
    for name, entry in config.evals.items():
        if d.num_classes is None and not EVALUATORS.find(entry.type).learns_classes:
            faults.append(
                f"evals.{name}.type={entry.type!r}: {pretrained.source} has no classes; use one of "
                f"{', '.join(learning_kinds())}"
            )


def _fill_in_loss(config: ConfigDict, pretrained: Pretrained) -> None:
    """Set the loss of a source that is no run, which states its own."""
    learn = [EVALUATORS.find(entry.type).learns_classes for entry in config.evals.values()]
    if pretrained.run is None and not all(learn):
        config.loss.name = loss_of(pretrained, config.loss.name)


def _fill_in_ops(
    config: ConfigDict, pretrained: Pretrained, sources: Mapping[config_lib.SplitKey, Source]
) -> None:
    """Set the ops of evaluators without ops: a run's evaluation ops, else the source's."""
    size = config_lib.image_hw(config.data.image_size)
    for entry in config.evals.values():
        if not entry.ops:
            splits = config_lib.eval_splits(config, entry).values()  # one data set, one image shape
            shape = sources[next(iter(splits))].image_shape
            entry.ops = ops_for(pretrained.spec.at(size), shape and shape[:2])


def _warn_of_other_classes(
    config: ConfigDict,
    names: Sequence[str] | None,
    model_source: str,
    sources: Mapping[config_lib.SplitKey, Source],
) -> None:
    """Warn if names of the data's classes differ from the model's; synset numbers are ignored."""
    for eval_name, entry in config.evals.items():
        if names is None or EVALUATORS.find(entry.type).learns_classes:
            continue
        source = sources[config_lib.eval_splits(config, entry)["split"]]
        other = find_other_names(source.class_names, names)
        if other:
            label, theirs, ours = other[0]
            logger.warning(
                "evals.%s: %d of %d classes have other names in %s than in %s: label %d is %r, "
                "but output %d is %r; accuracy is meaningful only if they are the same classes",
                eval_name, len(other), len(names), source.name, model_source,
                label, theirs, label, ours,
            )  # fmt: skip


def _model_on(
    mesh: Mesh, config: ConfigDict, image_size: tuple[int, int], pretrained: Pretrained
) -> nn.Module:
    """The source's model, set up to compute on a mesh."""
    family = type(pretrained.model)
    if config.model.lora_rank is not None:
        raise InputError(
            f"model.lora_rank={config.model.lora_rank}: a model is evaluated with its adapters "
            "merged; leave it out"
        )
    fields = check_fields(family, config_lib.model_fields(config), "config.model")
    model = pretrained.model.clone(**fields, image_size=image_size)
    return choose_forms(with_known(model, constrain=constrain), mesh, config.model.kernels)


def _evaluate_all(
    evaluators: Mapping[str, Measure],
    state: TrainState,
    config: ConfigDict,
    sources: Mapping[config_lib.SplitKey, Source],
    predictions: Predictions,
    on_predictions: OnPredictions | None,
) -> dict[str, float]:
    """Run all evaluators; `on_predictions` gets what each then adds to `predictions`."""
    results = {}
    for name, measure in evaluators.items():
        with watchdog.phase("evaluation"):
            results |= evaluate_one(name, measure, state)
        if on_predictions is not None and name in predictions:
            key = config_lib.eval_splits(config, config.evals[name])["split"]
            on_predictions(name, predictions.pop(name), sources[key])
    return results
