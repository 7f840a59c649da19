"""Reads models from the workdirs of this project."""

import json
import logging
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.history import read_values
from vit_jax.config import SOURCES, Evaluator, Settings
from vit_jax.config.metric_names import find_best, find_direction
from vit_jax.config.sections import Data
from vit_jax.config.stored import read_config
from vit_jax.data.captions import kept_tokenizer, read_kept
from vit_jax.data.device_ops import per_channel
from vit_jax.data.division import read_division
from vit_jax.data.ops import HostOp, full_size, parse_ops
from vit_jax.data.preprocessing import rule_of
from vit_jax.models import model_of
from vit_jax.models.captioner import CaptionSide
from vit_jax.models.contract import about, with_known
from vit_jax.models.zero_shot import TextSide
from vit_jax.transfer.fit import merge_adapters, merge_head_norm, unstack_layers
from vit_jax.transfer.pretrained import Cut, Pretrained, Spec, class_names_of, share_of, with_resize
from vit_jax.transfer.shapes import abstract_model_state, abstract_params
from vit_jax.transfer.source import Source

logger = logging.getLogger("vit_jax")

_CROPS = ("central_crop", "central_crop(pad=True)", "torchvision_crop")  # of a `Cut`
NO_CHOICE = "init_from='{}': keeps no running average; leave out the choice of weights"


def recognises(source: Source) -> bool:
    """Whether it is the workdir of a run, or a checkpoint in one: WORKDIR/checkpoints/STEP."""
    path = workdir_of(source.path) if source.path.exists() else source.path
    return (path / "config.json").exists() and (path / "checkpoints").exists()


def workdir_of(path: epath.Path) -> epath.Path:
    """The workdir of a run, or of one of its steps, WORKDIR/checkpoints/STEP."""
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    return path.parent.parent if is_step else path


def read(source: Source) -> Pretrained:
    """Read the newest valid checkpoint of a workdir, its best one, or the one that the source is.

    LoRA adapters are merged into the kernels.

    Raises:
      InputError: if there is no checkpoint, it does not verify, `averaged` is given for a run
        without a running average, or `best` for one that kept none, or for a step.
    """
    path, averaged = workdir_of(source.path), source.averaged
    config = read_config(path)
    if source.best and path != source.path:
        raise InputError("is one step of a run; leave out the step, or the choice of the best one")
    settings = Settings.of(config)
    chosen = source.path
    if source.best:
        best = best_step(path, settings.checkpoint.keep_best, settings.evals)
        chosen = path / "checkpoints" / str(best)
    averages = settings.has_average
    if averaged is not None and not averages:
        raise InputError(NO_CHOICE.format(path))
    weights = "params" if averaged is False or not averages else "ema"
    of_texts = settings.objective.learns_texts
    model = model_of(settings.model, settings.data, None if of_texts else settings.data.num_classes)
    step, restored, model_state = _restore_model(chosen, path, model, weights, source.lazy)
    run = {
        "step": step,
        "weights": "running average" if weights == "ema" else "as trained",
        "config": config.to_dict(),
        "results": _results(path, step, config.evals, averaged is False),
    }
    plain, params = merge_adapters(with_known(model, scan=False), tree.flatten_names(restored))
    plain, params, state = merge_head_norm(plain, params, tree.flatten_names(model_state))
    evals = [*settings.evals.values()]
    spec = _spec_of(settings.data, evals, settings.loss.name, model, path)
    division = read_division(path, settings.data)
    own = chosen, path, (settings.objective, settings.data), model, weights
    texts = partial(_read_texts, *own) if of_texts else None
    captions = partial(_read_captions, *own) if settings.objective.writes_captions else None
    return Pretrained(str(chosen), plain, params, spec, run, state, division, texts, captions)


def _read_texts(
    source: epath.Path, workdir: epath.Path, of: tuple[Any, Data], model: nn.Module, weights: str
) -> TextSide:
    """The text side in a checkpoint of a run that learned texts.

    `of`: the run's objective and data. For the other arguments see `_restore_model`.
    """
    objective, data = of
    tokenizer = read_kept(workdir, data)
    matcher = objective.make_matcher(model, tokenizer.facts)
    own = _restore_own(source, workdir, weights, matcher)
    if matcher.text.scan:
        matcher = matcher.clone(text=matcher.text.clone(scan=False))
        own |= {"text": unstack_layers(own["text"])}
    tower, own = merge_adapters(matcher.text, tree.flatten_names(own))
    paths = kept_tokenizer(workdir, data).paths
    return TextSide(matcher.clone(text=tower), own, lambda: tokenizer, paths)


