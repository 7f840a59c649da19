"""Builds the parts of a run from its resolved config and from what was opened to resolve it."""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import checkpoints, data, transfer
from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import Batch
from vit_jax.config import Settings, SplitKey, sections, train_split
from vit_jax.data.captions import TOKENIZER
from vit_jax.data.device_ops import per_channel
from vit_jax.data.images.bits import unused_bits_of
from vit_jax.data.order import local_rows
from vit_jax.data.preprocessing import describe_images
from vit_jax.devices import flops, sharding
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.evaluators import check_outputs, make_evaluators
from vit_jax.evaluators.inputs import Measure
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.experiment.model_name import describe_model
from vit_jax.experiment.objective import texts_that_learn
from vit_jax.experiment.stages import make_stage
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics
from vit_jax.models.contract import about
from vit_jax.models.variants import Variant
from vit_jax.models.zero_shot import TextSide
from vit_jax.objectives.contract import Teacher
from vit_jax.run.first_weights import first_of_objective
from vit_jax.run.setup.changes import check_unchanged
from vit_jax.run.setup.matching import compare_reading, find_places, say_other_pixels
from vit_jax.run.setup.opener import ChooseLayout, Files
from vit_jax.run.setup.resolve import Resolved, resolve
from vit_jax.run.setup.sources import data_fingerprint, training_order
from vit_jax.run.setup.validation import check_metrics
from vit_jax.run.setup.workdir import StoredRun, read_run
from vit_jax.run.teachers import check_same_teachers, compare_classes, describe_teachers
from vit_jax.run.watch import faults
from vit_jax.transfer.fit import reorder_head

logger = logging.getLogger("vit_jax")

T = TypeVar("T")


class Timetable:
    """The steps at which a run logs, evaluates and saves; the last step does all three.

    Args:
      durations: {key: steps} for every duration of the config, as `Settings.durations`.

    keep_every: interval, in steps, of the checkpoints that are kept for ever; None: none are.
    replay_every: interval of the replays; None: there are none.
    """

    def __init__(self, durations: Mapping[str, int]):
        self._durations, self._total_steps = durations, durations["duration"]
        self._evals = [key.split(".")[1] for key in durations if key.startswith("evals.")]
        self.keep_every = durations.get("checkpoint.keep_every")
        self.replay_every = durations.get("job.replay_every")
        self._memory_every = durations.get("checkpoint.memory_every")

    def _is_due(self, key: str, step: int) -> bool:
        return step == self._total_steps or step % self._durations[key] == 0

    def logs(self, step: int) -> bool:
        """Whether the run logs training metrics at `step`."""
        return self._is_due("log.every", step)

    def evaluators(self, step: int) -> list[str]:
        """Names of the evaluators that run at `step`, in the order of the config."""
        return [name for name in self._evals if self._is_due(f"evals.{name}.every", step)]

    def saves(self, step: int) -> bool:
        """Whether the run saves at `step`; multiples of `keep_every` are always saved."""
        kept = self.keep_every is not None and step % self.keep_every == 0
        return kept or self._is_due("checkpoint.every", step)

    def keeps(self, step: int) -> bool:
        """Whether the run keeps `step` in the hosts' memory."""
        return self._memory_every is not None and step % self._memory_every == 0


# A step of a run, (number, state, batch) -> (new state, metrics), and what wraps it.
RunStep = Callable[[int, TrainState, Batch], tuple[TrainState, Metrics]]
Watcher = Callable[[RunStep], RunStep]

