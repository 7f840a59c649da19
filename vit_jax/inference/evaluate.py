"""Evaluation without training: of a run in its workdir, and of a model from any source."""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import config as config_lib
from vit_jax import transfer
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.checkpoints import restore
from vit_jax.config import (
    LOSSES,
    SOURCES,
    Evaluator,
    Settings,
    sections,
)
from vit_jax.data import Divider, Source
from vit_jax.data.captions import read_kept
from vit_jax.data.division import read_division
from vit_jax.data.preprocessing import Preprocessing, parse_preprocessing
from vit_jax.devices.kernels import choose_ops
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain, place, state_shardings
from vit_jax.evaluators import check_outputs, make_evaluators
from vit_jax.evaluators import evaluate as evaluate_one
from vit_jax.evaluators.classification import Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.objective import texts_that_learn
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.models.contract import with_known
from vit_jax.models.fields import check_fields
from vit_jax.models.zero_shot import TextSide
from vit_jax.objectives.supervised import Supervised
from vit_jax.run.setup.agreement import compare_findings, compare_requests
from vit_jax.run.setup.evaluation import complete_by_source
from vit_jax.run.setup.matching import say_other_names, say_places
from vit_jax.run.setup.opener import check_mesh
from vit_jax.run.setup.sources import check_evaluated_images, find_absent, open_evaluated
from vit_jax.run.setup.workdir import check_store
from vit_jax.transfer.pretrained import Pretrained, class_names_of, loss_of, preparation
from vit_jax.transfer.workdir import best_step, read_class_names

logger = logging.getLogger("vit_jax")

# Called with an evaluator's name, its predictions and its data, once for each evaluator of the
# model's own classes; on every process.
OnPredictions = Callable[[str, Examples | Shown, Source], None]
Sources = Mapping[config_lib.SplitKey, Source]
Weights = Mapping[str, np.ndarray]  # {leaf name: array}


