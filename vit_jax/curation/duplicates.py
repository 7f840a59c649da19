"""Near duplicates within a set of pictures, and between it and others such as its test sets.

    parts of sets ──look_at──> hashes ──keys_of──> equal keys ──pairs_within──> pairs ──> left out

Two pictures are near if the PDQ hash of one differs from the other's, or from its mirror image's,
in at most `distance` of 256 bits. Two hashes are compared if they have a key in common: the same 16
bits but one, or in large sets the same 32 bits. Processes of this machine and Apache Beam call the
same functions.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vit_jax.base.errors import InputError
from vit_jax.base.files import open_for_append
from vit_jax.config.sections import Data
from vit_jax.curation.looks import look_at, small_pictures
from vit_jax.curation.shards import DECODED_BY, open_split
from vit_jax.data.contract import Source, fingerprint
from vit_jax.data.order import spread
from vit_jax.insight.pages import Section

FOLDER = ".hashes"
_PART = 4096  # records that are hashed together
_LARGE = 1 << 20  # records; from here on equal keys have 32 bits
_BANDS, _BITS = 16, 16  # of a hash
_BLOCK = 1 << 20  # pairs of hashes that are compared at once
_SHOWN = 60  # pairs of the page
_NEIGHBOURS = 16  # pictures of the nearest features that are looked at


class Part(NamedTuple):
    """Records first, ..., stop - 1 of a split, whose hashes are kept at `path`.

    offset: the number of records in the sets before this one.
    """

    data: Data
    fingerprint: str
    first: int
    stop: int
    offset: int
    path: str


def parts_of(folder: epath.Path, sets: Sequence[tuple[Data, Source]]) -> list[Part]:
    """All parts of the sets, one after the other."""
    found, offset = list[Part](), 0
    for data, source in sets:
        how = [getattr(data, key) for key in DECODED_BY]
        name = fingerprint("hashes", source.fingerprint, how)
        for first in range(0, source.num_examples, _PART):
            path = folder / FOLDER / f"{name}-{first:010}"
            stop = min(first + _PART, source.num_examples)
            found.append(Part(data, source.fingerprint, first, stop, offset, str(path)))
        offset += source.num_examples
    return found


def hash_part(part: Part) -> dict[str, Any]:
    """Write the hashes of a part, uint64 (n, 2, 4), unless they are there; the counts for progress.

    Raises: InputError if the data have changed.
    """
    path = epath.Path(part.path)
    if not path.exists():
        source = open_split(part.data, part.data.split, part.data.text_length is not None)
        if source.fingerprint != part.fingerprint:
            raise InputError(f"{source.name} {source.split}: has changed meanwhile; begin again")
        hashes = look_at(source, part.first, part.stop).hashes
        path.parent.mkdir(parents=True, exist_ok=True)
        open_for_append(path, [hashes.tobytes()]).close()
    return {"records": part.stop - part.first, "broken": ()}


def hashes_of(part: Part) -> np.ndarray:
    """The hashes that `hash_part` wrote."""
    return np.frombuffer(epath.Path(part.path).read_bytes(), np.uint64).reshape(-1, 2, 4)


def keys_of(hashes: np.ndarray, number: int) -> Iterator[np.ndarray]:
    """Keys of hashes (n, 4), an array (n,) at a time; `number` of records decides which.

    Small sets have 256 keys, and hashes at a distance of up to 31 share one. Large sets have 120:
    hashes at a distance of up to 14 share one, and others with a probability that falls with it.
    """
    bands = hashes.view(np.uint16)
    if number < _LARGE:
        for band, bit in itertools.product(range(_BANDS), range(_BITS)):
            yield bands[:, band] & np.uint16(~(1 << bit) & 0xFFFF)
        return
    for a, b in itertools.combinations(range(_BANDS), 2):
        yield bands[:, a].astype(np.uint32) << 16 | bands[:, b]


def _first_key(differs: np.ndarray, number: int) -> np.ndarray:
    """The number in `keys_of` of the first key that hashes share: int64 (p,).

    differs: uint16 (p, 16), the bits in which the two hashes of a pair, which share a key, differ.
    """
    if number < _LARGE:
        band = (np.bitwise_count(differs) < 2).argmax(1)
        lower = np.maximum(differs[np.arange(len(band)), band], 1) - 1  # bits below the other one
        return band * _BITS + np.bitwise_count(lower)
    a, b = np.argsort(differs != 0, axis=1, kind="stable")[:, :2].T  # the first equal bands
    return a * (2 * _BANDS - 1 - a) // 2 + b - a - 1


def pairs_within(
    keys: np.ndarray, ids: np.ndarray, hashes: np.ndarray, distance: int, nth: int, number: int
) -> Iterator[np.ndarray]:
    """Pairs with equal keys and near hashes: int64 (p, 3), two ids and their distance.

    A pair that shares an earlier key too is left out: it is found by that one.

    Args:
      keys: (n,), number `nth` of `keys_of`, which says what `number` is.
      ids: (n,).
      hashes: uint64 (n, 4).
    """
    order = np.argsort(keys, kind="stable")
    keys, ids, hashes = keys[order], ids[order], hashes[order]
    counts = np.searchsorted(keys, keys, side="right") - np.arange(len(keys)) - 1
    ends = np.cumsum(counts)
    start = 0
    while start < len(keys):
        before = ends[start] - counts[start]
        stop = max(int(np.searchsorted(ends, before + _BLOCK)), start + 1)
        left = np.repeat(np.arange(start, stop), counts[start:stop])
        firsts = np.repeat(ends[start:stop] - counts[start:stop], counts[start:stop])
        right = left + 1 + np.arange(before, before + len(left)) - firsts
        differs = hashes[left] ^ hashes[right]
        apart = np.bitwise_count(differs).sum(1)
        near = np.flatnonzero(apart <= distance)
        near = near[_first_key(differs[near].view(np.uint16), number) == nth]
        yield np.stack([ids[left[near]], ids[right[near]], apart[near]], 1, dtype=np.int64)
        start = stop


def pairs_here(parts: Sequence[Part], distance: int) -> np.ndarray:
    """The pairs of all parts, on this machine."""
    return near_hashes(np.concatenate([hashes_of(part) for part in parts]), distance)


def near_hashes(hashes: np.ndarray, distance: int) -> np.ndarray:
    """Pairs int64 (p, 3) of hashes (n, 2, 4), and their distance, each once.

    Hash 2 i is of record i, and 2 i + 1 of its mirror image. Equal hashes are paired with the first
    of them, which stands for all.
    """
    flat = hashes.reshape(-1, 4)
    ids = np.flatnonzero(flat.any(1))
    unique, first, which = np.unique(flat[ids], axis=0, return_index=True, return_inverse=True)
    same = np.stack([ids[first[which]], ids, 0 * ids], 1)
    found = [same[same[:, 0] != same[:, 1]]]
    for nth, keys in enumerate(keys_of(unique, len(flat) // 2)):
        found += pairs_within(keys, ids[first], unique, distance, nth, len(flat) // 2)
    return np.concatenate(found)


# (parts whose hashes are written, distance) -> pairs of hashes.
Finder = Callable[[Sequence[Part], int], np.ndarray]


def of_records(pairs: np.ndarray) -> np.ndarray:
    """Pairs of hashes as pairs of different records a < b with their least distance, sorted."""
    a, b = np.sort(pairs[:, :2] // 2, axis=1).T
    a, b, apart = (x[a != b] for x in (a, b, pairs[:, 2]))
    order = np.lexsort((apart, b, a))
    found = np.stack([a, b, apart], 1)[order]
    is_first = np.ones(len(found), bool)
    is_first[1:] = (found[1:, :2] != found[:-1, :2]).any(1)
    return found[is_first]


def pairs_of_features(x_ND: np.ndarray, similarity: float) -> tuple[np.ndarray, np.ndarray]:
    """(int64 (p, 2), a < b; float32 (p,)): pairs of features and their cosine, at least so large.

    Each record is compared with those that an approximate index finds nearest to it; rows of NaN
    are in no pair.
    """
    from usearch.index import Index

    ids = np.flatnonzero(np.isfinite(x_ND).all(1))
    if not len(ids):
        raise InputError("--features: no record has features; were the pictures readable?")
    index = Index(ndim=x_ND.shape[1], metric="cos", dtype="f32")
    index.add(ids, x_ND[ids], threads=1)  # in one order, so that the result is always the same
    found = index.search(x_ND[ids], min(_NEIGHBOURS, len(ids)))
    cosine = 1 - found.distances.reshape(len(ids), -1)
    i, j = np.nonzero(cosine >= similarity)
    pairs = np.sort(np.stack([ids[i], found.keys.reshape(cosine.shape)[i, j].astype(int)], 1))
    different = pairs[:, 0] != pairs[:, 1]
    pairs, first = np.unique(pairs[different], axis=0, return_index=True)
    return pairs, cosine[i, j][different][first]


def leave_out(pairs: np.ndarray, first_own: int, number: int) -> np.ndarray:
    """Which of `number` records to leave out, bool: all that pairs link but the first.

    Links go on from pair to pair, so that each copy of a copy is left out too.

    pairs: (p, 2), a < b. Records before `first_own`, which belong to other sets, all stay.
    """
    links = coo_array((np.ones(len(pairs), bool), tuple(pairs.T)), shape=(number, number))
    _, group = connected_components(links, directed=False)
    out = np.ones(number, bool)
    out[np.unique(group, return_index=True)[1]] = False
    out[:first_own] = False
    return out


def read_features(path: str, source: Source) -> np.ndarray:
    """The features of `predict --features=FILE.npz`, one row for each record of `source`.

    Raises: InputError if there is no such file, or it is of other records.
    """
    try:
        with np.load(path) as stored:
            x_ND, names = stored["features"], stored["record"]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as e:
        raise InputError(
            f"--features={path}: cannot be read ({e}); `vit_jax predict --features` writes one"
        ) from None
    last = source.num_examples - 1
    if len(names) != last + 1 or any(names[i] != source.record_name(i) for i in (0, last)):
        raise InputError(
            f"--features={path}: has {len(names):,} records, {source.name} {source.split} "
            f"{last + 1:,} with other names; give first the features of SOURCE, then the "
            "features of each --against"
        )
    return x_ND.reshape(len(x_ND), -1)


class Found(NamedTuple):
    """Near duplicates of the last of several sets, whose records are numbered one after the other.

    pairs: int64 (p, 2), a < b, b of the last set; the nearest by hash first, then by features.
    bits, cosine: how near they are; -1 and NaN where they are not near enough to be found by it.
    out: which records of the last set are left out.
    """

    pairs: np.ndarray
    bits: np.ndarray
    cosine: np.ndarray
    out: np.ndarray


def find(
    sources: Sequence[Source],
    by_hash: np.ndarray,
    features: Sequence[np.ndarray] = (),
    similarity: float = 1.0,
) -> Found:
    """The near duplicates of the last of `sources`.

    Args:
      by_hash: a `Finder`'s pairs of their hashes.
      features: of each source, or none; and the least `similarity` of a pair.
    """
    number = sum(source.num_examples for source in sources)
    first_own = number - sources[-1].num_examples
    a, b, bits = of_records(by_hash).T
    cosine = np.full(len(a), np.nan)
    if features:
        pairs, alike = pairs_of_features(np.concatenate(features), similarity)
        known, codes = a * number + b, pairs @ (number, 1)
        new = ~np.isin(codes, known)
        cosine[np.searchsorted(known, codes[~new])] = alike[~new]
        order = np.argsort(-alike[new], kind="stable")
        a, b = np.concatenate([np.stack([a, b]), pairs[new][order].T], 1)
        cosine = np.concatenate([cosine, alike[new][order]])
        bits = np.concatenate([bits, np.full(len(order), -1)])
    order = np.argsort(np.where(bits < 0, 256, bits), kind="stable")
    order = order[b[order] >= first_own]
    pairs = np.stack([a, b], 1)[order]
    out = leave_out(pairs, first_own, number)[first_own:]
    return Found(pairs, bits[order], cosine[order], out)


def table_of(found: Found, sources: Sequence[Source]) -> Iterator[Sequence[Any]]:
    """The rows of pairs.csv, the first with the names of the columns."""
    yield ("record", "name", "left_out", "near_split", "near_record", "near_name", "bits", "cosine")
    first_own = sum(source.num_examples for source in sources[:-1])
    rows = zip(found.pairs.tolist(), found.bits.tolist(), found.cosine.tolist(), strict=True)
    for (a, b), bits, cosine in rows:
        near, record = place_of(a, sources)
        own = b - first_own
        yield (
            own, sources[-1].record_name(own), bool(found.out[own]), f"{near.name}:{near.split}",
            record, near.record_name(record), bits if bits >= 0 else "",
            "" if np.isnan(cosine) else f"{cosine:.4f}",
        )  # fmt: skip


def sections_of(found: Found, sources: Sequence[Source], most: int = _SHOWN) -> list[Section]:
    """At most so many pairs to look at, evenly chosen from the nearest to the farthest."""
    number, rows = len(found.pairs), list[list[tuple[str, bytes]]]()
    for i in spread(most, number).tolist():
        how = f"{found.bits[i]} bits" if found.bits[i] >= 0 else f"cosine {found.cosine[i]:.3f}"
        both = [place_of(int(record), sources) for record in found.pairs[i]]
        named = [f"{source.record_name(record)}, {source.split}" for source, record in both]
        pictures = [small_pictures(source, np.array([record])) for source, record in both]
        if all(pictures):
            captions = named[0], f"{named[1]}: {how}"
            shown = (next(iter(picture.values())) for picture in pictures)
            rows.append([*zip(captions, shown, strict=True)])
    said = f"{number:,} pairs; {found.out.sum():,} of {len(found.out):,} pictures are left out."
    return [Section("Pairs", "ok", said, pictures=rows)]


def place_of(number: int, sources: Sequence[Source]) -> tuple[Source, int]:
    """The source of a record that is numbered over all, and its number there."""
    for source in sources:
        if number < source.num_examples:
            return source, number
        number -= source.num_examples
    raise AssertionError(number)
