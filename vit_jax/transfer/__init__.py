"""Pretrained weights in foreign formats, read and written. Foreign names appear only here.

Each kind of source has one file and one entry in FORMATS.
"""

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

from vit_jax.base import tree
from vit_jax.base.addresses import hide
from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.base.files import absolute
from vit_jax.base.lazy import stack
from vit_jax.config import image_hw
from vit_jax.data.division import Division, hashes_from_bytes, side_file
from vit_jax.models.contract import about, field_names, for_one_size, with_known
from vit_jax.models.fields import check_fields
from vit_jax.transfer import (
    families,
    fit,
    huggingface,
    huggingface_images,
    npz,
    open_clip,
    runtimes,
    t2t,
    timm,
    timm_config,
    workdir,
)
from vit_jax.transfer.model_zoo import by_address, forget, is_fetched, locate, loss_by_file_name
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.resample import check_convention
from vit_jax.transfer.shapes import abstract_model_state, abstract_params
from vit_jax.transfer.source import Source, is_distributed

logger = logging.getLogger("vit_jax")


Read = Callable[[Source], Pretrained]
Write = Callable[..., list[str]]


def _holds_all(model: nn.Module) -> list[str]:
    return []


class Format(NamedTuple):
    """A format of weights; what is None, it cannot do.

    recognises: whether a source has this format.
    read: source -> its model and weights.
    check: model -> the reasons why the format cannot hold it; by default it holds every model.
    write: (path, pretrained) -> the names of the written files; of a format that writes folders,
      with the `max_shard_size` of `write_tensors`.
    suffixes: ends of the names that are written; "" is a folder. None: any name.
    library_ops: spec -> the preprocessing string equivalent to what the format's own library does
      with the written files; None if the library does not read preprocessing from them.
    precisions: those in which a runtime computes the format, a program; (): it holds weights.
    of_pairs: whether it holds both towers of a model of images and texts; others hold the image
      tower.
    keeps_shape: whether it can hold a model of pictures in their own shape; others hold one of
      images of one size.
    """

    recognises: Callable[[Source], bool] | None = None
    read: Read | None = None
    check: Callable[[nn.Module], list[str]] = _holds_all
    write: Write | None = None
    suffixes: tuple[str, ...] | None = None
    library_ops: Callable[[Spec], str] | None = None
    precisions: Sequence[str] = ()
    of_pairs: bool = False
    keeps_shape: bool = False


def _of(
    file: Any, **fixed: Any
) -> tuple[Callable[[Source], bool], Read, Callable[[nn.Module], list[str]], Write]:
    """The functions of a format's file, with the arguments `fixed`."""
    recognises, read = partial(file.recognises, **fixed), partial(file.read, **fixed)
    return recognises, read, partial(file.check, **fixed), partial(file.write, **fixed)


# A source is read by the first format that recognises it.
FORMATS = {
    "workdir": Format(workdir.recognises, workdir.read),
    "npz": Format(*_of(npz, variant=npz.FIRST), (".npz",)),
    "npz_v2": Format(*_of(npz, variant=npz.LATER), (".npz",)),
    "hf": Format(*_of(huggingface), ("",), huggingface_images.library_ops, keeps_shape=True),
    "hf_pair": Format(
        check=huggingface.check_pair,
        write=huggingface.write_pair,
        suffixes=("",),
        library_ops=huggingface_images.library_ops,
        of_pairs=True,
    ),
    "open_clip": Format(open_clip.recognises, open_clip.read),
    "timm": Format(*_of(timm), ("", ".safetensors"), timm_config.library_ops, keeps_shape=True),
    "t2t": Format(*_of(t2t), ("", ".safetensors")),
    **{
        name: Format(
            write=partial(runtimes.write, format=name),
            suffixes=(f".{name}",),
            precisions=runtime.PRECISIONS,
        )
        for name, runtime in runtimes.RUNTIMES.items()
    },
}


def _find_reader(source: Source) -> Read:
    """The `read` of the format of `source`."""
    for format in FORMATS.values():
        if format.read and format.recognises is not None and format.recognises(source):
            return format.read
    if is_distributed(source.path):
        raise InputError(
            f"init_from={str(source.path)!r}: a distributed checkpoint of PyTorch (.distcp files), "
            "whose .metadata is a pickle, which may run code and is never loaded; write its arrays "
            "to a .safetensors file as docs/how_to/weights.md shows"
        )
    names = ", ".join(sorted(source.arrays)[:5])
    why = f"its arrays have the names of no known format: {names}, ..." if names else (
        "not a source of a known format; known: a workdir (with config.json and checkpoints/), a "
        ".npz file, a .safetensors file or a folder with model.safetensors"
    )  # fmt: skip
    raise InputError(f"init_from={str(source.path)!r}: {why}")


