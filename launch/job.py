"""The job that a launcher starts: the arguments after `--`, for `python -m vit_jax.main`."""

import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from command_line import ROOT
from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, collect_faults
from vit_jax.commands import COMMANDS
from vit_jax.commands.flags import load_valid_config, require_flags
from vit_jax.commands.predict import folder_flag
from vit_jax.config import Settings, eval_splits, plugins
from vit_jax.config.text import shipped_configs
from vit_jax.data import SOURCES, mixed_keys
from vit_jax.main import parse_flags

_OF_PROCESSES = ("coordinator", "num_processes", "process_id")


class DataSet(NamedTuple):
    """A data set that a job reads from files.

    key: the config key of its folder.
    name: as in `data.name`.
    folder: a path, or an address such as gs://bucket/folder; None: the default of TFDS.
    """

    key: str
    name: str
    folder: str | None


@dataclasses.dataclass(frozen=True)
class Job:
    """The command that every process of a job runs.

    words: arguments of `python -m vit_jax.main`.
    config: value of `--config`, NAME[:words]; None if the config comes from the workdir.
    workdir: a path, or an address such as gs://bucket/run, as typed.
    plugins: files of the config's plug-ins that are files.
    typed_plugins: plug-ins in `--config.plugins`, as typed.
    extras: extras of the package that the job needs beyond its platform's extras.
    data: the data sets that it reads, unless its config comes from the workdir.
    """

    words: tuple[str, ...]
    config: str | None
    workdir: str
    plugins: tuple[pathlib.Path, ...] = ()
    typed_plugins: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    data: tuple[DataSet, ...] = ()

    def command(self, *process_words: str, python: str = "python") -> list[str]:
        """The command of one process; `process_words` give its place in the job."""
        return [python, "-m", "vit_jax.main", *self.words, *process_words]

    @property
    def overrides(self) -> list[str]:
        """The words that set config keys, each as `--config.key=value`."""
        found, words = [], iter(self.words)
        for word in words:
            if word.startswith("--config."):
                found.append(word if "=" in word else f"{word}={next(words)}")
        return found

    @property
    def name(self) -> str:
        """Last part of the workdir, as a name that every scheduler accepts."""
        part = self.workdir.rstrip("/").rpartition("/")[2].lower()
        name = re.sub(r"[^a-z0-9]+", "-", part)[:40].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".strip("-")  # starts with a letter

    def on(self, platform: str) -> "Job":
        """The same job, restricted to `platform` unless it sets one itself or takes no config."""
        takes_none = self.words[0] == "predict"
        if takes_none or any(word.startswith("--config.mesh.platform") for word in self.words):
            return self
        word = f"--config.mesh.platform={platform}"
        return dataclasses.replace(self, words=(*self.words, word))


def check_job(words: Sequence[str]) -> Job:
    """Check flags and config of the job in `words`, as the job itself will do, and return it.

    Raises:
      InputError: lists all faults of the config, or names a flag that is missing or superfluous.
    """
    words = list(words)
    command = words[0] if words and not words[0].startswith("-") else "train"
    example = "-- --config=configs/quickstart.py --workdir=runs/quickstart"
    if not words:
        raise InputError(f"no job: give its arguments after --, e.g. {example}")
    if command not in COMMANDS:
        raise InputError(f"-- {command}: no such command; known: {', '.join(COMMANDS)}")
    flags = parse_flags(command, words[1:] if words[0] == command else words)
    if command in ("certify", "predict"):  # whose --workdir is the model's
        name = "output" if command == "certify" else folder_flag(flags)
        place = None if name is None else getattr(flags, name)
        flags.workdir = flags.output = None if place is None else os.fspath(place)
    if not hasattr(flags, "workdir"):
        raise InputError(f"-- {command}: has no workdir, so it cannot be a job; run it directly")
    if command == "study":
        raise InputError(
            "-- study: cannot be a job, since it starts a launcher for each member; run "
            'python -m vit_jax.main study ... --launcher="python launch/LAUNCHER.py WHERE ..."'
        )
    given = [f"--{name}" for name in _OF_PROCESSES if getattr(flags, name, None) is not None]
    if given:
        raise InputError(f"{', '.join(given)}: the launcher sets these; leave them out")
    if command == "evaluate" and (flags.init_from or flags.config):
        raise InputError("-- evaluate: as a job it takes only --workdir; run it directly")
    # `evaluate` takes its config from the workdir.
    alone = {"evaluate": ("workdir",), "certify": ("output",), "predict": ("output",)}
    of_command = alone.get(command, ("config", "workdir"))
    require_flags(flags, [name for name in of_command if hasattr(flags, name)], example)
    config, named, data = getattr(flags, "config", None), (), ()
    extras = (*needed_extras(None, flags.workdir), *["parquet"] * (command == "predict"))
    with plugins.using(flags.plugins, trusted=flags.trust_plugins):
        if config is not None:
            loaded = load_valid_config(flags)
            named, extras = loaded.plugins, needed_extras(loaded, flags.workdir)
            data = find_data_sets(loaded)
    found = [plugins.find_plugin(name) for name in named]
    by_path = tuple(pathlib.Path(p.file) for p in found if p.name.endswith(".py"))
    typed = tuple(flags.plugins)
    return Job(tuple(words), config, flags.workdir, by_path, typed, extras, data)


