"""Runtimes that compute exported programs. Each has one file and one entry in RUNTIMES.

The file states PACKAGES (the runtime first), DEVICE (where the runtime computes; None: where JAX
does), PRECISIONS, SPLITS (whether a program may have several files, and more than 2 GiB), `convert`
(path, program -> names of the files, facts for the receipt) and `load` (path -> the function images
(b, H, W, C), or token ids (b, L), -> outputs (b, n), computed by the runtime).
"""

import importlib.metadata
import importlib.util
import io
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.packages import need_package
from vit_jax.data import words
from vit_jax.data.class_names import as_name, places_of
from vit_jax.data.words import imagenet_names
from vit_jax.models.zero_shot import TextSide, check_ids
from vit_jax.transfer import litert, onnx, stablehlo
from vit_jax.transfer.model_zoo import sha256
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names, load_image, load_pixels
from vit_jax.transfer.program import (
    GIVES,
    MOST_BYTES,
    PLAIN,
    Choice,
    Program,
    make_program,
    need_texts,
)

RUNTIMES: dict[str, Any] = {"stablehlo": stablehlo, "onnx": onnx, "litert": litert}

_LEAST_COSINE = {"float32": 0.9999, "float16": 0.999}
_TOLERANCE = 1e-4  # of float32, times the largest output
_BATCH = 8
_CALIBRATED = 512  # at most so many pictures give the ranges of int8
_TIMED = 10

logger = logging.getLogger("vit_jax")


def write(path: epath.Path, pretrained: Pretrained, format: str) -> list[str]:
    """Write the plain program images -> logits; return the names of the files."""
    need_packages(format)
    return RUNTIMES[format].convert(path, _make_program(pretrained, format))[0]


def need_packages(format: str) -> None:
    """Raise InputError if the packages of a runtime are not installed."""
    for package in RUNTIMES[format].PACKAGES:
        need_package(f"--format={format}", package, format)


def _make_program(pretrained: Pretrained, format: str, choice: Choice = PLAIN) -> Program:
    """The program; raises InputError as `make_program`, or if the format cannot hold its size."""
    program = make_program(pretrained, choice)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(program.variables))
    if num_bytes > MOST_BYTES and not RUNTIMES[format].SPLITS:
        raise InputError(
            f"--format={format}: the parameters have {num_bytes / 2**30:.1f} GiB, but the file "
            "holds at most 2 GiB; export as onnx, timm, hf or npz"
        )
    return program


