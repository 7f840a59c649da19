"""Tar files of images as WebDataset has them: members KEY.jpg, and KEY.cls, KEY.json or KEY.txt.

A key is the name of a member up to the first dot behind the last slash. The label is the number in
`.cls`; else `label`, `class`, `cls` or `labels` in the object of `.json`; else, for a key with
neither, the text in `.txt`, which is a caption otherwise. Where captions are read, `.txt` is never
a label; a key without it has its captions in `.json`, under `caption`, `captions` or `text`.

The places of the members are found once and kept in an index for each file, in `.vit_jax` beside
the file or, where one cannot write there, in $XDG_CACHE_HOME/vit_jax/tar. An index holds while the
size and the mtime of its file stay the same.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import random
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, cast

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError, few, shown
from vit_jax.base.files import cache_folder, write_whole
from vit_jax.data.captions import find_captions
from vit_jax.data.contract import DataSet, Request, Source
from vit_jax.data.host_tf import tf
from vit_jax.data.images.files import warn_once
from vit_jax.data.images.formats import EXTENSIONS
from vit_jax.data.ranges import is_remote, read_span
from vit_jax.data.records import RecordFiles, open_in_python
from vit_jax.data.retries import retried
from vit_jax.data.shard_files import find_files, find_splits
from vit_jax.data.shards import Labels, Part, Shard, open_shards
from vit_jax.data.sources.list import as_labels

# How a compressed file begins -> the program that decompresses it.
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_JSON_KEYS = ("label", "class", "cls", "labels")
# An image: its first byte, its size, and the checksum in its header.
_PLACE = np.dtype([("begin", "<i8"), ("size", "<i8"), ("check", "<i4")])
# The member with the captions: its first byte, its size, -1 if there is none, and what it is.
_CAPTION = np.dtype([("begin", "<i8"), ("size", "<i4"), ("kind", "i1")])
_JSON, _TXT, _LABEL = range(3)  # kinds; _LABEL: a text that is the label of other runs
_VERSION = 1
# Labels that indexes without `whole` have where JSON has a number, which is now -1 or whole.
_OF_NUMBER = re.compile(r"-1|\d+\.0+")
_CHECKSUM = slice(148, 156)  # in a header
_FILES_AT_ONCE = 16
_READS_AT_ONCE = 64  # of an object store, where most of the time is spent waiting
_GAP = 1 << 16  # bytes between two images that are read rather than skipped

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TarShard(Shard):
    """A tar file; `places` (n,) of its images have the type _PLACE."""

    places: np.ndarray
    notes: Sequence[str]


class Tar(DataSet):
    """The tar files below `data_dir`."""

    is_own = True

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        return [*find_splits(data_dir, _SUFFIXES).by_split, "all"]

    def open(self, request: Request) -> Source:
        """Raises InputError naming the files that are damaged, compressed or ambiguous."""
        files = find_files(request, _SUFFIXES)
        shards = read_shards(files.paths, captions=request.captions)
        if notes := [f"{path}: {note}" for path, shard in shards.items() for note in shard.notes]:
            root = f"{os.fspath(files.root)}/"
            left = few(note.removeprefix(root) for note in notes)
            warn_once(f"{shown(files.root)}: left out {len(notes):,} of the members: {left}")
        splits = files.look_up(shards)
        return open_shards(request, files.root, splits, _open_parts, files.class_names())


def read_shards(paths: Sequence[epath.Path], *, captions: bool = False) -> dict[str, TarShard]:
    """{path: shard}, with their captions if asked; makes the indexes that are missing.

    Raises: InputError with the first damaged files.
    """
    found: dict[str, TarShard] = {}
    faults: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        read = functools.partial(_from_index, captions=captions)
        for shard in threads.map(read, paths):
            found |= {shard.path: shard} if shard else {}
        missing = [path for path in paths if os.fspath(path) not in found]
        # Each process in its own order: they share the work, as all use an index that is there.
        place = 0  # of the indexes; once it cannot be written, the next one is taken for all
        mixed = random.sample(missing, len(missing))
        jobs = {threads.submit(_index, path, captions): path for path in mixed}
        for number, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            if number % max(len(jobs) // 10, 1) == 0:
                logger.info("indexed %d of %d tar files", number, len(jobs))
            try:
                if content := job.result():
                    place = _write(jobs[job], content, place)
                found[os.fspath(jobs[job])] = _check(jobs[job], captions)
            except InputError as e:
                faults += e.faults
    if faults:
        more = [f"data.data_dir: {len(faults) - 5:,} tar files more"] * (len(faults) > 5)
        raise InputError(*sorted(faults)[:5], *more)
    return found


def _index_files(path: epath.Path) -> tuple[epath.Path, epath.Path]:
    """Where the index of `path` may lie."""
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return path.parent / ".vit_jax" / f"{path.name}.index", epath.Path(cache_folder("tar")) / name


def _identity(path: epath.Path) -> list[float]:
    stat = path.stat()
    return [_VERSION, stat.length, stat.mtime]


def _from_index(path: epath.Path, captions: bool) -> TarShard | None:
    """The shard, by its index, with `captions` if asked; None if no index has it."""
    identity, name = _identity(path), os.fspath(path)
    for index in _index_files(path):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, tf.errors.OpError):
            content = index.read_bytes()
            first = content.index(b"\n") + 1
            head = json.loads(content[:first])
            is_read_alike = "whole" in head or not any(map(_OF_NUMBER.fullmatch, head["names"]))
            has_captions = len(head["sizes"]) == 4  # older indexes have three arrays
            if head["identity"] == identity and is_read_alike and captions <= has_captions:
                types = (_PLACE, np.dtype(np.int32), np.dtype(np.int32), _CAPTION)
                sizes = [kind.itemsize * n for kind, n in zip(types, head["sizes"], strict=False)]
                starts = np.cumsum([first, *sizes])
                places, codes, counts, *members = (
                    np.frombuffer(content[start : start + size], kind)
                    for kind, start, size in zip(types, starts, sizes, strict=False)
                )
                keys = functools.partial(_read_keys, index, int(starts[-1]))
                names = [*map(sys.intern, head["names"])]  # shared by all shards
                labels, read = Labels(names, codes, counts), None
                if captions:
                    read = functools.partial(_captions, name, members[0])
                    if (members[0]["kind"] == _LABEL).any():
                        labels = labels.none()
                why = functools.partial(_why, name, places)
                notes = head["notes"]
                return TarShard(
                    name, labels, head["digest"], keys, why, read, places=places, notes=notes
                )
    return None


@functools.lru_cache(maxsize=64)
def _read_keys(index: epath.Path, start: int) -> list[str]:
    return json.loads(index.read_bytes()[start:])["keys"]


def _why(path: str, places: np.ndarray, record: int) -> str:
    """Why an image of a shard cannot be read; "" if it can."""
    place = places[record]
    try:
        begin, end = place["begin"] - tarfile.BLOCKSIZE, place["begin"] + place["size"]
        _cut(read_span(path, begin, end), begin, place)
    except (OSError, ValueError) as e:
        return f"its file has changed since it was indexed, or cannot be read ({e}); restore it"
    return ""


def _captions(path: str, members: np.ndarray, record: int) -> list[str | bytes]:
    """The captions of a record of a tar file, at their place in `members`."""
    begin, size, kind = members[record].tolist()
    if size < 0:
        return []
    content = retried(lambda: read_span(path, begin, begin + size), path)
    with contextlib.suppress(ValueError, TypeError):  # the file has changed since it was indexed
        return find_captions(json.loads(content)) if kind == _JSON else [content]
    return []


def _index(path: epath.Path, captions: bool) -> bytes:
    """The index of `path`; empty if another process has written it.

    Raises: InputError if the file is damaged, compressed or ambiguous.
    """
    if _from_index(path, captions):
        return b""
    identity = _identity(path)
    records, notes = _scan(path)
    labels = Labels.of(record.labels() for record in records)
    places, members = (
        np.array([getattr(record, name) for record in records], kind)
        for name, kind in (("image", _PLACE), ("caption", _CAPTION))
    )
    arrays, names = [places, labels.codes, labels.counts, members], [r.name for r in records]
    known = [names, labels.names, *(a.tolist() for a in (places["size"], *arrays[1:3]))]
    head = {
        "identity": identity,
        "sizes": [len(array) for array in arrays],
        "digest": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        "names": labels.names,
        "notes": notes,
        "whole": True,
    }
    tail = {"keys": names}
    return b"".join(
        [json.dumps(head).encode(), b"\n", *map(bytes, arrays), json.dumps(tail).encode()]
    )


def _write(path: epath.Path, content: bytes, first: int) -> int:
    """Write the index of `path`; returns its place in `_index_files`, at least `first`."""
    for place, index in enumerate(_index_files(path)[first:], first):
        with contextlib.suppress(OSError, tf.errors.OpError):
            index.parent.mkdir(parents=True, exist_ok=True)
            write_whole(index, content)
            return place
    return first


def _check(path: epath.Path, captions: bool) -> TarShard:
    """The shard, by its index; raises InputError if there is none that holds."""
    shard = _from_index(path, captions)
    if shard is None:
        beside, cached = map(shown, _index_files(path))
        raise InputError(
            f"data.data_dir: {shown(path)} changes while it is read, or neither {beside} nor "
            f"{cached} can be written; set XDG_CACHE_HOME to a folder for its index"
        )
    return shard


@dataclasses.dataclass
class _Record:
    """The files of a tar file under one key."""

    image: tuple[int, int, int] | None = None  # as _PLACE
    name: str = ""  # of the image
    contents: dict[str, bytes] = dataclasses.field(default_factory=dict)  # of cls, json, txt
    begins: dict[str, int] = dataclasses.field(default_factory=dict)  # where these are

    @property
    def caption(self) -> tuple[int, int, int]:
        """As _CAPTION."""
        if "txt" in self.contents:
            kind = _TXT if self.contents.keys() & {"cls", "json"} else _LABEL
            return self.begins["txt"], len(self.contents["txt"]), kind
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self.contents.get("json", b"null"))
            if isinstance(found, dict) and find_captions(found):
                return self.begins["json"], len(self.contents["json"]), _JSON
        return 0, -1, _TXT

    def labels(self) -> Sequence[str] | None:
        """None if they cannot be read."""
        try:
            if "cls" in self.contents:
                number = int(self.contents["cls"])
                return [] if number < 0 else [str(number)]
            if "json" in self.contents:
                found = json.loads(self.contents["json"])
                given = [found[key] for key in _JSON_KEYS if key in found]
                value = next((value for value in given if value is not None), None)
                return [*dict.fromkeys(as_labels(value))]
            return [*dict.fromkeys(as_labels(self.contents.get("txt", b"").decode("utf-8-sig")))]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def _scan(path: epath.Path) -> tuple[list[_Record], list[str]]:
    """The records of a tar file, in its order, and what is left out.

    Reads the headers, and the contents of the small members.

    Raises: InputError if the file is damaged, compressed or ambiguous.
    """
    records: dict[str, _Record] = {}
    notes: list[str] = []
    where, name, extension = f"data.data_dir: {shown(path)}", "", ""
    opened: IO[bytes] = path.open("rb")
    with opened as file:
        start = file.read(8)
        if tool := next((tool for mark, tool in _PACKED.items() if start.startswith(mark)), None):
            raise InputError(
                f"{where} is compressed, so its images cannot be read by their place; repack it: "
                f"{tool} -dc {shown(path)} > NEW.tar"
            )
        file.seek(0)
        try:
            for member in _members(file):
                folder, _, name = member.name.rpartition("/")
                key, _, extension = name.partition(".")
                if not key or member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    kind = "sparse" if member.isreg() else "a link or no file"
                    notes.append(f"{member.name} is {kind}")
                    continue
                key, extension = os.path.normpath(f"{folder or '.'}/{key}"), extension.lower()
                record = records.setdefault(key, _Record())
                if f".{extension}" in EXTENSIONS:
                    if record.image:
                        raise ValueError(
                            f"has two images of one key, {record.name} and {member.name}; keep one"
                        )
                    record.name = member.name
                    record.image = member.offset_data, member.size, member.chksum
                elif extension in ("cls", "json", "txt"):
                    file.seek(member.offset_data)
                    record.begins[extension] = member.offset_data
                    record.contents[extension] = file.read(member.size)
            if not any(record.image for record in records.values()):
                dotted = (
                    ""
                    if name.count(".") < 2
                    else (f"; a key ends at the first dot, so the type of {name} is {extension}")
                )
                needed = "needed: members such as 0001.jpg and 0001.cls"
                raise ValueError(f"holds no images; {needed}{dotted}")
        except (tarfile.TarError, ValueError) as e:
            raise InputError(f"{where} {e}") from None
    notes += [f"{key} has no image" for key, record in records.items() if not record.image]
    found = [record for record in records.values() if record.image]
    return sorted(found, key=lambda record: record.image or ()), notes


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Raises tarfile.TarError if the file is no tar file, or ends before its end."""
    size = file.seek(0, os.SEEK_END) or file.tell()
    file.seek(0)
    name = ""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined] # it would keep them all
                name = member.name
                yield member
            end = tar.offset
    except tarfile.ReadError as e:
        if not name:
            what = "is empty" if not size else f"is no tar file ({e})"
            raise tarfile.ReadError(f"{what}; copy it again") from None
        end = size
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # which tarfile overlooks
        raise tarfile.ReadError(f"is cut short or damaged behind {name}; copy it again")