def _read_captions(
    source: epath.Path, workdir: epath.Path, of: tuple[Any, Data], model: nn.Module, weights: str
) -> CaptionSide:
    """The part of a run that writes captions; it takes the arguments of `_read_texts`."""
    objective, data = of
    tokenizer = read_kept(workdir, data)
    captioner = objective.make_captioner(model, tokenizer.facts)
    own = _restore_own(source, workdir, weights, captioner, "decoder")
    if captioner.scan:
        captioner, own = captioner.clone(scan=False), unstack_layers(own)
    paths = kept_tokenizer(workdir, data).paths
    return CaptionSide(captioner, tree.flatten_names(own), lambda: tokenizer, paths)


def _restore_own(
    source: epath.Path, workdir: epath.Path, weights: str, module: Any, name: str | None = None
) -> Any:
    """The parameters of a module of the objective, or of its part of that name; not unstacked."""
    params = jax.eval_shape(module.init, jax.random.key(0), *module.example_inputs)["params"]
    target = params if name is None else {name: params}
    _, found = _restore(source, workdir, {weights: {tree.OBJECTIVE: target}})
    own = found[weights][tree.OBJECTIVE]
    return own if name is None else own[name]


def best_step(path: epath.Path, metric: str | None, evals: Mapping[str, Evaluator]) -> int:
    """The best step by `metric`, `checkpoint.keep_best`, of the run in the workdir `path`.

    Raises:
      InputError: the run does not keep its best step, or has not evaluated a saved step.
    """
    where = f"{path}: the run has kept no best step"
    if metric is None:
        raise InputError(
            f"{where}, as checkpoint.keep_best is None; leave out the choice of the best step, or "
            "train with --config.checkpoint.keep_best=METRIC, such as val/top1"
        )
    saved = restore.saved_steps(path / "checkpoints")
    found = read_values(path, max(saved, default=0), is_asked=metric.__eq__).get(metric, {})
    values = {step: value for step, value in found.items() if step in saved}
    step, _ = find_best(values, find_direction(evals, metric))
    if step is None:
        raise InputError(f"{where} by {metric} yet; wait, or leave out the choice of the best step")
    logger.info("%s: step %d is the best by %s, %.5g", path, step, metric, values[step])
    return step


def _restore_model(
    source: epath.Path, workdir: epath.Path, model: nn.Module, weights: str, lazy: bool
) -> tuple[int, tree.Params, tree.ModelState]:
    """(step, parameters, model state) of `source`; layers are unrolled.

    `weights`: "params" or "ema". `lazy`: see `read_pretrained`.
    """
    state = {"params": "model_state", "ema": "ema_model_state"}[weights]
    shapes = {weights: abstract_params(model), state: abstract_model_state(model)}
    target = {field: tree.unflatten_names(leaves) for field, leaves in shapes.items() if leaves}
    step, found = _restore(source, workdir, target, lazy)
    params = unstack_layers(found[weights]) if about(model).stacks_layers else found[weights]
    return step, params, found.get(state, {})


def _restore(
    source: epath.Path, workdir: epath.Path, shapes: Any, lazy: bool = False
) -> tuple[int, Any]:
    """(step, the arrays of these `shapes`) of `source`.

    It is the newest valid checkpoint of `workdir`, or one of its steps. With `lazy`, the processes
    of a job verify it together, each a part of it, and keep nothing.

    Raises:
      InputError: there is no checkpoint, or it does not verify.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    share = restore.split_over_all if lazy and jax.process_count() > 1 else lambda leaf: device
    target = jax.tree.map(lambda leaf: leaf.update(sharding=share(leaf)), shapes)
    how: dict[str, Any] = {"partial": True, "keep": not lazy}
    if source == workdir:
        restored = restore.restore_newest(workdir / "checkpoints", target, **how)
    else:
        restored = restore.restore_step(source, target, **how)
    if restored is None:
        raise InputError(
            f"init_from={str(workdir)!r}: has no checkpoint yet; wait for the run's first one"
        )
    step = restored[1]["step"]
    if lazy:
        step_dir = workdir / "checkpoints" / str(step) if source == workdir else source
        leaves = restore.open_leaves(step_dir, tree.flatten_names(shapes))
        return step, tree.unflatten_names(leaves)
    return step, jax.tree.map(np.asarray, restored[0])


def _spec_of(
    data: Data, evals: Sequence[Evaluator], loss: str, model: nn.Module, workdir: epath.Path
) -> Spec:
    """The facts about its images in the run's config and class names."""
    ops = _evaluated_by(data, evals)
    return Spec(
        image_size=model.image_size,
        resize="antialiased",
        mean=per_channel(data.mean, data.channels),
        std=per_channel(data.std, data.channels),
        class_names=class_names_of(read_class_names(workdir), model.num_classes, str(workdir)),
        cut=_cut(ops, model.image_size or data.image_size),
        ops=ops,
        loss=loss,
        exif=data.exif,
        pixel_range=data.pixel_range,
        decoding=data.decoding,
        channels=data.channels,
        rule=rule_of(data),
    )