def export_program(
    path: epath.Path, pretrained: Pretrained, format: str, choice: Choice
) -> tuple[list[str], dict[str, Any]]:
    """Write a program and run it in its runtime on pictures, or on texts.

    Returns:
      The names of the files, and the comparison for the receipt.

    Raises:
      InputError: if the model or the pictures do not suit the choice.
      RuntimeError: if the runtime computes something else.
    """
    from vit_jax.data.images.given import find_images

    program = _make_program(pretrained, format, choice)
    if choice.of_texts:
        ids = sample_ids(need_texts(pretrained, choice))
        return _write_and_compare(path, program, format, choice, np.split(ids, 2))
    height, width, _ = program.shape
    spec = pretrained.spec.at((height, width))
    folders = {"pictures": choice.pictures, "calibration": choice.calibration}
    faults = Faults()
    found = {key: faults.check_in(f"{key}: ", find_images, [folder])
             for key, folder in folders.items() if folder is not None}  # fmt: skip
    collect_faults(faults)
    given = found.get("pictures") or []
    if paths := found.get("calibration"):
        paths = paths[:: -(-len(paths) // _CALIBRATED)]
        if same := _in_both(paths, given):
            said = f"calibration={choice.calibration}: {len(same)} of {len(paths)} pictures are in "
            said += f"pictures={choice.pictures} too, such as {same[0]}"
            if len(same) == len(paths):
                what = "give other pictures, since int8 is tested on those it has not seen"
                raise InputError(f"{said}; {what}")
            logger.warning("%s; they are left out", said)
            paths = [path for path in paths if path not in same]
        samples = _batches(paths, spec, choice)
        program = program._replace(samples=[*itertools.chain.from_iterable(samples)])
    pictures: Sequence[str | bytes] = given or [*sample_pictures()]
    labels, num_classes = None, pretrained.model.num_classes
    if choice.precision == "int8" and choice.pictures is not None and num_classes is not None:
        labels = _labels(given, choice.pictures, class_names(spec, num_classes))
    taken = _batches(pictures, spec, choice)
    return _write_and_compare(path, program, format, choice, taken, labels)


def _write_and_compare(
    path: epath.Path,
    program: Program,
    format: str,
    choice: Choice,
    taken: Iterable[np.ndarray],
    labels: np.ndarray | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """As `export_program`, for batches of what the program takes; `labels` as in `_compare`."""
    runtime = RUNTIMES[format]
    try:
        files, facts = runtime.convert(path, program)
    except (OSError, MemoryError):
        raise
    except Exception as e:  # of any type, by a converter or a quantiser
        if choice.precision != "int8":
            raise
        what = f"precision=int8: {format} cannot hold this model so ({type(e).__name__}: {e})"
        raise RuntimeError(f"{what}; set --precision=float16") from e
    facts |= {"calibration_images": len(program.samples)} if len(program.samples) else {}
    versions = {name: importlib.metadata.version(name) for name in runtime.PACKAGES}
    device = runtime.DEVICE and jax.local_devices(backend=runtime.DEVICE)[0]
    apply = partial(jax.jit(program.apply), jax.device_put(program.variables, device))
    compared = _compare(apply, runtime.load(path), taken, choice, labels)
    return files, {"runtime": versions, **facts, **compared}


def _in_both(paths: Sequence[str], others: Sequence[str]) -> list[str]:
    """The `paths` with a byte-equal file in `others`; reads only files of equal sizes."""
    try:
        sizes = {os.path.getsize(path) for path in paths}
        others = [path for path in others if os.path.getsize(path) in sizes]
        hashes = {sha256(pathlib.Path(path)) for path in others}
        return [path for path in paths if hashes and sha256(pathlib.Path(path)) in hashes]
    except OSError as e:
        what = f"{e.filename!r}: cannot be read ({e.strerror}); choose others"
        raise InputError(what) from None


def _batches(pictures: Sequence[str | bytes], spec: Spec, choice: Choice) -> Iterator[np.ndarray]:
    """The pictures as the program takes them, (b, H, W, C), read when they are needed.

    `pictures`: paths, or the bytes of files.
    """

    def read(picture: str | bytes) -> np.ndarray:
        try:
            return (load_pixels if choice.takes == "bytes" else load_image)(picture, spec)
        except OSError as e:
            raise InputError(f"{picture!r}: cannot be read ({e.strerror}); choose others") from None

    for start in range(0, len(pictures), _BATCH):
        yield np.stack([*map(read, pictures[start : start + _BATCH])])


def sample_pictures() -> Iterator[bytes]:
    """PNG files of 16 parts of scikit-learn's two photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for photograph in load_sample_images().images:
        for half in np.array_split(photograph, 2, axis=0):
            for part in np.array_split(half, 4, axis=1):
                Image.fromarray(part).save(file := io.BytesIO(), "PNG")
                yield file.getvalue()


def sample_texts() -> list[str]:
    """16 texts: the prompts with the names of classes of ImageNet."""
    names = words.names_in_words([*imagenet_names()][:: 1000 // 15], "labels")
    prompts = itertools.cycle(words.PROMPTS)
    return [prompt.replace("{}", of[0]) for prompt, of in zip(prompts, names, strict=False)]


def sample_ids(side: TextSide) -> np.ndarray:
    """The token ids (16, L) of `sample_texts`; any ids, with an end token, without a tokenizer."""
    text, rng = side.matcher.text, np.random.default_rng(0)
    if side.files:
        ids = side.read_tokenizer()(sample_texts())
        check_ids(side, ids)
        return ids
    ids = rng.integers(0, text.vocabulary, (16, text.length), np.int32)
    end_id = text.vocabulary - 1 if text.end_id is None else text.end_id
    ids[np.arange(16), rng.integers(0, text.length, 16)] = end_id
    return ids


def _compare(
    apply: Callable[[np.ndarray], Any],
    run: Callable[[np.ndarray], Any],
    batches: Iterable[np.ndarray],
    choice: Choice,
    labels: np.ndarray | None = None,
) -> dict[str, Any]:
    """Compare a runtime's outputs (`run`) with the model's (`apply`); see `export_program`.

    `labels`: the classes of all pictures (n,), for top-1; None: the outputs are compared.
    """
    of_batches, count, taken = [], 0, np.zeros(0)
    for taken in batches:
        expected, found = np.asarray(apply(taken)), np.asarray(run(taken))
        known = None if labels is None else labels[count : count + len(taken)]
        of_batches.append(_measure(expected, found, known))
        count += len(taken)
    differences, sizes, cosines, *sums = map(np.array, zip(*of_batches, strict=True))
    difference, largest, cosine = map(float, (differences.max(), sizes.max(), cosines.min()))
    same, of_model, of_file = (float(hits.sum() / count) for hits in sums)
    one, of = GIVES[choice.gives], "text" if choice.of_texts else "image"
    ms, ours = _milliseconds((run, apply), taken[:1])
    result = {
        f"{of}s": count,
        "dtype": choice.precision,
        f"largest_{one}_difference": difference,
        f"largest_{one}": largest,
        "cosine": cosine,
        **({"same_class": same} if choice.of_classes else {}),
        f"ms_per_{of}": ms,
        f"vit_jax_ms_per_{of}": ours,
    }
    text = f"the exported file gives {choice.gives} of cosine {cosine:.5f} with the model's, "
    text += f"that differ by {difference:.3g} with {largest:.3g} the largest"
    if labels is not None:
        if not of_model - of_file <= choice.max_drop:
            raise RuntimeError(f"{text}; its top-1 is {of_file:.2%}, the model's {of_model:.2%}")
        return result | {"top1": of_file, "vit_jax_top1": of_model}
    tolerance = _TOLERANCE if choice.precision == "float32" else np.inf
    if not (
        cosine >= _LEAST_COSINE[choice.precision] and difference <= tolerance * max(largest, 1e-6)
    ):
        raise RuntimeError(text)
    if choice.of_classes and same < 1:
        raise RuntimeError(f"{text}; {1 - same:.1%} of the pictures get another class")
    return result


def _measure(
    expected: np.ndarray, found: np.ndarray, labels: np.ndarray | None
) -> tuple[float, ...]:
    """Largest difference and output, smallest cosine; numbers of the same and the right classes.

    Outputs (b, n). A class whose output is within the tolerance of the model's largest is the same.
    """
    ours, theirs = expected.argmax(-1), found.argmax(-1)
    rows = np.arange(len(expected))
    behind = expected[rows, ours] - expected[rows, theirs]
    return (
        np.abs(found - expected).max(),
        np.abs(expected).max(),
        _cosines(found, expected).min(),
        (behind <= _TOLERANCE * np.abs(expected).max(-1)).sum(),
        (ours == labels).sum() if labels is not None else 0,
        (theirs == labels).sum() if labels is not None else 0,
    )


def _labels(pictures: Sequence[str], folder: epath.PathLike, classes: Sequence[str]) -> np.ndarray:
    """The classes (n,) of pictures by the names of the first folders below `folder`.

    The classes of ImageNet may have the names of its synsets too.
    """
    places = places_of(classes)
    if tuple(classes) == tuple((synsets := imagenet_names()).values()):
        places = places_of(list(synsets)) | places
    parts = (pathlib.Path(path).relative_to(pathlib.Path(folder)).parts for path in pictures)
    names = [as_name(inside[0]) if len(inside) > 1 else "" for inside in parts]
    if "" in names:
        raise InputError(
            f"pictures={folder}: {pictures[names.index('')]} is in no folder of a class; "
            f"precision=int8 needs a folder for each class, named as it, such as {classes[0]}"
        )
    if unknown := sorted({*names} - {*places}):
        raise InputError(
            f"pictures: the model has no class {unknown[0]!r}; it has {', '.join(classes[:5])}, ..."
        )
    return np.array([places[name] for name in names])


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row; 1 for equal rows, even of zeros."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.where((a == b).all(-1), 1.0, (a * b).sum(-1) / np.maximum(norms, 1e-30))


def _milliseconds(
    functions: Sequence[Callable[[np.ndarray], Any]], image: np.ndarray
) -> list[float]:
    """Milliseconds of each function for one image (1, H, W, C): its fastest call of _TIMED.

    They are called in turns, after a first call, so that other programs disturb all alike.
    """
    seconds = np.zeros((_TIMED + 1, len(functions)))
    for turn, function in np.ndindex(*seconds.shape):
        start = time.perf_counter()
        np.asarray(functions[function](image))
        seconds[turn, function] = time.perf_counter() - start
    return [round(1e3 * fastest, 3) for fastest in seconds[1:].min(axis=0).tolist()]