def read_pretrained(
    source: str | os.PathLike | Pretrained,
    *,
    averaged: bool | None = None,
    best: bool = False,
    lazy: bool = False,
) -> Pretrained:
    """Read the model and parameters of `source`.

    Args:
      source: a workdir of this project (its newest valid checkpoint), or WORKDIR/checkpoints/STEP;
        a published `.npz`; a `.safetensors` file, or a folder with one, in the names of Hugging
        Face, timm, open_clip or T2T-ViT's authors; the address of such a file;
        "hf:ORGANISATION/NAME" or "timm:NAME" on the Hugging Face Hub, with "@REVISION" if it is not
        the newest; or a name in PUBLISHED, e.g. "ViT-B/16@augreg". A model that was read stays.
      averaged: for a workdir whose run keeps a running average of the parameters: True takes the
        average, False the raw parameters, None the average if there is one.
      best: of a workdir, the step that `checkpoint.keep_best` kept instead of the newest.
      lazy: the parameters of a workdir become Lazy: verified, but read where they are used.

    Raises:
      InputError: if the source does not exist or cannot be read.
    """
    if isinstance(source, Pretrained):
        return source
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"source: is a {type(source).__name__}; needs a path, a name or a model")
    path = locate(source := hide(os.fspath(source)))
    opened = Source(path, averaged, best, lazy)
    try:
        read = _find_reader(opened)
        if averaged is not None and read is not workdir.read:
            raise InputError(workdir.NO_CHOICE.format(path))
        if best and read is not workdir.read:
            raise InputError(f"init_from={str(path)!r}: only runs keep a best step; leave it out")
        pretrained = read(opened)
    except InputError as e:
        forget(path)
        if family := families.name_family(opened):
            what = f"these weights are {family}, which is not supported"
            raise InputError(f"init_from={str(path)!r}: {what}; {families.SUPPORTED}") from None
        faults = (f if str(path) in f else f"init_from={str(path)!r}: {f}" for f in e.faults)
        raise InputError(*faults) from None
    if (held_out := side_file(path)).exists():
        hashes = hashes_from_bytes(held_out.read_bytes())
        pretrained = pretrained._replace(division=Division(hashes=hashes))
    known, found = by_address(source), pretrained.model.num_classes
    if known is not None:
        if found != known.num_classes:
            what = f"has {found} classes, but was published with {known.num_classes}"
            raise InputError(f"init_from={source!r}: {what}; fetch it again")
        pretrained = pretrained._replace(spec=pretrained.spec._replace(loss=known.loss))
    elif pretrained.spec.loss is None:  # perhaps a copy of a published file
        loss = loss_by_file_name(path.name, found)
        pretrained = pretrained._replace(spec=pretrained.spec._replace(loss=loss))
    return pretrained._replace(source=source) if is_fetched(source) else pretrained


