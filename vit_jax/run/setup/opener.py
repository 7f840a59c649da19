"""Readers of the files, devices or tables that decide the open keys of a config."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import transfer
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import Settings, SplitKey
from vit_jax.config.base import shares_in_steps
from vit_jax.config.stored import StoredConfig
from vit_jax.data import Source
from vit_jax.data.captions import digest_of, look_at, open_tokenizer
from vit_jax.data.contract import fingerprint
from vit_jax.data.dataset_sizes import known_facts
from vit_jax.data.division import Divider, read_division
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.data.tokenizers import are_equal
from vit_jax.devices.mesh import AXES, check_accum_steps, check_batch_size, make_mesh
from vit_jax.experiment.microbatches import settle_microbatches
from vit_jax.job import watchdog
from vit_jax.models import fields_of, model_of
from vit_jax.models.captioner import CaptionSide
from vit_jax.models.zero_shot import TextSide, need_text_side
from vit_jax.objectives.contract import Teacher
from vit_jax.run.setup.agreement import compare_requests
from vit_jax.run.setup.changes import KEYS_OF_THE_END, check_settings
from vit_jax.run.setup.resolve import DECIDED_ANEW, Changes, Opener, take_fields
from vit_jax.run.setup.sources import (
    TaughtClasses,
    check_images,
    find_absent,
    open_evaluated,
    open_training,
    settle_names,
)
from vit_jax.run.setup.workdir import StoredRun, check_writable
from vit_jax.run.teachers import abstract_teachers, classes_of, gives_classes, read_teachers
from vit_jax.run.watch.kernel_choice import choose_kernels, missing_form
from vit_jax.run.weights_and_biases import check_installed
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.workdir import read_class_names

logger = logging.getLogger("vit_jax")

# choose(settings, mesh) -> settings with the fastest layout that fits the devices of the mesh.
ChooseLayout = Callable[[Settings, Mesh], Settings]


class Files(Opener):
    """Opens the files and devices of a run that trains, each once.

    Args:
      workdir: of the run.
      before: what is there.
      choose: chooses the layout under `auto`; None: the layout stays as it is.

    pretrained: the source of the initial weights; None: there is none, or the run resumes and does
      not need it.
    text_side, caption_side: of `pretrained`, or of the source of texts, if the run begins with
      them.
    divider: divides the user's images.
    mesh, preprocessing, sources: of the resolved config.
    tokenizer: {name: content} of the files of the captions' tokenizer; {} without captions.
    caption_faults: see `captions.look_at`.
    choose_s: what the measurement of kernels took.
    """

    def __init__(self, workdir: epath.Path, before: StoredRun, choose: ChooseLayout | None):
        self._workdir, self._before, self._choose_layout = workdir, before, choose
        self.pretrained: transfer.Pretrained | None = None
        self._teachers: tuple[Teacher, ...] | None = None
        self._taught: TaughtClasses | None = None
        self._of_texts: transfer.Pretrained | None = None
        self.text_side: TextSide | None = None
        self.caption_side: CaptionSide | None = None
        self.tokenizer: Mapping[str, bytes] = {}
        self.caption_faults = ""
        self.choose_s = 0.0

    def find_faults(self, config: ConfigDict) -> list[str]:
        faults = Faults()
        mesh = faults.check(check_mesh, Settings.of(config))
        if mesh is not None:
            self.mesh = mesh
        faults.check(check_writable, self._workdir)
        faults.check(check_installed, config.log.wandb)
        compare_requests(Settings.of(config))
        still_open = [key for key, value in config_lib.flatten(config).items() if value is None]
        free = (*still_open, *DECIDED_ANEW, *KEYS_OF_THE_END)
        check_settings(config, self._before, self._workdir, free)
        return faults

    def weights(self, config: ConfigDict) -> Changes:
        source, before = Settings.of(config).run.weights_source, self._before
        is_lost = before.stored is None and config.init_fields == "source"
        if before.saved_steps and not is_lost:
            return {}
        check_convention(config.init_resize, "init_resize")
        if config.init_texts_from is not None:
            self._of_texts = transfer.read_pretrained(config.init_texts_from)
        if source is None:
            return {}
        self.pretrained = transfer.read_pretrained(source, lazy=True)
        self._of_texts = self._of_texts or self.pretrained
        if self.pretrained.run is not None:
            logger.info("init_from=%s: its step %d", source, self.pretrained.run["step"])
        return take_fields(config, self.pretrained) if before.stored is None else {}

    def teachers(self, config: ConfigDict) -> Changes:
        settings = Settings.of(config)
        if not gives_classes(settings.objective, settings.data):
            return {}
        self._teachers = self.read_teachers(settings)
        self._taught = number, _ = classes_of(self._teachers)
        if number is None:
            return {}
        if config.data.num_classes not in (None, number):
            raise InputError(
                f"data.num_classes={config.data.num_classes}: the classes come from "
                f"objective.teacher={','.join(settings.objective.teachers)!r}, which has {number}; "
                "leave it out"
            )
        return {"data.num_classes": number}

    def read_teachers(self, settings: Settings) -> tuple[Teacher, ...]:
        """The teachers of the objective, unless they were read already."""
        if self._teachers is not None:
            return self._teachers
        return read_teachers(settings.objective, settings.data, settings.model)

    def data(self, config: ConfigDict) -> Changes:
        settings = Settings.of(config)
        self.preprocessing = parse_preprocessing(settings)
        self.divider = self._open_division(config)
        changes: Changes = dict(find_absent(settings, training=True))
        settings = Settings.of(config := config_lib.with_values(config, changes))
        names = settle_names(settings.data, settings.evals)
        settings = Settings.of(config := config_lib.with_values(config, names))
        facts, sources = open_training(settings, self._taught, self.divider)
        if settings.data.text_length is not None:
            facts |= self._open_tokenizer(settings, sources)
        settings = Settings.of(config_lib.with_values(config, facts))
        of_data = settings.data, settings.evals
        settled = Divider(self.divider.settled(), class_names=self.divider.class_names)
        self.sources = sources | open_evaluated(*of_data, divider=settled, opened=sources)
        check_images(*of_data, self.preprocessing, self.sources)
        for at in map(settings.at, settings.sizes[:-1]):
            check_images(at.data, {}, parse_preprocessing(at), self.sources)
        return changes | names | facts

    def _open_tokenizer(self, settings: Settings, sources: dict[SplitKey, Source]) -> Changes:
        """Open the tokenizer of the captions, and give it to the training data.

        The text tower and the decoder of the sources are taken if their tokenizers are the same.
        """
        data, objective, of = settings.data, settings.objective, self._of_texts
        key = config_lib.train_split(data)
        was = stored.resolved.data.tokenizer if (stored := self._before.stored) else None
        texts, captions, named = None, None, settings.run.init_texts_from
        if of is not None and objective.learns_texts and (of.read_text_side or named):
            texts = need_text_side(of.read_text_side, f"init_texts_from={named!r}")
        if self.pretrained is not None and objective.writes_captions:
            read = self.pretrained.read_caption_side
            captions = read() if read else None
        theirs = _files_of(texts or captions)
        opened = open_tokenizer(data, self._workdir, sources[key], was, theirs)
        tokenizer, self.tokenizer = opened
        if _is_taken(texts, "text tower", of, self.tokenizer):
            self.text_side = texts
        elif named is not None:
            raise InputError(
                f"init_texts_from={named!r}: its text tower reads by its own tokenizer, and the "
                "run has another; leave out --config.data.tokenizer, or --config.init_texts_from"
            )
        if _is_taken(captions, "decoder", self.pretrained, self.tokenizer):
            self.caption_side = captions
        source = dataclasses.replace(sources[key], tokenizer=tokenizer)
        digest, self.caption_faults = look_at(source)
        identity = fingerprint(source.fingerprint, digest)
        sources[key] = dataclasses.replace(source, fingerprint=identity)
        self.preprocessing = self.preprocessing._replace(text=tokenizer.facts)
        of_files = {"data.vocabulary_digest": digest_of(self.tokenizer)}
        return {"data.vocabulary": tokenizer.vocabulary} | of_files

    def _open_division(self, config: ConfigDict) -> Divider:
        """The divider of the stored run; of a new run, it knows the images of `init_from`."""
        before = self._before
        if before.is_begun:
            began_with = config if before.stored is None else before.stored.resolved
            named = (self._workdir / "classes.json").exists()  # it is written last
            names = read_class_names(self._workdir) if named else None
            return Divider(
                read_division(self._workdir, Settings.of(began_with).data), class_names=names
            )
        if self.pretrained is None:
            return Divider(anew=True)
        return Divider(self.pretrained.division, self.pretrained.source, anew=True)

    def division(self) -> bytes:
        """Content of `division.FILE` of a run that begins; b"" if it has none of the user's."""
        if self._before.is_begun:
            return b""
        division = self.divider.settled()
        return division.to_bytes() if any(division) else b""

    def shares(self, config: ConfigDict) -> Changes:
        return shares_in_steps(config)

    def has_devices_of(self, stored: StoredConfig) -> bool:
        return self._before.devices == [jax.device_count(), jax.devices()[0].device_kind]

    def layout(self, config: ConfigDict) -> Changes:
        stored, keys = self._before.stored, {*config_lib.LAYOUT_KEYS}
        if not config.auto or self._choose_layout is None:
            return {}
        if stored is not None:
            if stored.asked.auto and self.has_devices_of(stored):
                return {}
            keys -= {"model.scan"}  # the form of its checkpoints
            has_scan = "scan" in fields_of(config.model.name)
            if config.model.scan is None and has_scan:
                config = config_lib.with_values(config, {"model.scan": False})
        with watchdog.phase("compile"):
            chosen = self._choose_layout(Settings.read(config), self.mesh)
        self.mesh = check_mesh(chosen)
        return {key: chosen.values[key] for key in keys}

    def microbatches(self, config: ConfigDict) -> Changes:
        if config.optimizer.accum_steps is not None:
            return {}
        stored = self._before.stored
        recorded = None if stored is None else stored.resolved.optimizer.accum_steps
        return {"optimizer.accum_steps": _settle(config, self.mesh, recorded)}

    def kernels(self, config: ConfigDict) -> Changes:
        stored, settings, name = self._before.stored, Settings.read(config), config.model.kernels
        before = None if stored is None else stored.decided_by.get("model.kernels")
        if name == "auto":
            if stored is not None and self.has_devices_of(stored):
                return {}
        elif (fault := missing_form(settings, self.mesh)) is None:
            return {}
        elif before != "measured":  # a measured form may go with the layout
            raise InputError(fault)
        since = time.perf_counter()
        name = choose_kernels(settings, self.mesh)
        self.choose_s = time.perf_counter() - since
        return {"model.kernels": name or "auto"}


