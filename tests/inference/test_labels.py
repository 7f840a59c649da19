"""Pictures classified by words."""

import functools
import json

import numpy as np
import pytest
from pairs import clip, siglip
from PIL import Image

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.data.words import PROMPTS, names_in_words, read_prompts
from vit_jax.inference.labels import with_labels
from vit_jax.main import main
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

LABELS = ("a cat", "a dog", "nothing")


@pytest.fixture(scope="module")
def sources(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return {"clip": clip(golden, folder / "clip"), "siglip": siglip(golden, folder / "siglip")}


@pytest.fixture
def picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", [pytest.param("clip", marks=pytest.mark.slow), "siglip"])
def test_probabilities_by_hand(sources, picture, kind):
    pretrained = read_pretrained(sources[kind])
    prompts = ("a photo of {}", "{}!")
    how = {"labels": LABELS, "prompts": prompts}
    found = vit_jax.predict(picture, pretrained, output="probabilities", **how)[0]
    side = pretrained.read_text_side()
    tokenize = side.read_tokenizer()
    classes = []
    for label in LABELS:
        ids = tokenize([prompt.replace("{}", label) for prompt in prompts])
        texts = unit(np.asarray(side.matcher.apply(side.variables, ids, method="text_features")))
        classes.append(unit(texts.mean(axis=0)))
    features = vit_jax.predict(picture, pretrained, output="features")
    images = side.matcher.apply(side.variables, features, method="image_features")
    logits = np.exp(side.params["logit_scale"]) * unit(np.asarray(images)) @ np.stack(classes).T
    if kind == "clip":
        expected = np.exp(logits[0]) / np.exp(logits[0]).sum()
    else:
        expected = 1 / (1 + np.exp(-logits[0] - side.params["logit_bias"]))
    assert np.allclose(found, expected, atol=1e-5)
    predictor = vit_jax.load_predictor(pretrained, **how)
    rows = predictor(picture, top=3)[0]["classes"]
    assert [row["name"] for row in rows] == [LABELS[i] for i in np.argsort(-expected)]
    assert np.allclose([row["probability"] for row in rows], np.sort(expected)[::-1], atol=1e-5)
    dense = predictor(picture, output="dense")
    assert np.allclose(dense, vit_jax.predict(picture, pretrained, output="dense"), atol=1e-6)


@pytest.mark.slow
def test_one_predictor_takes_other_labels(sources, picture):
    predictor = vit_jax.load_predictor(sources["siglip"], LABELS)
    assert vit_jax.predict(picture, predictor) == predictor(picture)
    how = {"labels": ("a", "b"), "output": "probabilities"}
    again = predictor(picture, **how)
    assert again.shape == (1, 2)
    assert np.allclose(again, vit_jax.predict(picture, sources["siglip"], **how), atol=1e-6)
    wide = vit_jax.predict(picture, sources["siglip"], image_size=(48, 80), **how)
    assert not np.allclose(again, wide, atol=1e-6)


def run(capsys, *words, code=0):
    assert main(["predict", "--batch_size=8", *map(str, words)]) == code
    return capsys.readouterr()


def test_the_command(sources, picture, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a photo of {}\n\n{}!\n")
    words = [f"--init_from={sources['clip']}", '--labels=a cat, "a dog, asleep",nothing',
             f"--prompts={tmp_path / 'prompts.txt'}", "--format=json", picture]  # fmt: skip
    row = json.loads(run(capsys, *words).out)
    labels = ("a cat", "a dog, asleep", "nothing")
    assert {one["name"] for one in row["classes"]} == {*labels}
    expected = vit_jax.predict(
        picture, sources["clip"], labels=labels, prompts=("a photo of {}", "{}!")
    )
    assert row["classes"] == expected[0]["classes"]


def test_a_model_needs_its_own_tokenizer(golden, sources, tmp_path):
    pretrained = read_pretrained(golden / "hf_clip_pair")
    with pytest.raises(
        InputError, match=r"hf_clip_pair: has no tokenizer, spiece.model or tokenizer"
    ):
        with_labels(pretrained, LABELS)
    read_tokenizer = read_pretrained(sources["clip"]).read_text_side().read_tokenizer
    side = pretrained.read_text_side()._replace(read_tokenizer=read_tokenizer)
    with pytest.raises(InputError, match="gives the token 928, and the text tower knows 90"):
        with_labels(pretrained._replace(read_text_side=lambda: side), LABELS, ["{}"])


def test_prompts(sources):
    assert read_prompts("") == read_prompts(None) == PROMPTS == read_prompts(PROMPTS)
    with pytest.raises(InputError, match="prompts: has 'a photo'; needs lines such as 'a photo"):
        read_prompts(["{}", "a photo"])
    with pytest.raises(InputError, match="prompts: is empty; needs lines"):
        read_prompts([])
    assert read_prompts("a photo of {}") == ("a photo of {}",)
    with pytest.raises(InputError, match="labels='a cat': needs a list of texts"):
        vit_jax.load_predictor("no such model", "a cat")  # before it is read
    for use in (vit_jax.load_predictor, functools.partial(vit_jax.predict, [])):
        with pytest.raises(InputError, match="prompts: needs labels, such as"):
            use(sources["clip"], prompts=["{}"])


def test_names_of_classes_in_words():
    found = names_in_words(["ant", "golden_retriever", "Emu, big bird"], "split")
    assert found == [["an ant"], ["a golden retriever"], ["an Emu", "a big bird"]]
    found = names_in_words(["n01443537", "n02007558"], "split")
    assert found == [["a goldfish", "a Carassius auratus"], ["a flamingo"]]
