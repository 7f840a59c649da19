"""Captions of images: their tokenizer, and the token ids that a batch holds.

An image may have several captions: training draws one by (seed, position). A caption counts if it
is UTF-8, has words, and holds none of the tokenizer's special tokens. An image without one keeps
its row, with `text_mask` 0. Captions of more than `data.text_length` tokens are cut before the end
token, as in the training of CLIP and SigLIP.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import files
from vit_jax.base.errors import InputError, few
from vit_jax.config.sections import Data
from vit_jax.data.contract import Source, fingerprint
from vit_jax.data.loading import Batch
from vit_jax.data.order import spread
from vit_jax.data.tokenizers import (
    FILES,
    SIZE,
    Tokenizer,
    TokenizerFiles,
    canonical,
    find_tokenizer,
    train_tokenizer,
)

NAMES = ("caption", "captions", "text")  # columns, features or keys that hold captions
TOKENIZER = "tokenizer"  # the folder of a workdir that holds the tokenizer of its run
_LOOKED_AT = 20_000  # images whose captions are counted at each start: a second on a local disk
_TAUGHT = 200_000  # images whose captions a tokenizer is trained on, once
_AHEAD = 2  # batches whose captions are read while one is used
_READERS = 16  # threads: in an object store most of the time is spent waiting


def kept_tokenizer(workdir: epath.Path, data: Data) -> TokenizerFiles:
    """The place of the tokenizer of the run in `workdir`, for `data` with a `text_length`."""
    assert data.text_length is not None
    return TokenizerFiles(workdir / TOKENIZER, data.text_length)


def read_kept(workdir: epath.Path, data: Data) -> Tokenizer:
    """The tokenizer of the run in `workdir`; `data`: of its resolved settings.

    Raises: InputError if it cannot be read, or is not the one that the run began with.
    """
    kept = kept_tokenizer(workdir, data)
    return _read_checked(kept, kept.contents, data)


def _read_checked(place: TokenizerFiles, contents: Mapping[str, bytes], data: Data) -> Tokenizer:
    """The tokenizer in `contents`, which must have the digest in `data` if there is one."""
    tokenizer = place.read(contents)
    if data.vocabulary_digest not in (None, digest := digest_of(contents)):
        where = f"data.tokenizer={data.tokenizer!r}: {place.folder}"
        got = f"got {digest}, needed {data.vocabulary_digest}"
        raise InputError(f"{where}: the run began with another tokenizer: {got}; restore it")
    return tokenizer


def keep_tokenizer(workdir: epath.Path, contents: Mapping[str, bytes]) -> None:
    """Write these files, {name: content}, as the tokenizer of the run; remove others."""
    folder = workdir / TOKENIZER
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*FILES} - {*contents}:
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        files.write_whole(folder / name, content)


def open_tokenizer(
    data: Data,
    workdir: epath.Path,
    source: Source,
    was: str | None = None,
    of_weights: Mapping[str, bytes] = types.MappingProxyType({}),
) -> tuple[Tokenizer, Mapping[str, bytes]]:
    """The tokenizer of a run, and {name: content} of the files that its workdir keeps.

    A run that goes on takes the one in its workdir, and needs `data.tokenizer` only if that is lost
    or the user names another than before. Without a name, a new run takes its weights' tokenizer,
    or trains one on the captions of `source`, of at most 200,000 images; every process trains the
    same.

    was: `data.tokenizer` of the run that goes on.
    of_weights: {name: content} of the tokenizer of `init_from`; {}: it has none.

    Raises: InputError if there are no captions, the tokenizer cannot be read, or a run that goes on
      had another one.
    """
    if source.captions is None:
        where = f"data.text_length={data.text_length}: {source.name} {source.split}"
        raise InputError(f"{where} has no captions; add them, or set it to None")
    found = kept_tokenizer(workdir, data)
    # A run that was killed before config.json had the digest leaves files that nobody has checked.
    contents: Mapping[str, bytes] = found.contents if data.vocabulary_digest is not None else {}
    is_own = digest_of(contents) == data.vocabulary_digest
    if data.tokenizer is not None and not (is_own and data.tokenizer == was):
        found = find_tokenizer(data.tokenizer, found.length)
        contents = found.contents
    elif not contents:
        if data.vocabulary_digest is not None:
            lost = "the tokenizer that the run began with is missing; restore it"
            raise InputError(f"data.tokenizer=None: {found.folder}: {lost}")
        texts = (_usable(captions, canonical)[0] for _, captions in _sample(source, _TAUGHT))
        size = data.vocabulary or SIZE
        contents = of_weights or train_tokenizer(itertools.chain.from_iterable(texts), size)
    tokenizer = _read_checked(found, contents, data)
    if tokenizer.room < 1:
        raise InputError(f"data.text_length={found.length}: has no room for words; set it to 16")
    if data.vocabulary not in (None, tokenizer.vocabulary):
        has = f"{found.folder} has {tokenizer.vocabulary} token ids; set it to that, or to None"
        raise InputError(f"data.vocabulary={data.vocabulary}: {has}")
    return tokenizer, contents


def digest_of(contents: Mapping[str, bytes]) -> str:
    """32 hex digits of the files of a tokenizer, {name: content}."""
    return fingerprint([[n, hashlib.sha256(contents[n]).hexdigest()] for n in sorted(contents)])


def look_at(source: Source) -> tuple[str, str]:
    """(digest, faults) of the captions of at most 20,000 images, evenly spaced.

    The faults are for the user: the number of the captions that are left out or cut, and the first
    images that have some; "" if there are none.

    Raises: InputError if no caption can be used.
    """
    tokenizer, digest, good = source.tokenizer, hashlib.sha256(), 0
    assert tokenizer is not None
    found: dict[str, list[int]] = {}
    for record, captions in _sample(source, _LOOKED_AT):
        content = [*map(as_bytes, captions)]
        digest.update(f"{record} {[*map(len, content)]}".encode() + b"".join(content))
        texts, faults = _usable(captions, tokenizer.clean, tokenizer.specials)
        long = [text for text in texts if len(tokenizer.ids_of(text)) > tokenizer.room]
        good += bool(texts)
        for fault in (*faults, *[f"cut to {tokenizer.room} tokens"] * len(long)):
            found.setdefault(fault, []).append(record)
    said = [
        f"{len(records):,} {fault} ({few(source.record_name(i) for i in dict.fromkeys(records))})"
        for fault, records in found.items()
    ]
    text = f"{source.name} {source.split}: " + "; ".join(said)
    if not good:
        raise InputError(f"data.text_length: no caption can be used: {text}")
    text += "; images without another caption are left out"
    return digest.hexdigest()[:32], text * bool(said)


def with_texts(
    batches: Iterator[Batch], source: Source, positions: Iterable[np.ndarray], seed: int
) -> Iterator[Batch]:
    """`batches` with `text` int32 (b, T) and `text_mask` float32 (b,), two of them read ahead.

    positions: int64 (b,) of the rows of each batch; no batch is taken beyond them.
    seed: of the draws.
    """
    captions_of, tokenizer = source.captions, source.tokenizer
    assert captions_of is not None and tokenizer is not None

    def add(batch: Batch, places: np.ndarray) -> Batch:
        found = captions_of(batch["id"][batch["id"] >= 0].tolist())
        read = (next(found) if i >= 0 else () for i in batch["id"])
        usable = (_usable(captions, tokenizer.clean, tokenizer.specials)[0] for captions in read)
        chosen = map(functools.partial(_choose, seed), usable, places.tolist())
        ids = [tokenizer.ids_of(text) for text in chosen]
        mask = np.array([bool(row) for row in ids], np.float32)
        return {**batch, "text": tokenizer.rows(ids), "text_mask": mask}

    ahead: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for places, batch in zip(positions, batches, strict=False):
            ahead.append(thread.submit(add, batch, places))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _choose(seed: int, texts: Sequence[str], position: int) -> str:
    """One of `texts`, "" if there are none; a function of (seed, position)."""
    if len(texts) < 2:
        return next(iter(texts), "")
    return texts[np.random.Philox(key=[seed, position]).random_raw() % len(texts)]


def as_captions(value: Any) -> list[str | bytes]:
    """The captions in a cell of a table or in a value of JSON: text, or lists of text, or none."""
    if isinstance(value, list | tuple | np.ndarray):
        return [caption for part in value for caption in as_captions(part)]
    return [value] if isinstance(value, str | bytes) else []


def as_text(caption: str | bytes) -> str:
    """A caption as text; raises UnicodeError if it is not UTF-8."""
    text = caption.decode("utf-8-sig") if isinstance(caption, bytes) else caption
    text.encode()  # JSON may hold half a character
    return text


def as_bytes(caption: str | bytes) -> bytes:
    """A caption as it is stored, half characters included."""
    return caption if isinstance(caption, bytes) else caption.encode("utf-8", "surrogatepass")


def find_captions(values: Mapping[str, Any]) -> list[str | bytes]:
    """The captions under the first of NAMES where `values` has some."""
    return next(filter(None, (as_captions(values.get(name)) for name in NAMES)), [])


def _usable(
    captions: Sequence[str | bytes], clean: Callable[[str], str], specials: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """The captions of an image that can be used, and the faults of the others."""
    texts, faults = list[str](), [] if captions else ["missing"]
    for caption in captions:
        try:
            text = as_text(caption)
        except UnicodeError:
            faults.append("not UTF-8")
            continue
        if any(token in text for token in specials):
            faults.append("with a special token")
        elif not clean(text).strip():
            faults.append("empty")
        else:
            texts.append(text.strip())
    return texts, faults


def usable_of(source: Source, tokenizer: Tokenizer) -> dict[int, list[str]]:
    """{record: its captions that can be used} of all records that have some."""
    rows = _sample(source, source.num_examples)
    texts = {i: _usable(found, tokenizer.clean, tokenizer.specials)[0] for i, found in rows}
    return {i: found for i, found in texts.items() if found}


def _sample(source: Source, number: int) -> Iterator[tuple[int, Sequence[str | bytes]]]:
    """(record, its captions) of at most `number` records, evenly spaced."""
    records = spread(number, source.num_examples).tolist()
    assert source.captions is not None
    return zip(records, source.captions(records), strict=True)


def one_by_one(
    captions_of: Callable[[int], Sequence[str | bytes]],
) -> Callable[[Sequence[int]], Iterator[Sequence[str | bytes]]]:
    """`Source.captions` by a function of one record, which threads call ahead."""
    return lambda records: _readers().map(captions_of, records)


@functools.cache
def _readers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_READERS)
