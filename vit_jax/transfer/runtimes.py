"""Runtimes that compute exported programs. Each has one file and one entry in RUNTIMES.

The file states PACKAGES (the runtime first), PRECISIONS, `convert` (path, program -> facts for the
receipt) and `load` (path -> the function images -> outputs, computed by the runtime).
"""

import importlib.metadata
import importlib.util
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.transfer import litert, onnx, stablehlo
from vit_jax.transfer.pretrained import Pretrained, Spec, class_names, load_pixels
from vit_jax.transfer.program import GIVES, Choice, Program, make_program

RUNTIMES: dict[str, Any] = {"stablehlo": stablehlo, "onnx": onnx, "litert": litert}

_LEAST_COSINE = {"float32": 0.9999, "float16": 0.999}
_TOLERANCE = 1e-4  # of float32, times the largest output
_BATCH = 8
_TIMED = 10


def write(path: epath.Path, pretrained: Pretrained, format: str) -> list[str]:
    """Write the plain program images -> logits; return the names of the files."""
    need_packages(format)
    RUNTIMES[format].convert(path, make_program(pretrained, format))
    return [path.name]


def need_packages(format: str) -> None:
    """Raise InputError if the packages of a runtime are not installed."""
    for package in RUNTIMES[format].PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"--format={format}: {package} is not installed; run pip install -e '.[{format}]'"
            )


def export_program(
    path: epath.Path, pretrained: Pretrained, format: str, choice: Choice
) -> dict[str, Any]:
    """Write a program, run it in its runtime on pictures, and return the comparison.

    Raises:
      InputError: if the model or the pictures do not suit the choice.
      RuntimeError: if the runtime computes something else.
    """
    need_packages(format)
    runtime, program = RUNTIMES[format], make_program(pretrained, format, choice)
    spec = pretrained.spec.at(program.shape[:2])
    if choice.calibration is not None:
        found = [pixels for _, pixels in read_pictures(choice.calibration, spec)]
        program = program._replace(samples=as_taken(np.stack(found), spec, choice))
    facts = runtime.convert(path, program)
    versions = {name: importlib.metadata.version(name) for name in runtime.PACKAGES}
    classes = ()
    if choice.precision == "int8":
        classes = class_names(spec, pretrained.model.num_classes)
    compared = _compare(program, runtime.load(path), spec, choice, classes)
    return {"runtime": versions, **facts, **compared}


def read_pictures(folder: epath.PathLike | None, spec: Spec) -> Iterator[tuple[str, np.ndarray]]:
    """(name of the folder that holds it, uint8 pixels (H, W, C)) of each picture below `folder`."""
    from vit_jax.data.images.given import find_images

    if folder is None:
        for picture in _sample_pictures():
            yield "", load_pixels(picture, spec)
        return
    for path in find_images([folder]):
        yield epath.Path(path).parent.name, load_pixels(path, spec)


def _sample_pictures() -> Iterator[bytes]:
    """PNG files of 16 parts of scikit-learn's two photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for photograph in load_sample_images().images:
        for half in np.array_split(photograph, 2, axis=0):
            for part in np.array_split(half, 4, axis=1):
                Image.fromarray(part).save(file := io.BytesIO(), "PNG")
                yield file.getvalue()


def as_taken(pixels: np.ndarray, spec: Spec, choice: Choice) -> np.ndarray:
    """uint8 pixels (b, H, W, C) as the program takes them."""
    return pixels if choice.takes == "bytes" else spec.to_values(pixels.astype(np.float32))


def _compare(
    program: Program,
    run: Callable[[np.ndarray], Any],
    spec: Spec,
    choice: Choice,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare a runtime's outputs with the model's; see `export_program`.

    `classes`: the names of the outputs, for top-1 on pictures in folders of these names.
    """
    apply = partial(jax.jit(program.apply), jax.device_put(program.variables))
    names, ours, theirs, taken = [], [], [], np.zeros(0)
    pictures = list(read_pictures(choice.pictures, spec))
    for start in range(0, len(pictures), _BATCH):
        part = pictures[start : start + _BATCH]
        names += [name for name, _ in part]
        taken = as_taken(np.stack([pixels for _, pixels in part]), spec, choice)
        ours.append(np.asarray(apply(taken)))
        theirs.append(np.asarray(run(taken)))
    expected, found = np.concatenate(ours), np.concatenate(theirs)
    largest = float(np.abs(expected).max())
    difference = float(np.abs(found - expected).max())
    cosine = float(_cosines(found, expected).min())
    same = float((found.argmax(-1) == expected.argmax(-1)).mean())
    one = GIVES[choice.gives]
    result = {
        "images": len(names),
        "dtype": choice.precision,
        f"largest_{one}_difference": difference,
        f"largest_{one}": largest,
        "cosine": cosine,
        "same_class": same,
        "ms_per_image": _milliseconds(run, taken),
        "vit_jax_ms_per_image": _milliseconds(apply, taken),
    }
    said = f"the exported file gives {choice.gives} of cosine {cosine:.5f} with the model's, "
    said += f"that differ by {difference:.3g} with {largest:.3g} the largest"
    if classes:
        labels = _labels(names, classes)
        of_model, of_file = (float((x.argmax(-1) == labels).mean()) for x in (expected, found))
        if not of_model - of_file <= choice.max_drop:
            raise RuntimeError(f"{said}; its top-1 is {of_file:.2%}, the model's {of_model:.2%}")
        return result | {"top1": of_file, "vit_jax_top1": of_model}
    tolerance = _TOLERANCE if choice.precision == "float32" else np.inf
    if not (
        cosine >= _LEAST_COSINE[choice.precision] and difference <= tolerance * max(largest, 1e-6)
    ):
        raise RuntimeError(said)
    if choice.gives != "features" and same < 1:
        raise RuntimeError(f"{said}; {1 - same:.1%} of the pictures get another class")
    return result


def _labels(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """The classes of pictures by the names of their folders."""
    if unknown := sorted({*names} - {*classes}):
        raise InputError(
            f"pictures: the model has no class {unknown[0]!r}; it has {', '.join(classes[:5])}, ..."
        )
    return np.array([classes.index(name) for name in names])


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row; 1 for equal rows, even of zeros."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.where((a == b).all(-1), 1.0, (a * b).sum(-1) / np.maximum(norms, 1e-30))


def _milliseconds(run: Callable[[np.ndarray], Any], images: np.ndarray) -> float:
    """Median milliseconds for one image, after a first call."""
    one, seconds = images[:1], []
    for _ in range(_TIMED + 1):
        start = time.perf_counter()
        np.asarray(run(one))
        seconds.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(seconds[1:]), 3)
