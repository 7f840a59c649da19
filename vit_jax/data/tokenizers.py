"""Tokenizers of image-text models, by the files beside their weights.

The files give the ids of padding, start, end and unknown tokens. Texts are cleaned first, as the
tokenizer's library does.
"""

import html
import importlib
import io
import itertools
import json
import os
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError

_SENTENCES, _OTHERS = "spiece.model", "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_STATED = ("special_tokens_map.json", _CONFIG)
FILES = (_SENTENCES, _OTHERS, *_STATED)

SIZE = 32_000  # token ids of a tokenizer that a run trains, at most; as SigLIP's
_END_ID = 1  # of these tokenizers, and their padding, as SigLIP's

_PUNCTUATION = str.maketrans("", "", string.punctuation)


class TextFacts(NamedTuple):
    """The facts of a tokenizer that a text tower needs.

    vocabulary: number of token ids.
    length: ids of a text.
    end_id: id of the token behind each text; None: there is none.
    pad_id, pads_left: of padding: its id, and whether it comes first.
    """

    vocabulary: int
    length: int
    end_id: int | None = _END_ID
    pad_id: int = _END_ID
    pads_left: bool = False


class Tokenizer(NamedTuple):
    """Texts -> token ids.

    encode: a cleaned text -> its ids, without start, end and padding.
    clean: a text -> the text to encode.
    length: ids of a text, with start, end and padding.
    start, end: ids before and after the ids of each text.
    pad: the id of padding.
    vocabulary: number of ids that it may give.
    pads_left: whether padding comes first.
    specials: special tokens, such as </s>, that a text must not hold.
    decode: ids -> their text.
    """

    encode: Callable[[str], list[int]]
    clean: Callable[[str], str]
    length: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    pad: int
    vocabulary: int
    pads_left: bool = False
    specials: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] = str

    @property
    def facts(self) -> TextFacts:
        """The facts that a text tower needs."""
        end_id = next(iter(self.end), None)
        return TextFacts(self.vocabulary, self.length, end_id, self.pad, self.pads_left)

    @property
    def room(self) -> int:
        """The number of ids of a text between start and end."""
        return self.length - len(self.start) - len(self.end)

    def ids_of(self, text: str) -> list[int]:
        """The ids of a text, of any number, without start and end."""
        return self.encode(self.clean(text))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """The ids of the texts, int32 (K, length); long texts are cut before the end."""
        return self.rows([*map(self.ids_of, texts)])

    def rows(self, ids_of_texts: Sequence[Sequence[int]]) -> np.ndarray:
        """The rows, int32 (K, length), of texts with known ids."""
        rows = np.full((len(ids_of_texts), self.length), self.pad, np.int32)
        for row, own in zip(rows, ids_of_texts, strict=True):
            ids = [*self.start, *own[: self.room], *self.end]
            row[slice(-len(ids), None) if self.pads_left else slice(len(ids))] = ids
        return rows

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a row of ids, which ends before the first end token."""
        own = list(itertools.takewhile(lambda i: i not in self.end, map(int, ids)))
        return self.decode([i for i in own if i not in self.start]).strip()

    def find_fault(self, text: str) -> str:
        """The reason why a text cannot be used, or ""."""
        if special := next((token for token in self.specials if token in text), ""):
            return f"{special} has another meaning to the model; leave it out"
        number = len(self.ids_of(text))
        if number == 0:
            return "nothing is left of it for the model's tokenizer; write it in words"
        long = f"has {number} tokens, and the model takes {self.room}; shorten it"
        return long if number > self.room else ""


class Opened(NamedTuple):
    """The file of a tokenizer's tokens.

    encode, decode: text -> ids, ids -> text.
    id_of: piece -> its id.
    around: ids before and after a text.
    size: the number of ids.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    id_of: Callable[[str], int | None]
    around: dict[str, tuple]
    size: int