def check_workdir(path: str | os.PathLike) -> None:
    """Raise InputError, for the flag --workdir, if `path` is not the workdir of a run."""
    if not workdir.recognises(Source(path := absolute(path))):
        parts = [name for name in ("config.json", "checkpoints") if not (path / name).exists()]
        lacks = f"; it lacks {' and '.join(parts)}" * bool(parts)
        what = "not the workdir of a run, with config.json and checkpoints/"
        raise InputError(f"--workdir={path}: {what}{lacks}")


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
      path: a file for npz and npz_v2, a folder for hf, either for timm and t2t. A program
        ("stablehlo", "onnx", "litert") is a file whose name ends in the format; it takes floats,
        gives logits in float32, and is not compared: `export` does that.
      model: the model; its layers may be scanned.
      variables: the model's variables, with "params" and, if it has them, "batch_stats" or
        "constants".
      format: one of FORMATS that is written.
      spec: value range, class names, ...; None: pixels in [-1, 1], no names.

    Raises:
      InputError: naming what the format cannot hold and the remedy; nothing is written.
    """
    path = absolute(path)
    _, write = find_writer(format, model, path, "format=")
    needed = {"params", *(name.partition("/")[0] for name in abstract_model_state(model))}
    if missing := sorted(needed - variables.keys()):
        raise InputError(f"variables: lack {', '.join(missing)}; give all that model.init returned")
    collections = jax.tree.map(np.asarray, dict(variables))
    params = collections.pop("params")
    if about(model).stacks_layers:
        params = fit.unstack_layers(params)
    plain, merged = fit.merge_adapters(with_known(model, scan=False), tree.flatten_names(params))
    spec = spec or Spec(plain.image_size, "antialiased")
    plain, merged, state = fit.merge_head_norm(plain, merged, tree.flatten_names(collections))
    return write(path, Pretrained(str(path), plain, merged, spec, model_state=state))


def named_writer(format: str, key: str) -> tuple[Format, Write]:
    """The format that `key` names, and its `write`.

    Raises:
      InputError: if it is none that is written.
    """
    found = FORMATS.get(format)
    if found is None or found.write is None:
        names = [name for name, other in FORMATS.items() if other.write is not None]
        raise InputError(f"{key}{format}: {nearest(format, names)}")
    return found, found.write


def find_writer(format: str, model: nn.Module, path: epath.Path, key: str) -> tuple[Format, Write]:
    """As `named_writer`, if the format can hold `model` and be written to `path`.

    Raises:
      InputError: naming what it cannot hold, and the formats that can.
    """
    writer, write = named_writer(format, key)
    of_towers = {name: f for name, f in FORMATS.items() if f.write is not None and not f.of_pairs}
    # Of programs, the error names the one that needs no other package.
    named = {name: f for name, f in of_towers.items() if name == "stablehlo" or not f.precisions}
    others = [name for name, f in named.items() if not f.check(model)]
    where = f"{key}{format} cannot hold this model; export it as {' or '.join(others)}"
    collect_faults(writer.check(model), where)
    owners = [name for name, other in of_towers.items() if path.suffix in (other.suffixes or ())]
    suffixes = writer.suffixes or (path.suffix,)
    if path.suffix not in suffixes and ("" not in suffixes or owners):
        kinds = " or ".join(f"a {suffix} file" if suffix else "a folder" for suffix in suffixes)
        instead = "".join(f", or {key}{name}" for name in owners)
        raise InputError(f"--output={path}: {key}{format} writes {kinds}; name one{instead}")
    return writer, write


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
    new_head = num_classes is not None
    named, state = fit.fit(pretrained, model, reset_head=new_head, resize=resize)
    shapes = abstract_params(model).items() if new_head else ()
    head = {name: jnp.zeros(x.shape) for name, x in shapes if fit.is_of_head(name)}
    params = _as_scanned({**named, **head}, model, pretrained.source)
    return model, {"params": params, **tree.unflatten_names(state)}


def with_image_size(
    pretrained: Pretrained, image_size: int | Sequence[int], resize: str | None = None
) -> Pretrained:
    """`pretrained` for images of another size; `resize`: see `load_pretrained`.

    A model of pictures in their own shape then takes images of that one size. The results of a run
    are left out, because they belong to its own size.

    Raises:
      InputError: if the patch size does not divide the image size.
    """
    check_convention(resize, "resize")
    size = image_hw(image_size)
    model = for_one_size(pretrained.model.clone(image_size=size))
    params, state = fit.fit(pretrained, model, reset_head=False, resize=resize)
    spec, run = pretrained.spec.at(size)._replace(rule=None), pretrained.run
    if run is not None and spec != pretrained.spec:
        run = run | {"results": {}}
    return pretrained._replace(model=model, params=params, model_state=state, spec=spec, run=run)


def init_variables(
    pretrained: Pretrained, model: nn.Module, resize: str | None = None, *, keep_head: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All (parameters, model state) that `model` takes from the source: {leaf name: array}.

    Arrays may be Lazy; stacked layers are.

    The whole head with its hidden layer is left out and initialised anew (the linear layer with
    zeros), even if the number of classes is the same: the classes may differ, and the paper always
    replaces it. `keep_head` takes it from the source. `resize`: see `load_pretrained`.

    Raises:
      InputError: one error naming everything else that does not fit.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2, for the head.
    """
    fit.check_architecture(pretrained, model)
    named, state = fit.fit(pretrained, model, reset_head=not keep_head, resize=resize)
    return tree.flatten_names(_as_scanned(named, model, pretrained.source, stack)), state


def _as_scanned(
    named: dict[str, Any],
    model: nn.Module,
    source: str,
    stack: Callable[[Sequence[Any]], Any] = np.stack,
) -> dict[str, Any]:
    """Convert unrolled parameters to the model's form: stacked if it scans its layers."""
    params = tree.unflatten_names(named)
    if not about(model).stacks_layers:
        return params
    logger.info("%s: layers stacked for scanning", source)
    return fit.stack_layers(params, stack)
