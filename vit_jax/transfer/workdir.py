"""Models from the workdirs of this project."""

import json
import re
from collections.abc import Container
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import checkpoint, tree
from vit_jax.config import image_hw, model_fields
from vit_jax.config_text import read_config
from vit_jax.data.host_ops import TAKES_ENCODED
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
    has_average = config.optimizer.ema_decay is not None
    weights = "ema" if averaged and has_average else "params"
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
    entry = next((e for e in config.evals.values() if e.type == "classification"), None)
    ops = None if entry is None else entry.ops or None
    spec = Spec(
        image_size=model.image_size,
        resize="antialiased",
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        class_names=class_names_of(_read_names(path), model.num_classes, str(path)),
        crop=_crop(ops or "", model.image_size or image_hw(config.data.image_size)),
        ops=_ops_for_files(ops or ""),
    )
    run = {
        "step": step,
        "weights": "running average" if weights == "ema" else "as trained",
        "has_average": has_average,
        "config": config.to_dict(),
        "results": _results(path, step, config.evals, has_average and not averaged),
    }
    plain = with_known(model, scan=False)
    return Pretrained(str(source), plain, tree.flatten_names(params), spec, run)


def _read_names(path: epath.Path) -> Any:
    named = path / "classes.json"
    try:
        return json.loads(named.read_text()) if named.exists() else None
    except ValueError as e:  # text that is not UTF-8 is a ValueError too
        raise InputError(f"{named}: not readable as JSON ({e}); it lists the classes") from None


def _ops_for_files(ops: str) -> str | None:
    """The preprocessing string `ops` of a run for files of any size, which its data need not be.

    None where it does not bring images to size.
    """
    if not re.search("resize|crop", ops):
        return None
    first = ops.partition("|")[0].partition("(")[0].strip()
    return ops if first in TAKES_ENCODED else f"decode|{ops}"


def _crop(ops: str, image_size: tuple[int, int]) -> float | None:
    """See `Spec`: as near as one number says what `ops` do; None: the whole image."""
    if "central_crop" not in ops:
        return None
    resized = re.search(r"resize(_small)?\((size=)?\(?(?P<height>\d+)(\s*,\s*(?P<width>\d+))?", ops)
    if resized is None:
        return 1.0
    height, width = (int(resized[side] or resized["height"]) for side in ("height", "width"))
    return min(max(image_size[0] / height, image_size[1] / width), 1.0)


def _results(
    path: epath.Path, step: int, evals: Container[str], raw: bool
) -> dict[str, dict[str, Any]]:
    """{metric: {"value", "step"}}: the newest of each evaluator up to `step`.

    `raw`: of the weights beside their running average, which have metrics of their own.
    """
    rows = path / "metrics.jsonl"
    found = {}
    for line in rows.read_text().splitlines() if rows.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half a line, as a process that is killed leaves
        for name, value in row.items():
            of_these = name.endswith("_raw") == raw and name.partition("/")[0] in evals
            if of_these and row["step"] <= step:
                found[name.removesuffix("_raw")] = {"value": value, "step": row["step"]}
    return found
