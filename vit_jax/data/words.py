"""Classes in words: the texts that describe each class to an image-text model."""

import importlib.resources
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.data.tokenizers import Tokenizer

# {} stands for a class with its article.
PROMPTS = (
    "{}", "a photo of {}", "a close-up photo of {}", "a photo of {} from far away",
    "a picture that shows {}", "a dark photo of {}", "a drawing of {}",
)  # fmt: skip


def read_prompts(given: str | Sequence[str] | None, key: str = "prompts") -> tuple[str, ...]:
    """The prompts in a list, a text with {}, or a text file, one a line; PROMPTS for None or "".

    Raises:
      InputError: the file cannot be read, or a prompt has no {}; names `key`.
    """
    if given is None or given == "":
        return PROMPTS
    if isinstance(given, str) and "{}" in given:
        given = [given]
    if isinstance(given, str):
        key = f"{key}={given!r}"
        try:
            given = epath.Path(given).read_text().removeprefix("\ufeff").split("\n")
        except (OSError, ValueError) as e:
            raise InputError(f"{key}: cannot be read ({e})") from None
    prompts = tuple(line.strip() for line in given if line.strip())
    wrong = next((prompt for prompt in prompts if "{}" not in prompt), None)
    if wrong or not prompts:
        found = f"has {wrong!r}" if wrong else "is empty"
        raise InputError(f"{key}: {found}; needs lines such as 'a photo of {{}}'")
    return prompts


def check_labels(labels: Sequence[str], key: str = "labels") -> tuple[str, ...]:
    """The labels without space around them.

    Raises:
      InputError: there are fewer than two, or one is empty or there twice; names `key`.
    """
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise InputError(f"{key}={labels!r}: needs a list of texts, as ['a cat', 'a dog']")
    found, faults = tuple(label.strip() for label in labels), Faults()
    faults.need("" not in found, f"{key}: one is empty; leave it out, or write what it shows")
    faults.need(
        len(found) > 1 or "" in found,
        f"{key}: needs two or more, to choose among; add another, such as 'something else'",
    )
    twice = [label for i, label in enumerate(found) if label and label in found[:i]]
    faults.need(not twice, f"{key}: {', '.join(map(repr, twice))}: is there twice; leave one out")
    collect_faults(faults)
    return found


def names_in_words(names: Sequence[str], key: str) -> list[list[str]]:
    """Words for each class of a data set, with an article; a class may have several.

    ImageNet's synsets, such as n01440764, have their lemmas in WordNet.

    Raises:
      InputError: a class has no words; names `key`.
    """
    if all(re.fullmatch(r"n\d{8}", name) for name in names):
        lemmas = imagenet_names()
        names = [lemmas.get(name, name) for name in names]
    found = [[_with_article(w) for w in name.split(", ") if w.strip(", _")] for name in names]
    wordless = [name for name, words in zip(names, found, strict=True) if not words]
    collect_faults([f"{key}: class {name!r} has no words; rename it" for name in wordless])
    return found


def _with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name.replace('_', ' ')}"


def imagenet_names() -> dict[str, str]:
    """{synset: its lemmas in WordNet} for ImageNet's 1,000 classes, in their order."""
    from tensorflow_datasets.datasets.siscore.labels import IMAGENET_LABELS_LIST

    folder = importlib.resources.files("tensorflow_datasets") / "datasets/imagenet2012"
    synsets = (folder / "labels.txt").read_text().split()
    return dict(zip(synsets, IMAGENET_LABELS_LIST, strict=True))


def encode(
    tokenizer: Tokenizer, classes: Sequence[Sequence[str]], prompts: Sequence[str], key: str
) -> list[np.ndarray]:
    """The token ids of the texts of each class, int32 (n, T): each prompt with each of its words.

    Raises:
      InputError: for each class, the first text that is empty or too long; names `key` for a word,
        "prompts" for a word in a prompt.
    """
    faults, found = Faults(), []
    for words in classes:
        texts = [prompt.replace("{}", word) for word in words for prompt in prompts]
        for at, text in (*((key, word) for word in words), *(("prompts", text) for text in texts)):
            if why := tokenizer.find_fault(text):
                faults.append(f"{at}: {text!r}: {why}")
                break
        found.append(tokenizer(texts))
    collect_faults(faults)
    return found