def evaluate_model(
    asked: Settings,
    model: "StoredModel | Pretrained",
    on_predictions: OnPredictions | None = None,
    by_user: Collection[str] = (),
) -> dict[str, float]:
    """Evaluate a model by `asked.evals`: {"step": ..., "test/top1": ..., ...}; writes nothing.

    A `StoredModel` is evaluated by the run's own settings, perhaps with other data or an open mesh,
    and both its averaged and its raw weights are. Any other source completes the settings, see
    `complete_by_source`, and determines the preprocessing of evaluators without ops; `asked.model`
    may then set only fields that do not change the model's function, such as `dtype`. The
    validation images of a folder are those that the source holds out, if it holds some.

    Args:
      asked: of a config that has passed `validation.validate`.
      on_predictions: gets the prediction for each image.
      by_user: keys that the user has set, also to their defaults.

    Raises:
      InputError: naming the key, before anything is computed; or no checkpoint can be read.
    """
    of = model if isinstance(model, StoredModel) else _OfSource(model, by_user)
    settings = of.complete(asked)
    mesh = of.make_mesh(settings)
    compare_requests(settings, of.facts)
    absent = find_absent(settings, training=False)
    evals = {n: entry for n, entry in settings.evals.items() if f"evals.{n}" not in absent}
    settings = dataclasses.replace(settings, evals=evals)
    divider = Divider(of.division, of.source, class_names=of.class_names)
    sources = open_evaluated(settings.data, settings.evals, of.class_names, divider)
    settings = of.settle(settings, sources)
    preprocessing = parse_preprocessing(settings)
    check_evaluated_images(settings.data, settings.evals, preprocessing, sources)
    module, weights = of.build(settings, mesh, preprocessing)
    check_outputs(settings.evals, module, settings.data.image_size)
    seen: dict[str, Examples | Shown] = {}  # of the evaluator that ran last
    see = None if on_predictions is None else seen.setdefault  # the main weights come first
    evaluators = make_evaluators(
        settings, preprocessing, module, mesh, sources, see=see, read_text_side=of.read_text_side
    )
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
    run's settings.
    """

    def __init__(self, workdir: epath.Path, trained: Settings, best: bool = False):
        check_store(workdir)
        self.source, self._workdir, self._trained = str(workdir), workdir, trained
        self.read_text_side: Callable[[], TextSide] | None = None
        self._checkpoints = workdir / "checkpoints"
        keep_best = trained.checkpoint.keep_best
        self._best = best_step(workdir, keep_best, trained.evals) if best else None
        steps = restore.saved_steps(self._checkpoints)
        self.facts = {"checkpoints in --workdir": steps, "best step": self._best}
        names, number = read_class_names(workdir), trained.data.num_classes
        self.class_names = class_names_of(names, number, self.source)
        self.division = read_division(workdir, trained.data)

    def complete(self, asked: Settings) -> Settings:
        return asked.with_values({"optimizer.accum_steps": 1})  # only training has microbatches

    def make_mesh(self, settings: Settings) -> Mesh:
        """If it is open, these devices split parameters as far as the run did, if they can."""
        mesh = check_mesh(settings)
        if settings.mesh.data is not None or settings.mesh.fsdp is not None:
            return mesh
        fsdp = math.gcd(mesh.shape["data"], self._trained.mesh.fsdp or 1)
        return make_mesh(replica=mesh.shape["replica"], fsdp=fsdp, tensor=mesh.shape["tensor"])

    def settle(self, settings: Settings, sources: Sources) -> Settings:
        return settings

    def build(
        self, settings: Settings, mesh: Mesh, preprocessing: Preprocessing
    ) -> tuple[nn.Module, Weights]:
        if settings.objective.teachers:  # which are not read
            settings = dataclasses.replace(settings, objective=Supervised(name="supervised"))
        self._experiment = make_experiment(settings, mesh, preprocessing)
        read_tokenizer = partial(read_kept, self._workdir, self._trained.data)
        self.read_text_side = texts_that_learn(
            settings.objective, self._experiment.model, read_tokenizer
        )
        return self._experiment.model, {}

    def load(self, mesh: Mesh) -> tuple[TrainState, dict[str, Any]]:
        abstract = self._experiment.abstract_state
        fields = ("params", "model_state", "ema", "ema_model_state")
        wanted = {field: getattr(abstract, field) for field in fields}
        if self._best is None:
            restored = restore.restore_newest(self._checkpoints, wanted, partial=True)
        else:
            step = self._checkpoints / str(self._best)
            restored = restore.restore_step(step, wanted, partial=True)
        if restored is None:
            raise InputError(
                f"--workdir={self.source}: has no checkpoint yet; wait for the run's first one"
            )
        found, meta = restored
        state = TrainState(jnp.int32(meta["step"]), **found, opt_state=())
        return state, {"step": meta["step"]}


class _OfSource:
    """How a model of any source is evaluated: with what the source states."""

    def __init__(self, pretrained: Pretrained, by_user: Collection[str]):
        self._pretrained, self.source, self._by_user = pretrained, pretrained.source, by_user
        self.facts = {"--init_from": pretrained.source}
        self.class_names, self.division = pretrained.spec.class_names, pretrained.division
        self.read_text_side = pretrained.read_text_side

    def complete(self, asked: Settings) -> Settings:
        return complete_by_source(asked, self._pretrained, self._by_user)

    def make_mesh(self, settings: Settings) -> Mesh:
        return check_mesh(settings)

    def settle(self, settings: Settings, sources: Sources) -> Settings:
        """Set the ops of evaluators without ops, and the loss of a source that is no run."""
        evals = with_ops(settings.data, settings.evals, self._pretrained, sources)
        settings = dataclasses.replace(settings, evals=evals)
        learn = [entry.learns_classes for entry in evals.values()]
        usual = sections.Loss.declared()["name"].default
        is_open = settings.loss.name == usual and "loss.name" not in self._by_user
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
        own = {"constrain": constrain, "max_tokens": settings.data.max_tokens}
        model = choose_ops(with_known(model, **own), mesh, kernels)
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
    """`evals`, where an evaluator without ops gets those that `preparation` gives the source."""
    found, spec = dict(evals), pretrained.spec.at(data.image_size)
    own_shape = data.max_tokens is not None  # `data` then has the rule too
    for name, entry in evals.items():
        if not entry.ops:
            splits = config_lib.eval_splits(data, entry).values()  # one data set, one image shape
            shape = sources[next(iter(splits))].image_shape
            ops, _ = preparation(spec, shape, own_shape=own_shape)
            found[name] = dataclasses.replace(entry, ops=ops)
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
