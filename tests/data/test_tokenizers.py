"""Tokenizers of image-text models against the token ids of their libraries."""

import json
import shutil
import string
from functools import partial

import numpy as np
import pytest

from vit_jax.base.errors import InputError
from vit_jax.data import tokenizers
from vit_jax.data.tokenizers import TokenizerFiles, canonical, clean_as_open_clip


@pytest.fixture
def copied(golden, tmp_path):
    """(name of a golden, changes of its tokenizer_config.json) -> a folder."""

    def copy(name, **stated):
        folder = shutil.copytree(golden / name, tmp_path / name)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | stated))
        return folder

    return copy


def test_clip_as_of_hugging_face(golden):
    with np.load(golden / "tokenizer_clip/io.npz") as io:
        tokenizer = TokenizerFiles(golden / "tokenizer_clip", 77).read()
        assert np.array_equal(tokenizer(io["texts"].tolist()), io["input_ids"])


def test_clip_as_of_open_clip(golden):
    clean = partial(clean_as_open_clip, kind="lower")
    files = TokenizerFiles(golden / "tokenizer_clip", 77, clean, pad=0, reads_specials=False)
    with np.load(golden / "tokenizer_clip/io.npz") as io:
        assert np.array_equal(files.read()(io["texts"].tolist()), io["input_ids_open_clip"])
        assert (io["input_ids_open_clip"] != io["input_ids"]).any()


def test_siglip_as_of_hugging_face(golden):
    with np.load(golden / "tokenizer_siglip/io.npz") as io:
        texts = io["texts"].tolist()
        assert [canonical(text) for text in texts] == [*io["canonical"]]
        tokenizer = TokenizerFiles(golden / "tokenizer_siglip", 64).read()
        assert "</s>" in texts[-1]  # is refused
        assert np.array_equal(tokenizer(texts[:-1]), io["input_ids"][:-1])


def test_siglip_as_of_big_vision(golden, copied):
    with np.load(golden / "tokenizer_siglip/io.npz") as io:
        texts = io["texts"].tolist()
        cleaned = [canonical(text.replace("_", " ")) for text in texts]
        assert cleaned == [*io["canonical_bv"]]
        small = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # in its training
        for pad, name in ((1, "pad1"), (0, "pad0")):
            files = TokenizerFiles(
                golden / "tokenizer_siglip", 64, lambda text: text.translate(small), pad
            )
            assert np.array_equal(files.read()(texts), io[f"lower_sticky_{name}"])


def test_siglip_as_of_open_clip():
    text = "It&amp;#39;s snake_case — “OK”, ﬁre!"
    assert clean_as_open_clip(text, "canonicalize") == "its snake case — ok fire"
    assert clean_as_open_clip(text, "lower") == 'it\'s snake_case — "ok", fire!'
    assert clean_as_open_clip(text, "whitespace") == 'It\'s snake_case — "OK", fire!'


def test_files_say_what_stands_around_a_text(copied):
    folder = copied("tokenizer_clip", padding_side="left", add_bos_token=False, pad_token="!")
    ids = TokenizerFiles(folder, 8).read()(["a cat", ""])
    assert ids.tolist() == [[0, 0, 0, 0, 0, 320, *ids[0, 6:7], 928], [0] * 7 + [928]]


def test_siglip_2_adds_an_end_that_only_its_config_states(copied):
    stated = {"tokenizer_class": "GemmaTokenizerFast", "pad_token": "!", "add_eos_token": True}
    folder = copied("tokenizer_clip", **stated)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text()) | {"post_processor": None}
    content["normalizer"] = None  # so that our own cleaning is seen
    file.write_text(json.dumps(content))
    tokenizer = TokenizerFiles(folder, 6).read()
    cat = tokenizer.encode("a cat")
    assert tokenizer(["A CAT"]).tolist() == [[*cat, 928, *[0] * (5 - len(cat))]]


def test_null_is_as_absent(copied):
    folder = copied("tokenizer_siglip", bos_token=None, tokenizer_class=None)
    assert TokenizerFiles(folder, 4).read().clean("Cat") == "cat"


def test_long_and_empty_texts_are_found(golden):
    tokenizer = TokenizerFiles(golden / "tokenizer_siglip", 5).read()
    assert tokenizer.room == 4
    assert tokenizer.find_fault("a photo of a") == ""
    assert "</s> has another meaning" in tokenizer.find_fault("two</s>words")
    assert "nothing is left" in tokenizer.find_fault("...!?")
    assert "the model takes 4; shorten it" in tokenizer.find_fault("a photo of a cat in the snow")


def fail(name):
    raise ImportError(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "spiece.model").unlink(),
         "has no tokenizer, spiece.model or tokenizer.json; copy the model's into it"),
        (lambda folder: (folder / "spiece.model").write_bytes(b"no model"),
         "its tokenizer cannot be read .*; fetch its files again"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(),
         "has no special_tokens_map.json or tokenizer_config.json, which states the pad_token"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
         "states no pad_token that spiece.model has; add it"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"pad_token": 1}'),
         "its tokenizer cannot be read .*; fetch its files again"),
        (lambda folder: (folder / "tokenizer_config.json").write_text(
            '{"pad_token": "</s>", "add_bos_token": true, "bos_token": null}'),
         "states no bos_token that spiece.model has; add it"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"),
         "its tokenizer cannot be read .*; fetch its files again"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(copied, change, says):
    folder = copied("tokenizer_siglip")
    change(folder)
    with pytest.raises(InputError, match=says):
        TokenizerFiles(folder, 64).read()


@pytest.mark.parametrize("name", ["tokenizer_clip", "tokenizer_siglip"])
def test_a_missing_package_is_named(golden, name, monkeypatch):
    monkeypatch.setattr(tokenizers.importlib, "import_module", fail)
    package = {"tokenizer_clip": "tokenizers", "tokenizer_siglip": "sentencepiece"}[name]
    with pytest.raises(InputError, match=rf"{package} is not installed.*pip install -e '.\[text\]"):
        TokenizerFiles(golden / name, 64).read()