def find_data_sets(config: ConfigDict) -> tuple[DataSet, ...]:
    """The data sets that training and evaluators read from files, each once."""
    settings = Settings.of(config)
    keys = {config.data.data_dir: "data.data_dir"}
    found = {(split.data_name, split.data_dir): keys.get(split.data_dir, "data.mix")
             for split in mixed_keys(settings.data)}  # fmt: skip
    for name, entry in settings.evals.items():
        for split in eval_splits(settings.data, entry).values():
            found.setdefault((split.data_name, split.data_dir), f"evals.{name}.data_dir")
    return tuple(
        DataSet(key, name, folder)
        for (name, folder), key in found.items()
        if SOURCES.find(name).is_own == (name in SOURCES)  # not of the Hub, and not made
    )


def needed_extras(config: ConfigDict | None, workdir: str) -> tuple[str, ...]:
    """Extras of the package that a job needs, sorted; `config` None: it is in the workdir."""
    addresses, extras = [workdir], set()
    if config is not None:
        training = mixed_keys(Settings.of(config).data)
        places = (*training, *config.evals.values())
        addresses += [config.init_from, *(place.data_dir for place in places)]
        extras |= {"wandb"} if config.log.wandb is not None else set()
    if any(str(address).startswith("gs://") for address in addresses):
        extras.add("gcs")
    return tuple(sorted(extras))


def study_jobs(words: Sequence[str]) -> tuple[str, list[Job]]:
    """The workdir of the study that `words` ask for, and a job for each member that can run now.

    Raises:
      InputError: it is no study that can run, or no member waits.
    """
    from vit_jax.commands.study import read_study
    from vit_jax.studies import running

    flags = parse_flags("study", words[1:])
    if flags.launcher is not None:
        raise InputError(f"--launcher={flags.launcher}: this one takes the members; leave it out")
    with plugins.using(flags.plugins, trusted=flags.trust_plugins):
        study, call = read_study(flags)
        waiting = running.waiting_members(study, call)
        configs = [study.config_of(member.overrides) for member in waiting]
    if not waiting:
        raise InputError(
            f"--workdir={flags.workdir}: no member waits; see what they came to: "
            f"{shlex.join(['python', '-m', 'vit_jax.main', *words])}, or hand those that were lost "
            "over again by --again"
        )
    here = [member for member in waiting if member.command != "train"]
    if here:
        own = ["python", "-m", "vit_jax.main", *running.member_words(call, here[0])]
        raise InputError(
            f"member {here[0].name}: cannot be a job, since it runs in one process; run it first: "
            f"{shlex.join(own)}"
        )
    workdir, typed = os.fspath(call.workdir), tuple(flags.plugins)
    jobs = []
    for member, own in zip(waiting, configs, strict=True):
        job = Job(tuple(running.member_words(call, member)), flags.config,
                  f"{workdir}/{member.name}", (), typed, needed_extras(own, workdir),
                  find_data_sets(own))  # fmt: skip
        jobs.append(job)
    return workdir, jobs


def check_config_travels(job: Job, where: str) -> None:
    """Raise InputError if a file that the job needs is not in the repository.

    `where` names the place that only has the repository's files. Needed files are the config and
    the plug-ins; plug-ins that are modules are installed there by the user.
    """
    configs = ROOT / "configs"
    elsewhere = [
        name for name in job.typed_plugins if name.endswith(".py") and not _is_below(configs, name)
    ]
    elsewhere += [str(file) for file in job.plugins if not file.is_relative_to(configs)]
    why = (
        f"{where} has only the repository's files; move the file to configs/ and name it from the "
        "repository's root"
    )
    if elsewhere:
        raise InputError(f"plugins: {elsewhere[0]}: {why}, or install it there as a module")
    path = pathlib.Path((job.config or "").partition(":")[0])
    travels = job.config is None or str(path) in shipped_configs()
    if not travels and (path.is_absolute() or not (ROOT / path).is_file()):
        raise InputError(f"--config={job.config}: {why}")


def check_data_travels(
    job: Job, where: str, variables: Mapping[str, str], has: Callable[[str], bool], remedy: str
) -> list[str]:
    """The folders on disk of a job's data; raises InputError if its processes cannot read them.

    `where` names the place of a process and `variables` are its environment; `has` says whether a
    folder may be there, and `remedy` how the user gets it there.
    """
    faults, folders = [], dict[str, None]()
    for key, name, folder in job.data:
        bucket = "" if SOURCES.find(name).is_own else "gs://bucket/tensorflow_datasets"
        folder = folder or (variables.get("TFDS_DATA_DIR") if bucket else None)
        at_store = "://" in (folder or "") and name not in ("folder", "list", "unlabelled")
        if folder is not None and (has(folder) or at_store):
            folders |= {} if "://" in folder else {folder: None}
            continue
        of_key = bucket and key != "data.mix"  # whose value holds more than a folder
        copy = f"copy it to a bucket and give --config.{key}={bucket}, or " if of_key else ""
        what = name if bucket else "images"
        faults.append(f"{key}={folder!r}: {where} has no {what} there; {copy}{remedy}")
    collect_faults(faults)
    return [*folders]


def is_on_own_disk(folder: str) -> bool:
    """Whether a folder is on the system's or the user's own disk, which no other host mounts."""
    return _mount_of(folder) in {"/", _mount_of(str(pathlib.Path.home()))}


def _mount_of(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _is_below(folder: pathlib.Path, name: str) -> bool:
    """Whether a process started in the repository's root finds the file `name` in `folder`."""
    file = (ROOT / name).resolve()
    return not os.path.isabs(name) and file.is_file() and file.is_relative_to(folder)
