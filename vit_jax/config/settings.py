"""A config as typed values: one section for each room.

A `ConfigDict` is for users: files, flags and config.json. Rooms take the sections of `Settings`, in
which every key has its declared type, sizes are pairs and durations are steps.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import sections
from vit_jax.config.base import declared_keys, default_config, flatten, in_steps, with_values
from vit_jax.config.drawn import make_draws, split_draws
from vit_jax.config.durations import parse_duration, to_steps
from vit_jax.config.evals import EVALUATORS, Evaluator, make_entry
from vit_jax.config.parts import DURATIONS, InSteps, Registry, Section, as_pair, find_wrong
from vit_jax.config.registries import (
    FAMILIES,
    LOSSES,
    OBJECTIVES,
    OPTIMIZERS,
    SCHEDULES,
    SOURCES,
    STUDIES,
)
from vit_jax.config.sizes import Stages, make_stages

if TYPE_CHECKING:
    from vit_jax.experiment.optimizers.optimizers import Optimizer
    from vit_jax.experiment.schedules import Decay
    from vit_jax.objectives.contract import ObjectivePart
    from vit_jax.objectives.losses import Loss


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sections of a config.

    objective, loss, optimizer, schedule: the part that the section selects, with all keys of the
      section.
    evals: {name: evaluator}.
    values: {dotted key: value} of the config, as its texts and numbers stand there.
    """

    run: sections.Run
    model: sections.Model
    data: sections.Data
    objective: "ObjectivePart"
    loss: "Loss"
    optimizer: "Optimizer"
    schedule: "Decay"
    mesh: sections.Mesh
    checkpoint: sections.Checkpoint
    stop: sections.Stop
    log: sections.Log
    job: sections.Job
    evals: Mapping[str, Evaluator]
    values: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def read(cls, config: ConfigDict) -> "Settings":
        """The settings of a resolved config.

        Raises:
          InputError: with the faults of all keys, one that `resolve` decides and that is still
            None, or the first duration that is too long.
        """
        values = flatten(config)
        collect_faults([
            f"{key}=None: is decided when a run starts; set it"
            for key, declared in declared_keys(config).items()
            if declared.decided and values[key] is None
        ])  # fmt: skip
        collect_faults(cls.read_open(config)[1])
        return cls._read(config, functools.partial(to_steps, config))[0]

    @classmethod
    def of(cls, config: ConfigDict) -> "Settings":
        """The settings of a config that has been validated; its open keys are None."""
        return cls.read_open(config)[0]

    @classmethod
    def read_open(cls, config: ConfigDict) -> tuple["Settings", list[str]]:
        """The settings of a config with open keys, which are None, and the faults of the others.

        Durations are their texts. A value in fault stays as it is, a section whose part is unknown
        or in fault has its common keys only, and `evals` lacks the entries in fault.
        """
        return cls._read(config, None)

    @classmethod
    def _read(cls, config: ConfigDict, in_steps: InSteps | None) -> tuple["Settings", list[str]]:
        found: dict[str, Any] = {}
        faults = Faults()
        for name, section in sections.SECTIONS.items():
            values, prefix = dict(config[name] if name else config), f"{name}." if name else ""
            own_in_steps = in_steps and _named(in_steps, prefix)
            registry, part = _CHOSEN.get(name), None  # type: Registry[Any] | None, Any
            if registry and values["name"] is not None:
                part = faults.check(registry.make, values, prefix, own_in_steps)
            if registry not in _PARTS or part is None:
                part, wrong = section.read(values, own_in_steps)
                faults += [f for f in (f"{prefix}{fault}" for fault in wrong) if f not in faults]
            if name == "model":
                faults += find_wrong(FAMILIES.chosen_keys(part.name), part.own, prefix)
            found[name or "run"] = part
        del found["study"]
        evals = {}
        for name, entry in config.evals.items():
            prefix = f"evals.{name}."
            own_in_steps = in_steps and _named(in_steps, prefix)
            evaluator = faults.check(EVALUATORS.make, dict(entry), prefix, own_in_steps)
            if evaluator is not None:
                evals[name] = evaluator
        return cls(**found, evals=evals, values=flatten(config)), list(faults)

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """The settings of the same config with other `values`, {dotted key: value}."""
        return Settings.read(with_values(self.to_config(), values))

    def to_config(self) -> ConfigDict:
        """A config with the same values, but for entries of `evals` that are in fault."""
        config = default_config(self.run.plugins)
        for name, entry in self.evals.items():
            keys = {key: f"evals.{name}.{key}" for key in entry.declared()}
            own = {key: self.values[at] for key, at in keys.items() if at in self.values}
            config.evals[name] = make_entry(self.values[f"evals.{name}.type"], **own)
        common = {k: v for k, v in self.values.items() if not k.startswith("evals.")}
        return with_values(config, common)

    @functools.cached_property
    def durations(self) -> dict[str, int]:
        """{"section.key": steps} for every duration that is set, but for lists of them."""
        return {
            f"{name}.{key}".lstrip("."): steps
            for name, section in self.by_name()
            for key, declared in section.declared().items()
            if declared.form in DURATIONS[:3] and (steps := getattr(section, key)) is not None
        }

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The image sizes of the run's stages; the last is `data.image_size`."""
        asked = self.data.declared()["image_size"].sizes(self.values["data.image_size"])
        return [*((size, size) for size, _ in asked[:-1]), self.data.image_size]

    def at(self, size: tuple[int, int]) -> "Settings":
        """The settings with images of `size`, in batches by `data.image_size_keeps`.

        Equal tokens: the batch is the largest multiple of a quarter of `global_batch_size` that has
        no more pixels than a batch of the last size.
        """
        (h, w), (height, width), batch = size, self.data.image_size, self.run.global_batch_size
        quarters = 4 * height * width // (h * w) if self.data.image_size_keeps == "tokens" else 4
        return dataclasses.replace(
            self,
            data=dataclasses.replace(self.data, image_size=size),
            run=dataclasses.replace(self.run, global_batch_size=batch * quarters // 4),
        )

    @functools.cached_property
    def stages(self) -> Stages:
        """The stages of a resolved run: one for each of its `sizes`, or two.

        Raises:
          InputError: they do not fit into the run, or into the order of its data.
        """
        until, steps = self.model.keep_tokens_until, self.run.duration
        if until is not None and until >= steps:
            raise InputError(
                f"model.keep_tokens_until={self.values['model.keep_tokens_until']!r}: must end "
                f"before duration={self.values['duration']!r}, {steps:,} steps; set a longer "
                "--config.duration, or for a new run an earlier end"
            )
        sizes, data, key = self.sizes, self.data, "data.image_size"
        most = self.values["data.max_tokens"]
        if most is not None and len(sizes) > 1:
            raise InputError(
                f"data.max_tokens={most!r}: excludes data.image_size={self.values[key]!r}, as "
                "pictures in their own shape have no schedule of sizes; give one size"
            )
        patches = self.values["model.patch_sizes"]
        if patches is not None and (most is not None or len(sizes) > 1):
            other = "data.max_tokens" if most is not None else key
            raise InputError(
                f"model.patch_sizes={patches!r}: excludes {other}={self.values[other]!r}, as a run "
                "has one schedule of sizes; set one of them"
            )
        if patches is not None or len(split_draws(most or 0)) > 1:
            return self._draw()
        counts = {"num_examples": data.num_examples, "duration": self.values["duration"],
                  "global_batch_size": self.run.global_batch_size}  # fmt: skip
        texts = data.declared()["image_size"].durations(self.values[key])
        starts = [parse_duration(text, key=key, **counts) for text in texts]
        batches = [self.at(size).run.global_batch_size for size in sizes]
        if data.order == "chunk" and {*batches} != {batches[-1]}:
            raise InputError(
                "data.image_size_keeps='tokens': data.order=chunk deals batches of one size; "
                "set --config.data.image_size_keeps=batch or --config.data.order=record"
            )
        return make_stages(sizes, [0, *starts], batches, steps, until)

    def _draw(self) -> Stages:
        """The stages of numbers that are drawn; what these exclude is an InputError.

        The last stage has the largest number of tokens, or the patch size of the parameters.
        """
        patches, run = self.values["model.patch_sizes"], self.run
        key = "data.max_tokens" if patches is None else "model.patch_sizes"
        draws = split_draws(self.values[key])
        for other, is_set in {
            "model.keep_tokens_until": self.model.keep_tokens_until is not None,
            "data.order": self.data.order == "chunk",
            "data.pack": self.data.pack is not None,
        }.items():
            if is_set:
                raise InputError(
                    f"{key}={self.values[key]!r}: excludes {other}={self.values[other]!r}, as its "
                    "steps are of several kinds; give one number, or change that key"
                )
        size, batch = self.data.image_size, run.global_batch_size
        if patches is None:
            batches = [batch * (4 * draws[-1][0] // number) // 4 for number, _ in draws]
            return make_draws(key, draws, size, batches, run.duration, run.seed)
        own = self.model.own.get("patch_size")
        draws.sort(key=lambda draw: as_pair(draw[0]) == as_pair(own))
        batches = [batch] * len(draws)
        return make_draws("model.patch_size", draws, size, batches, run.duration, run.seed)

    @functools.cached_property
    def by_stage(self) -> list["Settings"]:
        """For each stage of a resolved run, a run of its program, as long as the whole."""
        if len(self.stages) == 1 and not self.stages[0].keeps_all:
            return [self]
        of_whole = {"model.keep_tokens_until": None, "model.patch_sizes": None}
        fixed, runs = in_steps(self.to_config()) | of_whole, []
        for stage in self.stages:
            own = {"data.image_size": stage.size, "global_batch_size": stage.batch}
            own |= {"model.keep_tokens": None} if stage.keeps_all else {}
            own |= dict([stage.drawn] if stage.drawn else [])
            runs.append(self.with_values(fixed | own))
        return runs

    @property
    def has_average(self) -> bool:
        """Whether the run keeps running averages: by `optimizer.ema_decay`, or by its optimizer."""
        return self.optimizer.ema_decay is not None or self.optimizer.averages

    def by_name(self) -> Iterator[tuple[str, Section]]:
        """(name, section) of each, "" being `run`, and ("evals.NAME", evaluator) of each entry."""
        for name in sections.SECTIONS:
            if name != "study":
                yield name, getattr(self, name or "run")
        for name, evaluator in self.evals.items():
            yield f"evals.{name}", evaluator


# Of these, `Settings` holds the selected part, which has the keys of its section too.
_PARTS = (OBJECTIVES, LOSSES, OPTIMIZERS, SCHEDULES)
_CHOSEN: dict[str, Registry[Any]] = {
    registry.section: registry for registry in (*_PARTS, SOURCES, STUDIES)
}


def _named(in_steps: InSteps, prefix: str) -> InSteps:
    return lambda text, key: in_steps(text, prefix + key)
