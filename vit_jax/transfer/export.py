"""Export of a model to another format, verified by reading it back, with a receipt.

The receipt (JSON, and a model card for people) records the exported model, its source, and the
largest difference between its logits and the exported files' logits.
"""

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import absolute, check_folder, check_names, is_object, write_whole
from vit_jax.base.quiet import quiet
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.data.division import hashes_to_bytes, side_file
from vit_jax.job.software import software
from vit_jax.models.contract import about, for_one_size, with_known
from vit_jax.models.zero_shot import TextSide, need_text_side
from vit_jax.transfer import (
    FORMATS,
    Format,
    find_writer,
    named_writer,
    read_pretrained,
    with_image_size,
)
from vit_jax.transfer.card import make_card
from vit_jax.transfer.huggingface_texts import tokenizer_files
from vit_jax.transfer.model_zoo import sha256
from vit_jax.transfer.pretrained import Pretrained, preparation
from vit_jax.transfer.program import GIVES, PLAIN, Choice, need_texts
from vit_jax.transfer.runtimes import RUNTIMES, export_program, need_packages
from vit_jax.transfer.source import to_json
from vit_jax.transfer.tensors import check_size, share_equal

_TOLERANCE = 1e-4  # times the largest logit; an export with a larger difference fails
_IMAGES = 2
_ZEROS = (
    "%s: all logits are 0, so comparing them shows nothing: the head was never trained; use the "
    "features, or fine-tune first"
)
_EXAMPLE = "Two dogs, one Cat!"  # whose ids tell whether a tokenizer is used as the model's
Logits = Callable[[np.ndarray], Any]

logger = logging.getLogger("vit_jax")


def export(
    source: epath.PathLike | Pretrained,
    output: epath.PathLike,
    format: str,
    *,
    max_shard_size: str | None = None,
    **choice: Any,
) -> dict[str, Any]:
    """Write a model in another format, with a receipt; return the receipt.

        vit_jax.export("runs/mine", "mine", "hf")["read_back"]

    All files are first written to a temporary folder and read back, so `output` gets all or
    nothing.

    Args:
      source: a source of `load_pretrained`, or a model from `read_pretrained`.
      output: a file or folder to write.
      format: "npz", "npz_v2", "hf", "hf_pair", "timm", "t2t", or a program: "stablehlo",
        "onnx" or "litert".
      max_shard_size: of the files of weights in a folder, such as "500MB"; None: "5GB",
        and one file for timm.
      choice: fields of `transfer.program.Choice`, of a program: what it takes and gives.

    Raises:
      InputError: if the format cannot hold the model, or `output` cannot be written.
      RuntimeError: if the exported files compute something else.
    """
    output, chosen = absolute(output), Choice(**choice)
    check_choice(format, chosen, output, max_shard_size)
    pretrained = read_pretrained(source)
    own_dtype = jnp.dtype(about(pretrained.model).dtype).name
    model = with_known(pretrained.model, dtype=jnp.dtype("float32"))
    pretrained = _with_shapes_of(format, pretrained._replace(model=model), chosen)
    writer, write = find_writer(format, pretrained.model, output, "--format=")
    model = pretrained.model
    if writer.precisions and model.num_classes is None and chosen.gives == "logits":
        chosen = chosen._replace(gives="features")
    side = _read_text_side(pretrained, writer, chosen)
    if side is not None:  # read once
        pretrained = pretrained._replace(read_text_side=lambda: side)
    check_folder(output.parent, "--output")
    check_names(output, "--output")
    _check_free(output, [output])
    with _staging(output) as folder:
        staged = epath.Path(folder) / (output.name or "model")
        try:
            if writer.precisions:
                files, back = export_program(staged, pretrained, format, chosen)
                if side is not None and chosen.of_texts:
                    files += _write_tokenizer(staged, side)
            else:
                how = {"max_shard_size": max_shard_size} if max_shard_size else {}
                files = write(staged, pretrained, **how)
                back = _read_back(staged, pretrained, side, writer)
        except RuntimeError as e:
            if type(e) is not RuntimeError:  # not the comparison's
                raise
            raise RuntimeError(f"--output={output}: {e}") from e
        if back[f"largest_{GIVES[chosen.gives]}"] == 0:
            logger.warning(_ZEROS, output)
        if held_out := pretrained.division.held_out():
            files = [*files, side_file(staged).name]
            write_whole(side_file(staged), hashes_to_bytes(held_out))
        takes = "ids" if chosen.of_texts else chosen.takes
        receipt = _describe_export(pretrained, side, format, own_dtype, chosen)
        receipt |= {"takes": takes, "gives": chosen.gives} if writer.precisions else {}
        receipt |= {"read_back": back, "software": software()}
        inside = staged.is_dir()
        root = staged if inside else staged.parent
        receipt["files"] = {name: sha256(root / name) for name in files}
        card, record = ("README.md", "receipt.json") if inside else (
            f"{staged.name}.md", f"{staged.name}.receipt.json"
        )  # fmt: skip
        write_whole(root / card, make_card(receipt, output))
        write_whole(root / record, to_json(receipt))
        made = [*files, card, record]
        _check_free(output, [output] if inside else [output.parent / name for name in made])
        _move(root, output, made, inside)
    return receipt


