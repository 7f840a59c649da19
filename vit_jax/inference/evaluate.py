"""Evaluation without training: of a run in its workdir, and of a model from any source."""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import transfer
from vit_jax.base import files, tree
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.checkpoints import restore
from vit_jax.config import (
    EVALUATORS,
    LOSSES,
    REQUIRED_TO_EVALUATE,
    SOURCES,
    Evaluator,
    Settings,
    sections,
    with_values,
)
from vit_jax.config.evals import learning_kinds
from vit_jax.data import Divider, Source
from vit_jax.data.division import read_division
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.data.sources.arrays import give
from vit_jax.devices.kernels import choose_ops
from vit_jax.devices.mesh import make_mesh, start_backend
from vit_jax.devices.sharding import constrain, place, state_shardings
from vit_jax.evaluators import check_outputs, make_evaluators
from vit_jax.evaluators import evaluate as evaluate_one
from vit_jax.evaluators.classification import Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.models.contract import about, with_known
from vit_jax.models.fields import check_fields
from vit_jax.objectives.supervised import Supervised
from vit_jax.run.setup.agreement import compare_findings, compare_requests
from vit_jax.run.setup.matching import say_other_names, say_places
from vit_jax.run.setup.opener import check_mesh
from vit_jax.run.setup.sources import check_evaluated_images, find_absent, open_evaluated
from vit_jax.run.setup.validation import (
    as_pairs,
    check_evaluates_any,
    load_config,
    load_run,
    validate,
)
from vit_jax.run.setup.workdir import check_store
from vit_jax.transfer.pretrained import Pretrained, class_names_of, loss_of, ops_for
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.workdir import best_step, read_class_names

logger = logging.getLogger("vit_jax")

# Called with an evaluator's name, its predictions and its data, once for each evaluator of the
# model's own classes; on every process.
OnPredictions = Callable[[str, Examples | Shown, Source], None]
Sources = Mapping[config_lib.SplitKey, Source]
Weights = Mapping[str, np.ndarray]  # {leaf name: array}