# The user's function of (step, state, metrics); see `api.train`.
Callback = Callable[[int, TrainState, Mapping[str, float]], object]


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that trains; nothing is written yet.

    resolved: the config, as asked for and as resolved.
    settings: its resolved sections.
    sources: keyed as by `config.train_split` and `config.eval_splits`.
    train_source: the training data.
    order: of the training records.
    experiment: of the last stage; most runs have one stage.
    earlier: of the stages before, in their order; all have one state.
    evaluators: {name: evaluator} for `config.evals`.
    timetable: the steps at which the run logs, evaluates and saves.
    initial_params: {leaf name: array} from `init_from`; None if it is not used.
    initial_model_state: {name: array} from `init_from`, such as batch statistics.
    division: content of `division.FILE` of a run that begins; empty if it has no own images.
    tokenizer: {name: content} of the files that WORKDIR/tokenizer keeps.
    caption_faults: of the training data, for the user; see `captions.look_at`.
    teachers: the frozen models that the objective learns from.
    described_teachers: source, weight and digest of each.
    callbacks: the user's functions, called where the run logs or evaluates.
    choose_s: what the measurement of kernels took at this start.
    """

    resolved: Resolved
    settings: Settings
    workdir: epath.Path
    mesh: Mesh
    sources: Mapping[SplitKey, data.Source]
    train_source: data.Source
    order: data.Order
    experiment: Experiment
    earlier: tuple[Experiment, ...]
    evaluators: Mapping[str, Measure]
    timetable: Timetable
    initial_params: Mapping[str, np.ndarray] | None = None
    initial_model_state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    division: bytes = b""
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    caption_faults: str = ""
    teachers: tuple[Teacher, ...] = ()
    described_teachers: Sequence[Mapping[str, Any]] = ()
    callbacks: Sequence[Callback] = ()
    choose_s: float = 0.0

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        """The experiment of each stage."""
        return *self.earlier, self.experiment

    def experiment_of(self, number: int) -> Experiment:
        """The experiment of the step `number`, from 1."""
        return self.experiments[self.settings.stages.find(number - 1)]

    def by_stage(self, make: Callable[["Run"], T], start: int = 0) -> Callable[[int], T]:
        """The number of a step -> what `make` makes of the run with the experiment of its size.

        All are made now, but for the stages that end before the step after `start`.
        """
        stages = self.settings.stages
        left = stages.needed(start)
        made = [make(dataclasses.replace(self, experiment=e)) for e in self.experiments[left:]]
        return lambda number: made[stages.find(number - 1) - left]

    def batches(self, steps: range) -> Generator[Batch, None, None]:
        """The batches of `steps`, counted from 0, at the image size of each."""
        stages = self.settings.stages
        streams: dict[int, Generator[Batch, None, None]] = {}
        try:
            for step in steps:
                i = stages.find(step)
                if i not in streams:
                    firsts = stages.firsts(i, steps)
                    streams[i] = data.train_batches(
                        self.train_source,
                        self.experiments[i].batch,
                        steps=range(step, step + len(firsts)),
                        seed=self.settings.run.seed,
                        sharding=batch_sharding(self.mesh),
                        data_order=self.order,
                        firsts=firsts,
                    )
                yield next(streams[i])
        finally:
            for stream in streams.values():
                stream.close()

    def flops(self, steps: int) -> int:
        """FLOPs of the first `steps` steps: forward and backward, without rematerialisation."""
        stages = self.settings.stages
        return sum(
            stages.steps_in(i, steps) * stage.batch * each.flops_per_image
            for i, (stage, each) in enumerate(zip(stages, self.experiments, strict=True))
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the training data, saved in each checkpoint."""
        return data_fingerprint(self.settings, self.train_source)


def prepare(
    asked: Settings,
    workdir: epath.PathLike,
    choose_layout: ChooseLayout | None = None,
    before: StoredRun | None = None,
    by_user: Collection[str] = (),
) -> Run:
    """Resolve a config and build its run; writes nothing.

    Args:
      asked: of a config that has passed `validation.validate`.
      workdir: the run's directory.
      choose_layout: chooses under `auto`; None: the layout stays as it is.
      before: what `workdir` holds; None: as this process reads it.
      by_user: the keys that the user has set on the command line.

    Raises:
      InputError: names the key.
    """
    workdir = files.absolute(workdir)
    before = read_run(workdir) if before is None else before
    opened = Files(workdir, before, choose_layout)
    resolved = resolve(asked, opened, before.stored, by_user)
    chosen = ("optimizer.accum_steps",) if asked.optimizer.accum_steps is None else ()
    check_unchanged(resolved.settings, before, workdir, chosen)
    return build(resolved, opened, workdir)