class TokenizerFiles(NamedTuple):
    """The place of a model's tokenizer, and how its library uses it.

    folder: of the FILES.
    length: positions of a text in the model.
    clean: of texts; None: as Hugging Face does for the class that the files state.
    pad: the id of padding, where the model's library chooses it; None: the files do.
    reads_specials: whether texts may hold special tokens, such as <|endoftext|>.
    """

    folder: epath.Path
    length: int
    clean: Callable[[str], str] | None = None
    pad: int | None = None
    reads_specials: bool = True

    @property
    def paths(self) -> list[epath.Path]:
        """The files that are there."""
        return [path for name in FILES if (path := self.folder / name).exists()]

    @property
    def contents(self) -> dict[str, bytes]:
        """{name: content} of the files."""
        return {path.name: path.read_bytes() for path in self.paths}

    def read(self, contents: Mapping[str, bytes] | None = None) -> Tokenizer:
        """The tokenizer; `contents`: of files that are not written yet.

        Raises:
          InputError: files or a package are missing, or the files cannot be read.
        """
        contents = self.contents if contents is None else contents
        file, stated, opened, texts = self._open(contents)
        around = opened.around
        ids = {name: opened.id_of(text) for name, text in texts.items()}
        for name in around:
            if (adds := stated.get(f"add_{name}_token")) is not None:
                around[name] = (ids[name],) * adds
        pad = ids["pad"] if self.pad is None else self.pad
        used = {"pad": (pad,), **around}
        missing = ", ".join(f"{name}_token" for name in used if None in used[name])
        if pad is None or missing:
            what = f"states no {missing} that {file} has; add it"
            if not {*_STATED} & {*contents}:
                what = f"has no {' or '.join(_STATED)}, which states the {missing}"
                what += "; copy the model's into it"
            raise InputError(f"{self.folder}: {what}")
        kind = str(stated.get("tokenizer_class")).removesuffix("Fast")
        clean = self.clean or _CLEANS.get(kind, str.lower)
        left = stated.get("padding_side") == "left"
        specials, (start, end) = tuple(filter(None, texts.values())), around.values()
        ids_around = self.length, start, end, pad, opened.size
        return Tokenizer(opened.encode, clean, *ids_around, left, specials, opened.decode)

    def _open(
        self, contents: Mapping[str, bytes]
    ) -> tuple[str, dict[str, Any], Opened, dict[str, str]]:
        """The file of the tokens, the facts in the others, its reader, and the special tokens."""
        opens = {_SENTENCES: _open_sentences, _OTHERS: _open_others}
        file = next((name for name in opens if name in contents), None)
        if file is None:
            what = f"has no tokenizer, {_SENTENCES} or {_OTHERS}"
            raise InputError(f"{self.folder}: {what}; copy the model's into it")
        stated: dict[str, Any] = {}
        try:
            for name in _STATED:
                stated |= json.loads(contents.get(name, "{}"))
            opened = opens[file](contents[file], self.reads_specials)
            names = ("pad", *opened.around)
            return file, stated, opened, {n: _text(stated.get(f"{n}_token") or "") for n in names}
        except InputError:
            raise
        except Exception as e:  # whatever the libraries raise
            what = f"its tokenizer cannot be read ({e})"
            raise InputError(f"{self.folder}: {what}; fetch its files again") from None


def find_tokenizer(name: str, length: int) -> TokenizerFiles:
    """The tokenizer `name`, a value of `data.tokenizer`, for texts of `length` ids.

    Files of `hf:OWNER/NAME`, with `@REVISION` if it is not the newest, are fetched into the cache
    of huggingface_hub.

    Raises:
      InputError: there is no such repository, or it cannot be reached.
    """
    if not name.startswith("hf:"):
        path = epath.Path(os.path.expanduser(name))
        return TokenizerFiles(path.parent if path.name in FILES else path, length)
    import huggingface_hub  # here, as importing it takes long

    from vit_jax.base import hub

    hub.be_quiet()
    repository, _, revision = name.removeprefix("hf:").partition("@")
    fetch = partial(huggingface_hub.snapshot_download, allow_patterns=[*FILES])
    try:
        return TokenizerFiles(epath.Path(fetch(repository, revision=revision or None)), length)
    except hub.ERRORS as e:
        fault = hub.describe(e, repository, "its tokenizer", revision or None)
        raise InputError(f"data.tokenizer={name!r}: {fault}") from None


