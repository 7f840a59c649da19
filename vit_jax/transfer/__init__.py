"""Pretrained weights in foreign formats, read and written. Foreign names appear only here.

Each kind of source has one file and one entry in FORMATS.
"""

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import tree
from vit_jax.config import image_hw
from vit_jax.data.division import Division, hashes_from_bytes, side_file
from vit_jax.errors import InputError, collect_faults, nearest
from vit_jax.files import absolute
from vit_jax.models.contract import about, field_names, with_known
from vit_jax.models.fields import check_fields
from vit_jax.models.forms import PLAIN, unconstrained
from vit_jax.transfer import (
    fit,
    huggingface,
    npz,
    safetensors,
    t2t,
    timm,
    timm_config,
    timm_efficientnet,
    workdir,
)
from vit_jax.transfer.merge import merge_adapters, merge_head_norm
from vit_jax.transfer.model_zoo import (
    by_address,
    forget,
    is_on_hub,
    locate,
    loss_by_file_name,
)
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

logger = logging.getLogger("vit_jax")


_SHOWN = 8  # maximum number of a folder's sources in an error message


class Writer(NamedTuple):
    """The functions that write a format.

    check: model -> the reasons why the format cannot hold it.
    write: (path, pretrained) -> the names of the written files.
    library_ops: spec -> the preprocessing string equivalent to what the format's own library does
      with the written files; None if the library does not read preprocessing from them.
    """

    check: Callable[[nn.Module], list[str]]
    write: Callable[[epath.Path, Pretrained], list[str]]
    library_ops: Callable[[Spec], str] | None = None


def _read_safetensors(path: epath.Path) -> Pretrained:
    path = safetensors.entrance(path)
    stored = safetensors.read_stored(path)
    counters = [name for name in stored if name.endswith(timm_efficientnet.COUNTER)]
    for name in counters if timm_efficientnet.knows(stored) else ():
        del stored[name]
    for naming in (huggingface, timm, timm_efficientnet, t2t):
        if naming.knows(stored):
            return naming.read(path, safetensors.as_arrays(stored))
    names = ", ".join(sorted(stored)[:5])
    raise InputError(
        f"init_from={str(path)!r}: its arrays have neither the names of Hugging Face's nor those "
        f"of timm's Vision Transformers or EfficientNets, nor those of T2T-ViT's authors: {names}, "
        "..."
    )


# (function that recognises a path of the format, reader); the first format that matches is used.
FORMATS: dict[str, tuple[Callable[[epath.Path], bool], Callable[[epath.Path], Pretrained]]] = {
    "workdir": (workdir.recognises, workdir.read),
    "npz": (npz.recognises, npz.read),
    "safetensors": (safetensors.recognises, _read_safetensors),
}

WRITERS = {
    "npz": Writer(partial(npz.check, variant="first"), partial(npz.write, variant="first")),
    "npz_v2": Writer(partial(npz.check, variant="later"), partial(npz.write, variant="later")),
    "hf": Writer(huggingface.check, huggingface.write, huggingface.library_ops),
    "timm": Writer(timm.check, timm.write, timm_config.library_ops),
    "t2t": Writer(t2t.check, t2t.write),
}


def read_pretrained(source: str | os.PathLike, *, averaged: bool | None = None) -> Pretrained:
    """Read the model and parameters of `source`.

    Args:
      source: a workdir of this project (its newest valid checkpoint), or WORKDIR/checkpoints/STEP;
        a published `.npz`; a `.safetensors` file, or a folder with one, in the names of Hugging
        Face, timm or T2T-ViT's authors; the address of such a file; "hf:ORGANISATION/NAME" or
        "timm:NAME" on the Hugging Face Hub, with "@REVISION" if it is not the newest; or a name in
        PUBLISHED, e.g. "ViT-B/16@augreg".
      averaged: for a workdir whose run keeps a running average of the parameters: True takes the
        average, False the raw parameters, None the average if there is one.

    Raises:
      InputError: if the source does not exist or cannot be read.
    """
    path = locate(source)
    read = next((read for recognises, read in FORMATS.values() if recognises(path)), None)
    if read is None:
        raise InputError(
            f"init_from={str(source)!r}: not a source of a known format; known: a workdir (with "
            "config.json and checkpoints/), a .npz file, a .safetensors file or a folder with "
            f"model.safetensors{_say_sources_inside(path)}"
        )
    if read is workdir.read:
        read = partial(workdir.read, averaged=averaged)
    elif averaged is not None:
        raise InputError(workdir.NO_CHOICE.format(source))
    try:
        pretrained = read(path)
    except InputError as e:
        forget(path)
        if str(path) in str(e):
            raise
        raise InputError(f"init_from={str(path)!r}: {e}") from None
    if (held_out := side_file(path)).exists():
        try:
            hashes = hashes_from_bytes(held_out.read_bytes())
        except (OSError, EOFError, ValueError) as e:
            raise InputError(
                f"init_from={str(path)!r}: {held_out.name} cannot be read ({e}); copy it again"
            ) from None
        pretrained = pretrained._replace(division=Division(hashes=hashes))
    known, found = by_address(source), pretrained.model.num_classes
    if known is not None:
        if found != known.num_classes:
            raise InputError(
                f"init_from={source!r}: has {found} classes, but was published with "
                f"{known.num_classes}; fetch it again"
            )
        spec = pretrained.spec._replace(loss=known.loss)
        if known.value_range is not None:
            black, white = known.value_range
            mean, std = -black / (white - black), 1 / (white - black)
            spec = spec._replace(mean=(mean,) * 3, std=(std,) * 3)
        pretrained = pretrained._replace(spec=spec)
    elif pretrained.spec.loss is None:  # perhaps a copy of a published file
        loss = loss_by_file_name(path.name, found)
        pretrained = pretrained._replace(spec=pretrained.spec._replace(loss=loss))
    fetched = known is not None or "://" in str(source) or is_on_hub(source)
    return pretrained._replace(source=str(source)) if fetched else pretrained