def build(resolved: Resolved, opened: Files, workdir: epath.Path) -> Run:
    """The run of a resolved config, from what was `opened` to resolve it.

    Raises:
      InputError: the parts do not suit each other.
    """
    settings, mesh = resolved.settings, opened.mesh
    preprocessing = opened.preprocessing
    train_source = opened.sources[train_split(settings.data)]
    teachers = opened.read_teachers(settings)
    described = describe_teachers(teachers)
    check_same_teachers(workdir, described)
    teachers = compare_classes(settings.objective, teachers, train_source.class_names)
    *before, last = settings.by_stage
    experiment = make_experiment(last, mesh, preprocessing, teachers)
    earlier = [make_stage(stage, mesh, teachers, experiment) for stage in before]
    if settings.data.keep_features:
        _check_features_stay(experiment, has_stages=bool(earlier))
    check_outputs(settings.evals, experiment.model, settings.data.image_size)
    texts = texts_that_learn(settings.objective, experiment.model, lambda: train_source.tokenizer)
    evaluators = make_evaluators(
        settings, preprocessing, experiment.model, mesh, opened.sources, workdir,
        read_text_side=texts,
    )  # fmt: skip
    check_metrics(settings, opened.sources)
    checkpoints.check_memory_dir(settings.checkpoint)
    inject = settings.job.inject
    faults.check_places(inject, mesh.size, jax.process_count(), settings.durations)
    return Run(
        resolved=resolved,
        settings=settings,
        workdir=workdir,
        mesh=mesh,
        sources=opened.sources,
        train_source=train_source,
        order=training_order(settings.data, settings.run, train_source),
        experiment=experiment,
        earlier=tuple(earlier),
        evaluators=evaluators,
        timetable=Timetable(settings.durations),
        division=opened.division(),
        tokenizer=opened.tokenizer,
        caption_faults=opened.caption_faults,
        teachers=teachers,
        described_teachers=described,
        choose_s=opened.choose_s,
        **_first_weights(settings, experiment, opened, train_source.class_names, texts),
    )


def _check_features_stay(experiment: Experiment, *, has_stages: bool) -> None:
    """Raise InputError if a step may change the model's features of an image."""
    faults, where = Faults(), "data.keep_features=True: "
    faults.need(
        not experiment.num_trained,
        f"{where}{experiment.num_trained:,} parameters of the model are trained; set "
        "--config.optimizer.freeze='(?!objective/).*'",
    )
    faults.need(
        not (has_stages or about(experiment.model).is_random),
        f"{where}the model's features of an image differ from step to step; leave out dropout, "
        "stochastic depth, model.keep_tokens and schedules of data.image_size",
    )
    faults.need(
        not about(experiment.model).has_batch_statistics,
        f"{where}the model normalises by the statistics of each batch; set it to false",
    )
    collect_faults(faults)


def _warn_of_sizes(resolved: Resolved) -> None:
    """Warn if the user names a model, and the config keeps sizes of another."""
    model, by = resolved.config.model, resolved.decided_by
    kept = [key for key in Variant._fields if by.get(f"model.{key}") == "recipe"]
    if by["model.name"] == "user" and kept:
        logger.warning(
            "model.name=%r: the config sets %s too, and they stay; for the sizes of that name set "
            "%s", model.name, ", ".join(f"{key} {model[key]}" for key in kept),
            " ".join(f"--config.model.{key}=None" for key in kept),
        )  # fmt: skip