def train_tokenizer(texts: Iterable[str], size: int = SIZE) -> dict[str, bytes]:
    """{name: content} of the files of a tokenizer trained on `texts`; the same for equal texts.

    It has byte pairs of sentencepiece, at most `size` token ids: SigLIP's 32,000 by default (Zhai
    et al. 2023, arXiv:2303.15343, section 4). It has fewer if every word is one token before that.
    It cleans texts, ends and pads them as SigLIP's does, which Hugging Face reads.

    Raises:
      InputError: sentencepiece is not installed, or cannot train: there are no texts.
    """
    model, package = io.BytesIO(), _package("sentencepiece")
    try:
        package.SentencePieceTrainer.train(
            sentence_iterator=map(canonical, texts), model_writer=model, vocab_size=size,
            model_type="bpe", hard_vocab_limit=False, num_threads=1, minloglevel=2,
            pad_id=0, eos_id=_END_ID, unk_id=2, bos_id=-1,
        )  # fmt: skip
    except RuntimeError as e:
        raise InputError(
            f"data.tokenizer=None: none can be trained on the captions ({e})"
        ) from None
    stated: dict[str, Any] = {"tokenizer_class": "SiglipTokenizer", "unk_token": "<unk>"}
    stated |= {"pad_token": "</s>", "eos_token": "</s>", "model_input_names": ["input_ids"]}
    return {_SENTENCES: model.getvalue(), _CONFIG: json.dumps(stated).encode()}


def for_transformers(
    files: Mapping[str, bytes], length: int, *, masks_padding: bool
) -> dict[str, bytes]:
    """A tokenizer's {name: content} by which transformers pads texts to `length` ids.

    `masks_padding`: whether a mask may hide the padding from the model; SigLIP attends to it.
    """
    stated = json.loads(files.get(_CONFIG, "{}"))
    own: dict[str, Any] = {"model_max_length": length}
    own |= {} if masks_padding else {"model_input_names": ["input_ids"]}
    if own.items() <= stated.items():
        return {**files}
    return {**files, _CONFIG: json.dumps(stated | own, indent=2, sort_keys=True).encode()}


def are_equal(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Whether the files define one tokenizer; how long transformers pads does not count."""
    try:
        found = [for_transformers(files, 0, masks_padding=False) for files in (one, other)]
    except ValueError:  # a broken file
        return one == other
    return found[0] == found[1]


def _open_sentences(content: bytes, reads_specials: bool) -> Opened:
    """A model of sentencepiece."""
    model = _package("sentencepiece").SentencePieceProcessor(model_proto=content)
    known = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    around = {"bos": (), "eos": (model.eos_id(),)}
    return Opened(model.encode, model.decode, known.get, around, len(known))


def _open_others(content: bytes, reads_specials: bool) -> Opened:
    """A file of `tokenizers`."""
    model = _package("tokenizers").Tokenizer.from_str(content.decode())
    model.no_padding()
    model.no_truncation()
    probe = model.encode("a")
    first = probe.special_tokens_mask.index(0)
    last = first + probe.special_tokens_mask.count(0)
    around = {"bos": (*probe.ids[:first],), "eos": (*probe.ids[last:],)}
    model.encode_special_tokens = not reads_specials

    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False).ids

    size = max(model.get_vocab().values()) + 1
    return Opened(encode, model.decode, model.token_to_id, around, size)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        what = f"{name} is not installed, which tokenizers of image-text models need"
        raise InputError(f"{what}; run pip install -e '.[text]'") from None


def _text(token: str | Mapping[str, Any]) -> str:
    """A special token, as the JSON files of Hugging Face have it."""
    return token if isinstance(token, str) else token["content"]


def canonical(text: str) -> str:
    """`text` in lower case without ASCII punctuation, words apart by one space: SigLIP's."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def clean_as_open_clip(text: str, kind: str) -> str:
    """`text` as open_clip cleans it; `kind`: its "canonicalize", "lower" or "whitespace".

    Raises:
      InputError: the package ftfy is missing.
    """
    text = _package("ftfy").fix_text(text)
    text = " ".join(html.unescape(html.unescape(text)).split())
    if kind == "canonicalize":
        return canonical(text.replace("_", " "))
    return text.lower() if kind == "lower" else text


_CLEANS: dict[str, Callable[[str], str]] = {"SiglipTokenizer": canonical, "CLIPTokenizer": str}
