"""The seal of a saved step: the size of every file, and the digests of small files.

It protects files that the checksums of leaves do not cover, such as metadata. It is written before
orbax commits a step; files that orbax writes during the commit are added afterwards.
"""

import concurrent.futures
import hashlib
import json

from etils import epath

from vit_jax.files import write_whole

_SEAL = "seal.json"
_READ_AT_ONCE = 32
_DIGESTED_UP_TO = 1 << 20  # bytes; larger files hold array data, covered by checksums of leaves
# Files that orbax writes during the commit; added to the seal afterwards.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write_seal(step_dir: epath.Path) -> None:
    """Seal a step that is not committed yet."""
    files = _files(step_dir) | dict.fromkeys(_COMMIT_FILES)
    write_whole(step_dir / _SEAL, json.dumps(files, indent=1))


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
    found = _files(step_dir)
    for name, entry in json.loads((step_dir / _SEAL).read_text()).items():
        if name not in found:
            raise ValueError(f"file {name} is missing")
        if entry is not None and found[name] != entry:
            raise ValueError(f"file {name} is damaged ({found[name][0]} bytes)")


def _files(step_dir: epath.Path) -> dict[str, list]:
    """{relative path: [bytes, digest or None if the file is large]}, without the seal."""

    def below(folder, prefix):
        for path in folder.iterdir():
            if path.is_dir():
                yield from below(path, f"{prefix}{path.name}/")
            elif path.name != _SEAL:
                yield prefix + path.name, path

    paths = dict(below(step_dir, ""))
    # A pod writes many files, and each one is a slow request to a store.
    with concurrent.futures.ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return dict(zip(paths, pool.map(_entry, paths.values()), strict=True))


def _entry(path: epath.Path) -> list:
    size, digest = path.stat().length, None
    if size <= _DIGESTED_UP_TO:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [size, digest]