class Tables(Opener):
    """Gives the facts of known data sets, without devices; opens only the user's own images.

    Args:
      mesh: decides the number of microbatches, and whether `model.kernels` exists; None: one
        microbatch, and nothing is checked.
      opens_data: whether the training data are opened, whatever they are.

    sources: the training data, if they were opened.
    """

    def __init__(self, mesh: Mesh | None = None, *, opens_data: bool = False):
        self._mesh, self._opens_data = mesh, opens_data

    def weights(self, config: ConfigDict) -> Changes:
        if config.init_fields != "source":  # reads no file for nothing
            return {}
        source = Settings.of(config).run.weights_source
        assert source is not None  # checked by `sections.Run`
        return take_fields(config, transfer.read_pretrained(source))

    def data(self, config: ConfigDict) -> Changes:
        d = config.data
        missing = [k for k in ("num_classes", "num_examples") if d[k] is None]
        if not self._opens_data:
            is_here = config_lib.SOURCES.find(d.name).is_own and d.name in config_lib.SOURCES
            if not is_here or not missing:
                return known_facts(Settings.of(config).data, config.global_batch_size)
            if d.data_dir is None or not epath.Path(os.path.expanduser(d.data_dir)).exists():
                remedies = " ".join(f"--config.data.{key}=..." for key in missing)
                raise InputError(
                    f"data.data_dir={d.data_dir!r}: there are no images to count; give their "
                    f"place, or set {remedies}"
                )
        settings = Settings.of(config)
        learns = gives_classes(settings.objective, settings.data)
        taught = classes_of(abstract_teachers(settings)) if learns else None
        facts, self.sources = open_training(settings, taught)
        return facts

    def microbatches(self, config: ConfigDict) -> Changes:
        if config.optimizer.accum_steps is not None:
            return {}
        if self._mesh is None:
            return {"optimizer.accum_steps": 1}
        return {"optimizer.accum_steps": _settle(config, self._mesh)}

    def kernels(self, config: ConfigDict) -> Changes:
        if self._mesh is not None and (fault := missing_form(Settings.read(config), self._mesh)):
            raise InputError(fault)
        return {}


