"""Tokenizers of image-text models, by the files beside their weights.

The files give the ids of padding, start, end and unknown tokens. Texts are cleaned first, as the
tokenizer's library does.
"""

import html
import importlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError

_SENTENCES, _OTHERS = "spiece.model", "tokenizer.json"
_STATED = ("special_tokens_map.json", "tokenizer_config.json")
FILES = (_SENTENCES, _OTHERS, *_STATED)

_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Tokenizer(NamedTuple):
    """Texts -> token ids.

    encode: a cleaned text -> its ids, without start, end and padding.
    clean: a text -> the text to encode.
    length: ids of a text, with start, end and padding.
    start, end: ids before and after the ids of each text.
    pad: the id of padding.
    pads_left: whether padding comes first.
    specials: special tokens, such as </s>, that a text must not hold.
    """

    encode: Callable[[str], list[int]]
    clean: Callable[[str], str]
    length: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    pad: int
    pads_left: bool = False
    specials: tuple[str, ...] = ()

    @property
    def room(self) -> int:
        """The number of ids of a text between start and end."""
        return self.length - len(self.start) - len(self.end)

    def ids_of(self, text: str) -> list[int]:
        """The ids of a text, of any number, without start and end."""
        return self.encode(self.clean(text))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """The ids of the texts, int32 (K, length); long texts are cut before the end."""
        rows = np.full((len(texts), self.length), self.pad, np.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = [*self.start, *self.ids_of(text)[: self.room], *self.end]
            row[slice(-len(ids), None) if self.pads_left else slice(len(ids))] = ids
        return rows

    def find_fault(self, text: str) -> str:
        """The reason why a text cannot be used, or ""."""
        if special := next((token for token in self.specials if token in text), ""):
            return f"{special} has another meaning to the model; leave it out"
        number = len(self.ids_of(text))
        if number == 0:
            return "nothing is left of it for the model's tokenizer; write it in words"
        long = f"has {number} tokens, and the model takes {self.room}; shorten it"
        return long if number > self.room else ""


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

    def read(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          InputError: files or a package are missing, or the files cannot be read.
        """
        opens = {_SENTENCES: _open_sentences, _OTHERS: _open_others}
        path = next((path for path in self.paths if path.name in opens), None)
        if path is None:
            what = f"has no tokenizer, {_SENTENCES} or {_OTHERS}"
            raise InputError(f"{self.folder}: {what}; copy the model's into it")
        stated: dict[str, Any] = {}
        try:
            for file in (file for file in self.paths if file.name in _STATED):
                stated |= json.loads(file.read_text())
            encode, id_of, around = opens[path.name](path, self.reads_specials)
            texts = {n: _text(stated.get(f"{n}_token") or "") for n in ("pad", *around)}
            kind = (stated.get("tokenizer_class") or "").removesuffix("Fast")
        except InputError:
            raise
        except Exception as e:  # whatever the libraries raise
            what = f"its tokenizer cannot be read ({e})"
            raise InputError(f"{self.folder}: {what}; fetch its files again") from None
        ids = {name: id_of(text) for name, text in texts.items()}
        for name in around:
            if (adds := stated.get(f"add_{name}_token")) is not None:
                around[name] = (ids[name],) * adds
        pad = ids["pad"] if self.pad is None else self.pad
        used = {"pad": (pad,), **around}
        missing = ", ".join(f"{name}_token" for name in used if None in used[name])
        if (pad is None or missing) and not any(file.name in _STATED for file in self.paths):
            what = f"has no {' or '.join(_STATED)}, which states the {missing}"
            raise InputError(f"{self.folder}: {what}; copy the model's into it")
        if pad is None or missing:
            raise InputError(f"{self.folder}: states no {missing} that {path.name} has; add it")
        clean, left = (
            self.clean or _CLEANS.get(kind, str.lower),
            stated.get("padding_side") == "left",
        )
        specials, (start, end) = tuple(filter(None, texts.values())), around.values()
        return Tokenizer(encode, clean, self.length, start, end, pad, left, specials)


Opened = tuple[Callable[[str], list[int]], Callable[[str], int | None], dict[str, tuple]]


def _open_sentences(path: epath.Path, reads_specials: bool) -> Opened:
    """A model of sentencepiece: (text -> ids, piece -> its id, ids before and after a text)."""
    model = _package("sentencepiece").SentencePieceProcessor(model_proto=path.read_bytes())
    known = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    return model.encode, known.get, {"bos": (), "eos": (model.eos_id(),)}


def _open_others(path: epath.Path, reads_specials: bool) -> Opened:
    """The same of a file of `tokenizers`."""
    model = _package("tokenizers").Tokenizer.from_str(path.read_text())
    model.no_padding()
    model.no_truncation()
    probe = model.encode("a")
    first = probe.special_tokens_mask.index(0)
    last = first + probe.special_tokens_mask.count(0)
    around = {"bos": (*probe.ids[:first],), "eos": (*probe.ids[last:],)}
    model.encode_special_tokens = not reads_specials

    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False).ids

    return encode, model.token_to_id, around


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
