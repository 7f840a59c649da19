"""Python functions that do what commands do: they take a config, or runs and sources by name.

`vit_jax.NAME` finds them, as it finds what Python users call in other modules. Errors are
`InputError`, a ValueError that lists all faults.
"""

# As in commands, heavy imports are inside functions: each loads only what it needs.

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import REQUIRED, REQUIRED_TO_EVALUATE, Settings
from vit_jax.devices.chips import find_slices
from vit_jax.insight.figure_names import FIGURE_NAMES, FILE_NAMES

if TYPE_CHECKING:
    from vit_jax.run.build import Callback
    from vit_jax.transfer import Pretrained

ConfigLike: TypeAlias = ConfigDict | str | os.PathLike


def train(
    config: ConfigLike | None,
    workdir: epath.PathLike,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as `config` describes, continuing the run in `workdir` if there is one.

        summary = vit_jax.train("quickstart", "runs/quickstart", {"duration": "200 steps"})
        summary["test/top1"]

    Runs the same loop as the command: it prints progress and logs to the logger "vit_jax".

    Args:
      config, overrides: as in `load_config`; None: what was asked for at the last start of the run
        in `workdir`.
      workdir: folder for everything that the run writes.
      callbacks: functions f(step, state, metrics), called where the run has logged or evaluated:
        after `step` updates, with the `TrainState` that evaluators see (the running averages, if
        the run keeps them) and the values of that step, {"train/loss": 0.3, "test/top1": 0.9}. The
        state's arrays are gone after the next step: copy what you keep. What `f` returns is
        ignored. An error in it ends the run, and the same call resumes from the last save. In a
        job of several processes each calls it, with its shards of the state.
      data: images that you have in Python, by split; sets `data.name` to "arrays". A split is a
        pair (images, labels): uint8 (N, H, W, C) or (N, H, W), or a sequence of images, and N
        numbers from 0, N lists of them, or an array (N, classes) of 0 and 1. Or it is a sequence
        of pairs (image, label), or of dicts of both, as data sets of torch and of Hugging Face
        are. "class_names" names the classes. To go on with the run, give the same again.

            vit_jax.train("cifar10:small", "runs/mine", data={"train": (x, y), "test": (a, b)})

    Returns:
      The summary, as in `workdir/summary.json`.

    Raises:
      InputError: a ValueError that lists all faults; nothing has been written.
      NonFiniteError, CorruptDataError: see `run.train.train_and_evaluate`.
    """
    from vit_jax.config.stored import read_asked
    from vit_jax.data.sources.arrays import give
    from vit_jax.devices.mesh import start_backend
    from vit_jax.job.allocator import limit_arenas
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.setup.validation import load_config, validate
    from vit_jax.run.train import train_and_evaluate

    limit_arenas()
    if config is None:
        config = read_asked(files.absolute(workdir))
    faults = [f"callbacks={callbacks!r}: needs a list of functions"]
    with give(data) as chosen:
        made = load_config(load_config(config, chosen), overrides)
        validate(made, faults * (not isinstance(callbacks, list | tuple)), "config")
        start_backend(made.mesh.platform)
        return train_and_evaluate(
            Settings.of(made), workdir, choose_layout=choose_layout, callbacks=callbacks
        )


def evaluate(
    source: epath.PathLike,
    config: ConfigLike | None = None,
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
    from vit_jax.data.sources.arrays import give
    from vit_jax.devices.mesh import start_backend
    from vit_jax.inference.evaluate import StoredModel, evaluate_model
    from vit_jax.run.setup.validation import as_pairs, check_evaluates_any, load_run
    from vit_jax.transfer import read_pretrained

    model: StoredModel | Pretrained
    with give(data) as chosen:
        overrides = {**chosen, **(overrides or {})}
        if config is None:
            workdir = files.absolute(source)
            made, trained = load_run(workdir, as_pairs(overrides))
            start_backend(made.mesh.platform)
            model = StoredModel(workdir, trained, best)
        else:
            made = _load(config, overrides, REQUIRED_TO_EVALUATE)
            check_evaluates_any(made, "config")
            start_backend(made.mesh.platform)
            model = read_pretrained(source, best=best)
        return evaluate_model(Settings.of(made), model, by_user=overrides)


def plan(
    config: ConfigLike,
    topology: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    num_slices: int = 1,
    price_per_chip_hour: float | None = None,
    goodput_of: str | os.PathLike | None = None,
    measured: str | os.PathLike | None = None,
    may_compile: bool = True,
) -> dict[str, Any]:
    """Estimate memory, communication, time and cost of a run on hardware you do not have.

        figures = vit_jax.plan("pretrain:ViT-L/16,imagenet21k", "v5e:4x4")
        figures["memory_bytes"]["fits"], figures["estimate"]["run"]["hours"]

    JAX then computes on the CPU, also later in this process.

    Args:
      config, overrides: as in `load_config`.
      topology: a TPU slice or GPUs: "v5e:4x4", "H100:64"; None: the CPU of `measured`.
      num_slices: TPU slices, joined by DCN.
      price_per_chip_hour: in any currency; None: no cost.
      goodput_of: a run on such machines, or a folder of runs; the hours are divided by its share of
        steps. None: input, evaluations and saves are left out.
      measured: certificate.json of `certify`, made on such chips; None: no measurement is used.
      may_compile: False: calculate in seconds, without a compiler.

    Returns:
      What the command prints with --format=json.

    Raises:
      InputError: a ValueError that names the key or the argument.
    """
    from vit_jax.insight.runs import read_goodput
    from vit_jax.planning.measured import read_certificate
    from vit_jax.planning.run_plan import find_target, plan_run
    from vit_jax.planning.targets import settle, start_planning

    found = None if topology is None else find_slices(topology, num_slices)
    certificate = None if measured is None else read_certificate(files.absolute(measured))
    target = find_target(found, num_slices, certificate, may_compile)
    asked = Settings.of(_load(config, overrides))
    goodput = None if goodput_of is None else read_goodput(goodput_of, "goodput_of")
    known = {"price_per_chip_hour": price_per_chip_hour, "goodput": goodput}
    start_planning(target)
    return plan_run(settle(asked, target), target, known, certificate)


def study(
    config: str | os.PathLike,
    workdir: epath.PathLike,
    overrides: Mapping[str, Any] | None = None,
    sweep: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a study, or continue it, and return its report.

        found = vit_jax.study("quickstart", "runs/sweep", sweep=["optimizer.peak_lr=1e-3,3e-3"])
        found["rows"], found["best"]

    Its runs are processes of their own, one after another.

    Args:
      config: as --config: the name of a shipped config or the path of a file, and its words.
      workdir: folder of the study and its runs.
      overrides: {key: value} for every run.
      sweep: "KEY=VALUE,VALUE", for a config that is no study: one run for each combination.

    Returns:
      The content of `workdir/study.json`; a run that failed has its error in "members".

    Raises:
      InputError: a ValueError that lists all faults; or the first run was rejected.
    """
    from vit_jax.job import exit_codes
    from vit_jax.run.setup.validation import as_pairs
    from vit_jax.studies.preparation import prepare_study
    from vit_jax.studies.running import Call, conduct_study

    name = os.fspath(config)
    call = Call(name, as_pairs(overrides), files.absolute(workdir), launcher=None, again=False)
    made = prepare_study(_load(name, overrides), call, sweep)
    if conduct_study(made, call) == exit_codes.INPUT_WRONG:
        raise InputError(f"{call.workdir}: the first run was rejected, as it says above")
    return json.loads((call.workdir / "study.json").read_text())


def compare(workdirs: str | os.PathLike | Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Compare runs by their configs and their last metrics.

        found = vit_jax.compare(["runs/a", "runs/b"])
        pandas.DataFrame(found["metrics"], index=found["runs"])

    Args:
      workdirs: of runs, which may still be training, and of studies, or folders that hold them,
        which stand for their runs.

    Returns:
      {"runs": their names, the best first, "config": {key in which they differ: its values},
      "metrics": {name: its last values}}, with a value for each run, None where it has none; as
      `report --format=json`.

    Raises:
      InputError: a ValueError that names each workdir that holds neither.
    """
    from vit_jax.insight import runs

    paths = [workdirs] if isinstance(workdirs, str | os.PathLike) else workdirs
    return runs.compare(runs.best_first(runs.read_all(paths)[0]))


def read_metrics(workdir: str | os.PathLike) -> dict[str, dict[int, float | None]]:
    """Read all that a run has logged and evaluated, while it trains too.

        loss = vit_jax.read_metrics("runs/a")["train/loss"]
        matplotlib.pyplot.plot(loss.keys(), loss.values())

    Returns:
      {metric: {step: value}} in the order of steps; None: the value was not finite. Metrics and
      their units: see metrics.jsonl in docs/reference/workdir.

    Raises:
      InputError: a ValueError, if no run has begun in `workdir`.
    """
    from vit_jax.checkpoints.history import read_values

    path = epath.Path(workdir)
    if not (path / "config.json").exists():
        raise InputError(f"{path}: holds no run; needed: the --workdir of one")
    return read_values(path, sys.maxsize)


def figures(
    source: epath.PathLike | Pretrained,
    output: epath.PathLike,
    images: Any = None,
    *,
    names: Sequence[str] = FIGURE_NAMES,
    compare_to: str | None = None,
    examples: int = 128,
    shown: int = 3,
    batch_size: int = 32,
    progress: bool = False,
) -> dict[str, Any]:
    """Draw what a model learned, each figure with its numbers beside it.

        vit_jax.figures("runs/mine", "figures", "IMAGES", names=["filters", "distance.pdf"])

    Args:
      source: a source of `load_pretrained`, or a model from `read_pretrained`.
      output: folder to write to.
      images: as in `predict`, or a `data.Source`; None: only figures that need none.
      names: of the figures, any of `insight.figure_names.FILE_NAMES`; PNGs, unless the name ends in
        .pdf or .svg.
      compare_to: a second source, for "similarity" between both.
      examples: images to average over.
      shown: images to draw maps of.
      batch_size: images at once, on all devices.
      progress: show a line of progress.

    Returns:
      {"figures": {name: files}, "left_out": {name: the reason}}.

    Raises:
      InputError: a ValueError that names the argument.
    """
    from vit_jax.data import Source
    from vit_jax.data.images.given import open_images
    from vit_jax.insight.figures import draw_figures
    from vit_jax.transfer import read_pretrained

    faults = Faults()
    for name in names:
        faults.need_known("names", name, FILE_NAMES)
    collect_faults(faults)
    pretrained = read_pretrained(source)
    if not isinstance(images, Source | None):
        images = open_images(images, pretrained.spec.reading)
    output = files.absolute(output)
    files.check_folder(output, "output")
    return draw_figures(
        pretrained, output, images, names, compare_to=compare_to, examples=examples, shown=shown,
        batch_size=batch_size, progress=progress,
    )  # fmt: skip


def _load(
    config: ConfigLike, overrides: Mapping[str, Any] | None, required: Sequence[str] = REQUIRED
) -> ConfigDict:
    """`load_config`, and a check of the whole config."""
    from vit_jax.run.setup.validation import load_config, validate

    loaded = load_config(config, overrides)
    validate(loaded, [], "config", required)
    return loaded
