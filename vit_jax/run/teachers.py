"""The teachers of a run: frozen models that its objective learns from."""

import dataclasses
import functools
import json
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import transfer
from vit_jax.base import tree
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.files import read_json, write_whole
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.config import Settings
from vit_jax.config.sections import Data, Model
from vit_jax.devices.sharding import place
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.models import create_model
from vit_jax.models.contract import about, with_known
from vit_jax.objectives.contract import InForm, ObjectivePart, Teacher
from vit_jax.run.setup.matching import compare_reading, say_other_names, say_places
from vit_jax.transfer.fit import stack_layers

logger = logging.getLogger("vit_jax")

UNTRAINED = "untrained:"  # before the name of a model
_FILE = "teachers.json"


def read_teachers(
    objective: ObjectivePart, data: Data, learner: Model, *, shapes_only: bool = False
) -> tuple[Teacher, ...]:
    """The teachers of an objective, with their weights; () if it has none.

    They compute in the student's `model.dtype` and, unless single layers are compared, scan their
    layers where the student does.

    "untrained:MODEL" is a new model of that name with the student's classes and image size, for
    trial runs and for plans without a teacher's file.

    Args:
      objective, data, learner: the sections of a resolved config; `learner` is the student.
      shapes_only: with shapes instead of arrays; an untrained teacher is not computed then.

    Raises:
      InputError: a source cannot be read, or takes images of other channels.
    """
    teachers, faults = [], Faults()
    scan = bool(learner.own.get("scan")) and not objective.watches_layers
    form = functools.partial(with_known, dtype=jnp.dtype(learner.dtype), scan=scan, remat="none")
    for source, weight in objective.teachers.items():
        where = f"objective.teacher={source!r}: "
        teacher = faults.check_in(where, _read, source, data, form, shapes_only)
        if teacher is not None:
            teachers.append(teacher._replace(weight=weight))
    collect_faults(faults)
    return tuple(teachers)


def _read(source: str, data: Data, form: InForm, shapes_only: bool) -> Teacher:
    if source.startswith(UNTRAINED):
        return _new_teacher(source, data, form, shapes_only)
    pretrained = transfer.read_pretrained(source)
    spec, channels = pretrained.spec, about(pretrained.model).channels
    if channels != data.channels:
        raise InputError(
            f"takes images of {channels} channels; the run has data.channels={data.channels}"
        )
    if not shapes_only:
        compare_reading(data, spec, f"objective.teacher={source}")
    model = form(pretrained.model)
    variables = pretrained.variables
    if about(model).stacks_layers:
        variables["params"] = stack_layers(variables["params"])
    if shapes_only:
        variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)
    value_range = tuple(spec.mean), tuple(spec.std)
    return Teacher(source, 1.0, model, variables, *value_range, spec.loss, spec.class_names)


def _new_teacher(source: str, d: Data, form: InForm, shapes_only: bool) -> Teacher:
    name = source.removeprefix(UNTRAINED)
    model = form(create_model(name, d.num_classes, d.image_size, channels=d.channels))
    images = jnp.zeros((1, *d.image_size, d.channels))
    init = functools.partial(model.init, jax.random.key(0), images)
    variables = jax.eval_shape(init) if shapes_only else jax.device_get(jax.jit(init)())
    return Teacher(source, 1.0, model, variables, tuple(d.mean), tuple(d.std))


def gives_classes(objective: ObjectivePart, data: Data) -> bool:
    """Whether a run on unlabelled images has the classes of its teachers."""
    unlabelled = data.name == "unlabelled" and not objective.learns_labels
    return unlabelled and bool(objective.teachers) and objective.learns_logits


def classes_of(teachers: Sequence[Teacher]) -> tuple[int | None, tuple[str, ...] | None]:
    """(number, names) of the classes of `teachers`; None where they have none."""
    names = next((t.class_names for t in teachers if t.class_names is not None), None)
    return teachers[0].model.num_classes, names