def check_workdir(path: str | os.PathLike) -> None:
    """Raise InputError, for the flag --workdir, if `path` is not the workdir of a run."""
    path = absolute(path)
    if not workdir.recognises(path):
        raise InputError(
            f"--workdir={path}: not the workdir of a run, with config.json and checkpoints/"
            f"{_say_sources_inside(path)}"
        )


def _say_sources_inside(folder: epath.Path) -> str:
    """A hint that lists the sources inside a folder that is not a source; "" if there are none."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        sources = (p.name for p in entries if any(knows(p) for knows, _ in FORMATS.values()))
        inside = list(itertools.islice(sources, _SHOWN + 1))  # on a store each costs requests
    except OSError:
        return ""
    more = " and more" if len(inside) > _SHOWN else ""
    return f"; give one of those in it: {', '.join(inside[:_SHOWN])}{more}" if inside else ""


def pretrained_spec(source: str | os.PathLike) -> Spec:
    """The spec of `source`: image size, value range, preprocessing, loss, class names, conventions.

    Raises:
      InputError: as `read_pretrained`.
    """
    return read_pretrained(source).spec


def save_pretrained(
    path: str | os.PathLike,
    model: nn.Module,
    variables: Mapping[str, Any],
    format: str,
    spec: Spec | None = None,
) -> list[str]:
    """Write a model in a foreign format; return the names of the files.

        vit_jax.save_pretrained("exported", model, variables, format="hf")

    Args:
      path: a file for npz and npz_v2, a folder for hf, either for timm and t2t.
      model: the model; its layers may be scanned.
      variables: the model's variables, with "params" and, if it has them, "batch_stats" or
        "constants".
      format: one of WRITERS.
      spec: value range, class names, ...; None: pixels in [-1, 1], no names.

    Raises:
      InputError: naming what the format cannot hold and the remedy; nothing is written.
    """
    if format not in WRITERS:
        hint = nearest(format, list(WRITERS))
        if format == "stablehlo":
            hint = "a program, which python -m vit_jax.main export writes"
        raise InputError(f"format={format!r}: {hint}")
    check_holds(format, model, "format=")
    check_variables(model, variables)
    collections = jax.tree.map(np.asarray, dict(variables))
    params = collections.pop("params")
    if about(model).stacks_layers:
        params = fit.unstack_layers(params)
    plain = with_known(model, scan=False, remat="none", constrain=unconstrained, forms=PLAIN)
    plain, merged = merge_adapters(plain, tree.flatten_names(params))
    spec = spec or Spec(plain.image_size, "antialiased")
    plain, merged, model_state = merge_head_norm(plain, merged, tree.flatten_names(collections))
    pretrained = Pretrained(str(path), plain, merged, spec, model_state=model_state)
    return WRITERS[format].write(absolute(path), pretrained)


def check_variables(model: nn.Module, variables: Mapping[str, Any]) -> None:
    """Raise InputError if `variables` lack a collection of `model`, such as "batch_stats"."""
    needed = {name.partition("/")[0] for name in abstract_model_state(model)} | {"params"}
    missing = sorted(needed - variables.keys())
    if missing:
        raise InputError(
            f"variables: lack {', '.join(missing)}; give all that model.init or load_pretrained "
            f"returned ({', '.join(sorted(needed))})"
        )


def check_holds(format: str, model: nn.Module, key: str) -> None:
    """Raise InputError if `format`, one of WRITERS, cannot hold `model`; names those that can."""
    channels = about(model).channels
    of_channels = [] if channels == 3 else [f"channels={channels}: files hold models of 3 channels"]
    others = [name for name, writer in WRITERS.items() if not writer.check(model)]
    # stablehlo, a program, holds every model.
    remedy = " or ".join([*([] if of_channels else others), "stablehlo"])
    faults = [*WRITERS[format].check(model), *of_channels]
    collect_faults(faults, f"{key}{format} cannot hold this model; export it as {remedy}")


def load_pretrained(
    source: str | os.PathLike,
    num_classes: int | None = None,
    image_size: int | Sequence[int] | None = None,
    *,
    resize: str | None = None,
    **fields: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a pretrained model; its architecture is inferred from the source.

        model, variables = vit_jax.load_pretrained("ViT-B_16.npz", image_size=(384, 256))
        logits = model.apply(variables, images)  # (B, 384, 256, 3), in the model's value range

    Args:
      source: see `read_pretrained`.
      num_classes: replaces the whole head by a zero-initialised linear one for that many classes;
        None keeps the head.
      image_size: resamples the position embedding to that size; None keeps the source's size. If
        the source has no size (fixed positions), None makes a model for images of any size.
      resize: the resampling convention, one of CONVENTIONS; None uses the source library's.
      **fields: fields of the model's module, e.g. `scan`, `remat`, `dtype`, `dropout`.

    Raises:
      InputError: one error naming everything that does not fit.
    """
    check_convention(resize, "resize")
    if fields.get("lora_rank") is not None:
        raise InputError(
            f"lora_rank={fields['lora_rank']}: only training adds adapters "
            "(--config.model.lora_rank), and a run is loaded with them merged; leave it out"
        )
    pretrained = read_pretrained(source)
    family, changes = type(pretrained.model), dict(fields)
    if num_classes is not None:
        if fields.get("hidden_head"):
            raise InputError(
                "hidden_head=True: num_classes replaces the whole head by a linear one of zeros, "
                "and zeros pass no gradient back to a hidden layer; leave it out"
            )
        changes = {"num_classes": num_classes} | changes
        if "hidden_head" in field_names(family):
            changes["hidden_head"] = False
    if image_size is not None:
        changes["image_size"] = image_size
    model = pretrained.model.clone(**check_fields(family, changes, str(source)))
    named = fit.fit(pretrained, model, reset_head=num_classes is not None, resize=resize)
    if num_classes is not None:
        named |= {
            name: jnp.zeros(leaf.shape)
            for name, leaf in abstract_params(model).items()
            if fit.is_of_head(name)
        }
    model_state = tree.unflatten_names(fit.fit_model_state(pretrained, model, resize))
    return model, {"params": _as_scanned(named, model, pretrained.source), **model_state}


