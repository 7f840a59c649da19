"""Files of named arrays in the safetensors format: single files, or the shards of a folder.

The names determine the meaning of the arrays: see `huggingface` and `timm`.
"""

import json
import logging
from collections.abc import Container, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from etils import epath
from safetensors.numpy import save

from vit_jax.errors import InputError
from vit_jax.files import write_whole
from vit_jax.transfer.layout import as_float32

logger = logging.getLogger("vit_jax")

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INDEX = "model.safetensors.index.json"
_ALONE = "model.safetensors"


def entrance(path: epath.Path) -> epath.Path:
    """`path`; for model.safetensors in a folder with config.json, the folder."""
    is_inside = path.name == _ALONE and (path.parent / "config.json").exists()
    return path.parent if is_inside else path


def recognises(path: epath.Path) -> bool:
    """Whether `path` is such a file, or a folder with one."""
    if path.suffix == ".safetensors":
        return True
    return path.is_dir() and any((path / name).exists() for name in (_INDEX, _ALONE))


def read_stored(path: epath.Path) -> dict[str, dict[str, Any]]:
    """{name: {"dtype", "shape", "data", "file"}} of a file, or of the shards of a folder's index.

    Raises:
      InputError: if a file cannot be read, or is missing.
    """
    if not path.is_dir():
        return _read_file(path)
    if not (path / _INDEX).exists():
        return _read_file(path / _ALONE)
    places = read_json(path / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise InputError(f"init_from={str(path)!r}: {_INDEX} has no weight_map; fetch it again")
    shards = sorted(set(places.values()))
    outside = [shard for shard in shards if "/" in shard or "\\" in shard]
    if outside:
        raise InputError(
            f"init_from={str(path)!r}: {_INDEX} names {outside[0]!r}, which is outside the folder"
        )
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        raise InputError(
            f"init_from={str(path)!r}: {', '.join(missing)} missing from the {len(shards)} files "
            f"that {_INDEX} names; fetch the folder again"
        )
    stored: dict[str, dict[str, Any]] = {}
    for shard in shards:
        stored |= _read_file(path / shard)
    absent = sorted(places.keys() - stored.keys())
    if absent:
        raise InputError(
            f"init_from={str(path)!r}: arrays that {_INDEX} names are absent ({len(absent)}): "
            f"{', '.join(absent[:5])}; fetch the folder again"
        )
    return stored


def _read_file(path: epath.Path) -> dict[str, dict[str, Any]]:
    try:
        entries = safetensors.deserialize(path.read_bytes())
        stored = {name: entry | {"file": path} for name, entry in entries}
    except (safetensors.SafetensorError, OSError) as e:
        raise InputError(_unreadable(path, e)) from None
    if not stored:
        raise InputError(f"init_from={str(path)!r}: it holds no arrays")
    return stored


def as_arrays(stored: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """{name: float32 array} from the result of `read_stored`, which is emptied to save memory.

    Raises:
      InputError: if an array is not floating point.
    """
    arrays = {}
    for name in list(stored):
        spec = stored.pop(name)
        try:
            if spec["dtype"] not in _DTYPES:
                raise ValueError(f"{name} has dtype {spec['dtype']}; needed: floating point")
            flat = np.frombuffer(spec["data"], _DTYPES[spec["dtype"]])
            arrays[name] = as_float32(name, flat.reshape(spec["shape"]))
        except ValueError as e:
            raise InputError(_unreadable(spec["file"], e)) from None
    return arrays


def _unreadable(path: epath.Path, error: Exception) -> str:
    return (
        f"init_from={str(path)!r}: not a readable .safetensors file of weights ({error}); fetch it "
        "again"
    )


def write_arrays(path: epath.Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file with PyTorch's mark in its metadata, which some libraries require."""
    write_whole(path, save(arrays, metadata={"format": "pt"}))


def config_path(path: epath.Path) -> epath.Path:
    """The path of a source's config: inside a folder; for a file next to it, with the same stem."""
    return path / "config.json" if path.is_dir() else path.with_suffix(".json")


def read_config(path: epath.Path) -> dict[str, Any] | None:
    """The contents of `config_path`; None if the file does not exist."""
    config = config_path(path)
    return read_json(config) if config.exists() else None


def say_assumed(
    path: epath.Path, config: Any, assumed: Mapping[str, Any], stated: Container[str]
) -> None:
    """Log the values in `assumed` that the JSON file of `path` does not state.

    `config` is None if there is no JSON file.
    """
    missing = {key: value for key, value in assumed.items() if key not in stated}
    name = config_path(path).name
    said = ", ".join(f"{key}={value!r}" for key, value in missing.items())
    if config is None:
        logger.warning("%s: no %s next to it; assuming %s", path, name, said)
    elif missing:
        logger.info("%s: assuming %s, which %s does not state", path, said, name)


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