def read_class_names(path: epath.Path) -> Any:
    """The names of the classes of the run in `path`, by label; None if its data name none.

    Raises:
      InputError: the file is missing or damaged.
    """
    named = path / "classes.json"
    try:
        return json.loads(named.read_text())
    except (OSError, ValueError) as e:  # ValueError also for text that is not UTF-8
        raise InputError(f"{named}: not readable ({e}); copy it from the run") from None


def _evaluated_by(data: Data, evals: Sequence[Evaluator]) -> str:
    """`Spec.ops`: the ops of the evaluator that is closest to the training; "decode" without one.

    Evaluators of the model's classes come first, then of the run's own data, then evaluators that
    change images. Crops alone lose `decode`, as in `Spec.ops`, unless the images are files of any
    size, which the run crops without resizing.
    """

    def data_of(entry: Evaluator) -> tuple[str, str | None]:
        return entry.data_name or data.name, entry.data_dir or data.data_dir

    def distance(entry: Evaluator) -> tuple[bool, bool, bool]:
        is_other = data_of(entry) != (data.name, data.data_dir)
        return entry.learns_classes, is_other, not entry.ops

    entry = min(evals, key=distance, default=None)
    if entry is None or not entry.ops:
        return "decode"
    first, _, crops = entry.ops.partition("|")
    of_files = SOURCES.find(data_of(entry)[0]).is_own
    if of_files or first.strip() != "decode" or with_resize(entry.ops) == entry.ops:
        return entry.ops
    return crops.strip() or "decode"


def _cut(ops: str, image_size: tuple[int, int]) -> Cut | None:
    """`Spec.cut`; None for the whole image, or if a `Cut` cannot describe the ops."""
    steps = [op for op in parse_ops(ops, image_size)[0] if full_size(op.name) != "decode"]
    crops = steps[-1:] if steps and steps[-1].text in _CROPS else []
    resizes = steps[: len(steps) - len(crops)]
    if crops and not resizes:
        return Cut(mode="center", library=_library(crops))
    names = [op.name for op in resizes]
    if names != ["torchvision_resize"] and not (crops and names in (["resize"], ["resize_small"])):
        return None
    (resize,) = resizes
    share = min(max(map(share_of, image_size, resize.gives or image_size)), 1.0)
    side = getattr(resize, "size", None)
    of_shorter_side = resize.name == "torchvision_resize" and isinstance(side, int)
    covers = getattr(resize, "cover", resize.name == "resize_small") or of_shorter_side
    mode, interpolation = "center" if covers else "squash", getattr(resize, "filter", "bilinear")
    return Cut(share, mode, interpolation, _library(crops))


def _library(crops: Sequence[HostOp]) -> str:
    """`Cut.library` of the crop in `crops`, if there is one."""
    return "vit_jax" if crops and full_size(crops[0].name) == "central_crop" else "timm"


def _results(
    path: epath.Path, step: int, evals: Container[str], raw: bool
) -> dict[str, dict[str, Any]]:
    """{metric: {"value", "step"}}: the newest result of each metric up to `step`.

    `raw` selects the metrics of the raw weights of a run with a running average.
    """

    def is_asked(name: str) -> bool:
        return name.endswith("_raw") == raw and name.partition("/")[0] in evals

    return {
        name.removesuffix("_raw"): {"value": values[last], "step": last}
        for name, values in read_values(path, step, is_asked=is_asked).items()
        for last in [*values][-1:]
    }