def _files_of(side: TextSide | CaptionSide | None) -> dict[str, bytes]:
    """{name: content} of the files that define its tokenizer; {} if they alone do not."""
    files = side.files if side and side.by_files else ()
    return {path.name: path.read_bytes() for path in files}


def _is_taken(
    side: TextSide | CaptionSide | None,
    part: str,
    of: transfer.Pretrained | None,
    tokenizer: Mapping[str, bytes],
) -> bool:
    """Whether a run with that `tokenizer` takes the side, the `part` of a source; logs it."""
    if side is None or of is None:
        return False
    files, source = _files_of(side), of.source
    if is_taken := bool(files) and are_equal(files, tokenizer):
        logger.info("%s: its %s is taken", source, part)
        return is_taken
    why = "the run has another tokenizer" if files else (
        "it has no tokenizer" if side.by_files else "its library cleans texts by own rules"
    )  # fmt: skip
    logger.warning("%s: %s, so the %s starts anew", source, why, part)
    return is_taken


def _settle(config: ConfigDict, mesh: Mesh, recorded: int | None = None) -> int:
    """The number of microbatches; see `settle_microbatches`."""
    settings = Settings.of(config)
    model = model_of(settings.model, settings.data)
    for at in map(settings.at, reversed(settings.sizes)):  # the last size decides
        size = at.run.global_batch_size
        recorded = settle_microbatches(settings.objective, model, size, mesh, recorded)
    assert recorded is not None
    return recorded


def check_mesh(settings: Settings) -> Mesh:
    """The mesh of the settings, which may be open.

    Raises:
      InputError: it is invalid, or a batch does not divide over it.
    """
    axes = {axis: getattr(settings.mesh, axis) for axis in AXES}
    mesh, faults, size = make_mesh(**axes), Faults(), settings.run.global_batch_size
    faults.check(check_batch_size, mesh, size, "global_batch_size")
    if settings.optimizer.accum_steps is not None:
        faults.check(check_accum_steps, mesh, size, settings.optimizer.accum_steps)
    for name, entry in settings.evals.items():
        if entry.batch_size is not None:
            faults.check(check_batch_size, mesh, entry.batch_size, f"evals.{name}.batch_size")
    collect_faults(faults)
    return mesh