def _with_shapes_of(format: str, pretrained: Pretrained, choice: Choice) -> Pretrained:
    """The model for images of one size, and a warning, if the format cannot keep their shapes."""
    size = pretrained.model.image_size or pretrained.spec.image_size
    if pretrained.spec.rule is None or FORMATS[format].keeps_shape:
        return pretrained
    if size is None or choice.of_texts:  # with images, a program of no size is refused later
        model, spec = for_one_size(pretrained.model), pretrained.spec._replace(rule=None)
        return pretrained._replace(model=model, spec=spec)
    why = "; the results of the run are left out: they are for pictures in their own shape"
    logger.warning(
        "--format=%s: takes images of one size, %d x %d pixels, to which pictures are squashed%s",
        format, *size, why if pretrained.run else "",
    )  # fmt: skip
    return with_image_size(pretrained, size)


def check_choice(
    format: str, choice: Choice, output: epath.PathLike, max_shard_size: str | None
) -> None:
    """Check what needs no model, so that nobody waits for one to be read first.

    Raises:
      InputError: if `format` is unknown, cannot do what is asked, or needs a package.
    """
    writer, _ = named_writer(format, "--format=")
    choice.check(format, writer.precisions)
    if max_shard_size is not None:
        check_size(max_shard_size, "max_shard_size")
        if "" not in (writer.suffixes or ()) or epath.Path(output).suffix == ".safetensors":
            raise InputError(
                f"max_shard_size={max_shard_size}: is of weights in a folder (hf, hf_pair, timm, "
                "t2t); leave it out"
            )
    if format in RUNTIMES:
        need_packages(format)


@contextlib.contextmanager
def _staging(output: epath.Path) -> Iterator[str]:
    """A temporary folder, on the disk of `output` if that is local; it is removed at the end.

    Folders that it makes for `output` are removed again if an error leaves them empty.
    """
    if is_object(output):
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    made = list(itertools.takewhile(lambda f: not f.exists(), output.parents))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".tmp", f".{output.name}.", output.parent) as folder:
            yield folder
    except BaseException as e:
        with contextlib.suppress(OSError, ValueError):  # ValueError: epath's of a filled folder
            for parent in made:
                parent.rmdir()
        if isinstance(e, OSError):
            said = f"--output={output}: cannot be written ({e}); choose another"
            raise InputError(said) from None
        raise


def _read_back(
    staged: epath.Path,
    pretrained: Pretrained,
    side: TextSide | None,
    writer: Format,
) -> dict[str, Any]:
    """Compare the logits of the model in the files at `staged` with the model's.

    Raises:
      RuntimeError: if they differ by more than rounding.
    """
    model = pretrained.model
    size = model.image_size or pretrained.spec.image_size
    size = size or tuple(2 * stride for stride in model.token_stride)
    shape = (_IMAGES, *size, about(model).channels)
    images = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    expected = np.asarray(_logits(pretrained, side)(images))
    with quiet("vit_jax", below=logging.ERROR):  # warnings would name the temporary folder
        found = read_pretrained(staged)
        # Equal parameters are held once.
        found = found._replace(params=share_equal(found.params, pretrained.params))
        logits = np.asarray(_logits(found, _read_text_side(found, writer))(images))
    difference, largest = (float(np.abs(x).max()) for x in (logits - expected, expected))
    if not difference <= _TOLERANCE * max(largest, 1e-6):
        what = f"the exported files give logits that differ by {difference:.3g}"
        raise RuntimeError(f"{what}, with {largest:.3g} the largest")
    return {
        "images": _IMAGES,
        "dtype": "float32",
        "largest_logit_difference": difference,
        "largest_logit": largest,
    }


def _read_text_side(
    pretrained: Pretrained, writer: Format, choice: Choice = PLAIN
) -> TextSide | None:
    """The text side, for a format of pairs, and for the program of a tower of a pair."""
    if choice.of_pairs:
        return need_texts(pretrained, choice)
    read, source = pretrained.read_text_side, pretrained.source
    return need_text_side(read, source) if writer.of_pairs else None


def _write_tokenizer(staged: epath.Path, side: TextSide) -> list[str]:
    """Write the tokenizer's files beside the program `staged`; return their names."""
    files = {f"{staged.name}.{name}": x for name, x in tokenizer_files(side).items()}
    for name, content in files.items():
        write_whole(staged.with_name(name), content)
    return [*files]


