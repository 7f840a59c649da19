"""Models from the workdirs of this project."""

import json
import re
from collections.abc import Container

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import checkpoint, tree
from vit_jax.config import image_hw, model_fields
from vit_jax.config_text import read_config
from vit_jax.errors import InputError
from vit_jax.models import create_model, with_known
from vit_jax.transfer.rules import (
    Pretrained,
    Spec,
    abstract_params,
    class_names_of,
    unstack_layers,
)


def recognises(path: epath.Path) -> bool:
    """Whether `path` is the workdir of a run, or a checkpoint in one: WORKDIR/checkpoints/STEP."""
    path = _workdir_of(path) if path.exists() else path
    return (path / "config.json").exists() and (path / "checkpoints").exists()


def _workdir_of(path: epath.Path) -> epath.Path:
    is_step = path.parent.name == "checkpoints" and path.name.isdigit()
    return path.parent.parent if is_step else path


def read(path: epath.Path, *, averaged: bool = True) -> Pretrained:
    """The newest valid checkpoint of the workdir `path`, or the checkpoint that `path` is itself.

    Of the running average of the parameters where there is one, unless `averaged` is False.

    Raises:
      InputError: if there is none, or it does not verify.
    """
    source, path = path, _workdir_of(path)
    config = read_config(path)
    model = create_model(
        config.model.name,
        config.data.num_classes,
        image_hw(config.data.image_size),
        **model_fields(config),
    )
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        for name, leaf in abstract_params(model).items()
    }
    weights = "ema" if averaged and config.optimizer.ema_decay is not None else "params"
    target = {weights: tree.unflatten_names(params)}
    if source == path:
        restored = checkpoint.restore_newest(path / "checkpoints", target, partial=True)
    else:
        restored = checkpoint.restore_step(source, target, partial=True)
    if restored is None:
        raise InputError(f"init_from={str(path)!r}: no checkpoint there yet")
    step = restored[1]["step"]
    params = jax.tree.map(np.asarray, restored[0][weights])
    if model.scan:
        params = unstack_layers(params)
    named = path / "classes.json"
    names = json.loads(named.read_text()) if named.exists() else None
    spec = Spec(
        image_size=model.image_size,
        resize="antialiased",
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        class_names=class_names_of(names, model.num_classes, str(path)),
        crop=_crop(config),
    )
    run = {
        "step": step,
        "weights": "running average" if weights == "ema" else "as trained",
        "config": config.to_dict(),
        "results": _results(path, step, config.evals),
    }
    plain = with_known(model, scan=False)
    return Pretrained(str(source), plain, tree.flatten_names(params), spec, run)


def _crop(config: ConfigDict) -> float | None:
    """The share of an image that the run's first classification evaluator looks at; None: all."""
    ops = next((e.ops for e in config.evals.values() if e.type == "classification"), "")
    if "central_crop" not in ops:
        return None
    resized = re.search(r"resize_small\((\d+)", ops)
    side = min(image_hw(config.data.image_size))
    return min(side / int(resized[1]), 1.0) if resized else 1.0


def _results(path: epath.Path, step: int, evals: Container[str]) -> dict[str, float]:
    """The newest value up to `step` of each metric of the evaluators."""
    rows = path / "metrics.jsonl"
    found = {}
    for line in rows.read_text().splitlines() if rows.exists() else []:
        row = json.loads(line)
        if row["step"] <= step:
            found |= {name: v for name, v in row.items() if name.partition("/")[0] in evals}
    return found