def compare_classes(
    objective: ObjectivePart, teachers: Sequence[Teacher], class_names: Sequence[str] | None
) -> tuple[Teacher, ...]:
    """`teachers`, each knowing whether it has the classes of the data, `class_names`.

    Where logits are learned, classes with other names give a warning, and classes that the teacher
    does not name are logged. Where only features are, classes without names count as other ones.

    Raises:
      InputError: a teacher's logits have the classes of the data in another order.
    """
    names, faults = None if class_names is None else tuple(class_names), Faults()
    if not objective.learns_logits:
        return tuple(
            teacher._replace(same_classes=names is not None and teacher.class_names == names)
            for teacher in teachers
        )
    if names is None:
        return tuple(teachers)
    for teacher in teachers:
        where, theirs = f"objective.teacher={teacher.source!r}", teacher.class_names or ()
        if theirs != names and sorted(theirs) == sorted(names):
            faults.append(
                f"{where}: has the classes of the data in another order "
                f"({', '.join(theirs[:3])}, ... instead of {', '.join(names[:3])}, ...); train it "
                "on these data, or set --config.objective.mode=features"
            )
        elif other := say_other_names(names, theirs, "the data", "the teacher"):
            logger.warning("%s: %s; it teaches only if they are the same classes", where, other)
        elif not theirs and not teacher.source.startswith(UNTRAINED):
            say_places(where, names, "the teacher")
    collect_faults(faults)
    return tuple(teachers)


def abstract_teachers(settings: Settings) -> tuple[Teacher, ...]:
    """`read_teachers` with shapes instead of arrays, for plans; reads every source once."""
    if not settings.objective.teachers:
        return ()
    model = settings.model
    form = {k: v for k, v in model.own.items() if k == "scan"}  # a search changes other fields
    student = dataclasses.replace(model, own=form)
    # A plan changes the order, which teachers do not read.
    data = dataclasses.replace(settings.data, order="record", streams=None, repeats=1)
    return _abstract_teachers(settings.objective, data, student)


@functools.lru_cache(maxsize=8)
def _abstract_teachers(objective: ObjectivePart, data: Data, student: Model) -> tuple[Teacher, ...]:
    return read_teachers(objective, data, student, shapes_only=True)


def planned_experiment(settings: Settings, mesh: Mesh) -> Experiment:
    """`make_experiment` with the shapes of its teachers, whose sources are read once.

    Raises:
      InputError: as `make_experiment`, or a teacher cannot be read.
    """
    return make_experiment(settings, mesh, teachers=abstract_teachers(settings))


def place_teachers(
    teachers: Sequence[Teacher], abstract_frozen: tuple[tree.PyTree, ...]
) -> tuple[tree.PyTree, ...]:
    """The frozen arguments of a step, on the devices; () if there are no teachers."""
    if not teachers:
        return ()
    variables = tuple(dict(teacher.variables) for teacher in teachers)
    (shapes,) = abstract_frozen
    return (jax.tree.map(lambda x, to: place(np.asarray(x), to.sharding), variables, shapes),)


def describe_teachers(teachers: Sequence[Teacher]) -> list[dict[str, Any]]:
    """For each teacher its source, its weight, and the SHA-256 of its parameters."""
    return [
        {
            "source": teacher.source,
            "weight": teacher.weight,
            "model": type(teacher.model).__name__,
            "digest": hash_params(tree.flatten_names(teacher.variables)),
        }
        for teacher in teachers
    ]


def write_teachers(workdir: epath.Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write `describe_teachers` into WORKDIR/teachers.json, if there are any."""
    if found:
        write_whole(workdir / _FILE, json.dumps(list(found), indent=2) + "\n")


def check_same_teachers(workdir: epath.Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError unless `found` have the weights with which the run in `workdir` began."""
    path = workdir / _FILE
    known = operator.itemgetter("source", "digest")
    before = dict(map(known, read_json(path, lambda found: [*map(known, found)]) or ()))
    collect_faults([
        f"objective.teacher={teacher['source']!r}: has other weights than when this run began "
        f"({path}); restore them, or use a new --workdir"
        for teacher in found
        if before.get(teacher["source"], teacher["digest"]) != teacher["digest"]
    ])  # fmt: skip