def _open_parts(parts: Sequence[Part]) -> RecordFiles:
    """See `shards.OpenParts`."""
    segments = np.cumsum([0, *(part.take for part in parts)])[:-1]
    paths = [part.shard.path for part in parts]
    map_runs = _readers().map if any(map(is_remote, paths)) else map

    def place_of(part: int, record: int) -> np.ndarray:
        shard, skip, _ = parts[part]
        return cast(TarShard, shard).places[record - segments[part] + skip]

    def read_rows(ids: np.ndarray) -> list[bytes]:
        found = [b""] * len(ids)
        rows = np.flatnonzero(ids >= 0)
        part = np.searchsorted(segments, ids[rows], side="right") - 1
        own = np.array([place_of(*pair) for pair in zip(part, ids[rows], strict=True)], _PLACE)
        begins, ends = own["begin"], own["begin"] + own["size"]
        near = (np.diff(part) == 0) & (np.diff(begins) >= 0) & (begins[1:] - ends[:-1] <= _GAP)

        def read_run(run: np.ndarray) -> None:
            first, path = begins[run[0]] - tarfile.BLOCKSIZE, paths[part[run[0]]]
            span = retried(lambda: read_span(path, first, ends[run].max()), path)
            for i in run:
                with contextlib.suppress(ValueError):
                    found[rows[i]] = _cut(span, first, own[i])

        runs = np.split(np.arange(len(rows)), np.flatnonzero(~near) + 1) if len(rows) else []
        collections.deque(map_runs(read_run, runs), maxlen=0)
        return found

    return open_in_python(segments, read_rows)


@functools.cache
def _readers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE)


def _cut(span: bytes, first: int, place: np.void) -> bytes:
    """The image at `place` in a `span` of a file that starts at the byte `first`.

    Raises: ValueError if another member is there.
    """
    at = place["begin"] - first
    header, image = span[at - tarfile.BLOCKSIZE : at], span[at : at + place["size"]]
    check = int(header[_CHECKSUM].strip(b"\0 ") or b"0", 8)
    if check != place["check"] or len(image) != place["size"]:
        raise ValueError("another member is there")
    return image