def _describe_texts(side: TextSide, choice: Choice) -> dict[str, Any]:
    """The text tower, how features of both towers are compared, and how texts become ids."""
    scale = float(side.matcher.scale_of(side.params["logit_scale"]))
    bias = float(side.params["logit_bias"].item()) if side.matcher.has_bias else 0.0
    found = {**_fields(side.matcher.text), "scale": scale, "bias": bias}
    if not (side.files and choice.of_texts):
        return found
    tokenizer = side.read_tokenizer()
    facts = {"start": tokenizer.start, "end": tokenizer.end, "pad": tokenizer.pad}
    facts |= {
        "pads_left": tokenizer.pads_left,
        "cleaned_by_library": not side.by_files,
        "ids": {_EXAMPLE: tokenizer([_EXAMPLE])[0].tolist()},
    }
    return found | {"tokenizer": facts | {"files": [*tokenizer_files(side)]}}


def _logits(pretrained: Pretrained, side: TextSide | None) -> Logits:
    """The function images -> logits; with a text side, those for two texts of any ids."""
    # Pass parameters as an argument: XLA would fold constants and round differently. On CPUs
    # `device_put` shares the memory of arrays of devices, such as a run's.
    apply = partial(jax.jit(pretrained.model.apply), jax.device_put(pretrained.variables))
    if side is None:
        return apply
    text, match = side.matcher.text, jax.jit(side.matcher.apply)
    ids = np.random.default_rng(1).integers(0, text.vocabulary, (2, text.length))
    return lambda images: match(side.variables, apply(images), ids)


def _describe_export(
    pretrained: Pretrained,
    side: TextSide | None,
    format: str,
    own_dtype: str,
    choice: Choice,
) -> dict[str, Any]:
    """The receipt's description of the model: its source, weights, preprocessing and classes.

    `side`: the text tower of a pair, which is exported with it, or one of whose towers is.
    """
    spec, params, text = pretrained.spec, pretrained.params, {}
    model, state = pretrained.model, pretrained.model_state
    if side is not None:
        part = {"text_features": "text/", "image_features": "image_head/"}.get(choice.gives, "")
        own = {name: array for name, array in side.params.items() if name.startswith(part)}
        spec, params = spec._replace(loss=side.matcher.loss), {**params, **own}
        text = {"text": _describe_texts(side, choice)}
        if choice.of_texts:
            model, params, state = side.matcher.text, own, {}
    if (image_size := pretrained.model.image_size or spec.image_size) is not None:
        spec = spec.at(image_size)
    ops, rule = preparation(spec, None) if image_size else (None, None)
    library_ops = FORMATS[format].library_ops if rule is None else None  # libraries keep shapes
    in_patches = {}
    if rule is not None:
        in_patches = {"max_tokens": rule.most, "patch_size": list(rule.patch_size)}
    return {
        "format": format,
        "source": pretrained.source,
        **(pretrained.run or {}),
        "model": {"family": type(model).__name__} | _fields(model),
        "computed_in": own_dtype,
        "parameters": {
            "count": sum(array.size for array in params.values()),
            "sha256": hash_params({**params, **state}),
        },
        "preprocessing": {
            "image_size": image_size and list(image_size),
            "mean": list(spec.mean),
            "std": list(spec.std),
            "cut": spec.cut and spec.cut._asdict(),
            "ops": ops,
            **in_patches,
            "library_ops": library_ops and image_size and library_ops(spec),
            **{key: value for key, value in spec.stated_reading.items() if value is not None},
        },
        "loss": spec.loss,
        "class_names": spec.class_names,
        **text,
    }


def _fields(model: nn.Module) -> dict[str, Any]:
    kinds = bool | int | float | str | tuple | None
    return {name: value for name, value in vars(model).items() if isinstance(value, kinds)}


def _move(root: epath.Path, output: epath.Path, names: list[str], inside: bool) -> None:
    """Move all files from `root`, or none: at once if they are `inside` a folder on a disk."""
    if inside and not is_object(output):
        root.rename(output)
        return
    target = output if inside else output.parent
    try:
        for name in names:
            if is_object(output):
                (root / name).copy(target / name)
            else:
                (root / name).rename(target / name)
    except BaseException:
        with contextlib.suppress(OSError):
            for name in names:
                (target / name).unlink(missing_ok=True)
        raise


def _check_free(output: epath.Path, paths: Sequence[epath.Path]) -> None:
    """Raise InputError if one of `paths` exists."""
    for path in paths:
        if path.exists():
            raise InputError(
                f"--output={output}: {path.name} already exists; remove it, or give another name"
            )