def describe(run: Run) -> None:
    """Log the devices, batch, data and model of a run."""
    devices = run.mesh.devices.flatten()
    axes = ", ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    logger.info(
        "devices: %d x %s on %d host(s); mesh: %s",
        devices.size, devices[0].device_kind, jax.process_count(), axes,
    )  # fmt: skip
    size = run.settings.run.global_batch_size
    rows = len(local_rows(batch_sharding(run.mesh), size))
    ways = math.prod(run.mesh.shape[axis] for axis in BATCH_AXES)
    e, d = run.experiment, run.settings.data
    logger.info("batch: %d globally, %d per host, %d per device; images: %s",
                size, rows, size // ways, describe_images(d))  # fmt: skip
    _describe_data(run)
    o, schedule = run.settings.optimizer, run.settings.schedule
    ends = np.minimum([schedule.start + schedule.warmup, e.total_steps - 1], e.total_steps - 1)
    risen, last = np.asarray(e.schedule(ends)).tolist()
    if o.averages and last < risen:
        logger.warning(
            "schedule.name=%r: the learning rate falls from %.3g to %.3g; optimizer.name=%r needs "
            "a constant one after the warm-up, as it averages the weights instead: set "
            "--config.schedule.name=constant%s", schedule.name, risen, last, o.name,
            " and --config.schedule.cooldown='0 steps'" * bool(schedule.cooldown),
        )  # fmt: skip
    for teacher in run.described_teachers:
        logger.info(
            "teacher: %s, %s, weight %.3g", teacher["source"], teacher["model"], teacher["weight"]
        )
    logger.info(
        "model: %s, %s parameters%s, %.3g GFLOP per image forward and backward; "
        "state %s per device",
        describe_model(run.settings.model), f"{e.num_params:,}",
        "" if e.num_trained == e.num_params else f" ({e.num_trained:,} trained)",
        e.flops_per_image / 1e9,
        flops.format_bytes(sharding.bytes_per_device(e.abstract_state)),
    )  # fmt: skip
    _warn_of_sizes(run.resolved)
    for stage, each in zip(run.settings.stages, run.experiments, strict=True):
        if run.earlier:
            when = f"steps {stage.steps.start + 1:,} to {stage.steps.stop:,}: images of {{}} x {{}}"
            said = when.format(*stage.size)
            if stage.drawn:
                said = "{} % of the steps: {} {}".format(stage.percent, *stage.drawn)
            logger.info(
                "%s, share of patches %.3g, batch %d, %.3g GFLOP per image", said,
                about(each.model).keep_tokens, stage.batch, each.flops_per_image / 1e9,
            )  # fmt: skip


def _describe_data(run: Run) -> None:
    e, d, size = run.experiment, run.settings.data, run.settings.run.global_batch_size
    splits = ", ".join(
        f"{key.split if key.data_name == d.name else f'{key.data_name} {key.split}'} "
        f"{source.num_examples:,}"
        for key, source in run.sources.items()
    )
    has_classes = d.num_classes > 1 or run.train_source.class_names is not None
    classes = f", {d.num_classes} classes" * has_classes
    logger.info("data: %s%s, examples: %s; %s steps", d.name, classes, splits, f"{e.total_steps:,}")
    if d.text_length is not None:
        logger.info("captions: %d tokens each, of the %s in %s",
                    d.text_length, f"{d.vocabulary:,}", run.workdir / TOKENIZER)  # fmt: skip
    if run.caption_faults:
        logger.warning("captions: %s", run.caption_faults)
    if fault := unused_bits_of(run.train_source):
        logger.warning("data: %s; %s", *fault)
    if size > d.num_examples:
        logger.warning(
            "global_batch_size=%d exceeds the %d examples: each batch repeats some of them",
            size, d.num_examples,
        )  # fmt: skip


def _first_weights(
    settings: Settings,
    experiment: Experiment,
    opened: Files,
    class_names: Sequence[str] | None,
    texts: Callable[[], TextSide] | None,
) -> dict[str, Any]:
    """The fields of `Run` with the weights of `init_from`, fitted to the model.

    texts: gives the text side that learns; None: there is none.
    """
    run, pretrained = settings.run, opened.pretrained
    own = first_of_objective(settings, experiment, opened, texts)
    if pretrained is None:
        return {"initial_params": own} if own else {}
    keep_head = run.init_head == "kept"
    if keep_head:
        pretrained = _match_head(pretrained, class_names)
    compare_value_ranges(settings.data, pretrained, str(run.init_from))
    params, model_state = transfer.init_variables(
        pretrained, experiment.model, run.init_resize, keep_head=keep_head
    )
    return {"initial_params": params | own, "initial_model_state": model_state}


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
            logger.warning("init_head='kept': %s gives no names of its classes; it "
                           "is assumed to have the data's, in the same order", source)  # fmt: skip
        return pretrained
    if places == list(range(len(theirs or ()))):
        return pretrained
    logger.info("%s: the outputs of the head are reordered by the names of the classes", source)
    return pretrained._replace(params=reorder_head(pretrained.params, places))


def compare_value_ranges(
    data: sections.Data, pretrained: transfer.Pretrained, init_from: str
) -> None:
    """Warn if the model of `init_from` was trained with other pixels than `data` gives."""
    compare_reading(data, pretrained.spec, f"init_from={init_from}")
    for key in ("mean", "std"):
        both = getattr(data, key), getattr(pretrained.spec, key)
        ours, theirs = (per_channel(values, data.channels) for values in both)
        if len(ours) != len(theirs):  # one value, the mean, is near all channels' values
            theirs = (round(float(np.mean(theirs)), 6),) if len({*ours}) == 1 else ours
        if not np.allclose(ours, theirs, rtol=0, atol=1e-6):
            say_other_pixels(key, ours, f"init_from={init_from}", theirs)