def evaluate(
    source: epath.PathLike,
    config: ConfigDict | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    best: bool = False,
    data: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate a run, or any model; writes nothing.

        vit_jax.evaluate("runs/mine")                       # by its own config
        vit_jax.evaluate("ViT-B/16@augreg", "evaluate:knn,cifar10", {"data.data_dir": DIR})

    Args:
      source: the workdir of a run; with `config`, any source of `load_pretrained`.
      config: the evaluators and their data; None: the run's own.
      overrides: as in `load_config`.
      best: of a run, the step that `checkpoint.keep_best` kept instead of the newest.
      data: images that you have in Python, for the splits that the evaluators read; as in `train`.
        Without "class_names", labels are numbers of the model's classes.

    Returns:
      {"test/top1": ..., ...}; for a run also its "step".

    Raises:
      InputError: a ValueError that lists all faults.
    """
    model: StoredModel | Pretrained
    with give(data) as chosen:
        overrides = {**chosen, **(overrides or {})}
        if config is None:
            workdir = files.absolute(source)
            config, trained = load_run(workdir, as_pairs(overrides))
            start_backend(config.mesh.platform)
            model = StoredModel(workdir, trained, best)
        else:
            config = load_config(config, overrides)
            validate(config, [], "config", REQUIRED_TO_EVALUATE)
            check_evaluates_any(config, "config")
            start_backend(config.mesh.platform)
            model = transfer.read_pretrained(source, best=best)
        return evaluate_model(config, model, by_user=overrides)


def evaluate_model(
    config: ConfigDict,
    model: "StoredModel | Pretrained",
    on_predictions: OnPredictions | None = None,
    by_user: Collection[str] = (),
) -> dict[str, float]:
    """Evaluate a model by `config.evals`: {"step": ..., "test/top1": ..., ...}; writes nothing.

    A `StoredModel` is evaluated by the run's own config, perhaps with other data or an open mesh,
    and both its averaged and its raw weights are. Any other source determines the value range, how
    files become pixels, the loss, the image size unless `config.data.image_size` is set, and the
    preprocessing of evaluators without ops, but for keys `by_user` and those of `config` that are
    not as by default; `config.model` may then set only fields that do not change the model's
    function, such as `dtype`. The validation images of a folder are those that the source holds
    out, if it holds some.

    Args:
      on_predictions: gets the prediction for each image.
      by_user: keys that the user has set, also to their defaults.

    Raises:
      InputError: naming the key, before anything is computed; or no checkpoint can be read.
    """
    of = model if isinstance(model, StoredModel) else _OfSource(model)
    config = of.complete(config, by_user)
    mesh = of.make_mesh(config)
    compare_requests(config, of.facts)
    config = with_values(config, find_absent(of.read(config), training=False))
    divider = Divider(of.division, of.source, class_names=of.class_names)
    settings = of.read(config)
    sources = open_evaluated(settings.data, settings.evals, of.class_names, divider)
    settings = of.settle(settings, sources)
    preprocessing = parse_preprocessing(settings)
    check_evaluated_images(settings.data, settings.evals, preprocessing, sources)
    module, weights = of.build(settings, mesh, preprocessing)
    check_outputs(settings.evals, module, settings.data.image_size)
    seen: dict[str, Examples | Shown] = {}  # of the evaluator that ran last
    see = None if on_predictions is None else seen.setdefault  # the main weights come first
    evaluators = make_evaluators(settings, preprocessing, module, mesh, sources, see=see)
    _warn_of_other_classes(settings, of.class_names, of.source, sources)
    compare_findings(settings.job, sources, weights)
    with jax.set_mesh(mesh):
        state, results = of.load(mesh)
        logger.info("evaluating %s%s", of.source, f", step {results['step']}" if results else "")
        for name, measure in evaluators.items():
            with watchdog.phase("evaluation"):
                results |= evaluate_one(name, measure, state)
            if on_predictions is not None and name in seen:
                key = config_lib.eval_splits(settings.data, settings.evals[name])["split"]
                on_predictions(name, seen.pop(name), sources[key])
    return results


class StoredModel:
    """The newest valid checkpoint of the run in `workdir`, or its best, with all its weights.

    It is evaluated by the run's own experiment; the weights go right to the mesh. `trained`: the
    resolved config of the run.
    """

    def __init__(self, workdir: epath.Path, trained: ConfigDict, best: bool = False):
        check_store(workdir)
        self.source, self._trained = str(workdir), trained
        self._checkpoints = workdir / "checkpoints"
        settings, _ = Settings.read_open(trained)
        self._best = best_step(workdir, settings) if best else None
        steps = restore.saved_steps(self._checkpoints)
        self.facts = {"checkpoints in --workdir": steps, "best step": self._best}
        names, number = read_class_names(workdir), trained.data.num_classes
        self.class_names = class_names_of(names, number, self.source)
        self.division = read_division(workdir, settings.data)

    def complete(self, config: ConfigDict, by_user: Collection[str]) -> ConfigDict:
        return with_values(config, {"optimizer.accum_steps": 1})  # only training has microbatches

    def read(self, config: ConfigDict) -> Settings:
        return Settings.read(config)

    def make_mesh(self, config: ConfigDict) -> Mesh:
        """If it is open, these devices split parameters as far as the run did, if they can."""
        mesh = check_mesh(config)
        if config.mesh.data is not None or config.mesh.fsdp is not None:
            return mesh
        fsdp = math.gcd(mesh.shape["data"], self._trained.mesh.fsdp or 1)
        return make_mesh(replica=mesh.shape["replica"], fsdp=fsdp, tensor=mesh.shape["tensor"])

    def settle(self, settings: Settings, sources: Sources) -> Settings:
        return settings

    def build(
        self, settings: Settings, mesh: Mesh, preprocessing: Preprocessing
    ) -> tuple[nn.Module, Weights]:
        if settings.objective.teachers:  # which are not read
            settings = dataclasses.replace(settings, objective=Supervised())
        self._experiment = make_experiment(settings, mesh, preprocessing)
        return self._experiment.model, {}

    def load(self, mesh: Mesh) -> tuple[TrainState, dict[str, Any]]:
        abstract = self._experiment.abstract_state
        fields = ("params", "model_state", "ema", "ema_model_state")
        wanted = {field: getattr(abstract, field) for field in fields}
        if self._best is not None:
            step = self._checkpoints / str(self._best)
            restored = restore.restore_step(step, wanted, partial=True)
        else:
            restored = restore.restore_newest(self._checkpoints, wanted, partial=True)
        if restored is None:
            raise InputError(
                f"--workdir={self.source}: has no checkpoint yet; wait for the run's first one"
            )
        found, meta = restored
        state = TrainState(jnp.int32(meta["step"]), **found, opt_state=())
        return state, {"step": meta["step"]}


class _OfSource:
    """How a model of any source is evaluated: with what the source states."""

    def __init__(self, pretrained: Pretrained):
        self._pretrained, self.source = pretrained, pretrained.source
        self.facts = {"--init_from": pretrained.source}
        self.class_names, self.division = pretrained.spec.class_names, pretrained.division

    def complete(self, config: ConfigDict, by_user: Collection[str]) -> ConfigDict:
        """`config` with the source's settings where it has its defaults; see `evaluate_model`."""
        self._by_user = by_user
        config = config.copy_and_resolve_references()
        faults = Faults()
        d, spec, model = config.data, self._pretrained.spec, self._pretrained.model
        faults.check(check_convention, config.init_resize, "init_resize")
        if d.image_size is None:
            d.image_size = spec.image_size
        faults.need(
            d.image_size is not None,
            f"data.image_size=None: {self.source} takes images of any size; choose one with "
            "--config.data.image_size",
        )
        stated = self._find_stated(config, by_user, faults)
        default, found = map(config_lib.flatten, (config_lib.default_config(), config))
        config = with_values(config, {
            key: value
            for key, value in stated.items()
            if key not in by_user and found[key] == default.get(key, found[key])
        })  # fmt: skip
        d = config.data
        faults.need(
            "data.ops" not in by_user,
            "data.ops: evaluators do not read it; set --config.evals.NAME.ops of each",
        )
        of_model = {"channels": about(model).channels, "num_classes": model.num_classes}
        for key, number in of_model.items():
            faults.need(
                f"data.{key}" not in by_user or number == d[key],
                f"data.{key}={d[key]}: {self.source} has {number}; leave it out",
            )
        d.update(of_model)
        for name, entry in config.evals.items():
            faults.need(
                d.num_classes is not None or EVALUATORS.find(entry.type).learns_classes,
                f"evals.{name}.type={entry.type!r}: {self.source} has no classes; use one of "
                f"{', '.join(learning_kinds())}",
            )
        collect_faults(faults)
        return config

    def _find_stated(
        self, config: ConfigDict, by_user: Collection[str], faults: Faults
    ) -> dict[str, Any]:
        """{key: value} that the source states; its plug-ins are added to `config`."""
        run, spec = self._pretrained.run, self._pretrained.spec
        num_classes = self._pretrained.model.num_classes or 0
        stated = {"data.exif": spec.exif is not False, "data.pixel_range": spec.pixel_range,
                  "data.decoding": spec.decoding, "data.mean": spec.mean,
                  "data.std": spec.std}  # fmt: skip
        if run is not None:
            config_lib.add_plugins(config, run["config"]["plugins"])
            stated |= {f"loss.{k}": value for k, value in run["config"]["loss"].items()}
            stated["data.multi_label"] = run["config"]["data"]["multi_label"]
        several = [n for n, e in config.evals.items() if EVALUATORS.find(e.type).multi_label]
        faults.need(
            not several or num_classes > 1,
            f"evals.{several and several[0]}.type='multilabel': {self.source} has no classes; "
            "train some on its features first: --config=finetune:multilabel,head_only",
        )
        if several and num_classes > 1:
            loss = stated.setdefault("loss.name", spec.loss or "sigmoid")
            stated["data.multi_label"] = True
            faults.need(
                not LOSSES.find(loss).excludes or "loss.name" in by_user,
                f"evals.{several[0]}.type='multilabel': {self.source} was trained with "
                f"loss.name={loss!r}, by which the classes of an image compete; evaluate it with "
                "classification, or with --config.loss.name=sigmoid",
            )
        return stated

    def make_mesh(self, config: ConfigDict) -> Mesh:
        return check_mesh(config)

    def read(self, config: ConfigDict) -> Settings:
        settings, faults = Settings.read_open(config)  # a source has no keys of training
        collect_faults(faults)
        return settings

    def settle(self, settings: Settings, sources: Sources) -> Settings:
        """Set the ops of evaluators without ops, and the loss of a source that is no run."""
        evals = with_ops(settings.data, settings.evals, self._pretrained, sources)
        settings = dataclasses.replace(settings, evals=evals)
        learn = [entry.learns_classes for entry in evals.values()]
        is_open = settings.loss.name == sections.Loss().name and "loss.name" not in self._by_user
        if is_open and self._pretrained.run is None and not all(learn):
            name = loss_of(self._pretrained, settings.loss.name)
            common = {k: getattr(settings.loss, k) for k in sections.Loss.declared()}
            settings = dataclasses.replace(settings, loss=LOSSES.make(common | {"name": name}))
        return settings

    def build(
        self, settings: Settings, mesh: Mesh, preprocessing: Preprocessing
    ) -> tuple[nn.Module, Weights]:
        source, resize = self._pretrained, settings.run.init_resize
        given = {"dtype": settings.model.dtype, **settings.model.own}
        fields = check_fields(type(source.model), given, "config.model")
        model = source.model.clone(**fields, image_size=settings.data.image_size)
        kernels = settings.model.kernels
        model = choose_ops(with_known(model, constrain=constrain), mesh, kernels)
        variables = transfer.init_variables(source, model, resize, keep_head=True)
        self._params, self._model_state = variables
        return model, {**self._params, **self._model_state}

    def load(self, mesh: Mesh) -> tuple[TrainState, dict[str, Any]]:
        found = {
            "params": tree.unflatten_names(self._params),
            "model_state": tree.unflatten_names(self._model_state),
        }
        placed = jax.tree.map(place, found, state_shardings(found, mesh))
        run = self._pretrained.run
        state = TrainState(jnp.int32(0), **placed, opt_state=())
        return state, {} if run is None else {"step": run["step"]}


def with_ops(
    data: sections.Data, evals: Mapping[str, Evaluator], pretrained: Pretrained, sources: Sources
) -> dict[str, Evaluator]:
    """`evals`, where an evaluator without ops gets those of the weights' source, see `ops_for`."""
    found, spec = dict(evals), pretrained.spec.at(data.image_size)
    for name, entry in evals.items():
        if not entry.ops:
            splits = config_lib.eval_splits(data, entry).values()  # one data set, one image shape
            shape = sources[next(iter(splits))].image_shape
            found[name] = dataclasses.replace(entry, ops=ops_for(spec, shape and shape[:2]))
    return found


def _warn_of_other_classes(
    settings: Settings, names: Sequence[str] | None, model_source: str, sources: Sources
) -> None:
    """Log or warn of names of the data's classes that differ from the model's."""
    for name, entry in settings.evals.items():
        if entry.learns_classes:
            continue
        source = sources[config_lib.eval_splits(settings.data, entry)["split"]]
        theirs = source.class_names
        if theirs and SOURCES.find(source.name).is_own and theirs != names:
            say_places(f"evals.{name}", theirs, model_source)
        elif other := say_other_names(theirs, names, source.name, model_source):
            logger.warning(
                "evals.%s: %s; accuracy is meaningful only if they are the same classes",
                name, other,
            )  # fmt: skip
