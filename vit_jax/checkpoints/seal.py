"""The seal of a saved step: the size of every file, and the digests of small files.

It protects files that the checksums of leaves do not cover, such as metadata. It is written before
orbax commits a step; files that orbax writes during the commit are added afterwards.
"""

import concurrent.futures
import hashlib
import json
from collections.abc import Iterable, Iterator

from etils import epath

from vit_jax.base.files import write_whole

_SEAL = "seal.json"
_READ_AT_ONCE = 32
_DIGESTED_UP_TO = 1 << 20  # bytes; larger files hold array data, covered by checksums of leaves
# Files that orbax writes during the commit; added to the seal afterwards.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write_seal(step_dir: epath.Path) -> None:
    """Seal a step that is not committed yet."""
    names = list(names_of_files(step_dir))
    sealed = dict(zip(names, _entries(step_dir, names), strict=True))
    write_whole(step_dir / _SEAL, json.dumps(sealed | dict.fromkeys(_COMMIT_FILES), indent=1))


def complete_seal(step_dir: epath.Path) -> None:
    """Add the files of the commit to the seal of a step."""
    sealed = json.loads((step_dir / _SEAL).read_text())
    committed = [step_dir / name for name in _COMMIT_FILES]
    sealed |= {path.name: _entry(path) for path in committed if path.exists()}
    write_whole(step_dir / _SEAL, json.dumps(sealed, indent=1))


def check_seal(step_dir: epath.Path) -> None:
    """Raise ValueError, naming the file, at the first file that differs from the seal."""
    if not (step_dir / _SEAL).exists():
        raise ValueError(f"file {_SEAL} is missing")
    sealed = json.loads((step_dir / _SEAL).read_text())
    for (name, entry), found in zip(sealed.items(), _entries(step_dir, sealed), strict=True):
        if found is None:
            raise ValueError(f"file {name} is missing")
        if entry is not None and found != entry:
            raise ValueError(f"file {name} is damaged ({found[0]} bytes)")


def names_of_files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """The relative paths of all files, without the seal."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from names_of_files(path, f"{prefix}{path.name}/")
        elif path.name != _SEAL:
            yield prefix + path.name


def _entries(step_dir: epath.Path, names: Iterable[str]) -> list[list | None]:
    """[bytes, digest or None if the file is large] of each file; None if it is missing.

    A running job completes the seal under another name: only the files in `names` are looked at.
    """
    # A pod writes many files, and each one is a slow request to a store.
    with concurrent.futures.ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(_entry, (step_dir / name for name in names)))


def _entry(path: epath.Path) -> list | None:
    if not path.exists():
        return None
    size, digest = path.stat().length, None
    if size <= _DIGESTED_UP_TO:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [size, digest]