def with_image_size(
    pretrained: Pretrained, image_size: int | Sequence[int], resize: str | None = None
) -> Pretrained:
    """`pretrained` for another image size; `resize`: see `load_pretrained`.

    The results of a run are left out, because they belong to its own size.

    Raises:
      InputError: if the patch size does not divide the image size.
    """
    check_convention(resize, "resize")
    size = image_hw(image_size)
    model = pretrained.model.clone(image_size=size)
    params = fit.fit(pretrained, model, reset_head=False, resize=resize)
    spec, run = pretrained.spec.at(size), pretrained.run
    if run is not None and size != pretrained.spec.image_size:
        run = run | {"results": {}}
    return pretrained._replace(model=model, params=params, spec=spec, run=run)


def init_params(
    pretrained: Pretrained, model: nn.Module, resize: str | None = None, *, keep_head: bool = False
) -> dict[str, Any]:
    """{leaf name in `model`: array} for all parameters that `model` takes from the source.

    The whole head with its hidden layer is left out and initialised anew (the linear layer with
    zeros), even if the number of classes is the same: the classes may differ, and the paper always
    replaces it. `keep_head` takes it from the source. `resize`: see `load_pretrained`.

    Raises:
      InputError: one error naming everything else that does not fit.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2, for the head.
    """
    fit.check_architecture(pretrained, model)
    named = fit.fit(pretrained, model, reset_head=not keep_head, resize=resize)
    return tree.flatten_names(_as_scanned(named, model, pretrained.source))


def init_model_state(
    pretrained: Pretrained, model: nn.Module, resize: str | None = None
) -> dict[str, Any]:
    """{name: array} for the model state that `model` takes from the source, after `init_params`.

    For example "batch_stats/trunk/norm_root/mean"; empty for a model without model state. `resize`:
    see `load_pretrained`.

    Raises:
      InputError: one error naming everything that does not fit.
    """
    return fit.fit_model_state(pretrained, model, resize)


def _as_scanned(named: dict[str, Any], model: nn.Module, source: str) -> dict[str, Any]:
    """Convert unrolled parameters to the model's form: stacked if it scans its layers."""
    params = tree.unflatten_names(named)
    if not about(model).stacks_layers:
        return params
    logger.info("%s: layers stacked for scanning", source)
    return fit.stack_layers(params)
