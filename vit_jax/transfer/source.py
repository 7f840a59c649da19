"""Files of arrays: `.npz`, and safetensors with the JSON file that belongs to them.

Arrays may be stored in one safetensors file, or in the shards of a folder. The formats, such as
`timm`, determine what the names of the arrays mean.
"""

import functools
import json
import logging
import math
import re
import tokenize
import types
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from etils import epath

from vit_jax.base.errors import InputError, collect_faults
from vit_jax.base.files import write_whole
from vit_jax.config import LOSSES
from vit_jax.transfer.tensors import DTYPES, INDEX, WEIGHTS, read_tensors, shard_names

logger = logging.getLogger("vit_jax")

OPEN_CLIP = "open_clip_model.safetensors"  # in a folder that has no WEIGHTS
CONFIGS = {WEIGHTS: "config.json", OPEN_CLIP: "open_clip_config.json"}
# Encrypted members raise RuntimeError, unknown compression its subclass NotImplementedError.
_UNREADABLE = (MemoryError, ValueError, OSError, EOFError, RuntimeError, SyntaxError,
               tokenize.TokenError, zipfile.BadZipFile, zlib.error,
               safetensors.SafetensorError)  # fmt: skip


class Source:
    """A source on disk. Its arrays and its JSON file are read when they are first used.

    path: the file or the folder; the folder also for a file of CONFIGS beside its config.
    averaged, best: which weights are wanted of a workdir; see `read_pretrained`.
    """

    def __init__(self, path: epath.Path, averaged: bool | None = None, best: bool = False):
        is_inside = path.name in CONFIGS and (path.parent / CONFIGS[path.name]).exists()
        self.path = path.parent if is_inside else path
        self._given = path.name if is_inside else None
        self.averaged, self.best = averaged, best

    @property
    def has_arrays(self) -> bool:
        """Whether this is a file of arrays by its name, or a folder with such a file."""
        if self.path.is_dir():
            return any((self.path / name).exists() for name in (INDEX, *CONFIGS))
        return self.path.suffix in (".npz", ".safetensors")

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """{name: float32 array}; {} if this is no file of arrays.

        Raises:
          InputError: if a file cannot be read, or holds an array that is not floating point.
        """
        if not self.has_arrays:
            return {}
        arrays: dict[str, np.ndarray] = {}
        for file in self.files() if self.path.is_dir() else [self.path]:
            read = _read_npz if file.suffix == ".npz" else read_tensors
            try:
                arrays |= {name: _as_float32(name, array) for name, array in read(file)}
            except _UNREADABLE as e:
                raise InputError(
                    f"init_from={str(file)!r}: not a readable {file.suffix} file of weights ({e}); "
                    "fetch it again"
                ) from None
        self.refuse(["it holds no arrays"] if not arrays else [])
        return arrays

    def files(self) -> list[epath.Path]:
        """The safetensors files of a folder; its shards if it has no whole file.

        Raises:
          InputError: if INDEX is damaged, or names files elsewhere.
        """
        if (self.path / self._weights).exists() or not (self.path / INDEX).exists():
            return [self.path / self._weights]
        stated = self.read_stated(read_json(self.path / INDEX), {"weight_map": "an object"})
        shards = shard_names(stated)
        outside = [shard for shard in shards if "/" in shard or "\\" in shard]
        self.refuse([f"{INDEX} names {shard!r}, which is outside the folder" for shard in outside])
        return [self.path / shard for shard in shards]

    @property
    def _weights(self) -> str:
        """The name of a folder's file: the given one, or OPEN_CLIP where it is alone."""
        there = [(self.path / name).exists() for name in (INDEX, WEIGHTS, OPEN_CLIP)]
        return self._given or (OPEN_CLIP if there == [False, False, True] else WEIGHTS)

    @property
    def config_path(self) -> epath.Path:
        """The config: inside a folder; for a file next to it, with the same stem."""
        inside = self.path.is_dir()
        return self.path / CONFIGS[self._weights] if inside else self.path.with_suffix(".json")

    @functools.cached_property
    def config(self) -> dict[str, Any] | None:
        """The contents of `config_path`; None if the file does not exist."""
        return read_json(self.config_path) if self.config_path.exists() else None

    def refuse(self, faults: Sequence[str], why: str = "") -> None:
        """Raise one InputError for all `faults`, if there are any."""
        collect_faults(faults, f"init_from={str(self.path)!r}{why and ': '}{why}")

    def require(
        self, ranks: Mapping[str, int], optional: Mapping[str, int] = types.MappingProxyType({})
    ) -> None:
        """Raise InputError if an array needed to infer the model is absent or misshapen.

        `ranks` maps names to numbers of axes; arrays in `optional` may be absent.
        """
        faults = [f"{name}: absent" for name in ranks if name not in self.arrays]
        for name, rank in {**ranks, **optional}.items():
            shape = self.arrays[name].shape if name in self.arrays else (1,) * rank
            if len(shape) != rank or 0 in shape:
                faults.append(f"{name}: {shape}, but needs {rank} axes")
        self.refuse(faults, "its architecture cannot be inferred")

    def size(self, name: str, axis: int) -> int | None:
        """The size of an axis of the array `name`; None if there is no such array."""
        return self.arrays[name].shape[axis] if name in self.arrays else None

    def count_layers(self, pattern: str) -> int:
        """The number of layers; the first group of the regex `pattern` is a layer's index."""
        layers = {int(m[1]) for name in self.arrays if (m := re.match(pattern, name))}
        missing = sorted(set(range(max(layers, default=0) + 1)) - layers)
        self.refuse([f"layer {i} is absent; fetch it again" for i in missing])
        return len(layers)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give arrays other names: those that start with a regex of `names` get its replacement."""
        for pattern, new in names.items():
            start = re.compile(rf"^(?:{pattern})")
            self.arrays = {start.sub(new, name): array for name, array in self.arrays.items()}

    def leave_out(self, pattern: str, what: str) -> None:
        """Drop the arrays whose names match the regex `pattern`; `what` they are is logged."""
        names = [name for name in self.arrays if re.fullmatch(pattern, name)]
        if names:
            named = ", ".join(names)
            logger.info("%s: %s left out (%d arrays): %s", self.path, what, len(names), named)
        self.arrays = {name: self.arrays[name] for name in self.arrays if name not in names}

    def read_stated(
        self, content: Mapping[str, Any] | None, kinds: Mapping[str, str]
    ) -> dict[str, Any]:
        """The values of a JSON object without its nulls.

        `kinds` maps keys to KINDS; a key may be absent.

        Raises:
          InputError: naming each value that has the wrong kind for its key.
        """
        stated = {key: value for key, value in (content or {}).items() if value is not None}
        faults = [
            f"{key}={stated[key]!r}: needs {kind}"
            for key, kind in kinds.items()
            if key in stated and not KINDS[kind](stated[key])
        ]
        self.refuse(faults, "its JSON file")
        return stated

    def check_agreement(self, stated: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Raise InputError if values of the config contradict those `found` in the arrays."""
        faults = [
            f"{key}={value!r}, but {found[key]!r} in the arrays"
            for key, value in stated.items()
            if key in found and value is not None and value != found[key]
        ]
        self.refuse(faults, "its config and its arrays disagree")

    def say_assumed(self, assumed: Mapping[str, Any], stated: Iterable[str]) -> None:
        """Log the values in `assumed` whose keys are not `stated` in the JSON file."""
        missing = [f"{key}={value!r}" for key, value in assumed.items() if key not in {*stated}]
        name, said = self.config_path.name, ", ".join(missing)
        if self.config is None:
            logger.warning("%s: no %s next to it; assuming %s", self.path, name, said)
        elif missing:
            logger.info("%s: assuming %s, which %s does not state", self.path, said, name)

    def whole_patches(self, image_size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
        """`image_size` without the last pixels that fill no patch, which libraries leave out."""
        height, width = (side // p * p for side, p in zip(image_size, patch, strict=True))
        if (height, width) != image_size:
            logger.info("%s: patches fill %d x %d of %d x %d pixels; the model takes as many",
                        self.path, height, width, *image_size)  # fmt: skip
        return height, width

    def square_side(self, num_patches: int) -> int:
        """The side of a square grid of patches, for a source that does not state its rows.

        Raises:
          InputError: if the number of patches is not a square.
        """
        side = math.isqrt(max(num_patches, 0))
        if side < 1 or side**2 != num_patches:
            raise InputError(
                f"init_from={str(self.path)!r}: its {num_patches} patches do not form a square "
                "grid; state the image size in the JSON file next to the weights"
            )
        return side


def is_distributed(path: epath.Path) -> bool:
    """Whether `path` is a checkpoint of torch.distributed.checkpoint, or a file in one."""
    return path.suffix == ".distcp" or (path.is_dir() and any(path.glob("*.distcp")))


def _read_npz(path: epath.Path) -> Iterable[tuple[str, np.ndarray]]:
    """(name, array) of each array; NumPy stores bfloat16 as two bytes without a type."""
    with path.open("rb") as file:
        for name, array in np.lib.npyio.NpzFile(file, allow_pickle=False).items():
            is_half = getattr(array, "dtype", None) == np.dtype("V2")
            yield name, array.view(ml_dtypes.bfloat16) if is_half else array


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    dtype = getattr(array, "dtype", type(array))  # a member of an archive may be no array
    if not any(dtype == known for known in map(np.dtype, DTYPES.values())):
        raise ValueError(f"{name} has dtype {dtype}; weights must be floating point")
    return array.astype(np.float32, copy=False)


def read_json(path: epath.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      InputError: if the file holds no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as e:  # ValueError also for text that is not UTF-8
        raise InputError(f"init_from={str(path)!r}: not readable as JSON ({e})") from None
    if not isinstance(content, dict):
        raise InputError(f"init_from={str(path)!r}: needs a JSON object")
    return content


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object without its keys that are None, and its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json({k: value for k, value in content.items() if value is not None}))


def to_json(content: Mapping[str, Any]) -> str:
    """Format a JSON object as the text of a file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def int_or_pair(size: tuple[int, int]) -> int | list[int]:
    """(height, width) for a JSON file: one number if they are equal, else a list."""
    return size[0] if size[0] == size[1] else list(size)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_numbers(value: Any, length: int, above: float = -math.inf) -> bool:
    is_list = isinstance(value, list) and len(value) == length
    return is_list and all(_is_number(number) and number > above for number in value)


def _are_of_channels(value: Any, above: float = -math.inf) -> bool:
    """Whether it is a number for each channel, or one for all."""
    values = value if isinstance(value, list) else [value]
    return _are_numbers(values, max(len(values), 1), above)


KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive int": lambda value: type(value) is int and value > 0,
    "an int from 0": lambda value: type(value) is int and value >= 0,
    "a positive number": lambda value: _is_number(value) and value > 0,
    "a share above 0, at most 1": lambda value: _is_number(value) and 0 < value <= 1,
    "nearest, bilinear or bicubic": lambda value: value in ("nearest", "bilinear", "bicubic"),
    "center or squash": lambda value: value in ("center", "squash"),
    "timm, transformers or vit_jax": lambda v: v in ("timm", "transformers", "vit_jax"),
    "true or false": lambda value: type(value) is bool,
    "text": lambda value: isinstance(value, str),
    "softmax or sigmoid": lambda value: value in list(LOSSES),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "two numbers": lambda value: _are_numbers(value, 2),
    "three numbers": lambda value: _are_numbers(value, 3),
    "three positive numbers": lambda value: _are_numbers(value, 3, above=0),
    "numbers of channels": lambda value: _are_of_channels(value),
    "positive numbers of channels": lambda value: _are_of_channels(value, above=0),
}
READING = {"exif": "true or false", "pixel_range": "two numbers"}  # of any format's files
